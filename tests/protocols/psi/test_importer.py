"""An importer brings streams here once and in order, whatever the connection does."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.core.errors import ConnectionLost, InvalidOption, NotFound
from penstock.protocols.psi import (
    ClientHello,
    ClientHelloDecoder,
    PsiMessage,
    ServerHello,
    Transport,
)
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.importer.arrivals import Arrivals, Gap
from penstock.protocols.psi.importer.client import REPLAY_ALL, RemoteImporter
from penstock.protocols.psi.store.streams import Store
from protocols.psi.recordings import expected, recording
from support.mosquitto import free_port
from support.until import until

NOW = 1_700_000_000_000_000_000
HOST = "127.0.0.1"


@pytest.mark.parametrize("transport", ["tcp", "pipe", "udp"])
def test_what_is_exported_is_imported_to_its_end(transport: str) -> None:
    with RemoteExporter(port=0, transport=transport) as exporter:
        numbers = exporter.exporter.write(None, "Numbers", "int")
        words = exporter.exporter.write(None, "Words", "string")
        numbers.post(0)
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer:
            assert importer.wait_connected(10)
            for i in range(1, 500):
                numbers.post(i)
                words.post(f"word {i}")
            numbers.close()
            words.close()
            with importer.open_stream("Numbers", "int") as stream:
                assert [r.value for r in stream] == list(range(500))
                assert stream.lost == 0
            with importer.open_stream("Words", "string") as stream:
                assert [r.value for r in stream] == [f"word {i}" for i in range(1, 500)]
            books = importer.statistics()
            assert (books.messages, books.repeated, books.lost) == (999, 0, 0)
            assert books.datagrams_lost == 0


def test_a_large_message_survives_every_transport() -> None:
    payload = bytes(range(256)) * 2000
    for transport in ("tcp", "pipe", "udp"):
        with RemoteExporter(port=0, transport=transport) as exporter:
            stream = exporter.exporter.write(None, "Large", "byte[]")
            with RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer:
                stream.post(payload)
                with importer.open_stream("Large", "byte[]") as large:
                    received = large.read(10)
                assert received is not None
                assert received.value == payload


def test_a_late_importer_with_everything_gets_everything_and_one_with_nothing_what_is_new() -> None:
    with RemoteExporter(port=0) as exporter:
        numbers = exporter.exporter.write(None, "Numbers", "int")
        for i in range(100):
            numbers.post(i)
        with (
            RemoteImporter(HOST, exporter.port, REPLAY_ALL) as late,
            RemoteImporter(HOST, exporter.port) as latest,
        ):
            assert late.wait_connected(10)
            assert latest.wait_connected(10)
            numbers.post(100)
            numbers.close()
            with late.open_stream("Numbers") as stream:
                assert [r.value for r in stream] == list(range(101))
            with latest.open_stream("Numbers") as stream:
                assert [r.value for r in stream] == [100]
            assert latest.statistics().lost == 0


def test_an_interval_is_honoured_to_the_tick_and_an_end_alone_begins_now() -> None:
    with RemoteExporter(port=0) as exporter:
        numbers = exporter.exporter.write(None, "Numbers", "int")
        for i in range(20):
            payload = struct.pack("<i", i)
            numbers.store.append(numbers.id, payload, None, NOW + i * 100)
        with (
            RemoteImporter(HOST, exporter.port, (NOW + 500, NOW + 1200)) as part,
            RemoteImporter(HOST, exporter.port, time.time_ns() + 3_600_000_000_000) as later,
        ):
            assert part.wait_connected(10)
            assert later.wait_connected(10)
            numbers.post(99)
            numbers.close()
            with part.open_stream("Numbers") as stream:
                assert [r.value for r in stream] == list(range(5, 13))
            with later.open_stream("Numbers") as stream:
                assert [r.value for r in stream] == [99]


def test_a_stream_that_appears_later_is_there_for_connected_importers() -> None:
    with (
        RemoteExporter(port=0) as exporter,
        RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
    ):
        assert importer.wait_connected(10)
        with pytest.raises(NotFound, match="no stream 'Late'"):
            importer.open_stream("Late", timeout=0.1)
        with exporter.exporter.write(None, "Late", "double") as late:
            late.post(1.5)
        with importer.open_stream("Late", "double") as stream:
            assert [r.value for r in stream] == [1.5]
        with pytest.raises(InvalidOption, match="Late"):
            importer.open_stream("Late", "string")


def test_a_stream_of_another_generic_type_is_refused_whatever_its_assembly() -> None:
    counts = "System.Collections.Generic.Dictionary`2[[System.Int32{0}],[System.Int64{0}]]{0}"
    framework = ", mscorlib, Version=4.0.0.0, Culture=neutral, PublicKeyToken=b77a5c561934e089"
    with (
        RemoteExporter(port=0) as exporter,
        RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
    ):
        exporter.exporter.write(None, "Counts", counts.format(framework))
        importer.open_stream("Counts", counts.format("")).close()
        with pytest.raises(InvalidOption, match="Counts"):
            importer.open_stream("Counts", counts.format("").replace("Int64", "Double"))


@pytest.mark.parametrize("is_all", [True, False], ids=["everything", "from now on"])
def test_a_stream_that_the_ring_forgot_before_it_was_opened_is_counted_as_lost(
    is_all: bool,
) -> None:
    with RemoteExporter(port=0) as exporter:
        rare = exporter.exporter.write(None, "Rare", "int")
        ended = exporter.exporter.write(None, "Ended", "int")
        busy = exporter.exporter.write(None, "Busy", "byte[]")
        replay = REPLAY_ALL if is_all else None
        with RemoteImporter(HOST, exporter.port, replay) as importer:
            assert importer.wait_connected(10)
            time.sleep(0.1)  # the exporter's now lies before the first message
            for number in range(5):
                rare.post(number)
                ended.post(number)
            ended.close()
            until(lambda: importer.statistics().messages == 10)
            until(lambda: importer.store.metadata(ended.id).is_closed)
            slots, _ = importer.store.capacity()
            busy.post_many([(b"x", None)] * (slots + 10))
            until(lambda: importer.statistics().messages == slots + 20)
            for name in ("Rare", "Ended"):
                with importer.open_stream(name) as stream:
                    assert stream.read(0.2) is None
                    assert (stream.messages, stream.lost) == (0, 5)
            with importer.open_stream("Busy") as stream:
                got = stream.read_messages(2 * slots, 1)
                assert stream.lost + len(got) == slots + 10
            with importer.open_stream("Rare") as stream:
                assert stream.read(0) is None
                rare.post(5)
                received = stream.read(5)
                assert received is not None
                assert (received.value, stream.lost) == (5, 5)


def test_an_exporter_that_comes_back_is_found_and_nothing_comes_twice(tmp_path: Path) -> None:
    port = free_port()
    with RemoteExporter(tmp_path / "store", port) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        for i in range(50):
            stream.post(i)
        importer = RemoteImporter(HOST, port, REPLAY_ALL, longest_wait=0.2)
        until(lambda: importer.statistics().messages == 50)
    with importer:
        until(lambda: not importer.connected)
        with RemoteExporter(tmp_path / "store", port) as exporter:
            stream = exporter.exporter.write(None, "Numbers", "int")
            for i in range(50, 80):
                stream.post(i)
            until(lambda: importer.statistics().messages == 80)
        books = importer.statistics()
        assert (books.lost, books.restarts) == (0, 0)
        assert books.repeated <= 2  # only what may have been missed was asked for again
        with importer.open_stream("Numbers") as numbers:
            assert [r.value for r in numbers] == list(range(80))


def test_an_importer_that_comes_back_goes_on_where_its_store_ends(tmp_path: Path) -> None:
    with RemoteExporter(tmp_path / "out", 0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        for i in range(30):
            stream.post(i)
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL, store=tmp_path / "in") as importer:
            until(lambda: importer.statistics().messages == 30)
        for i in range(30, 60):
            stream.post(i)
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL, store=tmp_path / "in") as importer:
            until(lambda: importer.statistics().messages == 30)
            stream.close()
            with importer.open_stream("Numbers") as numbers:
                assert [r.value for r in numbers] == list(range(60))
            assert importer.statistics().repeated <= 1


_IMPORTING = """
import sys, time
from penstock.protocols.psi import REPLAY_ALL, RemoteImporter
importer = RemoteImporter("127.0.0.1", int(sys.argv[1]), REPLAY_ALL, store=sys.argv[2])
while importer.statistics().messages < 200:
    time.sleep(0.001)
