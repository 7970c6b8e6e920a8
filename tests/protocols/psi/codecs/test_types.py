"""Every recorded type is read as it was meant, and written as psi writes it."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from penstock.protocols.psi import CodecLibrary, DateTime, DateTimeKind, TimeSpan, known_schemas
from penstock.protocols.psi.codecs import schema_id
from protocols.psi.recordings import catalog_of, expected, messages_of

TYPES = expected("types.expected.json")
CATALOG = catalog_of("types")
LIBRARY = CodecLibrary(CATALOG.schemas.values())
T = DateTime(638397614450000000, DateTimeKind.UTC)
#: What JSON cannot say.
SPECIAL: dict[str, list[Any]] = {
    "double": [math.pi, -math.inf],
    "decimal": [Decimal("1.25")],
    "bytearray": [bytes(range(1, 6)), b"", None],
    "datetime": [T, T._replace(kind=DateTimeKind.UNSPECIFIED)],
    "timespan": [TimeSpan(15_000_000), TimeSpan(-1)],
    "guid": [UUID("00112233-4455-6677-8899-aabbccddeeff")],
    "valuetuple": [(7, "seven")],
    "tuple": [(7, "seven")],
    "nestedstruct": [{"A": 9, "P": {"A": 1, "B": 2, "C": 3}, "T": T}],
}
#: Their bytes have gaps that psi fills with whatever was in memory.
WITH_GAPS = {"padstruct", "nestedstruct"}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("name", TYPES["values"])
def test_a_recorded_type_is_read_and_written_to_the_byte(name: str) -> None:
    stream = CATALOG.stream(name)
    codec = LIBRARY.codec(stream.type_name)
    assert not codec.is_raw
    wanted = SPECIAL.get(name, TYPES["values"][name])
    exact = TYPES["exactLeadingHex"].get(name)
    messages = [message for message in messages_of("types") if message.source_id == stream.id]
    assert len(messages) == len(wanted)
    for message in messages:
        value, size = codec.decode_sized(message.payload)
        told = wanted[message.sequence_id - 1]
        if name == "polymorphic":
            assert value["Self"] is value
            told = {**told, "Self": None}
            shown = {**value, "Self": None}
            assert shown == told
        else:
            assert plain(value) == told
        encoded = codec.encode(value)
        assert len(encoded) == size
        if name not in WITH_GAPS:
            assert encoded == message.payload[:size]
        if exact is not None:
            # One recorded line has half a byte too many.
            assert exact[message.sequence_id - 1][: 2 * size] == encoded.hex()
        assert repr(codec.decode(encoded)) == repr(value)
        assert codec.trim(message.payload) == message.payload[:size]


@pytest.mark.parametrize("name", TYPES["values"])
def test_the_types_of_dot_net_need_no_schema(name: str) -> None:
    stream = CATALOG.stream(name)
    codec = CodecLibrary().codec(stream.type_name)
    known = LIBRARY.codec(stream.type_name)
    if "psi_exporter" in stream.type_name:
        assert codec.is_raw
        assert codec.decode(b"abc") == codec.encode(b"abc") == codec.trim(b"abc") == b"abc"
        return
    for message in messages_of("types"):
        if message.source_id == stream.id:
            value = known.decode(message.payload)
            assert plain(codec.decode(message.payload)) == plain(value)
            assert codec.encode(value) == known.encode(value)


def test_schemas_of_dot_nets_types_are_those_that_psi_sends() -> None:
    made = 0
    for schema in CATALOG.schemas.values():
        assert schema_id(schema.name) == schema.id
        ours = {one.id: one for one in known_schemas(schema.type_name)}
        if schema.id in ours:
            assert ours[schema.id] == schema
            made += 1
    assert made == len(CATALOG.schemas) - 6  # five of the program's own, and a comparer


def test_negative_zero_and_nan_keep_their_bytes() -> None:
    codec = LIBRARY.codec("float")
    assert math.copysign(1, codec.decode(codec.encode(-0.0))) == -1
    assert codec.encode(math.nan) == bytes.fromhex("0000c0ff")
    assert LIBRARY.codec("double").encode(math.nan) == bytes.fromhex("000000000000f8ff")
