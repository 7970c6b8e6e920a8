"""Where in its bytes are a message's attributes, its id and its payload?"""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.dispatch._headers import scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.protocols.uprotocol import UUID7

__all__ = ["ID_SIZE", "Group", "groups_of", "id_key", "tagged"]

#: Bytes of the id with its tags, which are the first of the attributes.
ID_SIZE: Final = 20


class Group(NamedTuple):
    """Messages of a batch with equal attributes except the id."""

    #: Their indexes in the batch.
    places: Sequence[int]
    raws: Sequence[bytes]
    #: The ids in the form of `id_key`, and their times (milliseconds since 1970 UTC).
    ids: Sequence[bytes]
    made_ms: Sequence[int]
    #: The offset of the attributes in each; 0 if the protobuf library must decode the message.
    attributes_begin: int
    attributes_end: int
    #: The attributes after the id.
    attributes: bytes
    has_payload: bool

    @property
    def is_found(self) -> bool:
        """Whether the attributes were found in their usual place."""
        return self.attributes_begin > 0

    def some(self, which: Sequence[int]) -> Group:
        """Return a group of some of its messages, given by their index in the group."""
        return self._replace(
            places=[self.places[at] for at in which],
            raws=[self.raws[at] for at in which],
            ids=[self.ids[at] for at in which],
            made_ms=[self.made_ms[at] for at in which],
        )

    def with_attributes(self, raw: bytes, attributes: bytes) -> bytes:
        """Return a message of the group with other attributes after the id."""
        id_end = self.attributes_begin + ID_SIZE
        tag = tagged(1, ID_SIZE + len(attributes))
        id = raw[self.attributes_begin : id_end]
        return b"".join((tag, id, attributes, raw[self.attributes_end :]))


def groups_of(messages: Sequence[bytes], largest: int) -> list[Group]:
    """Return the groups of a batch, in the order of their first messages.

    Messages of more than `largest` bytes are not parsed.
    """
    return list(starmap(Group, scan(messages, largest)))


def id_key(id: UUID7) -> bytes:
    """Encode an id as in a message: little-endian, with the tag of the second half in between."""
    return id.msb.to_bytes(8, "little") + b"\x11" + id.lsb.to_bytes(8, "little")


def tagged(field: int, length: int) -> bytes:
    """Return the tag and length of a bytes field in protobuf, with a number below 16."""
    tag = bytearray((field << 3 | 2,))
    while length > 0x7F:  # noqa: PLR2004 - a varint goes on
        tag.append(length & 0x7F | 0x80)
        length >>= 7
    tag.append(length)
    return bytes(tag)
