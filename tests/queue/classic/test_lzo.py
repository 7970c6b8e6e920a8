"""The vectors in tests/vectors/lzo were made by liblzo2 2.10; index.json says how."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import Malformed
from penstock.queue.classic.lzo import decompress
from support.recipes import payload

VECTORS = Path(__file__).parents[2] / "vectors" / "lzo"
INDEX: list[dict[str, Any]] = json.loads((VECTORS / "index.json").read_text())
END = bytes.fromhex("11 00 00")


def plain_of(vector: dict[str, Any]) -> bytes:
    return b"".join(payload(**piece) for piece in vector["pieces"])


def coded_of(vector: dict[str, Any]) -> bytes:
    return VECTORS.joinpath(vector["file"]).read_bytes()


@pytest.mark.parametrize("vector", INDEX, ids=lambda vector: vector["file"])
def test_what_the_real_library_compressed_decodes_to_the_original(vector: dict[str, Any]) -> None:
    data = decompress(coded_of(vector), vector["length"])
    assert hashlib.sha256(data).hexdigest() == vector["sha256"]
    assert data == plain_of(vector)


ABC = bytes(range(65, 91))

INSTRUCTIONS = {
    "nothing": (b"", b""),
    "first byte is 1 literal": (b"\x12A", b"A"),
    "first byte is 238 literals": (b"\xff" + bytes(238), bytes(238)),
    "run of 4 literals": (b"\x01ABCD", b"ABCD"),
    "run of 18 literals": (b"\x0f" + ABC[:18], ABC[:18]),
    "run of 19 literals, in an extra byte": (b"\x00\x01" + ABC[:19], ABC[:19]),
    "run of 274 literals, with a zero byte": (b"\x00\x00\x01" + bytes(274), bytes(274)),
    "2 bytes after 3 literals": (b"\x14ABC\x08\x00", b"ABCAB"),
    "2 bytes after the literals of a copy": (b"\x15ABCD\x41\x00E\x04\x00", b"ABCDDDDEDE"),
    "3 bytes after a run, from 2049": (
        b"\x00" + bytes(8) + b"\xfa" + bytes(259) + ABC + bytes(2023) + b"\x00\x00",
        bytes(259) + ABC + bytes(2023) + b"ABC",
    ),
    "near, 3 bytes": (b"\x15ABCD\x40\x00", b"ABCDDDD"),
    "near, 8 bytes from 4": (b"\x15ABCD\xec\x00", b"ABCDABCDABCD"),
    "middle, 3 bytes from 2": (b"\x15ABCD\x21\x04\x00", b"ABCDCDC"),
    "middle, 34 bytes, in an extra byte": (b"\x15ABCD\x20\x01\x00\x00", b"ABCD" + b"D" * 34),
    "middle, 289 bytes, with a zero byte": (b"\x15ABCD\x20\x00\x01\x00\x00", b"ABC" + b"D" * 290),
    "middle, then 3 literals": (b"\x15ABCD\x21\x03\x00XYZ", b"ABCDDDDXYZ"),
    "far, 3 bytes from 16385": (
        b"\x15ABCD\x20" + bytes(64) + b"\x1c\x00\x00" + b"\x11\x04\x00",
        b"ABC" + b"D" * 16382 + b"ABC",
    ),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_each_instruction_does_what_the_layout_says(name: str) -> None:
    coded, plain = INSTRUCTIONS[name]
    assert decompress(coded + END, len(plain)) == plain


@pytest.mark.parametrize(
    ("coded", "size", "where"),
    [
        pytest.param(b"", 0, "byte 0", id="no end marker"),
        pytest.param(b"\x15ABC", 4, "byte 1", id="literals missing"),
        pytest.param(b"\x15ABCD\x40", 7, "byte 6", id="distance missing"),
        pytest.param(b"\x00" + bytes(1000), 4000, "byte 1001", id="length never ends"),
        pytest.param(
            b"\x15ABCD\x50\x00" + END, 7, "copy distance", id="copy from before the start"
        ),
        pytest.param(b"\x11\x04\x00" + END, 3, "copy distance", id="copy at the very start"),
        pytest.param(b"\x15ABCD" + END, 3, "decoded length", id="literals too many"),
        pytest.param(b"\x15ABCD\x40\x00" + END, 6, "decoded length", id="copy too long"),
        pytest.param(b"\x15ABCD" + END, 5, "decoded length", id="too short"),
        pytest.param(b"\x15ABCD" + END + b"\x00", 4, "byte 8", id="bytes after the end"),
    ],
)
def test_a_wrong_stream_is_malformed_and_says_where(coded: bytes, size: int, where: str) -> None:
    with pytest.raises(Malformed) as caught:
        decompress(coded, size)
    assert caught.value.where == where


def test_an_enormous_copy_is_refused_before_it_is_made() -> None:
    coded = b"\x15ABCD\x20" + bytes(1 << 20) + b"\x01\x00\x00" + END
    with pytest.raises(Malformed) as caught:
        decompress(coded, 1000)
    assert caught.value.where == "decoded length"


@pytest.mark.parametrize("name", ["repeats.lzo1x_999", "short_repeats.lzo1x_1"])
def test_a_stream_cut_anywhere_is_malformed(name: str) -> None:
    vector = next(vector for vector in INDEX if vector["file"] == name)
    coded = coded_of(vector)
    for end in range(len(coded)):
        with pytest.raises(Malformed):
            decompress(coded[:end], vector["length"])


@given(coded=st.binary(max_size=200), size=st.integers(0, 2000))
def test_any_bytes_decode_to_the_size_asked_for_or_are_malformed(coded: bytes, size: int) -> None:
    try:
        data = decompress(coded + END, size)
    except Malformed:
        return
    assert len(data) == size


@given(
    vector=st.sampled_from([vector for vector in INDEX if vector["length"] < 10_000]),
    changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=4),
)
def test_a_damaged_stream_decodes_to_its_size_or_is_malformed(
    vector: dict[str, Any], changes: list[tuple[int, int]]
) -> None:
    coded = bytearray(coded_of(vector))
    for position, value in changes:
        coded[position % len(coded)] = value
    try:
        data = decompress(bytes(coded), vector["length"])
    except Malformed:
        return
    assert len(data) == vector["length"]
