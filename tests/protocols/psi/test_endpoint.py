"""A psi:// URL is a stream of an exporter, and as a writer an exporter itself."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from pathlib import Path
from typing import cast
from uuid import uuid4

import pytest

from penstock.core.endpoints import describe, open_reader, open_writer
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    InvalidOption,
    InvalidURL,
    NotFound,
    PositionError,
)
from penstock.core.interfaces import Reader
from penstock.protocols.psi import (
    RuntimeInfo,
    ServerHello,
    Store,
    StreamFlags,
    StreamMetadata,
    Transport,
    qualify,
)
from penstock.protocols.psi.endpoint import PsiWriter
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.handshake import encode_burst
from penstock.relay.copy import copy, fields_lost
from support.interruption import Interrupted, interrupted_at_call
from support.mosquitto import free_port
from support.until import until

NOW = 1_700_000_000_000_000_000


def test_a_stream_is_read_whatever_a_peer_calls_its_type(tmp_path: Path) -> None:
    with Store.create(tmp_path, "rig") as store, RemoteExporter(store, 0) as exporter:
        for name in ("urn:x:Point", "a[b"):
            stream = store.add_copy(StreamMetadata("S" + name, 0, name))
            store.append(stream.id, b"abcd", NOW)
            with open_reader(f"psi://127.0.0.1:{exporter.port}/S{name}") as reader:
                message = reader.read(10)
                assert message is not None
                assert message.payload == b"abcd"


def test_a_stream_is_copied_to_a_log_and_its_name_may_have_spaces(tmp_path: Path) -> None:
    with RemoteExporter(port=0) as exporter:
        floats = exporter.exporter.write(None, "Some Floats", "float")
        other = exporter.exporter.write(None, "Other", "string")
        for i in range(100):
            floats.post(float(i), NOW + i * 1000)
            other.post("no")
        url = f"psi://127.0.0.1:{exporter.port}/Some%20Floats"
        log = f"log:{tmp_path / 'floats'}"
        with open_reader(url) as reader, open_writer(log) as writer:
            assert copy(reader, writer).copied == 100
            assert reader.statistics().lost == 0
        with open_reader(log) as stored:
            found = list(stored.available())
        assert [struct.unpack("<f", m.payload)[0] for m in found] == list(range(100))
        assert found[3].time_ns == NOW + 3000
        assert found[3].subtype == 4
        info = describe(url)
        assert info.details["type"].startswith("System.Single")


def test_bytes_go_through_a_writer_and_a_reader_unchanged() -> None:
    url = f"psi://127.0.0.1:{free_port()}"
    with open_writer(f"{url}/A") as a, open_writer(f"{url}/B") as b:
        assert a.write(b"one", time_ns=NOW) == 1
        assert a.write(b"", time_ns=NOW + 100) == 2
        b.write(b"other")
        with open_reader(f"{url}/A") as reader:
            first, second = reader.read(10), reader.read(10)
        assert first is not None
        assert second is not None
        assert (first.payload, first.time_ns, second.payload) == (b"one", NOW, b"")
        with open_reader(f"{url}/B", payload="psi") as reader:
            message = reader.read(10)
        assert message is not None
        assert message.payload == bytes.fromhex("0000008005000000") + b"other"
        with pytest.raises(InvalidOption):
            open_writer(f"{url}/C", keep_alive="1s")
        assert "type" in fields_lost(reader, a)
        assert a.statistics().messages == 2


def test_a_payload_that_is_no_byte_array_is_counted_and_costs_no_other_message() -> None:
    with RemoteExporter(port=0) as exporter:
        stream = exporter.exporter.write(None, "A", "byte[]")
        for payload in (b"one", b"two"):
            stream.post(payload)
        stream.post_payload(b"\xff\xff")
        stream.post(b"four")
        stream.close()
        with open_reader(f"psi://127.0.0.1:{exporter.port}/A") as reader:
            found = [message for _ in range(3) if (message := reader.read(10)) is not None]
            assert [message.payload for message in found] == [b"one", b"two", b"four"]
            assert reader.statistics().lost == 1


@pytest.mark.parametrize("busy", [False, True])
def test_a_stream_that_was_overwritten_by_others_before_it_was_read_ends_and_is_lost(
    busy: bool,
) -> None:
    done = threading.Event()
    with Store.volatile(slots=64) as store, RemoteExporter(store, port=0) as exporter:
        stream = exporter.exporter.write(None, "A", "int")
        other = exporter.exporter.write(None, "B", "int")
        for number in range(10):
            stream.post(number)
        stream.close()
        for number in range(100):
            other.post(number)

        def go_on() -> None:
            while busy and not done.wait(0.02):
                other.post(0)

        writing = threading.Thread(target=go_on)
        writing.start()
        try:
            with open_reader(f"psi://127.0.0.1:{exporter.port}/A") as reader:
                until(lambda: not reader.read_many(10, 0.1) and not reader._idle(), 10)
                assert reader.statistics().messages == 0
                assert reader.statistics().lost == 10
        finally:
            done.set()
            writing.join()


def test_a_reader_that_is_slow_loses_nothing() -> None:
    with open_writer(f"psi://127.0.0.1:{free_port()}/A", linger=10) as writer:
        writing = threading.Thread(
            target=lambda: [writer.write(struct.pack("<i", i)) for i in range(3000)]
        )
        with open_reader(writer.url, slots=64) as reader:
            writing.start()
            found = [reader.read(10) for _ in range(3000)]
            writing.join(20)
            assert [m is not None and struct.unpack("<i", m.payload)[0] for m in found] == list(
                range(3000)
            )
            assert reader.statistics().lost == 0


def test_urls_positions_and_streams_that_do_not_fit_are_refused() -> None:
    with RemoteExporter(port=0) as exporter:
        exporter.exporter.write(None, "A", "int")
        url = f"psi://127.0.0.1:{exporter.port}"
        with pytest.raises(InvalidURL):
            open_reader(url)
        with pytest.raises(PositionError):
            open_reader(f"{url}/A", "last")
        with pytest.raises(NotFound, match="no stream 'B'"):
            open_reader(f"{url}/B", wait="200ms")
        with pytest.raises(InvalidOption):
            open_reader(f"{url}/A", nonsense=1)


def test_what_nobody_came_for_is_counted_and_told_after_the_time_to_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    began = time.monotonic()
    with open_writer("psi://127.0.0.1:0/Bytes", linger="300ms") as writer:
        writer.write_many([b"1", b"2", b"3"])
        assert writer.statistics().untaken == 0  # somebody may still come
    assert time.monotonic() - began >= 0.3
    assert writer.statistics().untaken == 3
    assert "what nobody took is gone (messages: 3)" in caplog.text


def test_who_comes_while_a_writer_closes_gets_everything() -> None:
    url = f"psi://127.0.0.1:{free_port()}/Bytes"
    writer = open_writer(url, linger=20)
    writer.write_many([b"1", b"2", b"3"])
    closing = threading.Thread(target=writer.close)
    closing.start()
    with open_reader(url) as reader:
        found = [reader.read(10) for _ in range(3)]
    closing.join(10)
    assert not closing.is_alive()
    assert [message and message.payload for message in found] == [b"1", b"2", b"3"]
    assert writer.statistics().untaken == 0


def test_only_messages_that_no_client_got_are_counted() -> None:
    url = f"psi://127.0.0.1:{free_port()}"
    with open_writer(f"{url}/A", linger=0) as a, open_writer(f"{url}/B", linger=0) as b:
        b.write(b"1")
        a.write_many([b"1", b"2", b"3"])
        with open_reader(f"{url}/A") as reader:
            assert all(reader.read(10) for _ in range(3))
        assert isinstance(a, PsiWriter)
        until(lambda: not a.exporter.statistics().clients)
        a.write(b"4")
        b.write_many([b"2", b"3"])
        with open_reader(f"{url}/A", "end") as live:  # it asks for nothing of the past
            assert live.read(0.5) is None
    assert (a.statistics().untaken, b.statistics().untaken) == (1, 2)


def test_what_a_store_on_the_disk_keeps_is_not_gone(tmp_path: Path) -> None:
    with open_writer("psi://127.0.0.1:0/Bytes", store=tmp_path / "kept") as writer:
        writer.write_many([b"1", b"2", b"3"])
    assert writer.statistics().untaken == 0


def test_a_writer_keeps_its_books_and_takes_nothing_when_it_is_closed() -> None:
    with open_writer("psi://127.0.0.1:0/Bytes", linger=0) as writer:
        assert writer.statistics().last_seq is None
        assert writer.write_many([]) is None
        assert writer.write(b"one", attributes=b"x") == 1
        assert writer.write_many([b"two", b"three"]) == 3
    books = writer.statistics()
    assert (books.messages, books.bytes, books.refused) == (3, 11, 0)
    assert (books.headers_dropped, books.last_seq) == (1, 3)
    with pytest.raises(Closed):
        writer.write(b"four")
    with pytest.raises(Closed):
        writer.write_many([b"four"])
    assert writer.statistics() == books


class SilentExporter:
    """What psi's own exporter is to its second client: it tells of streams and sends nothing."""

    def __init__(self, stream: StreamMetadata) -> None:
        self._burst = encode_burst([RuntimeInfo(), stream])
        self._meta = socket.create_server(("127.0.0.1", 0))
        self._data = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._meta.getsockname()[1]
        #: Data connections that were made; they wait in the queue of the kernel.
        self.connections: list[socket.socket] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._meta.accept()
                self.connections.append(connection)
                connection.recv(18)
                hello = ServerHello(uuid4(), Transport.TCP, self._data.getsockname()[1])
                connection.sendall(hello.to_bytes() + self._burst)

    def has_data_connection(self) -> bool:
        self._data.settimeout(0.3)
        try:
            connection, _ = self._data.accept()
        except TimeoutError:
            return False
        connection.close()
        return True

    def close(self) -> None:
        for each in (self._meta, self._data, *self.connections):
            each.close()


