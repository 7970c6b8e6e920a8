"""Whatever comes by a socket or in a file, it is a record, a value or a typed error."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.core.errors import Malformed, NotFound
from penstock.protocols.psi import (
    Catalog,
    ClientHelloDecoder,
    CodecLibrary,
    Intermission,
    MessageDecoder,
    MetaDecoder,
    PsiStoreReader,
    ServerHello,
    Unchunker,
    decode_message,
)
from penstock.protocols.psi.clock import ClockReplyDecoder
from penstock.protocols.psi.interop import FrameDecoder, decode_json, decode_timed_text
from penstock.protocols.psi.rendezvous_wire import RendezvousClientDecoder, decode_updates
from penstock.protocols.psi.store.psi_files import PsiFiles
from protocols.psi.mutations import mutated
from protocols.psi.recordings import VECTORS, catalog_of, expected, messages_of, recording
from support.mutation import sizes

Parser = Callable[[bytes], object]

CATALOG = catalog_of("types")
LIBRARY = CodecLibrary(CATALOG.schemas.values())


def parse_meta(data: bytes) -> None:
    decoder = MetaDecoder(hello=False)
    events = decoder.feed(data)
    if decoder.fault is not None:
        raise decoder.fault
    catalog = Catalog()
    for event in events:
        if not isinstance(event, (Intermission, ServerHello)):
            catalog.add(event)
    library = CodecLibrary(catalog.schemas.values())
    for stream in catalog.streams.values():
        library.codec(stream.type_name)


def parse_all(make: Callable[[], MetaDecoder | MessageDecoder | ClientHelloDecoder]) -> Parser:
    def parse(data: bytes) -> None:
        decoder = make()
        decoder.feed(data)
        decoder.finish()

    return parse


def parse_frames(data: bytes) -> None:
    for frame in FrameDecoder().feed(data):
        decode_json(frame) if frame[:1] == b"{" else decode_timed_text(frame)


def parse_datagram(data: bytes) -> None:
    unchunker = Unchunker(1 << 20)
    message = unchunker.feed(data)
    if unchunker.last_fault is not None:
        raise unchunker.last_fault
    if message is not None:
        decode_message(message)


def parse_rendezvous(data: bytes) -> None:
    decoder = RendezvousClientDecoder()
    decoder.feed(data)
    decoder.finish()


def parse_clock(data: bytes) -> None:
    decoder = ClockReplyDecoder()
    decoder.feed(data)
    decoder.finish()


def value_parser(type_name: str) -> Parser:
    codec = LIBRARY.codec(type_name)

    def parse(data: bytes) -> None:
        value, size = codec.decode_sized(data)
        assert size <= len(data)
        del value

    return parse


def schema_parser(type_name: str, payload: bytes) -> Parser:
    """Types as a changed meta connection describes them, and an honest payload."""

    def parse(data: bytes) -> None:
        catalog = Catalog()
        for event in MetaDecoder(hello=False).feed(data):
            if not isinstance(event, (Intermission, ServerHello)):
                catalog.add(event)
        CodecLibrary(catalog.schemas.values()).codec(type_name).decode(payload)

    return parse


def seeds() -> list[tuple[bytes, Parser]]:
    found: list[tuple[bytes, Parser]] = [
        (recording("basic.c2s.handshake.bin"), parse_all(ClientHelloDecoder)),
        (recording("basic.s2c.handshake.bin"), parse_all(MetaDecoder)),
        (recording("basic_namedpipe.s2c.handshake.bin"), parse_all(MetaDecoder)),
        (recording("basic.s2c.meta.bin"), parse_meta),
        (recording("basic.s2c.data.bin"), parse_all(MessageDecoder)),
        (recording("types.s2c.data.bin"), parse_all(lambda: MessageDecoder(known=CATALOG.streams))),
        (recording("rendezvous.s2c.hello.bin"), parse_rendezvous),
        (recording("rendezvous.c2s.add.bin"), decode_updates),
        (recording("clock.s2c.bin"), parse_clock),
        (recording("tcpwriter_json.s2c.bin"), parse_frames),
        (recording("tcpwriter_format_string.s2c.bin"), parse_frames),
        (recording("udp_session_datagram.bin"), parse_datagram),
    ]
    for one in expected("udp_datagrams.json")["basic"]:
        found.append((bytes.fromhex(one["hexHead"]), parse_datagram))  # noqa: PERF401
    for message in messages_of("types"):
        stream = CATALOG.stream(message.source_id)
        found.append((message.payload, value_parser(stream.type_name)))
    meta = recording("types.s2c.meta.bin")
    for name in ("nestedstruct", "dict", "polymorphic", "listint"):
        stream = CATALOG.stream(name)
        payload = next(m.payload for m in messages_of("types") if m.source_id == stream.id)
        found.append((meta[-3000:], schema_parser(stream.type_name, payload)))
    return found


def refused(data: bytes, parse: Parser) -> bool:
    with contextlib.suppress(Malformed):
        parse(data)
        return False
    return True


@pytest.mark.parametrize("count", sizes(20_000, 1_000_000))
def test_fuzz_changed_bytes_are_read_or_refused(count: int) -> None:
    chance = random.Random(7)
    there = seeds()
    refusals = 0
    for _ in range(count):
        seed, parse = chance.choice(there)
        refusals += refused(mutated(seed, chance), parse)
    assert count // 20 < refusals < count


def test_fuzz_changed_bytes_cost_no_memory() -> None:
    chance = random.Random(8)
    there = seeds()
    tracemalloc.start()
    try:
        for _ in range(1500):
            seed, parse = chance.choice(there)
            refused(mutated(seed, chance), parse)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Some errors wait for the collector of cycles, with the few kilobytes they are about.
    assert peak < 16 << 20


@pytest.mark.parametrize("count", sizes(150, 5_000))
def test_fuzz_changed_stores_are_read_or_refused(tmp_path: Path, count: int) -> None:
    chance = random.Random(9)
    files = {
        kind: (VECTORS / "store_types" / f"Oracle.{kind}_000000.psi").read_bytes().rstrip(b"\0")
        for kind in ("Catalog", "Data", "Index")
    }
    refusals = 0
    for _ in range(count):
        broken = chance.choice(list(files))
        for kind, data in files.items():
            content = mutated(data, chance) if kind == broken else data
            (tmp_path / f"S.{kind}_000000.psi").write_bytes(content + bytes(8))
        try:
            with PsiStoreReader(tmp_path) as store:
                for stored in store.messages(start_ns=1):
                    store.value(stored)
        except (Malformed, NotFound):
            refusals += 1
        with contextlib.suppress(Malformed, NotFound):
            PsiFiles(tmp_path, salvage=chance.random() < 0.5).close()
    assert count // 20 < refusals <= count
    assert open_below(tmp_path) == []


def open_below(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open."""
    found = []
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(number.readlink()))
    return [name for name in found if name.startswith(str(folder))]


def test_fuzz_noise_is_refused_or_waits_for_more() -> None:
    chance = random.Random(10)
    for _ in range(2000):
        noise = chance.randbytes(chance.randrange(200))
        for decoder in (MetaDecoder(1000), MessageDecoder(1000), ClientHelloDecoder()):
            with contextlib.suppress(Malformed):
                decoder.feed(noise)
            assert decoder.held <= len(noise)
