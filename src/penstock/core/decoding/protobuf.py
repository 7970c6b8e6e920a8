"""How do payloads that are protobuf messages become columns?

The protobuf library reads the descriptors, and this module compiles them to a plan. `_protobuf.c`
parses all messages of a batch by that plan.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from penstock.core.decoding._protobuf import Plan
from penstock.core.decoding.decoder import Decoder, Failure, Part, too_many_values
from penstock.core.decoding.schema import filled_list
from penstock.core.errors import InvalidOption, Unsupported
from penstock.core.options import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ProtobufDecoder", "find_message", "message_names"]

#: Field types, by their numbers in descriptor.proto.
_KINDS: Final = {
    1: pa.float64(),
    2: pa.float32(),
    **dict.fromkeys((3, 16, 18), pa.int64()),  # INT64, SFIXED64, SINT64
    **dict.fromkeys((5, 15, 17), pa.int32()),  # INT32, SFIXED32, SINT32
    **dict.fromkeys((7, 13), pa.int64()),  # FIXED32, UINT32
    **dict.fromkeys((4, 6), pa.decimal128(20, 0)),  # UINT64, FIXED64
    8: pa.bool_(),
    9: pa.string(),
    12: pa.binary(),
    14: pa.string(),  # ENUM
}
_STRING, _GROUP, _MESSAGE, _LIST = 9, 10, 11, 19
_REPEATED, _REQUIRED, _UTF8, _CLOSED, _MAP = 1, 2, 4, 8, 16
_NULLABLE, _UNCHECKED = 1, 2

#: Limit of columns: a few messages, each twice inside the next, make millions of columns.
_MOST_COLUMNS: Final = 10_000
#: Nesting limit of messages, in a payload and so in a column.
_DEEPEST: Final = 100

_CHOOSE: Final = "name the fields that are wanted: fields: [a, b]"

#: Errors of `_protobuf.c`, by number.
_FINDINGS: Final = {
    1: "the end inside of a field",
    2: "a number of too many bytes",
    3: "a field without a number, or of no wire type",
    4: "the end of a group that did not begin",
    5: f"more than {_DEEPEST} messages inside of each other",
    6: "text that is not UTF-8",
    7: "none of the required",
}
_MISSING, _TOO_LARGE = 7, 8


class ProtobufDecoder(Decoder):
    """Parses payloads by a descriptor set of `protoc`, without a Python object per message."""

    format: ClassVar[str] = "protobuf"

    def __init__(
        self,
        descriptors: bytes,
        message: str,
        fields: Sequence[str] | None,
        prefix: str,
        *,
        max_size: int,
    ) -> None:
        """Look up the message.

        :raises Unsupported: the protobuf library is not installed.
        :raises InvalidOption: the message or field does not exist, or cannot become a column.
        """
        self._descriptors = descriptors
        self._message = message
        self._fields = None if fields is None else tuple(fields)
        self._max_size = max_size
        super().__init__(pa.schema(list(self._build())), prefix)

    def __getstate__(self) -> dict[str, Any]:
        # A plan is memory of this process; a task compiles its own.
        left_out = {"_plan", "_names"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._build()

    def _build(self) -> pa.StructType:
        """Compile the plan, and return the columns as a struct type."""
        descriptor = find_message(self._descriptors, self._message)
        known = descriptor.fields_by_name
        if not known:
            raise InvalidOption("message", self._message, "has no fields")
        for name in self._fields or ():
            if name not in known:
                hint = nearest(name, known, "its fields")
                raise InvalidOption("fields", name, f"{self._message} has no such field", hint=hint)
        tables = _Tables(descriptor)
        kind = tables.add_struct(descriptor, self._fields or list(known))
        self._plan = tables.plan()
        self._names = [each.removeprefix(f"{self._message}.") for each in tables.field_names]
        return kind

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        _, offsets, data = payloads.buffers()
        try:
            array, failed = self._plan.parse(
                offsets or bytes(8), data or b"", payloads.offset, len(payloads), self._max_size
            )
        except OverflowError:
            raise too_many_values("more") from None
        rows = pa.array(_Exported(pa.struct(list(self._plain)), array))
        failures = [self._failure(payloads, *each) for each in failed]
        origin = None
        if failures:
            is_good = np.ones(len(payloads), np.bool_)
            is_good[[each.row for each in failures]] = False
            origin = np.flatnonzero(is_good)
        return Part(rows.flatten(), origin, failures)

    def _failure(self, payloads: pa.LargeBinaryArray, row: int, error: int, field: int) -> Failure:
        if error == _TOO_LARGE:
            size = payloads[row].as_buffer().size
            return Failure(row, f"at most {self._max_size:,} bytes", f"{size:,} bytes")
        found = _FINDINGS[error]
        if field >= 0:
            found += f" {self._names[field]}" if error == _MISSING else f" in {self._names[field]}"
        return Failure(row, f"a message {self._message}", found)


class _Exported:
    """An array from C, in Arrow's C data interface."""

    def __init__(self, kind: pa.DataType, array: Any) -> None:
        self._kind = kind
        self._array = array

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[Any, Any]:
        return self._kind.__arrow_c_schema__(), self._array


