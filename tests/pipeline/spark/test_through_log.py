"""A stream that cannot be read again is kept in a log, and read from there."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from penstock import NotFound, Unsupported, open_writer
from penstock.core.endpoints import find_streams
from penstock.core.errors import LockTimeout
from penstock.pipeline.source.inputs import log_for
from support.planner import Planner
from support.spark_streams import follow, numbers, payloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # on a busy machine a batch takes seconds


@pytest.fixture
def port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def send(port: int, numbers: Iterable[int], payload: bytes | None = None) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for number in numbers:
            content = b"%d" % number if payload is None else payload
            sender.sendto(number.to_bytes(4, "big") + content, ("127.0.0.1", port))


def wait_for(ready: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def came_to(url: str) -> int:
    try:
        return len(payloads(url))
    except NotFound:
        return 0


def test_without_a_stage_the_error_says_to_use_one(port: int) -> None:
    with pytest.raises(Unsupported, match="cannot be read again") as caught:
        Planner(f"live://127.0.0.1:{port}").begin()
    assert '.option("stage", "log:/path/name")' in (caught.value.hint or "")


def test_what_comes_is_in_the_log_and_read_from_there(port: int, tmp_path: Path) -> None:
    url, log = f"live://127.0.0.1:{port}", f"log:{tmp_path}/stage"
    planner = Planner(url, stage=f"{log}?segment=64k", startingOffsets="latest")
    planner.begin()
    send(port, range(50))
    seen: list[int] = []

    def came() -> bool:
        seen.extend(planner.run())
        return len(seen) == 50

    wait_for(came)
    assert seen == list(range(50))
    assert list(planner.at) == [url]  # under the name that people know
    rows = next(iter(planner.reader.read(planner.parts[0])))
    assert set(rows.column("url").to_pylist()) == {url}
    planner.reader.stop()
    # After a restart a batch that was planned before is read from the log again.
    again = Planner(url, stage=log)
    again.at = planner.at
    again.parts = again._parts({})
    assert again.read() == seen[-len(again.read()) :]
    send(port, range(50, 60))
    wait_for(lambda: again.run() != [])
    again.reader.stop()
    wait_for(lambda: numbers(log) == list(range(60)))


def test_what_the_stream_lost_before_is_counted_and_ends_no_query(
    port: int, tmp_path: Path
) -> None:
    url = f"live://127.0.0.1:{port}"
    planner = Planner(url, stage=f"log:{tmp_path}/stage")
    planner.begin()
    send(port, [0, 1, 2, 10, 11])

    def is_counted() -> bool:
        planner.plan()
        return bool(planner.at[url]["end"] == 5 and planner.at[url]["lost"] == 7)

    wait_for(is_counted)
    assert not planner.plan()
    planner.reader.stop()


def test_a_copy_that_ends_ends_the_query(port: int, tmp_path: Path) -> None:
    planner = Planner(f"live://127.0.0.1:{port}", stage=f"log:{tmp_path}/stage")
    planner.begin()
    send(port, [0], b"break")

    def is_told() -> bool:
        try:
            planner.plan()
        except ConnectionResetError:
            return True
        return False

    wait_for(is_told)
    planner.reader.stop()


def test_two_queries_cannot_keep_a_stream_in_one_log(port: int, tmp_path: Path) -> None:
    with open_writer(f"log:{tmp_path}/stage"), pytest.raises(LockTimeout):
        Planner(
            f"live://127.0.0.1:{port}", stage=f"log:{tmp_path}/stage?lock_timeout=100ms"
        ).begin()


def test_several_streams_have_a_log_each(port: int, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        other = probe.getsockname()[1]
    urls = [f"live://127.0.0.1:{p}" for p in (port, other)]
    planner = Planner(",".join(urls), stage=f"log:{tmp_path}/stages")
    planner.begin()
    send(port, [0, 1])
    send(other, [0, 1, 2])
    seen: list[int] = []

    def came() -> bool:
        seen.extend(planner.run())
        return len(seen) == 5

    wait_for(came)
    planner.reader.stop()
    logs = find_streams(f"log:{tmp_path}/stages/*")
    assert sorted(len(payloads(log)) for log in logs) == [2, 3]


def test_two_topics_of_one_broker_have_a_log_each() -> None:
    topics = [f"up+mqtt://broker/?topic={topic}" for topic in ("a_1", "a-1")]
    logs = [log_for(url, below="log:/data/live?retain=1G") for url in topics]
    assert len(set(logs)) == 2
    assert all(log.endswith("?retain=1G") and log.startswith("log:/data/live/") for log in logs)


def test_a_stream_that_can_be_read_again_is_not_copied(tmp_path: Path) -> None:
    with open_writer(f"fmq:{tmp_path}/q") as writer:
        writer.write(b"1")
    planner = Planner(f"fmq:{tmp_path}/q", stage=f"log:{tmp_path}/stage")
    planner.begin()
    assert planner.run() == [1]
    assert not (tmp_path / "stage").exists()


def test_a_query_follows_a_live_stream(spark: SparkSession, port: int, tmp_path: Path) -> None:
    target = f"log:{tmp_path}/out"
    rows = follow(spark, f"live://127.0.0.1:{port}", stage=f"log:{tmp_path}/stage")
    query = (
        rows.select("payload")
        .writeStream.format("penstock")
        .options(url=target, checkpointLocation=str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        # Its socket is there when the log is: what is sent before that is lost as ever.
        wait_for((tmp_path / "stage").exists, 60)
        send(port, range(100))
        wait_for(lambda: came_to(target) == 100, 60)
    finally:
        query.stop()
    assert sorted(numbers(target)) == list(range(100))


def test_what_was_lost_after_the_last_batch_is_told_at_the_end_and_counted_by_the_next_life(
    port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, log = f"live://127.0.0.1:{port}", f"log:{tmp_path}/stage"
    planner = Planner(url, stage=log)
    planner.begin()
    send(port, [0, 1, 2])
    wait_for(lambda: planner.plan() and planner.at[url]["end"] == 3)
    send(port, [10, 11])  # of which no batch is planned
    wait_for(lambda: came_to(log) == 5)
    planner.reader.stop()
    assert "7 messages lost on the way here since the last batch" in caplog.text
    for _ in range(2):  # killed before Spark has stored the first plan: it is made again
        again = Planner(url, stage=log)
        again.at = planner.at
        assert again.plan()
        assert (again.at[url]["end"], again.at[url]["lost"]) == (5, 7)
        assert not again.plan()
        again.reader.stop()
    last = Planner(url, stage=log)
    last.at = again.at
    assert not last.plan()  # what is counted is not counted again
    last.reader.stop()


@pytest.mark.parametrize("is_planned", [False, True])
def test_what_a_stream_lost_before_spark_stored_a_batch_is_counted_by_the_next_life(
    port: int, tmp_path: Path, *, is_planned: bool
) -> None:
    url, log = f"live://127.0.0.1:{port}", f"log:{tmp_path}/stage"
    planner = Planner(url, stage=log)
    start = planner.begin()
    send(port, [0, 10])
    wait_for(lambda: came_to(log) == 2)
    if is_planned:  # and killed before Spark has stored the plan
        latest = planner.reader.latestOffset
        wait_for(lambda: latest(start, ReadAllAvailable())[url]["lost"] == 9)
    planner.reader.stop()
    again = Planner(url, stage=log)
    again.begin()  # Spark stores the first offset with the first batch, and asks for it anew
    assert again.plan()
    assert again.at[url]["lost"] == 9
    again.reader.stop()


def test_a_new_query_does_not_count_what_an_earlier_one_lost_before_the_same_log(
    port: int, tmp_path: Path
) -> None:
    url, log = f"live://127.0.0.1:{port}", f"log:{tmp_path}/stage"
    planner = Planner(url, stage=log)
    planner.begin()
    send(port, [0, 10])
    wait_for(lambda: planner.plan() and planner.at[url]["lost"] == 9)
    planner.reader.stop()
    other = Planner(url, stage=log)
    other.begin()
    assert other.plan()
    assert other.at[url]["lost"] == 0
    other.reader.stop()
