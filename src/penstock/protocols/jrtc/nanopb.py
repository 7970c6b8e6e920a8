"""Which C struct does nanopb generate for a protobuf message?

It has a fixed size, so the lengths of texts, bytes and arrays are bounded by nanopb's options, in a
file beside the .proto or in the .proto itself.
"""

from __future__ import annotations

import ctypes
import re
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
#: Those that int_size makes smaller or larger: nanopb leaves numbers of a fixed size as they are.
_SIZED: Final = frozenset({3, 4, 5, 13, 17, 18})
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
    3: "type",
    5: "packed_struct",
    7: "int_size",
    8: "no_unions",
    10: "packed_enum",
    12: "proto3",
    14: "max_length",
    15: "fixed_length",
    16: "fixed_count",
    21: "proto3_singular_msgs",
    22: "submsg_callback",
    27: "type_override",
    28: "sort_by_tag",
    31: "label_override",
    34: "enum_intsize",
    35: "discard_deprecated",
}
#: Those of them that make another struct than is known here, except with these values.
_STRANGE: Final = {
    "type": {0, 2},
    "packed_struct": {0},
    "proto3": set[int](),
    "type_override": set[int](),
    "label_override": set[int](),
}
_STRANGE_OF_ONEOFS: Final = {"no_unions": {0}, "type": {0, 1, 2, 4, 5}}
_STRANGE_OF_MESSAGES: Final = {"submsg_callback": {0}}
_STRANGE_OF_ENUMS: Final = {"packed_enum": {0}, "enum_intsize": {0}}
_STRANGE_OF_DEPRECATED: Final = {"discard_deprecated": {0}}
#: Where a .proto has them.
_EXTENSION: Final = 1010
#: What a value may be, beside a number; others are names of types and labels.
_WORDS: Final = {
    **dict.fromkeys(("true", "True", "t"), 1),
    **dict.fromkeys(("false", "False", "f"), 0),
    "IS_DEFAULT": 0,
    "IS_8": 8,
    "IS_16": 16,
    "IS_32": 32,
    "IS_64": 64,
    "FT_DEFAULT": 0,
    "FT_CALLBACK": 1,
    "FT_STATIC": 2,
    "FT_IGNORE": 3,
    "FT_POINTER": 4,
    "FT_INLINE": 5,
}
_NAMED: Final = re.compile("(?:TYPE|LABEL)_[A-Z0-9]+")
#: Of a file of options: comments, and options as in protobuf's text format.
_TEXT: Final = r"""(?P<text>"[^"\n]*"|'[^'\n]*')"""
_COMMENT: Final = re.compile(rf"{_TEXT}|/\*.*?(?:\*/|\Z)|//[^\n]*|#[^\n]*", re.DOTALL)
_OPTION: Final = re.compile(rf"(?P<name>[A-Za-z_]\w*)\s*:\s*(?:{_TEXT}|(?P<value>[^\s,;]*))")
#: Structs are elements of a queue; a larger one is a mistake in its limits.
_LARGEST: Final = 1 << 20
_DEEPEST: Final = 32
_LARGEST_OPTIONS: Final = 1 << 20


