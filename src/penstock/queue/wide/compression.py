"""How are payloads made smaller in a wide queue?"""

from __future__ import annotations

import struct
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import pyarrow as pa

if TYPE_CHECKING:
    from penstock.core.interfaces import BytesLike

__all__ = ["Compression"]

#: The length of the payload comes first.
_LENGTH: Final = struct.Struct("<Q")


class Compression(StrEnum):
    """How every payload of a queue is stored."""

    NONE = "none"
    LZ4 = "lz4"
    ZSTD = "zstd"

    @classmethod
    def parse(cls, value: object) -> object:
        """Accept `off` and `false` for none, and `true` for zstd."""
        if value in {"gzip", "bzip2"}:
            raise ValueError("should be none, lz4 or zstd; gzip and bzip2 are for layout=classic")
        return {"off": "none", "false": "none", "true": "zstd", "on": "zstd"}.get(str(value), value)

    @property
    def code(self) -> int:
        """The number in the header."""
        return _CODES.index(self)

    @classmethod
    def of_code(cls, code: int) -> Compression:
        """Return the way of that number.

        :raises ValueError: there is none.
        """
        if not 0 <= code < len(_CODES):
            raise ValueError(f"no compression has the number {code}")
        return _CODES[code]

    def compress(self, payload: BytesLike) -> bytes:
        codec = pa.Codec(self.value)
        small: bytes = codec.compress(payload, asbytes=True)
        return _LENGTH.pack(memoryview(payload).nbytes) + small

    def decompress(self, stored: bytes, limit: int) -> bytes:
        """Return the payload again, unless it says that it is longer than the limit.

        :raises ValueError: these are not bytes that `compress` made.
        """
        if len(stored) < _LENGTH.size:
            raise ValueError("it is too short to be compressed")
        (length,) = _LENGTH.unpack_from(stored)
        if length > limit:
            raise ValueError(f"it says that it has {length} bytes")
        if length == 0:
            return b""
        try:
            payload = self._expand(memoryview(stored)[_LENGTH.size :], length)
        except (OSError, pa.ArrowException) as error:
            raise ValueError(str(error)) from error
        if len(payload) != length:
            raise ValueError(f"it has {len(payload)} bytes, and says {length}")
        return payload

    def _expand(self, small: memoryview, length: int) -> bytes:
        if self is Compression.ZSTD:
            whole: bytes = pa.Codec(self.value).decompress(small, length, asbytes=True)
            return whole
        # The codec of lz4 fills up what a length that is too large promises; a stream does not.
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(small)), self.value) as stream:
            return bytes(stream.read(length + 1))


#: In the order of their numbers.
_CODES: Final = (Compression.NONE, Compression.LZ4, Compression.ZSTD)
