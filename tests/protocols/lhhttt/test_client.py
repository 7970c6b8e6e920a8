from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import penstock.aio
from penstock import Grouped, describe, open_reader, open_writer
from penstock.core.dead_letter import Code
from penstock.core.errors import (
    ConnectionLost,
    InvalidURL,
    LeaseLost,
    Malformed,
    MessageTooLarge,
    PositionError,
    StorageError,
    Unacknowledged,
    Unsupported,
    WriteTimeout,
)
from penstock.core.interfaces import LONGEST_PAUSE
from penstock.core.overflow import DropReason
from penstock.protocols.jrtc.destinations import StreamDestination
from penstock.protocols.jrtc.wire import batch_of_datagrams
from penstock.protocols.lhhttt import commands, decode_bytes, encode_bytes
from penstock.protocols.lhhttt.client import DatagramLink, QueueClient, StreamLink
from penstock.protocols.lhhttt.commands import Reply
from penstock.protocols.lhhttt.journal import Journal
from penstock.protocols.lhhttt.server import LhhtttServer
from penstock.protocols.server import End
from penstock.queue.waiting import wait_any
from penstock.relay import Relay, RelayOptions
from penstock.relay.faults import FaultRouter, Faults
from protocols.lhhttt.queues import HOST, Asker, Prototype, assert_balanced, served
from support.descriptors import many_descriptors
from support.until import until

URLS = {
    "udp": lambda server: f"lhhttt://{server.address}",
    "tcp": lambda server: f"lhhttt+tcp://{server.address}",
    "unix": lambda server: f"lhhttt+unix:{server.options.unix}",
}


@pytest.mark.parametrize("way", URLS)
def test_messages_pass_by_every_way_and_are_settled(way: str, tmp_path: Path) -> None:
    payloads = [b"", b"one", "zw\u00f6lf".encode(), bytes(range(256)), b"x" * 5000]
    with served(tcp=True, unix=tmp_path / "socket") as server:
        url = URLS[way](server)
        with open_writer(url) as writer:
            writer.write_many(payloads)
            writer.write(b"last", type=3)
            assert writer.statistics().messages == len(payloads) + 1
            assert writer.statistics().headers_dropped == 1
        assert describe(url).count == len(payloads) + 1
        with open_reader(url) as reader:
            assert [message.payload for message in reader.available()] == [*payloads, b"last"]
            reader.acknowledge()
            assert reader.read(timeout=0.05) is None
        books = server.statistics().queue
    assert books.acked == len(payloads) + 1
    assert_balanced(books)


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_it_does_not_matter_how_many_files_are_open(way: str, tmp_path: Path) -> None:
    with (
        many_descriptors(),
        served(tcp=True, unix=tmp_path / "socket") as server,
        open_writer(URLS[way](server)) as writer,
        open_reader(URLS[way](server)) as reader,
    ):
        writer.write(b"x")
        message = reader.read(timeout=10)
        assert message is not None
        assert message.payload == b"x"


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_streams_carry_what_a_datagram_cannot(way: str, tmp_path: Path) -> None:
    message = b"m" * 3_000_000
    with served(tcp=True, unix=tmp_path / "socket") as server:
        url = URLS[way](server)
        with open_writer(url) as writer, open_reader(url) as reader:
            writer.write(message)
            got = reader.read(timeout=10)
            assert got is not None
            assert got.payload == message
        with open_writer(URLS["udp"](server)) as writer:
            with pytest.raises(MessageTooLarge) as caught:
                writer.write(message)
            assert "lhhttt+tcp:" in str(caught.value.hint)
            assert writer.statistics().refused == 1


