"""Streams of another machine are read and written as those of this one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from penstock import WriteTimeout, create, open_writer
from penstock.core.batch import batch_from_messages
from penstock.core.capabilities import Stages
from penstock.core.endpoints import endpoint_of
from penstock.core.message import Message
from penstock.core.url import URL
from penstock.pipeline.sink.stream_sink import BatchSink, StreamSink, _Message
from penstock.pipeline.source.loss_reports import DataLoss
from penstock.pipeline.source.options import SinkOptions
from penstock.protocols.flight import FlightServer, ServerOptions
from penstock.protocols.flight.errors import AccessRefused
from penstock.protocols.flight.wire import ActionKind
from penstock.queue.append_once import append_once, notes_of
from support.commit_lives import notes_for, stage
from support.planner import Planner
from support.spark_streams import fill, payloads
from support.until import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """The URL of a server whose root is the folder `remote`."""
    root = tmp_path / "remote"
    root.mkdir()
    with FlightServer(ServerOptions(root=root, port=0)) as server:
        yield server.url


def test_a_remote_queue_is_planned_and_read(remote: str, tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/remote/q", range(500))
    planner = Planner(f"{remote}q", maxOffsetsPerTrigger=300, minPartitions=3)
    planner.begin()
    assert planner.run(ReadMaxRows(300)) == list(range(300))
    assert planner.run(ReadMaxRows(300)) == list(range(300, 500))
    assert not planner.plan()
    planner.reader.stop()


def test_what_a_remote_ring_overwrote_is_told(remote: str, tmp_path: Path) -> None:
    queue = f"fmq:{tmp_path}/remote/q"
    fill(f"{queue}?slots=64&size=64k", range(60))
    planner = Planner(f"{remote}q")
    planner.begin()
    planner.plan()
    fill(queue, range(60, 100))
    with pytest.raises(DataLoss, match=r"36 messages lost \(seq 0 to 35\): overwritten"):
        planner.read()
    create(f"{queue}?slots=64&size=64k", replace=True)
    fill(queue, range(200, 260))
    with pytest.raises(DataLoss, match=r"60 messages lost \(seq 0 to 59\): .* created anew"):
        planner.read()
    with pytest.raises(DataLoss, match="an unknown number of messages lost"):
        planner.plan()
    planner.reader.stop()


def test_the_writer_of_a_remote_ring_waits(remote: str, tmp_path: Path) -> None:
    queue = f"fmq:{tmp_path}/remote/q"
    create(f"{queue}?slots=64&size=64k")
    planner = Planner(f"{remote}q", hold="spark")
    planner.begin()
    planner.plan()
    with open_writer(f"{queue}?hold=spark&timeout=100ms") as writer:
        writer.write_many([b"%d" % i for i in range(64)])
        assert planner.run() == list(range(64))
        with pytest.raises(WriteTimeout):
            writer.write(b"64")
        assert not planner.plan()  # what was asked for is done
        writer.write(b"64")
    planner.reader.stop()


def test_losses_may_be_told_to_a_remote_stream(remote: str, tmp_path: Path) -> None:
    queue = f"fmq:{tmp_path}/remote/q"
    fill(f"{queue}?slots=64&size=64k", range(60))
    planner = Planner(f"{remote}q", failOnDataLoss="false", lossUrl=f"{remote}losses?kind=log")
    planner.begin()
    planner.plan()
    fill(queue, range(60, 100))
    assert planner.read() == list(range(36, 60))
    assert planner.run() == list(range(60, 100))
    assert planner.at[f"{remote}q"]["lost"] == 36
    assert len(payloads(f"log:{tmp_path}/remote/losses")) == 1
    planner.reader.stop()


@pytest.mark.parametrize(
    ("before", "after"), [("", "?retry=5s&token_file={}"), ("?call_timeout=9", "?retry=5s")]
)
def test_a_query_goes_on_though_its_stream_is_reached_in_another_way(
    remote: str, tmp_path: Path, before: str, after: str
) -> None:
    """A checkpoint of any release: its entry is the URL that the stream had when it began."""
    (tmp_path / "token").write_text("0123456789abcdef")
    fill(f"log:{tmp_path}/remote/q", range(10))
    planner = Planner(f"{remote}q{before}")
    planner.begin()
    assert planner.run() == list(range(10))
    planner.reader.stop()
    fill(f"log:{tmp_path}/remote/q", range(10, 25))
    moved = Planner(f"{remote}q{after.format(tmp_path / 'token')}", failOnDataLoss=False)
    moved.at = json.loads(json.dumps(planner.at))
    assert moved.run(ReadMaxRows(10)) == list(range(10, 20))
    assert all("retry=5s" in str(part.range.place) for part in moved.parts)
    assert list(moved.at) == [f"{remote}q{before}"]
    # One that was planned and not finished, in a process that has seen nothing yet.
    again = Planner(f"{remote}q{after.format(tmp_path / 'token')}")
    again.at = moved.at
    again.parts = again._parts(planner.at)
    assert again.read() == list(range(10, 20))
    assert moved.run() == list(range(20, 25))
    assert moved.run() == []
    for each in (moved, again):
        each.reader.stop()


def test_a_batch_is_appended_once_to_a_remote_stream(remote: str, tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    url = f"{remote}out?kind=log&segment=64k&sync=none"
    parts = stage(url, folder, 30, random.Random(0))
    assert append_once(url, parts, "q", 0, folder) == 30
    assert append_once(url, parts, "q", 0, folder) == 0
    notes = notes_for(url)
    note = notes.get()
    assert note is not None
    files = tuple((part.path, part.partition, part.messages) for part in parts)
    # The driver died after half of the next batch.
    notes.put(note._replace(batch=1, start=30, is_done=False, files=files))
    with open_writer(f"log:{tmp_path}/remote/out") as writer:
        for payload in payloads(f"log:{tmp_path}/remote/out")[:15]:
            writer.write(payload, int(payload.split()[1]) % 5)
    again = stage(url, folder, 30, random.Random(1))
    assert append_once(url, again, "q", 1, folder) == 15
    found = [int(p.split()[1]) for p in payloads(f"log:{tmp_path}/remote/out")]
    assert sorted(found) == sorted(list(range(30)) * 2)


def test_the_server_keeps_the_notes_for_whoever_comes_next(remote: str, tmp_path: Path) -> None:
    """Another driver, or one whose folder was cleaned, appends nothing twice."""
    url = f"{remote}out?kind=log&segment=64k&sync=none"
    parts = stage(url, tmp_path / "one", 30, random.Random(0))
    assert append_once(url, parts, "q", 0, tmp_path / "one") == 30
    again = stage(url, tmp_path / "other", 30, random.Random(0))
    assert append_once(url, again, "q", 0, tmp_path / "other") == 0
    assert append_once(url, again, "another", 0, tmp_path / "other") == 30
    assert [path.name for path in (tmp_path / "remote").glob("*.json")] == ["out.commits.json"]
    assert not list((tmp_path / "one").glob("*.json"))


def test_a_batch_is_completed_there_that_another_driver_has_begun(
    remote: str, tmp_path: Path
) -> None:
    url = f"{remote}out?kind=log&segment=64k&sync=none"
    parts = stage(url, tmp_path / "one", 30, random.Random(0))
    append_once(url, parts, "q", 0, tmp_path / "one")
    notes = notes_for(url)
    note = notes.get()
    assert note is not None
    notes.put(note._replace(batch=1, start=15, count=30, is_done=False))  # half of it is there
    again = stage(url, tmp_path / "other", 30, random.Random(1))
    assert append_once(url, again, "q", 1, tmp_path / "other") == 15


def test_a_server_that_keeps_no_notes_is_written_to_as_before(tmp_path: Path) -> None:
    folder = tmp_path / "staging"
    with FlightServer(ServerOptions(root=tmp_path, port=0)) as server:
        del server._answers._actions[ActionKind.READ_NOTES]  # as one of before
        url = f"{server.url}out?kind=log&sync=none"
        parts = stage(url, folder, 30, random.Random(0))
        assert append_once(url, parts, "q", 0, folder) == 30
        assert append_once(url, parts, "q", 0, folder) == 0
    assert len(list(folder.glob("*.commits.json"))) == 1


def test_nobody_writes_notes_to_a_server_that_is_read_only(tmp_path: Path) -> None:
    fill(f"log:{tmp_path}/x", range(3))
    with FlightServer(ServerOptions(root=tmp_path, port=0, read_only=True)) as server:
        notes = notes_of(f"{server.url}x")
        assert notes.read() == {}
        with pytest.raises(AccessRefused):
            notes.write("q", {"batch": 1}, sync=True)


# --- what tasks stage with the server -------------------------------------------------------------


def staged(url: str, rows: range, query: str, batch: int = 0) -> _Message:
    """Return what a task tells the driver that has staged with the server."""
    endpoint = endpoint_of(url)
    assert isinstance(endpoint, Stages)
    part = endpoint.stage(URL.parse(url), query, batch, 0)
    messages = [Message(0, 0, 0, 0, 0, None, None, b"%d" % n) for n in rows]
    part.add(batch_from_messages(messages))
    return _Message(query, [part.finish()])


def left(folder: Path) -> list[Path]:
    # Unlike `rglob`, `os.walk` bears folders that the server removes meanwhile.
    return [
        Path(where) / name
        for where, _, names in os.walk(folder)
        for name in names
        if ".penstock-staging" in Path(where).parts and name.endswith(".arrow")
    ]


def test_a_commit_of_the_sink_appends_what_tasks_have_staged_there(
    remote: str, tmp_path: Path
) -> None:
    url = f"{remote}out?kind=log"
    sink = StreamSink(SinkOptions(url=(url,)), ["payload"])
    for batch in range(3):
        message = staged(url, range(10 * batch, 10 * batch + 10), "q", batch)
        sink.commit([message, None], batch)
        again = staged(url, range(10 * batch, 10 * batch + 10), "q", batch)
        sink.commit([again], batch)  # the driver died before Spark noted it
    assert [int(p) for p in payloads(f"log:{tmp_path}/remote/out")] == list(range(30))
    failed = staged(url, range(99), "q", 3)
    sink.abort([failed], 3)
    until(lambda: not left(tmp_path / "remote"))


def test_a_table_is_written_to_a_remote_stream_and_leaves_no_note(
    remote: str, tmp_path: Path
) -> None:
    url = f"{remote}out?kind=log"
    sink = BatchSink(SinkOptions(url=(url,)), ["payload"])
    sink.commit([staged(url, range(10), sink._query)])
    assert len(payloads(f"log:{tmp_path}/remote/out")) == 10
    assert notes_of(f"log:{tmp_path}/remote/out").read() == {}
    until(lambda: not left(tmp_path / "remote"))


def test_a_query_that_staged_in_a_folder_goes_on_with_the_server(
    remote: str, tmp_path: Path
) -> None:
    """Its note names files of the driver, which the server does not have: rows are compared."""
    url = f"{remote}out?kind=log&sync=none"
    parts = stage(url, tmp_path / "one", 30, random.Random(0))
    append_once(url, parts, "q", 0, tmp_path / "one")
    notes = notes_for(url)
    note = notes.get()
    assert note is not None
    files = tuple((part.path, part.partition, part.messages) for part in parts)
    notes.put(note._replace(batch=1, start=15, is_done=False, files=files))  # half of it is there
    numbers = sorted(int(p.split()[1]) for p in payloads(f"log:{tmp_path}/remote/out")[15:])
    endpoint = endpoint_of(url)
    assert isinstance(endpoint, Stages)
    part = endpoint.stage(URL.parse(url), "q", 1, 0)
    rows = [*numbers, *range(100, 115)]
    messages = [Message(0, 0, 0, n % 5, 0, None, None, b"row %d" % n) for n in rows]
    part.add(batch_from_messages(messages))
    assert append_once(url, [part.finish()], "q", 1, tmp_path / "one") == 15
    assert len(payloads(f"log:{tmp_path}/remote/out")) == 45
