"""A table of named positions in memory of one's own."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import CursorInUse, InvalidOption, NotFound
from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import LIVE_BASE, CursorTable


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[str, memoryview]]:
    path = tmp_path / "queue"
    path.write_bytes(bytes(4096))
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        view = memoryview(mapped)
        yield str(path), view
        view.release()


def test_a_table_may_be_any_part_of_any_file(mapped: tuple[str, memoryview]) -> None:
    path, memory = mapped
    with memory[256:1024] as part, CursorTable(path, part) as table:
        index = table.claim("a", seq=9).index
        assert memory.cast("Q")[(256 + index * 128 + 16) // 8] == 9
        assert not any(memory[1024:])
        with pytest.raises(IndexError):
            table.is_alive(6)
        with pytest.raises(IndexError):
            table.is_alive(-1)


def test_two_tables_in_one_file_have_locks_of_their_own(mapped: tuple[str, memoryview]) -> None:
    path, memory = mapped
    with (
        memory[:1024] as first,
        memory[1024:2048] as second,
        CursorTable(path, first) as one,
        CursorTable(path, second, live_base=LIVE_BASE + 1024) as two,
    ):
        a, b = one.claim("a"), two.claim("a")
        assert a.index == b.index
        a.release()
        assert two.is_alive(b.index)
        assert not one.is_alive(a.index)


def test_a_descriptor_is_reopened_and_stays_the_callers(mapped: tuple[str, memoryview]) -> None:
    path, memory = mapped
    fd = os.open(path, os.O_RDWR)
    Path(path).unlink()
    with memory[:1024] as part, CursorTable(fd, part) as table, CursorTable(fd, part) as second:
        os.fstat(fd)
        os.close(fd)
        cursor = table.claim("a")
        assert second.is_alive(cursor.index)
        with pytest.raises(CursorInUse):
            second.claim("a")


def test_the_owner_locks_the_byte_that_is_documented(file: CursorFile) -> None:
    file.claim("first")
    cursor = file.claim("a")
    with Path(file.path).open("r+b") as other:
        for byte, is_free in ((LIVE_BASE + cursor.index, False), (LIVE_BASE - 1, True)):
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            found = fcntl.fcntl(other, fcntl.F_OFD_GETLK, lock)
            assert (struct.unpack("hhqqi4x", found)[0] == fcntl.F_UNLCK) == is_free


@pytest.mark.parametrize(
    "memory",
    [
        memoryview(bytes(128)),
        memoryview(bytearray(127)),
        memoryview(bytearray(0)),
        memoryview(bytearray(137))[1:129],
    ],
    ids=["read-only", "part of an entry", "empty", "not aligned"],
)
def test_memory_that_cannot_be_a_table_is_refused(file: CursorFile, memory: memoryview) -> None:
    with pytest.raises(InvalidOption) as caught:
        CursorTable(file.path, memory)
    assert caught.value.option == "memory"


@pytest.mark.parametrize("live_base", [0, -5, 2**63 - 1])
def test_locks_that_no_file_can_have_are_refused(file: CursorFile, live_base: int) -> None:
    with pytest.raises(InvalidOption, match="live_base"):
        CursorTable(file.path, memoryview(bytearray(256)), live_base=live_base)


def test_a_table_needs_its_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        CursorTable(str(tmp_path / "none"), memoryview(bytearray(128)))
    with pytest.raises(NotFound):
        CursorTable(999_999, memoryview(bytearray(128)))
