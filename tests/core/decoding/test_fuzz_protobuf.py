"""Whatever messages and bytes come: the columns have what the protobuf library reads, or it too
refuses the payload.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from core.decoding import references
from core.decoding.batches import batch_of, checked
from core.decoding.references import Fails
from penstock.core.decoding import decoder_for
from penstock.core.errors import InvalidOption

Field = descriptor_pb2.FieldDescriptorProto
SCHEMAS = [12, pytest.param(2_000, marks=pytest.mark.full)]
PAYLOADS = 150

VARINTS = {Field.TYPE_INT32, Field.TYPE_INT64, Field.TYPE_UINT32, Field.TYPE_UINT64,
           Field.TYPE_SINT32, Field.TYPE_SINT64, Field.TYPE_BOOL, Field.TYPE_ENUM}  # fmt: skip
FOURS = {Field.TYPE_FLOAT, Field.TYPE_FIXED32, Field.TYPE_SFIXED32}
EIGHTS = {Field.TYPE_DOUBLE, Field.TYPE_FIXED64, Field.TYPE_SFIXED64}
SCALARS = sorted(VARINTS | FOURS | EIGHTS | {Field.TYPE_STRING, Field.TYPE_BYTES})
KEYS = sorted(set(SCALARS) - EIGHTS - FOURS - {Field.TYPE_ENUM, Field.TYPE_BYTES})
NUMBERS = [0, 1, 2, 3, 7, 127, 128, 300, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
TEXTS = [b"", b"a", "größe \U0001f300".encode(), b"plain ascii text of some length", b"\xff",
         b"a\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80"]  # fmt: skip


# --- descriptors ----------------------------------------------------------------------------


class Schema:
    """Random messages, by one of the three syntaxes, in two files; one imports the other."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.syntax = source.choice(["proto2", "proto3", "editions"])
        self.files = []
        self.messages: list[tuple[str, Any]] = []
        for name in ("a", "b"):
            file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package=name)
            file.syntax = self.syntax
            if self.syntax == "editions":
                file.edition = descriptor_pb2.EDITION_2023
                features = file.options.features
                features.field_presence = source.choice([1, 2])
                features.enum_type = 1
                features.utf8_validation = source.choice([2, 3])
                features.message_encoding = source.choice([1, 2])
            if name == "b":
                file.dependency.append("a.proto")
            self._fill(file)
            self.files.append(file)

    def _fill(self, file: Any) -> None:
        is_closed = self.syntax == "proto2"
        kind = file.enum_type.add(name="Kind")
        kind.options.allow_alias = True
        first = self.source.choice([0, 1, 5]) if is_closed else 0
        for name, number in (("FIRST", first), ("TWO", 2), ("NEGATIVE", -3), ("ALSO_TWO", 2)):
            kind.value.add(name=f"{file.package}_{name}", number=number)
        for index in range(self.source.randint(1, 4)):
            message = file.message_type.add(name=f"M{index}")
            self.messages.append((f".{file.package}.M{index}", message))
            self._add_fields(file, message, f".{file.package}.M{index}")
        if self.syntax != "proto3" and self.source.random() < 0.5:
            name, extended = self.source.choice(self.messages)
            if name.startswith(f".{file.package}."):
                extended.extension_range.add(start=200, end=300)
                extension = file.extension.add(name="more", number=250, extendee=name)
                self._type(file, extension, self.source.choice([Field.TYPE_MESSAGE, *SCALARS]))
                extension.label = self.source.choice([1, 3])

    def _type(self, file: Any, field: Any, kind: int) -> None:
        field.type = kind
        if kind in {Field.TYPE_MESSAGE, Field.TYPE_GROUP}:
            field.type_name = self.source.choice(self.messages)[0]
        elif kind == Field.TYPE_ENUM:
            field.type_name = f".{file.package}.Kind"

    def _add_fields(self, file: Any, message: Any, full_name: str) -> None:
        source = self.source
        numbers = source.sample([*range(1, 20), 100, 2047, 2**29 - 1], source.randint(1, 8))
        if source.random() < 0.4:
            message.oneof_decl.add(name="choice")
        for number in numbers:
            field = message.field.add(name=f"f{number}", number=number, label=1)
            kinds = [*SCALARS, *[Field.TYPE_MESSAGE] * 6]
            if self.syntax == "proto2":
                kinds += [Field.TYPE_GROUP] * 2
            self._type(file, field, source.choice(kinds))
            match source.randrange(8):
                case 0 | 1:
                    field.label = 3
                case 2 if self.syntax == "proto2":
                    field.label = 2
                case 3 if self.syntax == "proto3":
                    field.proto3_optional = True
                case 4 | 5 if message.oneof_decl:
                    field.oneof_index = 0
                case 6:
                    self._make_map(file, message, field, full_name)
        if message.oneof_decl and not any(each.HasField("oneof_index") for each in message.field):
            del message.oneof_decl[:]
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")

    def _make_map(self, file: Any, message: Any, field: Any, full_name: str) -> None:
        name = f"F{field.number}Entry"
        entry = message.nested_type.add(name=name)
        entry.options.map_entry = True
        key = entry.field.add(name="key", number=1, label=1)
        key.type = self.source.choice(KEYS)
        value = entry.field.add(name="value", number=2, label=1)
        kinds = [*SCALARS, *[Field.TYPE_MESSAGE] * 4]
        if file.enum_type[0].value[0].number:  # such an enum is not allowed in a map
            kinds.remove(Field.TYPE_ENUM)
        self._type(file, value, self.source.choice(kinds))
        field.label, field.type = 3, Field.TYPE_MESSAGE
        field.type_name = f"{full_name}.{name}"


