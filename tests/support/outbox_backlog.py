"""The process that fills an outbox while its receiver is down, and empties it again.

`python -m support.outbox_backlog FOLDER COUNT` prints what it measured, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path

from penstock.dispatch.outbox import Entry, Outbox, Reason

__all__ = ["disk_of", "rss"]

BATCH = 256


def rss() -> int:
    """Return the bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def disk_of(folder: Path) -> int:
    """Return the bytes of the disk that the files below a directory take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main(folder: Path, count: int) -> dict[str, float]:
    raw = os.urandom(1024)
    found: dict[str, float] = {}
    with Outbox(folder, max_messages=2 * count, max_bytes=1 << 40) as outbox:
        outbox.append([Entry(1, 0, 0, 1, 1, raw)])
        import_module("penstock.queue.wide.arrow")  # comes with the first batch, and stays
        before = rss()
        began = time.perf_counter()
        highest = before
        late = int(time.time() * 1000) + 3_600_000
        for first in range(1, count, BATCH):
            last = min(first + BATCH, count)
            # One of them, far from what is loaded, has its time much sooner than all others.
            times = [late + n if n != count // 2 else 1000 for n in range(first, last)]
            outbox.append([Entry(1, 0, ms, 1, 1, raw) for ms in times])
            highest = max(highest, rss())
        found["append_us"] = (time.perf_counter() - began) / count * 1e6
        outbox.tend()
        found["disk_full"] = disk_of(folder)
        found["next_expiry_ms"] = outbox.next_expiry_ms() or 0
        began = time.perf_counter()
        found["too_early"] = len(outbox.expire(999))
        expired = outbox.expire(1000)
        found["expire_ms"] = (time.perf_counter() - began) * 1000
        found["expired"] = len(expired)
        found["expired_arrival"] = expired[0].arrival
        began = time.perf_counter()
        taken = last_arrival = 0
        while items := outbox.take(BATCH, 1 << 20):
            taken += len(items)
            arrivals = [item.arrival for item in items]
            assert arrivals == sorted(arrivals)
            assert arrivals[0] > last_arrival
            last_arrival = arrivals[-1]
            outbox.settle(items, Reason.ACKED)
            highest = max(highest, rss())
        found["catch_up_us"] = (time.perf_counter() - began) / count * 1e6
        found["taken"] = taken
        outbox.tend()
        found["disk_empty"] = disk_of(folder)
        found["growth"] = highest - before
        books = outbox.books()
        found |= {"stored": books.stored, "acked": books.acked, "queued": books.queued}
    return found


if __name__ == "__main__":
    json.dump(main(Path(sys.argv[1]), int(sys.argv[2])), sys.stdout)
