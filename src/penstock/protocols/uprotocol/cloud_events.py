"""How is a message a CloudEvent, in JSON and in protobuf? (docs/specs/uprotocol.md 7)."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, Final

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.codes import UCode, UMessageType, UPayloadFormat, UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage, InvalidUUID, InvalidUUri
from penstock.protocols.uprotocol.message import UAttributes, UMessage
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri

__all__ = [
    "JSON_TYPE",
    "PROTOBUF_TYPE",
    "from_json",
    "from_protobuf",
    "to_json",
    "to_protobuf",
]

JSON_TYPE: Final = "application/cloudevents+json"
PROTOBUF_TYPE: Final = "application/cloudevents+protobuf"

_SPEC_VERSION = "1.0"
_LARGEST = 0x7FFFFFFF
_INTEGERS: Final = frozenset({"ttl", "plevel", "commstatus", "pformat"})
_AS_TEXT: Final = frozenset({UPayloadFormat.JSON, UPayloadFormat.TEXT})
_AS_PROTO: Final = frozenset({UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY, UPayloadFormat.PROTOBUF})
#: The type of a payload that is an Any.
_ANY: Final = "type.googleapis.com/google.protobuf.Any"


# --- the attributes, which both formats share -------------------------------------------------


def _to_values(attributes: UAttributes) -> dict[str, Any]:
    """Encode the attributes of a CloudEvent, in the order of the mapping's table."""
    if attributes.id is None:
        raise InvalidMessage("there is no id", rules=["id"], field="id")
    if not attributes.type.ce_name:
        raise InvalidMessage("the type is none of the four", rules=["type"], field="type")
    if attributes.source is None:
        raise InvalidMessage("there is no source", field="source")
    if attributes.payload_format == UPayloadFormat.SHM:
        raise InvalidMessage("an address of shared memory has no CloudEvent", field="pformat")
    if attributes.priority and not attributes.priority.is_known:
        raise InvalidMessage(f"priority {int(attributes.priority)} has no name", field="priority")
    found = {
        "specversion": _SPEC_VERSION,
        "id": str(attributes.id),
        "source": str(attributes.source),
        "type": attributes.type.ce_name,
        "sink": None if attributes.sink is None else str(attributes.sink),
        "priority": attributes.priority.name if attributes.priority else None,
        "ttl": attributes.ttl,
        "token": attributes.token,
        "plevel": attributes.permission_level,
        "reqid": None if attributes.reqid is None else str(attributes.reqid),
        "commstatus": int(attributes.commstatus) if attributes.commstatus else None,
        "traceparent": attributes.traceparent,
        "pformat": int(attributes.payload_format) or None,
    }
    for name in _INTEGERS:
        value = found[name]
        if isinstance(value, int) and value > _LARGEST:
            raise InvalidMessage(
                f"{name} = {value} does not fit a CloudEvent's integer", field=name
            )
    return {name: value for name, value in found.items() if value is not None}


def _from_values(values: dict[str, Any]) -> UAttributes:
    """Decode the attributes of a CloudEvent; ignore foreign extensions."""
    if values.get("specversion") != _SPEC_VERSION:
        raise InvalidMessage("the specversion is not 1.0", field="specversion")
    for name in ("id", "source", "type"):
        if name not in values:
            raise InvalidMessage(f"there is no {name}", field=name)
    found: dict[str, Any] = {}
    for name, (attribute, read) in _READERS.items():
        if name not in values:
            continue
        value = values[name]
        if name in _INTEGERS:
            fits = type(value) is int and 0 <= value <= _LARGEST
        else:
            fits = isinstance(value, str) and _is_unicode(value)
        if not fits:
            kind = "an integer of 0 to 2147483647" if name in _INTEGERS else "text"
            raise InvalidMessage(f"{name} is not {kind}", field=name)
        try:
            found[attribute] = read(value)
        except (InvalidUUID, InvalidUUri) as error:
            raise InvalidMessage(f"{name}: {error}", field=name) from error
    if found.get("payload_format") == UPayloadFormat.SHM:
        raise InvalidMessage("an address of shared memory has no CloudEvent", field="pformat")
    return UAttributes(**found)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_READERS: Final[dict[str, tuple[str, Any]]] = {
    "id": ("id", UUID7.parse),
    "type": ("type", UMessageType.from_ce_name),
    "source": ("source", UUri.parse),
    "sink": ("sink", UUri.parse),
    "priority": ("priority", UPriority.from_name),
    "ttl": ("ttl", int),
    "token": ("token", str),
    "plevel": ("permission_level", int),
    "reqid": ("reqid", UUID7.parse),
    "commstatus": ("commstatus", UCode),
    "traceparent": ("traceparent", str),
    "pformat": ("payload_format", UPayloadFormat),
}

# --- JSON -------------------------------------------------------------------------------------


