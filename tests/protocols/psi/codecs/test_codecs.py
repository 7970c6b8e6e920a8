from __future__ import annotations

import struct
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi import (
    CodecLibrary,
    DateTime,
    SchemaFlags,
    SchemaMember,
    TimeSpan,
    Truncated,
    TypeSchema,
    UnknownType,
    known_schemas,
    make_schema,
    qualify,
)
from penstock.protocols.psi.codecs import FixedCodec, parse_type_name

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
SYSTEM = "System.Collections.Generic."
NEW = struct.pack("<I", 0x80000000)
POINT = make_schema(
    "Point, app", [("X", "double"), ("Y", "double")], SchemaFlags.STRUCT, "SimpleSerializer"
)
NODE = make_schema(
    "Node, app",
    [("Value", "int"), ("Next", "Node, app"), ("Tags", f"{SYSTEM}List`1[[string]]")],
    SchemaFlags.CLASS,
    "ClassSerializer",
)
LIBRARY = CodecLibrary([POINT, NODE])

ROUND_TRIPS: list[tuple[str, st.SearchStrategy[Any]]] = [
    ("bool", st.booleans()),
    ("sbyte", st.integers(-128, 127)),
    ("ushort", st.integers(0, 65535)),
    ("uint", st.integers(0, 2**32 - 1)),
    ("ulong", st.integers(0, 2**64 - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("char", st.characters(max_codepoint=0xFFFF)),
    ("string", st.none() | TEXT),
    ("string[]", st.none() | st.lists(st.none() | TEXT, max_size=5)),
    ("System.Guid", st.uuids()),
    ("System.DateTime", st.builds(DateTime, st.integers(0, 3155378975999999999))),
    ("System.TimeSpan", st.builds(TimeSpan, st.integers(-(2**63), 2**63 - 1))),
    ("byte[]", st.none() | st.binary(max_size=30)),
    ("System.IO.MemoryStream", st.none() | st.binary(max_size=30)),
    ("char[]", st.text(max_size=10).filter(lambda t: all(ord(c) < 0x10000 for c in t))),
    ("System.Nullable`1[[int]]", st.none() | INT32),
    ("System.Nullable`1[[char]]", st.none() | st.characters(max_codepoint=0xFFFF)),
    ("System.Nullable`1[[System.Guid]]", st.none() | st.uuids()),
    (
        "System.ValueTuple`3[[byte],[double],[short]]",
        st.tuples(st.integers(0, 255), st.floats(allow_nan=False), st.integers(-9, 9)),
    ),
    ("System.ValueTuple`2[[string],[System.Guid]]", st.tuples(TEXT, st.uuids())),
    ("System.Tuple`1[[string]]", st.none() | st.tuples(st.none() | TEXT)),
    (f"{SYSTEM}KeyValuePair`2[[byte],[long]]", st.tuples(st.integers(0, 255), INT32)),
    (f"{SYSTEM}List`1[[int]]", st.none() | st.lists(INT32, max_size=9)),
    (f"{SYSTEM}List`1[[string]]", st.lists(st.none() | TEXT, max_size=9)),
    (f"{SYSTEM}List`1[[System.Guid]]", st.lists(st.uuids(), max_size=5)),
    (f"{SYSTEM}List`1[[Point, app]]", st.just([])),
    (f"{SYSTEM}IEnumerable`1[[string]]", st.lists(TEXT, max_size=5)),
    (f"{SYSTEM}Dictionary`2[[string],[int]]", st.dictionaries(TEXT, INT32, max_size=5)),
    (
        f"{SYSTEM}Dictionary`2[[int],[double]]",
        st.dictionaries(INT32, st.floats(allow_nan=False), max_size=5),
    ),
    ("object", st.none() | st.booleans() | TEXT | INT32 | st.binary(max_size=9) | st.uuids()),
    ("object[]", st.lists(st.none() | TEXT | st.integers(2**40, 2**50), max_size=5)),
    ("int[][]", st.just([])),
    ("Point, app", st.fixed_dictionaries({"X": st.floats(allow_nan=False), "Y": st.just(2.0)})),
]


@pytest.mark.parametrize(("name", "values"), ROUND_TRIPS, ids=[name for name, _ in ROUND_TRIPS])
def test_values_come_out_as_they_went_in_with_exactly_their_bytes(
    name: str, values: st.SearchStrategy[Any]
) -> None:
    codec = LIBRARY.codec(name)
    assert not codec.is_raw

    @given(values, st.binary(max_size=20))
    def check(value: Any, stale: bytes) -> None:
        data = codec.encode(value)
        assert codec.decode_sized(data + stale) == (value, len(data))
        assert codec.decode(memoryview(bytearray(data))) == value

    check()


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", "<u4", "<i8", "<f4", "<f8", "?"])
def test_arrays_of_numbers_are_numpys(dtype: str) -> None:
    names = {"i1": "sbyte", "u1": "byte", "<i2": "short", "<u4": "uint", "<i8": "long"}
    name = names.get(dtype, {"<f4": "float", "<f8": "double", "?": "bool"}.get(dtype, ""))
    codec = LIBRARY.codec(f"{name}[]")
    values = np.array([0, 1, 1, 0]).astype(dtype)
    found = codec.decode(codec.encode(values) + b"stale")
    if dtype == "u1":
        assert found == values.tobytes()
        return
    assert found.dtype == np.dtype(dtype)
    assert found.tolist() == values.tolist()
    assert codec.encode(values.tolist()) == codec.encode(values)
    if dtype != "?":
        assert not found.flags.writeable


def test_arrays_of_times_durations_and_structs_are_numpys() -> None:
    times = np.array(["2024-01-02T03:04:05.1234567", "1990-01-01"], "datetime64[ns]")
    codec = LIBRARY.codec("System.DateTime[]")
    assert codec.decode(codec.encode(times)).tolist() == times.tolist()
    assert codec.encode([DateTime.of(time) for time in times]) == codec.encode(times)
    spans = np.array([5, -7], "timedelta64[us]")
    codec = LIBRARY.codec("System.TimeSpan[]")
    assert (codec.decode(codec.encode(spans)) == spans).all()
    assert codec.encode([timedelta(microseconds=5), TimeSpan(-70)]) == codec.encode(spans)
    codec = LIBRARY.codec("Point, app[]".replace(", app[]", "[], app"))
    points = codec.decode(codec.encode([{"X": 1.0, "Y": 2.0}, {"X": 3.0, "Y": 4.0}]))
    assert points["Y"].tolist() == [2.0, 4.0]
    assert codec.encode(points) == codec.encode([{"X": 1.0, "Y": 2.0}, {"X": 3.0, "Y": 4.0}])
    ids = [UUID(int=number) for number in range(3)]
    codec = LIBRARY.codec("System.Guid[]")
    assert codec.decode(codec.encode(ids)) == ids


def test_many_payloads_become_one_array() -> None:
    codec = LIBRARY.codec("float")
    assert isinstance(codec, FixedCodec)
    payloads = [codec.encode(number) + b"stale" for number in (1.5, 2.5)]
    assert codec.decode_many(payloads).tolist() == [1.5, 2.5]
    with pytest.raises(Malformed):
        codec.decode_many([b"abc"])
    times = LIBRARY.codec("System.DateTime")
    assert isinstance(times, FixedCodec)
    moment = datetime(2024, 1, 2, tzinfo=UTC)
    assert times.decode_many([times.encode(moment)])[0] == np.datetime64("2024-01-02")


def test_the_layout_of_a_struct_is_that_of_memory() -> None:
    library = CodecLibrary(
        [
            make_schema("E, app", [("value__", "short")], SchemaFlags.STRUCT, "SimpleSerializer"),
            make_schema(
                "S, app",
                [("A", "byte"), ("B", "double"), ("C", "E, app"), ("D", "bool")],
                SchemaFlags.STRUCT,
                "SimpleSerializer",
            ),
        ]
    )
    codec = library.codec("S, app")
    data = codec.encode({"A": 1, "B": 1.0, "C": -2, "D": True})
    assert data.hex(" ", 4) == "01000000 00000000 00000000 0000f03f feff0100 00000000"
    assert codec.dtype is not None
    assert codec.dtype.itemsize == 24
    # .NET may order the members of a tuple itself.
    data = library.codec("System.ValueTuple`2[[byte],[int]]").encode((1, 2))
    assert data.hex(" ", 4) == "02000000 01000000"


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=5, min_value=-(10**20), max_value=10**20
    )
)
def test_decimals_keep_their_digits(value: Decimal) -> None:
    codec = LIBRARY.codec("decimal")
    found = codec.decode(codec.encode(value))
    assert found == value
    assert str(found) == str(value)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e29", "1e-29", "1e1000000", "x", None])
