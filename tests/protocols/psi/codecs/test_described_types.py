"""Types of psi programs that only their schemas tell: shared objects, interfaces, dictionaries."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi import (
    CodecLibrary,
    DateTime,
    DateTimeKind,
    UnknownType,
    known_schemas,
)
from penstock.protocols.psi.codecs import make_schema, parse_type_name, schema_id
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.metadata import SchemaFlags, SchemaMember, TypeSchema

OWN = "App, Version=1.0.0.0"
IMAGE = f"App.Image, {OWN}"
PSI = "Microsoft.Psi, Version=0.19.100.1, Culture=neutral, PublicKeyToken=null"
GENERIC = "System.Collections.Generic"


def generic(name: str, argument: str) -> str:
    return f"Microsoft.Psi.{name}`1[[{argument}]], {PSI}"


def custom(name: str, member: str, kind: str) -> TypeSchema:
    """Return the schema of a type whose serializer is psi's own for it."""
    schema = make_schema(name, [(member, kind)], SchemaFlags.CLASS, "ClassSerializer")
    outer = name.partition("`")[0]
    return schema._replace(serializer_type_name=f"{outer}`1+CustomSerializer[[{IMAGE}]], {PSI}")


IMAGE_SCHEMA = make_schema(
    IMAGE,
    [("stream", "System.IO.MemoryStream"), ("width", "int"), ("height", "int")],
    SchemaFlags.CLASS,
    "ClassSerializer",
)
SCHEMAS = [
    IMAGE_SCHEMA,
    custom(generic("SharedContainer", IMAGE), "resource", IMAGE),
    custom(generic("Shared", IMAGE), "inner", generic("SharedContainer", IMAGE)),
]
LIBRARY = CodecLibrary(SCHEMAS)
NEW = "00000080"


def test_a_shared_object_is_the_object_that_it_holds_to_the_byte() -> None:
    codec = LIBRARY.codec(generic("Shared", IMAGE))
    content = f"{NEW}03000000ffd8ff" + "80020000" + "e0010000"
    payload = bytes.fromhex(NEW + NEW + NEW + content)
    image = {"stream": b"\xff\xd8\xff", "width": 640, "height": 480}
    assert codec.decode(payload) == image
    assert codec.encode(image) == payload
    # psi sends what older messages left in its buffer behind it.
    assert codec.trim(payload + b"stale bytes") == payload
    assert codec.decode(bytes(4) + b"stale") is None
    assert codec.encode(None) == bytes(4)


def test_a_message_of_an_interface_says_what_it_is_and_nothing_stale_stays() -> None:
    codec = LIBRARY.codec(f"App.IThing, {OWN}")
    id = schema_id(parse_type_name(IMAGE).qualified)
    payload = (0xC0000000 | id).to_bytes(4, "little") + bytes.fromhex(f"{NEW}0000000001000000")
    payload += bytes.fromhex("02000000")
    value = codec.decode(payload + b"stale")
    assert value == {"$type": "App.Image", "stream": b"", "width": 1, "height": 2}
    assert codec.trim(payload + b"stale") == payload
    assert codec.encode(value) == payload
    # One of a type that nobody tells stays as it came.
    strange = bytes.fromhex("010000c0") + b"anything"
    assert codec.decode(strange) == codec.trim(strange) == strange
    with pytest.raises(InvalidOption):
        codec.encode(5)


@pytest.mark.parametrize(
    ("key", "comparer"),
    [
        ("System.String", "GenericEqualityComparer`1[[System.String]]"),
        ("System.Byte", "GenericEqualityComparer`1[[System.Byte]]"),
        ("System.Int32[]", "ObjectEqualityComparer`1[[System.Int32[]]]"),
        ("System.Nullable`1[[System.Int32]]", "NullableEqualityComparer`1[[System.Int32]]"),
    ],
)
def test_the_schema_of_a_dictionarys_comparer_is_announced(key: str, comparer: str) -> None:
    """psi's pipeline ends at a type that it was not told of."""
    name = f"{GENERIC}.Dictionary`2[[{key}],[System.Int32]]"
    schemas = {parse_type_name(s.type_name).canonical: s for s in known_schemas(name)}
    told = schemas[f"{GENERIC}.{comparer}"]
    value: Any = [] if "[]" in key else {}
    payload = CodecLibrary().codec(name).encode(value)
    assert int.from_bytes(payload[4:8], "little") == 0xC0000000 | told.id


