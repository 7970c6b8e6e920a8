"""How does a text travel: as `LHHTTT`, its length of the length, its length, and itself?

`TTT` is the text in UTF-8, `HH` its length in bytes in lower-case hexadecimal without leading
zeros, `L` the number of digits of `HH`, one hexadecimal digit. `Hello World` is `1bHello World`.
Input may have upper-case digits and leading zeros, and nothing else that a number could be
(docs/specs/streampy.md 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn, overload

import numpy as np

from penstock.core.errors import Malformed, MessageTooLarge
from penstock.protocols.lhhttt._frames import cut, decode_all, group, locate, split
from penstock.protocols.lhhttt._frames import join as join_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.core.interfaces import BytesLike

__all__ = [
    "DEFAULT_PORT",
    "LONGEST",
    "FrameDecoder",
    "Frames",
    "decode",
    "decode_all",
    "decode_bytes",
    "encode",
    "encode_bytes",
    "frame_body",
    "group",
    "join_frames",
    "split_frames",
]

#: Of stream-py's queues.
DEFAULT_PORT: Final = 10000
#: The longest text that the framing can say, in bytes: fifteen digits.
LONGEST: Final = 16**15 - 1
#: What a stream's decoder takes, unless it is told otherwise: a peer may announce anything.
_LIMIT: Final = 64 * 1024 * 1024
#: Bytes of the body of a frame that is too long, by which it is decided whether to skip it.
_HEAD: Final = 128
_WHAT: Final = "LHHTTT frame"
_DIGITS: Final = b"0123456789abcdefABCDEF"


def encode(text: str) -> bytes:
    """Return the frame of a text.

    :raises UnicodeEncodeError: it has an unpaired surrogate.
    """
    return encode_bytes(text.encode())


def encode_bytes(data: BytesLike) -> bytes:
    """Return the frame of bytes, which should be UTF-8 where the peer is another's program.

    :raises MessageTooLarge: its length needs more than fifteen digits.
    """
    if len(data) > LONGEST:
        raise MessageTooLarge(len(data), LONGEST)
    return join_frames((data if isinstance(data, bytes) else bytes(data),))


def decode(frame: BytesLike) -> str:
    """Return the text of exactly one frame.

    :raises Malformed: it is not one frame, or its text is not UTF-8.
    """
    data = decode_bytes(frame)
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        at = len(frame) - len(data) + error.start
        found = f"{data[error.start : error.end]!r}"
        raise Malformed(_WHAT, f"byte {at}", "text in UTF-8", found) from None


def decode_bytes(frame: BytesLike) -> bytes:
    """Return the body of exactly one frame.

    :raises Malformed: it is not one frame.
    """
    found, end = split(frame, LONGEST)
    if len(found) == 1 and end == len(frame):
        return found[0]
    body = frame_body(bytes(frame), 0)
    if body is None:
        raise Malformed(_WHAT, "length", "the whole of its header", f"{len(frame)} bytes")
    raise Malformed(_WHAT, "length", f"{sum(body)} bytes", f"{len(frame)} bytes")


def split_frames(data: bytes) -> list[bytes]:
    """Return the bodies of concatenated frames.

    :raises Malformed: these are no frames, or the last one is cut off.
    """
    return list(Frames.located(data))


class Frames(Sequence[bytes]):
    """The bodies of concatenated frames, as places in their bytes, until one is asked for."""

    __slots__ = ("data", "places", "size")

    def __init__(self, data: bytes, places: NDArray[np.int64], size: int) -> None:
        """Take the bytes, where each body begins and ends in them, and the bytes of all bodies."""
        self.data = data
        self.places = places
        self.size = size

    @classmethod
    def located(cls, data: bytes) -> Frames:
        """Find the bodies of concatenated frames.

        :raises Malformed: these are no frames, or the last one is cut off.
        """
        places, end, size = locate(data, LONGEST)
        if end < len(data):
            frame_body(data, end)
            raise Malformed(_WHAT, f"byte {end}", "a whole frame", f"{len(data) - end} bytes")
        return cls(data, np.frombuffer(places, np.int64).reshape(-1, 2), size)

    @classmethod
    def of_one(cls, body: bytes) -> Frames:
        """Return the body of one frame as these."""
        return cls(body, np.array([[0, len(body)]], np.int64), len(body))

    @property
    def largest(self) -> int:
        """Bytes of the largest body."""
        return int((self.places[:, 1] - self.places[:, 0]).max(initial=0))

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> Frames: ...
    def __getitem__(self, at: int | slice) -> bytes | Frames:
        if isinstance(at, slice):
            places = np.ascontiguousarray(self.places[at])
            return Frames(self.data, places, int((places[:, 1] - places[:, 0]).sum()))
        start, end = self.places[at]
        return self.data[start:end]

    def __iter__(self) -> Iterator[bytes]:
        return iter(cut(self.data, self.places))


def frame_body(data: bytes | bytearray, at: int) -> tuple[int, int] | None:
    """Return start and size of a frame's body, or None if the header is incomplete.

    :raises Malformed: this is no frame header.
    """
    if len(data) <= at:
        return None
    count = _number(data, at, at + 1)
    if count == 0:
        raise Malformed(_WHAT, f"byte {at}", "a digit from 1 to f", "'0'")
    start = at + 1 + count
    if len(data) < start:
        _number(data, at + 1, len(data))  # what is there must be digits
        return None
    return start, _number(data, at + 1, start)


def _number(data: bytes | bytearray, start: int, end: int) -> int:
    # Python's own parser takes signs, spaces, underscores and digits of other scripts, too.
    for at in range(start, end):
        if data[at] not in _DIGITS:
            found = ascii(chr(data[at]))
            raise Malformed(_WHAT, f"byte {at}", "a hexadecimal digit", found)
    return int(data[start:end] or b"0", 16)


class FrameDecoder:
    """An incremental decoder: finds frames in a stream of bytes.

    After an error the start of the next frame is unknown: close the connection.
    """

    def __init__(
        self, limit: int = _LIMIT, is_skipped: Callable[[bytes], bool] | None = None
    ) -> None:
        """Refuse frames of more than `limit` bytes by their header, before their body arrives.

        :param is_skipped: called with the first 128 bytes of the body of such a frame, or all if it
            is shorter; if it returns true, the frame is discarded as it arrives, and the stream
            goes on behind it
        """
        self._limit = limit
        self._is_skipped = is_skipped
        #: Bytes to be discarded: what is left of a frame that is too long.
        self._skipping = 0
        self._rest = bytearray()
        #: Bytes of the frame at its beginning, as far as that is known: until then nobody looks.
        self._wanted = 0
        #: Bytes of whole frames so far: where in the stream the next one begins.
        self.position = 0

    @property
    def pending(self) -> int:
        """Bytes of an incomplete frame that are buffered."""
        return len(self._rest)

    def feed(self, data: BytesLike) -> Iterator[bytes]:
        """Add received bytes, and yield the bodies of completed frames.

        :raises Malformed: the stream holds no valid frame here, or one that is too long.
        """
        rest = self._rest
        rest += data
        while rest and len(rest) >= self._wanted:
            self._wanted = 0
            self._drop(self._skip())
            found, end = split(rest, self._limit)
            self._drop(end)
            yield from found
            if rest:
                self._look_ahead()
            if not self._skipping:
                return

    def _skip(self) -> int:
        """Return how many of the bytes that have come belong to a frame that is too long."""
        count = min(len(self._rest), self._skipping)
        self._skipping -= count
        return count

    def _drop(self, count: int) -> None:
        del self._rest[:count]
        self.position += count

    def _look_ahead(self) -> None:
        """Check the header of the next frame."""
        try:
            body = frame_body(self._rest, 0)
        except Malformed as error:
            self._refuse(error)
        if body is None:
            return
        if body[1] > self._limit:
            if self._is_skipped is not None:
                head = slice(body[0], body[0] + min(body[1], _HEAD))
                if len(self._rest) < head.stop:
                    self._wanted = head.stop
                    return
                if self._is_skipped(bytes(self._rest[head])):
                    self._skipping = sum(body)
                    return
            where = f"length at byte {self.position + 1} of the stream"
            raise Malformed(_WHAT, where, f"at most {self._limit:,} bytes", f"{body[1]:,}")
        self._wanted = sum(body)

    def _refuse(self, error: Malformed) -> NoReturn:
        at = self.position + int(error.where.removeprefix("byte "))
        raise Malformed(_WHAT, f"byte {at} of the stream", error.expected, error.found) from None
