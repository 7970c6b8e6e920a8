"""How does a C struct become a protobuf message, and a message a struct?

By field names and nanopb's conventions: `has_x` beside an optional field, `x_count` beside an
array, `which_x` before the members of a oneof, zero-terminated texts. In bulk, in C.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.core.decoding.decoder import Failure
from penstock.core.errors import InvalidOption
from penstock.core.options import nearest
from penstock.protocols.jrtc._structs import Plan
from penstock.protocols.jrtc.nanopb import Nanopb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Nanopb", "Serialised", "StructCodec", "StructLike", "Structs"]

#: A struct: a ctypes structure, a numpy dtype with fields, or nanopb's layout of the message.
StructLike: TypeAlias = type[ctypes.Structure] | np.dtype[Any] | Nanopb

#: Types of fields, by the numbers of descriptor.proto.
_DOUBLE, _FLOAT, _BOOL, _STRING, _GROUP, _MESSAGE, _BYTES, _ENUM = 1, 2, 8, 9, 10, 11, 12, 14
_SIGNED: Final = frozenset({3, 5, 15, 16, 17, 18})
_BYTES_OF: Final = {
    **dict.fromkeys((3, 4, 6, 16, 18), 8),
    **dict.fromkeys((5, 7, 13, 14, 15, 17), 4),
}
#: When a field is there, as `_structs.c` numbers it.
_NOT_ZERO, _ALWAYS, _REQUIRED, _HAS, _WHICH, _COUNTED, _ALL = range(7)

#: What `_structs.c` found, by its numbers.
_FINDINGS: Final = {
    2: "more elements than there is room for",
    3: "more bytes than there is room for, or not as many as there have to be",
    4: "a text that does not end",
    5: "the end inside of a field",
    6: "a field without a number, or of no wire type",
    7: "a field of another wire type",
    8: "a number that does not fit the struct",
    9: "none of the required",
    10: "fewer elements than there have to be",
    11: "more messages inside of each other than the struct has",
    12: "a text with a zero byte inside",
}
_WRONG_SIZE: Final = 1
#: Bytes of a tag, and of a length or a number, at most.
_TAG: Final = 5
_VARINT: Final = 10
_MOST_FIELDS: Final = 1024
_MOST_TYPES: Final = 4096
_LARGEST: Final = 1 << 24


class Serialised(NamedTuple):
    """Serialised structs: one message each, empty where it failed."""

    payloads: pa.BinaryArray
    failures: Sequence[Failure]


class Structs(NamedTuple):
    """Deserialised messages: one struct each, zeros where it failed."""

    rows: NDArray[np.void]
    failures: Sequence[Failure]


class StructCodec:
    """Translates between the structs of one layout and one protobuf message.

    Fields match by name. A field that the struct lacks is never sent; a member that the message
    lacks is refused, unless its name begins with an underscore.
    """

    def __init__(self, descriptor: Any, struct: StructLike) -> None:
        """Match the fields of struct and message.

        :raises InvalidOption: a field does not match.
        """
        if isinstance(struct, Nanopb):
            struct = struct.struct(descriptor)
        #: The layout; texts are `S32` and the like, not arrays of characters.
        self.dtype: np.dtype[Any] = _with_texts(_layout_of(struct))
        if self.dtype.fields is None:
            raise InvalidOption("struct", str(self.dtype), "has no fields")
        self.message = descriptor.full_name
        tables = _Tables(descriptor, self.dtype)
        self._plan = tables.plan()
        self._names = [each.removeprefix(f"{self.message}.") for each in tables.names]

    def serialise(self, payloads: pa.Array) -> Serialised:
        """Serialise structs to protobuf."""
        _, offsets, data = payloads.buffers()
        ends, messages, failed = self._plan.serialise(
            offsets or bytes(4), data or b"", payloads.offset, len(payloads)
        )
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(messages)]
        expected = f"a struct of {self.message}"
        failures = [self._failure(payloads, expected, *each) for each in failed]
        return Serialised(pa.Array.from_buffers(pa.binary(), len(payloads), buffers), failures)

    def deserialise(self, payloads: pa.Array) -> Structs:
        """Deserialise protobuf to structs."""
        _, offsets, data = payloads.buffers()
        rows, failed = self._plan.deserialise(
            offsets or bytes(4), data or b"", payloads.offset, len(payloads)
        )
        failures = [self._failure(payloads, f"a message {self.message}", *each) for each in failed]
        return Structs(np.frombuffer(rows, self.dtype), failures)

    def _failure(
        self, payloads: pa.Array, expected: str, row: int, error: int, field: int
    ) -> Failure:
        if error == _WRONG_SIZE:
            size = payloads[row].as_buffer().size
            return Failure(row, f"{expected}, {self.dtype.itemsize:,} bytes", f"{size:,} bytes")
        name = "" if field < 0 else f"{' ' if error == 9 else ' in '}{self._names[field]}"  # noqa: PLR2004
        return Failure(row, expected, _FINDINGS[error] + name)


def _layout_of(struct: Any) -> np.dtype[Any]:
    """Return the layout of a ctypes structure or union, or of any other type.

    numpy's own forgets the alignment of unions, and so misplaces them and what comes behind.
    """
    layout: np.dtype[Any]
    if isinstance(struct, type) and issubclass(struct, ctypes.Array):
        layout = np.dtype((_layout_of(struct._type_), (struct._length_,)))
        return layout
    is_made = isinstance(struct, type) and issubclass(struct, (ctypes.Structure, ctypes.Union))
    fields = struct._fields_ if is_made else ()
    # numpy refuses members of bits.
    if not is_made or any(len(field) > 2 for field in fields):  # noqa: PLR2004
        layout = np.dtype(struct)
        return layout
    return np.dtype(
        {
            "names": [field[0] for field in fields],
            "formats": [_layout_of(field[1]) for field in fields],
            "offsets": [getattr(struct, field[0]).offset for field in fields],
            "itemsize": ctypes.sizeof(struct),
        }
    )


def _with_texts(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the layout with ctypes' arrays of `char` as texts."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        if base == np.dtype("S1"):
            return (
                np.dtype((f"S{shape[-1]}", shape[:-1])) if shape[1:] else np.dtype(f"S{shape[0]}")
            )
        return np.dtype((_with_texts(base), shape))
    if dtype.fields is None or dtype.names is None:
        return dtype
    return np.dtype(
        {
            "names": list(dtype.names),
            "formats": [_with_texts(dtype.fields[name][0]) for name in dtype.names],
            "offsets": [dtype.fields[name][1] for name in dtype.names],
            "itemsize": dtype.itemsize,
        }
    )


class _Place(NamedTuple):
    """A member of a struct: type and offset."""

    dtype: np.dtype[Any]
    offset: int


class _Field(NamedTuple):
    """A row of the plan, as `_structs.c` declares it."""

    number: int
    kind: int
    rule: int
    offset: int
    width: int = 1
    is_signed: bool = False
    stride: int = 1
    capacity: int = 1
    presence: int = 0
    presence_width: int = 0
    room: int = 0
    size_width: int = 0
    data: int = 0
    inner: int = -1


class _Tables:
    """The tables of a plan."""

    def __init__(self, descriptor: Any, dtype: np.dtype[Any]) -> None:
        self.names: list[str] = []
        self._types: list[tuple[list[tuple[_Field, str]], int]] = []
        _, self._largest = self._add(descriptor, dtype)

    def plan(self) -> Plan:
        types, fields = array("i"), array("i")
        for rows, size in self._types:
            types.extend([len(self.names), len(rows), size])
            for row, name in rows:
                fields.extend(map(int, row))
                self.names.append(name)
        return Plan(types.tobytes(), fields.tobytes(), min(self._largest, _LARGEST) + _VARINT)

    def _add(self, descriptor: Any, dtype: np.dtype[Any]) -> tuple[int, int]:
        """Add a message; return its index, and its largest size in bytes."""
        rows: list[tuple[_Field, str]] = []
        place = len(self._types)
        if place == _MOST_TYPES:
            raise _unfit(descriptor.full_name, f"is one of more than {_MOST_TYPES:,} messages")
        self._types.append((rows, dtype.itemsize))
        members = _Members(descriptor, dtype)
        largest = 0
        for field in sorted(descriptor.fields, key=lambda each: each.number):
            found = members.take(field)
            if found is None:
                continue
            row, size = self._field(field, *found)
            rows.append((row, field.full_name))
            largest += size
        members.check_all_taken()
        if len(rows) > _MOST_FIELDS:
            raise _unfit(descriptor.full_name, f"has more than {_MOST_FIELDS:,} fields")
        if largest > _LARGEST:
            raise _unfit(descriptor.full_name, "is too large")
        return place, largest

    def _field(
        self, field: Any, place: _Place, rule: int, presence: _Place | None
    ) -> tuple[_Field, int]:
        row = _Field(field.number, field.type, rule, place.offset)
        if presence is not None:
            width = _unsigned(field, presence.dtype)
            row = row._replace(presence=presence.offset, presence_width=width)
        dtype, capacity = place.dtype, 1
        if field.is_repeated:
            dtype, capacity = _element(field, dtype)
        row = row._replace(stride=dtype.itemsize, capacity=capacity)
        if field.type == _MESSAGE:
            if dtype.fields is None:
                raise _unfit(field.full_name, f"is a message, and {dtype} in the struct")
            inner, largest = self._add(field.message_type, dtype)
            row = row._replace(inner=inner)
        elif field.type == _STRING:
            row = row._replace(room=_text_size(field, dtype))
            largest = row.room
        elif field.type == _BYTES:
            row = _as_bytes(field, row, dtype)
            largest = row.room
        else:
            row = row._replace(width=dtype.itemsize, is_signed=dtype.kind == "i")
            _check_number(field, dtype)
            largest = _VARINT
        return row, capacity * (_TAG + _VARINT + largest)


class _Members:
    """The members of one struct, removed as fields claim them."""

    def __init__(self, descriptor: Any, dtype: np.dtype[Any]) -> None:
        self._name = descriptor.full_name
        assert dtype.fields is not None
        self._left = {name: _Place(each[0], each[1]) for name, each in dtype.fields.items()}
        self._known = list(self._left)
        self._taken: set[str] = set()

    def take(self, field: Any) -> tuple[_Place, int, _Place | None] | None:
        """Return a field's member, presence rule and flag; None if the struct lacks it.

        :raises InvalidOption: the field is required.
        """
        oneof = field.containing_oneof
        if oneof is not None and (which := self._find(f"which_{oneof.name}")) is not None:
            union = self._find(oneof.name)
            place = self._find(field.name) if union is None else _inside(union, field.name)
            return None if place is None else (place, _WHICH, which)
        place = self._find(field.name)
        if place is None:
            if field.is_required:
                hint = nearest(field.name, self._known, "the struct has")
                raise _unfit(field.full_name, "is required, and not in the struct", hint=hint)
            return None
        if field.is_repeated:
            count = self._find(f"{field.name}_count")
            return place, _ALL if count is None else _COUNTED, count
        if field.is_required:
            return place, _REQUIRED, None
        if field.has_presence and (has := self._find(f"has_{field.name}")) is not None:
            return place, _HAS, has
        is_sparse = field.type == _MESSAGE or not field.has_presence
        return place, _NOT_ZERO if is_sparse else _ALWAYS, None

    def _find(self, name: str) -> _Place | None:
        self._taken.add(name)
        return self._left.get(name)

    def check_all_taken(self) -> None:
        for name in self._left.keys() - self._taken:
            if not name.startswith("_") and name != "dummy_field":
                reason = f"has no field {name}, which the struct has"
                hint = "members that are not to be sent begin with an underscore"
                raise _unfit(self._name, reason, hint=hint)


def _inside(union: _Place, name: str) -> _Place | None:
    fields = union.dtype.fields
    if fields is None or name not in fields:
        return None
    return _Place(fields[name][0], union.offset + fields[name][1])


def _element(field: Any, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], int]:
    """Return the type of an array's elements, and how many there are."""
    if dtype.subdtype is None:
        raise _unfit(field.full_name, f"is repeated, and {dtype} in the struct")
    base, shape = dtype.subdtype
    if len(shape) == 1:
        return base, shape[0]
    return np.dtype((base, shape[1:])), shape[0]


