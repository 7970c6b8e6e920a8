"""Which C struct does nanopb generate for a protobuf message?

It has a fixed size, so the lengths of texts, bytes and arrays are bounded by nanopb's options, in a
file beside the .proto or in the .proto itself.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import InvalidOption, Malformed
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import Self

__all__ = ["Nanopb"]

#: Types of fields, by the numbers of descriptor.proto.
_NUMBERS: Final = {
    1: ctypes.c_double,
    2: ctypes.c_float,
    **dict.fromkeys((3, 16, 18), ctypes.c_int64),
    **dict.fromkeys((5, 15, 17), ctypes.c_int32),
    **dict.fromkeys((7, 13), ctypes.c_uint32),
    **dict.fromkeys((4, 6), ctypes.c_uint64),
    8: ctypes.c_bool,
}
_STRING, _GROUP, _MESSAGE, _BYTES, _ENUM = 9, 10, 11, 12, 14
_SIGNED: Final = frozenset({3, 5, 15, 16, 17, 18})
_BY_SIZE: Final = {
    8: (ctypes.c_uint8, ctypes.c_int8),
    16: (ctypes.c_uint16, ctypes.c_int16),
    32: (ctypes.c_uint32, ctypes.c_int32),
    64: (ctypes.c_uint64, ctypes.c_int64),
}
#: Options that change the struct, by their numbers in nanopb.proto.
_OPTIONS: Final = {
    1: "max_size",
    2: "max_count",
    7: "int_size",
    14: "max_length",
    15: "fixed_length",
    16: "fixed_count",
    21: "proto3_singular_msgs",
}
#: Where a .proto has them.
_EXTENSION: Final = 1010
_WORDS: Final = {"true": 1, "false": 0, "IS_8": 8, "IS_16": 16, "IS_32": 32, "IS_64": 64}
#: Structs are elements of a queue; a larger one is a mistake in its limits.
_LARGEST: Final = 1 << 20
_DEEPEST: Final = 32
_LARGEST_OPTIONS: Final = 1 << 20


@dataclass(frozen=True)
class Nanopb:
    """The struct that nanopb generates for a message.

    :param limits: options of fields, later ones over earlier: `{"status.status": {"max_size": 32}}`
        for the field `status` of the message `status`; the name may have wildcards. They come after
        what the .proto itself says.
    :param size_bytes: of a count, of a size and of what says which member a oneof has: 4 where
        PB_FIELD_32BIT is set, as jbpf-protobuf does, otherwise 2
    """

    limits: Mapping[str, Mapping[str, int]] = field(default_factory=dict, hash=False)
    size_bytes: int = 4

    @classmethod
    def from_options(cls, file: str | os.PathLike[str], size_bytes: int = 4) -> Self:
        """Read a file of options: `status.status max_size:100`, one field a line.

        :raises StorageError: the file cannot be read.
        :raises Malformed: a line is not understood.
        """
        path = Path(file)
        with storage_errors("reading", str(path)), path.open("rb") as source:
            text = source.read(_LARGEST_OPTIONS).decode(errors="replace")
        limits: dict[str, dict[str, int]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            name, *options = line.partition("#")[0].partition("//")[0].split()[:32] or [""]
            for option in options:
                key, _, value = option.partition(":")
                if key not in _OPTIONS.values():
                    continue  # about names in C, and the like
                if not value.isdecimal() and value not in _WORDS:
                    where = f"line {number}, {key}"
                    raise Malformed(f"options {path}", where, "a number", repr(value))
                limits.setdefault(name, {})[key] = _WORDS.get(value) or int(value)
        return cls(limits, size_bytes)

    def struct(self, descriptor: Any) -> type[ctypes.Structure]:
        """Return the struct of a message.

        :raises InvalidOption: a field has no bound, so the struct has no fixed size.
        """
        return _Layout(self).struct(descriptor, ())


class _Layout:
    """The structs of a message and its nested messages, each built once."""

    def __init__(self, given: Nanopb) -> None:
        self._limits = given.limits
        self._size = _BY_SIZE[8 * given.size_bytes][0]
        self._made: dict[str, type[ctypes.Structure]] = {}

    def struct(self, descriptor: Any, inside: tuple[str, ...]) -> type[ctypes.Structure]:
        known = self._made.get(descriptor.full_name)
        if known is not None:
            return known
        if descriptor.full_name in inside or len(inside) == _DEEPEST:
            raise _unfit(descriptor, "has itself inside, which no struct of a fixed size can")
        inside = (*inside, descriptor.full_name)
        members: list[tuple[str, Any]] = []
        done: set[str] = set()
        for each in sorted(descriptor.fields, key=lambda each: each.number):
            oneof = each.containing_oneof
            if oneof is None or (len(oneof.fields) == 1 and oneof.name == f"_{each.name}"):
                members += self._members(each, inside)
            elif oneof.name not in done:
                done.add(oneof.name)
                members += self._oneof(oneof, inside)
            self._check_size(descriptor, members)
        members = members or [("dummy_field", ctypes.c_char)]
        struct: type[ctypes.Structure] = _make(ctypes.Structure, descriptor.name, members)
        self._made[descriptor.full_name] = struct
        return struct

    def _members(self, each: Any, inside: tuple[str, ...]) -> list[tuple[str, Any]]:
        """Return the struct members of a field, with its presence flag or count."""
        options = self._options(each)
        kind = self._kind(each, options, inside)
        if each.is_repeated:
            count = options.get("max_count", 0)
            if not 0 < count <= _LARGEST:
                raise _unfit(each, "needs max_count: an array has no length otherwise")
            array = [(each.name, kind * count)]
            return (
                array
                if options.get("fixed_count")
                else [(f"{each.name}_count", self._size), *array]
            )
        has = each.has_presence and not each.is_required
        if each.type == _MESSAGE and options.get("proto3_singular_msgs"):
            has = False
        return [(f"has_{each.name}", ctypes.c_bool)] * has + [(each.name, kind)]

    def _oneof(self, oneof: Any, inside: tuple[str, ...]) -> list[tuple[str, Any]]:
        # Also of an anonymous union: its members have the same places.
        members = [
            (each.name, self._kind(each, self._options(each), inside))
            for each in sorted(oneof.fields, key=lambda each: each.number)
        ]
        union = _make(ctypes.Union, oneof.name, members)
        return [(f"which_{oneof.name}", self._size), (oneof.name, union)]

    def _kind(self, each: Any, options: Mapping[str, int], inside: tuple[str, ...]) -> Any:
        if each.type in _NUMBERS:
            if each.type in {1, 2, 8} or not options.get("int_size"):
                return _NUMBERS[each.type]
            return _BY_SIZE[options["int_size"]][each.type in _SIGNED]
        if each.type == _ENUM:
            has_negative = any(value.number < 0 for value in each.enum_type.values)
            return ctypes.c_int32 if has_negative else ctypes.c_uint32
        if each.type == _MESSAGE:
            return self.struct(each.message_type, inside)
        if each.type == _GROUP:
            raise _unfit(each, "is a group")
        size = options.get("max_size", 0)
        if each.type == _STRING and "max_length" in options:
            size = options["max_length"] + 1
        if not 0 < size <= _LARGEST:
            raise _unfit(each, "needs max_size: it has no length otherwise")
        if each.type == _STRING:
            return ctypes.c_char * size
        if options.get("fixed_length"):
            return ctypes.c_uint8 * size
        return _make(
            ctypes.Structure, each.name, [("size", self._size), ("bytes", ctypes.c_uint8 * size)]
        )

    def _options(self, each: Any) -> dict[str, int]:
        options = _embedded(each)
        package = each.file.package
        names = (each.full_name, each.full_name.removeprefix(f"{package}."))
        for pattern, given in self._limits.items():
            if any(fnmatchcase(name, pattern) for name in names):
                options |= given
        return options

    def _check_size(self, descriptor: Any, members: Sequence[tuple[str, Any]]) -> None:
        # As it grows: a few messages that are each inside of the next twice are gigabytes.
        if sum(ctypes.sizeof(kind) for _, kind in members) > _LARGEST:
            raise _unfit(descriptor, f"would be larger than {_LARGEST:,} bytes")


def _embedded(each: Any) -> dict[str, int]:
    """Return the nanopb options of a field in the .proto."""
    from google.protobuf import empty_pb2, unknown_fields  # noqa: PLC0415 - an extra

    found: dict[str, int] = {}
    raw = empty_pb2.Empty.FromString(each.GetOptions().SerializeToString())
    for option in unknown_fields.UnknownFieldSet(raw):
        if option.field_number == _EXTENSION and isinstance(option.data, bytes):
            inner = empty_pb2.Empty.FromString(option.data)
            for one in unknown_fields.UnknownFieldSet(inner):
                if one.field_number in _OPTIONS and isinstance(one.data, int):
                    found[_OPTIONS[one.field_number]] = one.data
    return found


def _make(base: type, name: str, members: Sequence[tuple[str, Any]]) -> Any:
    return type(str(name), (base,), {"_fields_": list(members)})


def _unfit(what: Any, reason: str) -> InvalidOption:
    hint = "give nanopb's options, or the struct itself"
    return InvalidOption("struct", what.full_name, reason, hint=hint)
