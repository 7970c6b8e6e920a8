from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any, assert_type

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.core.errors import InvalidOption, Malformed
from penstock.core.message import Message


class Beam(ctypes.LittleEndianStructure):
    _fields_ = (
        ("azimuth", ctypes.c_float),
        ("gates", ctypes.c_uint16),
        ("flags", ctypes.c_uint16),
    )

    azimuth: float
    gates: int
    flags: int


BEAM = bytes(Beam(90.5, 1000, 3))
GATE = np.dtype([("power", "<f4"), ("quality", "u1")])


def message(payload: bytes | memoryview, seq: int = 17) -> Message:
    # A reader of mapped memory hands out views, which do for nearly all that bytes do.
    return Message(seq, 0, 0, 0, 0, None, None, payload)  # type: ignore[arg-type]


both_kinds_of_payload = pytest.mark.parametrize(
    "wrap",
    [bytes, memoryview, lambda data: memoryview(bytearray(data))],
    ids=["bytes", "view", "bytearray"],
)


def test_the_size_of_a_message_is_that_of_its_payload() -> None:
    assert message(b"12345").size == 5


@both_kinds_of_payload
def test_a_payload_is_read_as_a_structure(wrap: Any) -> None:
    beam = message(wrap(BEAM)).cast(Beam)
    assert_type(beam, Beam)
    assert (beam.azimuth, beam.gates, beam.flags) == (90.5, 1000, 3)


def test_a_structure_is_a_copy_that_the_caller_may_change() -> None:
    stored = bytearray(BEAM)
    beam = message(memoryview(stored)).cast(Beam)
    beam.gates = 7
    assert bytes(stored) == BEAM
    stored[:] = bytes(len(stored))
    assert beam.azimuth == 90.5


def test_a_payload_is_read_as_an_array_or_union_of_ctypes() -> None:
    class Word(ctypes.Union):
        _fields_ = (("number", ctypes.c_uint32), ("bytes", ctypes.c_ubyte * 4))

    beams = message(BEAM * 3).cast(Beam * 3)
    assert [beam.gates for beam in beams] == [1000] * 3
    assert message(b"\1\0\0\0").cast(Word).bytes[0] == 1


@pytest.mark.parametrize("size", [0, 7, 9, 16])
def test_a_payload_of_another_size_than_the_structure_is_refused(size: int) -> None:
    with pytest.raises(Malformed) as caught:
        message(bytes(size)).cast(Beam)
    error = caught.value
    assert (error.what, error.where) == ("message 17 as Beam", "size in bytes")
    assert (error.expected, error.found) == (8, size)
    assert str(error) == f"message 17 as Beam: size in bytes should be 8, found {size}"


@both_kinds_of_payload
def test_a_payload_is_read_as_an_array_of_numpy_without_a_copy(wrap: Any) -> None:
    payload = wrap(np.arange(5, dtype="<f8").tobytes())
    numbers = message(payload).cast(np.float64)
    assert_type(numbers, NDArray[np.float64])
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    assert np.shares_memory(numbers, np.frombuffer(payload, np.uint8))


@both_kinds_of_payload
def test_an_array_over_a_payload_cannot_be_written_to(wrap: Any) -> None:
    numbers = message(wrap(bytes(8))).cast(np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 1


def test_anything_that_numpy_takes_for_a_dtype_will_do() -> None:
    payload = np.array([(1.5, 2), (2.5, 3)], GATE).tobytes()
    gates = message(payload).cast(GATE)
    assert gates["quality"].tolist() == [2, 3]
    by_text = message(b"\0\1\0\2").cast(">u2")
    assert_type(by_text, NDArray[Any])
    assert by_text.tolist() == [1, 2]
    assert_type(message(b"").cast(np.dtype(np.int32)), NDArray[np.int32])
    assert message(b"\2\0\0\0").cast(ctypes.c_uint32).tolist() == [2]


def test_an_empty_payload_has_no_items() -> None:
    assert message(b"").cast(GATE).shape == (0,)
    assert message(memoryview(b"")).cast("f8").shape == (0,)


def test_a_view_of_larger_items_counts_in_bytes() -> None:
    payload = memoryview(bytes(16)).cast("Q")
    assert message(payload).cast("u4").shape == (4,)
    with pytest.raises(Malformed) as caught:
        message(payload).cast(Beam)
    assert caught.value.found == 16


@given(size=st.integers(0, 64), item=st.integers(1, 20))
def test_only_whole_items_are_read(size: int, item: int) -> None:
    if size % item:
        with pytest.raises(Malformed) as caught:
            message(bytes(size)).cast(f"V{item}")
        assert caught.value.expected == f"a multiple of {item}"
        assert caught.value.found == size
    else:
        assert len(message(bytes(size)).cast(f"V{item}")) == size // item


@pytest.mark.parametrize("kind", [object, [("a", "O")], "V0"])
def test_items_that_cannot_be_in_a_payload_are_refused(kind: Any) -> None:
    with pytest.raises(InvalidOption):
        message(bytes(8)).cast(kind)


def test_a_message_alone_does_not_import_numpy() -> None:
    # The package as a whole has Arrow, and Arrow has numpy: load this one file.
    code = """
import importlib.util, sys, types
import pathlib
folder = pathlib.Path(sys.argv[1]).parent
for name, path in (("penstock", folder.parent), ("penstock.core", folder)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(path)]
import penstock.core.message
assert not {"numpy", "ctypes"} & set(sys.modules), "imported"
"""
    source = sys.modules[Message.__module__].__file__
    assert source is not None
    subprocess.run([sys.executable, "-c", code, source], check=True, timeout=30)