def _text_size(field: Any, dtype: np.dtype[Any]) -> int:
    base = dtype if dtype.subdtype is None else dtype.subdtype[0]
    if base.kind not in "SV" and base.str[1:] not in {"i1", "u1"}:
        raise _unfit(field.full_name, f"is text, and {dtype} in the struct", hint="use char[…]")
    return dtype.itemsize


def _as_bytes(field: Any, row: _Field, dtype: np.dtype[Any]) -> _Field:
    if dtype.fields is None:
        return row._replace(room=_text_size(field, dtype))
    if "size" not in dtype.fields or "bytes" not in dtype.fields:
        hint = "as nanopb has it: struct { pb_size_t size; uint8_t bytes[…]; }"
        raise _unfit(field.full_name, "needs size and bytes in the struct", hint=hint)
    size, start = dtype.fields["size"][:2]
    data, at = dtype.fields["bytes"][:2]
    if start:
        raise _unfit(field.full_name, "has its size behind its bytes")
    return row._replace(room=data.itemsize, size_width=_unsigned(field, size), data=at)


def _unsigned(field: Any, dtype: np.dtype[Any]) -> int:
    if dtype.kind not in "bui" or not _is_native(dtype):
        raise _unfit(field.full_name, f"has {dtype} where its count, or whether it is there, is")
    return dtype.itemsize


