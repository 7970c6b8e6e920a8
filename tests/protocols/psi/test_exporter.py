"""An exporter speaks as psi's does, to many clients at once, and none disturbs another."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.core.delivery_policy import DeliveryPolicy
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import Closed, InvalidOption
from penstock.protocols.psi import (
    ClientHello,
    StreamMetadata,
    Transport,
    encode_message,
)
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.exporter.session import Sender
from penstock.protocols.psi.exporter.streams import Exporter, Posted
from penstock.protocols.psi.store.streams import Store
from penstock.protocols.psi.ticks import ticks_to_ns
from protocols.psi.raw_client import client
from protocols.psi.recordings import catalog_of, messages_of, recording
from support.until import until

T0 = 638397614450000000
NOW = 1_700_000_000_000_000_000


def test_the_basic_session_is_sent_as_psi_sent_it() -> None:
    """All but the session id, the port and the stale bytes, over a real socket."""
    catalog, recorded = catalog_of("basic"), messages_of("basic")
    with Store.volatile(started=False) as store:
        store.add_stream("Floats", "float", id=2)
        store.add_stream("Strings", "string", id=6)
        store.start(ticks_to_ns(T0))
        exact = [
            message._replace(payload=catalog.codec(message.source_id).trim(message.payload))
            for message in recorded
        ]
        store.append_messages(exact)
        hello = recording("basic.c2s.handshake.bin")
        with RemoteExporter(store, 0) as exporter, client(exporter.port, hello) as peer:
            peer.burst()
            theirs = recording("basic.s2c.handshake.bin")
            ours = peer.bytes[: len(theirs)]
            assert ours[:4] == theirs[:4]
            assert ours[20:-4] == theirs[20:-4]
            assert peer.bytes[len(theirs) :] == recording("basic.s2c.meta.bin")
            peer.open_data()
            wanted = b"".join(map(encode_message, exact))
            got = b""
            while len(got) < len(wanted):
                got += peer.data.recv(65536)
            assert got == wanted
            for mine, psis in zip(exact, recorded, strict=True):
                assert encode_message(mine)[:24] == encode_message(psis)[:24]
                assert psis.payload.startswith(mine.payload)


def test_every_client_has_its_own_interval_and_a_start_of_minus_1_is_now() -> None:
    with RemoteExporter(port=0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        store = stream.store
        for i in range(10):
            store.append(stream.id, bytes([i, 0, 0, 0]), None, NOW + i * 1000)
        some = ClientHello.of(NOW + 3000, NOW + 6000).to_bytes()
        to_the_tick = ClientHello.of(NOW + 3001, NOW + 5999)
        # Nanoseconds below a tick do not count: 3001 falls into the tick of 3000.
        assert to_the_tick.covers(NOW + 3000)
        assert not to_the_tick.covers(NOW + 6000)
        just_inside = ClientHello.of(NOW + 3100, NOW + 5900).to_bytes()
        with (
            client(exporter.port) as everything,
            client(exporter.port, some) as part,
            client(exporter.port, just_inside) as less,
            client(exporter.port, ClientHello().to_bytes()) as latest,
        ):
            for peer in (everything, part, less, latest):
                peer.burst()
                peer.open_data()
            stream.post(99)
            assert [m.sequence_id for m in everything.messages(11)] == list(range(1, 12))
            assert [m.sequence_id for m in part.messages(4)] == [4, 5, 6, 7]
            assert [m.sequence_id for m in less.messages(2)] == [5, 6]
            assert [m.sequence_id for m in latest.messages(1)] == [11]
            until(lambda: exporter.statistics().skipped == 4 + 5)
            until(lambda: exporter.statistics().messages == 11 + 4 + 2 + 1)
            assert (exporter.statistics().clients, exporter.statistics().lost) == (4, 0)


def test_a_stream_that_is_added_later_appears_and_its_end_is_told() -> None:
    with RemoteExporter(port=0) as exporter, client(exporter.port) as peer:
        peer.burst()
        peer.open_data()
        with exporter.exporter.write(None, "Late", "string") as late:
            late.post("hello")
            burst = peer.burst()
            assert any(isinstance(r, StreamMetadata) and r.name == "Late" for r in burst)
            (message,) = peer.messages(1)
            assert message.payload == bytes.fromhex("0000008005000000") + b"hello"
        (closed,) = peer.burst()
        assert isinstance(closed, StreamMetadata)
        assert closed.is_closed
        assert closed.message_count == 1


def test_a_client_that_stops_reading_does_not_disturb_the_others() -> None:
    with (
        Store.volatile(slots=1024, size=8 << 20) as store,
        RemoteExporter(store, 0, patience=4) as exporter,
        client(exporter.port) as stopped,
        client(exporter.port) as reading,
    ):
        for peer in (stopped, reading):
            peer.burst()
            peer.open_data()
        stream = exporter.exporter.write(None, "Large", "byte[]")
        until(lambda: exporter.statistics().clients == 2)
        time.sleep(0.3)  # the ring is small: what comes before they read may be overwritten
        payload = bytes(100_000)

        def post() -> None:
            for _ in range(300):
                stream.post(payload)

        writer = threading.Thread(target=post)
        writer.start()
        assert [m.sequence_id for m in reading.messages(300)] == list(range(1, 301))
        writer.join(30)
        assert not writer.is_alive()


def test_writers_wait_for_a_client_that_is_slow_but_gets_on() -> None:
    with (
        Store.volatile(slots=64, size=1 << 20) as store,
        RemoteExporter(store, 0, patience=5, max_bytes_per_second=200_000) as exporter,
        client(exporter.port) as peer,
    ):
        peer.burst()
        peer.open_data()
        stream = exporter.exporter.write(None, "Numbers", "byte[]")
        until(lambda: exporter.statistics().clients == 1)
        time.sleep(0.3)
        writer = threading.Thread(target=lambda: [stream.post(bytes(1000)) for _ in range(300)])
        writer.start()
        found = peer.messages(300)
        writer.join(10)
        assert [m.sequence_id for m in found] == list(range(1, 301))
        assert exporter.statistics().lost == 0
        assert exporter.statistics().waited > 0


def test_what_does_not_fit_leaves_by_the_policy_and_is_counted() -> None:
    with RemoteExporter(port=0) as exporter:
        gate = _ClosedGate()
        exporter.store.gates.append(gate)
        stream = exporter.exporter.write(
            None, "Numbers", "int", policy=DeliveryPolicy.queue_size_constrained(5)
        )
        for i in range(50):
            stream.post(i)
        gate.opened.set()
        stream.close()
        books = stream.statistics()
        assert books is not None
        dropped = sum(books.dropped.values())
        assert books.accepted == 50 == books.delivered + dropped + books.held
        assert dropped >= 44
        assert exporter.store.streams()[0].messages == books.delivered


class _ClosedGate:
    def __init__(self) -> None:
        self.opened = threading.Event()

    def wait(self, messages: int, size: int) -> None:
        del messages, size
        self.opened.wait(10)


def test_readers_and_iterables_are_written_as_streams(tmp_path: Path) -> None:
    url = f"log:{tmp_path / 'source'}"
    with open_writer(url) as writer:
        writer.write(b"one", time_ns=NOW)
        writer.write(b"two", time_ns=NOW + 1000)
    with RemoteExporter(tmp_path / "store", 0) as exporter, open_reader(url) as source:
        store = exporter.exporter.write(source, "Bytes").store
        exporter.exporter.write([1.5, Posted(2.5, NOW)], "Values", "double")
        until(lambda: [s.messages for s in exporter.store.streams()] == [2, 2])
        until(lambda: exporter.store.streams()[1].is_closed)
        with store.reader(id=0) as reader:
            first = reader.read(timeout=0)
        assert first is not None
        assert first.payload == bytes.fromhex("0000008003000000") + b"one"
        assert first.time_ns == NOW
        with pytest.raises(InvalidOption, match="type"):
            exporter.exporter.write([1], "Untyped")
        with pytest.raises(InvalidOption, match="already"):
            exporter.exporter.write([1], "Values", "double")


def test_an_existing_exporter_is_served_and_stays_open() -> None:
    with Store.volatile() as store:
        existing = Exporter(store)
        stream = existing.write(None, "Numbers", "int")
        with RemoteExporter(existing, 0) as sender, client(sender.port) as peer:
            peer.burst()
            peer.open_data()
            stream.post(1)
            assert len(peer.messages(1)) == 1
        assert store.gates == []
        stream.post(2)
        assert store.streams()[0].messages == 2


GARBAGE = [
    b"",
    b"\1\0" + bytes(16),
    b"\0\0" + b"\xfe" + b"\xff" * 7 + bytes(8),
    b"\0\0" + bytes(8) + b"\xff" * 8,
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\0\0\0",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_on_the_ports_harms_nobody(garbage: bytes) -> None:
    with RemoteExporter(port=0, first_message=0.5) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        bare = socket.create_connection(("127.0.0.1", exporter.port), 5)
        bare.sendall(garbage)
        assert exporter.data_port is not None
        data = socket.create_connection(("127.0.0.1", exporter.data_port), 5)
        data.sendall(b"not a session id, as you can see")
        with client(exporter.port) as peer:
            peer.burst()
            peer.open_data()
            stream.post(1)
            assert len(peer.messages(1)) == 1
        for sock in (bare, data):
            sock.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(10) == b""  # cut off, without an answer
            sock.close()


def test_garbage_on_the_udp_port_is_counted() -> None:
    with RemoteExporter(port=0, transport="udp") as exporter:
        assert exporter.data_port is not None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for size in (0, 1, 40, 60, 2000):
                sock.sendto(bytes(size), ("127.0.0.1", exporter.data_port))
        until(lambda: exporter.statistics().malformed == 5)
        with client(exporter.port) as peer:
            assert peer.hello.transport is Transport.UDP


def test_too_many_clients_are_turned_away_and_others_served() -> None:
    with RemoteExporter(port=0, max_clients=2) as exporter:
        with client(exporter.port) as one, client(exporter.port) as two:
            one.burst()
            two.burst()
            # It may be turned away before it knows that it was let in.
            with (
                contextlib.suppress(ConnectionResetError),
                socket.create_connection(("127.0.0.1", exporter.port), 5) as third,
            ):
                assert third.recv(1) == b""
        until(lambda: exporter._meta.server.statistics().open == 0)
        with client(exporter.port) as again:
            again.burst()
        assert exporter.statistics().denied == 1


def test_signs_of_life_tell_how_far_the_streams_are() -> None:
    with RemoteExporter(port=0, keep_alive=0.2) as exporter, client(exporter.port) as peer:
        peer.burst()
        stream = exporter.exporter.write(None, "Numbers", "int")
        peer.burst()
        stream.post(1)
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            told = peer.event()
            if isinstance(told, StreamMetadata) and told.message_count == 1:
                break
        else:
            pytest.fail("the count was not told")
        # Without an intermission: psi's importer would open another data connection. And of a
        # stream that it knows: records of other kinds are kept in its catalog again and again.
        for _ in range(3):
            sign = peer.event()
            assert isinstance(sign, StreamMetadata)
            assert sign.id == stream.id


def test_without_a_stream_there_are_no_signs_of_life_that_psi_would_keep() -> None:
    with RemoteExporter(port=0, keep_alive=0.05) as exporter, client(exporter.port) as peer:
        peer.burst()
        peer.meta.settimeout(0.5)
        with pytest.raises(TimeoutError):
            peer.event()


def test_a_client_of_psi_that_comes_again_gets_only_what_is_behind_its_last_message() -> None:
    second = 1_000_000_000
    with RemoteExporter(port=0) as exporter:
        frames = exporter.exporter.write(None, "Frames", "int")
        results = exporter.exporter.write(None, "Results", "int")
        now = time.time_ns() // 100 * 100
        for number in range(20):
            # Created now, and of an hour ago: the start of the interval tells nothing of that.
            moment = now - 3600 * second + number * second
            frames.post(number, moment)
            results.post(number, moment)
        with client(exporter.port) as peer:
            peer.burst()
            peer.open_data()
            assert len(peer.messages(40)) == 40
        until(lambda: not exporter.statistics().clients)
        frames.post(20, now - 3600 * second + 20 * second)
        hello = ClientHello.of(now - 3600 * second + 19 * second + 100)
        with client(exporter.port, hello.to_bytes()) as peer:
            peer.burst()
            peer.open_data()
            (message,) = peer.messages(1)
            assert (message.source_id, message.sequence_id) == (frames.id, 21)
        # Who asks for a creation time, as ours do, gets all that was created since.
        with client(exporter.port, hello.by_creation().to_bytes()) as peer:
            peer.burst()
            peer.open_data()
            assert len(peer.messages(41)) == 41


def test_a_client_of_psi_that_comes_again_while_much_is_written_gets_all_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = 1_000_000_000
    began = time.time_ns() // 100 * 100 - 3600 * second
    with Store.volatile(slots=32) as store, RemoteExporter(store, 0, patience=0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")

        def post(first: int, end: int) -> None:
            for number in range(first, end):
                stream.post(number, began + number * second)

        post(0, 20)
        with client(exporter.port) as peer:
            peer.burst()
            peer.open_data()
            assert len(peer.messages(20)) == 20
        until(lambda: not exporter.statistics().clients)
        real = Sender._pass_over

        def pass_over(sender: Sender, *arguments: Any) -> None:
            post(20, 50)  # what the client has is overwritten now
            real(sender, *arguments)

        monkeypatch.setattr(Sender, "_pass_over", pass_over)
        hello = ClientHello.of(began + 19 * second + 100)
        with client(exporter.port, hello.to_bytes()) as peer:
            peer.burst()
            peer.open_data()
            peer.data.settimeout(10)
            assert [it.sequence_id for it in peer.messages(30)] == list(range(21, 51))


@pytest.mark.parametrize("policy", ["throttle", "unlimited", "synchronous"])
def test_who_posts_by_a_policy_is_told_that_the_stream_was_ended_and_what_waited_is_counted(
    policy: str,
) -> None:
    with Store.volatile() as store:
        stream = Exporter(store).write(None, "Numbers", "int", policy=policy)
        stream.post(1)
        until(lambda: store.last_sequence(stream.id) == 1)
        store.end_stream(stream.id)

        def post() -> None:
            with contextlib.suppress(Closed):
                while True:
                    stream.post(2)

        posting = threading.Thread(target=post, daemon=True)
        posting.start()
        posting.join(10)
        assert not posting.is_alive()
        books = stream.statistics()
        assert books is not None
        assert isinstance(stream.last_error, Closed)
        until(lambda: books.accepted == 1 + stream.refused + books.held)


def test_a_second_data_connection_of_a_session_is_reset_and_the_first_goes_on() -> None:
    """psi's importer opens one more with each burst of metadata."""
    with RemoteExporter(port=0) as exporter, client(exporter.port) as peer:
        stream = exporter.exporter.write(None, "Numbers", "int")
        peer.burst()
        peer.open_data()
        stream.post(1)
        assert len(peer.messages(1)) == 1
        assert exporter.data_port is not None
        with socket.create_connection(("127.0.0.1", exporter.data_port), 10) as extra:
            extra.sendall(peer.hello.session.bytes_le)
            with pytest.raises(ConnectionResetError):
                extra.recv(1)
        stream.post(2)
        assert [message.sequence_id for message in peer.messages(1)] == [2]
        # One that broke is replaced by another with the same id.
        peer.data.close()
        peer.open_data()
        assert [message.sequence_id for message in peer.messages(2)] == [1, 2]


def test_psis_own_quota_is_there_for_those_who_depend_on_it() -> None:
    with RemoteExporter(port=0, quota="psi:1000B/s") as exporter, client(exporter.port) as peer:
        peer.burst()
        peer.open_data()
        stream = exporter.exporter.write(None, "Numbers", "int")
        for i in range(12):
            stream.post(i, NOW + i * 20_000_000)
        began = time.monotonic()
        assert len(peer.messages(12)) == 12
        # Its sleeps are 0, 0, 0, 2, 7, … 35 ms: above nothing, far below what the rate would need.
        assert 0.05 < time.monotonic() - began < 5


def test_a_source_that_fails_says_so_and_the_others_go_on() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("the sensor is gone")

    with RemoteExporter(port=0) as exporter:
        bad = exporter.exporter.write(failing(), "Bad", "int")
        good = exporter.exporter.write([1, 2], "Good", "int")
        until(lambda: exporter.store.streams()[1].is_closed)
        until(lambda: isinstance(bad.last_error, ValueError))
        assert good.last_error is None
        assert [stream.messages for stream in exporter.store.streams()] == [1, 2]
