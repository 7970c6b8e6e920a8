"""How far has each stream of a store come?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

from penstock.protocols.psi.envelope import PsiMessage
from penstock.protocols.psi.metadata import StreamFlags, StreamMetadata
from penstock.protocols.psi.ticks import MAX_NS, MIN_NS, NS_PER_TICK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.message import Message

__all__ = [
    "COUNTS",
    "StreamBooks",
    "StreamInStore",
    "creation_attribute",
    "psi_message",
    "reopened",
    "to_tick",
    "uncounted",
]

_CREATION_SIZE = 8
#: What is counted of a stream, by its name in `StreamBooks`.
_COUNTED = (
    "count",
    "last_sequence",
    "size_sum",
    "latency_sum_ns",
    "first_creation_ns",
    "last_creation_ns",
    "first_originating_ns",
    "last_originating_ns",
)
#: How many that are.
COUNTS = len(_COUNTED)


def psi_message(message: Message) -> PsiMessage:
    """Return a message of a store's queue as psi has it.

    Its type is the stream, its subtype the number in the stream. A queue's own time never goes
    back; where psi's does, it is in the attributes.
    """
    attributes, creation_ns = message.attributes, message.created_ns
    if attributes is not None and len(attributes) == _CREATION_SIZE:
        creation_ns = int.from_bytes(attributes, "little", signed=True)
    return PsiMessage(message.type, message.subtype, message.time_ns, creation_ns, message.payload)


def creation_attribute(creation_ns: int, appended_ns: int) -> bytes | None:
    """Return what goes with a message whose creation is not the time that its queue notes."""
    if creation_ns == appended_ns:
        return None
    return creation_ns.to_bytes(_CREATION_SIZE, "little", signed=True)


class StreamInStore(NamedTuple):
    """A stream, for people: how much of it there is, and from when to when."""

    name: str
    id: int
    type_name: str
    messages: int
    bytes: int
    is_closed: bool
    first_creation_ns: int | None
    last_creation_ns: int | None
    first_originating_ns: int | None
    last_originating_ns: int | None

    @classmethod
    def of(cls, stream: StreamMetadata) -> Self:
        """Return what a person wants to know of a stream."""
        first_creation, last_creation, first_originating, last_originating = (
            None if moment == MIN_NS else moment
            for moment in (
                stream.first_creation_ns,
                stream.last_creation_ns,
                stream.first_originating_ns,
                stream.last_originating_ns,
            )
        )
        return cls(
            stream.name,
            stream.id,
            stream.type_name,
            stream.message_count,
            stream.size_sum,
            stream.is_closed,
            first_creation,
            last_creation,
            first_originating,
            last_originating,
        )


class StreamBooks:
    """One stream: what was announced of it, and what was appended since."""

    def __init__(self, announced: StreamMetadata) -> None:
        self.announced = announced
        self.count = announced.message_count
        #: The number of the newest message; psi counts from 1.
        self.last_sequence = announced.message_count
        #: That of the first one, where it was appended here; it is not kept.
        self.first_sequence: int | None = None
        self.size_sum = announced.size_sum
        self.latency_sum_ns = announced.latency_sum_ns
        self.first_creation_ns = announced.first_creation_ns
        self.last_creation_ns = announced.last_creation_ns
        self.first_originating_ns = announced.first_originating_ns
        self.last_originating_ns = announced.last_originating_ns

    def add(self, message: PsiMessage) -> None:
        """Count a message that was appended."""
        _, sequence, originating_ns, creation_ns, payload = message
        if self.first_creation_ns == MIN_NS:
            self.first_creation_ns, self.first_originating_ns = creation_ns, originating_ns
        if not self.count:
            self.first_sequence = sequence
        self.count += 1
        self.last_sequence = sequence
        self.size_sum += len(payload)
        self.latency_sum_ns += creation_ns - originating_ns
        self.last_creation_ns = creation_ns
        self.last_originating_ns = originating_ns

    def counts(self) -> tuple[int, ...]:
        """Return all that was counted, to be kept; see `restore`."""
        return tuple(getattr(self, name) for name in _COUNTED)

    def restore(self, counts: Sequence[int]) -> None:
        """Go on from counts that were kept."""
        for name, value in zip(_COUNTED, counts, strict=True):
            setattr(self, name, value)

    def metadata(self, *, closed_ns: int | None = None) -> StreamMetadata:
        """Return what to tell of it now; `closed_ns`: that it is at its end."""
        now = self.announced._replace(
            message_count=self.count,
            size_sum=self.size_sum,
            latency_sum_ns=self.latency_sum_ns,
            first_creation_ns=self.first_creation_ns,
            last_creation_ns=self.last_creation_ns,
            first_originating_ns=self.first_originating_ns,
            last_originating_ns=self.last_originating_ns,
        )
        if closed_ns is None:
            return now
        return now._replace(flags=now.flags | StreamFlags.CLOSED, closed_ns=closed_ns)


def to_tick(time_ns: int) -> int:
    """Return the time that psi can carry: whole ticks."""
    return time_ns // NS_PER_TICK * NS_PER_TICK


def uncounted(stream: StreamMetadata) -> StreamMetadata:
    """Return a stream as if nothing had been written to it."""
    return stream._replace(
        message_count=0,
        size_sum=0,
        latency_sum_ns=0,
        first_creation_ns=MIN_NS,
        last_creation_ns=MIN_NS,
        first_originating_ns=MIN_NS,
        last_originating_ns=MIN_NS,
    )


def reopened(stream: StreamMetadata) -> StreamMetadata:
    """Return a stream that goes on after its end."""
    return stream._replace(flags=stream.flags & ~StreamFlags.CLOSED, closed_ns=MAX_NS)
