"""What a run loses is told, however it ends: by the run itself, or by the next that can."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import create, open_reader, open_writer
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import run
from penstock.pipeline.run.queries import _Batches
from penstock.pipeline.source.loss_reports import note_delivered
from support.spark_lives import environment, kill_session
from support.spark_streams import fill, numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from penstock.pipeline.run import Outcome, Progress


def overwriting(frame: DataFrame, folder: str) -> DataFrame:
    """Return the rows, and overwrite the ring that they come from while the first are read."""

    def pass_on(batches: Any) -> Any:
        for batch in batches:
            with open_writer(f"fmq:{folder}/q") as writer:
                if not Path(f"{folder}/done").exists():
                    Path(f"{folder}/done").touch()
                    writer.write_many([b"%d" % n for n in range(60, 260)])
            yield batch

    return frame.mapInArrow(pass_on, frame.schema)


@pytest.mark.timeout(300)
def test_what_tasks_lose_is_told_by_a_run_that_ends_before_it_plans_again(
    spark: SparkSession, tmp_path: Path
) -> None:
    create(f"fmq:{tmp_path}/q?slots=64&size=64k")
    fill(f"fmq:{tmp_path}/q", range(60))
    pipeline = (
        Pipeline("p")
        .source("a", url=f"fmq:{tmp_path}/q", failOnDataLoss=False, minPartitions=10)
        .stage("b", from_="a", use=overwriting, options={"folder": str(tmp_path)})
        .sink("out", from_="b", url=f"log:{tmp_path}/out")
        .with_settings(trigger="1h")
    )
    batches: list[int] = []

    def take(progress: Progress) -> None:
        batches.append(progress.batches)

    def run_it(**more: Any) -> Outcome:
        return run(plan(pipeline), spark=spark, checkpoint=str(tmp_path / "checkpoints"), **more)

    first = run_it(on_progress=take, should_stop=lambda: bool(batches and batches[-1]))
    found = numbers(f"log:{tmp_path}/out")
    assert first.lost == 60 - len(found) > 0
    # The next says nothing of it, and all of what was overwritten before it began.
    second = run_it(once=True)
    assert numbers(f"log:{tmp_path}/out") == [*found, *range(196, 260)]
    assert second.lost == 196 - 60


@pytest.mark.timeout(300)
def test_what_was_delivered_before_an_outage_is_not_lost_when_the_query_is_started_again(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fmq:{tmp_path}/q"
    create(f"{url}?slots=64&size=64k")
    fill(url, range(60))
    write = _Batches.write

    def fail_once(self: _Batches, *batch: Any) -> None:
        write(self, *batch)
        if not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            fill(url, range(60, 260))  # the replay finds nothing of the batch any more
            raise ConnectionResetError("the other machine is down")

    monkeypatch.setattr(_Batches, "write", fail_once)
    pipeline = (
        Pipeline("p")
        .source("a", url=url, failOnDataLoss=False)
        .sink("out", from_="a", url=f"log:{tmp_path}/out", mode="update")
        .with_settings(restart={"initial": "10ms", "max_attempts": 1})
    )
    outcome = run(plan(pipeline), spark=spark, checkpoint=str(tmp_path / "checkpoints"), once=True)
    assert outcome.queries[0].restarts == 1
    assert numbers(f"log:{tmp_path}/out") == [*range(60), *range(196, 260)]
    assert outcome.lost == 196 - 60


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("failure", "restarts"),
    [
        (ConnectionResetError("the other machine is down"), 2),
        (OSError("Python worker failed to connect back"), 1),
    ],
    ids=["outage", "slow start"],
)
def test_a_query_waits_for_room_on_a_full_disk_before_it_is_started_again(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: OSError,
    restarts: int,
) -> None:
    url = f"fmq:{tmp_path}/q"
    fill(url, range(60))
    write = _Batches.write
    failures = iter([failure])
    full_disks = iter([OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])

    def fail_once(self: _Batches, *batch: Any) -> None:
        write(self, *batch)
        for error in failures:
            raise error

    def find_a_full_disk_once(*note: Any) -> None:
        for error in full_disks:
            raise error
        note_delivered(*note)

    monkeypatch.setattr(_Batches, "write", fail_once)
    monkeypatch.setattr("penstock.pipeline.run.loss_book.note_delivered", find_a_full_disk_once)
    pipeline = (
        Pipeline("p")
        .source("a", url=url, failOnDataLoss=False)
        .sink("out", from_="a", url=f"log:{tmp_path}/out", mode="update")
        .with_settings(restart={"initial": "10ms", "max_attempts": 2})
    )
    said: list[str] = []
    outcome = run(
        plan(pipeline),
        spark=spark,
        checkpoint=str(tmp_path / "checkpoints"),
        once=True,
        say=said.append,
    )
    assert "No space left on device; it is started again" in said[-1]
    assert (outcome.queries[0].restarts, outcome.lost) == (restarts, 0)
    assert numbers(f"log:{tmp_path}/out") == [*range(60)]


class Writer:
    """Fills a ring faster than Spark reads it, in a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._chance = random.Random()
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with open_writer(self._url) as writer:
            while not self._stop.is_set():
                writer.write_many([b"%d" % n for n in range(self.count, self.count + 250)])
                self.count += 250
                self._stop.wait(self._chance.choice((0.01, 0.1, 0.5)))  # now faster, now slower

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class Run:
    """`penstock run`, and how it is ended."""

    def __init__(self, folder: Path, *options: str) -> None:
        penstock = str(Path(sys.executable).with_name("penstock"))
        self._errors = folder / "errors"
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [penstock, "run", "p.yaml", "--master", "local[1]", "--progress", "json", *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env=environment(),
                start_new_session=True,
                text=True,
            )

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def end(self, sent: signal.Signals, seconds: float) -> int:
        """Let it do a batch, wait a little, and end it; return what it tells to be lost."""
        for said in self.lines():
            if said.get("batches"):
                break
        time.sleep(seconds)
        os.killpg(self.process.pid, sent)
        return self.told(sent)

    def told(self, sent: signal.Signals | None = None) -> int:
        *_, last = [{}, *self.lines()]
        assert self.process.stdout is not None
        self.process.stdout.close()
        code = self.process.wait(120)
        kill_session(self.process.pid)  # what a killed driver left
        if sent is signal.SIGKILL:
            assert code == -signal.SIGKILL
            return 0
        text = self._errors.read_text()
        assert last.get("event") == "end", text[-3000:]
        assert code == (3 if last["lost"] else 0), text[-3000:]
        assert last["lost_unknown"] == 0
        return int(last["lost"])


