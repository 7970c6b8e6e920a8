"""How are types with members stored: classes, structs, tuples, lists and dictionaries?

A class has a prefix and a struct has none; what follows are the members, in their schema's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.core.errors import Malformed
from penstock.protocols.psi.codecs.base import Codec, refuse
from penstock.protocols.psi.codecs.references import NEW, NULL, TYPE_KEY, ReferenceCodec
from penstock.protocols.psi.codecs.schemas import comparer_of
from penstock.protocols.psi.codecs.type_names import parse_type_name
from penstock.protocols.psi.ticks import DateTime, TimeSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.protocols.psi.codecs.base import ValueReader, ValueWriter
    from penstock.protocols.psi.codecs.library import CodecLibrary

__all__ = [
    "ClassCodec",
    "DictionaryCodec",
    "ListCodec",
    "Member",
    "OptionalCodec",
    "SharedCodec",
    "StructCodec",
    "StructTupleCodec",
    "TupleCodec",
]

#: Initial capacity of a list of .NET, which doubles it.
_FIRST_CAPACITY = 4


class Member(NamedTuple):
    """A member's name, and its type's without assemblies."""

    name: str
    type_name: str


class _Members(Codec):
    """Base of the codecs with members: classes and structs."""

    def __init__(self, type_name: str, library: CodecLibrary, members: Sequence[Member]) -> None:
        super().__init__(type_name, library)
        self.members = tuple(members)
        self._codecs: list[tuple[str, Codec]] | None = None

    @property
    def codecs(self) -> list[tuple[str, Codec]]:
        """The members' codecs; found when first needed, because types may hold themselves."""
        if self._codecs is None:
            self._codecs = [
                (member.name, self.library.resolve(member.type_name)) for member in self.members
            ]
        return self._codecs

    def _read_into(self, reader: ValueReader, value: dict[str, Any]) -> None:
        for name, codec in self.codecs:
            value[name] = codec.read(reader)

    def _read_values(self, reader: ValueReader) -> list[Any]:
        return [codec.read(reader) for _, codec in self.codecs]

    def _write_members(self, writer: ValueWriter, value: Any) -> None:
        if not isinstance(value, dict):
            refuse(value, f"must be a dict with the members of {self.type_name}")
        unknown = value.keys() - {name for name, _ in self.codecs} - {TYPE_KEY}
        if unknown:
            refuse(value, f"has {min(map(str, unknown))!r}, which {self.type_name} has not")
        for name, codec in self.codecs:
            if name not in value:
                refuse(value, f"has no member {name!r} of {self.type_name}")
            codec.write(writer, value[name])

    def _write_values(self, writer: ValueWriter, values: Any) -> None:
        if not isinstance(values, (tuple, list)) or len(values) != len(self.members):
            refuse(values, f"must be a tuple of {len(self.members)}")
        for (_, codec), value in zip(self.codecs, values, strict=True):
            codec.write(writer, value)


