"""Files of which nobody ever finds a part, also after kill -9."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import create
from penstock.core.whole_files import make_folder, make_whole, sync_names, write_whole
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 1 << 20


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_file_is_written_and_written_anew(tmp_path: Path, *, sync: bool, is_shared: bool) -> None:
    path = tmp_path / "notes.json"
    for content in (b"first", b"", b"the second one"):
        write_whole(path, content, sync=sync, is_shared=is_shared)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]
    sync_names(tmp_path)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.mkdir()
    (path / "kept").touch()
    with pytest.raises(OSError, match="directory"):
        write_whole(path, b"new", sync=False)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "nowhere" / "notes", b"new", sync=True)


def test_what_is_made_stays_when_somebody_was_quicker(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folder" / "cursors"
    make_whole(path, b"theirs")
    make_whole(path, b"ours")
    assert path.read_bytes() == b"theirs"
    assert list(path.parent.iterdir()) == [path]


def test_of_many_who_make_it_at_the_same_time_one_wins_whole(tmp_path: Path) -> None:
    path = tmp_path / "made"
    start = threading.Barrier(8)

    def make(letter: int) -> None:
        start.wait()
        make_whole(path, bytes([letter]) * SIZE)

    threads = [threading.Thread(target=make, args=(65 + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    content = path.read_bytes()
    assert content == content[:1] * SIZE
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_finds_a_whole_file_at_any_moment_also_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "state"
    script = (
        "import itertools, pathlib, sys\n"
        "from penstock.core.whole_files import write_whole\n"
        "for i in itertools.count():\n"
        f"    write_whole(pathlib.Path(sys.argv[1]), bytes([i % 256]) * {SIZE}, sync=False)\n"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", script, str(path)]) as writer:
            until(path.exists)
            found: set[int] = set()

            def is_whole_and_new(found: set[int] = found) -> bool:
                content = path.read_bytes()
                assert content == content[:1] * SIZE
                found.add(content[0])
                return len(found) > 20

            until(is_whole_and_new)
            writer.kill()
        content = path.read_bytes()
        assert content == content[:1] * SIZE
        # What it left is overwritten by the next, and does not pile up.
        assert {one.name for one in tmp_path.iterdir()} <= {"state", "state.new"}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make_folder, id="folder"),
        pytest.param(lambda folder: make_whole(folder / "file", b"x"), id="file"),
        pytest.param(lambda folder: create(f"fmq:{folder}/queue", slots=2, size="4k"), id="queue"),
        pytest.param(lambda folder: create(f"log:{folder}/log", segment="64k"), id="log"),
    ],
)
def test_the_names_of_new_folders_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object]
) -> None:
    synced: set[Path] = set()
    fsync = os.fsync

    def note_and_sync(file: int) -> None:
        synced.add(Path(f"/proc/self/fd/{file}").readlink())
        fsync(file)

    monkeypatch.setattr(os, "fsync", note_and_sync)
    deep = tmp_path / "a" / "b" / "c"
    make(deep)
    assert deep.is_dir()
    assert synced >= {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