def _check_number(field: Any, dtype: np.dtype[Any]) -> None:
    """Check that the message can hold every value of the member."""
    kind, size = dtype.kind, dtype.itemsize
    if field.type in {_DOUBLE, _FLOAT}:
        fits = kind == "f" and size == (8 if field.type == _DOUBLE else 4)
    elif field.type == _BOOL:
        fits = kind in "b?" or (kind in "ui" and size == 1)
    elif field.type == _ENUM:
        fits = kind in "ui" and size <= _BYTES_OF[_ENUM]
    elif field.type in _BYTES_OF:
        most = _BYTES_OF[field.type]
        is_signed = field.type in _SIGNED
        fits = kind == ("i" if is_signed else "u") and size <= most
        fits = fits or (is_signed and kind == "u" and size < most)
    else:
        fits = False
    if not fits or not _is_native(dtype):
        hint = "the struct needs a number of the same kind, as large or smaller"
        raise _unfit(field.full_name, f"does not fit {dtype}, which the struct has", hint=hint)


def _is_native(dtype: np.dtype[Any]) -> bool:
    return dtype.byteorder in "=|" or dtype.itemsize == 1


def _unfit(name: str, reason: str, *, hint: str | None = None) -> InvalidOption:
    return InvalidOption("struct", name, reason, hint=hint)
