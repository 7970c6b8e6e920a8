"""Ids: text, both byte orders, time and chance (docs/specs/uprotocol.md 2)."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from penstock.core.errors import PenstockError
from penstock.protocols.uprotocol.errors import InvalidUUID
from penstock.protocols.uprotocol.uuid7 import UUID7
from protocols.uprotocol.strategies import ID
from protocols.uprotocol.vectors import cases


@pytest.mark.parametrize("case", cases("uuids"))
def test_text_of_the_vectors_is_read_or_refused(case: Any) -> None:
    if not case["valid"]:
        with pytest.raises(InvalidUUID) as caught:
            UUID7.parse(case["string"])
        assert case["reason"] in caught.value.rule
        assert isinstance(caught.value, PenstockError)
        assert isinstance(caught.value, ValueError)
        return
    id = UUID7.parse(case["string"])
    assert (id.msb, id.lsb) == (int(case["msb"], 16), int(case["lsb"], 16))
    assert id.time_ms == case["time_ms"]
    assert str(id) == case["text"]
    assert id.to_bytes().hex() == case["proto_hex"]
    assert id.to_big_endian().hex() == case["big_endian_hex"]
    assert UUID7.from_bytes(bytes.fromhex(case["proto_hex"])) == id
    assert UUID7.from_big_endian(bytes.fromhex(case["big_endian_hex"])) == id
    assert UUID7(id.msb, id.lsb) == id


@pytest.mark.parametrize("version", range(16))
@pytest.mark.parametrize("variant", range(4))
def test_only_version_7_of_variant_10_is_taken(version: int, variant: int) -> None:
    msb, lsb = version << 12, variant << 62
    text = str(UUID7.unchecked(msb, lsb))
    big = UUID7.unchecked(msb, lsb).to_big_endian()
    good = version == 7 and variant == 0b10
    assert UUID7.unchecked(msb, lsb).is_valid == good
    ways: list[Callable[[], UUID7]] = [
        lambda: UUID7(msb, lsb),
        lambda: UUID7.parse(text),
        lambda: UUID7.from_big_endian(big),
    ]
    for make in ways:
        if good:
            assert make().msb == msb
        else:
            with pytest.raises(InvalidUUID):
                make()


@pytest.mark.parametrize("size", [0, 1, 15, 17, 32])
def test_other_lengths_are_refused(size: int) -> None:
    with pytest.raises(InvalidUUID, match="not 16"):
        UUID7.from_big_endian(bytes(size))


def test_numbers_that_do_not_fit_are_refused() -> None:
    for msb, lsb in ((1 << 64 | 0x7000, 2 << 62), (0x7000, 1 << 64 | 2 << 62), (-1, 2 << 62)):
        with pytest.raises(InvalidUUID, match="64 bits"):
            UUID7(msb, lsb)
    with pytest.raises(InvalidUUID, match="48 bits"):
        UUID7.new(1 << 48)
    with pytest.raises(InvalidUUID, match="48 bits"):
        UUID7.new(-1)


def test_bytes_that_do_not_decode_are_refused() -> None:
    with pytest.raises(InvalidUUID, match="protobuf"):
        UUID7.from_bytes(b"\x09\x00")


def test_new_ones_are_of_now_and_differ() -> None:
    before = time.time_ns() // 1_000_000
    made = {UUID7.new() for _ in range(2000)}
    after = time.time_ns() // 1_000_000
    assert len(made) == 2000
    assert all(id.is_valid and before <= id.time_ms <= after for id in made)
    assert UUID7.new(5).time_ms == 5
    assert UUID7.new(2**48 - 1).is_valid


@given(ID)
def test_every_form_comes_back(id: UUID7) -> None:
    assert UUID7.parse(str(id)) == id
    assert UUID7.parse(str(id).upper()) == id
    assert UUID7.from_bytes(id.to_bytes()) == id
    assert UUID7.from_big_endian(id.to_big_endian()) == id
    assert pickle.loads(pickle.dumps(id)) == id
    assert str(uuid.UUID(bytes=id.to_big_endian())) == str(id)
