"""The payload of a beam."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from beams import BEAM_HEADER, BeamHeader, decode_beam, encode_beam
from hypothesis import given
from hypothesis import strategies as st
from moments import moments_of_batch
from synthetic_radar import SyntheticRadar

import penstock
from support.radar_scenes import SMALL, batch_of, payloads


class CHeader(ctypes.LittleEndianStructure):
    _fields_ = [
        ("magic", ctypes.c_char * 4),
        ("version", ctypes.c_uint16),
        ("header_size", ctypes.c_uint16),
        ("beam", ctypes.c_int64),
        ("time_ns", ctypes.c_int64),
        ("volume", ctypes.c_int32),
        ("sweep", ctypes.c_int32),
        ("azimuth", ctypes.c_float),
        ("elevation", ctypes.c_float),
        ("pulses", ctypes.c_uint32),
        ("gates", ctypes.c_uint32),
        ("first_gate", ctypes.c_float),
        ("gate_spacing", ctypes.c_float),
        ("prf", ctypes.c_float),
        ("wavelength", ctypes.c_float),
        ("noise_power", ctypes.c_float),
        ("radar_constant", ctypes.c_float),
        ("count_power", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
    ]


def test_a_c_compiler_lays_the_header_out_as_we_do() -> None:
    assert ctypes.sizeof(CHeader) == BEAM_HEADER.itemsize == 80
    assert BEAM_HEADER.fields is not None
    for name, *_ in CHeader._fields_:
        assert getattr(CHeader, name).offset == BEAM_HEADER.fields[name][1], name


finite = st.floats(-1e6, 1e6, width=32)
positive = st.floats(0.0009765625, 1e6, width=32)
HEADERS = st.builds(
    BeamHeader,
    beam=st.integers(0, 2**63 - 1),
    time_ns=st.integers(-(2**63), 2**63 - 1),
    volume=st.integers(0, 2**31 - 1),
    sweep=st.integers(0, 2**31 - 1),
    azimuth=finite,
    elevation=finite,
    pulses=st.integers(2, 6),
    gates=st.integers(1, 9),
    first_gate=positive,
    gate_spacing=positive,
    prf=positive,
    wavelength=positive,
    noise_power=finite,
    radar_constant=finite,
    count_power=finite,
)


@given(HEADERS, st.integers(0, 2**32 - 1))
def test_a_beam_comes_out_of_its_payload_as_it_went_in(header: BeamHeader, seed: int) -> None:
    shape = (header.pulses, header.gates, 2)
    iq = np.random.default_rng(seed).integers(-(2**15), 2**15, shape, np.int16)
    payload = encode_beam(header, iq)
    assert len(payload) == 80 + 4 * header.pulses * header.gates
    again, samples = decode_beam(payload)
    assert again == header
    assert np.array_equal(samples, iq)
    assert not samples.flags.writeable
    assert encode_beam(again, samples) == payload


def changed(field: str, value: object) -> Callable[[bytes], bytes]:
    def change(payload: bytes) -> bytes:
        header = np.frombuffer(payload[:80], BEAM_HEADER).copy()
        header[field] = value
        return header.tobytes() + payload[80:]

    return change


DAMAGE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda _: b"", "size in bytes should be >= 80, found 0"),
    ("half a header", lambda p: p[:40], "size in bytes should be >= 80, found 40"),
    ("cut", lambda p: p[:-1], "size in bytes should be 464, found 463"),
    ("too long", lambda p: p + b"x", "size in bytes should be 464, found 465"),
    ("text", lambda p: b"hello, world! " * (len(p) // 14), "magic should be b'BEAM', found b'hell"),
    ("newer", changed("version", 2), "version should be 1, found 2"),
    ("longer header", changed("header_size", 96), "header_size should be 80, found 96"),
    ("one pulse", changed("pulses", 1), "pulses should be 2 to 65,536, found 1"),
    ("huge", changed("gates", 2**32 - 1), "gates should be 1 to 65,536, found 4294967295"),
    ("other gates", changed("gates", 13), "size in bytes should be 496, found 464"),
    ("no PRF", changed("prf", 0), "prf should be a number above 0, found 0.0"),
    ("no wavelength", changed("wavelength", np.inf), "wavelength should be a number above 0"),
    ("nowhere", changed("azimuth", np.nan), "azimuth should be a number, found nan"),
]


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_a_damaged_payload_is_refused_and_says_where(
    damage: Callable[[bytes], bytes], message: str
) -> None:
    good = payloads(SyntheticRadar(SMALL), 3)
    with pytest.raises(penstock.Malformed, match="a beam: ") as single:
        decode_beam(damage(good[1]))
    assert message in str(single.value)
    assert single.value.hint
    with pytest.raises(penstock.Malformed, match="the beam in row 1: ") as many:
        moments_of_batch(batch_of([good[0], damage(good[1]), good[2]]))
    assert message in str(many.value)


@given(st.binary(max_size=200), st.integers(0, 400), st.booleans())
def test_fuzz_bytes_are_a_beam_or_are_refused(junk: bytes, place: int, keep_size: bool) -> None:
    beam = bytearray(ONE_BEAM)
    beam[place : place + (len(junk) if keep_size else 0)] = junk
    try:
        header, iq = decode_beam(bytes(beam))
    except penstock.Malformed as error:
        assert error.where  # noqa: PT017  refused is fine, and anything else is not
    else:
        assert iq.shape == (header.pulses, header.gates, 2)


ONE_BEAM = payloads(SyntheticRadar(SMALL), 1)[0]


def test_samples_that_do_not_fit_their_header_are_refused() -> None:
    header, iq = decode_beam(ONE_BEAM)
    with pytest.raises(penstock.Malformed, match=r"shape should be \(8, 12, 2\)"):
        encode_beam(header, iq[1:])
    with pytest.raises(penstock.Malformed, match="type should be int16"):
        encode_beam(header, iq.astype(np.int32))
