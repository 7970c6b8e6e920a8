"""The driver is killed in the middle of a batch, again and again, and every row is there once."""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from support.exactly_once import (
    check_nothing_left,
    check_pipeline,
    check_stream,
    write_messages,
    write_pipeline,
)
from support.spark_lives import Program, copying, programs, running

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.spark_lives import Programs


class Size(NamedTuple):
    messages: int
    per_batch: int
    kills: int
    master: str


FULL = pytest.param(
    Size(1_000_000, 20_000, 10, "local[2]"),
    id="full",
    marks=[pytest.mark.full, pytest.mark.timeout(1500)],
)


def quick(kills: int) -> object:
    # On one core there are half as many processes to start; each batch has two tasks all the same.
    size = Size(60_000, 3_000, kills, "local[1]")
    return pytest.param(size, id="quick", marks=pytest.mark.timeout(600))


class Killer:
    """Starts a program until it comes to its end, and kills it in the middle of batches before."""

    def __init__(
        self, start: Callable[[], Program], checkpoint: Path, notes: Path, started: Programs
    ) -> None:
        self._start = start
        self._checkpoint = checkpoint
        self._notes = notes
        self._started = started
        self._random = random.Random()
        #: Seconds of the first batch of a program, and of those that follow.
        self._slow, self._fast = 5.0, 0.5

    def run(self, kills: int) -> None:
        """Cut off so many batches, then let it come to its end."""
        moments = itertools.cycle((self._in_a_batch, self._as_it_appends, self._in_the_first_batch))
        if self._random.random() < 0.5:
            next(moments)
        cut: list[int] = []
        for lives in itertools.count():
            if len(cut) == kills:
                break
            assert lives < 2 * kills + 2, f"in {lives} lives only {cut} were cut off"
            program = self._started.add(self._start())
            program.until(state="starting")
            next(moments)(program)
            assert program.process.poll() is None, "it was done too early"
            program.kill()
            batch = self._cut_off()
            cut += [] if batch is None else [batch]
        said = self._started.add(self._start()).wait()
        assert said[-1]["event"] == "end"
        assert self._cut_off() is None

    def _in_a_batch(self, program: Program) -> None:
        """Wait for some batches, and part of another."""
        self._slow = program.until(state="running")["batch_seconds"]
        for _ in range(self._random.randint(1, 3)):
            self._fast = program.until(state="running")["batch_seconds"]
        time.sleep(self._random.uniform(0, self._fast))

    def _as_it_appends(self, program: Program) -> None:
        """Wait for the note that a batch is about to be appended, which may be one done again."""
        before = self._noted()
        while self._noted() == before:
            assert program.process.poll() is None, program.errors()
            time.sleep(0.001)

    def _noted(self) -> int:
        return self._notes.stat().st_mtime_ns if self._notes.exists() else 0

    def _in_the_first_batch(self, program: Program) -> None:
        """Wait for part of the batch that is done again."""
        del program
        time.sleep(self._random.uniform(0, self._slow))

    def _cut_off(self) -> int | None:
        """Return the batch that is begun and not done."""
        begun, done = (
            {int(file.name) for file in self._checkpoint.glob(f"{name}/*") if file.name.isdigit()}
            for name in ("offsets", "commits")
        )
        return max(begun - done, default=None)


@pytest.mark.parametrize("size", [FULL])  # the quick form below has all of it, and files
def test_a_program_of_a_source_a_stage_and_a_sink_delivers_exactly_once(
    tmp_path: Path, size: Size
) -> None:
    source, target = f"fmq:{tmp_path}/in", f"log:{tmp_path}/out"
    write_messages(
        f"{source}?slots={size.messages}&size={size.messages * 256}", range(size.messages)
    )

    def start() -> Program:
        return copying(
            tmp_path / "errors",
            source=source,
            target=target,
            checkpoint=str(tmp_path / "checkpoint"),
            total=size.messages,
            per_batch=size.per_batch,
            master=size.master,
        )

    with programs() as started:
        notes = tmp_path / "out.commits.json"
        Killer(start, tmp_path / "checkpoint", notes, started).run(size.kills)
    check_stream(target, range(size.messages))
    check_nothing_left(tmp_path)


@pytest.mark.parametrize("size", [quick(kills=1), FULL])
def test_a_pipeline_with_streams_and_files_delivers_exactly_once_to_each(
    tmp_path: Path, size: Size
) -> None:
    file = write_pipeline(tmp_path, range(size.messages), size.per_batch)
    checkpoint = tmp_path / "checkpoints"

    def start() -> Program:
        options = ("--once", "--checkpoint", str(checkpoint), "--master", size.master)
        return running(tmp_path / "errors", file, *options)

    with programs() as started:
        notes = tmp_path / "all.commits.json"
        Killer(start, checkpoint / "numbers-all_of_them", notes, started).run(size.kills)
    check_pipeline(tmp_path, range(size.messages))
