"""How are objects stored: texts, arrays, classes and what holds them? (docs/specs/psi.md 6.2)

Each has a prefix: null, a new object of the declared type, a reference to an earlier one, or an
object of another type.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.core.errors import Malformed
from penstock.protocols.psi.codecs.base import Codec, Decoded, refuse
from penstock.protocols.psi.errors import UnknownType
from penstock.protocols.psi.wire import INT32, pack_text

if TYPE_CHECKING:
    from penstock.core.interfaces import BytesLike
    from penstock.protocols.psi.codecs.base import ValueReader, ValueWriter
    from penstock.protocols.psi.codecs.fixed import FixedCodec
    from penstock.protocols.psi.codecs.library import CodecLibrary

__all__ = [
    "NEW",
    "NULL",
    "TYPE_KEY",
    "ArrayCodec",
    "BytesCodec",
    "FixedArrayCodec",
    "InterfaceCodec",
    "ObjectCodec",
    "ReferenceCodec",
    "StringArrayCodec",
    "StringCodec",
]

#: Names the type of an object that is not of the declared one, in its `dict`.
TYPE_KEY: Final = "$type"

_UINT32: Final = struct.Struct("<I")
#: Prefixes: of no object, and of a new one of the declared type.
NULL: Final = _UINT32.pack(0)
NEW: Final = _UINT32.pack(0x8000_0000)
#: Where the bytes of a new array begin: behind the prefix and the count.
_CONTENT: Final = 8
_EXISTING_BITS: Final = 0x4000_0000
_TYPED_BITS: Final = 0xC000_0000
_NUMBER_MASK: Final = 0x3FFF_FFFF


class ReferenceCodec(Codec):
    """Anything with a prefix."""

    def read(self, reader: ValueReader) -> Any:
        prefix = reader.uint32("prefix")
        number = prefix & _NUMBER_MASK
        match prefix >> 30:
            case 1:
                return reader.existing(number)
            case 2 if not number:
                return self.read_new(reader)
            case 3:
                return self._read_typed(reader, reader.library.by_id(number))
            case 0 if not number:
                return None
        raise Malformed(reader.what, "prefix", "null, new, existing or typed", f"{prefix:#010x}")

    def _read_typed(self, reader: ValueReader, codec: Codec) -> Any:
        if isinstance(codec, ReferenceCodec):
            value = codec.read_new(reader)
        else:
            # A value in a box counts as an object, too.
            place = reader.new()
            reader.enter()
            value = reader.objects[place] = codec.read(reader)
            reader.leave()
        if isinstance(value, dict) and codec.is_record:
            named = {TYPE_KEY: codec.type_name, **value}
            value.clear()
            value.update(named)
        return value

    def read_new(self, reader: ValueReader) -> Any:
        """Read a new object after its prefix, and number it."""
        reader.enter()
        value = self.read_content(reader, reader.new())
        reader.leave()
        return value

    @abstractmethod
    def read_content(self, reader: ValueReader, place: int) -> Any:
        """Read an object, and put it into its place among `reader.objects`."""

    def write(self, writer: ValueWriter, value: Any) -> None:
        if value is None:
            writer.parts.append(NULL)
            return
        number = writer.number_of(value)
        if number is not None:
            writer.parts.append(_UINT32.pack(_EXISTING_BITS | number))
            return
        codec = self.codec_of(writer, value)
        writer.enter(value)
        if codec is self:
            writer.parts.append(NEW)
            self.write_content(writer, value)
        else:
            id = writer.library.id_of(codec)
            writer.parts.append(_UINT32.pack(_TYPED_BITS | id))
            if isinstance(codec, ReferenceCodec):
                codec.write_content(writer, value)
            else:
                codec.write(writer, value)
        writer.leave()

    def codec_of(self, writer: ValueWriter, value: Any) -> Codec:
        """Return the codec of this value, which may be of another type than declared."""
        if isinstance(value, dict) and self.is_record and TYPE_KEY in value:
            found = writer.library.named(str(value[TYPE_KEY]))
            return self if found.type_name == self.type_name else found
        return self

    @abstractmethod
    def write_content(self, writer: ValueWriter, value: Any) -> None:
        """Append what follows the prefix."""


class StringCodec(ReferenceCodec):
    """A text."""

    def read_content(self, reader: ValueReader, place: int) -> str:
        text = reader.text("string")
        reader.objects[place] = text
        return text

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        if not isinstance(value, str):
            refuse(value, "must be a text")
        writer.parts.append(pack_text(value))


class BytesCodec(ReferenceCodec):
    """An array of bytes, or a MemoryStream, as `bytes`.

    Most payloads are of this type, so it has a fast path.
    """

    def decode(self, payload: BytesLike) -> Any:
        end = _end_of_new(payload)
        return super().decode(payload) if end is None else bytes(payload[_CONTENT:end])

    def trim(self, payload: BytesLike) -> bytes:
        end = _end_of_new(payload)
        if end is None:
            return super().trim(payload)
        if end == len(payload) and isinstance(payload, bytes):
            return payload
        return bytes(payload[:end])

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return b"".join((NEW, INT32.pack(len(value)), value))
        return super().encode(value)

    def read_content(self, reader: ValueReader, place: int) -> bytes:
        data = reader.bytes("bytes")
        reader.objects[place] = data
        return data

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        match value:
            case bytes() | bytearray() | memoryview():
                data = bytes(value)
            case np.ndarray() if value.dtype == np.uint8:
                data = value.tobytes()
            case list():  # of a List of bytes
                data = _bytes_of(value)
            case _:
                refuse(value, "must be bytes")
        writer.parts += (INT32.pack(len(data)), data)


def _bytes_of(values: list[Any]) -> bytes:
    try:
        return bytes(values)
    except (TypeError, ValueError) as error:
        refuse(values, f"must be bytes: {error}")


def _end_of_new(payload: BytesLike) -> int | None:
    """Return the end of a new array of bytes; None: something else, or truncated."""
    if payload[:4] == NEW and len(payload) >= _CONTENT:
        size: int = INT32.unpack_from(payload, 4)[0]
        if 0 <= size <= len(payload) - _CONTENT:
            return _CONTENT + size
    return None


class StringArrayCodec(ReferenceCodec):
    """An array of texts, which have no prefixes in there."""

    def read_content(self, reader: ValueReader, place: int) -> list[str | None]:
        count = reader.count(INT32.size, "count of strings")
        texts = [reader.optional_text("string") for _ in range(count)]
        reader.objects[place] = texts
        return texts

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        texts = list(value)
        for text in texts:
            if text is not None and not isinstance(text, str):
                refuse(text, "must be a text or None")
        writer.parts.append(INT32.pack(len(texts)))
        writer.parts += [pack_text(text) for text in texts]


class FixedArrayCodec(ReferenceCodec):
    """An array of values of one size, which lie one behind the other: numpy's."""

    def __init__(self, type_name: str, library: CodecLibrary, element: FixedCodec) -> None:
        super().__init__(type_name, library)
        self.element = element

    def read_content(self, reader: ValueReader, place: int) -> Any:
        size = self.element.size
        count = reader.count(size, f"count of {self.type_name}")
        at = reader.step(count * size, self.type_name)
        values = self.element.to_numpy(bytes(reader.data), at, count)
        reader.objects[place] = values
        return values

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        try:
            count, data = self.element.from_many(value)
        except TypeError as error:
            refuse(value, f"is no {self.type_name}: {error}")
        writer.parts += (INT32.pack(count), data)