class ClassCodec(_Members, ReferenceCodec):
    """An object with members, as a `dict`; one of another type than declared has `$type`."""

    is_record = True

    def read_content(self, reader: ValueReader, place: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        reader.objects[place] = value
        self._read_into(reader, value)
        return value

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        self._write_members(writer, value)


class TupleCodec(_Members, ReferenceCodec):
    """A `Tuple`."""

    def read_content(self, reader: ValueReader, place: int) -> tuple[Any, ...]:
        value = tuple(self._read_values(reader))
        reader.objects[place] = value
        return value

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        self._write_values(writer, value)


class ListCodec(_Members, ReferenceCodec):
    """A `List`, as a list. .NET's unused capacity is stored, too."""

    def read_content(self, reader: ValueReader, place: int) -> list[Any]:
        value: list[Any] = []
        reader.objects[place] = value
        items, size, _version = self._read_values(reader)
        is_text = isinstance(items, str) and self.codecs[0][1].type_name != "System.Char[]"
        if is_text or isinstance(items, dict) or not hasattr(items, "__len__"):
            raise Malformed(reader.what, "items of a list", "an array", type(items).__name__)
        if not 0 <= size <= len(items):
            raise Malformed(reader.what, "size of a list", f"0 to {len(items)}", size)
        kept = items[:size]
        # Python's own numbers; but of times, durations and structs it would only give pieces.
        kind = kept.dtype.kind if isinstance(kept, np.ndarray) else ""
        if kind == "M":
            value.extend(map(DateTime.of, kept))
        elif kind == "m":
            value.extend(map(TimeSpan, kept.view(np.int64).tolist()))
        else:
            value.extend(kept.tolist() if kind not in {"", "V"} else kept)
        return value

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        if isinstance(value, (str, dict)):
            refuse(value, "must be a list")
        try:
            items = list(value)
        except TypeError:
            refuse(value, "must be a list")
        size = len(items)
        capacity = 0
        while capacity < size:
            capacity = max(_FIRST_CAPACITY, capacity * 2)
        (_, array), (_, number), _ = self.codecs
        array.write(writer, items + [self._filler(array)] * (capacity - size))
        number.write(writer, size)
        number.write(writer, size)  # _version: as after `size` calls of Add

    def _filler(self, array: Codec) -> Any:
        """Return what .NET stores in the unused capacity."""
        element = getattr(array, "element", None)
        if element is None:  # texts and bytes
            return 0 if array.type_name == "System.Byte[]" else None
        return None if isinstance(element, ReferenceCodec) else element.default()


class SharedCodec(_Members, ReferenceCodec):
    """psi's `Shared`, and its container: decoded to the object that they hold.

    psi shares large objects, such as images, by these instead of copying them.
    """

    def read_content(self, reader: ValueReader, place: int) -> Any:
        (_, inner) = self.codecs[0]
        value = inner.read(reader)
        reader.objects[place] = value
        return value

    def write(self, writer: ValueWriter, value: Any) -> None:
        if value is None:
            writer.parts.append(NULL)
            return
        # It is not the object that it holds, and has a number of its own.
        writer.number_of(None)
        writer.enter(value)
        writer.parts.append(NEW)
        self.write_content(writer, value)
        writer.leave()

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        (_, inner) = self.codecs[0]
        inner.write(writer, value)


class DictionaryCodec(_Members, ReferenceCodec):
    """A `Dictionary`, as a `dict`; as a list of pairs where Python cannot have such keys."""

    def read_content(self, reader: ValueReader, place: int) -> Any:
        _comparer, pairs = self._read_values(reader)
        value: Any
        try:
            value = dict(pairs)
        except TypeError:
            value = pairs
        except ValueError:
            raise Malformed(reader.what, "dictionary", "pairs", "something else") from None
        reader.objects[place] = value
        return value

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        (_, comparer), (_, pairs) = self.codecs
        comparer.write(writer, {TYPE_KEY: self._comparer()})
        pairs.write(writer, list(value.items() if isinstance(value, dict) else value))

    def _comparer(self) -> str:
        (key,) = parse_type_name(self.members[0].type_name).arguments
        return comparer_of(key).canonical


class StructCodec(_Members):
    """A struct of which a member is more than a primitive: member by member, without gaps."""

    is_record = True

    def read(self, reader: ValueReader) -> dict[str, Any]:
        reader.enter()
        value: dict[str, Any] = {}
        self._read_into(reader, value)
        reader.leave()
        return value

    def write(self, writer: ValueWriter, value: Any) -> None:
        writer.enter(value)
        self._write_members(writer, value)
        writer.leave()


class StructTupleCodec(_Members):
    """A `ValueTuple` or a `KeyValuePair`, as a tuple."""

    def read(self, reader: ValueReader) -> tuple[Any, ...]:
        reader.enter()
        value = tuple(self._read_values(reader))
        reader.leave()
        return value

    def write(self, writer: ValueWriter, value: Any) -> None:
        writer.enter(value)
        self._write_values(writer, value)
        writer.leave()


class OptionalCodec(_Members):
    """A `Nullable` of more than a primitive."""

    def read(self, reader: ValueReader) -> Any:
        reader.enter()
        has_value, value = self._read_values(reader)
        reader.leave()
        return value if has_value else None

    def write(self, writer: ValueWriter, value: Any) -> None:
        (_, flag), (_, codec) = self.codecs
        flag.write(writer, value is not None)
        if value is not None:
            codec.write(writer, value)
        else:
            codec.write(writer, codec.default())
