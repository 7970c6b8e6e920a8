"""Whatever comes by a file, a queue or a socket, it is an entry or a typed error."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import open_reader
from penstock.core.errors import Malformed
from penstock.protocols.lrose import sku
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.ldata_format import decode_ascii, decode_body, decode_xml
from penstock.protocols.lrose.ldata_wire import LdataMessage
from support.mutation import cut, double, insert, mutator, set_byte, set_word, sizes

VECTORS = Path(__file__).parents[2] / "vectors" / "lrose"

NUMBERS = [b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0", b"\0\0\xff\xff"]
TEXTS = [
    *(b"<latest_data_info>", b"</latest_data_info>", b"<year>", b"</year>", b"99999999999999999"),
    *(b"-1", b"true", b"\0", b"\n", b"<", b">", b"<fmqNSlots>-5</fmqNSlots>", b"\xff\xfe"),
]


Parser = Callable[[bytes], object]


mutated = mutator((1, 2, 3, 4), set_byte, cut(39), set_word(NUMBERS), insert(TEXTS), double(59))


def feed_session(data: bytes) -> None:
    for frame in sku.Decoder(1 << 20).feed(data):
        LdataMessage.from_message(DsMessage.from_bytes(frame.payload))


def feed_message(data: bytes) -> None:
    LdataMessage.from_message(DsMessage.from_bytes(data))


def seeds() -> list[tuple[bytes, list[Parser]]]:
    found: list[tuple[bytes, list[Parser]]] = []
    for name in ("ldata_01.c2s", "ldata_01.s2c"):
        session = (VECTORS / "wire" / name).read_bytes()
        found.append((session, [feed_session]))
        found += [(frame.payload, [feed_message]) for frame in sku.Decoder(1 << 20).feed(session)]
    for kind in ("obs", "fcst"):
        folder = VECTORS / "ldata" / kind
        found.append(((folder / "_latest_data_info").read_bytes(), [decode_ascii]))
        found.append(((folder / "_latest_data_info.xml").read_bytes(), [decode_xml, decode_body]))
        with open_reader(f"fmq:{folder / '_latest_data_info'}") as reader:
            found += [(message.payload, [decode_body]) for message in reader.available()]
    return found


def refusals(data: bytes, parsers: list[Parser]) -> int:
    refused = 0
    for parse in parsers:
        refused += 1
        with contextlib.suppress(Malformed):
            parse(data)
            refused -= 1
    return refused


@pytest.mark.parametrize("count", sizes(20_000, 1_000_000))
def test_fuzz_changed_bytes_are_read_or_refused(count: int) -> None:
    chance = random.Random(7)
    there = seeds()
    tried: Counter[Parser] = Counter()
    refused: Counter[Parser] = Counter()
    for _ in range(count):
        seed, parsers = chance.choice(there)
        data = mutated(seed, chance)
        for parse in parsers:
            tried[parse] += 1
            refused[parse] += refusals(data, [parse])
    # What part of them is refused is the parsers' own affair; that each does both is not.
    for parse, times in tried.items():
        assert 0 < refused[parse] < times, parse


def test_fuzz_changed_bytes_cost_no_memory() -> None:
    chance = random.Random(8)
    there = seeds()
    tracemalloc.start()
    try:
        for _ in range(1000):
            seed, parsers = chance.choice(there)
            refusals(mutated(seed, chance), parsers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Some errors wait for the collector of cycles, with the few kilobytes they are about.
    assert peak < 16 << 20
