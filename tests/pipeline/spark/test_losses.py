"""What is gone before Spark reads it ends the query, or is counted where people see it."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock import NotFound, create, open_reader, open_writer
from penstock.pipeline.source.loss_reports import DataLoss, LossReports, LostRange
from support.planner import Planner
from support.spark_streams import fill, payloads

if TYPE_CHECKING:
    from pathlib import Path

RING = "slots=64&size=64k"


@pytest.fixture
def url(tmp_path: Path) -> str:
    create(f"fmq:{tmp_path}/q?{RING}")
    return f"fmq:{tmp_path}/q"


def records(url: str) -> list[dict[str, Any]]:
    return [json.loads(payload) for payload in payloads(url)]


def lost_of(planner: Planner, url: str) -> tuple[int, int]:
    return planner.at[url]["lost"], planner.at[url]["lost_unknown"]


def test_a_ring_overwritten_before_it_is_planned_ends_the_query(url: str) -> None:
    planner = Planner(url)
    planner.begin()
    fill(url, range(100))
    with pytest.raises(DataLoss, match=r"36 messages lost \(seq 0 to 35\): overwritten") as caught:
        planner.plan()
    assert caught.value.lost.count == 36
    assert any("failOnDataLoss=false" in note for note in caught.value.__notes__)


def test_a_ring_overwritten_between_planning_and_reading_ends_the_query(url: str) -> None:
    fill(url, range(60))
    planner = Planner(url)
    planner.begin()
    assert planner.plan()
    fill(url, range(60, 110))
    with pytest.raises(DataLoss, match=r"46 messages lost \(seq 0 to 45\): overwritten"):
        planner.read()


def test_or_the_query_goes_on_and_the_exact_ranges_are_counted(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = f"log:{tmp_path}/losses"
    planner = Planner(url, failOnDataLoss="false", lossUrl=losses)
    planner.begin()
    fill(url, range(100))
    assert planner.plan()
    assert lost_of(planner, url) == (36, 0)
    fill(url, range(100, 110))
    with caplog.at_level(logging.WARNING):
        assert planner.read() == list(range(46, 100))
    assert "10 messages lost (seq 36 to 45): overwritten" in caplog.text
    assert planner.run() == list(range(100, 110))
    # What the task of the first batch lost is in the offsets of the second.
    assert lost_of(planner, url) == (46, 0)
    assert [(r["first"], r["last"], r["count"]) for r in records(losses)] == [
        (0, 35, 36),
        (36, 45, 10),
    ]
    assert not planner.plan()
    planner.reader.stop()


def test_a_loss_is_seen_in_the_progress_also_when_nothing_follows(url: str) -> None:
    fill(url, range(60))
    planner = Planner(url, failOnDataLoss="false")
    planner.begin()
    assert planner.plan(ReadMaxRows(60))
    fill(url, range(60, 80))
    assert planner.read() == list(range(16, 60))
    planner.reader.prepareForTriggerAvailableNow()
    while planner.plan():
        planner.read()
    assert lost_of(planner, url) == (16, 0)
    planner.reader.stop()


def test_a_task_that_runs_twice_is_counted_once(url: str) -> None:
    fill(url, range(60))
    planner = Planner(url, failOnDataLoss="false")
    planner.begin()
    planner.plan()
    fill(url, range(60, 80))
    assert planner.read() == planner.read() == list(range(16, 60))
    planner.plan()
    assert lost_of(planner, url) == (16, 0)
    planner.reader.stop()


def test_what_a_query_lost_is_counted_also_when_it_failed_before_it_could_count(
    url: str, tmp_path: Path
) -> None:
    losses = f"log:{tmp_path}/losses"
    fill(url, range(60))
    planner = Planner(url, failOnDataLoss="false", lossUrl=losses)
    planner.begin()
    planner.plan()
    fill(url, range(60, 80))
    planner.read()
    # The sink failed, the query is restarted, and Spark replays the batch.
    again = Planner(url, failOnDataLoss="false", lossUrl=losses)
    again.at = planner.at
    again.parts = again._parts({})
    assert again.read() == list(range(16, 60))
    again.plan()
    assert lost_of(again, url) == (16, 0)
    for each in (planner, again):
        each.reader.stop()


@pytest.mark.parametrize("is_told", [False, True])
def test_what_tasks_lost_of_the_last_batch_is_counted_when_the_query_is_begun_again(
    url: str, tmp_path: Path, is_told: bool
) -> None:
    """It was stopped, or killed, before it planned another batch."""
    where = {"lossUrl": f"log:{tmp_path}/losses"} if is_told else {"lossFolder": tmp_path / "x"}
    fill(url, range(60))
    planner = Planner(url, failOnDataLoss="false", **where)
    planner.begin()
    planner.plan()
    fill(url, range(60, 80))
    assert planner.read() == list(range(16, 60))
    planner.reader.stop()
    again = Planner(url, failOnDataLoss="false", **where)
    again.at = planner.at
    assert again.run() == list(range(60, 80))
    assert lost_of(again, url) == (16, 0)
    again.reader.stop()
    last = Planner(url, failOnDataLoss="false", **where)
    last.at = again.at
    assert not last.plan()  # and once only
    last.reader.stop()


def test_a_task_that_runs_again_and_finds_less_counts_what_both_lost_once(
    url: str, tmp_path: Path
) -> None:
    fill(url, range(60))
    planner = Planner(url, failOnDataLoss="false", minPartitions=3, lossFolder=tmp_path / "x")
    planner.begin()
    planner.plan()
    fill(url, range(60, 80))
    assert planner.read() == list(range(16, 60))
    fill(url, range(80, 100))
    assert planner.read() == list(range(36, 60))
    planner.plan()
    assert lost_of(planner, url) == (36, 0)
    planner.reader.stop()


def test_a_stream_removed_while_no_query_ran_is_a_loss_that_nobody_can_count(
    tmp_path: Path,
) -> None:
    for name in "ab":
        fill(f"fmq:{tmp_path}/{name}", range(5))
    planner = Planner(f"fmq:{tmp_path}/*")
    planner.begin()
    assert planner.run() == list(range(5)) * 2
    planner.reader.stop()
    fill(f"fmq:{tmp_path}/a", range(5, 505))
    (tmp_path / "a.fmq").unlink()
    strict = Planner(f"fmq:{tmp_path}/*")
    strict.at = planner.at
    with pytest.raises(
        DataLoss, match=r"a: an unknown number .* removed while no query ran"
    ) as caught:
        strict.plan()
    assert "start once with failOnDataLoss=false" in str(caught.value.hint)
    strict.reader.stop()
    url = f"fmq:{tmp_path}/a"
    loose = Planner(f"fmq:{tmp_path}/*", failOnDataLoss="false")
    loose.at = planner.at
    assert loose.plan()
    assert lost_of(loose, url) == (0, 1)
    assert not loose.plan()  # once
    fill(url, range(1000, 1003))
    assert loose.run() == list(range(1000, 1003))  # another one of that name
    assert lost_of(loose, url) == (0, 1)
    loose.reader.stop()


def test_a_stream_that_is_not_named_any_more_is_not_said_to_be_removed(tmp_path: Path) -> None:
    one, other = f"log:{tmp_path}/a", f"log:{tmp_path}/b"
    fill(one, range(5))
    fill(other, range(5))
    planner = Planner(f"{one},{other}")
    planner.begin()
    planner.run()
    planner.reader.stop()
    alone = Planner(one)
    alone.at = planner.at
    with pytest.raises(DataLoss, match=r"/b: .* the source does not name it any more") as caught:
        alone.plan()
    assert str(caught.value.hint).startswith("name it again; or, if it was read to its end")


def test_a_stream_that_was_read_and_then_removed_while_the_query_ran_is_no_loss(
    tmp_path: Path,
) -> None:
    for name in "ab":
        fill(f"fmq:{tmp_path}/{name}", range(5))
    planner = Planner(f"fmq:{tmp_path}/*")
    planner.begin()
    assert planner.run() == list(range(5)) * 2
    (tmp_path / "a.fmq").unlink()
    planner.plan()
    assert not planner.plan()
    planner.reader.stop()
    again = Planner(f"fmq:{tmp_path}/*")
    again.at = planner.at
    assert not again.plan()
    again.reader.stop()


def test_what_came_just_before_a_stream_was_removed_is_counted(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(url, range(5))
    planner = Planner(f"fmq:{tmp_path}/*", failOnDataLoss="false")
    planner.begin()
    assert planner.run() == list(range(5))
    fill(url, range(5, 12))  # nobody looked since
    (tmp_path / "a.fmq").unlink()
    planner.plan()
    assert lost_of(planner, url) == (7, 0)
    planner.reader.stop()


@pytest.mark.parametrize("scheme", ["fmq", "log"])
def test_a_stream_that_is_removed_under_a_running_query_ends_it_soon(
    tmp_path: Path, scheme: str
) -> None:
    url = f"{scheme}:{tmp_path}/a"
    fill(url, range(5))
    planner = Planner(url)
    planner.begin()
    assert planner.run() == list(range(5))
    remove(tmp_path)
    with pytest.raises(NotFound):
        plan_for(planner, 5)
    planner.reader.stop()


def test_or_the_query_counts_what_was_in_it_and_goes_on_with_the_next(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/a"
    fill(url, range(5))
    planner = Planner(url, failOnDataLoss="false")
    planner.begin()
    assert planner.run(ReadMaxRows(3)) == list(range(3))
    remove(tmp_path)
    until = time.monotonic() + 40
    while planner.at[url]["lost"] != 2:
        assert time.monotonic() < until
        planner.plan(ReadMaxRows(0))
        time.sleep(0.05)
    assert not planner.plan()
    fill(url, range(100, 103))
    assert planner.run() == list(range(100, 103))
    assert lost_of(planner, url) == (2, 0)
    planner.reader.stop()


def plan_for(planner: Planner, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        planner.plan()
        time.sleep(0.05)


def remove(folder: Path) -> None:
    (folder / "a.fmq").unlink(missing_ok=True)
    shutil.rmtree(folder / "a", ignore_errors=True)


def test_many_tasks_that_lose_at_once_all_tell_of_it(tmp_path: Path) -> None:
    losses = f"fmq:{tmp_path}/losses"
    ranges = [LostRange("fmq:/q", 1, i * 10, i * 10 + 4, "overwritten") for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda lost: LossReports(losses, "run").report(lost), ranges))
    assert sorted(r["first"] for r in records(losses)) == [lost.first for lost in ranges]


def test_losses_of_another_query_are_not_counted_as_ours(tmp_path: Path) -> None:
    losses = f"fmq:{tmp_path}/losses"
    ours = LossReports(losses, "ours")
    assert ours.heard() == []
    LossReports(losses, "theirs").report(LostRange("fmq:/q", 1, 0, 4, "overwritten"))
    mine = LostRange("fmq:/q", 1, 5, 9, "overwritten")
    LossReports(losses, "ours").report(mine)
    with open_writer(losses) as writer:
        writer.write(b"not a record")
    assert [reported.lost for reported in ours.heard()] == [mine]
    ours.close()


def test_every_message_is_read_or_lost_while_the_ring_is_overwritten(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    create(f"{url}?slots=1024&size=1M")
    losses = f"log:{tmp_path}/losses"
    stop = threading.Event()

    def write() -> None:
        with open_writer(url) as writer:
            count = 0
            while not stop.is_set():
                writer.write_many([b"%d" % i for i in range(count, count + 200)])
                count += 200
                stop.wait(0.0005)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        planner = Planner(url, failOnDataLoss="false", lossUrl=losses, minPartitions=3)
        first = planner.begin()[url]["start"]  # the writer may be ahead already
        seen: list[int] = []
        for i in range(30):
            planner.plan()
            time.sleep(0.02 * (i % 3))  # time for the writer to come round
            seen += planner.read()
    finally:
        stop.set()
        thread.join()
    planner.plan()  # counts what the last tasks lost
    lost = [n for r in records(losses) for n in range(r["first"], r["last"] + 1)]
    seen += planner.read()
    assert sorted(seen + lost) == list(range(first, planner.at[url]["end"]))
    assert lost_of(planner, url) == (len(lost), 0)
    assert seen
    planner.reader.stop()


def test_a_queue_created_anew_is_noticed_and_what_is_known_of_it_told(url: str) -> None:
    planner = Planner(url, failOnDataLoss="false")
    planner.begin()
    fill(url, range(20))
    assert planner.run(ReadMaxRows(5)) == list(range(5))
    create(f"{url}?{RING}", replace=True)
    fill(url, range(100, 110))
    assert planner.run() == list(range(100, 110))
    assert lost_of(planner, url) == (15, 1)  # those that were seen; and nobody saw its end
    planner.reader.stop()
    strict = Planner(url)
    strict.at = {url: {**planner.at[url], "epoch": "5"}}
    # After a restart nothing is known: no number is made up.
    with pytest.raises(DataLoss, match=r"an unknown number of messages lost \(seq 10 on\)"):
        strict.plan()


def test_a_queue_created_anew_with_compression_is_read_too(url: str) -> None:
    fill(url, range(20))
    planner = Planner(url, failOnDataLoss="false")
    planner.begin()
    assert planner.run() == list(range(20))
    create(f"{url}?{RING}&compress=lz4", replace=True)
    fill(url, range(100, 110))
    assert planner.run() == list(range(100, 110))
    planner.reader.stop()


def test_a_queue_created_anew_between_planning_and_reading_lost_the_planned_range(url: str) -> None:
    fill(url, range(20))
    planner = Planner(url)
    planner.begin()
    planner.plan()
    create(f"{url}?{RING}", replace=True)
    fill(url, range(100, 150))
    with pytest.raises(DataLoss, match=r"20 messages lost \(seq 0 to 19\): .* created anew"):
        planner.read()


def test_a_stream_removed_before_it_is_read_lost_the_planned_range(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    fill(url, range(20))
    planner = Planner(f"fmq:{tmp_path}/*", failOnDataLoss="false")
    planner.begin()
    planner.plan(ReadMaxRows(5))
    (tmp_path / "q.fmq").unlink()
    assert planner.read() == []
    assert planner.plan()
    assert lost_of(planner, url) == (20, 0)
    assert not planner.plan()
    planner.reader.stop()


def test_what_retention_removed_is_lost_by_name(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/l?segment=4k&segment_slots=16&retain=32k&sync=none"
    fill(url, range(8))
    planner = Planner(f"log:{tmp_path}/l")
    planner.begin()
    planner.plan()
    fill(url, range(8, 400))
    with pytest.raises(DataLoss, match=r"8 messages lost \(seq 0 to 7\): removed by .* retention"):
        planner.read()
    with open_reader(f"log:{tmp_path}/l") as reader:
        oldest = reader.bounds().oldest
    with pytest.raises(DataLoss, match=rf"seq 8 to {oldest - 1}\)"):
        planner.plan()


def test_a_log_created_anew_under_a_task_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/l?segment=4k&segment_slots=16&sync=none"
    fill(url, range(400))
    planner = Planner(f"log:{tmp_path}/l", minPartitions=1)
    planner.begin()
    planner.plan()
    rows = planner.reader.read(planner.parts[0])
    first = next(rows)
    shutil.rmtree(tmp_path / "l")
    fill(url, range(1000, 2000))
    seen = [int(payload) for payload in first.column("payload").to_pylist()]

    def read_on() -> None:
        for batch in rows:
            seen.extend(map(int, batch.column("payload").to_pylist()))

    with pytest.raises(DataLoss, match=r"to 399\)") as caught:
        read_on()
    assert seen == list(range(caught.value.lost.first))


def test_a_loss_that_cannot_be_told_is_an_error(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    planner = Planner(url, failOnDataLoss="false", lossUrl=f"log:{tmp_path}/file/losses")
    planner.begin()
    fill(url, range(100))
    with pytest.raises(Exception, match="file"):
        planner.plan()


def test_what_a_task_lost_of_a_stream_that_was_removed_is_counted(tmp_path: Path) -> None:
    for name in "ab":
        fill(f"fmq:{tmp_path}/{name}", range(5))
    planner = Planner(f"fmq:{tmp_path}/*", failOnDataLoss="false")
    planner.begin()
    assert planner.plan()
    (tmp_path / "a.fmq").unlink()
    assert planner.read() == list(range(5))
    assert planner.plan()
    assert planner.read() == []
    assert lost_of(planner, f"fmq:{tmp_path}/a") == (5, 0)
    assert not planner.plan()
    planner.reader.stop()


def test_what_a_log_did_not_keep_is_not_called_overwritten(tmp_path: Path) -> None:
    url, options = f"log:{tmp_path}/log", "?segment=64k&retain=128k"
    payloads = [b"%1000d" % i for i in range(1000)]
    with open_writer(url + options) as writer:
        writer.write(b"first")
    planner = Planner(url)
    planner.begin()
    planner.plan()
    with open_writer(url + options) as writer:
        writer.write_many(payloads)
    with pytest.raises(DataLoss, match=r"lost \(seq 1 to \d+\): removed by the log's retention"):
        planner.plan()