def to_json(message: UMessage) -> dict[str, Any]:
    """Encode a CloudEvent as an object for `json.dumps`.

    A payload that is declared JSON or text but is not is sent as base64, without loss.

    :raises InvalidMessage: the message has no id, type or source, or a value has no mapping.
    """
    event = _to_values(message.attributes)
    payload, format = message.payload, message.attributes.payload_format
    if payload is None:
        return event
    if format in _AS_TEXT:
        try:
            text = payload.decode()
            event["data"] = _parse(text) if format == UPayloadFormat.JSON else text
        except (ValueError, RecursionError):
            pass
        else:
            return event
    event["data_base64"] = base64.b64encode(payload).decode()
    return event


def from_json(event: dict[str, Any] | str | bytes) -> UMessage:
    """Decode a CloudEvent in JSON, as text or as returned by `json.loads`.

    :raises InvalidMessage: it is not a CloudEvent, or not of uProtocol.
    """
    if isinstance(event, str | bytes):
        try:
            event = json.loads(event)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage("the CloudEvent is not JSON") from error
    if not isinstance(event, dict):
        raise InvalidMessage("the CloudEvent is not a JSON object")
    attributes = _from_values(event)
    if "data" in event and "data_base64" in event:
        raise InvalidMessage("there are both data and data_base64", field="data")
    if "data_base64" in event:
        return UMessage(attributes, _from_base64(event["data_base64"]))
    if "data" not in event:
        return UMessage(attributes)
    data = event["data"]
    if attributes.payload_format == UPayloadFormat.JSON:
        return UMessage(attributes, _dump(data))
    if not isinstance(data, str) or not _is_unicode(data):
        raise InvalidMessage("data is neither JSON by its pformat nor text", field="data")
    return UMessage(attributes, data.encode())


def _from_base64(data: Any) -> bytes:
    try:
        if isinstance(data, str):
            return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidMessage("data_base64 is not base64", field="data_base64") from error
    raise InvalidMessage("data_base64 is not text", field="data_base64")


def _parse(text: str) -> Any:
    value = json.loads(text, parse_constant=_refuse)
    _encoded([value])  # an infinite number or half a character passes the one and not the other
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _dump(value: Any) -> bytes:
    try:
        return _encoded(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage("data is not a value of JSON", field="data") from error


def _encoded(value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


# --- protobuf ---------------------------------------------------------------------------------


def to_protobuf(message: UMessage, *, dataschema: str = "") -> bytes:
    """Encode a CloudEvent in protobuf.

    A payload that is declared JSON or text but is not is sent as binary data, without loss.

    :param dataschema: the type URL of a payload that is a protobuf message.
    :raises InvalidMessage: the message has no id, type or source, or a value has no mapping.
    """
    values = _to_values(message.attributes)
    event = proto.CloudEvent(
        id=values.pop("id"),
        source=values.pop("source"),
        spec_version=values.pop("specversion"),
        type=values.pop("type"),
    )
    try:
        for name, value in values.items():
            kind = "integer" if name in _INTEGERS else "uri_ref" if name == "sink" else "string"
            setattr(event.attributes[name], f"ce_{kind}", value)
        if dataschema:
            event.attributes["dataschema"].ce_uri = dataschema
    except ValueError as error:
        raise InvalidMessage("an attribute is not text of Unicode") from error
    if message.payload is not None:
        _put_payload(event, message.payload, message.attributes.payload_format, dataschema)
    data: bytes = event.SerializeToString(deterministic=True)
    return data


def _put_payload(event: Any, payload: bytes, format: UPayloadFormat, dataschema: str) -> None:
    if format in _AS_TEXT:
        try:
            event.text_data = payload.decode()
        except UnicodeDecodeError:
            event.binary_data = payload
    elif format in _AS_PROTO:
        wrapped = format == UPayloadFormat.PROTOBUF_WRAPPED_IN_ANY
        event.proto_data.type_url = _ANY if wrapped else dataschema
        event.proto_data.value = payload
    else:
        event.binary_data = payload


def from_protobuf(data: bytes) -> UMessage:
    """Decode a CloudEvent in protobuf.

    :raises InvalidMessage: it does not decode, or is not of uProtocol.
    """
    try:
        event = proto.CloudEvent.FromString(data)
    except proto.UNDECODABLE as error:
        raise InvalidMessage("the CloudEvent does not decode") from error
    values: dict[str, Any] = {
        "specversion": event.spec_version,
        "id": event.id,
        "source": event.source,
        "type": event.type,
    }
    for name, value in event.attributes.items():
        kind = value.WhichOneof("attr")
        if name in _READERS and name not in values and kind is not None:
            values[name] = getattr(value, kind)
    attributes = _from_values(values)
    kind = event.WhichOneof("data")
    if kind is None:
        return UMessage(attributes)
    if kind == "binary_data":
        return UMessage(attributes, event.binary_data)
    if kind == "text_data":
        return UMessage(attributes, event.text_data.encode())
    if attributes.payload_format not in _AS_PROTO:
        raise InvalidMessage("proto_data, but the pformat is not of protobuf", field="proto_data")
    # An Any is the value of another one, whose type up-rust leaves out.
    is_value = event.proto_data.type_url in ("", _ANY)
    if attributes.payload_format == UPayloadFormat.PROTOBUF or is_value:
        return UMessage(attributes, event.proto_data.value)
    return UMessage(attributes, event.proto_data.SerializeToString(deterministic=True))
