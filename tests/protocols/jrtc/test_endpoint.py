"""`jrtc+udp:` as a stream that is read, written and copied as any other."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from pathlib import Path
from typing import cast

import pytest

from penstock import open_reader, open_writer
from penstock.core.batch import batch_from_messages
from penstock.core.endpoints import identity
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    InvalidOption,
    InvalidURL,
    MessageTooLarge,
    PositionError,
    StorageError,
    Unsupported,
)
from penstock.core.message import Message
from penstock.protocols.jrtc.control import ControlServer
from penstock.protocols.jrtc.endpoint import DatagramReader
from penstock.protocols.jrtc.schemas import Schemas
from penstock.protocols.jrtc.wire import pack_frame
from penstock.queue.streams import InputStream
from penstock.relay.copy import copy
from protocols.jrtc.forwarded import HOST, STATUS, UP, listening, port_of, send, stream_of
from support.interruption import Interrupted, interrupted_after, interrupted_at_call
from support.until import until


def reader_at(options: str = "") -> DatagramReader:
    reader = open_reader(f"jrtc+udp://{HOST}:0{options}")
    assert isinstance(reader, DatagramReader)
    return reader


def test_datagrams_are_read_with_their_streams() -> None:
    with reader_at() as reader:
        send(reader.port, STATUS + UP, STATUS, b"short", STATUS + b"x")
        messages = [reader.read(5) for _ in range(3)]
        assert reader.read(0) is None
    found = [(m.seq, m.stream, m.payload) for m in messages if m]
    assert found == [(0, STATUS, UP), (1, STATUS, b""), (2, STATUS, b"x")]
    books = reader.statistics()
    assert (books.messages, books.bytes, books.filtered, books.lost) == (3, len(UP) + 1, 1, 0)
    with pytest.raises(Closed):
        reader.read(0)


def test_a_reader_gives_the_streams_that_it_was_asked_for() -> None:
    with reader_at(f"?stream={stream_of('wanted')}") as reader:
        send(reader.port, STATUS + b"1", stream_of("wanted") + b"2", STATUS + b"3")
        message = reader.read(5)
        until(lambda: reader.statistics().filtered == 2)
    assert message is not None
    assert message.payload == b"2"


def test_datagrams_wait_for_a_reader_that_is_slow() -> None:
    with reader_at() as reader:
        for _ in range(10):
            send(reader.port, *(STATUS + bytes(100) for _ in range(100)))
            until(lambda: reader.newest_seq() is not None)
        until(lambda: reader.statistics().backlog + reader.statistics().lost == 1000)
        assert sum(len(reader.read_many(64)) for _ in range(20)) == 1000
        assert reader.statistics().lost == 0


def test_datagrams_that_come_while_a_reader_is_closed_are_in_its_statistics() -> None:
    for _ in range(50):
        is_over = threading.Event()
        with reader_at() as reader:

            def produce(is_over: threading.Event = is_over, port: int = reader.port) -> None:
                while not is_over.wait(0.001):
                    with contextlib.suppress(ConnectionRefusedError):  # it was closed
                        send(port, *(STATUS for _ in range(20)))

            producer = threading.Thread(target=produce)
            producer.start()
            until(lambda reader=reader: len(reader.read_many(100, 0.1)) > 0)  # type: ignore[misc]
        is_over.set()
        producer.join()
        books, kernel = reader.statistics(), reader._server.statistics()
        assert books.messages + books.backlog + books.lost == kernel.received + kernel.dropped
        if books.lost:
            return
    pytest.fail("nothing came while a reader was closed")


@pytest.mark.parametrize("by", ["many", "batch"])
def test_a_read_that_is_interrupted_at_any_call_takes_nothing(by: str) -> None:
    def read(reader: DatagramReader) -> list[bytes]:
        if by == "many":
            return [message.payload for message in reader.read_many(4)]
        return cast("list[bytes]", reader.read_batch(4).column("payload").to_pylist())

    for call in itertools.count(1, 2):
        got: list[bytes] = []
        where = ""
        with reader_at() as reader:
            send(reader.port, *(STATUS + b"%d" % i for i in range(6)))
            until(lambda reader=reader: reader.statistics().backlog == 6)  # type: ignore[misc]
            try:
                with interrupted_at_call(call, "penstock"):
                    got += read(reader)
            except Interrupted as place:
                where = f"at {place}"
            while found := read(reader):
                got += found
            books = reader.statistics()
        assert got == [b"%d" % i for i in range(6)], where
        assert (books.messages, books.bytes, books.next_seq, books.backlog) == (6, 6, 6, 0), where
        if not where:
            return


def test_a_writer_sends_what_a_forwarder_would() -> None:
    with (
        listening() as sock,
        open_writer(f"jrtc+udp://{HOST}:{port_of(sock)}?stream={STATUS}") as writer,
    ):
        writer.write(UP)
        writer.write(b"other", stream=stream_of("other"))
        assert sock.recv(100) == STATUS + UP
        assert sock.recv(100) == stream_of("other") + b"other"
        messages = [
            Message(0, 1, 2, 3, 4, None, b"a", b"one"),
            Message(1, 1, 2, 0, 0, stream_of("two"), None, b"two"),
            Message(2, 1, 2, 0, 0, None, None, bytes(65_492)),
            Message(3, 1, 2, 0, 0, None, None, b"four"),
        ]
        with pytest.raises(MessageTooLarge):
            writer.write_batch(batch_from_messages(messages))
        assert [sock.recv(100), sock.recv(100)] == [STATUS + b"one", stream_of("two") + b"two"]
        books = writer.statistics()
        assert (books.messages, books.refused, books.headers_dropped) == (4, 2, 1)
        assert books.bytes == len(UP) + 5 + 6


def test_a_message_without_a_stream_cannot_be_sent() -> None:
    with listening() as sock, open_writer(f"jrtc+udp://{HOST}:{port_of(sock)}") as writer:
        with pytest.raises(InvalidOption, match="no stream"):
            writer.write(UP)
        with pytest.raises(InvalidOption, match="no stream"):
            writer.write_batch(batch_from_messages([Message(0, 0, 0, 0, 0, None, None, b"x")] * 3))
        assert (writer.statistics().messages, writer.statistics().refused) == (0, 4)


def test_a_stream_is_copied_to_a_queue_and_back(tmp_path: Path) -> None:
    with reader_at() as reader, open_writer(f"fmq:{tmp_path}/q") as queue:
        send(reader.port, *(STATUS + b"%d" % i for i in range(50)))
        until(lambda: reader.statistics().backlog == 50)
        copy(reader, queue)
    with (
        open_reader(f"fmq:{tmp_path}/q") as source,
        reader_at() as target,
        open_writer(f"jrtc+udp://{HOST}:{target.port}") as writer,
    ):
        copy(source, writer)
        got = target.read_many(50, 5)
        while len(got) < 50:
            got += target.read_many(50, 5)
    assert [(m.stream, m.payload) for m in got] == [(STATUS, b"%d" % i) for i in range(50)]


def test_urls_that_are_none() -> None:
    for url in ("jrtc+udp:///path", "jrtc+udp://host/path"):
        with pytest.raises(InvalidURL):
            open_reader(url)
    with pytest.raises(InvalidOption):
        open_reader(f"jrtc+udp://{HOST}:0?stream=abc")
    with pytest.raises(PositionError):
        open_reader(f"jrtc+udp://{HOST}:0", start=5)
    with pytest.raises(Unsupported):
        open_reader(f"jrtc+tcp://{HOST}:1")
    with pytest.raises(ConnectionLost):
        open_writer(f"jrtc+tcp://{HOST}:1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind((HOST, 0))
        with pytest.raises(StorageError):
            open_reader(f"jrtc+udp://{HOST}:{port_of(taken)}")
    assert identity(f"jrtc+udp://{HOST}") == identity(f"jrtc+udp://{HOST}:20788?stream={STATUS}")


def test_commands_reach_a_controller_that_was_restarted(tmp_path: Path) -> None:
    commands = stream_of("commands", 1)
    with InputStream.create(commands, owner="a codelet", directory=tmp_path) as stream:
        with ControlServer([commands], Schemas(), tcp_port=0, directory=tmp_path) as server:
            port = server.tcp_port
            writer = open_writer(f"jrtc+tcp://{HOST}:{port}?stream={commands}")
            writer.write(b"0")
            assert [m.payload for m in stream.read_many(1, 10)] == [b"0"]
        with pytest.raises(ConnectionLost):
            writer.write(b"while it is away")
        with (
            ControlServer([commands], Schemas(), tcp_port=port, directory=tmp_path),
            writer,
        ):
            writer.write(b"1")
            writer.write(b"2")
            assert [m.payload for _ in range(2) for m in stream.read_many(1, 10)] == [b"1", b"2"]
    assert (writer.statistics().messages, writer.statistics().refused) == (3, 1)


def test_no_message_goes_behind_half_of_one_that_was_interrupted() -> None:
    received = bytearray()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind((HOST, 0))
        listener.listen()
        with open_writer(f"jrtc+tcp://{HOST}:{port_of(listener)}?stream={STATUS}") as writer:
            first, _ = listener.accept()
            with first:
                # Nobody reads: in the end the kernel has room for a part of a frame only.
                with pytest.raises(Interrupted), interrupted_after(0.5):
                    writer.write_many(itertools.repeat(bytes(60_000)))
                books = writer.statistics()
                assert books.refused == 1
                writer.write(b"later")
                while piece := first.recv(1 << 16):
                    received += piece
            assert len(received) < (books.messages + 1) * len(pack_frame(STATUS, bytes(60_000)))
            second, _ = listener.accept()
            with second:
                assert second.recv(100) == pack_frame(STATUS, b"later")


def test_a_connection_that_was_reset_before_a_message_costs_no_message() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with open_writer(f"jrtc+tcp://{HOST}:{port}?stream={STATUS}") as writer:
            first, _ = listener.accept()
            writer.write(b"one")
            until(lambda: first.recv(100, socket.MSG_PEEK).endswith(b"one"))
            first.close()  # with what it has not read: the kernel resets the connection
            time.sleep(0.1)
            writer.write(b"two")
            second, _ = listener.accept()
            with second:
                assert second.recv(100).endswith(b"two")
        assert (writer.statistics().messages, writer.statistics().refused) == (2, 0)
