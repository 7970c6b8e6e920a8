"""Where do packets begin and end in a stream of bytes, also after damage?

Packets stand back to back. An id alone proves little: two bytes into an ordinary pulse stands what
could be the swapped id of another packet. So a packet is taken only if its length fits its kind and
the next one begins where it ends, or the bytes end there. After damage, decoding resumes at any
kind of packet; the bytes before it are reported as skipped. A packet with damage on both sides is
taken if its length is exactly what it needs. Each byte is in a packet, skipped, or left for later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.radar import _pulses
from penstock.radar.iwrf.packets import (
    LARGEST,
    LAST_KIND,
    PACKET_SIZE,
    WITH_DATA,
    Kind,
    is_known_id,
    layout_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.radar.iwrf.packets import Record

__all__ = ["Framing", "Run", "frame", "places_of"]

_MARK: Final = b"\x77\x77"
_HEAD: Final = 8
_LEAST: Final = 56
#: Bytes that a packet may have beyond what its kind needs, where it stands in line.
_EXTRA: Final = 65_536
#: Kinds that say how long they must be.
_SIZED: Final = (PACKET_SIZE.keys() - WITH_DATA) | {Kind.PULSE, Kind.BURST}
#: By kind: bytes at least, and how many more than those and the values that a head tells of.
_NEEDED: Final = np.array([PACKET_SIZE.get(k, _LEAST) for k in range(LAST_KIND + 1)], np.int32)  # type: ignore[call-overload]
_MORE: Final = np.array(
    [_EXTRA if kind in _SIZED else LARGEST for kind in range(LAST_KIND + 1)], np.int32
)
#: Runs that are found by one call.
_AT_ONCE: Final = 512


class Run(NamedTuple):
    """Packets of one kind and length, back to back; pulses also of one shape and encoding."""

    kind: int
    #: The byte order of their structs, as numpy has it.
    order: str
    start: int
    #: Bytes of each.
    length: int
    #: How many they are.
    number: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.number

    def records(self, data: NDArray[np.uint8]) -> Record:
        """Return the structs as a view of the bytes."""
        layout = layout_of(self.kind, self.order)
        records: Record = np.ndarray(
            (self.number,), layout, data.data, self.start, strides=(self.length,)
        )
        return records

    def packets(self) -> Iterator[tuple[int, int]]:
        """Yield where each begins and ends."""
        for start in range(self.start, self.end, self.length):
            yield start, start + self.length


def places_of(runs: Sequence[Run]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return offset and length of each packet in runs."""
    starts, lengths, numbers = (
        np.array([run[field] for run in runs], np.int64) for field in (2, 3, 4)
    )
    lengths = np.repeat(lengths, numbers)
    first = np.repeat(np.cumsum(numbers) - numbers, numbers)
    within = np.arange(len(lengths)) - first
    return np.repeat(starts, numbers) + within * lengths, lengths


class Framing(NamedTuple):
    """The packets and gaps of a stretch of bytes, in order."""

    runs: list[Run]
    #: Where bytes begin and end that belong to no packet.
    skipped: list[tuple[int, int]]
    #: So far it is known; behind it a packet may begin whose rest is to come.
    end: int

    @property
    def packets(self) -> int:
        return sum(run.number for run in self.runs)

    @property
    def packets_before_skipped(self) -> list[int]:
        """How many packets stand before each stretch that was skipped."""
        return [
            sum(run.number for run in self.runs if run.start < start) for start, _ in self.skipped
        ]

    @property
    def skipped_bytes(self) -> int:
        return sum(end - start for start, end in self.skipped)


class _Head(NamedTuple):
    kind: int
    order: str
    length: int


#: What begins there may be a packet; there are too few bytes to tell.
_UNKNOWN: Final = _Head(-1, "<", 0)


def frame(data: NDArray[np.uint8], *, is_end: bool = True) -> Framing:
    """Find the packets in bytes; more bytes may follow unless `is_end`."""
    return _Framer(data, is_end).run()


