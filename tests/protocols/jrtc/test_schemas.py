"""What streams are told to carry, and descriptor sets that mean harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import any_pb2, descriptor_pb2

from penstock.core.errors import AlreadyExists, InvalidOption, InvalidStreamId, Malformed, NotFound
from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.schemas import SchemaLimits, Schemas, TooManySchemas
from protocols.jrtc.forwarded import (
    EXAMPLE,
    STATUS,
    UP,
    VECTORS,
    as_set,
    describe,
    example_schemas,
    stream_of,
)


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS["vectors"] if "decoded_json_default" in v],
    ids=lambda vector: vector["case"],
)
def test_payloads_of_the_original_become_its_json(vector: dict[str, Any]) -> None:
    schemas = Schemas()
    schemas.upsert(EXAMPLE)
    stream = StreamId.parse(vector["stream_id"])
    schemas.associate(stream, "example", vector["message"])
    schema = schemas.find(stream)
    assert schema is not None
    payload = bytes.fromhex(vector["datagram"])[16:]
    expected = {
        **vector["decoded_json_default"],
        "_stream_id": str(stream),
        "_schema_proto_package": "example",
        "_schema_proto_msg": vector["message"],
    }
    assert schema.json_object(stream, payload) == expected
    assert json.loads(schema.json_line(stream, payload)) == expected


def test_a_zero_byte_payload_is_a_message() -> None:
    schemas = Schemas()
    schemas.upsert(EXAMPLE)
    schemas.associate(STATUS, "example", "req_resp")
    schema = schemas.find(STATUS)
    assert schema is not None
    assert set(schema.json_object(STATUS, b"")) == {
        "_stream_id",
        "_schema_proto_msg",
        "_schema_proto_package",
    }


def test_a_package_is_named_by_its_file_and_replaced_by_another() -> None:
    schemas = Schemas()
    assert schemas.upsert(EXAMPLE) == ("example", True)
    assert schemas.upsert(EXAMPLE) == ("example", False)
    schemas.associate(STATUS, "example", "status")
    changed = as_set(describe({"status": [("id", "uint32")]}, name="example.proto"))
    assert schemas.upsert(changed) == ("example", True)
    schema = schemas.find(STATUS)
    assert schema is not None
    assert schema.json_object(STATUS, b"\x08\x07")["id"] == 7
    gone = as_set(describe({"other": [("id", "uint32")]}, name="example.proto"))
    schemas.upsert(gone)
    assert schemas.find(STATUS) is None
    assert schemas.packages() == ["example"]


def test_a_file_may_be_told_not_to_replace_a_package(tmp_path: Path) -> None:
    schemas = Schemas()
    first, second = tmp_path / "first.pb", tmp_path / "second.pb"
    first.write_bytes(EXAMPLE)
    second.write_bytes(as_set(describe({"other": [("id", "uint32")]}, name="example.proto")))
    for _ in range(2):
        schemas.load(first, {STATUS: "status"}, replace=False)
    with pytest.raises(InvalidOption, match=r"package example .*other contents") as caught:
        schemas.load(second, {}, replace=False)
    assert caught.value.value == str(second)
    assert schemas.find(STATUS) is not None
    assert not schemas.is_broken(STATUS)
    schemas.load(second, {})
    assert schemas.is_broken(STATUS)
    assert not schemas.is_broken(stream_of("without a schema"))


def test_one_association_serves_all_devices_and_destinations() -> None:
    schemas = example_schemas(stream=StreamId.generate(None, None, "path/of/it", "name-of-it"))
    found = {
        id(schemas.find(StreamId.generate(dst, device, "path/of/it", "name-of-it", ver)))
        for dst, device, ver in ((2, 1, 0), (1, 2, 0), (4, 126, 3))
    }
    assert len(found) == 1
    assert schemas.find(StreamId.generate(2, 1, "path/of/it", "another-name")) is None


def test_two_streams_of_one_message_type_both_have_their_schema() -> None:
    schemas = example_schemas()
    other = stream_of("another-stream")
    assert schemas.associate(other, "example", "status")
    for stream in (STATUS, other):
        schema = schemas.find(stream)
        assert schema is not None
        assert schema.json_object(stream, UP)["_stream_id"] == str(stream)


def test_what_a_stream_carries_is_said_once() -> None:
    schemas = example_schemas()
    assert not schemas.associate(STATUS, "example", "status")
    with pytest.raises(AlreadyExists, match="carries status of example"):
        schemas.associate(STATUS, "example", "request")
    with pytest.raises(NotFound, match="nope not found"):
        schemas.associate(stream_of("s"), "nope", "status")
    with pytest.raises(NotFound, match="has no message statsu"):
        schemas.associate(stream_of("s"), "example", "statsu")
    with pytest.raises(InvalidStreamId):
        schemas.associate(StreamId.generate(2, 1, None, "name"), "example", "status")
    assert schemas.dissociate(STATUS)
    assert not schemas.dissociate(STATUS)
    assert schemas.find(STATUS) is None


def test_a_set_may_have_imports_in_any_order(tmp_path: Path) -> None:
    inner = describe({"Point": [("x", "sint32")]}, name="lib/inner.proto", package="lib")
    outer = describe(
        {"Track": [("points", "*lib.Point")]},
        name="track.proto",
        package="app",
        imports=("lib/inner.proto",),
    )
    for files in ((inner, outer), (outer, inner)):
        schemas = Schemas()
        file = tmp_path / "set.pb"
        file.write_bytes(as_set(*files))
        assert schemas.load(file, {STATUS: "app.Track"}) == "track"
        schema = schemas.find(STATUS)
        assert schema is not None
        assert schema.json_object(STATUS, b"\x0a\x02\x08\x03")["points"] == [{"x": -2}]


HOSTILE = {
    "nothing": b"",
    "no files": as_set(),
    "no descriptor set": b"\xff" * 40,
    "a file without a name": as_set(descriptor_pb2.FileDescriptorProto()),
    "an import that is not there": as_set(
        describe({"A": [("x", "not.There")]}, imports=("elsewhere.proto",))
    ),
    "files that import each other": as_set(
        describe({"A": []}, name="a.proto", imports=("b.proto",)),
        describe({"B": []}, name="b.proto", imports=("a.proto",)),
    ),
    "a type that is not there": as_set(describe({"A": [("x", "Nowhere")]})),
    "two fields of one number": as_set(
        describe({"A": [("x", "int32"), ("y", "int32", {"number": 1})]})
    ),
    "two messages of one name": as_set(
        describe({"A": []}, name="a.proto"), describe({"A": []}, name="b.proto")
    ),
    "a field of number 0": as_set(describe({"A": [("x", "int32", {"number": 0})]})),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_descriptor_sets_are_refused(what: str) -> None:
    schemas = Schemas()

    def load() -> None:
        package, _ = schemas.upsert(HOSTILE[what])
        schemas.associate(STATUS, package, "A")  # some are found out when they are asked for

    with pytest.raises(InvalidOption):
        load()
    assert schemas.find(STATUS) is None


def test_a_file_that_is_no_descriptor_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pb").touch()
    with pytest.raises(InvalidOption, match=r"empty\.pb.*has no files") as caught:
        Schemas().load(tmp_path / "empty.pb", {})
    assert "protoc" in str(caught.value.hint)


def test_limits_hold_before_anything_is_parsed() -> None:
    schemas = Schemas(SchemaLimits(descriptor_bytes=1000, packages=2, streams=3, files=2))
    with pytest.raises(InvalidOption, match="1,001 bytes"):
        schemas.upsert(bytes(1001))
    with pytest.raises(InvalidOption, match="3 files"):
        schemas.upsert(as_set(*(describe({}, name=f"{i}.proto") for i in range(3))))
    for name in ("one", "two"):
        schemas.upsert(as_set(describe({"A": []}, name=f"{name}.proto")))
    with pytest.raises(TooManySchemas):
        schemas.upsert(as_set(describe({"A": []}, name="three.proto")))
    for i in range(3):
        schemas.associate(stream_of(f"stream-{i}"), "one", "A")
    with pytest.raises(TooManySchemas):
        schemas.associate(stream_of("stream-3"), "one", "A")


def test_a_message_that_has_itself_inside_becomes_json_and_no_columns() -> None:
    schemas = Schemas()
    schemas.upsert(as_set(describe({"Node": [("next", "Node"), ("x", "int32")]})))
    schemas.associate(STATUS, "made", "Node")
    schema = schemas.find(STATUS)
    assert schema is not None
    assert schema.json_object(STATUS, b"\x0a\x02\x10\x05")["next"] == {"x": 5}
    with pytest.raises(InvalidOption, match="itself inside"):
        _ = schema.decoder
    deep = b""
    for _ in range(120):
        head = bytearray([0x0A])
        size = len(deep)
        while size > 0x7F:
            head.append(size & 0x7F | 0x80)
            size >>= 7
        deep = bytes(head) + bytes([size]) + deep
    with pytest.raises(Malformed):
        schema.json_object(STATUS, deep)


def test_a_message_of_any_kind_inside_is_looked_up_in_the_set_and_fails_alone() -> None:
    file = descriptor_pb2.FileDescriptorProto()
    any_pb2.DESCRIPTOR.CopyToProto(file)
    own = describe(
        {"inner": [("n", "int32")], "outer": [("extra", "google.protobuf.Any")]},
        package="ours",
        imports=(file.name,),
    )
    schemas = Schemas()
    package, _ = schemas.upsert(as_set(file, own))
    schemas.associate(STATUS, package, "ours.outer")
    schema = schemas.find(STATUS)
    assert schema is not None

    def payload(type_url: str, value: bytes) -> bytes:
        inside: bytes = any_pb2.Any(type_url=type_url, value=value).SerializeToString()
        return b"\x0a" + bytes([len(inside)]) + inside

    known = schema.json_object(STATUS, payload("type.googleapis.com/ours.inner", b"\x08\x05"))
    assert known["extra"]["n"] == 5
    for wrong in (
        payload("type.googleapis.com/no.such", b""),
        payload("type.googleapis.com/ours.inner", b"\xff"),
        payload("", b"x"),
    ):
        with pytest.raises(Malformed):
            schema.json_object(STATUS, wrong)


def test_messages_inside_of_each_other_twice_do_not_become_millions_of_columns() -> None:
    fields = {f"M{i}": [("a", f"M{i + 1}"), ("b", f"M{i + 1}")] for i in range(24)}
    schemas = Schemas()
    schemas.upsert(as_set(describe({**fields, "M24": [("x", "int32")]})))  # type: ignore[dict-item]
    schemas.associate(STATUS, "made", "M0")
    schema = schemas.find(STATUS)
    assert schema is not None
    with pytest.raises(InvalidOption, match="columns"):
        _ = schema.decoder


def test_ids_from_outside_do_not_fill_the_memory() -> None:
    schemas = Schemas(SchemaLimits(streams=10))
    for i in range(100):
        assert schemas.find(stream_of(f"unknown-{i}")) is None
    assert len(schemas._found) <= 10
