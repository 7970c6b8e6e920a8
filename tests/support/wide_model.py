"""Which messages are in a wide queue, and what does a reader of it get, by the format document?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from penstock.core.errors import MessageTooLarge
from penstock.core.overflow import QueueFull

if TYPE_CHECKING:
    from penstock import StreamId
    from penstock.queue.wide.reader import WideReader

__all__ = ["Follower", "Header", "Refused", "RingModel", "Stored"]

ALIGN = 64


class Header(NamedTuple):
    """What is written with a payload."""

    type: int
    subtype: int
    stream: StreamId | None
    attributes: bytes | None

    @property
    def block(self) -> int:
        size = (16 if self.stream is not None else 0) + len(self.attributes or b"")
        return -(-size // 8) * 8


class Stored(NamedTuple):
    seq: int
    position: int
    header: Header
    payload: bytes


class Refused(Exception):
    """The model has no place for a message."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind


@dataclass
class RingModel:
    """Which messages are in a queue, and where, by the rules of placement."""

    slots: int
    size: int
    compression: str | None
    messages: list[Stored] = field(default_factory=list)
    tail: int = 0
    head: int = 0
    position: int = 0
    #: Messages from here on may not be overwritten.
    limit: int | None = None

    def stored_length(self, payload: bytes) -> int:
        if self.compression is None:
            return len(payload)
        return 8 + len(pa.Codec(self.compression).compress(payload, asbytes=True))

    def place(self, header: Header, payload: bytes) -> int:
        """Free a place for a message and return its position, or raise."""
        if self.compression is not None and len(payload) > self.size:
            raise Refused(MessageTooLarge)
        size = header.block + self.stored_length(payload)
        if size > self.size:
            raise Refused(MessageTooLarge)
        room = up(size, ALIGN)
        at = self.position
        if at % self.size + room > self.size:
            at = up(at, self.size)
        live, tail = self.live(), self.tail
        for message in live:
            if self.head - tail >= self.slots or message.position + self.size < at + room:
                tail += 1
            else:
                break
        if self.limit is not None and tail > max(self.tail, self.limit):
            raise Refused(QueueFull)
        self.tail = tail
        return at

    def append(self, at: int, header: Header, payload: bytes) -> Stored:
        stored = Stored(self.head, at, header, payload)
        self.head += 1
        self.position = up(at + header.block + self.stored_length(payload), ALIGN)
        self.messages = [*self.live(), stored]
        return stored

    def live(self) -> list[Stored]:
        return [message for message in self.messages if message.seq >= self.tail]


def up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass
class Follower:
    """A reader, and what the model says about it."""

    reader: WideReader
    wanted: int | None
    newest: bool
    holds: bool
    #: The number of the next message, and what a writer knows of it.
    next: int
    acknowledged: int
    delivered: int = 0
    size: int = 0
    lost: int = 0
    filtered: int = 0
    restarts: int = 0
    #: Where it stands after the last seek, and its books then.
    start: int = 0
    settled: int = 0

    def wants(self, message: Stored) -> bool:
        return self.wanted is None or message.header.type == self.wanted

    @property
    def books(self) -> int:
        return self.delivered + self.lost + self.filtered

    def stand_at(self, seq: int) -> None:
        self.next = self.start = self.acknowledged = seq
        self.settled = self.books

    def deliver(self, model: RingModel, n: int) -> list[Stored]:
        """What the next `n` messages must be."""
        self._catch_up(model)
        chosen: list[Stored] = []
        for message in model.live():
            if message.seq < self.next:
                continue
            if len(chosen) == n:
                break
            self.next = message.seq + 1
            if self.wants(message):
                chosen.append(message)
            else:
                self.filtered += 1
        return self._hand_out(chosen)

    def lend(self, model: RingModel, n: int) -> list[Stored]:
        """What a batch in place must be: those wanted of the next `n`, or of the `n` behind."""
        self._catch_up(model)
        chosen: list[Stored] = []
        while not chosen:
            run = [m for m in model.live() if m.seq >= self.next][:n]
            if not run:
                break
            self.next = run[-1].seq + 1
            chosen = [m for m in run if self.wants(m)]
            self.filtered += len(run) - len(chosen)
        return self._hand_out(chosen)

    def _catch_up(self, model: RingModel) -> None:
        """Acknowledge what was delivered before, and count what was overwritten."""
        self.acknowledged = self.next
        if self.next < model.tail:
            go_on = max(model.tail, model.head - 1) if self.newest else model.tail
            self.lost += go_on - self.next
            self.next = go_on

    def _hand_out(self, chosen: list[Stored]) -> list[Stored]:
        if not chosen:  # what was passed over is done
            self.acknowledged = self.next
        self.delivered += len(chosen)
        self.size += sum(len(m.payload) for m in chosen)
        return chosen
