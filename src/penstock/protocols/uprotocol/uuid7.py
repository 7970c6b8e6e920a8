"""How are messages of uProtocol identified? (docs/specs/uprotocol.md 2)."""

from __future__ import annotations

import re
import secrets
import struct
import time
from dataclasses import dataclass
from typing import Any

from penstock.protocols.uprotocol import proto
from penstock.protocols.uprotocol.errors import InvalidUUID

__all__ = ["UUID7", "InvalidUUID"]

_TEXT = re.compile(
    r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}", re.ASCII
)
_BIG_ENDIAN = struct.Struct(">QQ")
_LARGEST = (1 << 64) - 1
_LATEST_MS = (1 << 48) - 1
_VERSION = 7
_VARIANT = 0b10


@dataclass(frozen=True, slots=True, order=True)
class UUID7:
    """A UUID of version 7: 48 bits of time, 74 random bits.

    :raises InvalidUUID: it is of another version or variant.
    """

    msb: int
    lsb: int

    def __post_init__(self) -> None:
        problem = self.problem
        if problem is not None:
            raise InvalidUUID(f"msb {self.msb:#x}, lsb {self.lsb:#x}", problem)

    @classmethod
    def unchecked(cls, msb: int, lsb: int) -> UUID7:
        """Create an id without checks, as found in a message from outside."""
        made: UUID7 = _blank(cls)
        _set_msb(made, msb)
        _set_lsb(made, lsb)
        return made

    @classmethod
    def new(cls, now_ms: int | None = None) -> UUID7:
        """Create an id with the current time or a given one.

        :raises InvalidUUID: the time does not fit 48 bits.
        """
        if now_ms is None:
            now_ms = time.time_ns() // 1_000_000
        if not 0 <= now_ms <= _LATEST_MS:
            raise InvalidUUID(now_ms, "the time in milliseconds does not fit 48 bits")
        chance = secrets.randbits(74)
        return cls.unchecked(
            now_ms << 16 | _VERSION << 12 | chance >> 62,
            _VARIANT << 62 | chance & ((1 << 62) - 1),
        )

    @classmethod
    def parse(cls, text: str) -> UUID7:
        """Parse hexadecimal digits and dashes, 8-4-4-4-12.

        :raises InvalidUUID: the text is no UUID, or of another version or variant.
        """
        if _TEXT.fullmatch(text) is None:
            raise InvalidUUID(text, "not hex-and-dash, 8-4-4-4-12")
        digits = text.replace("-", "")
        return cls._checked(text, int(digits[:16], 16), int(digits[16:], 16))

    @classmethod
    def from_bytes(cls, data: bytes) -> UUID7:
        """Decode the protobuf form.

        :raises InvalidUUID: it does not decode, or is of another version or variant.
        """
        try:
            message = proto.UUID.FromString(data)
        except proto.UNDECODABLE as error:
            raise InvalidUUID(bytes(data), "not the protobuf message uprotocol.v1.UUID") from error
        return cls._checked(bytes(data), message.msb, message.lsb)

    @classmethod
    def from_big_endian(cls, data: bytes) -> UUID7:
        """Decode 16 bytes, most significant first, as in MQTT's correlation data.

        :raises InvalidUUID: the length is not 16, or it is of another version or variant.
        """
        if len(data) != _BIG_ENDIAN.size:
            raise InvalidUUID(bytes(data), f"{len(data)} bytes, not 16")
        return cls._checked(bytes(data), *_BIG_ENDIAN.unpack(data))

    @classmethod
    def from_proto(cls, message: Any) -> UUID7:
        """Convert a protobuf message.

        :raises InvalidUUID: it is of another version or variant.
        """
        return cls(message.msb, message.lsb)

    @classmethod
    def _checked(cls, value: object, msb: int, lsb: int) -> UUID7:
        made = cls.unchecked(msb, lsb)
        problem = made.problem
        if problem is not None:
            raise InvalidUUID(value, problem)
        return made

    def to_bytes(self) -> bytes:
        data: bytes = self.to_proto().SerializeToString(deterministic=True)
        return data

    def to_big_endian(self) -> bytes:
        return _BIG_ENDIAN.pack(self.msb, self.lsb)

    def to_proto(self) -> Any:
        return proto.UUID(msb=self.msb, lsb=self.lsb)

    def __str__(self) -> str:
        high, low = f"{self.msb:016x}", f"{self.lsb:016x}"
        return f"{high[:8]}-{high[8:12]}-{high[12:]}-{low[:4]}-{low[4:]}"

    def __reduce__(self) -> tuple[Any, ...]:
        return UUID7.unchecked, (self.msb, self.lsb)

    @property
    def time_ms(self) -> int:
        """Its creation time, milliseconds since 1970."""
        return self.msb >> 16

    @property
    def problem(self) -> str | None:
        """The rule that it violates, or None if it is valid."""
        if not (0 <= self.msb <= _LARGEST and 0 <= self.lsb <= _LARGEST):
            return "a half does not fit 64 bits"
        if self.msb >> 12 & 0xF != _VERSION:
            return f"not a UUIDv7 but of version {self.msb >> 12 & 0xF}"
        if self.lsb >> 62 != _VARIANT:
            return f"not a UUIDv7 but of variant {self.lsb >> 62:#04b}"
        return None

    @property
    def is_valid(self) -> bool:
        return self.msb >> 12 & 0xF == _VERSION and self.lsb >> 62 == _VARIANT


# Bypass the checks of a frozen class: an id is created for every message.
_blank = object.__new__
_set_msb = UUID7.__dict__["msb"].__set__
_set_lsb = UUID7.__dict__["lsb"].__set__
