"""What does a wide queue hold now, who writes to it, and who reads it?"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.core.info import StreamInfo
from penstock.core.stream_id import StreamId
from penstock.queue.groups.leases import describe_groups
from penstock.queue.liveness import LockFile
from penstock.queue.wide.layout import ALIGN, LIVE_WRITER, SLOT, HeaderFlag, State, slots_of
from penstock.queue.wide.queue_file import QueueFile, groups_of, reader_table

__all__ = ["describe_wide"]

#: A fast writer may overwrite what is looked at each time; then it is shown as it was last.
_LOOKS: Final = 100


def describe_wide(url: str, path: str) -> StreamInfo:
    """Look at a queue without touching it.

    :raises NotFound: there is none.
    :raises DamagedQueue: its header is not right.
    """
    file = QueueFile.open_to_read(path)
    try:
        return _describe(url, file)
    finally:
        file.close()


def _describe(url: str, file: QueueFile) -> StreamInfo:
    geometry = file.geometry
    slots = slots_of(file.mapping, geometry)
    first = last = np.zeros(1, SLOT)[0]
    for _ in range(_LOOKS):
        oldest, head = file.field("tail"), file.field("head")
        count = head - oldest
        if count == 0:  # its slots may have no space on the disk yet
            break
        first, last = slots[oldest % len(slots)].copy(), slots[(head - 1) % len(slots)].copy()
        if file.field("tail") == oldest:
            break  # else the oldest was overwritten while it was looked at
    used = 0
    if count:
        end = int(last["position"]) + int(last["block"]) + int(last["length"])
        used = -(-end // ALIGN) * ALIGN - int(first["position"])
    stream = bytes(file.header["stream"][0])
    flags = file.flags
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
        oldest_time_ns=int(first["created_ns"]) if count else None,
        youngest_time_ns=int(last["created_ns"]) if count else None,
        fill=round(max(count / geometry.slots, used / geometry.buffer_size), 4),
        blocking=any(reader["holds"] for reader in _readers(file)),
        details={
            "epoch": file.field("epoch"),
            "stream": str(StreamId(stream)) if any(stream) else None,
            "compression": file.compression.value,
            "crc": HeaderFlag.CRC in flags,
            "sparse": HeaderFlag.SPARSE in flags,
            "writers": "many" if HeaderFlag.MANY_WRITERS in flags else "one",
            "state": State(file.field("state")).name.lower(),
            "created_ns": file.field("created_ns"),
            "writer_pid": _writer_pid(file),
            "readers": _readers(file),
            "groups": describe_groups(groups_of(file.path), head),
        },
    )


def _writer_pid(file: QueueFile) -> int | None:
    """Return the process that writes now; None when there is none, or many may."""
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
