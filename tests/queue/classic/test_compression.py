"""The vectors in tests/vectors/lrose/compress were written by LROSE's own library."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import mmap
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Malformed, MessageTooLarge
from penstock.queue.classic.compression import HEADER_SIZE, Method, compress, decompress
from support.recipes import payload

VECTORS = Path(__file__).parents[2] / "vectors"
COMPRESS = VECTORS / "lrose" / "compress"
INDEX: list[dict[str, Any]] = json.loads((COMPRESS / "index.json").read_text())

#: What LROSE was asked for, by the first word of the file's name.
REQUESTED = {
    "none": Method.NONE,
    "bzip": Method.BZIP,
    "gzip": Method.GZIP,
    "ta": Method.ZLIB,
}
WRITABLE = (Method.NONE, Method.BZIP, Method.GZIP)


Wrapper: TypeAlias = Callable[[int, int, bytes], bytes]


def buffer_of(vector: dict[str, Any]) -> bytes:
    return COMPRESS.joinpath(vector["file"]).read_bytes()


def plain_of(vector: dict[str, Any]) -> bytes:
    return payload(vector["kind"], vector["seed"], vector["len"])


def requested(vector: dict[str, Any]) -> str:
    name: str = vector["file"]
    return name.partition("_")[0]


def wrap(magic: int, size: int, coded: bytes) -> bytes:
    return struct.pack(">6I", magic, size, 24 + len(coded), len(coded), 0, 0) + coded


def wrap_64(magic: int, size: int, coded: bytes) -> bytes:
    lengths = (size, 48 + len(coded), len(coded), 0, 0)
    return struct.pack(">2I5Q", 0x64646464, magic, *lengths) + coded


def wrap_rle(size: int, coded: bytes, magic: int = 0xFE0103FD, key: int = 255) -> bytes:
    return struct.pack(">5I", magic, key, 20 + len(coded), size, len(coded)) + coded


# --- against LROSE --------------------------------------------------------------------------


@pytest.mark.parametrize("vector", INDEX, ids=lambda vector: vector["file"])
def test_what_lrose_wrote_decodes_to_the_original(vector: dict[str, Any]) -> None:
    data = decompress(buffer_of(vector), vector["len"])
    assert hashlib.sha256(data).hexdigest() == vector["sha256"]
    assert data == plain_of(vector)


@pytest.mark.parametrize(
    "vector",
    [vector for vector in INDEX if requested(vector) in REQUESTED],
    ids=lambda vector: vector["file"],
)
def test_we_write_the_bytes_that_lrose_writes(vector: dict[str, Any]) -> None:
    assert compress(plain_of(vector), REQUESTED[requested(vector)]) == buffer_of(vector)


@pytest.mark.parametrize("vector", INDEX, ids=lambda vector: vector["file"])
def test_bytes_after_the_coded_data_are_ignored(vector: dict[str, Any]) -> None:
    junk = buffer_of(vector) + b"\0\0\0\x2a\xff\xff\xff"
    assert decompress(junk, vector["len"]) == plain_of(vector)


@pytest.mark.parametrize("vector", INDEX, ids=lambda vector: vector["file"])
def test_a_buffer_cut_short_is_malformed(vector: dict[str, Any]) -> None:
    buffer = buffer_of(vector)
    padding = 3 if vector["file"].startswith("rle") else 0  # RLE may lose its padding
    for end in (*range(60), len(buffer) // 2, len(buffer) - padding - 1):
        if end < len(buffer) - padding:
            with pytest.raises(Malformed):
                decompress(buffer[:end], vector["len"])


@pytest.mark.parametrize("vector", INDEX, ids=lambda vector: vector["file"])
def test_data_beyond_the_limit_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(Malformed) as caught:
        decompress(buffer_of(vector), vector["len"] - 1)
    assert caught.value.where == "nbytes_uncompressed"


@pytest.mark.parametrize("name", ["text_3000.lzo1x_1", "repeats.lzo1x_999", "empty.lzo1x_1"])
def test_an_lzo_buffer_decodes(name: str) -> None:
    index = json.loads((VECTORS / "lzo" / "index.json").read_text())
    vector = next(vector for vector in index if vector["file"] == name)
    buffer = wrap(0xF1F1F1F1, vector["length"], (VECTORS / "lzo" / name).read_bytes())
    data = decompress(buffer + b"junk", vector["length"])
    assert hashlib.sha256(data).hexdigest() == vector["sha256"]


# --- writing --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Method.RLE, Method.LZO, Method.ZLIB])
def test_methods_that_lrose_no_longer_writes_become_gzip(method: Method) -> None:
    data = payload("text", 1, 1000)
    assert method.written is Method.GZIP
    assert compress(data, method) == compress(data, Method.GZIP)


@pytest.mark.parametrize("method", [Method.BZIP, Method.GZIP])
def test_data_are_stored_unless_they_shrink(method: Method) -> None:
    stored = {Method.BZIP: b"\xf4" * 4, Method.GZIP: b"\xf8" * 4}[method]
    sizes = {size: compress(bytes(size), method) for size in range(100)}
    for size, buffer in sizes.items():
        assert (buffer[:4] == stored) == (len(buffer) == HEADER_SIZE + size)
        assert len(buffer) <= HEADER_SIZE + size
    assert sizes[0] == wrap(int.from_bytes(stored), 0, b"")
    assert sizes[99][:4] != stored


@pytest.mark.parametrize("method", WRITABLE)
def test_any_view_of_the_bytes_gives_the_same_buffer(method: Method) -> None:
    data = payload("ramp", 9, 4000)
    words = memoryview(data).cast("I")
    assert compress(words, method) == compress(bytearray(data), method) == compress(data, method)
    assert decompress(memoryview(compress(data, method)), 4000) == data


def test_data_that_need_the_64_bit_header_are_refused() -> None:
    large = mmap.mmap(-1, 0xFFFFFFFF, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    with pytest.raises(MessageTooLarge) as caught:
        compress(memoryview(large), Method.GZIP)
    assert caught.value.size == 0xFFFFFFFF


@given(data=st.binary(max_size=5000), method=st.sampled_from(Method), junk=st.binary(max_size=7))
def test_what_is_compressed_decompresses(data: bytes, method: Method, junk: bytes) -> None:
    assert decompress(compress(data, method) + junk, len(data)) == data


@pytest.mark.parametrize("method", WRITABLE)
@pytest.mark.parametrize("kind", ["ramp", "zero", "text"])
def test_ten_megabytes_survive_the_round_trip(kind: str, method: Method) -> None:
    data = payload(kind, 7, 10_000_000)
    assert decompress(compress(data, method), len(data)) == data


# --- reading what LROSE writes no longer, or for large data only ----------------------------

TEXT = payload("text", 3, 500)


CODED = {
    0x2F2F2F2F: TEXT,
    0xF2F2F2F2: TEXT,
    0xF3F3F3F3: bz2.compress(TEXT),
    0xF4F4F4F4: TEXT,
    0xF5F5F5F5: zlib.compress(TEXT),
    0xF6F6F6F6: TEXT,
    0xF7F7F7F7: gzip.compress(TEXT),
    0xF8F8F8F8: TEXT,
}


@pytest.mark.parametrize("magic", CODED, ids=hex)
@pytest.mark.parametrize("wrapper", [wrap, wrap_64])
def test_each_magic_is_read_with_either_header(wrapper: Wrapper, magic: int) -> None:
    assert decompress(wrapper(magic, 500, CODED[magic]) + b"junk", 500) == TEXT


@pytest.mark.parametrize("magic", [0xFE0103FD, 0xFE0104FD])
def test_rle_expands_runs_and_keeps_literals(magic: int) -> None:
    coded = b"AB\xff\x04C\xff\x01\xffD\xff\xff\x00"
    plain = b"ABCCCC\xffD" + bytes(255)
    assert decompress(wrap_rle(len(plain), coded, magic), len(plain)) == plain


def test_rle_with_the_swapped_magic_has_a_little_endian_header() -> None:
    header = struct.pack("<5I", 0xFE0103FD, 255, 24, 5, 4)
    assert header[:4] == bytes.fromhex("fd0301fe")
    assert decompress(header + b"A\xff\x04B", 5) == b"ABBBB"


def test_rle_follows_the_key_in_its_header() -> None:
    assert decompress(wrap_rle(5, b"\xff*\x04B", key=42), 5) == b"\xffBBBB"


# --- wrong buffers --------------------------------------------------------------------------

GZIPPED = gzip.compress(TEXT, mtime=0)
LENGTH = "length of the decompressed data"


@pytest.mark.parametrize(
    ("buffer", "where"),
    [
        pytest.param(b"", "header", id="empty"),
        pytest.param(bytes(24), "magic", id="no such magic"),
        pytest.param(wrap(0xF7F7F7F7, 500, GZIPPED)[:23], "header", id="header cut"),
        pytest.param(wrap_64(0x64646464, 0, b""), "magic", id="64-bit flag twice"),
        pytest.param(wrap_64(0xFE0103FD, 0, b""), "magic", id="RLE in a 64-bit header"),
        pytest.param(wrap_64(0xF7F7F7F7, 1 << 63, GZIPPED), "nbytes_uncompressed", id="huge"),
        pytest.param(wrap(0xF7F7F7F7, 500, GZIPPED)[:-1], "nbytes_coded", id="data cut"),
        pytest.param(
            struct.pack(">6I", 0xF7F7F7F7, 500, len(GZIPPED), len(GZIPPED), 0, 0) + GZIPPED,
            "nbytes_compressed",
            id="lengths disagree",
        ),
        pytest.param(wrap(0xF8F8F8F8, 499, TEXT), "nbytes_coded of stored data", id="stored"),
        pytest.param(wrap(0xF7F7F7F7, 499, GZIPPED), LENGTH, id="gzip holds more"),
        pytest.param(wrap(0xF7F7F7F7, 501, GZIPPED), LENGTH, id="gzip holds less"),
        pytest.param(wrap(0xF7F7F7F7, 500, GZIPPED[:-1]), "coded data", id="gzip trailer cut"),
        pytest.param(wrap(0xF7F7F7F7, 500, GZIPPED + b"x"), "coded data", id="after the gzip"),
        pytest.param(wrap(0xF7F7F7F7, 1000, GZIPPED * 2), "coded data", id="two gzip members"),
        pytest.param(
            wrap(0xF7F7F7F7, 500, GZIPPED[:-8] + bytes(4) + GZIPPED[-4:]), "coded data", id="CRC"
        ),
        pytest.param(wrap(0xF7F7F7F7, 500, zlib.compress(TEXT)), "coded data", id="zlib as gzip"),
        pytest.param(wrap(0xF5F5F5F5, 500, GZIPPED), "coded data", id="gzip as zlib"),
        pytest.param(wrap(0xF3F3F3F3, 500, TEXT), "coded data", id="not bzip2"),
        pytest.param(wrap(0xF3F3F3F3, 500, bz2.compress(TEXT)[:-1]), "coded data", id="bzip2 cut"),
        pytest.param(wrap(0xF3F3F3F3, 500, bz2.compress(TEXT) + b"x"), "coded data", id="bzip2+"),
        pytest.param(wrap(0xF3F3F3F3, 499, bz2.compress(TEXT)), LENGTH, id="bzip2 holds more"),
        pytest.param(wrap(0xF7F7F7F7, 0, b""), "coded data", id="no gzip at all"),
        pytest.param(wrap(0xF3F3F3F3, 0, b""), "coded data", id="no bzip2 at all"),
        pytest.param(wrap_rle(0, b"")[:19], "header", id="RLE header cut"),
        pytest.param(wrap_rle(1, b"A", key=256), "RLE key", id="RLE key"),
        pytest.param(wrap_rle(3, b"ABC")[:-1], "nbytes_compressed", id="RLE data cut"),
        pytest.param(wrap_rle(5, b"A\xff\x04"), "RLE run at coded byte 1", id="RLE run cut"),
        pytest.param(
            wrap_rle(1, b"A\xff\x00B"), "count of the RLE run at coded byte 1", id="RLE run of none"
        ),
        pytest.param(wrap_rle(4, b"A\xff\x04B"), LENGTH, id="RLE holds more"),
        pytest.param(wrap_rle(6, b"A\xff\x04B"), LENGTH, id="RLE holds less"),
    ],
)
def test_a_wrong_buffer_is_malformed_and_says_where(buffer: bytes, where: str) -> None:
    with pytest.raises(Malformed) as caught:
        decompress(buffer, 1 << 20)
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("magic", "shrink"),
    [(0xF3F3F3F3, bz2.compress), (0xF5F5F5F5, zlib.compress), (0xF7F7F7F7, gzip.compress)],
    ids=["bzip2", "zlib", "gzip"],
)
@pytest.mark.parametrize("announced", [0, 1000])
def test_a_bomb_costs_no_more_than_it_announces(
    magic: int, shrink: Callable[[bytes], bytes], announced: int
) -> None:
    buffer = wrap(magic, announced, shrink(bytes(20_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            decompress(buffer, 1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize("magic", [0xF1F1F1F1, 0xF3F3F3F3, 0xF5F5F5F5, 0xF7F7F7F7], ids=hex)
@pytest.mark.parametrize("announced", [1 << 40, (1 << 64) - 1])
def test_an_announced_length_alone_allocates_nothing(magic: int, announced: int) -> None:
    buffer = wrap_64(magic, announced, CODED.get(magic, b""))
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            decompress(buffer, announced)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def decoded_or_malformed(buffer: bytes, limit: int) -> bytes | None:
    try:
        data = decompress(buffer, limit)
    except Malformed:
        return None
    assert len(data) <= limit
    return data


MAGICS = [
    0x2F2F2F2F,
    *(byte * 0x01010101 for byte in range(0xF1, 0xF9)),
    *(0xFE0103FD, 0xFE0104FD, 0xFD0301FE),
]


@given(
    magic=st.sampled_from(MAGICS),
    size=st.integers(0, 3000),
    coded=st.binary(max_size=300),
    wrapper=st.sampled_from([wrap, wrap_64]),
)
def test_any_coded_data_decode_or_are_malformed(
    magic: int, size: int, coded: bytes, wrapper: Wrapper
) -> None:
    data = decoded_or_malformed(wrapper(magic, size, coded), 2000)
    assert data is None or magic in {0xFE0103FD, 0xFE0104FD, 0xFD0301FE} or len(data) == size


@given(buffer=st.binary(max_size=300))
def test_any_bytes_at_all_decode_or_are_malformed(buffer: bytes) -> None:
    decoded_or_malformed(buffer, 1000)


@given(
    vector=st.sampled_from(INDEX),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
    cut=st.none() | st.integers(0, 1 << 16),
)
def test_a_damaged_buffer_decodes_or_is_malformed(
    vector: dict[str, Any], changes: list[tuple[int, int]], cut: int | None
) -> None:
    buffer = bytearray(buffer_of(vector))
    for position, value in changes:
        buffer[position % len(buffer)] = value
    data = decoded_or_malformed(bytes(buffer[:cut]), 5000)
    intact_magic = bytes(buffer[:4]).hex() == vector["magic"]
    if (
        data is not None
        and intact_magic
        and vector["magic"] in {"f7f7f7f7", "f5f5f5f5", "f3f3f3f3"}
    ):
        assert data == plain_of(vector)  # these methods carry a checksum
