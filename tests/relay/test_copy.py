from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

from penstock import StreamId, describe, open_reader, open_writer
from penstock.core.errors import InvalidOption, MessageTooLarge
from penstock.core.interfaces import BytesLike, Writer
from penstock.core.statistics import WriterStatistics
from penstock.protocols.flight import FlightServer, ServerOptions
from penstock.relay import Relay, Relays, check_apart, copy, fields_lost, relay_options
from support.until import until


@pytest.fixture
def target_url(tmp_path: Path) -> str:
    return f"fmq:{tmp_path / 'target'}?layout=classic&slots=5000&size=4M"


def fill(url: str, count: int) -> list[bytes]:
    payloads = [b"message %d" % i for i in range(count)]
    with open_writer(url) as writer:
        writer.write_many(payloads, type=3, subtype=4)
    return payloads


def test_a_copy_has_the_same_messages(queue_url: str, target_url: str) -> None:
    url = queue_url.replace("slots=20&size=8192", "slots=3000&size=1M")
    payloads = fill(url, 2500)
    with open_reader(url) as reader, open_writer(target_url) as writer:
        done = copy(reader, writer)
    assert done == (2500, sum(map(len, payloads)), 0)
    with open_reader(url) as source, open_reader(target_url) as target:
        assert list(source.available()) == list(target.available())


def test_a_copy_ends_at_what_was_there_although_the_writer_goes_on(
    queue_url: str, target_url: str
) -> None:
    url = queue_url.replace("slots=20&size=8192", "slots=3000&size=1M")
    fill(url, 100)
    stop = threading.Event()

    def go_on_writing() -> None:
        with open_writer(url) as writer:
            while not stop.is_set():
                writer.write(b"more")

    thread = threading.Thread(target=go_on_writing)
    thread.start()
    try:
        with open_reader(url) as reader, open_writer(target_url) as writer:
            done = copy(reader, writer)
    finally:
        stop.set()
        thread.join()
    assert done.copied >= 100


def test_following_goes_on_until_it_is_told_to_stop(queue_url: str, target_url: str) -> None:
    fill(queue_url, 10)
    seen: list[int] = []
    with open_reader(queue_url) as reader, open_writer(target_url) as writer:
        done = copy(
            reader,
            writer,
            follow=True,
            on_progress=lambda so_far: seen.append(so_far.copied),
            should_stop=lambda: bool(seen),
        )
    assert seen == [10]
    assert done.copied == 10


def test_what_was_lost_before_it_could_be_copied_is_counted(
    queue_url: str, target_url: str
) -> None:
    fill(queue_url, 50)
    with open_reader(queue_url, start=5) as reader, open_writer(target_url) as writer:
        done = copy(reader, writer)
    assert (done.copied, done.lost) == (20, 25)


def test_a_message_that_the_target_cannot_hold_stops_the_copy_with_the_rest_in_place(
    queue_url: str, tmp_path: Path
) -> None:
    with open_writer(queue_url) as writer:
        writer.write_many([b"small", b"x" * 500, b"small too"])
    small = f"fmq:{tmp_path / 'small'}?layout=classic&size=100"
    with open_reader(queue_url) as reader, open_writer(small) as writer:
        with pytest.raises(MessageTooLarge) as caught:
            copy(reader, writer)
        assert caught.value.size == 500
        assert writer.statistics().messages == 1
        assert writer.statistics().refused == 2


@pytest.mark.parametrize("option", ["group", "hold"])
def test_a_copy_acknowledges_nothing_that_an_unfinished_file_would_take_with_it(
    option: str, tmp_path: Path
) -> None:
    log = f"log:{tmp_path}/log"
    fill(log, 3)
    with (
        pytest.raises(InvalidOption, match="keeps nothing until it is finished"),
        open_reader(log, **{option: "name"}) as reader,
        open_writer(f"csv:{tmp_path}/file") as writer,
    ):
        copy(reader, writer)
    with open_reader(log, **{option: "name"}) as reader:
        assert len(reader.read_many(10)) == 3


class _TextOnly(Writer):
    """A target with no place for anything but the payload."""

    cannot_carry = {"type": "dropped", "time_ns": "dropped"}  # noqa: RUF012 - as declared above

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        del payload, type, subtype, time_ns, created_ns, stream, attributes
        return 0

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(0, 0, 0, 0, 0.0, None)

    def close(self) -> None:
        pass