@pytest.mark.parametrize("mode", ["reliable", "legacy"])
def test_what_comes_before_a_message_that_cannot_be_sent_is_stored(mode: str) -> None:
    """A forwarder asks a writer how far it came."""
    batch = batch_of_datagrams([bytes(16) + p for p in (b"1", b"2", b"x" * 65_500, b"4")], 0, 0)
    with served() as server:
        with StreamDestination(f"{URLS['udp'](server)}?mode={mode}") as destination:
            done, rejected = destination.send(batch)
            assert done == 3
            assert [(each.row, each.code) for each in rejected] == [(2, Code.OUT_OF_RANGE)]
            assert destination.send(batch.slice(done)) == (1, ())
        assert server.statistics().queue.queued == 3


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_server_of_small_frames_gets_small_batches(tmp_path: Path, way: str) -> None:
    with served(tcp=True, unix=tmp_path / "socket", max_message=65_536) as server:
        with open_writer(URLS[way](server)) as writer:
            writer.write_many([b"%0100d" % number for number in range(3000)])
            with pytest.raises(MessageTooLarge, match="70,000 bytes does not fit") as caught:
                writer.write(bytes(70_000))
            assert 65_000 < caught.value.limit < 65_536
            writer.write(b"last")
        books = server.statistics().queue
        assert (books.queued, books.held) == (3001, 3001)
        assert_balanced(books)


#: Why a queue never takes a message of 100,000 bytes.
SMALL: dict[str, dict[str, Any]] = {
    "frames": {"max_message": 65_536},
    "capacity": {"capacity_bytes": 65_536},
    "journal": {"journal": "log:DIR/queue?segment=64k"},
}


@contextlib.contextmanager
def small(limit: str, folder: Path) -> Iterator[LhhtttServer]:
    options = {
        name: value.replace("DIR", str(folder)) if isinstance(value, str) else value
        for name, value in SMALL[limit].items()
    }
    with served(tcp=True, **options) as server:
        yield server
        assert_balanced(server.statistics().queue)


@pytest.mark.parametrize("limit", SMALL)
def test_a_message_that_a_queue_never_takes_costs_no_other(limit: str, tmp_path: Path) -> None:
    with small(limit, tmp_path) as server, open_writer(URLS["tcp"](server)) as writer:
        with pytest.raises(MessageTooLarge) as caught:
            writer.write_many([b"first", bytes(100_000), b"last"])
        assert caught.value.size == 100_000
        assert 65_000 < caught.value.limit <= 65_536
        assert (writer.statistics().messages, writer.statistics().refused) == (1, 2)
        before = server.statistics().queue.reliable
        writer.write_many([b"%d" % number for number in range(1000)])
        assert server.statistics().queue.queued == 1001
        # Later requests are not smaller than they need to be.
        assert server.statistics().queue.reliable - before == 1


@pytest.mark.parametrize("limit", SMALL)
def test_a_forwarder_rejects_a_message_that_a_queue_never_takes(limit: str, tmp_path: Path) -> None:
    batch = batch_of_datagrams([bytes(16) + p for p in (b"1", bytes(100_000), b"3")], 0, 0)
    with small(limit, tmp_path) as server:
        with StreamDestination(URLS["tcp"](server)) as destination:
            done, rejected = destination.send(batch)
            assert done == 2
            assert [(each.row, each.code) for each in rejected] == [(1, Code.OUT_OF_RANGE)]
            assert destination.send(batch.slice(done)) == (1, ())
        assert server.statistics().queue.queued == 2


@pytest.mark.parametrize("limit", SMALL)
def test_a_relay_drops_a_message_that_a_queue_never_takes(limit: str, tmp_path: Path) -> None:
    source = f"log:{tmp_path}/source"
    with open_writer(source) as writer:
        writer.write_many([b"1", bytes(100_000), b"3"])
    with small(limit, tmp_path) as server:
        target = URLS["tcp"](server)
        options = RelayOptions(source=source, target=target, follow=False, refused="drop")
        with open_reader(source) as reader, open_writer(target) as writer:
            books = Relay(reader, writer, options).run()
        assert (books.copied, books.in_doubt) == (2, 0)
        assert books.dropped == {DropReason.REFUSED: 1}
        assert server.statistics().queue.queued == 2


