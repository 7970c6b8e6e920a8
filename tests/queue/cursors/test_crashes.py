"""What does an owner that is killed leave behind?"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from penstock.core.errors import CursorTableFull
from penstock.queue.cursor_file import CursorFile
from support.cursor_tables import Start, at_every_line, killed_at, memory_of, names


def test_killing_its_owner_frees_a_cursor_and_keeps_its_position(
    file: CursorFile, start: Start
) -> None:
    other = start("hold", path=file.path, name="a", epoch=4, seq=10)
    other.hear()
    other.say("move 25")
    other.hear()
    other.kill()
    [entry] = file.entries()
    assert (entry.pid, entry.alive, entry.epoch, entry.seq) == (other.process.pid, False, 4, 25)
    cursor = file.claim("a", epoch=9)
    assert (cursor.is_new, cursor.epoch, cursor.seq) == (False, 4, 25)
    assert file.entries()[0].pid == os.getpid()


def test_the_place_of_a_passing_reader_that_was_killed_is_taken_again(
    path: str, start: Start
) -> None:
    with CursorFile(path, count=2) as file:
        others = [start("hold", path=path, name=None, seq=n) for n in range(2)]
        for other in others:
            other.hear()
        assert [entry.alive for entry in file.entries()] == [True, True]
        with pytest.raises(CursorTableFull):
            file.claim("a")
        others[1].kill()
        assert [entry.pid for entry in file.entries()] == [others[0].process.pid]
        assert file.claim("a", seq=7).seq == 7
        assert sorted(names(file)) == ["", "a"]


@pytest.mark.parametrize("name", ["a", None])
def test_nothing_is_stored_once_a_cursor_can_be_had_by_others(
    file: CursorFile, name: str | None
) -> None:
    cursor = file.claim(name, seq=5)
    with CursorFile(file.path) as second, memory_of(file.path) as memory:
        seen: list[bytes] = []

        def look() -> None:
            if not second.table.is_alive(cursor.index):
                seen.append(bytes(memory))

        at_every_line(look, cursor.release)
        assert seen
        assert set(seen) == {bytes(memory)}


def test_an_entry_that_changes_hands_is_never_shown_as_a_mixture(path: str) -> None:
    with (
        CursorFile(path, count=1) as file,
        CursorFile(path) as second,
        memory_of(path) as memory,
    ):
        file.claim(None, epoch=1, seq=1).release()
        memory[0] = 2  # as of a passing reader that was killed
        seen: list[tuple[object, ...]] = []
        at_every_line(
            lambda: seen.extend((e.name, e.pid, e.epoch, e.seq, e.alive) for e in second.entries()),
            lambda: file.claim("a", epoch=7, seq=70),
        )
        assert seen[-1] == ("a", os.getpid(), 7, 70, True)
        assert set(seen) <= {seen[-1], ("", os.getpid(), 1, 1, True)}


def test_a_kill_at_any_line_leaves_a_usable_table(path: str) -> None:
    def life() -> None:
        file = CursorFile(path, count=2)
        kept, passing = file.claim("kept", epoch=2, seq=20), file.claim(None, epoch=3, seq=30)
        kept.move(21)
        kept.move(1, epoch=5)
        passing.release()
        kept.release()
        file.forget("kept")
        file.close()

    # Never the new epoch with the old position: that would be taken for a place in the new one.
    places = [(2, 20), (2, 21), (2, 1), (5, 1)]
    step = 1
    while killed_at(step, life):
        step += 1
        if not Path(path).exists():
            continue
        with CursorFile(path) as file:
            entries = file.entries()
            assert [(e.name, e.alive) for e in entries] in ([], [("kept", False)])
            assert all((entry.epoch, entry.seq) in places for entry in entries)
            with file.claim("kept", epoch=2, seq=20, timeout=0) as cursor, file.claim(None):
                assert cursor.is_new == (not entries)
            file.forget("kept")
            # What the next life takes was somebody else's, and nothing of that may show through.
            with file.claim("before", epoch=9, seq=90), file.claim("too", epoch=9, seq=90):
                pass
            file.forget("before")
            file.forget("too")
            if step % 2:
                file.claim("kept", epoch=2, seq=20).release()
    assert step > 100
    with CursorFile(path) as file:
        assert file.entries() == []


def test_a_kill_at_any_line_of_reserving_leaves_all_of_it_or_nothing(path: str) -> None:
    def life() -> None:
        with CursorFile(path, count=1) as file:
            file.reserve("kept", epoch=2, seq=20)

    step = 1
    while killed_at(step, life):
        step += 1
        if not Path(path).exists():
            continue
        with CursorFile(path) as file:
            entries = file.entries()
            places = [(e.name, e.pid, e.epoch, e.seq, e.alive) for e in entries]
            assert places in ([], [("kept", 0, 2, 20, False)])
            # What the next life takes was somebody else's, and nothing of that may show through.
            file.forget("kept")
            file.claim("before", epoch=9, seq=90).release()
            file.forget("before")
    assert step > 30


def test_kills_at_any_moment_leave_a_usable_table(path: str) -> None:
    chance = random.Random(7)
    with CursorFile(path, count=6) as file:
        for _ in range(40):
            pids = []
            for worker in range(3):
                pid = os.fork()
                if pid == 0:
                    churn(path, worker)
                pids.append(pid)
            time.sleep(chance.uniform(0.001, 0.03))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
            for entry in file.entries():
                assert not entry.alive
                assert entry.name == f"worker {entry.epoch}"
            with contextlib.ExitStack() as held:
                indexes = {
                    held.enter_context(file.claim(f"worker {n}", epoch=n, timeout=0)).index
                    for n in range(3)
                }
                indexes |= {held.enter_context(file.claim(None, timeout=0)).index for _ in range(3)}
                assert len(indexes) == 6


def churn(path: str, worker: int) -> None:
    """Claim, move, release and forget, until killed."""
    try:
        file = CursorFile(path)
        while True:
            with file.claim(f"worker {worker}", epoch=worker) as named, file.claim(None):
                named.move(named.seq + 1)
            file.forget(f"worker {worker}")
    finally:
        os._exit(3)