@dataclass(frozen=True)
class Nanopb:
    """The struct that nanopb generates for a message.

    :param limits: options of fields, later ones over earlier: `{"status.status": {"max_size": 32}}`
        for the field `status` of the message `status`; the name may have wildcards. What the .proto
        itself says holds before them, as in nanopb.
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
        text = _COMMENT.sub(lambda it: it["text"] or "\n" * it[0].count("\n"), text)
        for number, line in enumerate(text.split("\n"), 1):
            name, _, options = line.strip().replace("\t", " ").partition(" ")
            for option in _OPTION.finditer(options):
                if (key := option["name"]) not in _OPTIONS.values():
                    continue  # about names in C, and the like
                value = _number(option["value"] or "")
                if value is None:
                    where, found = f"line {number}, {key}", repr(option["value"])
                    raise Malformed(f"options {path}", where, "a number", found)
                limits.setdefault(name, {})[key] = value
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
        if descriptor.is_extendable:
            raise _unfit(descriptor, "has extensions, for which its struct has a pointer")
        inside = (*inside, descriptor.full_name)
        members: list[tuple[str, Any]] = []
        done: set[str] = set()
        for each in self._in_order(descriptor, descriptor.fields):
            oneof = _oneof_of(each)
            if oneof is None:
                members += self._members(each, inside)
            elif oneof.name not in done:
                done.add(oneof.name)
                members += self._oneof(oneof, inside)
            self._check_size(descriptor, members)
        members = members or [("dummy_field", ctypes.c_char)]
        struct: type[ctypes.Structure] = _make(ctypes.Structure, descriptor.name, members)
        self._made[descriptor.full_name] = struct
        return struct

    def _in_order(self, descriptor: Any, fields: Sequence[Any]) -> Sequence[Any]:
        """Return fields of a message by their numbers, or as they are in the .proto."""
        is_sorted = self._of_scopes(descriptor.file, descriptor).get("sort_by_tag", 1)
        return sorted(fields, key=lambda each: each.number) if is_sorted else fields

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
            has = _is_optional(each)
        return [(f"has_{each.name}", ctypes.c_bool)] * has + [(each.name, kind)]

    def _oneof(self, oneof: Any, inside: tuple[str, ...]) -> list[tuple[str, Any]]:
        # Also of an anonymous union: its members have the same places.
        members = [
            (each.name, self._kind(each, self._options(each), inside))
            for each in self._in_order(oneof.containing_type, oneof.fields)
        ]
        union = _make(ctypes.Union, oneof.name, members)
        return [(f"which_{oneof.name}", self._size), (oneof.name, union)]

    def _kind(self, each: Any, options: Mapping[str, int], inside: tuple[str, ...]) -> Any:
        if each.type in _NUMBERS:
            if each.type not in _SIZED or not options.get("int_size"):
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
        """Return the options of a field: those of its file, of its message, and its own.

        :raises InvalidOption: one of them makes another struct than is known here.
        """
        options = self._of_scopes(each.file, each.containing_type, each)
        _refuse(each, options, _STRANGE)
        if each.type == _MESSAGE:
            _refuse(each, options, _STRANGE_OF_MESSAGES)
        if (oneof := _oneof_of(each)) is not None:
            _refuse(each, options | self._given(oneof), _STRANGE_OF_ONEOFS)
        if each.type == _ENUM:
            of_enum = self._of_scopes(each.enum_type.file, each.enum_type)
            _refuse(each, options | of_enum, _STRANGE_OF_ENUMS)
        if each.GetOptions().deprecated:
            _refuse(each, options, _STRANGE_OF_DEPRECATED)
        return options

    def _of_scopes(self, *scopes: Any) -> dict[str, int]:
        options: dict[str, int] = {}
        for scope in scopes:
            options |= self._given(scope) | _embedded(scope)
        return options

    def _given(self, scope: Any) -> dict[str, int]:
        """Return the options whose pattern has the name of a file, a message or a field."""
        full_name = scope.full_name if hasattr(scope, "full_name") else _file_name(scope)
        owner = getattr(scope, "containing_type", None) or scope  # a oneof does not have its file
        package = getattr(owner, "file", owner).package
        names = {full_name, full_name.removeprefix(f"{package}.")}
        found: dict[str, int] = {}
        for pattern, given in self._limits.items():
            if any(fnmatchcase(name, pattern) for name in names):
                found |= given
        return found

    def _check_size(self, descriptor: Any, members: Sequence[tuple[str, Any]]) -> None:
        # As it grows: a few messages that are each inside of the next twice are gigabytes.
        if sum(ctypes.sizeof(kind) for _, kind in members) > _LARGEST:
            raise _unfit(descriptor, f"would be larger than {_LARGEST:,} bytes")


def _file_name(file: Any) -> str:
    try:
        return str(file.name)
    except UnicodeDecodeError:  # nobody looks at it but this
        return ""


def _oneof_of(each: Any) -> Any:
    """Return the oneof of a field, or None; that of a proto3 `optional` is none."""
    oneof = each.containing_oneof
    is_made = oneof is not None and len(oneof.fields) == 1 and oneof.name == f"_{each.name}"
    return None if is_made else oneof


def _is_optional(each: Any) -> bool:
    """Tell whether the .proto says `optional` of a field that is not repeated or required."""
    from google.protobuf import descriptor_pb2  # noqa: PLC0415 - an extra

    file, message = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.DescriptorProto()
    each.file.CopyToProto(file)
    each.containing_type.CopyToProto(message)
    is_said = any(one.proto3_optional for one in message.field if one.number == each.number)
    return (is_said or file.syntax != "proto3") and not each.is_required


def _number(text: str) -> int | None:
    """Return the value of an option; None: it is none. Names of types and labels are all alike."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return int(text, 0)
    except ValueError:
        return 0 if _NAMED.fullmatch(text) else None


def _refuse(each: Any, options: Mapping[str, int], strange: Mapping[str, set[int]]) -> None:
    for name, harmless in strange.items():
        if name in options and options[name] not in harmless:
            raise _unfit(each, f"has the option {name}, by which the struct is another one")


def _embedded(each: Any) -> dict[str, int]:
    """Return the nanopb options of a file, a message, an enum or a field in the .proto."""
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
