"""What does a classic queue hold now?"""

from __future__ import annotations

from penstock.core.info import StreamInfo
from penstock.queue.classic.creation import open_device
from penstock.queue.classic.layout import Slot
from penstock.queue.classic.slots import live_span, live_table, youngest_seq
from penstock.queue.classic.status import check_sizes, read_status
from penstock.queue.storage import storage_errors

__all__ = ["describe_queue"]

_SECOND = 1_000_000_000
#: A writer can be so fast that a look at its queue is out of date before it is over.
_MOST_LOOKS = 100


def describe_queue(url: str, path: str) -> StreamInfo:
    """Look at a queue without touching it.

    :raises NotFound: there is none.
    :raises DamagedQueue: its status is not right.
    """
    device = open_device(path, writable=False)
    try:
        with storage_errors("reading", path):
            for _ in range(_MOST_LOOKS):
                status = read_status(device)
                check_sizes(device, status)
                slots, is_theirs = live_table(device, status)
                if is_theirs.any() or len(slots) == 0:
                    break  # else all were overwritten under our eyes
        storage = device.storage
    finally:
        device.close()
    live = [Slot._make(row) for row in slots[is_theirs].tolist()]
    used = sum(slot.stored_len for slot in live)
    times = [slot.time for slot in live]
    youngest = oldest = None
    if live:
        youngest = youngest_seq(status)
        oldest = youngest - live_span(status) + 1 + int(is_theirs.argmax())
    return StreamInfo(
        url=url,
        layout="classic",
        storage=storage,
        slots=status.nslots,
        buffer_size=status.buf_size,
        oldest_seq=oldest,
        youngest_seq=youngest,
        count=len(live),
        bytes=used,
        oldest_time_ns=min(times) * _SECOND if live else None,
        youngest_time_ns=max(times) * _SECOND if live else None,
        fill=round(max(len(live) / status.nslots, used / status.buf_size), 4),
        blocking=bool(status.blocking_write),
        details={
            "youngest_id": status.youngest_id,
            "last_id_read": status.last_id_read if status.blocking_write else None,
            "append_mode": bool(status.append_mode),
            "begin_insert": status.begin_insert,
            "end_insert": status.end_insert,
            "begin_append": status.begin_append,
            "time_written_ns": status.time_written * _SECOND,
            "compressed": sum(1 for slot in live if slot.compress),
            "types": sorted({slot.type for slot in live})[:20],
        },
    )
