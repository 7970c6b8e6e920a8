"""How does LROSE frame a message on a socket?

Every message of every LROSE server is one frame: a cookie, an id that is never checked, the length,
a number that counts from 1 in each direction, and the payload (docs/specs/lrose.md 2.2).
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed

__all__ = [
    "HEADER_SIZE",
    "HTTP_REPLY",
    "LARGEST_HTTP_HEADER",
    "LARGEST_OVERHEAD",
    "SMALL_LIMIT",
    "Decoder",
    "Frame",
    "encode",
    "encode_header",
    "keep_memory",
]

_WHAT = "LROSE socket frame"

#: Cookie, id, len, seq_no.
_HEADER_32: Final = struct.Struct(">8s3i")
_HEADER_64: Final = struct.Struct(">8s3q")
_COOKIE_32: Final = b"\xf0" * 8
_COOKIE_64: Final = b"\xf6" * 8
_COOKIE_STARTS: Final = {_COOKIE_32[0], _COOKIE_64[0]}

#: Bytes before a payload, as a rule.
HEADER_SIZE: Final = _HEADER_32.size
#: From this size on payloads need the 64-bit header.
SMALL_LIMIT: Final = 2**31 - 1
#: The number of a frame in 32 bits, at most.
_LARGEST_SEQ: Final = 2**31 - 1
#: Most bytes of an HTTP header in LROSE.
LARGEST_HTTP_HEADER: Final = 2000
#: What its server puts before the reply to a frame that came behind an HTTP header.
HTTP_REPLY: Final = b"HTTP/1.1 200 OK\r\n\r\n"
_HTTP_END: Final = b"\r\n\r\n"
#: Bytes before a payload, at most.
LARGEST_OVERHEAD: Final = LARGEST_HTTP_HEADER + _HEADER_64.size
#: Initial bytes of a decoder's buffer, and the size above which it is shrunk to that after a
#: frame.
_LEAST_ROOM: Final = 1 << 16
_WORTH_KEEPING: Final = 1 << 21
#: Freed blocks up to this size are kept by the C library.
_LARGEST_KEPT: Final = 4 << 20


@cache
def keep_memory() -> None:
    """Let the C library keep freed blocks of the size of large frames.

    By default it maps a large block from the system each time, with a page fault for every 4 KiB,
    until a larger block has been freed: mallopt(3), M_MMAP_THRESHOLD. It may then keep at most
    twice as much.
    """
    bytearray(_LARGEST_KEPT)


class Frame(NamedTuple):
    """One message on a socket."""

    #: The service's own number; 0 for pings and errors. No peer checks it.
    id: int
    #: Counts from 1 for each direction of a connection. No peer checks it.
    seq: int
    payload: bytes
    #: It came behind an HTTP header, and so must its reply.
    is_tunnelled: bool = False


def encode_header(id: int, seq: int, size: int, *, wide: bool = False) -> bytes:
    """Return the header for a payload of `size` bytes; `wide` uses 64 bits for a small one, too.

    A number beyond 32 bits wraps, as LROSE's does: a connection may have more frames.

    :raises InvalidOption: the id is out of range.
    """
    layout, cookie = _HEADER_32, _COOKIE_32
    if wide or size >= SMALL_LIMIT:
        layout, cookie = _HEADER_64, _COOKIE_64
    elif seq > _LARGEST_SEQ:
        seq = (seq + 2**31) % 2**32 - 2**31
    try:
        return layout.pack(cookie, id, size, seq)
    except struct.error as error:
        raise InvalidOption("frame", (id, seq), str(error)) from None


def encode(frame: Frame) -> bytes:
    """Return the bytes of a frame, for one write to a socket: three would cost 40 ms."""
    header = encode_header(frame.id, frame.seq, len(frame.payload))
    if frame.is_tunnelled:
        return b"".join((HTTP_REPLY, header, frame.payload))
    return header + frame.payload


class Decoder:
    """Incremental decoder of the bytes of one direction of a connection into frames.

    Pass bytes to `feed`, or read them into `room()` and call `took`. It holds little more than one
    frame of `max_bytes`, and at most twice the bytes received of it.
    """

    def __init__(self, max_bytes: int, *, allow_http: bool = False) -> None:
        self.max_bytes = max_bytes
        self.allow_http = allow_http
        #: The error in the bytes after the last frame; nothing more can be decoded.
        self.fault: Malformed | None = None
        self._buffer = bytearray(_LEAST_ROOM)
        self._view = memoryview(self._buffer)
        #: Start and end of the received bytes that are not consumed.
        self._at = 0
        self._end = 0
        #: Bytes that must be held before decoding can continue.
        self._needed = 1
        self._is_tunnelled = False

    @property
    def held(self) -> int:
        """Bytes received of an incomplete frame."""
        return self._end - self._at

    @property
    def missing(self) -> int:
        """Bytes still needed before decoding can continue, at least 1."""
        return max(1, self._needed - self.held)

    def room(self) -> memoryview:
        """Return memory to read bytes into, valid until the next call."""
        if not self._end and self._buffer:
            return self._view
        self._make_room(_LEAST_ROOM // 2)
        return self._view[self._end :]

    def glance(self) -> bytearray | None:
        """Return the buffer of `room()`, if no earlier bytes are held.

        A caller that handles a complete frame there itself must not call `took` for it.
        """
        if self._end or self._is_tunnelled or self.fault is not None:
            return None
        return self._buffer

    def took(self, count: int) -> list[Frame]:
        """Return the frames that are complete after `count` bytes were read into `room()`.

        Frames before a fault are still returned: see `fault`; the next call raises it.

        :raises Malformed: the bytes are not a frame, or the frame is larger than allowed.
        """
        if self.fault is not None:
            raise self.fault.with_traceback(None)
        self._end += count
        if self.held < self._needed:
            return []
        if not self._at and (frame := self._only_frame()) is not None:
            return [frame]
        frames: list[Frame] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except Malformed as fault:
            self.fault = fault
            self._replace_buffer(0)
            self._at = self._end = 0
            if not frames:
                raise
            return frames
        if self._at == self._end:
            self._at = self._end = 0
            if len(self._buffer) > _WORTH_KEEPING:
                self._replace_buffer(_LEAST_ROOM)
        return frames

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Add bytes, and return the complete frames; see `took`.

        :raises Malformed: the bytes are not a frame, or the frame is larger than allowed.
        """
        size = len(data)
        if self.fault is None:
            self._make_room(size)
            self._buffer[self._end : self._end + size] = data
        return self.took(size)

    def _make_room(self, size: int) -> None:
        """Make room for more bytes after those held."""
        held = self.held
        if len(self._buffer) - self._end >= size:
            return
        if len(self._buffer) - held < size or held > len(self._buffer) // 2:
            # A new buffer, because a caller may still use this one.
            old = self._view[self._at : self._end]
            self._replace_buffer(max(held + size, 2 * held, _LEAST_ROOM))
            self._view[:held] = old
        else:
            self._buffer[:held] = self._buffer[self._at : self._end]
        self._at, self._end = 0, held

    def _replace_buffer(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._view = memoryview(self._buffer)

    def _only_frame(self) -> Frame | None:
        """Return the frame if exactly one small frame was received, the usual case; else None."""
        end = self._end
        if not _HEADER_32.size <= end <= _LEAST_ROOM or self._is_tunnelled:
            return None
        cookie, id, size, seq = _HEADER_32.unpack_from(self._buffer)
        if cookie != _COOKIE_32 or size != end - _HEADER_32.size or size > self.max_bytes:
            return None
        self._end = 0
        self._needed = 1
        return Frame(id, seq, bytes(self._view[_HEADER_32.size : end]))

    def _next(self) -> Frame | None:
        buffer, at = self._buffer, self._at
        there = self._end - at
        if there < _HEADER_32.size:
            self._needed = _HEADER_32.size if there else 1
            if not there or buffer[at] in _COOKIE_STARTS or self._may_be_http():
                return None
        cookie = buffer[at : min(at + 8, self._end)]
        if cookie == _COOKIE_32:
            layout = _HEADER_32
        elif cookie == _COOKIE_64:
            layout = _HEADER_64
            if there < layout.size:
                self._needed = layout.size
                return None
        else:
            return self._next() if self._skip_http() else None
        _, id, size, seq = layout.unpack_from(buffer, at)
        if not 0 <= size <= self.max_bytes:
            raise Malformed(
                _WHAT,
                "len",
                f"0 to {self.max_bytes}",
                size,
                hint="allow larger messages if this is one",
            )
        start = at + layout.size
        end = start + size
        if self._end < end:
            self._needed = end - at
            return None
        payload = bytes(self._view[start:end])
        self._at = end
        tunnelled, self._is_tunnelled = self._is_tunnelled, False
        return Frame(id, seq, payload, tunnelled)

    def _may_be_http(self) -> bool:
        return self.allow_http and not self._is_tunnelled

    def _skip_http(self) -> bool:
        """Skip an HTTP header; False: it is incomplete.

        :raises Malformed: it has no end, or is not allowed here.
        """
        buffer, at = self._buffer, self._at
        start = bytes(buffer[at : min(at + 8, self._end)])
        if not self._may_be_http() or not start.isascii():
            raise Malformed(_WHAT, "cookie", "8 bytes f0 or f6", start.hex(" "))
        end = buffer.find(_HTTP_END, at, min(at + LARGEST_HTTP_HEADER, self._end))
        if end < 0:
            if self.held >= LARGEST_HTTP_HEADER:
                raise Malformed(
                    _WHAT, "HTTP header", f"an end in {LARGEST_HTTP_HEADER} bytes", "none"
                )
            self._needed = self.held + 1
            return False
        self._at = end + len(_HTTP_END)
        self._is_tunnelled = True
        return True
