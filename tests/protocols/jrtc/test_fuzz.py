"""Datagrams, descriptor sets and frames changed at random: all stays up, and in its books."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PenstockError
from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.collector import Collector, Refusal
from penstock.protocols.jrtc.collector_outputs import JsonOutput
from penstock.protocols.jrtc.control import ControlServer
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import Schemas
from penstock.protocols.jrtc.wire import pack_frame
from penstock.queue.streams import InputStream
from protocols.jrtc.forwarded import (
    EXAMPLE,
    HOST,
    LIMITS,
    STATUS,
    UP,
    VECTORS,
    as_set,
    collecting,
    describe,
    stream_of,
)
from support.until import until

SEEDS = [
    STATUS + UP,
    STATUS,
    stream_of("unknown-to-all") + UP,
    *(bytes.fromhex(v["datagram"]) for v in VECTORS["vectors"] if v.get("datagram")),
]
#: Datagrams that may be under way: the kernel has room for them.
WINDOW = 200


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(3):
            case 0 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 1:
                changed[at:at] = rng.randbytes(rng.randrange(5))
            case _:
                del changed[at : at + rng.randrange(5)]
    return bytes(changed)


@pytest.mark.parametrize(
    "count",
    [10_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])],
)
def test_mutated_datagrams_are_collected_or_refused(count: int, tmp_path: Path) -> None:
    rng = random.Random(count)
    schemas = Schemas()
    schemas.upsert(EXAMPLE)
    schemas.associate(STATUS, "example", "status")
    schemas.associate(StreamId(SEEDS[-1][:16]), "example", "req_resp")
    half = 0
    with (
        collecting(schemas, JsonOutput(f"json:{tmp_path}/lines")) as collector,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.connect((HOST, collector.port))
        for at in range(0, count, WINDOW):
            for _ in range(WINDOW):
                sender.send(mutated(rng.choice(SEEDS), rng))
            until(lambda sent=at + WINDOW: _came(collector) >= sent)  # type: ignore[misc]
            if at == count // 2 // WINDOW * WINDOW:
                half = _resident()
        grown = _resident() - half
    books = collector.statistics()
    assert books.datagrams.received + books.datagrams.dropped == count
    assert books.datagrams.received == books.collected + sum(books.refused.values())
    assert books.undelivered == {}
    for why in Refusal:
        assert books.refused[why] > count // 100, why
    assert books.collected > count // 10
    assert grown < 64 << 20
    with (tmp_path / "lines").open("rb") as lines:
        assert sum(1 for _ in lines) == books.collected


def _came(collector: Collector) -> int:
    books = collector.statistics()
    return books.collected + sum(books.refused.values()) + books.datagrams.dropped


def _resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123 - not a file on a disk
        return int(file.read().split()[1]) * 4096


DESCRIPTORS = [
    EXAMPLE,
    as_set(
        describe({"P": [("x", "sint32")]}, name="lib/p.proto", package="lib"),
        describe({"T": [("p", "*lib.P")]}, name="t.proto", imports=("lib/p.proto",)),
    ),
    as_set(describe({"N": [("next", "N"), ("t", "?string"), ("d", "*double")]})),
]


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.full)])
def test_fuzz_of_descriptor_sets(count: int) -> None:
    rng = random.Random(count)
    taken = 0
    for _ in range(count):
        schemas = Schemas()
        with contextlib.suppress(PenstockError):
            package, _ = schemas.upsert(mutated(rng.choice(DESCRIPTORS), rng))
            for message in ("status", "req_resp", "T", "N"):
                stream, struct = stream_of(message), rng.choice([None, Nanopb(LIMITS)])
                with contextlib.suppress(PenstockError):
                    schemas.associate(stream, package, message, struct)
                    schema = schemas.find(stream)
                    assert schema is not None
                    taken += 1
                    schema.json_line(stream, UP)
                    _ = schema.decoder
    assert taken > count // 20


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.full)])
def test_fuzz_of_frames(count: int, tmp_path: Path) -> None:
    rng = random.Random(count)
    commands = stream_of("commands", 1)
    whole = b"".join(pack_frame(commands, rng.randbytes(rng.randrange(40))) for _ in range(5))
    with (
        InputStream.create(commands, owner="codelet", directory=tmp_path) as stream,
        ControlServer([commands], Schemas(), tcp_port=0, directory=tmp_path) as server,
    ):
        assert server.tcp_port is not None
        for _ in range(count):
            with socket.create_connection((HOST, server.tcp_port)) as client:
                client.sendall(mutated(whole, rng))
                client.shutdown(socket.SHUT_WR)
                client.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            stream.read_many(1000)
        books = server.statistics()
        with socket.create_connection((HOST, server.tcp_port)) as client:
            client.sendall(pack_frame(commands, b"still here"))
            message = stream.read(10)
    assert message is not None
    assert books.delivered > count
    assert sum(books.refused.values()) > count // 10


@given(st.binary(max_size=200))
def test_any_bytes_are_a_descriptor_set_or_refused(data: bytes) -> None:
    with contextlib.suppress(PenstockError):
        Schemas().upsert(data)
