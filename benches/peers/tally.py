"""Did every message arrive, in order, and how long was it on its way?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import penstock

__all__ = [
    "Delivery",
    "Payload",
    "Stopwatch",
    "Taker",
    "Tally",
    "end_marker",
    "payloads_of",
    "stamped",
]

#: The first byte of a message is its number modulo a prime, so that a lost one shows; a prime
#: because losses like to come in powers of two.
_PRIMES = (251, 61, 31, 13, 7, 3)

#: The first byte of the message that says: that was all.
_END = 255

#: All prepared messages together: a writer's data is usually fresh in the processor's cache.
_PREPARED = 4 << 20

_COUNT = slice(1, 9)
_STAMP = slice(8, 16)


class Payload(Protocol):
    """What is common to bytes, views and arrays."""

    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one reader got."""

    received: int
    #: Messages that were not the next one, or not as they were sent.
    wrong: int
    #: What the writer says that it sent; None if its last message never came.
    sent: int | None
    #: How long each was on its way (ns), where that was asked for.
    delays: tuple[int, ...] = ()

    @property
    def problem(self) -> str | None:
        """Say what is wrong with it, or None if every message came as it was sent."""
        if self.sent is None:
            return "lossy: the last message never came"
        if self.received != self.sent:
            return f"lossy: {self.sent - self.received:,} of {self.sent:,} lost"
        if self.wrong:
            return f"{self.wrong:,} of {self.sent:,} out of order or changed"
        return None


class Taker(Protocol):
    """What a reader hands its messages to, in the form in which it gets them."""

    def delivery(self) -> Delivery:
        """Sum up what was taken."""

    def one(self, payload: Payload) -> bool:
        """Take one; return whether it was the last."""

    def many(self, payloads: Sequence[Payload]) -> bool:
        """Take a list; return whether the last was among them."""

    def batch(self, batch: penstock.Batch) -> bool:
        """Take an Arrow batch; return whether the last was in it."""

    def each(self, payloads: Iterable[Payload]) -> None:
        """Take one after the other, up to the last or until no more come."""


def payloads_of(size: int) -> list[bytes]:
    """Make the messages of a size, which a writer sends again and again."""
    modulus = _modulus(size)
    filling = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    return [bytes([number]) + filling[1:] for number in range(modulus)]


def end_marker(size: int, count: int) -> bytes:
    """Make the message that says how many were sent before it."""
    return (bytes([_END]) + count.to_bytes(8, "little")).ljust(size, b"\0")


def stamped(template: bytearray) -> bytes:
    """Return a message with the time of now in it."""
    template[_STAMP] = time.monotonic_ns().to_bytes(8, "little")
    return bytes(template)


def _modulus(size: int) -> int:
    return next(prime for prime in _PRIMES if prime * size <= _PREPARED or prime == _PRIMES[-1])


class Tally:
    """Counts messages and looks at the first byte of each; if `thorough`, at every byte."""

    def __init__(self, size: int, *, thorough: bool = False) -> None:
        self._modulus = _modulus(size)
        self._marks = list(range(self._modulus))
        self._expected = payloads_of(size) if thorough else None
        self.received = 0
        self.wrong = 0
        self.sent: int | None = None

    def delivery(self) -> Delivery:
        return Delivery(self.received, self.wrong, self.sent)

    def one(self, payload: Payload) -> bool:
        if payload[0] != self.received % self._modulus:
            return self._surprise(payload)
        self._look_closely(payload)
        self.received += 1
        return False

    def many(self, payloads: Sequence[Payload]) -> bool:
        firsts = [payload[0] for payload in payloads]
        if firsts != self._next_marks(len(firsts)) or self._expected is not None:
            return any(self.one(payload) for payload in payloads)
        self.received += len(firsts)
        return False

    def batch(self, batch: penstock.Batch) -> bool:
        column = batch.column("payload")
        if batch.num_rows == 0:
            return False
        wide = np.int64 if str(column.type).startswith("large") else np.int32
        _, offsets, data = column.buffers()
        starts = np.frombuffer(offsets, wide)[column.offset : column.offset + len(column)]
        firsts = np.frombuffer(data, np.uint8)[starts]
        expected = (self.received + np.arange(len(firsts))) % self._modulus
        if self._expected is not None or not np.array_equal(firsts, expected):
            return any(self.one(payload) for payload in column.to_pylist())
        self.received += len(firsts)
        return False

    def each(self, payloads: Iterable[Payload]) -> None:
        more = iter(payloads)
        if self._expected is not None:
            any(map(self.one, more))
            return
        last = self._modulus - 1
        # Two loops, so that the inner one need not count: it is part of what is measured.
        while self.received % self._modulus == 0:
            mark = -1
            for mark, payload in zip(self._marks, more, strict=False):
                if payload[0] != mark:
                    self.received += mark
                    if not self._surprise(payload):
                        any(map(self.one, more))
                    return
            self.received += mark + 1
            if mark != last:
                return

    def _next_marks(self, count: int) -> list[int]:
        at = self.received % self._modulus
        marks = self._marks[at : at + count]
        while len(marks) < count:
            marks += self._marks[: count - len(marks)]
        return marks

    def _surprise(self, payload: Payload) -> bool:
        if payload[0] == _END:
            self.sent = int.from_bytes(payload[_COUNT], "little")
            return True
        self.received += 1
        self.wrong += 1
        return False

    def _look_closely(self, payload: Payload) -> None:
        if self._expected is not None and bytes(payload) != self._expected[payload[0]]:
            self.wrong += 1


class Stopwatch:
    """Notes how long each message was on its way, in nanoseconds."""

    def __init__(self) -> None:
        self.delays: list[int] = []
        self.sent: int | None = None

    def delivery(self) -> Delivery:
        return Delivery(len(self.delays), 0, self.sent, tuple(self.delays))

    def one(self, payload: Payload) -> bool:
        now = time.monotonic_ns()
        if payload[0] == _END:
            self.sent = int.from_bytes(payload[_COUNT], "little")
            return True
        self.delays.append(now - int.from_bytes(payload[_STAMP], "little"))
        return False

    def many(self, payloads: Sequence[Payload]) -> bool:
        return any(map(self.one, payloads))

    def batch(self, batch: penstock.Batch) -> bool:
        return self.many(batch.column("payload").to_pylist())

    def each(self, payloads: Iterable[Payload]) -> None:
        any(map(self.one, payloads))
