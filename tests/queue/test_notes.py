"""A stream keeps a small note of each writer that appends batch by batch."""

from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from penstock import Unsupported
from penstock.core.endpoints import create, remove
from penstock.core.errors import DamagedQueue, LockTimeout
from penstock.queue import notes as module
from penstock.queue.append_once import notes_of
from support.processes import shared_memory_path

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("scheme", ["fmq", "log"])
def test_a_note_is_there_until_it_is_forgotten(tmp_path: Path, scheme: str) -> None:
    notes = notes_of(f"{scheme}:{tmp_path}/x?sync=none")
    assert notes.read() == {}
    notes.write("one", {"batch": 1}, sync=True)
    notes.write("two", {"batch": 2}, sync=False)
    notes.write("one", {"batch": 3}, sync=False)
    assert list(notes_of(f"{scheme}:{tmp_path}/x").read().items()) == [
        ("two", {"batch": 2}),
        ("one", {"batch": 3}),
    ]
    notes.write("two", None, sync=False)
    assert notes.read() == {"one": {"batch": 3}}


def test_a_queue_in_shared_memory_is_removed_with_its_notes(tmp_path: Path) -> None:
    with shared_memory_path(tmp_path) as path:
        url = f"fmq:{path}?layout=classic"
        create(url)
        notes_of(url).write("one", {"batch": 1}, sync=False)
        remove(url)
        assert notes_of(url).read() == {}
        assert list(tmp_path.glob("*.json")) == []


def test_writers_of_several_queries_do_not_lose_each_others_notes(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for batch in range(10):
            notes_of(f"log:{tmp_path}/x").write(f"q{number}", {"batch": batch}, sync=False)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert notes_of(f"log:{tmp_path}/x").read() == {f"q{i}": {"batch": 9} for i in range(8)}


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.fmq.commits.json").write_bytes(b"\xff\x00")
    with pytest.raises(DamagedQueue, match=r"x\.fmq\.commits\.json"):
        notes_of(f"fmq:{tmp_path}/x").read()


def test_whoever_locks_the_folder_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(LockTimeout, match="somebody has locked"):
        notes_of(f"log:{tmp_path}/x").write("q", {}, sync=False)
    os.close(folder)


def test_a_stream_that_keeps_none_says_so() -> None:
    with pytest.raises(Unsupported, match="keeps no notes"):
        notes_of("up+mqtt://broker/?topic=a")
