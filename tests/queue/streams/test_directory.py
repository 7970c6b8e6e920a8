"""The names of streams, and the places where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.core.errors import InvalidOption, InvalidStreamId, NotFound, StorageError, Unsupported
from penstock.core.position import Position
from penstock.core.stream_id import StreamId, id_for_app
from penstock.core.url import URL
from penstock.queue.endpoint import FmqEndpoint
from penstock.queue.stream_directory import (
    StreamKind,
    list_streams,
    remove_stream,
    streams_directory,
)
from penstock.queue.streams import InputStream, OutputStream
from support.lives import Lives, Report
from support.streams import CREATORS, OTHER, STREAM, payloads
from support.unprivileged import run_without_rights


@CREATORS
@pytest.mark.parametrize(
    "request_id",
    [
        StreamId.generate(None, 1, "a path", "a name"),
        StreamId.generate(1, None, "a path", "a name"),
        StreamId.generate(1, 1, None, "a name"),
        StreamId.generate(1, 1, "a path", None),
    ],
)
def test_an_id_that_leaves_a_field_open_is_no_stream(
    creator: type[OutputStream | InputStream], request_id: StreamId, directory: str
) -> None:
    with pytest.raises(InvalidStreamId, match="ANY"):
        creator.create(request_id, owner="me")
    with pytest.raises(InvalidStreamId, match="ANY"):
        creator.open(request_id)
    assert not Path(directory).exists()


@CREATORS
def test_a_stream_that_is_not_there_is_not_found(creator: type[OutputStream | InputStream]) -> None:
    with pytest.raises(NotFound, match=str(STREAM)) as error:
        creator.open(STREAM)
    assert "wait=True" in str(error.value.hint)


def test_the_wrong_side_of_a_stream_is_pointed_to_the_right_one() -> None:
    with InputStream.create(STREAM, owner="me"):
        with pytest.raises(NotFound, match="output stream") as error:
            OutputStream.open(STREAM)
        assert "InputStream.open() writes to it" in str(error.value.hint)
    with OutputStream.create(OTHER, owner="me"):
        with pytest.raises(NotFound, match="input stream") as error:
            InputStream.open(OTHER)
        assert "OutputStream.open() reads it" in str(error.value.hint)


def test_an_id_can_name_an_input_and_an_output_stream_at_once() -> None:
    with (
        InputStream.create(STREAM, owner="consumer") as stream,
        OutputStream.create(STREAM, owner="producer") as output,
        InputStream.open(STREAM) as producer,
        OutputStream.open(STREAM) as reader,
    ):
        producer.write(b"in")
        output.write(b"out")
        assert payloads(stream) == [b"in"]
        assert payloads(reader) == [b"out"]


def test_streams_are_listed_with_their_creators_and_counts(
    lives: Lives, directory: str, report: Report
) -> None:
    assert list_streams() == []
    where = {"stream": str(STREAM), "directory": directory}
    life = lives.start("create_and_write", **where, report=report.path, owner="another process")
    report.wait_for(b"w")
    assert life.kill().killed
    written = 1 + max(seq for _, _, seq in report.records(b"w"))
    with InputStream.create(STREAM, owner="this one", slots=4) as stream:
        with InputStream.open(STREAM, policy="drop") as producer:
            producer.write_many([b"x"] * 6)
        Path(directory, "something else.fmq").touch()
        incoming, outgoing = list_streams()
        assert (incoming.stream, incoming.kind) == (STREAM, StreamKind.INPUT)
        assert (incoming.owner, incoming.pid, incoming.alive) == ("this one", os.getpid(), True)
        assert (incoming.messages, incoming.written) == (4, 6)
        assert incoming.url == stream.url
    assert (outgoing.stream, outgoing.kind) == (STREAM, StreamKind.OUTPUT)
    assert (outgoing.owner, outgoing.pid) == ("another process", life.pid)
    assert not outgoing.alive
    assert written <= outgoing.written <= written + 1
    assert FmqEndpoint().describe(URL.parse(outgoing.url)).count == outgoing.messages


def test_a_damaged_stream_does_not_hide_the_others(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    OutputStream.create(STREAM, owner="me").close()
    InputStream.create(OTHER, owner="me").close()
    Path(directory, f"{STREAM.hex()}.output.fmq").write_bytes(bytes(8192))
    assert [state.stream for state in list_streams()] == [OTHER]
    assert "magic" in caplog.text
    remove_stream(STREAM, StreamKind.OUTPUT)
    OutputStream.create(STREAM, owner="me").close()


def test_a_queue_that_is_not_the_streams_own_is_left_alone(directory: str) -> None:
    InputStream.create(STREAM, owner="me").close()
    stolen = Path(directory, f"{STREAM.hex()}.input.fmq")
    stolen.rename(Path(directory, f"{STREAM.hex()}.output.fmq"))
    with pytest.raises(Unsupported, match="is not the queue of the output stream"):
        OutputStream.create(STREAM, owner="me")


def test_options_that_a_side_does_not_have_are_refused() -> None:
    for call in (
        lambda: OutputStream.create(STREAM, owner="me", compress="zstd"),
        lambda: OutputStream.create(STREAM, owner="me", writers="many"),
        lambda: InputStream.create(STREAM, owner="me", hold="x"),
        lambda: OutputStream.open(STREAM, policy="drop"),
        lambda: InputStream.open(STREAM, hold="x"),
    ):
        with pytest.raises(InvalidOption, match="is not for this side of an"):
            call()
    with pytest.raises(InvalidOption, match="policy"):
        InputStream.open(STREAM, policy="pray")


def test_streams_are_in_memory_in_a_place_of_the_user_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert streams_directory() == str(tmp_path / "streams")
    monkeypatch.delenv("PENSTOCK_STREAMS")
    place = Path(f"/dev/shm/penstock-{os.getuid()}")
    assert streams_directory() == str(place)
    stream = id_for_app(f"test of process {os.getpid()}", "memory")
    with OutputStream.create(stream, owner="me") as output:
        assert place.stat().st_mode & 0o777 == 0o700
        output.write(b"x")
        assert stream in {state.stream for state in list_streams()}
        output.remove()
    with OutputStream.create(stream, owner="me", directory=tmp_path) as output:
        assert str(tmp_path) in output.url


def test_a_directory_that_another_user_made_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() != 0:
        pytest.skip("it takes two users")
    monkeypatch.delenv("PENSTOCK_STREAMS")
    trap = Path("/dev/shm/penstock-65534")
    trap.mkdir()

    def check() -> None:
        with pytest.raises(StorageError, match="is not a directory of this user's"):
            OutputStream.create(STREAM, owner="nobody")

    try:
        run_without_rights(check)
    finally:
        trap.rmdir()


def test_a_path_with_odd_characters_works(tmp_path: Path) -> None:
    place = tmp_path / "100% of what? a+b #1"
    with OutputStream.create(STREAM, owner="me", directory=place) as output:
        output.write(b"x")
        with FmqEndpoint().open_reader(URL.parse(output.url), Position.START) as reader:
            assert payloads(reader) == [b"x"]