def test_a_refusal_that_names_no_limits_leaves_a_request_in_doubt() -> None:
    """An older server says so at one message of a request: those before it are stored."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as queue:
        queue.bind((HOST, 0))
        queue.settimeout(10)

        def serve() -> None:
            for _ in range(2):
                datagram, peer = queue.recvfrom(1 << 16)
                seq = decode_bytes(datagram).split(b":")[2]
                queue.sendto(encode_bytes(b"ERR:%b:too-large:the limit is 3" % seq), peer)

        thread = threading.Thread(target=serve)
        thread.start()
        with QueueClient(_link(queue.getsockname()[1]), is_reliable=True) as client:
            with pytest.raises(Unacknowledged, match="the limit is 3") as caught:
                client.put([b"1", b"large"])
            assert (caught.value.acknowledged, caught.value.in_doubt) == (0, 2)
            with pytest.raises(MessageTooLarge):
                client.put([b"large"])
        thread.join()


def test_a_request_that_failed_in_part_is_in_doubt_also_if_the_queue_is_full_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write_a_part(journal: Journal, messages: Sequence[bytes]) -> None:
        monkeypatch.setattr(Journal, "_write", write)
        write(journal, messages[:2])
        raise StorageError("writing to", "the journal", OSError(28, "No space left on device"))

    def exchange_and_fill(client: QueueClient, about: bytes, frame: bytes) -> Reply:
        reply = exchange(client, about, frame)
        if reply.code == commands.Code.FAILED:
            monkeypatch.setattr(QueueClient, "_exchange", exchange)
            _put(URLS["udp"](server), *[b"other"] * 18)  # the disk has room again, the queue none
        return reply

    write, exchange = Journal._write, QueueClient._exchange
    with served(capacity=20) as server, open_writer(URLS["udp"](server), timeout="500ms") as writer:
        monkeypatch.setattr(Journal, "_write", write_a_part)
        monkeypatch.setattr(QueueClient, "_exchange", exchange_and_fill)
        with pytest.raises(Unacknowledged, match="holds 20 messages") as caught:
            writer.write_many([b"%d" % number for number in range(10)])
        assert (caught.value.acknowledged, caught.value.in_doubt) == (0, 10)


def test_a_tag_that_was_never_issued_is_named_as_it_was_asked_about() -> None:
    with served() as server, Asker(server.port) as asker:
        asker.ask(b"PUT:message")
        assert asker.ask(b"RGET:c:1").startswith(b"MSG:1:")
        assert asker.ask(b"ACK:c:deadbeef.0") == b"ERR:deadbeef.0:no-lease:deadbeef.0"
        assert server.statistics().queue.leased == 1


def test_a_message_too_large_for_the_asker_stays(tmp_path: Path) -> None:
    with served(unix=tmp_path / "socket") as server, Asker(server.port) as asker:
        with open_writer(URLS["unix"](server)) as writer:
            writer.write(b"x" * 100_000)
        asker.send(b"GET")
        assert asker.is_silent()
        assert asker.ask(b"RGET:a:1").startswith(b"ERR:1:too-large:")
        assert asker.ask(b"SIZE") == b"1"


def test_what_a_reader_did_not_settle_comes_again_to_another() -> None:
    with served() as server:
        url = URLS["udp"](server)
        with open_writer(url) as writer:
            writer.write_many([b"1", b"2", b"3"])
        with open_reader(url) as reader:
            assert isinstance(reader, Grouped)
            first, second = reader.read_many(2)
            reader.ack(first)
            reader.nack(second, 0.5)
            with pytest.raises(LeaseLost):
                reader.ack(first)
            third = reader.read(timeout=5)
            again = reader.read(timeout=5)
            assert third is not None
            assert again is not None
            assert (third.payload, again) == (
                b"3",
                second._replace(time_ns=again.time_ns, created_ns=again.created_ns),
            )
            with pytest.raises(Unsupported):
                reader.group()
        with open_reader(url) as other:  # the first gave them back as it closed
            assert {message.payload for message in other.available()} == {b"2", b"3"}


def test_a_read_that_is_interrupted_at_any_call_leaves_nothing_to_be_acknowledged() -> None:
    """What nobody got comes to the next reader, whatever is acknowledged meanwhile."""
    watched = {"_take", "_fetch", "_wait_and_take"}
    for number in itertools.count(1):
        left = number

        def interrupt(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            code = frame.f_code
            is_watched = code.co_name in watched and code.co_filename.endswith("lhhttt/endpoint.py")
            # Signals are handled where something is called, and not at a return.
            left -= is_watched and event in {"call", "c_call", "c_return"}
            if is_watched and not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

        # What is interrupted before the reader knows of it comes again when its lease is over.
        with served(lease=1.0) as server:
            url = URLS["udp"](server)
            _put(url, b"1", b"2", b"3")
            got: list[bytes] = []
            with open_reader(url) as reader:
                assert isinstance(reader, Grouped)
                sys.setprofile(interrupt)
                with contextlib.suppress(KeyboardInterrupt):
                    got += [message.payload for message in reader.read_many(2, timeout=5)]
                sys.setprofile(None)
                with contextlib.suppress(LeaseLost):  # on a busy machine
                    reader.acknowledge()
            with open_reader(url) as reader:
                while set(got) != {b"1", b"2", b"3"}:
                    messages = reader.read_many(3, timeout=10)
                    assert messages, f"interrupted at call {number}: {got}"
                    got += [message.payload for message in messages]
        if left > 0:
            assert number > 10
            return


def test_a_batch_that_is_interrupted_as_it_is_made_is_not_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with served() as server:
        _put(URLS["udp"](server), b"1", b"2")
        with open_reader(URLS["udp"](server)) as reader:
            with monkeypatch.context() as patch:
                patch.setattr("penstock.core.batch.batch_from_messages", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    reader.read_batch(2, timeout=5)
            reader.acknowledge()
            assert server.statistics().queue.acked == 0
            books = reader.statistics()
            assert (books.messages, books.bytes, books.backlog) == (0, 0, 2)
            assert reader.read_batch(2).column("payload").to_pylist() == [b"1", b"2"]
            reader.acknowledge()
            assert server.statistics().queue.acked == 2


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_no_request_goes_behind_half_of_one_that_was_interrupted(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_half(link: StreamLink, frames: Sequence[bytes]) -> None:
        send(link, [frames[0][:500]])
        raise KeyboardInterrupt

    send = StreamLink.send
    with served(tcp=True, unix=tmp_path / "socket") as server:
        with open_writer(URLS[way](server)) as writer:
            with monkeypatch.context() as patch:
                patch.setattr(StreamLink, "send", send_half)
                with pytest.raises(KeyboardInterrupt):
                    writer.write(b"half" * 500)
            writer.write_many([b"1" * 2000, b"2"])
            assert (writer.statistics().messages, writer.statistics().refused) == (2, 1)
        with open_reader(URLS[way](server)) as reader:
            assert [message.payload for message in reader.available()] == [b"1" * 2000, b"2"]


def test_scattered_messages_are_settled_however_many_their_tags_are() -> None:
    """Tags of ten thousand messages that do not follow each other fit no datagram."""
    count = 20_000
    with served() as server:
        url = f"{URLS['udp'](server)}?timeout=30s"
        _put(url, *(b"%d" % number for number in range(count)))
        with open_reader(url) as reader:
            assert isinstance(reader, Grouped)
            messages = [message for _ in range(20) for message in reader.read_many(1000, timeout=5)]
            assert len(messages) == count
            reader.ack(messages[::2])
            assert server.statistics().queue.acked == count / 2
            reader.nack(messages[1::2])
            with open_reader(url) as other:
                got = [message for _ in range(20) for message in other.read_many(500, timeout=5)]
                assert [message.payload for message in got] == [
                    message.payload for message in messages[1::2]
                ]
                other.acknowledge()
        books = server.statistics()
    assert books.unsent == 0
    assert_balanced(books.queue)


def test_an_answer_about_lost_leases_fits_a_datagram() -> None:
    count = 8000
    with served() as server:
        url = f"{URLS['udp'](server)}?timeout=5s"
        _put(url, *(b"%d" % number for number in range(count)))
        with QueueClient(_link(server.port)) as first, open_reader(url) as second:
            assert isinstance(second, Grouped)
            tags = [run for _ in range(4) for run in first.get(2000)[0]]
            epoch = tags[0][0]
            first.nack([(epoch, number, number) for number in range(0, count, 2)])
            others = [message for _ in range(8) for message in second.read_many(500, timeout=5)]
            assert [message.seq for message in others] == list(range(0, count, 2))
            with pytest.raises(LeaseLost) as caught:
                first.ack([(epoch, 0, count - 1)])
            # Too many runs to name: what was asked about is named instead.
            assert list(caught.value.ranges) == [(0, count - 1)]
            second.ack(others)
        books = server.statistics()
    assert books.unsent == 0
    assert books.queue.acked == count
    assert_balanced(books.queue)


def _link(port: int) -> DatagramLink:
    return DatagramLink("the queue", HOST, port)


def test_a_reader_waits_without_asking_again_and_again() -> None:
    with served() as server:
        url = URLS["udp"](server)
        with open_reader(url) as reader:
            before = server.statistics().queue.commands
            timer = threading.Timer(0.7, lambda: _put(url, b"x"))
            timer.start()
            message = reader.read(timeout=20)
            timer.join()
            assert message is not None
            assert (
                server.statistics().queue.commands - before <= 12
            )  # its repetitions, and a writer's


def test_waiting_for_messages_that_nobody_gets_yet_is_no_busy_loop() -> None:
    with served() as server:
        url = URLS["udp"](server)
        with open_reader(url) as reader, open_writer(url) as writer:
            assert isinstance(reader, Grouped)
            writer.write(b"x")
            reader.nack(reader.read_many(1, 10), delay=1.5)
            calls, end = 0, time.monotonic() + 1
            while (left := end - time.monotonic()) > 0:
                calls += bool(wait_any([reader], left)) and not reader.read_many(10)
            assert calls <= 1 / LONGEST_PAUSE
            assert wait_any([reader], 20) == [reader]
            assert [m.payload for m in reader.read_many(10, 10)] == [b"x"]


def _put(url: str, *payloads: bytes) -> None:
    with open_writer(url) as writer:
        writer.write_many(payloads)


async def _pass_async(url: str) -> list[bytes]:
    async with penstock.aio.open_writer(url) as writer:
        await writer.write(b"1")
    async with penstock.aio.open_reader(url) as reader:
        message = await reader.read(timeout=10)
        assert message is not None
        return [message.payload]


def test_asyncio_passes_messages_too() -> None:
    with served() as server:
        assert asyncio.run(_pass_async(URLS["udp"](server))) == [b"1"]


def test_a_full_queue_is_waited_for_and_then_given_up() -> None:
    with served(capacity=1) as server:
        url = URLS["udp"](server) + "?timeout=300ms"
        with open_writer(url) as writer:
            writer.write(b"1")
            with pytest.raises(WriteTimeout, match="takes no message"):
                writer.write(b"2")
            assert writer.statistics().messages == 1


def test_a_writer_counts_what_is_stored_also_when_the_rest_is_refused() -> None:
    with served(capacity=100) as server:
        with open_writer(f"{URLS['udp'](server)}?timeout=500ms") as writer:
            with pytest.raises(WriteTimeout):
                writer.write_many([b"x" * 1000] * 200)  # three requests
            books = writer.statistics()
        stored = server.statistics().queue.queued
    assert 0 < stored < 100
    assert (books.messages, books.bytes, books.last_seq) == (stored, 1000 * stored, stored - 1)


@pytest.mark.parametrize("limit", [{"capacity": 10}, {"capacity_bytes": 100}])
def test_more_messages_than_a_queue_ever_holds_pass_through_it(limit: dict[str, int]) -> None:
    sent = [b"%d" % number for number in range(200)]
    with served(**limit) as server:
        url = URLS["udp"](server)
        thread = threading.Thread(target=_put, args=(url, *sent))
        thread.start()
        got: list[bytes] = []
        with open_reader(url) as reader:
            while len(got) < len(sent):
                messages = reader.read_many(20, timeout=60)
                assert messages
                got += [message.payload for message in messages]
                reader.acknowledge()
        thread.join()
        books = server.statistics().queue
    assert got == sent
    assert books.refused["too-large"] > 0
    assert_balanced(books)


def test_a_connection_that_breaks_is_made_anew(tmp_path: Path) -> None:
    journal = f"log:{tmp_path}/queue"
    with served(tcp=True, journal=journal) as server:
        router = FaultRouter.tcp((HOST, server.port))
        url = f"lhhttt+tcp://{HOST}:{router.address[1]}"
        with router, open_writer(url) as writer, open_reader(url) as reader:
            for number in range(20):
                writer.write(b"%d" % number)
                if number % 5 == 0:
                    router.cut_all()
            got = [message.payload for message in reader.available()]
            assert got == [b"%d" % number for number in range(20)]
        assert_balanced(server.statistics().queue)


# --- loss ---------------------------------------------------------------------------------------

LOSSY = Faults(drop=0.2, duplicate=0.05, reorder=0.05)


@pytest.mark.parametrize(
    "count", [500, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
def test_through_a_network_that_loses_and_repeats_every_message_arrives_once(count: int) -> None:
    sent = [b"message %d" % number for number in range(count)]
    got: dict[bytes, bytes] = {}
    with (
        served() as server,
        FaultRouter.udp((HOST, server.port), LOSSY, seed=7) as router,
    ):
        url = f"lhhttt://{HOST}:{router.address[1]}?mode=reliable&timeout=60s"

        def write() -> None:
            with open_writer(url) as writer:
                for at in range(0, count, 25):
                    writer.write_many(sent[at : at + 25])

        thread = threading.Thread(target=write)
        thread.start()
        seen = 0
        with open_reader(url) as reader:
            while len(got) < count:
                messages = reader.read_many(25, timeout=5)
                for message in messages:
                    assert message.attributes is not None
                    seen += message.attributes not in got
                    assert got.setdefault(message.attributes, message.payload) == message.payload
                reader.acknowledge()
        thread.join()
        assert sum(router.counters().of(way).dropped for way in ("up", "down")) > 0
        books = server.statistics().queue
    assert seen == count
    assert list(got.values()) == sent  # in their order, too
    assert (books.queued, books.acked, books.held) == (count, count, 0)
    assert_balanced(books)


def test_an_answer_that_is_late_or_anothers_is_not_taken() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as queue:
        queue.bind((HOST, 0))
        queue.settimeout(10)
        link = DatagramLink("queue", *queue.getsockname())
        client = QueueClient(link, is_reliable=True)
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(list(client.get(1)[1])))
        thread.start()
        datagram, peer = queue.recvfrom(1000)
        seq = int(decode_bytes(datagram).split(b":")[2])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(encode_bytes(b"MSG:%d:1.1:spoofed" % seq), peer)
        for answer in (b"MSG:%d:1.1:late" % (seq - 1), b"1", b"PUT 1 bytes", b"MSG:x", b"OK:1.1"):
            queue.sendto(encode_bytes(answer), peer)
        queue.sendto(b"zz", peer)
        queue.sendto(encode_bytes(b"MSG:%d:1.2:right" % seq), peer)
        thread.join(10)
        client.close()
    assert results == [[b"right"]]
    assert client.strays == 5


# --- queues of the prototype --------------------------------------------------------------------


def test_the_doubled_answer_to_a_nack_is_not_taken_for_that_to_a_later_ack() -> None:
    """Both name the message alone; without its ACK it would come again, though it is done."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((HOST, 0))
        sock.settimeout(10)
        acked: list[bytes] = []

        def serve() -> None:
            nacked, peer = sock.recvfrom(1 << 16)
            answer = encode_bytes(b"OK:a.5")
            assert nacked.endswith(b":a.5:0")
            sock.sendto(answer, peer)
            sock.recvfrom(1 << 16)  # the first ACK is lost
            sock.sendto(answer, peer)
            ack, other = sock.recvfrom(1 << 16)
            acked.append(decode_bytes(ack).partition(b":")[0])
            sock.sendto(answer, other)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        with QueueClient(_link(sock.getsockname()[1]), is_reliable=True, timeout=5) as client:
            client.nack([(10, 5, 5)])
            client.ack([(10, 5, 5)])
            assert acked == [b"ACK"]
        server.join(10)