class ArrayCodec(ReferenceCodec):
    """An array of anything else, as a list."""

    def __init__(self, type_name: str, library: CodecLibrary, element: str) -> None:
        super().__init__(type_name, library)
        self._element = element

    @property
    def element(self) -> Codec:
        """The codec of the elements."""
        return self.library.resolve(self._element)

    def read_content(self, reader: ValueReader, place: int) -> list[Any]:
        count = reader.count(1, f"count of {self.type_name}")
        values: list[Any] = []
        reader.objects[place] = values
        read = self.element.read
        for _ in range(count):
            values.append(read(reader))  # noqa: PERF401 - a reference may lead back to the list
        return values

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        if isinstance(value, (str, bytes)):
            refuse(value, f"is no {self.type_name}")
        try:
            values = list(value)
        except TypeError:
            refuse(value, f"is no {self.type_name}")
        writer.parts.append(INT32.pack(len(values)))
        element = self.element
        for item in values:
            element.write(writer, item)


class ObjectCodec(ReferenceCodec):
    """`object`, an interface, or a type without a schema: the object itself tells what it is."""

    is_record = True

    def read_content(self, reader: ValueReader, place: int) -> Any:
        if self.type_name != "System.Object":
            raise UnknownType(self.type_name)
        value: dict[str, Any] = {}
        reader.objects[place] = value
        return value

    def codec_of(self, writer: ValueWriter, value: Any) -> Codec:
        if isinstance(value, dict) and TYPE_KEY not in value:
            if not value and self.type_name == "System.Object":
                return self
            refuse(value, f"must name its type as {TYPE_KEY!r}")
        if isinstance(value, dict):
            return super().codec_of(writer, value)
        return writer.library.boxed(value)

    def write_content(self, writer: ValueWriter, value: Any) -> None:
        """Write nothing: an object has no members."""


class InterfaceCodec(ObjectCodec):
    """An interface, or another type without a schema: an undecodable payload stays bytes."""

    def decode_sized(self, payload: BytesLike) -> Decoded:
        try:
            return super().decode_sized(payload)
        except UnknownType:
            return Decoded(bytes(payload), len(payload))

    def missing_type(self, payload: BytesLike) -> str | None:
        try:
            super().decode_sized(payload)
        except UnknownType as error:
            return error.type_name
        return None

    def encode(self, value: Any) -> bytes:
        return value if isinstance(value, bytes) else super().encode(value)

    def codec_of(self, writer: ValueWriter, value: Any) -> Codec:
        if not isinstance(value, dict):
            refuse(value, f"must be a dict with {TYPE_KEY!r}, or bytes: {self.type_name} is open")
        return super().codec_of(writer, value)
