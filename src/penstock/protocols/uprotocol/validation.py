"""Which rules does a message violate, and which filters may a listener have?

(docs/specs/uprotocol.md 3.2 and 4)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from penstock.protocols.uprotocol.codes import (
    UCode,
    UMessageType,
    UPayloadFormat,
    UPriority,
    UStatusError,
)
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.uuri import ANY_ENTITY, ANY_RESOURCE, ANY_VERSION, UUri

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.uprotocol.message import UAttributes

__all__ = [
    "RULES",
    "TOLERATED",
    "check",
    "check_filter",
    "is_filter",
    "is_streamer_sink",
    "is_traceparent",
    "matches",
    "validate",
]

#: Every rule by its name in `validate`, and its requirement.
RULES: Final = {
    "id": "there is an id, a UUID of version 7",
    "type": "the type is one of the four",
    "source-uuri": "the source is an address",
    "sink-uuri": "the sink is an address",
    "publish-source": "the source is a topic, resource 8000 to FFFE",
    "publish-sink": "no sink, or a streamer's: an authority, and wildcards in all other fields",
    "notification-source": "the source is a topic, resource 8000 to FFFE",
    "notification-sink": "the sink is an entity, resource 0",
    "request-source": "the source is an entity, resource 0",
    "request-sink": "the sink is a method, resource 1 to 7FFF",
    "request-priority": "the priority is CS4 or higher",
    "request-ttl": "the ttl is greater than 0",
    "response-source": "the source is a method, resource 1 to 7FFF",
    "response-sink": "the sink is an entity, resource 0",
    "response-priority": "the priority is CS4 or higher",
    "response-ttl": "the ttl is greater than 0",
    "response-reqid": "there is a reqid, a UUID of version 7",
    "source-wildcard": "no wildcard in the source",
    "sink-wildcard": "no wildcard in the sink",
    "traceparent": "empty, or a W3C traceparent",
    "payload-format-without-payload": "no payload format without a payload",
}
#: Rules that SDKs in use do not follow in what they send, and that nothing depends on.
TOLERATED: Final = frozenset({"response-ttl"})
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_FIRST_TOPIC = 0x8000


def validate(attributes: UAttributes, has_payload: bool) -> list[str]:
    """Return the names of the violated rules; empty for a valid message."""
    # The messages of a topic share the attributes after the id, and so this result.
    known = attributes._violated  # noqa: SLF001 - the memory of the bytes lives with them
    if known is None:
        found = _violated(attributes, has_payload)
    else:
        cached = known.get(has_payload)
        if cached is None:
            cached = known[has_payload] = _violated(attributes, has_payload)
        found = cached
    id = attributes.id
    return [*found] if id is not None and id.is_valid else ["id", *found]


def check(attributes: UAttributes, has_payload: bool) -> None:
    """Check that no rule is violated.

    :raises InvalidMessage: rules are violated; the error names all of them.
    """
    rules = validate(attributes, has_payload)
    if rules:
        raise InvalidMessage(
            "; ".join(f"{rule} ({RULES[rule]})" for rule in rules), rules=rules, field=rules[0]
        )


def is_traceparent(text: str) -> bool:
    """Tell whether a text is a W3C traceparent: not version ff, no all-zero id."""
    found = _TRACEPARENT.fullmatch(text)
    return (
        found is not None
        and found[1] != "ff"
        and found[2].strip("0") != ""
        and found[3].strip("0") != ""
    )


def is_streamer_sink(sink: UUri) -> bool:
    """Tell whether a publish may have this sink: a streamer's destination, not an entity."""
    return (
        sink.authority_name != ""
        and sink.ue_id == ANY_ENTITY
        and sink.ue_version_major == ANY_VERSION
        and sink.resource_id == ANY_RESOURCE
    )


def _violated(attributes: UAttributes, has_payload: bool) -> tuple[str, ...]:
    """Return the violated rules, without those of the id."""
    source, sink = attributes.source, attributes.sink
    found = []
    of_type = _BY_TYPE.get(attributes.type)
    if of_type is None:
        found.append("type")
    if source is not None and not source.is_valid:
        found.append("source-uuri")
    if sink is not None and not sink.is_valid:
        found.append("sink-uuri")
    if of_type is not None:
        found += of_type(attributes)
    if source is not None and source.has_wildcard:
        found.append("source-wildcard")
    if sink is not None and attributes.type != UMessageType.PUBLISH and sink.has_wildcard:
        found.append("sink-wildcard")
    if attributes.traceparent and not is_traceparent(attributes.traceparent):
        found.append("traceparent")
    if not has_payload and attributes.payload_format != UPayloadFormat.UNSPECIFIED:
        found.append("payload-format-without-payload")
    return tuple(found)


