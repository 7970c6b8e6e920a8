"""What does psi's TcpWriter send, which most Python programs use? (docs/specs/psi.md 10)

Frames with a length before them; the format of the writer says what is in a frame.
"""

from __future__ import annotations

import json
import struct
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import InvalidOption, Malformed
from penstock.core.units import parse_time
from penstock.protocols.psi.ticks import (
    UNIX_EPOCH_TICKS,
    DateTime,
    ns_to_raw,
    ns_to_ticks,
    raw_to_ns,
)
from penstock.protocols.psi.wire import INT32, Cursor, StepDecoder, pack_short_text

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.core.interfaces import BytesLike

__all__ = [
    "FrameDecoder",
    "InteropMessage",
    "decode_json",
    "decode_timed_text",
    "encode_frame",
    "encode_json",
    "encode_timed_text",
]

_WHAT: Final = "psi interop frame"
_RAW: Final = struct.Struct("<Q")
_MAX_FRAME_BYTES: Final = 1 << 26


class InteropMessage(NamedTuple):
    """A value and its originating time."""

    originating_ns: int
    message: Any


class FrameDecoder(StepDecoder[bytes]):
    """Decodes the frames that a TcpSource receives."""

    what = _WHAT

    def __init__(self, max_bytes: int = _MAX_FRAME_BYTES) -> None:
        if max_bytes < 1:
            raise InvalidOption("max_bytes", max_bytes, "must be at least 1")
        self.max_bytes = max_bytes
        super().__init__()

    def _read(self) -> Generator[int, bytes, None]:
        while True:
            size: int = INT32.unpack((yield INT32.size))[0]
            if not 0 <= size <= self.max_bytes:
                raise Malformed(_WHAT, "length", f"0 to {self.max_bytes}", size)
            self._give((yield size))


def encode_frame(data: BytesLike) -> bytes:
    """Return a frame."""
    return INT32.pack(len(data)) + data


def decode_json(data: BytesLike) -> InteropMessage:
    """Decode a frame of psi's JsonFormat.

    :raises Malformed: it is not such JSON, or has no time.
    """
    try:
        content = json.loads(bytes(data))
        # .NET writes 7 decimals: ticks of 100 ns.
        return InteropMessage(_time_of(content["originatingTime"]), content["message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Malformed(_WHAT, "JSON", "originatingTime and message", repr(error)[:200]) from None


def _time_of(text: str) -> int:
    try:
        return parse_time(text)
    except InvalidOption:  # before 1677 or after 2262, if it is a time: saturated
        return DateTime.of(datetime.fromisoformat(text)).time_ns


def encode_json(message: InteropMessage) -> bytes:
    """Return a frame's content for psi's JsonFormat.

    :raises InvalidOption: the value has no JSON form.
    """
    time = DateTime(ns_to_ticks(message.originating_ns))
    decimals = (time.ticks - UNIX_EPOCH_TICKS) % 10_000_000
    seconds = time.datetime.replace(tzinfo=None, microsecond=0).isoformat()
    text = f"{seconds}.{decimals:07d}Z"
    try:
        content = json.dumps(
            {"originatingTime": text, "message": message.message},
            ensure_ascii=False,
            separators=(",", ":"),
        )
        return content.encode()
    except (TypeError, ValueError) as error:
        raise InvalidOption("message", message.message, str(error)) from None


def decode_timed_text(data: BytesLike) -> InteropMessage:
    """Decode a frame of a custom format with one text: a DateTime, then the text.

    :raises Malformed: it is something else.
    """
    cursor = Cursor(data, _WHAT)
    time_ns = raw_to_ns(cursor.uint64("originating time"))
    return InteropMessage(time_ns, cursor.short_text("message"))


def encode_timed_text(originating_ns: int, text: str) -> bytes:
    """Return the content of such a frame."""
    return _RAW.pack(ns_to_raw(originating_ns)) + pack_short_text(text)
