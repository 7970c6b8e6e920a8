"""What names a stream?

The 128-bit stream id of jrt-controller (docs/specs/jrtc.md 1).
"""

from __future__ import annotations

import re
import struct
from enum import IntEnum
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidStreamId

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "ANY_DEVICE",
    "ANY_FILTER",
    "CONTROLLER_DEVICE",
    "ForwardDestination",
    "StreamId",
    "codelet_path",
    "hash54",
    "id_for_app",
    "id_for_codelet",
    "murmur64a",
]


class ForwardDestination(IntEnum):
    """Where a stream is forwarded to: one bit per destination; other bits are reserved."""

    NONE = 0x01
    UDP = 0x02
    ANY = 0x7F


#: The device id of the controller itself; network functions are 1 to 126.
CONTROLLER_DEVICE = 0
#: In a request: any device.
ANY_DEVICE = 0x7F
#: In a request: any path, or any name. No text hashes to it: a filter has at most
#: one bit for each of its 38 seeds.
ANY_FILTER = (1 << 54) - 1

_SIZE = 16
_BUFFERS = (bytes, bytearray, memoryview)
_MAX_VER = 0x3F

# Where each field begins in the 128-bit number (docs/specs/jrtc.md 1.1). The name begins at bit 0.
_VER_SHIFT = 122
_FWD_DST_SHIFT = 115
_DEVICE_SHIFT = 108
_PATH_SHIFT = 54

# The four fields that a request may leave open, as masks over the number; `ver` is none of them
# (docs/specs/jrtc.md 2.2).
_OPEN_FIELDS = (
    ForwardDestination.ANY << _FWD_DST_SHIFT,
    ANY_DEVICE << _DEVICE_SHIFT,
    ANY_FILTER << _PATH_SHIFT,
    ANY_FILTER,
)
# Every combination of them, beginning with none.
_WIDENINGS = tuple(sum(chosen) for chosen in product(*((0, mask) for mask in _OPEN_FIELDS)))