def test_a_queue_of_the_prototype_is_noticed_and_used(caplog: pytest.LogCaptureFixture) -> None:
    with Prototype() as queue, caplog.at_level(logging.WARNING):
        with open_writer(queue.url) as writer:
            writer.write_many([b"1", "zw\u00f6lf".encode()])
            with pytest.raises(Malformed, match="UTF-8"):
                writer.write(b"\xff")
            assert writer.statistics().refused == 1
        assert "no reliable mode" in caplog.text
        info = describe(queue.url + "?mode=legacy")
        assert (info.count, info.details["reliable"]) == (2, False)
        assert queue.messages == [b"1", "zw\u00f6lf".encode()]
        with open_reader(queue.url + "?mode=legacy") as reader:
            assert "taken away" in caplog.text
            assert [m.payload for m in reader.available()] == [b"1", "zw\u00f6lf".encode()]
            reader.acknowledge()


def test_a_late_answer_of_the_prototype_is_not_taken_for_the_next_one() -> None:
    with Prototype() as queue:
        queue.messages[:] = [b"first", b"second"]
        queue.late = 1
        with open_reader(queue.url + "?mode=legacy&timeout=200ms") as reader:
            with pytest.raises(ConnectionLost, match="may be lost"):
                reader.read(timeout=0)
            message = reader.read(timeout=0)
            assert message is not None
            assert message.payload == b"second"


