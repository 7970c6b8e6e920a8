"""Logs of the first release open, go on and lose nothing."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from penstock.queue.log.endpoint import check
from support.log_files import log_reader, log_writer, stored, url_of

VECTORS = Path(__file__).parents[2] / "vectors" / "log" / "first-release.tar.gz"
PAYLOADS = [bytes([i]) * 200 for i in range(20)]


@pytest.fixture(params=["beams", "killed"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A log of 20 messages that a writer closed, or was killed over. A cursor is in each."""
    with tarfile.open(VECTORS) as files:
        files.extractall(tmp_path, filter="data")
    return tmp_path / str(request.param)


CURSORS = {"beams": ("archive", 5), "killed": ("me", 11)}


def test_its_messages_are_read(path: Path) -> None:
    assert stored(path) == PAYLOADS
    assert [fault for checked in check(url_of(path)) for fault in checked.faults] == []


def test_its_cursor_goes_on_where_it_was(path: Path) -> None:
    name, at = CURSORS[path.name]
    with log_reader(path, f"cursor={name}") as reader:
        assert [m.seq for m in reader.available()] == list(range(at, 20))
        books = reader.statistics()
    assert (books.lost, books.restarts) == (0, 0)


def test_a_writer_goes_on_and_its_cursor_follows(path: Path) -> None:
    name, at = CURSORS[path.name]
    with log_reader(path) as reader:
        before = reader.bounds()
    with log_writer(path, "") as writer:
        assert writer.write(b"more") == 20
    assert stored(path) == [*PAYLOADS, b"more"]
    with log_reader(path, f"cursor={name}") as reader:
        assert [m.seq for m in reader.available()] == list(range(at, 21))
        books, bounds = reader.statistics(), reader.bounds()
    assert (books.lost, books.restarts) == (0, 0)
    assert bounds.successor(before.epoch, 20) == 20