def test_what_is_no_decimal_of_96_bits_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption):
        LIBRARY.codec("decimal").encode(value)


def test_objects_that_hold_each_other_are_read_and_written() -> None:
    codec = LIBRARY.codec("Node, app")
    first: dict[str, Any] = {"Value": 1, "Tags": ["a", None]}
    second = {"Value": 2, "Next": first, "Tags": first["Tags"]}
    first["Next"] = second
    found = codec.decode(codec.encode(first))
    assert found["Next"]["Next"] is found
    assert found["Next"]["Value"] == 2
    assert found["Next"]["Tags"] is found["Tags"]
    assert found["Tags"] == ["a", None]


def test_equal_objects_that_are_not_the_same_stay_apart() -> None:
    codec = LIBRARY.codec(f"{SYSTEM}List`1[[{SYSTEM}List`1[[int]]]]")
    value = [[1, 2], [1, 2], []]
    found = codec.decode(codec.encode(value))
    assert found == value
    assert found[0] is not found[1]


def test_a_chain_that_is_too_long_is_refused_both_ways() -> None:
    codec = LIBRARY.codec("Node, app")
    chain: Any = None
    for number in range(200):
        chain = {"Value": number, "Next": chain, "Tags": None}
    with pytest.raises(InvalidOption, match="within each other"):
        codec.encode(chain)
    link = NEW + struct.pack("<i", 1)
    with pytest.raises(Malformed, match="depth"):
        codec.decode(link * 5000 + bytes(8))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("int", b"abc"),
        ("string", b""),
        ("string", b"\x01\0\0\0"),
        ("string", b"\x01\0\0\x80"),
        ("string", NEW + b"\xff\xff\xff\xff"),
        ("string", NEW + b"\xff\xff\xff\x7f"),
        ("string", NEW + b"\x02\0\0\0a"),
        ("string", NEW + b"\x01\0\0\0\xff"),
        ("string", struct.pack("<I", 0x40000000)),
        ("float[]", NEW + b"\xff\xff\xff\x7f" + bytes(8)),
        ("float[]", NEW + b"\xff\xff\xff\xff" + bytes(8)),
        ("float[]", NEW + b"\x03\0\0\0" + bytes(8)),
        ("string[]", NEW + b"\xff\xff\xff\x7f" + bytes(8)),
        ("object[]", NEW + b"\xff\xff\xff\x7f" + bytes(8)),
        ("System.DateTime", b"\xff" * 7 + b"\x3f"),
        ("decimal", b"\x01\0\x1d\0" + bytes(12)),
        (f"{SYSTEM}List`1[[int]]", NEW + NEW + bytes(4) + b"\x01\0\0\0" + bytes(4)),
        (f"{SYSTEM}List`1[[int]]", NEW + bytes(4) + bytes(8)),
        (f"{SYSTEM}Dictionary`2[[string],[int]]", NEW + bytes(4) + bytes(3)),
        ("System.Tuple`1[[object]]", NEW + b"\0\0\0\x40"),
    ],
)
def test_bytes_that_hold_no_such_value_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(Malformed):
        LIBRARY.codec(name).decode(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int", 2**31),
        ("int", 1.5),
        ("int", "1"),
        ("int", None),
        ("byte", -1),
        ("float", 1e39),
        ("bool", 1),
        ("char", "ab"),
        ("char", "\U0001f600"),
        ("string", 5),
        ("string", "\ud800"),
        ("string[]", [1]),
        ("byte[]", "text"),
        ("float[]", 5),
        ("float[]", ["a"]),
        ("object[]", "text"),
        ("object", {"a": 1}),
        ("object", object()),
        ("System.Guid", "nonsense"),
        ("System.Guid", 5),
        ("System.ValueTuple`2[[int],[string]]", (1,)),
        ("System.ValueTuple`2[[int],[int]]", 5),
        (f"{SYSTEM}List`1[[int]]", 5),
        ("Point, app", {"X": 1.0}),
        ("Point, app", 5),
        ("Node, app", {"Value": 1, "Next": None}),
        ("Node, app", {"Value": 1, "Next": None, "Tags": None, "More": 1}),
        ("Nobody, knows", 5),
    ],
)
def test_values_that_are_not_of_the_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidOption):
        LIBRARY.codec(name).encode(value)


