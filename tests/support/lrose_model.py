"""What does LROSE's write algorithm do, told a second time and as simply as possible?

Written from docs/specs/lrose.md 1.7 and 1.8 alone, so that it can contradict the queue.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LroseModel", "Stored"]

_IDS = 1_000_000_000


class Stored(NamedTuple):
    """One message that the model keeps."""

    seq: int
    offset: int
    stored_len: int
    payload: bytes
    type: int
    subtype: int
    second: int
    compressed: bool


class LroseModel:
    """The slots, the three offsets and the two slot numbers of a queue."""

    def __init__(self, nslots: int, buf_size: int, youngest: int = -1) -> None:
        self.nslots = nslots
        self.buf_size = buf_size
        self.slots: list[Stored | None] = [None] * nslots
        self.youngest = youngest
        self.youngest_slot = -1 if youngest < 0 else nslots - 1
        self.oldest_slot = -1
        self.begin_insert = 0
        self.end_insert = 0
        self.begin_append = 0
        self.append_mode = 1

    @staticmethod
    def stored_len(length: int) -> int:
        return (length + 3) // 4 * 4 + 12

    def fits(self, length: int, plain_length: int) -> bool:
        return self.stored_len(length) <= self.buf_size and plain_length <= self.buf_size

    def _next_slot(self, slot: int) -> int:
        return 0 if slot >= self.nslots - 1 else slot + 1

    def write(
        self, length: int, payload: bytes, type: int, subtype: int, second: int, compressed: bool
    ) -> Stored:
        """Steps 2 to 10; `length` is what the payload takes in the buffer."""
        slot = self._next_slot(self.youngest_slot)
        stored = self.stored_len(length)
        if slot == self.oldest_slot:
            self._free_oldest()
        while True:
            if self.append_mode:
                if self.buf_size - self.begin_append >= stored:
                    break
                self.append_mode = 0
            else:
                if self.end_insert - self.begin_insert >= stored:
                    break
                self._free_oldest()
        if self.append_mode:
            offset = self.begin_append
            self.begin_append += stored
        else:
            offset = self.begin_insert
            self.begin_insert += stored
        self.youngest += 1
        entry = Stored(self.youngest, offset, stored, payload, type, subtype, second, compressed)
        self.slots[slot] = entry
        self.youngest_slot = slot
        if self.oldest_slot == -1:
            self.oldest_slot = slot
        return entry

    def _free_oldest(self) -> None:
        entry = self.slots[self.oldest_slot]
        assert entry is not None
        assert entry.offset == self.end_insert
        self.end_insert += entry.stored_len
        if self.end_insert >= self.begin_append:
            self.begin_append = self.begin_insert
            self.begin_insert = self.end_insert = 0
            self.append_mode = 1
        self.slots[self.oldest_slot] = None
        self.oldest_slot = self._next_slot(self.oldest_slot)

    def live(self) -> list[Stored]:
        """Return what the queue holds, oldest first."""
        kept = [entry for entry in self.slots if entry is not None]
        return sorted(kept, key=lambda entry: entry.seq)

    @property
    def oldest(self) -> int:
        """The oldest number there; the one to come if there is none."""
        kept = self.live()
        return kept[0].seq if kept else self.youngest + 1

    def status_words(self) -> dict[str, int]:
        """Return what the status on the medium must say."""
        return {
            "youngest_id": self.youngest if self.youngest < 0 else self.youngest % _IDS,
            "youngest_slot": self.youngest_slot,
            "oldest_slot": self.oldest_slot,
            "nslots": self.nslots,
            "buf_size": self.buf_size,
            "begin_insert": self.begin_insert,
            "end_insert": self.end_insert,
            "begin_append": self.begin_append,
            "append_mode": self.append_mode,
        }
