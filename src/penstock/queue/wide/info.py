"""What does a wide queue hold now, who writes to it, and who reads it?"""

from __future__ import annotations

from typing import Any, Final

from penstock.core.interfaces import StreamInfo
from penstock.queue.groups.leases import describe_groups
from penstock.queue.storage import LockFile
from penstock.queue.wide.file import QueueFile, groups_of
from penstock.queue.wide.layout import LIVE_WRITER, HeaderFlag, Slot, State
from penstock.queue.wide.readers import reader_table

__all__ = ["describe_wide"]

#: Attempts at a consistent snapshot beside a fast writer; then the last one counts.
_LOOKS: Final = 100


def describe_wide(url: str, path: str) -> StreamInfo:
    """Describe a queue without changing it.

    :raises NotFound: there is no queue at this path.
    :raises DamagedQueue: its header is damaged.
    """
    file = QueueFile.open_to_read(path)
    try:
        return _describe(url, file)
    finally:
        file.close()


def _describe(url: str, file: QueueFile) -> StreamInfo:
    geometry = file.geometry
    first = last = Slot()
    for _ in range(_LOOKS):
        oldest, head = file.field("tail"), file.field("head")
        count = head - oldest
        if count == 0:  # its slots may have no space on the disk yet
            break
        first, last = file.slot(oldest), file.slot(head - 1)
        if file.field("tail") == oldest:
            break  # otherwise the oldest was overwritten meanwhile
    used = last.end - first.position if count else 0
    readers = _readers(file)
    stream, flags = file.header.stream, file.flags
    return StreamInfo(
        url=url,
        layout="wide",
        storage="memory" if file.is_memory else "file",
        slots=geometry.slots,
        buffer_size=geometry.buffer_size,
        oldest_seq=oldest if count else None,
        youngest_seq=head - 1 if count else None,
        count=count,
        bytes=used,
        oldest_time_ns=first.created_ns if count else None,
        youngest_time_ns=last.created_ns if count else None,
        fill=round(max(count / geometry.slots, used / geometry.buffer_size), 4),
        # The writer waits for those that its own `hold` names, which only the writer knows.
        blocking=any(reader["holds"] for reader in readers),
        details={
            "epoch": file.field("epoch"),
            "stream": None if stream is None else str(stream),
            "compression": file.compression.value,
            "crc": HeaderFlag.CRC in flags,
            "sparse": HeaderFlag.SPARSE in flags,
            "writers": "many" if HeaderFlag.MANY_WRITERS in flags else "one",
            "state": State(file.field("state")).name.lower(),
            "created_ns": file.field("created_ns"),
            "writer_pid": _writer_pid(file),
            "has_writer": file.has_writer(),
            "readers": readers,
            "groups": describe_groups(groups_of(file.path), head),
        },
    )


def _writer_pid(file: QueueFile) -> int | None:
    """Return the pid of the writer; None: no writer, or a queue for many writers."""
    if not file.writable or HeaderFlag.MANY_WRITERS in file.flags:
        return None
    locks = LockFile(file.descriptor)
    try:
        return file.field("writer_pid") if locks.is_locked(LIVE_WRITER) else None
    finally:
        locks.close()


def _readers(file: QueueFile) -> list[dict[str, Any]]:
    if not file.writable or not file.geometry.readers:
        return []
    with reader_table(file) as table:
        return [
            {
                "name": entry.name or None,
                "pid": entry.pid or None,
                "alive": entry.alive,
                "holds": bool(entry.name),
                "next_seq": entry.seq,
                "behind": max(0, file.field("head") - entry.seq),
            }
            for entry in table.entries()
        ]