# --- descriptors -----------------------------------------------------------------------------


def find_message(descriptors: bytes, name: str) -> Any:
    """Return the descriptor of a message of a descriptor set.

    :raises Unsupported: the protobuf library is not installed.
    :raises InvalidOption: the message does not exist, or the set is not valid.
    """
    pool, known = _known(descriptors)
    try:
        return pool.FindMessageTypeByName(name)
    except KeyError:
        if name in known:
            raise _bad_set("lacks what it imports") from None
        hint = nearest(name, known, "messages")
        raise InvalidOption("message", name, "there is no such message", hint=hint) from None
    except TypeError as error:
        raise _bad_set(f"does not fit together: {error}") from None


def message_names(descriptors: bytes) -> tuple[str, ...]:
    """Return the full names of all messages of a descriptor set.

    :raises Unsupported: the protobuf library is not installed.
    :raises InvalidOption: the set is not valid, or inconsistent.
    """
    return _known(descriptors)[1]


def _known(descriptors: bytes) -> tuple[Any, tuple[str, ...]]:
    try:
        return _pool(descriptors)
    except ImportError as error:
        raise Unsupported(
            "decoding protobuf needs the protobuf library", hint="pip install 'penstock[protobuf]'"
        ) from error


@lru_cache(maxsize=16)
def _pool(descriptors: bytes) -> tuple[Any, tuple[str, ...]]:
    """Return the pool of a set, and its message names; shared by decoders of the same set."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message  # noqa: PLC0415 - an extra

    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
    except message.DecodeError:
        raise _bad_set("is not a descriptor set") from None
    if not files:
        raise _bad_set("has no files")
    pool = descriptor_pool.DescriptorPool()
    by_name = {file.name: file for file in files}
    try:
        # Imported files first, whatever their order in the set.
        imports = {file.name: file.dependency for file in files}
        for name in TopologicalSorter(imports).static_order():
            if name in by_name:
                pool.Add(by_name[name])
    except (TypeError, CycleError) as error:
        raise _bad_set(f"does not fit together: {error}") from None
    names = (each for file in files for each in _names(file.package, file.message_type))
    return pool, tuple(names)


def _bad_set(reason: str) -> InvalidOption:
    hint = "make it with protoc --include_imports --descriptor_set_out=FILE …"
    return InvalidOption("descriptor_set", "…", reason, hint=hint)


def _names(package: str, messages: Any) -> Iterator[str]:
    for message in messages:
        name = f"{package}.{message.name}" if package else message.name
        yield name
        yield from _names(name, message.nested_type)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _checks_text(field: Any) -> bool:
    """Tell whether the library checks the field's text for UTF-8: not in proto2."""
    from google.protobuf import message, message_factory  # noqa: PLC0415 - an extra

    tag, key = field.number << 3 | 2, bytearray()
    while tag >= 0x80:  # noqa: PLR2004 - seven bits a byte
        key.append(tag & 0x7F | 0x80)
        tag >>= 7
    try:
        kind = message_factory.GetMessageClass(field.containing_type)
        kind.FromString(bytes([*key, tag, 1, 0xFF]))
    except message.DecodeError:
        return True
    return False


# --- the plan --------------------------------------------------------------------------------


