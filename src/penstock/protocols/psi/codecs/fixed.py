"""How are values of one size stored: numbers, times, ids and plain structs?

(docs/specs/psi.md 6.1)
"""

from __future__ import annotations

import decimal
import struct
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

import numpy as np

from penstock.core.errors import Malformed
from penstock.protocols.psi.codecs.base import Codec, refuse
from penstock.protocols.psi.ticks import (
    DateTime,
    TimeSpan,
    fits_numpy,
    numpy_to_raw,
    raw_to_numpy,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.core.interfaces import BytesLike
    from penstock.protocols.psi.codecs.base import ValueReader, ValueWriter
    from penstock.protocols.psi.codecs.library import CodecLibrary

__all__ = [
    "PRIMITIVES",
    "CharCodec",
    "DateTimeCodec",
    "DecimalCodec",
    "FixedCodec",
    "GuidCodec",
    "NullableCodec",
    "NumberCodec",
    "PlainStructCodec",
    "PlainTupleCodec",
    "TimeSpanCodec",
]

#: How Python's `struct` calls the types that .NET calls primitive.
PRIMITIVES: Final = {
    "System.Boolean": "?",
    "System.SByte": "b",
    "System.Byte": "B",
    "System.Int16": "h",
    "System.UInt16": "H",
    "System.Char": "H",
    "System.Int32": "i",
    "System.UInt32": "I",
    "System.Int64": "q",
    "System.UInt64": "Q",
    "System.Single": "f",
    "System.Double": "d",
}
#: .NET's own NaN has the sign set, and Python's has not.
_NAN: Final = {"f": bytes.fromhex("0000c0ff"), "d": bytes.fromhex("000000000000f8ff")}
#: Bytes of a pointer, to which .NET rounds: psi's processes have 64 bits.
_POINTER: Final = 8


class FixedCodec(Codec):
    """A value that always has the same size, and no prefix."""

    dtype: np.dtype[Any]
    alignment: int

    @property
    def size(self) -> int:
        """Bytes of every value."""
        return self.dtype.itemsize

    @abstractmethod
    def unpack(self, data: BytesLike, at: int) -> Any:
        """Return the value at a place; the caller has checked the size."""

    @abstractmethod
    def pack(self, value: Any) -> bytes:
        """Return the bytes of a value."""

    def read(self, reader: ValueReader) -> Any:
        return self.unpack(reader.data, reader.step(self.size, self.type_name))

    def write(self, writer: ValueWriter, value: Any) -> None:
        writer.parts.append(self.pack(value))

    def to_numpy(self, data: bytes, at: int = 0, count: int = -1) -> Any:
        """Return contiguous values as the best type of numpy or Python."""
        return np.frombuffer(data, self.dtype, count, at)

    def from_many(self, values: Any) -> tuple[int, bytes]:
        """Return the number of values, and the bytes of all.

        :raises InvalidOption: a value is out of range.
        """
        packed = [self.pack(value) for value in values]
        return len(packed), b"".join(packed)

    def decode_many(self, payloads: Sequence[BytesLike]) -> Any:
        """Return the values of many payloads at once, as `to_numpy` does.

        :raises Malformed: one of them is too short.
        """
        size = self.size
        for payload in payloads:
            if len(payload) < size:
                raise Malformed("psi payload", "length", f"at least {size}", len(payload))
        return self.to_numpy(b"".join([payload[:size] for payload in payloads]))


class NumberCodec(FixedCodec):
    """Numbers, truths and enums."""

    def __init__(self, type_name: str, library: CodecLibrary, code: str) -> None:
        super().__init__(type_name, library)
        self._code = code
        self._layout = struct.Struct(f"<{code}")
        self.dtype = np.dtype(f"<{code}")
        self.alignment = self.dtype.itemsize

    def unpack(self, data: BytesLike, at: int) -> Any:
        return self._layout.unpack_from(data, at)[0]

    def pack(self, value: Any) -> bytes:
        if self._code in _NAN and value != value:  # noqa: PLR0124 - it is NaN
            return _NAN[self._code]
        if self._code == "?" and not isinstance(value, (bool, np.bool_)):
            refuse(value, "must be True or False")
        try:
            return self._layout.pack(value)
        except (struct.error, OverflowError, TypeError) as error:
            refuse(value, f"is no {self.type_name}: {error}")

    def to_numpy(self, data: bytes, at: int = 0, count: int = -1) -> Any:
        if self._code == "?":
            # Any byte but 0 is true, and numpy must not see others than 0 and 1.
            return np.frombuffer(data, np.uint8, count, at) != 0
        return super().to_numpy(data, at, count)

    def from_many(self, values: Any) -> tuple[int, bytes]:
        if isinstance(values, np.ndarray) and np.can_cast(values.dtype, self.dtype, "safe"):
            return values.size, values.astype(self.dtype).tobytes()
        return super().from_many(values)


class CharCodec(FixedCodec):
    """One unit of UTF-16; half of a character is a text of its own."""

    dtype = np.dtype("<u2")
    alignment = 2

    def unpack(self, data: BytesLike, at: int) -> str:
        return chr(int.from_bytes(data[at : at + 2], "little"))

    def pack(self, value: Any) -> bytes:
        if isinstance(value, np.uint16):  # as numpy has it in an array of structs
            value = chr(value)
        if not (isinstance(value, str) and len(value) == 1 and ord(value) < 2**16):
            refuse(value, "must be one character of the first 65,536")
        return ord(value).to_bytes(2, "little")

    def to_numpy(self, data: bytes, at: int = 0, count: int = -1) -> str:
        end = len(data) if count < 0 else at + 2 * count
        return data[at:end].decode("utf-16-le", "surrogatepass")

    def from_many(self, values: Any) -> tuple[int, bytes]:
        text = values if isinstance(values, str) else "".join(values)
        data = text.encode("utf-16-le", "surrogatepass")
        return len(data) // 2, data


class DateTimeCodec(FixedCodec):
    """A time, as `DateTime`.

    Many of them are a numpy array if that is lossless: all in UTC, and in numpy's range of years.
    Otherwise they are a list.
    """

    dtype = np.dtype("<u8")
    alignment = 8

    def unpack(self, data: BytesLike, at: int) -> DateTime:
        return DateTime.from_raw(int.from_bytes(data[at : at + 8], "little"))

    def pack(self, value: Any) -> bytes:
        return DateTime.of(value).raw.to_bytes(8, "little")

    def to_numpy(
        self, data: bytes, at: int = 0, count: int = -1
    ) -> NDArray[np.datetime64] | list[DateTime]:
        raw = np.frombuffer(data, self.dtype, count, at)
        if fits_numpy(raw):
            return raw_to_numpy(raw)
        return [DateTime.from_raw(each) for each in raw.tolist()]

    def from_many(self, values: Any) -> tuple[int, bytes]:
        if isinstance(values, np.ndarray):
            return values.size, numpy_to_raw(values).tobytes()
        return super().from_many(values)


class TimeSpanCodec(FixedCodec):
    """A duration, as `TimeSpan`; many of them as numpy's of 100 ns."""

    dtype = np.dtype("<i8")
    alignment = 8
    _UNIT: ClassVar = np.dtype("timedelta64[100ns]")

    def unpack(self, data: BytesLike, at: int) -> TimeSpan:
        return TimeSpan(int.from_bytes(data[at : at + 8], "little", signed=True))

    def pack(self, value: Any) -> bytes:
        return TimeSpan.of(value).ticks.to_bytes(8, "little", signed=True)

    def to_numpy(self, data: bytes, at: int = 0, count: int = -1) -> NDArray[np.timedelta64]:
        return np.frombuffer(data, self.dtype, count, at).view(self._UNIT)

    def from_many(self, values: Any) -> tuple[int, bytes]:
        if isinstance(values, np.ndarray) and values.dtype.kind == "m":
            return values.size, values.astype(self._UNIT).tobytes()
        return super().from_many(values)


class GuidCodec(FixedCodec):
    """An id, as Python's `UUID`."""

    dtype = np.dtype("V16")
    alignment = 4

    def unpack(self, data: BytesLike, at: int) -> UUID:
        return UUID(bytes_le=bytes(data[at : at + 16]))

    def pack(self, value: Any) -> bytes:
        try:
            return (value if isinstance(value, UUID) else UUID(value)).bytes_le
        except (ValueError, AttributeError, TypeError):
            refuse(value, "must be a UUID")

    def to_numpy(self, data: bytes, at: int = 0, count: int = -1) -> list[UUID]:
        end = len(data) if count < 0 else at + 16 * count
        return [self.unpack(data, place) for place in range(at, end, 16)]


class DecimalCodec(FixedCodec):
    """A decimal number of 96 bits, as Python's `Decimal`, digits behind the point included."""

    dtype = np.dtype("V16")
    alignment = 8
    _LAYOUT: ClassVar = struct.Struct("<4I")
    _MOST_DECIMALS: ClassVar = 28

    def unpack(self, data: BytesLike, at: int) -> decimal.Decimal:
        flags, high, low, middle = self._LAYOUT.unpack_from(data, at)
        decimals = flags >> 16 & 0xFF
        if decimals > self._MOST_DECIMALS or flags & 0x7F00FFFF:
            raise Malformed("psi payload", "flags of a decimal", "0 to 28 decimals", f"{flags:#x}")
        digits = tuple(map(int, str(high << 64 | middle << 32 | low)))
        return decimal.Decimal((flags >> 31, digits, -decimals))

    def pack(self, value: Any) -> bytes:
        try:
            number = decimal.Decimal(value)
        except (TypeError, ValueError, decimal.InvalidOperation):
            refuse(value, "is no decimal number")
        sign, digits, exponent = number.as_tuple()
        most = self._MOST_DECIMALS
        if not isinstance(exponent, int) or not -most <= exponent <= most or len(digits) > most + 1:
            refuse(value, f"must have at most {most} decimals and 96 bits")
        whole = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
        if whole >= 2**96:
            refuse(value, "must fit in 96 bits")
        flags = sign << 31 | max(-exponent, 0) << 16
        mask = 0xFFFF_FFFF
        return self._LAYOUT.pack(flags, whole >> 64, whole & mask, whole >> 32 & mask)

    def to_numpy(self, data: bytes, at: int = 0, count: int = -1) -> list[decimal.Decimal]:
        end = len(data) if count < 0 else at + 16 * count
        return [self.unpack(data, place) for place in range(at, end, 16)]


def _auto_size(size: int) -> int:
    """Return the size that .NET gives a struct of primitives whose members it orders itself.

    Up to the size of a pointer it is a power of two, and a multiple of a pointer's size above.
    """
    return (
        -(-size // _POINTER) * _POINTER if size > _POINTER else 1 << max(size - 1, 0).bit_length()
    )


class PlainStructCodec(FixedCodec):
    """A struct of primitives, which psi copies out of memory, the gaps included; a `dict` here."""

    is_record = True

    def __init__(
        self,
        type_name: str,
        library: CodecLibrary,
        members: Sequence[tuple[str, FixedCodec]],
        *,
        by_size: bool = False,
    ) -> None:
        super().__init__(type_name, library)
        offsets: dict[str, int] = {}
        at = 0
        self.alignment = 1
        # Where .NET may order the members itself, it puts the large ones first.
        order = sorted(members, key=lambda member: -member[1].size) if by_size else members
        for name, codec in order:
            at += -at % codec.alignment
            offsets[name] = at
            at += codec.size
            self.alignment = max(self.alignment, codec.alignment)
        at = _auto_size(at) if by_size else at + -at % self.alignment
        self._members = [(name, codec, offsets[name]) for name, codec in members]
        self.dtype = np.dtype(
            {
                "names": [name for name, _, _ in self._members],
                "formats": [codec.dtype for _, codec, _ in self._members],
                "offsets": [offset for _, _, offset in self._members],
                # .NET gives a struct without members a byte.
                "itemsize": max(at, 1),
            }
        )

    def unpack(self, data: BytesLike, at: int) -> Any:
        return {name: codec.unpack(data, at + offset) for name, codec, offset in self._members}

    def pack(self, value: Any) -> bytes:
        packed = bytearray(self.size)
        for name, codec, offset in self._members:
            try:
                member = value[name]
            except (KeyError, TypeError, IndexError, ValueError):
                refuse(value, f"has no member {name!r} of {self.type_name}")
            packed[offset : offset + codec.size] = codec.pack(member)
        return bytes(packed)

    def from_many(self, values: Any) -> tuple[int, bytes]:
        if isinstance(values, np.ndarray) and values.dtype == self.dtype:
            return values.size, values.tobytes()
        return super().from_many(values)


class PlainTupleCodec(PlainStructCodec):
    """A `ValueTuple` or `KeyValuePair` of primitives, as a tuple; many of them as a list."""

    is_record = False

    def unpack(self, data: BytesLike, at: int) -> Any:
        return tuple(super().unpack(data, at).values())

    def pack(self, value: Any) -> bytes:
        if not isinstance(value, (tuple, list)) or len(value) != len(self._members):
            refuse(value, f"must be a tuple of {len(self._members)}")
        named = {name: item for (name, _, _), item in zip(self._members, value, strict=True)}
        return super().pack(named)

    def to_numpy(self, data: bytes, at: int = 0, count: int = -1) -> list[Any]:
        end = len(data) if count < 0 else at + self.size * count
        return [self.unpack(data, place) for place in range(at, end, self.size)]


class NullableCodec(PlainTupleCodec):
    """A primitive or none."""

    def unpack(self, data: BytesLike, at: int) -> Any:
        has_value, value = super().unpack(data, at)
        return value if has_value else None

    def pack(self, value: Any) -> bytes:
        return bytes(self.size) if value is None else super().pack((True, value))
