"""How does zenoh carry a message? (docs/specs/uprotocol.md 8.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.protocols.uprotocol.codes import UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UAttributes, addresses, with_authorities
from penstock.protocols.uprotocol.uuri import address_segments

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = [
    "ATTACHMENT_VERSION",
    "PRIORITIES",
    "decode_attachment",
    "encode_attachment",
    "key_of",
    "key_of_filter",
    "named_by_key",
    "priority_name",
]

#: The first byte of an attachment: the major version of uProtocol.
ATTACHMENT_VERSION: Final = 1
_VERSION = bytes([ATTACHMENT_VERSION])

#: The placeholder of the sink in the key of a publish: five segments of two plain characters.
_NO_SINK = "/".join(["{}"] * 5)

#: The segments of a key, and where the authorities of source and sink are.
_SEGMENTS: Final = 11
_SOURCE: Final = 1
_SINK: Final = 6

#: The member of `zenoh.Priority` for each class.
PRIORITIES: Final = {
    UPriority.CS0: "BACKGROUND",
    UPriority.CS1: "DATA_LOW",
    UPriority.CS2: "DATA",
    UPriority.CS3: "DATA_HIGH",
    UPriority.CS4: "INTERACTIVE_LOW",
    UPriority.CS5: "INTERACTIVE_HIGH",
    UPriority.CS6: "REAL_TIME",
}


def priority_name(priority: UPriority) -> str:
    """Return the name of a member of `zenoh.Priority`; the default for an unknown class."""
    return PRIORITIES.get(priority.effective, PRIORITIES[UPriority.CS1])


def key_of(attributes: UAttributes, local_authority: str) -> str:
    """Return the key of a message.

    :raises InvalidMessage: its addresses are missing, or are patterns.
    """
    return key_of_filter(*addresses(attributes), local_authority)


def key_of_filter(source: UUri, sink: UUri | None, local_authority: str) -> str:
    """Return the key expression of matching messages; without a sink, of publishes."""
    to = _NO_SINK if sink is None else address_segments(sink, local_authority, "*")
    return f"up/{address_segments(source, local_authority, '*')}/{to}"


def named_by_key(attributes: UAttributes, key: str) -> UAttributes:
    """Fill in the authorities of local addresses from the key of their message.

    :raises InvalidMessage: no authority can have such a name.
    """
    segments = key.split("/")
    if len(segments) != _SEGMENTS:
        return attributes
    return with_authorities(attributes, segments[_SOURCE], segments[_SINK])


def encode_attachment(attributes: UAttributes) -> bytes:
    """Encode the attributes as an attachment."""
    return _VERSION + attributes.to_bytes()


def decode_attachment(data: bytes) -> UAttributes:
    """Decode the attributes in an attachment.

    :raises InvalidMessage: it is of another version, or does not decode.
    """
    if not data:
        raise InvalidMessage("the attachment is empty", field="attachment")
    if data[0] != ATTACHMENT_VERSION:
        raise InvalidMessage(
            f"the attachment is of version {data[0]}, not {ATTACHMENT_VERSION}", field="attachment"
        )
    return UAttributes.from_bytes(data[1:])
