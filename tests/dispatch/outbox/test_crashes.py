"""Is nothing lost when the process that has an outbox is killed with -9, at any moment?"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.dispatch.outbox import Outbox, Reason
from support.outbox_lives import NUMBER, OPTIONS, read_report

TESTS = Path(__file__).parents[2]
PATIENCE = 60.0
#: How many are killed while they start (of 1).
EARLY = 0.2


def test_what_is_stored_and_not_settled_comes_again_after_each_kill(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, rounds=5)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_is_stored_and_not_settled_comes_again_after_fifty_kills(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, rounds=50)


def _kill_again_and_again(tmp_path: Path, rounds: int) -> None:
    folder, report = tmp_path / "outbox", tmp_path / "report"
    chance = random.Random(rounds)
    for life in range(rounds):
        _live(folder, report, life, chance)
        _check(folder, report)
    said = read_report(str(report))
    assert said.settled, "nothing was settled at all"
    with Outbox(folder, **OPTIONS) as outbox:  # type: ignore[arg-type]
        while items := outbox.take(5000):
            outbox.settle(items, Reason.ACKED)
        books = outbox.books()
        assert books.queued == 0
        assert books.stored == books.acked + books.permanent


def _live(folder: Path, report: Path, seed: int, chance: random.Random) -> None:
    """Let a process work for some time, and kill it; sometimes already while it opens."""
    before = read_report(str(report)).lives
    process = subprocess.Popen(
        [sys.executable, "-m", "support.outbox_lives", folder, report, str(seed)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    try:
        if chance.random() < EARLY:
            time.sleep(chance.random())
            return
        deadline = time.monotonic() + PATIENCE
        while read_report(str(report)).lives == before:
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(chance.random() * 0.6)
        assert process.poll() is None, "it ended by itself"
    finally:
        process.kill()
        process.wait(10)


def _check(folder: Path, report: Path) -> None:
    said = read_report(str(report))
    stored = {n for first, last in said.stored for n in range(first, last + 1)}
    begun = {n for first, last in said.begun for n in range(first, last + 1)}
    with Outbox(folder, **OPTIONS) as outbox:  # type: ignore[arg-type]
        assert not outbox.findings
        books = outbox.books()
        items = outbox.take(1 << 30)
    numbers = [NUMBER.unpack_from(item.raw)[0] for item in items]
    assert len(set(numbers)) == len(numbers) == books.queued
    assert set(numbers) >= stored - said.maybe_settled, "a message is lost"
    assert set(numbers) <= begun
    assert numbers == sorted(numbers), "not in the order of arrival"
    assert [item.arrival for item in items] == sorted({item.arrival for item in items})
    assert books.stored == sum(books[1:])
    assert len(stored) <= books.stored <= len(begun)
    # Everything that ever was in it is there, or was settled.
    assert books.stored - books.queued <= len(said.maybe_settled)