UTC = DateTime(638397614450000000, DateTimeKind.UTC)
MOMENTS = [
    DateTime(0, DateTimeKind.UNSPECIFIED),
    DateTime(3155378975999999999, DateTimeKind.UNSPECIFIED),
    DateTime(504595008000000000, DateTimeKind.LOCAL),
    UTC,
]


@pytest.mark.parametrize("name", ["System.DateTime[]", f"{GENERIC}.List`1[[System.DateTime]]"])
@pytest.mark.parametrize("moments", [MOMENTS, [UTC], []])
def test_many_times_keep_their_years_and_kinds(name: str, moments: list[DateTime]) -> None:
    codec = CodecLibrary().codec(name)
    payload = codec.encode(moments)
    found = codec.decode(payload)
    assert [DateTime.of(each) for each in found] == moments
    assert codec.encode(found) == payload
    if moments == [UTC] and name.endswith("[]"):
        assert isinstance(found, np.ndarray)  # where numpy changes nothing, it is numpy's


TEXTS = [
    "0001-01-01T00:00:00",
    "9999-12-31T23:59:59.9999999",
    "1600-01-01T00:00:00 local",
    "2024-01-02T03:04:05Z",
]


@pytest.mark.parametrize(("moment", "text"), list(zip(MOMENTS, TEXTS, strict=True)))
def test_a_time_is_told_to_the_tick_with_its_kind(moment: DateTime, text: str) -> None:
    assert moment.text == text


@pytest.mark.parametrize(
    "type_name",
    ["flaot", "List<int>", "System.Nonsense", "int[,]", "System.Collections.Generic.List`1", "a[b"],
)
def test_a_type_that_no_psi_program_has_is_not_announced(type_name: str) -> None:
    with RemoteExporter(port=0) as exporter:
        with pytest.raises(InvalidOption, match="type"):
            exporter.exporter.write(None, "S", type_name)
        assert not exporter.store.streams()


@pytest.mark.parametrize(
    "type_name",
    ["float", "byte[]", "string[][]", "System.Guid", f"{GENERIC}.List`1[[int]]", IMAGE],
)
def test_types_of_dot_net_and_those_with_an_assembly_are_announced(type_name: str) -> None:
    with RemoteExporter(port=0) as exporter:
        exporter.exporter.write(None, "S", type_name)
        exporter.exporter.write(
            None,
            "T",
            "App.Image",
            schemas=[
                make_schema("App.Image", [("x", "int")], SchemaFlags.CLASS, "ClassSerializer")
            ],
        )
        assert len(exporter.store.streams()) == 2


@pytest.mark.parametrize(
    ("name", "value", "payload"),
    [
        (f"{GENERIC}.List`1[[char]]", ["a", "é"], f"{NEW}{NEW}02000000 6100e900 02000000 02000000"),
        (f"{GENERIC}.List`1[[byte]]", [1, 255], f"{NEW}{NEW}02000000 01ff 02000000 02000000"),
    ],
)
def test_a_list_of_characters_or_of_bytes_is_a_list(
    name: str, value: list[Any], payload: str
) -> None:
    codec = CodecLibrary().codec(name)
    assert codec.decode(bytes.fromhex(payload)) == value
    assert codec.decode(codec.encode(value)) == value
    with pytest.raises(InvalidOption):
        codec.encode([300])