def test_an_object_of_a_type_without_a_schema_is_told() -> None:
    codec = LIBRARY.codec("object")
    with pytest.raises(UnknownType, match="schema 5"):
        codec.decode(struct.pack("<I", 0xC0000005))
    with pytest.raises(UnknownType, match=r"Nobody"):
        codec.encode({"$type": "Nobody, knows"})
    node = {"$type": "Node", "Value": 1, "Next": None, "Tags": None}
    assert codec.decode(codec.encode(node)) == node
    assert codec.decode(NEW) == {}


def test_a_serializer_of_somebodys_own_leaves_bytes() -> None:
    schema = make_schema("Image, app", [("Width", "int")], SchemaFlags.CLASS, "ClassSerializer")
    own = schema._replace(serializer_type_name="App.ImageSerializer, app")
    assert not CodecLibrary([schema]).codec("Image, app").is_raw
    assert CodecLibrary([own]).codec("Image, app").is_raw
    assert CodecLibrary([schema._replace(serializer_type_name=None)]).codec("Image").is_raw is False


def test_a_schema_that_makes_much_of_no_bytes_is_refused() -> None:
    schemas = [
        TypeSchema(
            f"S{n}",
            n,
            f"S{n}",
            (SchemaMember("A", f"S{n + 1}"), SchemaMember("B", f"S{n + 1}")),
            SchemaFlags.STRUCT,
        )
        for n in range(60)
    ]
    empty = TypeSchema("S60", 60, "S60", (), SchemaFlags.STRUCT, "A.StructSerializer`1[[S60]]")
    with pytest.raises(Malformed, match="objects"):
        CodecLibrary([*schemas, empty]).codec("S0").decode(bytes(1000))
    endless = TypeSchema("L", 1, "L", (SchemaMember("A", "L"),), SchemaFlags.STRUCT)
    with pytest.raises(Malformed, match="depth"):
        CodecLibrary([endless]).codec("L").decode(bytes(10))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("float", "System.Single"),
        ("int[][]", "System.Int32[][]"),
        ("System.Int32, mscorlib, Version=4.0.0.0", "System.Int32"),
        ("A.B+C`1[[System.Int32, x],[D[], y]][], z", "A.B+C`1[[System.Int32],[D[]]][]"),
    ],
)
def test_a_name_is_the_same_whatever_assembly_it_is_from(text: str, canonical: str) -> None:
    name = parse_type_name(text)
    assert name.canonical == canonical
    assert parse_type_name(name.qualified).canonical == canonical
    assert parse_type_name(qualify(text)) == parse_type_name(qualify(qualify(text)))


@pytest.mark.parametrize(
    "text", ["", "[", "A[[", "A[[B", "A[[B]", "A[[]]", "A[", "A]", "x" * 70000, "A[[" * 1000]
)
def test_what_is_no_name_is_refused_and_its_stream_stays_bytes(text: str) -> None:
    with pytest.raises(Malformed):
        parse_type_name(text)
    assert CodecLibrary([TypeSchema(text, 1, text)]).codec(text).is_raw


def test_a_value_that_breaks_off_is_truncated() -> None:
    for name in ("int", "System.Guid", "Point, app"):
        with pytest.raises(Truncated):
            LIBRARY.codec(name).decode(b"abc")


def test_an_array_of_two_dimensions_stays_bytes() -> None:
    assert LIBRARY.codec("int[,]").is_raw
    assert known_schemas("int[,]") == []
    assert [schema.name[:14] for schema in known_schemas("int[][]")] == [
        "System.Int32, ",
        "System.Int32[]",
        "System.Int32[]",
    ]