def test_what_the_prototype_gave_is_read_before_the_loss_of_a_later_answer_is_told() -> None:
    with Prototype() as queue:
        queue.messages[:] = [b"1", b"2", b"3", b"lost", b"4", b"5"]
        queue.prompt, queue.late = 3, 1
        with open_reader(queue.url + "?mode=legacy&timeout=200ms") as reader:
            assert [message.payload for message in reader.read_many(10)] == [b"1", b"2", b"3"]
            with pytest.raises(ConnectionLost, match="may be lost"):
                reader.read_many(10)
            assert [message.payload for message in reader.read_many(10)] == [b"4", b"5"]
            assert [reader.read_many(10), reader.statistics().messages] == [[], 5]


def test_messages_of_the_prototype_that_nobody_read_are_lost_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Prototype() as queue:
        queue.messages[:] = [b"1", b"2", b"3"]
        queue.prompt, queue.late = 2, 1
        reader = open_reader(queue.url + "?mode=legacy")
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            reader.read_many(10)
        with caplog.at_level(logging.WARNING):
            reader.close()
        books = reader.statistics()
        assert (books.messages, books.lost, books.backlog) == (0, 2, 0)
        assert "2 messages" in caplog.text


def test_a_doubled_answer_of_the_prototype_is_not_taken_for_the_next_one() -> None:
    sent = [b"%d" % number for number in range(20)]
    with Prototype() as queue:
        queue.doubles = True
        with open_writer(queue.url) as writer:
            writer.write_many(sent)
        assert queue.messages == sent
        with open_reader(queue.url) as reader:
            assert [message.payload for message in reader.available()] == sent
        assert queue.messages == []