print("some", flush=True)
time.sleep(60)
"""


def test_an_importer_that_is_killed_has_everything_once_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    stop = threading.Event()
    count = 0
    with RemoteExporter(tmp_path / "out", 0) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")

        def post() -> None:
            nonlocal count
            while not stop.is_set():
                stream.post(count)
                count += 1
                time.sleep(0.0005)

        posting = threading.Thread(target=post)
        posting.start()
        try:
            for _ in range(2):
                arguments = [sys.executable, "-c", _IMPORTING, str(exporter.port)]
                with subprocess.Popen(
                    [*arguments, str(tmp_path / "in")], stdout=subprocess.PIPE, text=True
                ) as process:
                    assert process.stdout is not None
                    assert process.stdout.readline() == "some\n"
                    process.kill()
        finally:
            stop.set()
            posting.join(10)
        stream.close()
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL, store=tmp_path / "in") as importer:
            with importer.open_stream("Numbers") as numbers:
                assert [r.value for r in numbers] == list(range(count))
            assert importer.statistics().lost == 0


def test_what_a_ring_forgot_is_reported_as_lost() -> None:
    with (
        Store.volatile(slots=64, size=65536) as store,
        RemoteExporter(store, 0) as exporter,
    ):
        stream = exporter.exporter.write(None, "Numbers", "int")
        for i in range(1000):
            stream.post(i)
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer:
            stream.close()
            with importer.open_stream("Numbers") as numbers:
                values = [r.value for r in numbers]
                assert values == list(range(936, 1000))
                assert numbers.lost == 936
            books = importer.statistics()
            assert books.messages + books.lost == 1000
            assert books.gaps == (Gap("Numbers", 1, 936),)


def test_nobody_there_is_a_clear_error_and_the_importer_goes_on_trying() -> None:
    port = free_port()
    with RemoteImporter(HOST, port, REPLAY_ALL, longest_wait=0.2) as importer:
        with pytest.raises(ConnectionLost, match="nobody listens") as told:
            importer.open_stream("Numbers", timeout=0.3)
        assert "RemoteExporter running there?" in str(told.value.hint)
        with RemoteExporter(port=port) as exporter:
            exporter.exporter.write([1, 2], "Numbers", "int")
            assert importer.wait_connected(10)
            with importer.open_stream("Numbers") as stream:
                assert [r.value for r in stream] == [1, 2]


def test_two_importers_may_fill_one_store() -> None:
    with (
        RemoteExporter(port=0) as one,
        RemoteExporter(port=0) as two,
        Store.volatile() as store,
        RemoteImporter(HOST, one.port, REPLAY_ALL, store=store) as first,
        RemoteImporter(HOST, two.port, REPLAY_ALL, store=first) as second,
    ):
        one.exporter.write([1], "A", "int", id=5)
        two.exporter.write([2], "B", "int", id=5)
        with first.open_stream("A") as a, second.open_stream("B") as b:
            assert [r.value for r in a] == [1]
            assert [r.value for r in b] == [2]


# --- an exporter with psi's faults ----------------------------------------------------------


class PsiExporter:
    """Plays psi's part: what it sends is given, and how it ends, too."""

    def __init__(self, *, early_closes: int = 0) -> None:
        self.listener = socket.create_server((HOST, 0))
        self.data_listener = socket.create_server((HOST, 0))
        self.port: int = self.listener.getsockname()[1]
        self.hellos: list[ClientHello] = []
        self.data_connections = 0
        self._early_closes = early_closes
        self._sockets: list[socket.socket] = [self.listener, self.data_listener]

    def serve(self, meta: bytes, data: bytes, *, hello: bytes | None = None) -> None:
        """Serve one client, and then end as psi's process does: both connections at once."""
        connection, _ = self.listener.accept()
        (asked,) = ClientHelloDecoder().feed(connection.recv(18))
        self.hellos.append(asked)
        port = self.data_listener.getsockname()[1]
        answer = ServerHello(uuid4(), Transport.TCP, port).to_bytes()
        connection.sendall((answer if hello is None else hello) + meta)
        for _ in range(self._early_closes):
            early, _ = self.data_listener.accept()
            self.data_connections += 1
            early.recv(16)
            early.close()
        self._early_closes = 0
        channel, _ = self.data_listener.accept()
        self.data_connections += 1
        assert len(channel.recv(16)) == 16
        channel.sendall(data)
        time.sleep(0.3)
        channel.close()
        connection.close()

    def serve_all(self, *sessions: tuple[bytes, bytes]) -> threading.Thread:
        def run() -> None:
            for meta, data in sessions:
                self.serve(meta, data)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def test_a_recorded_session_is_imported_without_its_stale_bytes() -> None:
    """Repeated metadata, stale bytes, a data connection that closes at once, and EOF."""
    psi = PsiExporter(early_closes=2)
    serving = psi.serve_all(
        (recording("basic.s2c.meta.bin"), recording("basic.s2c.data.bin")),
        (recording("basic.s2c.meta.bin"), recording("basic.s2c.data.bin")),
    )
    with RemoteImporter(HOST, psi.port, REPLAY_ALL) as importer:
        wanted = expected("basic.expected.json")["streams"]["Strings"]["values"]
        with importer.open_stream("Strings", "string") as strings:
            values = [strings.read(10) for _ in wanted]
            assert [r.value for r in values if r is not None] == wanted
        serving.join(20)
        assert not serving.is_alive()
        assert psi.data_connections == 4
        # psi's end is an end of file; the importer came again, and asked for the rest only.
        assert psi.hellos[0] == REPLAY_ALL
        assert psi.hellos[1].start_ticks
        until(lambda: importer.statistics().repeated > 0)
        assert importer.statistics().lost == 0
        with importer.store.reader() as reader:
            sizes = {message.size for message in reader.available() if message.type == 2}
        assert sizes == {4}
    psi.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff\x7f",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        struct.pack("<i", 30) + bytes(30),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_a_peer_that_is_no_exporter_is_given_up_and_tried_again(answer: bytes) -> None:
    with socket.create_server((HOST, 0)) as listener:
        seen = threading.Event()

        def serve() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                connection.recv(18)
                connection.sendall(answer)
                connection.settimeout(10)
                connection.recv(10)
                connection.close()
            seen.set()

        threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        with RemoteImporter(HOST, port, longest_wait=0.1, connect_timeout=0.5) as importer:
            assert seen.wait(15)
            assert not importer.connected
            assert importer.last_error is not None