FULL = tuple(
    tuple(random.Random(seed).choices((signal.SIGTERM, signal.SIGKILL, signal.SIGINT), k=10))
    for seed in range(5)
)


@pytest.mark.parametrize(
    "signals",
    [
        *(
            pytest.param(one, id=f"full-{i}", marks=[pytest.mark.full, pytest.mark.timeout(3600)])
            for i, one in enumerate(FULL)
        ),
    ],
)
def test_however_a_run_is_ended_what_is_told_is_what_was_lost(
    tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    source = f"fmq:{tmp_path}/a"
    create(f"{source}?slots=4000&size=4M")
    (tmp_path / "p.yaml").write_text(
        f"pipeline: p\n"
        f'sources: {{a: {{url: "{source}", failOnDataLoss: false, minPartitions: 4, '
        f"startingOffsets: 0}}}}\n"
        f'sinks: {{out: {{from: a, url: "log:{tmp_path}/out?sync=none"}}}}\n'
    )
    chance = random.Random()
    told = 0
    writer = Writer(source)
    try:
        for one in signals:
            told += Run(tmp_path).end(one, chance.uniform(0, 1.5))
    finally:
        writer.stop()
    told += Run(tmp_path, "--once").told()
    found = numbers(f"log:{tmp_path}/out")
    assert len(found) == len(set(found))
    with open_reader(source) as reader:
        assert reader.bounds().end == writer.count
    assert told == writer.count - len(found) > 0
