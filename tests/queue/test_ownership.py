"""One owner at a time, known by name, for as long as its process lives."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.core.errors import AlreadyExists, InvalidOption, StorageError
from penstock.queue.ownership import AlreadyOwned, Owner, Ownership
from support.lives import Life, Lives, Report

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    processes = Lives("support.stream_lives")
    yield processes
    processes.end()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "thing.owner")


def test_the_second_is_refused_with_the_name_of_the_first(path: str) -> None:
    first = Ownership.claim(path, "the first", "the thing")
    with pytest.raises(AlreadyOwned, match=r"the thing belongs to the first \(process \d+\)") as no:
        Ownership.claim(path, "the second", "the thing")
    assert (no.value.what, no.value.owner, no.value.pid) == ("the thing", "the first", os.getpid())
    assert isinstance(no.value, AlreadyExists)
    assert Owner.of(path) == ("the first", os.getpid(), True)
    first.release()
    first.release()
    assert Owner.of(path) == ("the first", os.getpid(), False)
    Ownership.claim(path, "the second", "the thing").release(remove=True)
    assert Owner.of(path) is None


def test_a_shorter_name_leaves_nothing_of_a_longer_one(path: str) -> None:
    for name in ("ß" * 200, "short", '"quoted"\n', "x"):
        ownership = Ownership.claim(path, name, "the thing")
        assert Owner.of(path) == (name, os.getpid(), True)
        ownership.release()


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_an_owner_has_a_name_of_sensible_length(path: str, name: str) -> None:
    with pytest.raises(InvalidOption):
        Ownership.claim(path, name, "the thing")
    assert not Path(path).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"owner": 3, "pid": 4}', b"\xff" * 9000])
def test_what_is_in_the_file_does_not_matter_to_the_next_owner(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    assert Owner.of(path) == ("", 0, False)
    ownership = Ownership.claim(path, "me", "the thing")
    assert Owner.of(path) == ("me", os.getpid(), True)
    ownership.release()


def test_where_no_file_can_be_made_the_system_says_why(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No such file"):
        Ownership.claim(str(tmp_path / "missing" / "thing"), "me", "the thing")


def test_one_that_is_forgotten_is_free_again(path: str) -> None:
    Ownership.claim(path, "forgetful", "the thing")
    Ownership.claim(path, "me", "the thing").release()


def test_a_forked_child_does_not_own_what_its_parent_owns(path: str) -> None:
    ownership = Ownership.claim(path, "parent", "the thing")
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    try:
        ownership.release()
        Ownership.claim(path, "next", "the thing").release()
    finally:
        child.kill()
        child.join()


def test_of_processes_that_contend_and_are_killed_one_is_the_owner(
    lives: Lives, path: str, tmp_path: Path
) -> None:
    mark = str(tmp_path / "mark")
    reports = [Report(tmp_path / f"report{who}") for who in range(4)]
    chance = random.Random(3)

    def start(who: int) -> Life:
        return lives.start("contend", path=path, mark=mark, report=reports[who].path, who=who)

    running = [start(who) for who in range(4)]
    for _ in range(25):
        time.sleep(chance.random() * 0.05)
        who = chance.randrange(4)
        assert running[who].kill().killed
        running[who] = start(who)
    for report in reports:
        report.wait_for(b"o")
    for life in running:
        assert life.ended() is None, "it found another owner beside it"
        life.kill()
    Ownership.claim(path, "the last", "the thing").release()