# --- payloads -------------------------------------------------------------------------------


def varint(value: int, least: int = 0) -> bytes:
    """Write a number, in more bytes than it needs if `least` says so."""
    value &= 2**64 - 1
    found = bytearray()
    while value >= 0x80 or len(found) + 1 < least:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


class Writer:
    """Writes what a descriptor allows, and a little that it does not."""

    def __init__(self, source: random.Random, oddity: float) -> None:
        self.source = source
        self.oddity = oddity

    def message(self, descriptor: Any, depth: int = 0) -> bytes:
        source = self.source
        fields = [*descriptor.fields, *descriptor.file.pool.FindAllExtensions(descriptor)]
        found = []
        if source.random() < 0.7:
            found += [self.field(each, depth) for each in fields if each.is_required]
        for _ in range(source.randrange(2 if depth > 4 else 6)):
            if source.random() < self.oddity:
                found.append(self.odd(source.choice([1, 2, 3, 15, 16, 5_000, 2**29 - 1])))
            elif fields:
                found.append(self.field(source.choice(fields), depth))
        return b"".join(found)

    def field(self, field: Any, depth: int) -> bytes:
        wire, value = self.value(field, depth)
        if field.is_repeated and wire in {0, 1, 5} and self.source.random() < 0.5:
            values = [
                value,
                *(self.value(field, depth)[1] for _ in range(self.source.randrange(3))),
            ]
            wire, value = 2, self.sized(b"".join(values[: self.source.randrange(4)]))
        value += varint(field.number << 3 | 4) if wire == 3 else b""
        return self.tag(field.number, wire) + value

    def value(self, field: Any, depth: int) -> tuple[int, bytes]:
        source = self.source
        if field.type in VARINTS:
            return 0, varint(source.choice(NUMBERS), source.choice([0, 0, 0, 5, 10]))
        if field.type in FOURS:
            return 5, source.choice([struct.pack("<f", 1.5), source.randbytes(4)])
        if field.type in EIGHTS:
            return 1, source.choice([struct.pack("<d", -0.0), source.randbytes(8)])
        if field.message_type is not None:
            inner = self.message(field.message_type, depth + 1) if depth < 8 else b""
            return (3, inner) if field.type == Field.TYPE_GROUP else (2, self.sized(inner))
        good = TEXTS[:4] if source.random() > self.oddity else TEXTS
        return 2, self.sized(source.choice(good))

    def sized(self, value: bytes) -> bytes:
        return varint(len(value), 5 if self.source.random() < self.oddity / 4 else 0) + value

    def tag(self, number: int, wire: int) -> bytes:
        return varint(number << 3 | wire, self.source.choice([0, 0, 0, 0, 0, 0, 3, 5]))

    def odd(self, number: int, depth: int = 0) -> bytes:
        """Return a field that may be unknown, of another wire type, or none at all."""
        source = self.source
        match source.randrange(12):
            case 0 | 1:
                return self.tag(number, 0) + varint(source.choice(NUMBERS))
            case 2:
                return self.tag(number, 1) + source.randbytes(8)
            case 3 | 4:
                return self.tag(number, 2) + self.sized(source.choice(TEXTS))
            case 5:
                return self.tag(number, 5) + source.randbytes(4)
            case 6 | 7 if depth < 4:
                inner = b"".join(self.odd(source.randint(1, 9), depth + 1) for _ in range(2))
                return self.tag(number, 3) + inner + varint(number << 3 | 4)
            case 8:  # too long, or as long as can be
                return (
                    self.tag(number, 0) + b"\xff" * 9 + source.choice([b"\x01", b"\x7f", b"\x80\0"])
                )
            case 9:
                return varint(source.choice([number, 0]) << 3 | source.choice([4, 6, 7, 0, 3]))
            case 10:
                return varint(source.choice([2**32, 2**35, number << 3]), 6)
            case _:
                return self.tag(number, 2) + varint(source.choice([1, 100, 2**31, 2**32 + 1]))


