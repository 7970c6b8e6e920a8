"""What does an outbox do when its disk is full, and when there is room again?"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from penstock.core.errors import StorageError
from penstock.dispatch.outbox import Entry, Outbox, Reason
from support.small_disks import small_disk_at


def some(first: int) -> list[Entry]:
    return [Entry(1, 0, 0, 0, 1, b"%08d" % i + bytes(1000)) for i in range(first, first + 20)]


def fill(outbox: Outbox) -> int:
    """Append until there is no space; return how many messages are stored."""
    for first in range(0, 10_000, 20):
        try:
            outbox.append(some(first))
        except StorageError:
            return outbox.books().stored
    raise AssertionError("the disk is not full")


def use_up(disk: Path) -> None:
    """Leave nothing, as others may who use the disk, too."""
    with (disk / "others").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_what_was_stored_is_there_and_room_comes_back_with_what_is_settled(tmp_path: Path) -> None:
    with (
        small_disk_at(tmp_path / "disk", "2M") as disk,
        Outbox(disk / "outbox", segment=128 << 10) as outbox,
    ):
        stored = fill(outbox)
        assert stored > 500
        use_up(disk)
        items = outbox.take(10_000)
        assert [int(item.raw[:8]) for item in items] == list(range(stored))
        # One stays, so that there are notes to be written, for which there is no space at first.
        outbox.settle([*items[:-2], items[-1]], Reason.ACKED)
        outbox.give_back(items[-2:-1])
        outbox.tend()
        assert outbox.append(some(stored)).stored == 20
        books = outbox.books()
        assert (books.stored, books.acked, books.queued) == (stored + 20, stored - 1, 21)


def test_it_can_be_opened_on_a_full_disk_and_emptied(tmp_path: Path) -> None:
    with small_disk_at(tmp_path / "disk", "2M") as disk:
        outbox = Outbox(disk / "outbox", segment=128 << 10)
        stored = fill(outbox)
        use_up(disk)
        with pytest.raises(StorageError):
            outbox.close()  # there is no space for its notes
        with Outbox(disk / "outbox", segment=128 << 10) as outbox:
            items = outbox.take(10_000)
            assert [int(item.raw[:8]) for item in items] == list(range(stored))
            outbox.settle(items, Reason.ACKED)
            outbox.tend()
            assert outbox.append(some(stored)).stored == 20