@pytest.mark.parametrize(
    ("items", "value", "payload"),
    [
        ("[byte],[byte],[byte]", (1, 2, 3), "01020300"),
        ("[short],[byte]", (1, 2), "01000200"),
        ("[short],[short],[short]", (1, 2, 3), "0100020003000000"),
        ("[byte],[byte],[byte],[byte],[byte]", (1, 2, 3, 4, 5), "0102030405000000"),
        ("[int],[int],[int]", (1, 2, 3), "01000000020000000300000000000000"),
        ("[int],[byte],[short]", (1, 2, 3), "0100000003000200"),
        ("[byte]", (5,), "05"),
    ],
)
def test_a_tuple_of_numbers_is_as_large_as_in_memory(
    items: str, value: tuple[int, ...], payload: str
) -> None:
    """psi reads as many bytes as .NET gives the tuple, and an array has one behind the other."""
    name = f"System.ValueTuple`{len(value)}[{items}]"
    codec = CodecLibrary().codec(name)
    assert codec.encode(value).hex() == payload
    assert codec.trim(bytes.fromhex(payload) + b"stale").hex() == payload
    many = CodecLibrary().codec(f"{name}[]")
    data = bytes.fromhex(f"{NEW}02000000{payload}{payload}")
    assert many.decode(data) == [value, value]
    assert many.encode([value, value]) == data


PLAIN = "SimpleSerializer"


@pytest.mark.parametrize(
    ("name", "members", "flags", "payload"),
    [
        # psi copies an enum as a part of these, and tells its size nowhere.
        (f"App.S, {OWN}", [("A", f"App.Enum, {OWN}"), ("B", "int")], 2, "00000000 05000000"),
        (
            f"System.ValueTuple`2[[App.Enum, {OWN}],[int]]",
            [("Item1", f"App.Enum, {OWN}"), ("Item2", "int")],
            2,
            "05000000 01000000",
        ),
        (
            f"System.Nullable`1[[App.Enum, {OWN}]]",
            [("hasValue", "bool"), ("value", f"App.Enum, {OWN}")],
            2,
            "01000000 c8000000",
        ),
        # A data contract names some of its members, by the alphabet; psi copies it as it is.
        (f"App.C, {OWN}", [("A", "byte"), ("Z", "double")], 6, "00000000 00000040 01000000 0000"),
    ],
)
def test_what_psi_copies_out_of_memory_stays_bytes_where_its_layout_is_not_told(
    name: str, members: list[tuple[str, str]], flags: int, payload: str
) -> None:
    schema = make_schema(name, members, SchemaFlags(flags), PLAIN)
    data = bytes.fromhex(payload)
    codec = CodecLibrary([schema]).codec(name)
    assert codec.is_raw
    assert codec.trim(data) == data
    holder = make_schema(
        f"App.Holder, {OWN}",
        [("inner", name), ("after", "int")],
        SchemaFlags.CLASS,
        "ClassSerializer",
    )
    # It says so at once: an importer waits for the schema of an unknown type.
    with pytest.raises(Malformed, match="layout") as told:
        CodecLibrary([schema, holder]).codec("App.Holder").decode(bytes.fromhex(NEW) + bytes(40))
    assert not isinstance(told.value, UnknownType)


def test_an_array_of_structs_that_nobody_describes_is_no_array_of_nulls() -> None:
    """Old stores have no schemas, and there are structs whose bytes are 0."""
    codec = CodecLibrary().codec(f"App.Struct[], {OWN}")
    with pytest.raises(UnknownType, match=r"App\.Struct"):
        codec.decode(bytes.fromhex(f"{NEW}02000000") + bytes(40))


def test_a_shared_object_that_is_missing_is_no_object_to_refer_to() -> None:
    shared, numbers = generic("Shared", IMAGE), f"{GENERIC}.List`1[[int]]"
    bag = make_schema(
        f"App.Bag, {OWN}",
        [("image", shared), ("one", numbers), ("two", numbers)],
        SchemaFlags.CLASS,
        "ClassSerializer",
    )
    same = [1]
    codec = CodecLibrary([*SCHEMAS, bag]).codec("App.Bag")
    payload = codec.encode({"image": None, "one": same, "two": same})
    assert payload.hex().endswith("01000040")
    found = codec.decode(payload)
    assert found["one"] is found["two"]
    assert found["one"] == same


def test_the_texts_of_an_enumerable_are_objects_and_those_of_an_array_are_not() -> None:
    value = ["a", None]
    texts = CodecLibrary().codec(f"{GENERIC}.IEnumerable`1[[string]]")
    assert texts.encode(value).hex() == f"{NEW}02000000{NEW}010000006100000000"
    assert texts.decode(texts.encode(value)) == value
    array = CodecLibrary().codec("string[]").encode(value)
    assert array.hex() == f"{NEW}020000000100000061ffffffff"
    # As psi sends it: an object of another type.
    id = schema_id(parse_type_name("string[]").qualified)
    typed = (0xC0000000 | id).to_bytes(4, "little") + array[4:]
    assert CodecLibrary(known_schemas("string[]")).codec(texts.type_name).decode(typed) == value