def test_only_fields_that_the_source_can_have_count_as_lost(queue_url: str) -> None:
    fill(queue_url, 1)
    with open_reader(queue_url) as reader, open_writer(queue_url) as same:
        assert fields_lost(reader, same) == {}
        assert fields_lost(reader, _TextOnly("text:")) == {"type": "dropped"}


# --- a stream and itself --------------------------------------------------------------------------


@pytest.fixture(params=["fmq", "classic", "log"])
def stream(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A stream of ten messages, by its plain URL."""
    kind = request.param
    url = f"{'log' if kind == 'log' else 'fmq'}:{tmp_path}/stream"
    with open_writer(url, **({"layout": "classic"} if kind == "classic" else {})) as writer:
        writer.write_many([b"%d" % i for i in range(10)])
    return url


def other_spellings(url: str, folder: Path, server: FlightServer) -> list[str]:
    scheme, _, path = url.partition(":")
    (folder / "linked").symlink_to(folder)
    for name in ("stream", "stream.fmq", "stream.stat", "stream.buf"):
        if (folder / name).exists():
            (folder / name.replace("stream", "alias")).symlink_to(folder / name)
    return [
        url,
        f"{scheme}:stream",
        f"{scheme}:./x/../stream",
        f"{scheme}:{folder}/linked/stream",
        f"{scheme}:{folder}/alias",
        f"{scheme}:{path}?create=never",
        f"{server.url}stream",
        f"flight://localhost:{server.port}/stream?retry=1",
    ]


def test_a_stream_is_not_copied_to_itself_however_it_is_spelt(
    stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    with FlightServer(ServerOptions(root=tmp_path, port=0)) as server:
        spellings = other_spellings(stream, tmp_path, server)
        for spelt in spellings:
            options = relay_options(source=stream, target=spelt, follow=False)
            with open_reader(stream) as reader, open_writer(spelt) as writer:
                with pytest.raises(InvalidOption, match="is the stream that would be copied"):
                    copy(reader, writer)
                with pytest.raises(InvalidOption, match="is the stream that would be copied"):
                    Relay(reader, writer, options).run()
        with pytest.raises(InvalidOption):
            check_apart(spellings[-1], spellings[-2])
        other = stream.replace("/stream", "/another")
        with open_reader(stream) as reader, open_writer(other) as writer:
            assert copy(reader, writer).copied == 10
        with pytest.raises(InvalidOption):
            check_apart(f"{server.url}another", other)
        check_apart(f"{server.url}another", stream)
    assert describe(stream).count == 10


def test_a_relay_to_its_own_source_fails_before_the_target_is_emptied(stream: str) -> None:
    target = f"{stream}?create=always"
    with Relays({"loop": relay_options(source=stream, target=target, follow=False)}) as relays:
        deadline = time.monotonic() + 20
        while not relays.are_over and time.monotonic() < deadline:
            time.sleep(0.01)
        (status,) = relays.statuses()
    assert status.state == "failed"
    assert "is the stream that would be copied" in (status.trouble or "")
    assert describe(stream).count == 10


def test_a_relay_that_does_not_follow_gives_up_a_target_that_is_not_there(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.relay.config._SHORT_OUTAGE", 0.3)
    assert relay_options(source=stream, target=stream).longest_outage is None
    assert relay_options(source=stream, target=stream, give_up="5s").longest_outage == 5
    options = relay_options(source=stream, target="fmqp://127.0.0.1:1/x", follow=False)
    assert options.longest_outage == 0.3
    with Relays({"one": options}) as relays:
        until(lambda: relays.are_over, 20)
        (status,) = relays.statuses()
    assert status.state == "failed"


def test_a_copy_of_a_streams_files_is_another_stream(tmp_path: Path) -> None:
    with open_writer(f"log:{tmp_path}/stream") as writer:
        writer.write_many([b"%d" % i for i in range(10)])
    shutil.copytree(tmp_path / "stream", tmp_path / "backup")
    with (
        open_reader(f"log:{tmp_path}/backup") as reader,
        open_writer(f"log:{tmp_path}/stream") as writer,
    ):
        assert copy(reader, writer).copied == 10