class _Framer:
    def __init__(self, data: NDArray[np.uint8], is_end: bool) -> None:
        self._data = data
        self._bytes = data.data.cast("B") if len(data) else memoryview(b"")
        self._is_end = is_end
        self._runs: list[Run] = []
        self._skipped: list[tuple[int, int]] = []

    def run(self) -> Framing:
        at, size = 0, len(self._bytes)
        while (at := self._in_line(at)) < size:
            head = self._head(at)
            if head is None:
                at = self._skip(at, self._resume(at + 1, size))
                continue
            if head is _UNKNOWN or at + head.length > size:
                if not self._is_end:
                    break
                at = self._skip(at, self._resume(at + 1, size))
                continue
            next_at = at + head.length
            if not self._follows(head, next_at):
                inside = self._resume_surely(at + 1, next_at, next_at)
                if inside < next_at:  # it was cut off, and others came
                    at = self._skip(at, inside)
                    continue
            elif 0 < size - next_at < _HEAD and not self._is_end:
                break  # what follows tells
            self._runs.append(Run(*head[:2], at, head.length, 1))
            at = next_at
        return Framing(self._runs, self._skipped, at)

    def _in_line(self, at: int) -> int:
        """Take consecutive packets from an offset on; return where they end."""
        rows = np.empty((_AT_ONCE, 5), np.int64)
        count = _AT_ONCE
        while count == _AT_ONCE:
            count, at = _pulses.in_line(self._data, at, _NEEDED, _MORE, rows)
            self._runs += [
                Run(kind, ">" if is_swapped else "<", start, length, number)
                for kind, is_swapped, start, length, number in rows[:count].tolist()
            ]
        return at

    def _skip(self, start: int, end: int) -> int:
        if self._skipped and self._skipped[-1][1] == start:
            start = self._skipped.pop()[0]
        self._skipped.append((start, end))
        return end

    # --- is it a packet? ----------------------------------------------------------------------

    def _head(self, at: int, *, exact: bool = False) -> _Head | None:
        """Return the head of a packet at an offset, if it is plausible.

        :param exact: its length is exactly what its kind needs
        """
        if len(self._bytes) - at < _HEAD:
            return _UNKNOWN if _may_begin(bytes(self._bytes[at:])) else None
        found = _pulses.head(self._data, at, exact, _NEEDED, _MORE)
        if found is None:
            return None
        kind, is_swapped, length = found
        return _UNKNOWN if kind < 0 else _Head(kind, ">" if is_swapped else "<", length)

    # --- going on after damage ----------------------------------------------------------------

    def _resume(self, at: int, end: int) -> int:
        """Return the first offset from `at` on where a packet begins, or `end`."""
        for place in self._candidates(at, end):
            if self._is_sure(place):
                return place
            alone = self._end_of_lone(place)
            if alone is not None:
                return self._resume_surely(place + 1, alone, place)
        if end == len(self._bytes) and not self._is_end:
            # Half an id may stand at the end.
            for place in range(max(at, end - _HEAD + 1), end):
                if _may_begin(bytes(self._bytes[place:])):
                    return place
        return end

    def _resume_surely(self, at: int, end: int, otherwise: int) -> int:
        """Return the first offset of a packet that another packet follows."""
        return next(filter(self._is_sure, self._candidates(at, end)), otherwise)

    def _candidates(self, at: int, end: int) -> Iterator[int]:
        """Yield where an id may begin."""
        for mark in _marks(self._data.data, max(0, at - 2), min(end + 4, len(self._bytes))):
            for place in (mark - 2, mark):  # the host's own byte order first
                if at <= place < end:
                    yield place

    def _end_of_lone(self, at: int) -> int | None:
        """Return the end of a lone packet whose length is exactly what it needs.

        Of swapped ones this proves nothing: a pulse has the bytes of such a head in it.
        """
        head = self._head(at, exact=True)
        if head is None or head.order != "<" or head.kind not in _SIZED:
            return None
        end = at + head.length
        return end if end <= len(self._bytes) else None

    def _is_sure(self, at: int) -> bool:
        head = self._head(at, exact=True)
        if head is None:
            return False
        end = at + head.length
        if head is _UNKNOWN or end > len(self._bytes):
            return not self._is_end  # looked at again when the rest is there
        # Among the numbers that nobody uses, damage finds what it looks for.
        is_known = head.kind in PACKET_SIZE
        return is_known and (end == len(self._bytes) or self._follows(head, end, exact=True))

    def _follows(self, before: _Head, at: int, *, exact: bool = False) -> bool:
        """Tell whether a packet of the same byte order begins, or may begin, at an offset."""
        head = self._head(at, exact=exact)
        return head is not None and (head is _UNKNOWN or head.order == before.order)


def _marks(raw: memoryview, at: int, end: int) -> Iterator[int]:
    """Yield the offsets of the two bytes that all ids share."""
    step = 1 << 16
    while at < end - 1:
        some = bytes(raw[at : min(end, at + step + 1)])
        found = some.find(_MARK)
        while found >= 0:
            yield at + found
            found = some.find(_MARK, found + 1)
        at += step


def _may_begin(some: bytes) -> bool:
    """Tell whether a few last bytes may be the beginning of a packet."""
    if len(some) >= 4:  # noqa: PLR2004 - an id is there
        return any(is_known_id(int.from_bytes(some[:4], order)) for order in ("little", "big"))
    little = len(some) < 2 or (some[1] <= 3 and some[2:] in (b"", b"\x77"))  # noqa: PLR2004
    return little or (_MARK.startswith(some[:2]) and (len(some) < 3 or some[2] <= 3))  # noqa: PLR2004
