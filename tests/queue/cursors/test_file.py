"""The file of named positions: how it is made, and what it is when damaged."""

from __future__ import annotations

import gc
import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import (
    CursorTableFull,
    DamagedQueue,
    InvalidOption,
    StorageError,
    Unsupported,
)
from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import ENTRY_SIZE
from support.cursor_tables import HEADER, descriptors, names


def test_a_file_is_made_with_its_folders_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "cursors"
    with CursorFile(str(path), count=3) as file:
        for number in range(3):
            file.claim(f"{number}")
    assert path.stat().st_size == HEADER + 3 * ENTRY_SIZE
    assert path.stat().st_mode & 0o600 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_exists_keeps_its_own_count(path: str) -> None:
    CursorFile(path, count=2).close()
    with CursorFile(path, count=100) as file:
        file.claim("a")
        file.claim("b")
        with pytest.raises(CursorTableFull):
            file.claim("c")


@pytest.mark.parametrize("count", [0, -1, 65537])
def test_a_count_out_of_range_is_refused_and_nothing_is_made(path: str, count: int) -> None:
    with pytest.raises(InvalidOption, match="count"):
        CursorFile(path, count=count)
    assert not Path(path).exists()


def test_processes_that_make_the_file_at_once_share_one(path: str) -> None:
    for _ in range(20):
        pids = []
        for worker in range(4):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    CursorFile(path, count=4).claim(f"{worker}")
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
        with CursorFile(path) as file:
            assert sorted(names(file)) == ["0", "1", "2", "3"]
        assert [p.name for p in Path(path).parent.iterdir()] == ["cursors"]
        Path(path).unlink()


def patched(path: str, offset: int, data: bytes) -> None:
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "field"),
    [
        (0, b"PNCURSOS", "magic"),
        (8, struct.pack("<I", 0), "version"),
        (12, struct.pack("<I", 0), "count"),
        (12, struct.pack("<I", 2**32 - 1), "count"),
        (12, struct.pack("<I", 9), "size"),
        (12, struct.pack("<I", 7), "size"),
    ],
)
def test_a_damaged_header_is_named(path: str, offset: int, data: bytes, field: str) -> None:
    CursorFile(path, count=8).close()
    patched(path, offset, data)
    before = Path(path).read_bytes()
    with pytest.raises(DamagedQueue) as caught:
        CursorFile(path)
    assert (caught.value.path, caught.value.field) == (path, field)
    assert caught.value.hint
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("size", [0, 1, 15, 16, 4095, 4096, HEADER + 8 * ENTRY_SIZE - 1])
def test_a_truncated_file_is_damaged(path: str, size: int) -> None:
    CursorFile(path, count=8).close()
    os.truncate(path, size)
    with pytest.raises(DamagedQueue) as caught:
        CursorFile(path)
    assert (caught.value.field, caught.value.offset) == ("size", size)


@settings(max_examples=200)
@given(header=st.binary(min_size=16, max_size=16), tail=st.integers(0, 300))
def test_fuzz_of_the_header_ends_in_a_clear_error(header: bytes, tail: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cursors"
        path.write_bytes(header.ljust(HEADER, b"\0") + bytes(tail))
        with pytest.raises((DamagedQueue, Unsupported)):
            CursorFile(str(path))


def test_a_file_of_a_newer_version_is_refused_and_says_so(path: str) -> None:
    CursorFile(path, count=8).close()
    patched(path, 8, struct.pack("<I", 2))
    with pytest.raises(Unsupported, match="version 2") as caught:
        CursorFile(path)
    assert caught.value.hint


def test_what_the_system_refuses_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        CursorFile(str(tmp_path))
    dangling = tmp_path / "link"
    dangling.symlink_to("/nowhere/at/all")
    with pytest.raises(StorageError):
        CursorFile(str(dangling))
    assert list(tmp_path.iterdir()) == [dangling]


def test_a_refused_file_leaves_no_descriptor_open(path: str) -> None:
    Path(path).write_bytes(b"no cursors")
    before = len(descriptors())
    for _ in range(20):
        with pytest.raises(DamagedQueue):
            CursorFile(path)
    gc.collect()
    assert len(descriptors()) <= before


def test_a_closed_file_leaves_no_descriptor_open(path: str) -> None:
    CursorFile(path).close()
    before = len(descriptors())
    for _ in range(20):
        with CursorFile(path) as file:
            file.claim("a")
    assert len(descriptors()) == before


def test_sync_writes_the_file_of_the_positions(
    file: CursorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the disk holds shows only after a power failure: see that the kernel is asked to.
    synced: list[str] = []
    fdatasync = os.fdatasync

    def spy(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", spy)
    file.claim("a", seq=5).move(6)
    file.sync()
    assert synced == [file.path]


def test_a_device_that_refuses_to_sync_is_told(
    file: CursorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        file.sync()