_TEXT_FORM = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class StreamId(bytes):
    """The name of a stream, or a request that matches many: 128 bits.

    A subclass of bytes: every message has one, so hashing, comparing and storing it must be
    cheap, and bytes off the wire find it in a dictionary without conversion. They are
    big-endian, so ids sort by version, destination, device, path and name.

    :raises InvalidStreamId: there are not exactly 16 bytes
    """

    __slots__ = ()

    def __new__(cls, data: bytes | bytearray | memoryview) -> Self:
        # bytes(16) would be sixteen zeros.
        if not isinstance(data, _BUFFERS):
            raise InvalidStreamId("bytes", data, f"should be bytes, not {type(data).__name__}")
        stream = super().__new__(cls, data)
        if len(stream) != _SIZE:
            raise InvalidStreamId("length", len(stream), f"should be {_SIZE} bytes")
        return stream

    @classmethod
    def generate(
        cls,
        fwd_dst: int | None,
        device_id: int | None,
        path: str | None,
        name: str | None,
        ver: int = 0,
    ) -> Self:
        """Name the stream `name` of the creator `path`; None leaves a field open (ANY).

        :raises InvalidStreamId: a number is out of range, or a value has the wrong type
        """
        return cls.from_fields(
            ver,
            ForwardDestination.ANY if fwd_dst is None else fwd_dst,
            ANY_DEVICE if device_id is None else device_id,
            _filter("path", path),
            _filter("name", name),
        )

    @classmethod
    def from_fields(
        cls, ver: int, fwd_dst: int, device_id: int, path_bits: int, name_bits: int
    ) -> Self:
        """Build an id from its five fields.

        :raises InvalidStreamId: a field is not an integer that fits its bits
        """
        return cls._from_number(
            _checked("ver", ver, _MAX_VER) << _VER_SHIFT
            | _checked("fwd_dst", fwd_dst, ForwardDestination.ANY) << _FWD_DST_SHIFT
            | _checked("device_id", device_id, ANY_DEVICE) << _DEVICE_SHIFT
            | _checked("path", path_bits, ANY_FILTER) << _PATH_SHIFT
            | _checked("name", name_bits, ANY_FILTER)
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Self:
        """Build an id from its 16 bytes on the wire.

        :raises InvalidStreamId: there are not exactly 16 bytes
        """
        return cls(data)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read 32 hex digits, plain or dashed 8-4-4-4-12 like a UUID.

        :raises InvalidStreamId: the text is anything else
        """
        if not isinstance(text, str) or not _TEXT_FORM.fullmatch(text):
            raise InvalidStreamId(
                "text",
                text,
                "is not a stream id",
                hint="write 32 hex digits, plain or with dashes as 8-4-4-4-12",
            )
        return cls(bytes.fromhex(text.replace("-", "")))

    @classmethod
    def _from_number(cls, number: int) -> Self:
        return cls(number.to_bytes(_SIZE, "big"))

    @property
    def _number(self) -> int:
        return int.from_bytes(self, "big")

    @property
    def ver(self) -> int:
        """Version of the id: 0 by default."""
        return self._number >> _VER_SHIFT

    @property
    def fwd_dst(self) -> int:
        """Where the stream is forwarded to: a `ForwardDestination`, or a number without a name."""
        return self._number >> _FWD_DST_SHIFT & ForwardDestination.ANY

    @property
    def device_id(self) -> int:
        """Which network function made the stream; 0 is the controller."""
        return self._number >> _DEVICE_SHIFT & ANY_DEVICE

    @property
    def path(self) -> int:
        """Who made the stream, as a 54-bit filter (see `hash54`)."""
        return self._number >> _PATH_SHIFT & ANY_FILTER

    @property
    def name(self) -> int:
        """Which of its creator's streams it is, as a 54-bit filter (see `hash54`)."""
        return self._number & ANY_FILTER

    @property
    def is_concrete(self) -> bool:
        """Whether it names one stream: no field is left open."""
        number = self._number
        return all(number & mask != mask for mask in _OPEN_FIELDS)

    def matches(self, request: StreamId) -> bool:
        """Whether the router delivers this stream to a subscriber of `request`.

        The versions are equal, and each other field is equal or left open in the request
        (docs/specs/jrtc.md 2.2).
        """
        wanted = request._number
        difference = self._number ^ wanted
        for mask in _OPEN_FIELDS:
            if wanted & mask == mask:
                difference &= ~mask
        return difference == 0

    def mask_matches(self, request: StreamId) -> bool:
        """Whether every bit of this id is in `request`: the rule of the app wrappers.

        It also accepts streams that were not requested (device 1 for a request of device 3), so use
        it only to predict such a peer; decide deliveries by `matches` (docs/specs/jrtc.md 2.1).
        """
        number = self._number
        return number & request._number == number

    def lookup_keys(self) -> tuple[StreamId, ...]:
        """Return every request that matches this id, itself first, each once.

        For a concrete id they are 16: a table of subscriptions is probed with these
        (docs/specs/jrtc.md 2.2).
        """
        number = self._number
        widened = dict.fromkeys(number | widening for widening in _WIDENINGS)
        return tuple(StreamId._from_number(key) for key in widened)

    def to_bytes(self) -> bytes:
        """Return the 16 bytes on the wire, as plain `bytes`."""
        return bytes(self)

    def dashed(self) -> str:
        """Write it with dashes, 8-4-4-4-12; `hex()` writes it without."""
        digits = self.hex()
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def __str__(self) -> str:
        return self.dashed()

    def __repr__(self) -> str:
        return f"StreamId.parse({self.dashed()!r})"


def _checked(field: str, value: int, largest: int) -> int:
    # The original silently truncates 130 to 2 and -1 to ANY, which names another stream
    # (docs/specs/jrtc.md 1.2).
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidStreamId(field, value, f"should be an integer, not {type(value).__name__}")
    if not 0 <= value <= largest:
        raise InvalidStreamId(field, value, f"should be from 0 to {largest}")
    return value


def _filter(field: str, text: str | None) -> int:
    if text is None:
        return ANY_FILTER
    if not isinstance(text, str):
        raise InvalidStreamId(field, text, f"should be text, not {type(text).__name__}")
    return hash54(text)


def codelet_path(deployment: str, codeletset: str, codelet: str) -> str:
    """Return the path of the streams that a codelet makes (docs/specs/jrtc.md 3)."""
    return f"{deployment}://jbpf_agent/{codeletset}/{codelet}"


def id_for_codelet(
    deployment: str,
    codeletset: str,
    codelet: str,
    channel: str,
    device: int | None,
    fwd_dst: int | None = ForwardDestination.NONE,
) -> StreamId:
    """Name the stream of a codelet's channel.

    NONE is what a channel gets when its deployment names no destination, and what every input
    channel gets (docs/specs/jrtc.md 3).

    :raises InvalidStreamId: as `StreamId.generate`
    """
    path = codelet_path(deployment, codeletset, codelet)
    return StreamId.generate(fwd_dst, device, path, channel)


def id_for_app(
    app_name: str, stream_name: str, *, fwd_dst: int | None = ForwardDestination.NONE
) -> StreamId:
    """Name a stream that an app of the controller makes; its path is the app's name.

    :raises InvalidStreamId: as `StreamId.generate`
    """
    # NONE, as for codelets (docs/specs/jrtc.md 3, 5.2): the forwarding app takes whatever says UDP,
    # so a stream between apps must not leave the machine unless its creator asks for it.
    return StreamId.generate(fwd_dst, CONTROLLER_DEVICE, app_name, stream_name)


# --- the hash (docs/specs/jrtc.md 1.3) ----------------------------------------------------------

_FILTER_BITS = 54
_SEEDS = range(38)
_U64 = (1 << 64) - 1
_MULTIPLIER = 0xC6A4A7935BD1E995
_SHIFT = 47
_BLOCK = struct.Struct("<Q")


@lru_cache(maxsize=4096)
def hash54(text: str) -> int:
    """Hash a path or a name to the 54-bit Bloom filter that stands for it in an id.

    Nothing is normalised. Texts under 8 bytes collide easily (docs/specs/jrtc.md 1.4): see
    `StreamNames`.

    :raises InvalidStreamId: the text cannot be written as UTF-8
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidStreamId("text", text, "cannot be written as UTF-8") from error
    bits = 0
    for seed in _SEEDS:
        bits |= 1 << murmur64a(data, seed) % _FILTER_BITS
    return bits


def murmur64a(data: bytes, seed: int) -> int:
    """Hash bytes to 64 bits by MurmurHash64A."""
    whole = len(data) - len(data) % _BLOCK.size
    state = seed ^ (len(data) * _MULTIPLIER & _U64)
    for (block,) in _BLOCK.iter_unpack(data[:whole]):
        state = (state ^ _mix(block * _MULTIPLIER & _U64)) * _MULTIPLIER & _U64
    if tail := data[whole:]:
        state = (state ^ int.from_bytes(tail, "little")) * _MULTIPLIER & _U64
    state = _mix(state)
    return state ^ state >> _SHIFT


def _mix(word: int) -> int:
    return (word ^ word >> _SHIFT) * _MULTIPLIER & _U64