def test_to_describe_a_stream_takes_no_data_connection() -> None:
    stream = StreamMetadata("S", 3, qualify("int"), message_count=7)
    with contextlib.closing(SilentExporter(stream)) as exporter:
        info = describe(f"psi://127.0.0.1:{exporter.port}/S")
        assert (info.count, info.details["id"]) == (7, 3)
        assert not exporter.has_data_connection()
        with pytest.raises(NotFound, match="T"):
            describe(f"psi://127.0.0.1:{exporter.port}/T?wait=0.5")
        with open_reader(f"psi://127.0.0.1:{exporter.port}/S"):
            assert exporter.has_data_connection()


def test_who_gets_nothing_from_psis_exporter_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    stream = StreamMetadata("S", 3, qualify("int"))
    with (
        contextlib.closing(SilentExporter(stream)) as exporter,
        open_reader(f"psi://127.0.0.1:{exporter.port}/S?quiet=0.3") as reader,
    ):
        assert reader.read_many(5) == []
    assert "one client at a time" in caplog.text
    closed = stream._replace(flags=StreamFlags.CLOSED, message_count=9)
    with (
        contextlib.closing(SilentExporter(closed)) as exporter,
        open_reader(f"psi://127.0.0.1:{exporter.port}/S?quiet=0.3") as reader,
        pytest.raises(ConnectionLost, match="9 messages do not come"),
    ):
        reader.read_many(5)


@pytest.mark.parametrize("by", ["many", "batch"])
def test_a_read_that_is_interrupted_at_any_call_takes_nothing(by: str) -> None:
    def read(reader: Reader) -> list[int]:
        if by == "many":
            return [message.seq for message in reader.read_many(4)]
        return cast("list[int]", reader.read_batch(4).column("seq").to_pylist())

    with RemoteExporter(port=0) as exporter:
        floats = exporter.exporter.write(None, "Floats", "float")
        for i in range(6):
            floats.post(float(i), NOW + i)
        url = f"psi://127.0.0.1:{exporter.port}/Floats"
        for call in itertools.count(1, 3):
            got: list[int] = []
            where = ""
            with open_reader(url, quiet="10ms") as reader:
                until(lambda reader=reader: reader.statistics().backlog == 6)  # type: ignore[misc]
                try:
                    with interrupted_at_call(call, "penstock"):
                        got += read(reader)
                except Interrupted as place:
                    where = f"at {place}"
                while found := read(reader):
                    got += found
                books = reader.statistics()
            assert got == list(range(6)), where
            assert (books.messages, books.bytes) == (6, 24), where
            assert (books.lost, books.backlog, books.next_seq) == (0, 0, 6), where
            if not where:
                return
