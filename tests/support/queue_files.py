"""How is a queue's file looked into, and operated on, behind the back of the library?"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from penstock.core.message import Message
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.queue.classic.creation import open_device
from penstock.queue.classic.layout import (
    FREE_SLOT,
    ID_COUNT,
    SLOT_SIZE,
    STATUS_SIZE,
    Slot,
    Status,
    slot_offset,
)
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.slots import check_sizes, check_slots, read_status
from penstock.queue.classic.writer import ClassicWriter

__all__ = [
    "QueueBytes",
    "check_queue",
    "read_all",
    "reader_of",
    "writer_of",
]


class QueueBytes(NamedTuple):
    """All bytes of a file queue at one moment."""

    stat: bytes
    buf: bytes

    @classmethod
    def load(cls, path: str) -> QueueBytes:
        return cls(Path(f"{path}.stat").read_bytes(), Path(f"{path}.buf").read_bytes())

    def store(self, path: str) -> None:
        """Write them in place: whoever has the files open sees the change."""
        for part, data in (("stat", self.stat), ("buf", self.buf)):
            file = Path(f"{path}.{part}")
            with file.open("r+b" if file.exists() else "w+b") as out:
                out.write(data)
                out.truncate()

    @property
    def status(self) -> Status:
        return Status.decode(self.stat[:STATUS_SIZE])

    def slot(self, index: int) -> Slot:
        at = slot_offset(index)
        return Slot.decode(self.stat[at : at + SLOT_SIZE])

    def with_status(self, **fields: int) -> QueueBytes:
        """Change fields of the status; its checksum is made right again."""
        status = self.status._replace(**fields).sealed()
        return self._replace(stat=status.encode() + self.stat[STATUS_SIZE:])

    def with_raw_slot(self, index: int, data: bytes) -> QueueBytes:
        at = slot_offset(index)
        return self._replace(stat=self.stat[:at] + data + self.stat[at + len(data) :])

    def with_slot(self, index: int, **fields: int) -> QueueBytes:
        """Change fields of a slot; its checksum is made right again unless it is given."""
        slot = self.slot(index)._replace(**fields)
        if "checksum" not in fields:
            slot = slot._replace(checksum=slot.computed_checksum())
        return self.with_raw_slot(index, slot.encode())

    def with_free_slot(self, index: int) -> QueueBytes:
        return self.with_raw_slot(index, FREE_SLOT)

    def with_buf(self, at: int, data: bytes) -> QueueBytes:
        return self._replace(buf=self.buf[:at] + data + self.buf[at + len(data) :])

    def live(self) -> list[int]:
        """Return the numbers of the slots from the oldest to the youngest."""
        status = self.status
        if status.oldest_slot < 0:
            return []
        span = (status.youngest_slot - status.oldest_slot) % status.nslots + 1
        return [(status.oldest_slot + age) % status.nslots for age in range(span)]

    def renumbered(self, last: int) -> QueueBytes:
        """Shift all ids so that the youngest is `last`."""
        shift = last - self.status.youngest_id
        result = self.with_status(youngest_id=last)
        for index in self.live():
            slot = self.slot(index)
            id = (slot.id + shift) % ID_COUNT
            result = result.with_slot(index, id=id)
            result = result.with_buf(slot.offset + slot.stored_len - 4, id.to_bytes(4))
        return result


def writer_of(path: str, **options: object) -> ClassicWriter:
    return ClassicWriter(f"fmq:{path}", path, ClassicOptions.of(URL.parse("fmq:/x", options)))


def reader_of(path: str, start: Position = Position.START, **options: object) -> ClassicReader:
    return ClassicReader(
        f"fmq:{path}", path, start, ClassicOptions.of(URL.parse("fmq:/x", options))
    )


def read_all(path: str, **options: Any) -> dict[int, bytes]:
    """Return what a fresh reader gets from the start: payloads by sequence number."""
    with reader_of(path, **options) as reader:
        return {m.seq: m.payload for m in reader.read_many(100_000)}


def check_queue(path: str) -> Status:
    """Make sure that status and slots of a queue add up; return the status."""
    device = open_device(path, writable=False)
    try:
        status = read_status(device)
        check_sizes(device, status)
        check_slots(device, status)
    finally:
        device.close()
    return status


def numbered(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


def seqs(messages: list[Message]) -> list[int]:
    return [message.seq for message in messages]


def remove(path: str) -> None:
    for part in ("stat", "buf"):
        Path(f"{path}.{part}").unlink()
