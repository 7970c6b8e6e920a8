"""How does LROSE frame a compressed message?

The toolsa compression buffer of `ta_compress` and `ta_decompress`: a header that names the method
and the lengths, then the coded data (docs/specs/lrose.md 1.13).
"""

from __future__ import annotations

import bz2
import enum
import struct
import sys
import zlib
from typing import NamedTuple, TypeAlias

from penstock.core.errors import Malformed, MessageTooLarge
from penstock.queue.classic import lzo

__all__ = ["HEADER_SIZE", "Method", "compress", "decompress"]

_Bytes: TypeAlias = bytes | bytearray | memoryview

_WHAT = "LROSE compression buffer"


class Method(enum.IntEnum):
    """A compression method, by its number in `ta_compression_method_t`."""

    NONE = 0
    RLE = 1
    LZO = 2
    ZLIB = 3
    BZIP = 4
    GZIP = 5

    @property
    def written(self) -> Method:
        """The method that `ta_compress` writes when asked for this one.

        It no longer writes RLE, LZO or zlib: those requests become gzip, silently.
        """
        return self if self in _WRITTEN else Method.GZIP


_WRITTEN = frozenset({Method.NONE, Method.BZIP, Method.GZIP})

# --- layout ---------------------------------------------------------------------------------


class _Header(NamedTuple):
    magic: int
    nbytes_uncompressed: int
    nbytes_compressed: int  # with the header
    nbytes_coded: int  # without it


class _RleHeader(NamedTuple):
    magic: int
    key: int
    nbytes_buffer: int  # with the header and up to 3 bytes of padding; LROSE ignores it
    nbytes_uncompressed: int
    nbytes_compressed: int  # without either


_MAGIC = struct.Struct(">I")
_HEADER_32 = struct.Struct(">4I8x")
_MOST_32 = 0xFFFFFFFE  # uncompressed bytes; LROSE writes the 64-bit header for more
_HEADER_64 = struct.Struct(">4xI3Q16x")
_MAGIC_64 = 0x64646464  # stands before the magic

#: Bytes that `compress` adds before the data.
HEADER_SIZE = _HEADER_32.size

_COMPRESSED = {
    Method.LZO: 0xF1F1F1F1,
    Method.BZIP: 0xF3F3F3F3,
    Method.ZLIB: 0xF5F5F5F5,
    Method.GZIP: 0xF7F7F7F7,
}
#: Uncompressed: no compression was requested, or the data did not shrink.
_STORED = {
    Method.NONE: 0x2F2F2F2F,
    Method.LZO: 0xF2F2F2F2,
    Method.BZIP: 0xF4F4F4F4,
    Method.ZLIB: 0xF6F6F6F6,
    Method.GZIP: 0xF8F8F8F8,
}
#: By magic: the method, or None for uncompressed data.
_CODING: dict[int, Method | None] = {
    **{magic: method for method, magic in _COMPRESSED.items()},
    **dict.fromkeys(_STORED.values()),
}
#: The third magic is the first one in the other byte order, and so is the header after it.
_RLE_HEADER = {
    0xFE0103FD: struct.Struct(">5I"),
    0xFE0104FD: struct.Struct(">5I"),
    0xFD0301FE: struct.Struct("<5I"),
}
_RLE_RUN_SIZE = 3  # key, count, value; every other byte stands for itself

# mtime 0, no flags, OS 3 (Unix). zlib's own gzip wrapper sets other bytes on some builds.
_GZIP_HEADER = bytes.fromhex("1f8b 08 00 00000000 00 03")
_GZIP_TRAILER = struct.Struct("<2I")  # CRC-32, length
_WBITS = {Method.ZLIB: zlib.MAX_WBITS, Method.GZIP: 16 + zlib.MAX_WBITS}

# --- writing --------------------------------------------------------------------------------


def compress(data: _Bytes, method: Method) -> bytes:
    """Return the buffer that LROSE's `ta_compress` makes of `data`, byte for byte.

    The method is `method.written`; data that do not shrink are stored uncompressed.

    :raises MessageTooLarge: `data` need LROSE's 64-bit header, which no queue can hold.
    """
    view = memoryview(data).cast("B")
    size = len(view)
    if size > _MOST_32:
        raise MessageTooLarge(size, _MOST_32, hint="send it as several messages")
    method = method.written
    if method is Method.NONE:
        return _buffer(_STORED[method], size, view)
    member = bz2.compress(view, 1) if method is Method.BZIP else _gzip_member(view)
    if len(member) >= size:
        return _buffer(_STORED[method], size, view)
    return _buffer(_COMPRESSED[method], size, member)


def _buffer(magic: int, size: int, coded: bytes | memoryview) -> bytes:
    header = _HEADER_32.pack(magic, size, HEADER_SIZE + len(coded), len(coded))
    return b"".join((header, coded))