class _Tables:
    """The tables of a plan: rows of numbers, as `_protobuf.c` declares them."""

    def __init__(self, root: Any) -> None:
        """Add every message that a payload can contain: fields without a column are parsed, too.

        :raises InvalidOption: a message has an unsupported wire format.
        """
        self.field_names: list[str] = []
        self._root = root.full_name
        self._types = array("i")
        self._fields = array("i")
        self._enums = array("i")
        self._values = array("i")
        self._columns = array("i")
        self._names = bytearray()
        self._enum_places: dict[str, int] = {}
        #: Of each field: its index in its message, and whether parsing checks its text.
        self._slots: dict[str, tuple[int, bool]] = {}
        messages = _reachable(root)
        self._places = {message.full_name: i for i, message in enumerate(messages)}
        deep = _deep(messages)
        for message in messages:
            fields = _fields_of(message)
            row = [
                len(self.field_names),
                len(fields),
                len(message.oneofs),
                message.full_name in deep,
            ]
            self._types.extend(row)
            for slot, field in enumerate(fields):
                self._add_field(field, slot)

    def plan(self) -> Plan:
        return Plan(
            self._types.tobytes(),
            self._fields.tobytes(),
            self._enums.tobytes(),
            self._values.tobytes(),
            self._columns.tobytes(),
            bytes(self._names),
        )

    def _add_field(self, field: Any, slot: int) -> None:
        flags = _REPEATED * field.is_repeated | _REQUIRED * field.is_required
        flags |= _MAP * _is_map(field)
        is_checked = field.type != _STRING or _checks_text(field)
        flags |= _UTF8 * (field.type == _STRING and is_checked)
        inner = -1
        if field.message_type is not None:
            inner = self._places[field.message_type.full_name]
        elif field.enum_type is not None:
            inner = self._enum(field.enum_type)
            flags |= _CLOSED * field.enum_type.is_closed
        oneof = -1 if field.containing_oneof is None else field.containing_oneof.index
        self._fields.extend([field.number, field.type, flags, inner, oneof])
        self._slots[field.full_name] = slot, is_checked
        self.field_names.append(field.full_name)

    def _enum(self, enum: Any) -> int:
        place = self._enum_places.get(enum.full_name)
        if place is None:
            place = self._enum_places[enum.full_name] = len(self._enum_places)
            # The first of several names for a number, as protobuf's own JSON has it.
            names = {each.number: each.name.encode() for each in reversed(enum.values)}
            self._enums.extend([len(self._values) // 3, len(names)])
            for number, name in sorted(names.items()):
                self._values.extend([number, len(self._names), len(name)])
                self._names += name
        return place

    # --- columns: each with its flags, which its parent's depend on

    def add_struct(self, root: Any, names: Sequence[str]) -> pa.StructType:
        """Add the columns of a row, and return their type.

        :raises InvalidOption: a field cannot become a column.
        """
        fields = [root.fields_by_name[name] for name in names]
        return self._add_fields(fields, 0, 0, (root.full_name,))[0]

    def _add_row(self, kind: int, flags: int, slot: int, inner: int, children: int) -> int:
        if len(self._columns) >= 5 * _MOST_COLUMNS:
            reason = f"would become more than {_MOST_COLUMNS:,} columns"
            raise InvalidOption("fields", self._root, reason, hint=_CHOOSE)
        self._columns.extend([kind, flags, slot, inner, children])
        return len(self._columns) - 4  # where the flags are

    def _add_fields(
        self, fields: Sequence[Any], flags: int, slot: int, inside: tuple[str, ...]
    ) -> tuple[pa.StructType, int]:
        place = self._add_row(_MESSAGE, flags, slot, -1, len(fields))
        columns, unchecked = [], 0
        for field in fields:
            kind, found = self._add(field, inside)
            columns.append((field.name, kind))
            unchecked |= found
        self._columns[place] |= unchecked
        return pa.struct(columns), unchecked

    def _add(self, field: Any, inside: tuple[str, ...]) -> tuple[pa.DataType, int]:
        slot = self._slots[field.full_name][0]
        if not field.is_repeated:
            # In an entry of a map nothing is null.
            has_presence = field.has_presence and not field.containing_type.GetOptions().map_entry
            return self._add_one(field, _NULLABLE * has_presence, slot, inside)
        place = self._add_row(_LIST, 0, slot, -1, 1)
        if _is_map(field):
            entry, unchecked = self._add_fields(field.message_type.fields, 0, 0, inside)
            kind: pa.DataType = pa.map_(entry[0].type, entry[1].type)
        else:
            one, unchecked = self._add_one(field, 0, 0, inside)
            kind = filled_list(one)
        self._columns[place] |= unchecked
        return kind, unchecked

    def _add_one(
        self, field: Any, flags: int, slot: int, inside: tuple[str, ...]
    ) -> tuple[pa.DataType, int]:
        message = field.message_type
        if message is None:
            unchecked = 0 if self._slots[field.full_name][1] else _UNCHECKED
            inner = -1 if field.enum_type is None else self._enum(field.enum_type)
            self._add_row(field.type, flags | unchecked, slot, inner, 0)
            return _KINDS[field.type], unchecked
        reason = None
        if message.full_name in inside:
            reason = f"{message.full_name} has itself inside, which no column can"
        elif len(inside) > _DEEPEST:
            reason = f"there are more than {_DEEPEST} messages inside of each other"
        elif not message.fields:
            reason = f"{message.full_name} has no fields"
        if reason is not None:
            raise InvalidOption("fields", field.full_name, reason, hint=_CHOOSE)
        return self._add_fields(message.fields, flags, slot, (*inside, message.full_name))


def _fields_of(message: Any) -> list[Any]:
    """Return the fields of a message, and its known extensions."""
    more = message.file.pool.FindAllExtensions(message)
    return sorted([*message.fields, *more], key=lambda field: field.number)


def _reachable(root: Any) -> list[Any]:
    """Return a message and all messages that it can contain, each once."""
    found = {root.full_name: root}
    for message in (waiting := [root]):
        if message.GetOptions().message_set_wire_format:
            reason = f"{message.full_name} is a message set, which is not read"
            raise InvalidOption("message", root.full_name, reason)
        for field in _fields_of(message):
            inner = field.message_type
            if inner is not None and inner.full_name not in found:
                found[inner.full_name] = inner
                waiting.append(inner)
    return waiting


def _deep(messages: Sequence[Any]) -> set[str]:
    """Return the messages with required fields or maps, at any depth."""
    parents: dict[str, list[str]] = {}
    waiting = []
    for message in messages:
        fields = _fields_of(message)
        if any(field.is_required or _is_map(field) for field in fields):
            waiting.append(message.full_name)
        for field in fields:
            if field.message_type is not None:
                parents.setdefault(field.message_type.full_name, []).append(message.full_name)
    found = set(waiting)
    for name in waiting:
        for parent in parents.get(name, ()):
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found
