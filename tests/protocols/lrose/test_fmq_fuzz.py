"""Changed bytes are read or refused, by every parser, and cost no memory."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.errors import InvalidURL, Malformed
from penstock.protocols.lrose.addresses import QueueRoot, path_of
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_messages import decode_messages, encode_messages
from penstock.protocols.lrose.fmq_wire import Op, decode_init
from penstock.protocols.lrose.sku import Decoder, encode_header
from protocols.lrose.recordings import RECORDINGS, frames_of, recording
from protocols.lrose.serving import Caller, served
from support.mutation import cut, double, mutator, set_byte, set_word, sizes, truncate

NUMBERS = [struct.pack(">i", n) for n in (0, 1, -1, 2, 24, 28, 64, 2**31 - 1, -(2**31), 1 << 20)]
LIMIT = 1 << 16
mutated = mutator(
    (1, 1, 2, 5),
    *(set_byte, cut(39), set_word(NUMBERS), set_word(NUMBERS), double(99), truncate),
)


def parse_message(payload: bytes) -> None:
    message = DsMessage.from_bytes(payload)
    assert sum(len(part.data) for part in message.parts) <= len(payload)
    assert DsMessage.head_of(payload).parts == ()


def parse_messages(payload: bytes) -> None:
    _, found = decode_messages(payload)
    assert sum(map(len, found.payloads)) <= len(payload)
    assert len({len(column) for column in found}) == 1


def parse_init(payload: bytes) -> None:
    init = decode_init(DsMessage.from_bytes(payload))
    root = Path("/srv/queues")
    path = QueueRoot(root).path(init.url)
    assert Path(path).is_relative_to(root)
    assert path_of(init.url)


def parse_stream(data: bytes) -> None:
    decoder = Decoder(LIMIT, allow_http=True)
    for at in range(0, len(data), 100):
        for frame in decoder.feed(data[at : at + 100]):
            assert len(frame.payload) <= LIMIT
        assert decoder.held <= LIMIT + 2200
    if decoder.fault is not None:
        raise decoder.fault


def seeds() -> list[tuple[bytes, Callable[[bytes], None]]]:
    found: list[tuple[bytes, Callable[[bytes], None]]] = []
    for name in RECORDINGS:
        data = recording(name)
        found.append((data[:4000], parse_stream))
        found.append((b"POST / HTTP/1.1\r\n\r\n" + data[:400], parse_stream))
        for frame in frames_of(data):
            found.append((frame.payload, parse_message))
            if name.startswith("fmq"):
                found.append((frame.payload, parse_messages))
    opening = frames_of(recording("fmq_01.c2s"))[0].payload
    inside = opening.replace(b"/tmp/fq/srv/rq", b"a/b/cd/efg/hij")
    found += [(opening, parse_init), (inside, parse_init)]
    many = encode_messages(DsMessage(Op.WRITE), [b"x" * n for n in range(20)], types=1, subtypes=2)
    wide = DsMessage.from_bytes(many).to_bytes(wide=True)
    found += [(many, parse_messages), (wide, parse_messages), (wide, parse_message)] * 3
    found.append((encode_header(1, 1, len(many), wide=True) + many, parse_stream))
    return found


@pytest.mark.parametrize("count", sizes(20_000, 1_000_000))
def test_fuzz_changed_sessions_are_read_or_refused_by_every_parser(count: int) -> None:
    chance = random.Random(5)
    there = seeds()
    refused = 0
    for _ in range(count):
        seed, parse = chance.choice(there)
        try:
            parse(mutated(seed, chance))
        except (Malformed, InvalidURL):
            refused += 1
    assert count // 20 < refused < count


def test_fuzz_changed_sessions_cost_no_memory() -> None:
    chance = random.Random(6)
    there = seeds()
    tracemalloc.start()
    try:
        for _ in range(3000):
            seed, parse = chance.choice(there)
            with contextlib.suppress(Malformed, InvalidURL):
                parse(mutated(seed, chance))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000  # faults hold their decoders until the collector comes


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=[pytest.mark.full])])
def test_fuzz_a_server_survives_changed_sessions(tmp_path: Path, count: int) -> None:
    chance = random.Random(7)
    names = [name for name in RECORDINGS if name.startswith("fmq") and name.endswith("c2s")]
    sent = [recording(name).replace(b"/tmp/fq/srv/rq", b"some/where/q-1") for name in names]
    with served(tmp_path, max_message=1 << 20, max_queue=1 << 20, max_slots=5000) as server:
        for _ in range(count):
            with Caller(server.port) as caller:
                try:
                    caller.socket.sendall(mutated(chance.choice(sent), chance))
                    if chance.random() < 0.3:
                        caller.socket.settimeout(0.02)
                        caller.socket.recv(65536)
                except (TimeoutError, ConnectionError):
                    pass
        with Caller(server.port) as caller:
            caller.socket.sendall(sent[0])
            assert caller.hear().error == 0
        assert all(path.is_relative_to(tmp_path) for path in tmp_path.rglob("*"))
