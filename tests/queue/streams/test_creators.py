"""One creator a stream, and nothing that its kill -9 leaves in the way."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest

from penstock.core.errors import Closed, StorageError
from penstock.queue.ownership import AlreadyOwned
from penstock.queue.stream_directory import list_streams
from penstock.queue.streams import InputStream, OutputStream
from support.lives import Lives, Report
from support.stream_lives import LAST_TYPE
from support.streams import CREATORS, OTHER, STREAM


@CREATORS
def test_a_second_creator_is_refused_with_the_name_of_the_first(
    creator: type[OutputStream | InputStream],
) -> None:
    with creator.create(STREAM, owner="the first"):
        with pytest.raises(AlreadyOwned, match=f"{STREAM} belongs to the first") as refusal:
            creator.create(STREAM, owner="the second")
        assert (refusal.value.owner, refusal.value.pid) == ("the first", os.getpid())
        creator.create(OTHER, owner="the second").close()
    creator.create(STREAM, owner="the second").close()


def test_a_creator_in_another_process_is_named_and_when_killed_succeeded_at_once(
    lives: Lives, directory: str, report: Report
) -> None:
    where = {"stream": str(STREAM), "directory": directory}
    first = lives.start("create_and_write", **where, report=report.path, owner="the first")
    report.wait_for(b"w")
    with OutputStream.open(STREAM) as reader:
        with pytest.raises(AlreadyOwned) as refusal:
            OutputStream.create(STREAM, owner="the second")
        assert (refusal.value.owner, refusal.value.pid) == ("the first", first.pid)
        assert first.kill().killed
        began = time.monotonic()
        with OutputStream.create(STREAM, owner="the second") as output:
            assert time.monotonic() - began < 2
            written = [seq for _, _, seq in report.records(b"w")]
            # It may have been killed between writing a message and saying so.
            seq = output.write(b"from the second", LAST_TYPE)
            assert len(written) <= seq <= len(written) + 1
            messages = list(reader.available())
            assert [m.seq for m in messages] == list(range(seq + 1))
            assert messages[-1].payload == b"from the second"
            assert reader.statistics().restarts == 0


@pytest.mark.parametrize("kind", ["output", "input"])
def test_a_creator_killed_at_any_point_is_in_nobodys_way(
    lives: Lives, directory: str, kind: str
) -> None:
    creator = OutputStream if kind == "output" else InputStream
    chance = random.Random(5)
    for _ in range(25):
        life = lives.start("come_and_go", stream=str(STREAM), directory=directory, kind=kind)
        time.sleep(chance.random() * 0.03)
        assert life.kill().killed
        with creator.create(STREAM, owner="me") as made:
            if isinstance(made, OutputStream):
                made.write(b"x")
            else:
                with InputStream.open(STREAM) as producer:
                    producer.write(b"x")
                assert made.read(0) is not None
    [state] = list_streams()
    assert (state.owner, state.alive) == ("me", False)


@CREATORS
def test_a_creation_that_fails_leaves_the_stream_to_others(
    creator: type[OutputStream | InputStream], directory: str
) -> None:
    with pytest.raises(StorageError):
        creator.create(STREAM, owner="greedy", size="64T")
    assert not any(Path(directory).iterdir())
    creator.create(STREAM, owner="me").close()


def test_a_forked_child_is_not_the_creator() -> None:
    with OutputStream.create(STREAM, owner="parent") as output:
        child = multiprocessing.get_context("fork").Process(target=_write_in_child, args=[output])
        child.start()
        child.join(20)
        assert child.exitcode == 0
        with pytest.raises(AlreadyOwned):
            OutputStream.create(STREAM, owner="another")
        output.write(b"x")


def _write_in_child(output: OutputStream) -> None:
    with pytest.raises(Closed):
        output.write(b"?")
    output.close()


def test_a_stream_that_is_there_keeps_its_size_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with OutputStream.create(STREAM, owner="me", slots=8) as output:
        output.write(b"x")
    with caplog.at_level(logging.WARNING), OutputStream.create(STREAM, owner="me") as output:
        assert "keeps its size" in caplog.text
        output.write_many([b"y"] * 8)
    with OutputStream.open(STREAM) as reader:
        assert [m.seq for m in reader.available()] == list(range(1, 9))
