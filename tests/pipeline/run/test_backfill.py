"""Which messages a backfill takes: beside the live query, unfinished ones, and power failures."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock import create, open_reader, open_writer
from penstock.core.errors import InvalidOption, Malformed, StorageError, Unsupported
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import backfill as backfills
from penstock.pipeline.run.backfill import Backfill, NothingToDo, Unfinished
from penstock.pipeline.run.checkpoints import Checkpoints
from penstock.pipeline.source.checkpoint import folder_of
from support.machine import Machine
from support.planner import Planner

SECOND = 1_000_000_000


def write(url: str, first: int, end: int) -> None:
    with open_writer(url) as writer:
        for i in range(first, end):
            writer.write(b"%d" % i)
            time.sleep(0.0002)


def appended(url: str) -> list[int]:
    with open_reader(url) as reader:
        return [message.created_ns for message in reader.available()]


def checkpoints(folder: Path, url: str, backfill: Backfill | None, **source: Any) -> Checkpoints:
    """Plan the query `p-out` as a run does before it starts Spark."""
    made = Pipeline("p").source("a", url=url, **source)
    with ExitStack() as owned:
        return Checkpoints(
            plan(made.sink("out", from_="a", url=f"log:{folder}/out")),
            str(folder / "checkpoints"),
            backfill,
            owned,
            said.append,
            is_near=True,
        )


said: list[str] = []


def source_of(found: Checkpoints) -> Planner:
    """Return the source as Spark has it."""
    options = dict(found.options["p-out"]["a"])
    return Planner(options.pop("url"), **options)


def finish(found: Checkpoints) -> list[int]:
    """Do all of a backfill, and keep its progress as Spark does; return what it read."""
    planner = source_of(found)
    planner.begin()
    numbers = planner.run()
    folder = folder_of(found.of(found.queries[0]))
    assert folder is not None
    for name, text in (("offsets", f"v1\n{{}}\n{json.dumps(planner.at)}"), ("commits", "v1\n{}")):
        (folder / name).mkdir(parents=True)
        (folder / name / "0").write_text(text)
    return numbers


def test_an_unfinished_backfill_is_an_error_that_says_how_to_resume_it(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/in"
    write(url, 0, 20)
    times = appended(url)
    first = Backfill(times[0], times[10])
    checkpoints(tmp_path, url, first)  # and it fails before its first batch
    for later in (Backfill(times[0], times[15]), Backfill(times[2], times[8])):
        for _ in range(2):  # it does not take the range itself
            with pytest.raises(Unfinished, match=r"p-out: .* is not finished") as caught:
                checkpoints(tmp_path, url, later)
    start, end = caught.value.hint.split("--from ")[1].split(" resumes")[0].split(" --to ")  # type: ignore[union-attr]
    assert Backfill.parse(start, end, "append", time.time_ns()) == first
    assert finish(checkpoints(tmp_path, url, Backfill(times[12], times[15]))) == [12, 13, 14]
    assert finish(checkpoints(tmp_path, url, first)) == list(range(10))
    assert finish(checkpoints(tmp_path, url, Backfill(times[0], times[15]))) == [10, 11]
    with pytest.raises(NothingToDo, match="earlier backfills have all messages from"):
        checkpoints(tmp_path, url, Backfill(times[2], times[8]))
    # One with nothing to do has taken nothing that others would have to wait for.
    assert finish(checkpoints(tmp_path, url, Backfill(times[2], times[18]))) == [15, 16, 17]


def test_by_source_only_the_same_times_wait_for_an_unfinished_one(tmp_path: Path) -> None:
    url, base = f"log:{tmp_path}/in", 1_700_000_000 * SECOND
    with open_writer(url) as writer:
        for i in range(30):
            writer.write(b"%d" % i, time_ns=base + i * SECOND)
    checkpoints(tmp_path, url, Backfill(base, base + 10 * SECOND, "source"))
    with pytest.raises(Unfinished) as caught:
        checkpoints(tmp_path, url, Backfill(base + 5 * SECOND, base + 20 * SECOND, "source"))
    assert "--by source resumes it" in str(caught.value.hint)
    other = Backfill(base + 10 * SECOND, base + 20 * SECOND, "source")
    assert finish(checkpoints(tmp_path, url, other)) == list(range(10, 20))


@pytest.mark.parametrize("kind", ["log", "fmq"])
def test_after_a_power_failure_a_backfill_leaves_to_the_live_query_what_is_its_own(
    tmp_path: Path, kind: str
) -> None:
    machine = Machine(kind, tmp_path / "machine")
    machine.write(*range(100))
    machine.sync()
    machine.write(*range(100, 150))
    live = checkpoints(tmp_path, machine.url, None, startingOffsets="latest")
    live_at = source_of(live).begin()
    whole = Backfill(appended(machine.url)[0], time.time_ns())
    begun = checkpoints(tmp_path, machine.url, whole)
    begun_at = source_of(begun).begin()
    machine.lose_power()
    machine.write(*range(1000, 1080))
    for found, at, expected in (
        (live, live_at, list(range(1000, 1080))),
        (begun, begun_at, list(range(100))),
    ):
        planner = source_of(found)
        planner.at = at
        assert planner.run() == expected
    resumed = checkpoints(tmp_path, machine.url, whole)
    assert finish(resumed) == list(range(100))
    # It is done, though its range ended beyond the cut.
    with pytest.raises(NothingToDo, match="earlier backfills have all"):
        checkpoints(tmp_path, machine.url, Backfill(whole.start, whole.end - 1))


def test_a_stream_written_another_way_is_the_same_stream(tmp_path: Path) -> None:
    write(f"log:{tmp_path}/in", 0, 20)
    times = appended(f"log:{tmp_path}/in")
    half = Backfill(times[0], times[10])
    checkpoints(tmp_path, f"log:{tmp_path}/in", half)
    assert finish(checkpoints(tmp_path, f"log:{tmp_path}/./in", half)) == list(range(10))


@pytest.mark.parametrize("by", ["append", "source"])
def test_an_end_in_the_future_is_refused(by: Any) -> None:
    now = 1_700_000_000 * SECOND
    with pytest.raises(InvalidOption, match=r"--to.* 2023-11-15T00:00:00Z is in the future"):
        Backfill.parse("yesterday", "2023-11-15T00:00Z", by, now)


def test_that_gone_messages_cannot_be_told_is_said_and_other_errors_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"fmq:{tmp_path}/ring"
    with open_writer(url, slots=16) as writer:
        writer.write_many([b"%d" % i for i in range(60)])
    whole = Backfill(time.time_ns() - 60 * SECOND, time.time_ns())
    error: Exception = StorageError("reading", "x", OSError("it cannot be read"))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(backfills, "open_reader", fail)
    with pytest.raises(StorageError, match="it cannot be read"):
        checkpoints(tmp_path, url, whole)
    error = Unsupported("it keeps no times")
    said.clear()
    checkpoints(tmp_path, url, whole)
    assert [one for one in said if "cannot be told: it keeps no times" in one]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": {"log:x": 1}}'])
def test_a_damaged_note_of_the_beginning_is_an_error_that_names_it(
    tmp_path: Path, text: str
) -> None:
    url = f"log:{tmp_path}/in"
    write(url, 0, 3)
    checkpoints(tmp_path, url, None)
    note = tmp_path / "checkpoints/p-out/_beginning.json"
    note.write_text(text)
    for backfill in (None, Backfill(time.time_ns() - 60 * SECOND, time.time_ns())):
        with pytest.raises(Malformed, match=r"p-out/_beginning\.json is damaged"):
            checkpoints(tmp_path, url, backfill)


def pinned(folder: Path, url: str) -> Checkpoints:
    """Plan a query that starts with the latest message, and has run without a batch."""
    found = checkpoints(folder, url, None, startingOffsets="latest")
    (folder / "checkpoints/p-out/metadata").write_text('{"id": "q"}')
    return found


@pytest.mark.parametrize("kind", ["log", "fmq"])
def test_a_query_without_a_batch_reads_a_stream_that_was_created_anew_from_its_start(
    tmp_path: Path, kind: str
) -> None:
    url = f"{kind}:{tmp_path}/in"
    write(url, 0, 20)
    pinned(tmp_path, url)
    write(url, 20, 25)
    again = source_of(pinned(tmp_path, url))
    again.begin()
    assert again.run() == list(range(20, 25))
    create(url, replace=True)
    write(url, 100, 130)
    anew = source_of(pinned(tmp_path, url))
    anew.begin()
    assert anew.run() == list(range(100, 130))


@pytest.mark.parametrize("layout", ["classic", "wide"])
def test_a_backfill_leaves_to_the_live_query_a_stream_that_was_created_anew_before_its_first_batch(
    tmp_path: Path, layout: str
) -> None:
    url = f"fmq:{tmp_path}/in"
    create(f"{url}?layout={layout}")
    write(url, 0, 20)
    pinned(tmp_path, url)
    create(f"{url}?layout={layout}", replace=True)
    write(url, 100, 110)
    live = source_of(pinned(tmp_path, url))
    live.begin()
    write(url, 110, 130)  # beyond the number that was noted at first
    time.sleep(1.1)  # a classic queue has whole seconds
    with pytest.raises(NothingToDo):
        checkpoints(tmp_path, url, Backfill(time.time_ns() - 60 * SECOND, time.time_ns()))
    assert live.run() == list(range(100, 130))


def test_a_query_without_a_batch_starts_though_a_stream_of_its_pattern_is_gone(
    tmp_path: Path,
) -> None:
    for name in ("in1", "in2"):
        write(f"log:{tmp_path}/{name}", 0, 10)
    pinned(tmp_path, f"log:{tmp_path}/in*")
    shutil.rmtree(tmp_path / "in1")
    write(f"log:{tmp_path}/in2", 10, 12)
    write(f"log:{tmp_path}/in3", 50, 52)  # which is new: all of it is read
    again = source_of(pinned(tmp_path, f"log:{tmp_path}/in*"))
    again.begin()
    assert sorted(again.run()) == [10, 11, 50, 51]
    for name in ("in2", "in3"):
        shutil.rmtree(tmp_path / name)
    write(f"log:{tmp_path}/in4", 60, 62)
    last = source_of(pinned(tmp_path, f"log:{tmp_path}/in*"))
    last.begin()
    assert last.run() == [60, 61]
