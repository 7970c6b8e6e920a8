"""A writer waits for what a query has not finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock import InvalidOption, WriteTimeout, create, open_reader, open_writer
from penstock.core.errors import CursorInUse
from penstock.core.retry import RetryPolicy
from penstock.pipeline.source import inputs
from support.planner import Planner
from support.spark_streams import fill

if TYPE_CHECKING:
    from pathlib import Path


def test_the_writer_of_a_ring_waits_for_what_is_committed_without_a_commit(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    create(f"{url}?slots=64&size=64k")
    planner = Planner(url, hold="spark", maxOffsetsPerTrigger=40)
    planner.begin()
    assert planner.plan() is False  # the name is taken before anything can be overwritten
    with open_writer(f"{url}?hold=spark&timeout=100ms") as writer:
        writer.write_many([b"%d" % i for i in range(64)])
        assert planner.run(ReadMaxRows(40)) == list(range(40))
        with pytest.raises(WriteTimeout, match="spark"):
            writer.write(b"64")  # planned and read, but not known to be finished
        assert planner.run(ReadMaxRows(40)) == list(range(40, 64))  # so the first one is
        writer.write_many([b"%d" % i for i in range(64, 104)])
        with pytest.raises(WriteTimeout):
            writer.write(b"104")
        planner.reader.commit(planner.at)
        writer.write(b"104")
    planner.reader.stop()


def test_a_log_keeps_what_is_not_finished(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/l"
    rules = "segment=4k&segment_slots=16&retain=16k&sync=none&hold=spark"
    fill(f"{url}?{rules}", range(10))
    planner = Planner(url, hold="spark")
    planner.begin()
    assert planner.plan()
    fill(f"{url}?{rules}", range(10, 400))
    assert planner.read() == list(range(10))
    assert planner.run() == list(range(10, 400))
    planner.plan()
    fill(f"{url}?{rules}", range(400, 800))
    assert planner.run() == list(range(400, 800))
    with open_reader(url) as reader:
        assert reader.bounds().oldest > 10  # what is finished may go
    planner.reader.stop()


def test_the_hold_goes_over_to_a_queue_created_anew(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    fill(f"{url}?slots=64&size=64k", range(60))
    planner = Planner(url, hold="spark", failOnDataLoss="false")
    planner.begin()
    planner.plan(ReadMaxRows(5))
    create(f"{url}?slots=64&size=64k", replace=True)
    planner.plan()
    planner.plan()
    with open_writer(f"{url}?hold=spark&timeout=100ms") as writer:
        writer.write_many([b"%d" % i for i in range(64)])
        with pytest.raises(WriteTimeout):
            writer.write(b"64")
    planner.reader.stop()


def test_two_queries_of_one_name_are_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_LEAVING", RetryPolicy(retry_on=(CursorInUse,), max_attempts=1))
    url = f"fmq:{tmp_path}/q"
    fill(url, range(5))
    one, two = Planner(url, hold="spark"), Planner(url, hold="spark")
    one.begin()
    two.begin()
    one.plan()
    with pytest.raises(CursorInUse, match="spark"):
        two.plan()
    one.reader.stop()
    assert two.plan()
    two.reader.stop()


def test_a_query_that_is_restarted_holds_where_it_was(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    fill(f"{url}?slots=64&size=64k", range(60))
    planner = Planner(url, hold="spark")
    planner.begin()
    assert planner.run(ReadMaxRows(30)) == list(range(30))
    planner.reader.stop()
    with open_writer(f"{url}?hold=spark&keep=true&timeout=100ms") as writer:
        writer.write_many([b"%d" % i for i in range(60, 64)])
        with pytest.raises(WriteTimeout):  # it was never told that the first batch is finished
            writer.write(b"64")
        again = Planner(url, hold="spark")
        again.at = planner.at
        assert again.run() == list(range(30, 64))
        writer.write_many([b"%d" % i for i in range(64, 94)])
        again.reader.stop()


def test_a_classic_queue_has_no_named_readers(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    fill(f"{url}?layout=classic", range(5))
    planner = Planner(url, hold="spark")
    planner.begin()
    with pytest.raises(InvalidOption, match="hold"):
        planner.plan()


@pytest.mark.parametrize("is_held", [True, False])
def test_a_stream_that_was_removed_does_not_end_a_query_that_holds_others(
    tmp_path: Path, *, is_held: bool
) -> None:
    for name in "ab":
        fill(f"fmq:{tmp_path}/{name}", range(5))
    planner = Planner(f"fmq:{tmp_path}/*", hold="spark")
    planner.begin()
    assert planner.run() == [*range(5)] * 2
    if not is_held:  # as after a restart
        planner.reader.stop()
    (tmp_path / "a.fmq").unlink()
    fill(f"fmq:{tmp_path}/b", [5])
    assert planner.run() == [5]
    planner.reader.stop()
