"""Types of psi programs that only their schemas tell: shared objects, interfaces, dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidOption
from penstock.protocols.psi import CodecLibrary, DateTime, DateTimeKind, known_schemas
from penstock.protocols.psi.codecs import make_schema, parse_type_name, schema_id
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.metadata import SchemaFlags, TypeSchema

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
LIBRARY = CodecLibrary(
    [
        IMAGE_SCHEMA,
        custom(generic("SharedContainer", IMAGE), "resource", IMAGE),
        custom(generic("Shared", IMAGE), "inner", generic("SharedContainer", IMAGE)),
    ]
)
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
