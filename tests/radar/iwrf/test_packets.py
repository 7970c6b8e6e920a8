"""The table of packets: every layout, byte by byte, and packets both ways."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.radar.iwrf.framing import frame
from penstock.radar.iwrf.packets import (
    ID_BASE,
    PACKET_SIZE,
    STRUCTS,
    Encoding,
    Event,
    Kind,
    dtype_of,
    is_missing,
    layout_of,
    make,
    read,
    text_of,
    time_ns_of,
)
from support.pulses import VECTORS, vector

REAL = json.loads((VECTORS / "offsets.json").read_text())


def test_there_is_every_struct_of_the_real_header() -> None:
    assert {struct.name for struct in STRUCTS} == set(REAL["structs"])


@pytest.mark.parametrize("name", sorted(REAL["structs"]))
def test_every_field_lies_where_the_real_compiler_put_it(name: str) -> None:
    layout = dtype_of(name)
    real = REAL["structs"][name]
    assert layout.itemsize == real["size"]
    assert layout.fields is not None
    fields = [field for field in real["fields"] if field["name"] != "packet"]
    for field in fields:
        kind, offset = layout.fields[field["name"]][:2]
        assert (offset, kind.itemsize) == (field["offset"], field["bytes"]), field["name"]
    common = 8 if len(fields) < len(real["fields"]) else 0
    assert len(layout.fields) == len(fields) + common


def test_ids_encodings_and_events_have_the_real_numbers() -> None:
    defines, enums = REAL["defines"], REAL["enums"]
    names = {"PULSE": "PULSE_HEADER", "BURST": "BURST_HEADER", "RVP8_PULSE": "RVP8_PULSE_HEADER"}
    names |= {"MOMENTS_FIELD": "MOMENTS_FIELD_HEADER", "MOMENTS_RAY": "MOMENTS_RAY_HEADER"}
    for kind in Kind:
        assert defines[f"IWRF_{names.get(kind.name, kind.name)}_ID"] == ID_BASE + kind
    for encoding in Encoding:
        assert enums["iwrf_iq_encoding"][f"IWRF_IQ_ENCODING_{encoding.name}"] == encoding
    for event in Event:
        assert defines[f"IWRF_{event.name}"] == event


@pytest.mark.parametrize("name", ["fl32", "si16"])
def test_packets_of_lrose_are_made_again_bit_by_bit(name: str) -> None:
    data = vector(name)
    made = []
    for run in frame(data).runs:
        for start, end in run.packets():
            packet = data[start:end].tobytes()
            record = read(packet)[0]
            size = PACKET_SIZE[Kind(run.kind)]
            fields = {field: record[field] for field in record.dtype.names or ()}
            made.append(make(Kind(run.kind), data=packet[size:], **fields))
    assert b"".join(made) == data.tobytes()


def _repeated(count: int, values: list[Any]) -> list[Any]:
    return values * count


def values_of(kind: Kind) -> st.SearchStrategy[dict[str, Any]]:
    """Return any values for the fields of a packet."""
    fields = {}
    layout = layout_of(kind)
    for name in layout.names or ():
        if name in {"id", "len_bytes"}:
            continue
        base = layout[name].base
        one: st.SearchStrategy[Any]
        if base.kind == "S":
            one = st.binary(max_size=base.itemsize).map(lambda text: text.rstrip(b"\0"))
        elif base.kind == "f":
            one = st.floats(width=64 if base.itemsize == 8 else 32)
        elif base.kind in "iu":
            limits = np.iinfo(base)
            one = st.integers(int(limits.min), int(limits.max))
        else:  # the phases, which are structs
            continue
        count = math.prod(layout[name].shape)
        # The first of many stands for all of them.
        fields[name] = (
            one
            if count == 1
            else st.lists(one, min_size=1, max_size=1).map(partial(_repeated, count))
        )
    return st.fixed_dictionaries({}, optional=fields)


@pytest.mark.parametrize("kind", sorted(PACKET_SIZE))
def test_packets_come_back_as_they_were_made_in_both_byte_orders(kind: Kind) -> None:
    @settings(max_examples=20, deadline=None)
    @given(values_of(kind))
    def check(fields: dict[str, Any]) -> None:
        packet = make(kind, **fields)
        record = read(packet, kind)
        big = record.astype(layout_of(kind, ">")).tobytes()
        swapped = read(big)
        for name, value in fields.items():
            expected = np.asarray(value, layout_of(kind)[name].base)
            np.testing.assert_array_equal(record[name][0], expected)
            np.testing.assert_array_equal(swapped[name][0], expected)

    check()


def test_metadata_that_nobody_gave_is_missing() -> None:
    info = read(make(Kind.RADAR_INFO, radar_name="X"))[0]
    assert is_missing(info["latitude_deg"])
    assert is_missing(float("nan"))
    assert not is_missing(-9998.0)
    assert (text_of(info["radar_name"]), text_of(info["site_name"])) == ("X", "")
    processing = read(make(Kind.TS_PROCESSING))[0]
    assert processing["range_gate_averaging"] == 1
    assert is_missing(processing["prt_usec"])


def test_a_time_of_a_thousand_million_nanoseconds_is_the_next_second() -> None:
    packet = make(Kind.VERSION, time_secs_utc=5, time_nano_secs=1_000_000_000)
    assert time_ns_of(read(packet)).tolist() == [6_000_000_000]


@pytest.mark.parametrize(
    ("packet", "what"),
    [
        (b"", "length"),
        (bytes(56), "id"),
        (make(Kind.RADAR_INFO)[:255], "length"),
        (b"\xff" * 64, "id"),
    ],
)
def test_what_is_no_packet_is_refused(packet: bytes, what: str) -> None:
    with pytest.raises(Malformed) as fault:
        read(packet)
    assert what in str(fault.value)


def test_another_kind_and_unknown_fields_are_refused() -> None:
    with pytest.raises(Malformed, match="radar_info"):
        read(make(Kind.VERSION), Kind.RADAR_INFO)
    with pytest.raises(InvalidOption, match="no such field"):
        make(Kind.VERSION, latitude_deg=1)
    with pytest.raises(InvalidOption, match="platform_type"):
        make(Kind.RADAR_INFO, platform_type=2**40)
    with pytest.raises(InvalidOption, match="nothing follows"):
        make(Kind.VERSION, data=b"x")