def _publish(attributes: UAttributes) -> list[str]:
    found = []
    if attributes.source is None or not attributes.source.is_topic:
        found.append("publish-source")
    if attributes.sink is not None and not is_streamer_sink(attributes.sink):
        found.append("publish-sink")
    return found


def _notification(attributes: UAttributes) -> list[str]:
    found = []
    if attributes.source is None or not attributes.source.is_topic:
        found.append("notification-source")
    if attributes.sink is None or not attributes.sink.is_notification_destination:
        found.append("notification-sink")
    return found


def _request(attributes: UAttributes) -> list[str]:
    found = []
    if attributes.source is None or not attributes.source.is_rpc_response:
        found.append("request-source")
    if attributes.sink is None or not attributes.sink.is_rpc_method:
        found.append("request-sink")
    return found + _of_rpc(attributes, "request")


def _response(attributes: UAttributes) -> list[str]:
    found = []
    if attributes.source is None or not attributes.source.is_rpc_method:
        found.append("response-source")
    if attributes.sink is None or not attributes.sink.is_rpc_response:
        found.append("response-sink")
    found += _of_rpc(attributes, "response")
    if attributes.reqid is None or not attributes.reqid.is_valid:
        found.append("response-reqid")
    return found


def _of_rpc(attributes: UAttributes, kind: str) -> list[str]:
    found = []
    if not UPriority.CS4 <= attributes.priority <= UPriority.CS6:
        found.append(f"{kind}-priority")
    if not attributes.ttl:
        found.append(f"{kind}-ttl")
    return found


_BY_TYPE: dict[int, Callable[[UAttributes], list[str]]] = {
    UMessageType.PUBLISH: _publish,
    UMessageType.NOTIFICATION: _notification,
    UMessageType.REQUEST: _request,
    UMessageType.RESPONSE: _response,
}


def is_filter(source_resource: int, sink_resource: int | None, *, loose: bool = False) -> bool:
    """Tell whether the resource ids of a source filter and a sink filter are compatible.

    :param loose: also accept what up-rust accepts, such as any source with one method's sink.
    """
    any_source = source_resource == ANY_RESOURCE
    topic = _FIRST_TOPIC <= source_resource < ANY_RESOURCE
    if sink_resource is None:
        return topic or any_source
    to_method = 0 < sink_resource < _FIRST_TOPIC
    if loose:
        if source_resource == 0 and sink_resource == 0:
            return False
        return not to_method or any_source or source_resource == 0
    if sink_resource == 0:
        return source_resource != 0
    return (source_resource == 0 and to_method) or (any_source and sink_resource == ANY_RESOURCE)


def check_filter(source: UUri, sink: UUri | None, *, loose: bool = False) -> None:
    """Check a listener's pair of filters.

    :raises UStatusError: INVALID_ARGUMENT, the pair is not allowed.
    """
    for filter in (source, sink):
        if filter is not None and not filter.is_valid:
            raise UStatusError(UCode.INVALID_ARGUMENT, f"{filter} is not a pattern of addresses")
    resource = None if sink is None else sink.resource_id
    if not is_filter(source.resource_id, resource, loose=loose):
        raise UStatusError(
            UCode.INVALID_ARGUMENT,
            f"no message has a source like {source} and "
            + ("no sink" if sink is None else f"a sink like {sink}"),
            hint="topics have resources 8000 to FFFE and no sink; methods 1 to 7FFF; entities 0",
        )


def matches(source_filter: UUri, sink_filter: UUri | None, attributes: UAttributes) -> bool:
    """Tell whether a listener gets the message.

    Without a sink filter it gets messages without a sink, else those with a matching sink.
    """
    sink, source = attributes.sink, attributes.source
    if sink_filter is None:
        if sink is not None:
            return False
    elif sink is None or not sink_filter.matches(sink):
        return False
    return source is not None and source_filter.matches(source)