def test_a_message_of_a_generic_interface_says_what_it_is() -> None:
    array = known_schemas("int[]")
    codec = CodecLibrary(array).codec(f"{GENERIC}.IList`1[[int]]")
    payload = (0xC0000000 | array[-1].id).to_bytes(4, "little") + bytes.fromhex("0100000007000000")
    assert codec.decode(payload + b"stale").tolist() == [7]
    assert codec.trim(payload + b"stale") == payload


def test_an_old_memory_stream_has_members() -> None:
    name = "System.IO.MemoryStream"
    members = [("_buffer", "byte[]"), ("_origin", "int"), ("_isOpen", "bool")]
    old = make_schema(name, members, SchemaFlags.CLASS, "ClassSerializer", version=2)
    payload = bytes.fromhex(f"{NEW}{NEW}02000000 ffd8 00000000 01")
    value = {"_buffer": b"\xff\xd8", "_origin": 0, "_isOpen": True}
    assert CodecLibrary([old]).codec(name).decode(payload) == value
    assert CodecLibrary([old]).codec(name).trim(payload + b"stale") == payload
    new = make_schema(name, [("buffer", "byte[]")], SchemaFlags.COLLECTION, "Own", version=3)
    plain = bytes.fromhex(f"{NEW}02000000 ffd8")
    assert CodecLibrary([new]).codec(name).decode(plain) == b"\xff\xd8"


def test_a_list_of_structs_with_characters_is_written_as_it_was_read() -> None:
    members = [("number", "int"), ("letter", "char")]
    schema = make_schema(f"App.Mark, {OWN}", members, SchemaFlags.STRUCT, PLAIN)
    codec = CodecLibrary([schema]).codec(f"{GENERIC}.List`1[[App.Mark, {OWN}]]")
    payload = codec.encode([{"number": 1, "letter": "é"}])
    assert codec.encode(codec.decode(payload)) == payload


def test_what_an_object_may_be_is_announced_with_it() -> None:
    """psi's pipeline ends at a number that it was not told of."""
    codec = CodecLibrary().codec("object[]")
    values = [1, 2**40, 1.5, True, "x", b"x", UTC, None, np.float32(1), Decimal(1), UUID(int=1)]
    told = {schema.id for schema in known_schemas("object[]")}
    for value in values:
        payload = codec.encode([value])
        prefix = int.from_bytes(payload[8:12], "little")
        assert value is None or prefix & 0x3FFFFFFF in told


def test_the_parts_of_a_type_of_ones_own_are_announced_with_it() -> None:
    counts = f"{GENERIC}.Dictionary`2[[string],[int]]"
    bag = make_schema(f"App.Bag, {OWN}", [("counts", counts)], SchemaFlags.CLASS, "ClassSerializer")
    with RemoteExporter(port=0) as exporter:
        exporter.exporter.write(None, "S", "App.Bag", schemas=[bag])
        told = [record for record in exporter.store.records if isinstance(record, TypeSchema)]
    assert told[-1] == bag
    assert {schema.id for schema in known_schemas(counts)} <= {schema.id for schema in told}


CONTRACT = TypeSchema(
    "urn:x:Contracted",
    schema_id("urn:x:Contracted"),
    f"App.Con, {OWN}",
    (SchemaMember("Q", "System.Double"), SchemaMember("Z", "System.String")),
    SchemaFlags.CLASS | SchemaFlags.DATA_CONTRACT,
    f"Microsoft.Psi.Serialization.ClassSerializer`1[[App.Con, {OWN}]], {PSI}",
)


def test_a_stream_of_a_data_contract_has_its_name_for_a_type() -> None:
    payload = bytes.fromhex(f"{NEW}0000000000000440{NEW}010000007a")
    codec = CodecLibrary([CONTRACT]).codec("urn:x:Contracted")
    assert codec.decode(payload + b"stale") == {"Q": 2.5, "Z": "z"}
    assert codec.trim(payload + b"stale") == payload
