"""How are the readers and writers of a classic queue opened, and what does it hold?"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.endpoints import Endpoint
from penstock.core.interfaces import StreamInfo
from penstock.queue.classic.creation import create_queue, open_device
from penstock.queue.classic.layout import Slot
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.repair import Repair, check_queue, repair_queue
from penstock.queue.classic.slots import (
    check_sizes,
    live_span,
    live_table,
    read_status,
    youngest_seq,
)
from penstock.queue.classic.writer import ClassicWriter
from penstock.queue.storage import storage_errors
from penstock.queue.wide.file import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.position import Position
    from penstock.core.url import URL
    from penstock.queue.classic.device import Device

__all__ = ["ClassicEndpoint", "describe_queue"]

_SECOND = 1_000_000_000
#: Attempts at a consistent snapshot beside a fast writer.
_MOST_LOOKS = 100


def describe_queue(url: str, path: str) -> StreamInfo:
    """Describe a queue without changing it.

    :raises NotFound: there is no queue at this path.
    :raises DamagedQueue: its status is damaged.
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


class ClassicEndpoint(Endpoint):
    """`fmq:/path/name` of a queue that has, or is to get, the classic layout."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        return ClassicReader(url.text, _path(url), start, ClassicOptions.of(url))

    def open_writer(self, url: URL) -> Writer:
        return ClassicWriter(url.text, _path(url), ClassicOptions.of(url))

    def create(self, url: URL, *, replace: bool = False) -> None:
        options = ClassicOptions.of(url)
        create_queue(
            _path(url),
            options.slots,
            options.size,
            _now(),
            replace=replace,
            lock_timeout=options.lock_timeout,
        ).close()

    def describe(self, url: URL) -> StreamInfo:
        ClassicOptions.of(url)
        return describe_queue(url.text, _path(url))

    def check(self, url: URL) -> int:
        """Check all messages and the status, and return the count of messages.

        :raises DamagedQueue: names the first fault.
        """
        with _locked(url, "checking") as device:
            return check_queue(device)

    def repair(self, url: URL) -> Repair:
        """Repair a damaged queue: keep its readable messages.

        :raises DamagedQueue: the queue is beyond repair; nothing was changed.
        """
        with _locked(url, "repairing") as device:
            return repair_queue(device, _now())


def _path(url: URL) -> str:
    return url.path.removesuffix(SUFFIX)


def _now() -> int:
    return SYSTEM_CLOCK.now_ns() // 1_000_000_000


@contextlib.contextmanager
def _locked(url: URL, doing: str) -> Iterator[Device]:
    path, options = _path(url), ClassicOptions.of(url)
    device = open_device(path, writable=True)
    try:
        with storage_errors(doing, path), device.locked(options.lock_timeout):
            yield device
    finally:
        device.close()
