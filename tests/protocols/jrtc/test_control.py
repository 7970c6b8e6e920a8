"""Commands from outside reach the input streams that they may, and no other."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import open_writer
from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.control import ControlServer, Refusal
from penstock.protocols.jrtc.schemas import Schemas
from penstock.protocols.jrtc.wire import pack_frame
from penstock.queue.streams import InputStream
from protocols.jrtc.forwarded import (
    HOST,
    STATUS,
    UP,
    as_set,
    describe,
    example_schemas,
    send,
    stream_of,
)
from support.until import until

COMMANDS = stream_of("commands", 1)
ALL_OF_DEVICE = StreamId.generate(1, 1, None, None)


@contextlib.contextmanager
def controlling(
    folder: Path, schemas: Schemas | None = None, allow: StreamId = ALL_OF_DEVICE, **more: Any
) -> Iterator[ControlServer]:
    with ControlServer(
        [allow], schemas or Schemas(), tcp_port=0, udp_port=0, directory=folder, **more
    ) as server:
        yield server
    books = server.statistics()
    assert books.datagrams is not None
    known = books.delivered + sum(books.refused.values()) + books.unhandled
    assert known >= books.datagrams.received


def test_commands_come_by_udp_and_by_tcp(tmp_path: Path) -> None:
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path) as stream,
        controlling(tmp_path) as server,
    ):
        assert server.udp_port is not None
        send(server.udp_port, COMMANDS + b"by UDP", COMMANDS)
        assert [stream.read(5).payload for _ in range(2)] == [b"by UDP", b""]  # type: ignore[union-attr]
        url = f"jrtc+tcp://{HOST}:{server.tcp_port}?stream={COMMANDS}"
        with open_writer(url) as writer:
            writer.write_many([b"%d" % i for i in range(100)])
            got = [stream.read(5) for _ in range(100)]
    assert [message.payload for message in got if message] == [b"%d" % i for i in range(100)]
    assert server.statistics().delivered == 102
    sender = got[0].attributes if got[0] else None
    assert sender is not None
    assert sender.startswith(b"127.0.0.1")


def test_commands_that_are_not_looked_at_in_time_are_counted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path),
        controlling(tmp_path) as server,
    ):
        deliver = server.deliver

        def slowly(*given: Any, **more: Any) -> None:
            time.sleep(0.005)  # as streams that are full
            deliver(*given, **more)

        monkeypatch.setattr(server, "deliver", slowly)
        for _ in range(20):
            send(server.udp_port or 0, *(COMMANDS + b"go" for _ in range(100)))
            time.sleep(0.01)
    books = server.statistics()
    assert books.datagrams is not None
    assert books.unhandled > 0
    done = books.delivered + sum(books.refused.values())
    assert done + books.unhandled == books.datagrams.received


def test_a_command_whose_message_is_gone_is_refused(tmp_path: Path) -> None:
    schemas = example_schemas(nanopb=True, stream=COMMANDS)
    schemas.upsert(as_set(describe({"other": [("id", "uint32")]}, name="example.proto")))
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path) as stream,
        controlling(tmp_path, schemas) as server,
    ):
        send(server.udp_port or 0, COMMANDS + UP)
        until(lambda: server.statistics().refused[Refusal.UNDECODABLE])
        assert stream.read(0) is None


def test_frames_may_come_in_any_pieces(tmp_path: Path) -> None:
    frames = b"".join(pack_frame(COMMANDS, bytes([i]) * 200) for i in range(5))
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path) as stream,
        controlling(tmp_path) as server,
        socket.create_connection((HOST, server.tcp_port or 0)) as client,
    ):
        for at in range(0, len(frames), 97):
            client.sendall(frames[at : at + 97])
        got = [stream.read(5) for _ in range(5)]
    assert [message.payload for message in got if message] == [bytes([i]) * 200 for i in range(5)]


def test_only_streams_of_the_allow_list_are_reached(tmp_path: Path) -> None:
    forbidden = stream_of("commands", 1, device=2)
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path) as stream,
        InputStream.create(forbidden, owner="codelet", directory=tmp_path) as other,
        controlling(tmp_path) as server,
    ):
        assert server.udp_port is not None
        send(
            server.udp_port,
            forbidden + b"no",
            ALL_OF_DEVICE + b"a request is no stream",
            stream_of("nobody-made-it", 1) + b"no",
            COMMANDS[:15],
            COMMANDS + b"yes",
        )
        message = stream.read(5)
        until(lambda: sum(server.statistics().refused.values()) == 4)
        assert other.read(0) is None
    assert message is not None
    assert message.payload == b"yes"
    refused = {why: count for why, count in server.statistics().refused.items() if count}
    assert refused == {Refusal.FORBIDDEN: 2, Refusal.UNKNOWN: 1, Refusal.MALFORMED: 1}


def test_commands_become_structs_where_the_stream_carries_them(tmp_path: Path) -> None:
    schemas = example_schemas(nanopb=True)
    schema = schemas.find(STATUS)
    assert schema is not None
    assert schema.codec is not None
    with (
        InputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
        controlling(tmp_path, schemas, STATUS) as server,
    ):
        assert server.udp_port is not None
        send(server.udp_port, STATUS + b"\xff", STATUS + UP)
        message = stream.read(5)
    assert message is not None
    row = np.frombuffer(message.payload, schema.codec.dtype)[0]
    assert (row["id"], row["status"], row["a_struct"]["a_num"]) == (7, b"up", 300)
    assert server.statistics().refused[Refusal.UNDECODABLE] == 1


def test_a_full_stream_refuses_and_the_server_goes_on(tmp_path: Path) -> None:
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path, slots=8) as stream,
        controlling(tmp_path) as server,
    ):
        assert server.udp_port is not None
        send(server.udp_port, *(COMMANDS + b"%d" % i for i in range(9)))
        until(lambda: server.statistics().refused[Refusal.FULL] == 1)
        assert [stream.read(5).payload for _ in range(8)] == [b"%d" % i for i in range(8)]  # type: ignore[union-attr]
        send(server.udp_port, COMMANDS + b"again")
        message = stream.read(5)
    assert message is not None
    assert message.payload == b"again"


def test_a_full_stream_holds_up_no_other(tmp_path: Path) -> None:
    other = stream_of("other commands", 1)
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path, slots=8) as full,
        InputStream.create(other, owner="codelet", directory=tmp_path) as stream,
        controlling(tmp_path) as server,
    ):
        assert server.udp_port is not None
        began = time.monotonic()
        send(server.udp_port, *(COMMANDS + b"%d" % i for i in range(100)), other + b"at last")
        message = stream.read(60)
        assert message is not None
        assert time.monotonic() - began < 20  # each of them would have waited for a second
        assert server.statistics().refused[Refusal.FULL] == 92
        assert [full.read(5).payload for _ in range(8)] == [b"%d" % i for i in range(8)]  # type: ignore[union-attr]
        send(server.udp_port, COMMANDS + b"again")
        assert full.read(5).payload == b"again"  # type: ignore[union-attr]
    assert server.statistics().delivered == 10


def test_a_stream_that_is_made_anew_is_reached(tmp_path: Path) -> None:
    with controlling(tmp_path) as server:
        assert server.udp_port is not None
        for i in range(10):
            with InputStream.create(COMMANDS, owner="codelet", directory=tmp_path) as stream:
                send(server.udp_port, COMMANDS + b"%d" % i)
                message = stream.read(5)
                assert message is not None
                assert message.payload == b"%d" % i
                stream.remove()


def test_a_client_that_breaks_the_framing_is_cut_off_alone(tmp_path: Path) -> None:
    with (
        InputStream.create(COMMANDS, owner="codelet", directory=tmp_path) as stream,
        controlling(tmp_path) as server,
        socket.create_connection((HOST, server.tcp_port or 0)) as good,
        socket.create_connection((HOST, server.tcp_port or 0)) as bad,
        socket.create_connection((HOST, server.tcp_port or 0)) as unfinished,
    ):
        bad.sendall(pack_frame(COMMANDS, b"before") + struct.pack("<H", 15) + bytes(15))
        bad.settimeout(10)
        assert bad.recv(1) == b""
        unfinished.sendall(pack_frame(COMMANDS, b"whole") + pack_frame(COMMANDS, b"half")[:-1])
        unfinished.shutdown(socket.SHUT_WR)
        assert unfinished.recv(1) == b""
        good.sendall(pack_frame(COMMANDS, b"after"))
        got = [stream.read(5) for _ in range(3)]
    assert [message.payload for message in got if message] == [b"before", b"whole", b"after"]
    assert server.statistics().refused[Refusal.MALFORMED] == 2