# --- the books ------------------------------------------------------------------------------


def message(sequence: int, originating_ns: int, creation_ns: int | None = None) -> PsiMessage:
    created = originating_ns if creation_ns is None else creation_ns
    return PsiMessage(1, sequence, originating_ns, created, b"")


def test_a_message_is_known_by_its_number_and_its_time() -> None:
    arrivals = Arrivals(from_first=True)
    taken = [
        arrivals.take("A", message(sequence, moment))
        for sequence, moment in [(1, 10), (2, 20), (2, 20), (1, 10), (3, 30), (6, 60), (1, 70)]
    ]
    assert taken == [True, True, False, False, True, True, True]
    assert (arrivals.taken, arrivals.repeated, arrivals.lost) == (5, 2, 2)
    assert (arrivals.restarts, arrivals.gaps()) == (1, (Gap("A", 4, 5),))


def test_only_what_may_have_been_missed_is_asked_for() -> None:
    assert Arrivals(from_first=True).resume_ns is None
    arrivals = Arrivals(from_first=True)
    arrivals.take("A", message(1, NOW))
    arrivals.take("B", message(1, NOW + 1000))
    assert arrivals.resume_ns == NOW + 1000
    # An exporter whose streams are merged out of order is asked for more.
    arrivals.take("A", message(2, NOW + 100, NOW + 400))
    assert arrivals.resume_ns == NOW + 1000 - 1200


def test_payloads_that_are_not_of_their_streams_type_are_counted() -> None:
    with RemoteExporter(port=0) as exporter:
        texts = exporter.exporter.write(None, "Texts", "string")
        texts.post("a text")
        texts.post_payload(b"no text")
        with RemoteImporter("127.0.0.1", exporter.port, REPLAY_ALL) as importer:
            until(lambda: importer.statistics().messages == 2)
            assert importer.statistics().untrimmed == 1