def test_nobody_is_told_so() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HOST, 0))  # it never answers
        url = f"lhhttt://{HOST}:{taken.getsockname()[1]}?mode=reliable&timeout=300ms"
        with open_writer(url) as writer, pytest.raises(ConnectionLost, match="no answer"):
            writer.write(b"x")
    with pytest.raises(ConnectionLost, match="nobody listens"):
        open_writer(f"lhhttt+tcp://{HOST}:1")


@pytest.mark.parametrize("url", ["lhhttt:name", "lhhttt://host/path", "lhhttt+unix:"])
def test_a_url_that_names_no_queue_is_refused(url: str) -> None:
    with pytest.raises(InvalidURL):
        open_reader(url)


def test_a_queue_has_no_place_to_start_at() -> None:
    with served() as server, pytest.raises(PositionError):
        open_reader(URLS["udp"](server), start="end")


def test_what_came_before_a_wrong_frame_is_done_and_answered() -> None:
    with served(tcp=True) as server:
        with socket.create_connection((HOST, server.port)) as client:
            client.settimeout(10)
            client.sendall(encode_bytes(b"PUT:one") + encode_bytes(b"SIZE") + b"no frame")
            said = b""
            while piece := client.recv(1000):
                said += piece
        assert said == encode_bytes(b"PUT 3 bytes") + encode_bytes(b"1")
        until(lambda: server.statistics().streams[0].ended[End.MALFORMED] == 1)
        assert_balanced(server.statistics().queue)


def test_a_socket_that_nobody_listens_at_any_more_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with served(unix=path) as server:
        assert describe(URLS["unix"](server)).count == 0
    assert not path.exists()


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    with served(tcp=True) as server:
        with socket.create_connection((HOST, server.port)) as client:
            client.sendall(encode_bytes(b"RGET:a:1:60000"))
            until(lambda: server.statistics().queue.waiting == 1)
        until(lambda: server.statistics().queue.waiting == 0)