def _gzip_member(view: memoryview) -> bytes:
    deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, 8)
    body = deflate.compress(view)
    trailer = _GZIP_TRAILER.pack(zlib.crc32(view), len(view))
    return b"".join((_GZIP_HEADER, body, deflate.flush(), trailer))


# --- reading --------------------------------------------------------------------------------


def decompress(buffer: _Bytes, limit: int) -> bytes:
    """Return the data in `buffer`, of any LROSE method, old or new.

    Bytes after the coded data are ignored: LROSE's server hands out up to 7 of them
    (docs/specs/lrose.md 1.13, "Server pass-through").

    :raises Malformed: the buffer is incomplete or damaged, or its data are longer than `limit`.
    """
    view = memoryview(buffer).cast("B")
    (magic,) = _unpack(_MAGIC, view)
    if magic in _RLE_HEADER:
        return _decompress_rle(view, _RLE_HEADER[magic], limit)
    layout = _HEADER_64 if magic == _MAGIC_64 else _HEADER_32
    header = _Header(*_unpack(layout, view))
    if header.magic not in _CODING:
        raise Malformed(_WHAT, "magic", "one of LROSE's", f"{header.magic:#010x}")
    size, coded = header.nbytes_uncompressed, header.nbytes_coded
    _check_size(size, limit)
    if header.nbytes_compressed != layout.size + coded:
        raise Malformed(_WHAT, "nbytes_compressed", layout.size + coded, header.nbytes_compressed)
    body = _body(view, layout.size, "nbytes_coded", coded)
    method = _CODING[header.magic]
    if method is None:
        if coded != size:
            raise Malformed(_WHAT, "nbytes_coded of stored data", size, coded)
        return bytes(body)
    if method is Method.LZO:
        return lzo.decompress(bytes(body), size)
    return _inflate(body, method, size)


def _unpack(layout: struct.Struct, view: memoryview) -> tuple[int, ...]:
    if len(view) < layout.size:
        raise Malformed(_WHAT, "header", f"{layout.size} bytes", f"{len(view)} bytes")
    return layout.unpack_from(view)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise Malformed(_WHAT, "nbytes_uncompressed", f"at most {limit}", size)


def _body(view: memoryview, start: int, field: str, length: int) -> memoryview:
    there = len(view) - start
    if length > there:
        raise Malformed(_WHAT, field, f"at most the {there} bytes there are", length)
    return view[start : start + length]


def _inflate(body: memoryview, method: Method, size: int) -> bytes:
    # One byte more than announced: enough to see that there is more, and 0 would mean "no bound".
    most = min(size + 1, sys.maxsize)
    try:
        if method is Method.BZIP:
            bunzip = bz2.BZ2Decompressor()
            data = bunzip.decompress(body, most)
            complete, trailing = bunzip.eof, len(bunzip.unused_data)
        else:
            inflate = zlib.decompressobj(_WBITS[method])
            data = inflate.decompress(body, most)
            complete, trailing = inflate.eof, len(inflate.unused_data)
    except (zlib.error, OSError) as error:  # bz2 raises OSError
        raise Malformed(_WHAT, "coded data", f"a {method.name} stream", str(error)) from error
    if len(data) > size:
        raise Malformed(_WHAT, "length of the decompressed data", size, "more")
    if not complete:
        raise Malformed(_WHAT, "coded data", "a complete stream", "its end missing")
    if trailing:
        raise Malformed(_WHAT, "coded data", "one stream", f"{trailing} bytes after it")
    if len(data) != size:
        raise Malformed(_WHAT, "length of the decompressed data", size, len(data))
    return data


def _decompress_rle(view: memoryview, layout: struct.Struct, limit: int) -> bytes:
    header = _RleHeader(*_unpack(layout, view))
    size = header.nbytes_uncompressed
    _check_size(size, limit)
    if header.key not in range(256):
        raise Malformed(_WHAT, "RLE key", "one byte", header.key)
    coded = bytes(_body(view, layout.size, "nbytes_compressed", header.nbytes_compressed))
    data = bytearray()
    at = 0
    while at < len(coded):
        run = coded.find(header.key, at)
        literals = coded[at:run] if run >= 0 else coded[at:]
        data += literals
        at += len(literals)
        if run >= 0:
            data += _rle_run(coded, run)
            at += _RLE_RUN_SIZE
        if len(data) > size:
            raise Malformed(_WHAT, "length of the decompressed data", size, "more")
    if len(data) != size:
        raise Malformed(_WHAT, "length of the decompressed data", size, len(data))
    return bytes(data)


def _rle_run(coded: bytes, at: int) -> bytes:
    triple = coded[at : at + _RLE_RUN_SIZE]
    if len(triple) < _RLE_RUN_SIZE:
        raise Malformed(_WHAT, f"RLE run at coded byte {at}", "key, count and value", triple)
    count = triple[1]
    if not count:
        raise Malformed(_WHAT, f"count of the RLE run at coded byte {at}", "1 to 255", count)
    return triple[2:] * count