def damaged(source: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    match source.randrange(4):
        case 0:
            del data[source.randrange(len(data) + 1) :]
        case 1 if data:
            data[source.randrange(len(data))] = source.randrange(256)
        case 2:
            at = source.randrange(len(data) + 1)
            del data[at : at + source.randint(1, 3)]
        case _:
            at = source.randrange(len(data) + 1)
            data[at:at] = source.randbytes(source.randint(1, 3))
    return bytes(data)


def deep(number: int, levels: int, *, is_group: bool = False) -> bytes:
    """Return a message with itself inside."""
    payload = b""
    for _ in range(levels):
        if is_group:
            payload = varint(number << 3 | 3) + payload + varint(number << 3 | 4)
        else:
            payload = varint(number << 3 | 2) + varint(len(payload)) + payload
    return payload


# --- comparing ------------------------------------------------------------------------------


def compare(decoder: Any, kind: Any, fields: list[str], payloads: list[bytes]) -> tuple[int, int]:
    """Decode payloads, compare each with the library, and return how many became what."""
    decoded = checked(decoder.decode(batch_of(payloads)), len(payloads))
    origin = range(len(payloads)) if decoded.origin is None else decoded.origin.tolist()
    rows = dict(zip(origin, decoded.rows.to_pylist(), strict=True))
    reasons = {each.row: each.reason for each in decoded.failures}
    for place, payload in enumerate(payloads):
        try:
            expected: Any = references.message_row(payload, kind, fields)
        except Fails:
            expected = None
        if expected is None:
            assert place in reasons, (payload, rows[place])
            continue
        assert place in rows, (payload, reasons[place], expected)
        assert references.is_same(rows[place], expected), (payload, rows[place], expected)
    return len(rows), len(reasons)


def columns_of(schema: Schema, descriptors: bytes, name: str) -> tuple[Any, list[str]] | None:
    """Return a decoder of as many fields as can be columns, or some of them."""
    message = next(each for path, each in schema.messages if path == f".{name}")
    names = []
    for field in message.field:
        try:
            decoder_for(format="protobuf", descriptor_set=descriptors, message=name,
                        fields=[field.name])  # fmt: skip
        except InvalidOption:
            continue
        names.append(field.name)
    if not names:
        return None
    if schema.source.random() < 0.5:
        names = schema.source.sample(names, schema.source.randint(1, len(names)))
    return decoder_for(
        format="protobuf", descriptor_set=descriptors, message=name, fields=names
    ), names


@pytest.mark.parametrize("count", SCHEMAS)
def test_fuzz_random_messages_are_read_as_the_library_reads_them(count: int) -> None:
    good = bad = 0
    for seed in range(count):
        source = random.Random(seed)
        schema = Schema(source)
        pool = descriptor_pool.DescriptorPool()
        for file in schema.files:
            pool.Add(file)
        descriptors = descriptor_pb2.FileDescriptorSet(file=schema.files).SerializeToString()
        for path, _ in schema.messages:
            name = path[1:]
            found = columns_of(schema, descriptors, name)
            if found is None:
                continue
            decoder, fields = found
            kind = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
            writer = Writer(source, source.choice([0, 0.05, 0.3]))
            payloads = [writer.message(kind.DESCRIPTOR) for _ in range(PAYLOADS // 3)]
            payloads += [damaged(source, source.choice(payloads)) for _ in range(PAYLOADS // 6)]
            more, less = compare(decoder, kind, fields, payloads)
            good += more
            bad += less
    assert good > bad > good / 20


@pytest.mark.parametrize("write", [deep, lambda *given: deep(*given, is_group=True)],
                         ids=["messages", "groups"])  # fmt: skip
@pytest.mark.parametrize("number", [2, 9], ids=["known", "unknown"])
def test_messages_may_be_nested_100_deep_as_in_the_library(
    write: Callable[[int, int], bytes], number: int
) -> None:
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package="t", syntax="proto2")
    tree = file.message_type.add(name="Tree")
    tree.field.add(name="value", number=1, type=Field.TYPE_INT32, label=1)
    kind = Field.TYPE_MESSAGE if write is deep else Field.TYPE_GROUP
    tree.field.add(name="left", number=2, type=kind, label=1, type_name=".t.Tree")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    tree_class = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Tree"))
    descriptors = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    decoder = decoder_for(
        format="protobuf", descriptor_set=descriptors, message="t.Tree", fields=["value"]
    )
    payloads = [write(number, levels) for levels in (1, 98, 99, 100, 101, 102, 5_000)]
    good, bad = compare(decoder, tree_class, ["value"], payloads)
    assert good + bad == len(payloads)
    assert good >= 4
