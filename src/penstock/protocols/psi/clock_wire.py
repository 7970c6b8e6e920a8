"""How do two psi machines compare their clocks? (spec psi 9)"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import Malformed
from penstock.protocols.psi.decoding import StepDecoder
from penstock.protocols.psi.errors import WrongVersion
from penstock.protocols.psi.ticks import MAX_TICKS, ns_to_ticks, ticks_to_ns
from penstock.protocols.psi.wire import pack_short_text, utf8

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = [
    "CLOCK_PORT",
    "CLOCK_VERSION",
    "ClockReply",
    "ClockReplyDecoder",
    "ClockRequestDecoder",
    "clock_offset_ns",
    "encode_clock_request",
]

CLOCK_PORT: Final = 11511
CLOCK_VERSION: Final = 0

_REQUEST: Final = "psi clock request"
_REPLY: Final = "psi clock reply"
_VERSION: Final = struct.Struct("<h")
_TICKS: Final = struct.Struct("<q")
#: No machine's name is longer; one byte of length is enough for it, but psi allows two.
_LONGEST_NAME: Final = 1024
_MORE: Final = 0x80


def encode_clock_request() -> bytes:
    """Return what a client sends."""
    return _VERSION.pack(CLOCK_VERSION)


class ClockReply(NamedTuple):
    """What a server says, after which it closes."""

    time_ns: int
    machine: str

    def to_bytes(self) -> bytes:
        """Return its bytes."""
        return _TICKS.pack(ns_to_ticks(self.time_ns)) + pack_short_text(self.machine)


class ClockRequestDecoder(StepDecoder[int]):
    """What a server hears: the version, once."""

    what = _REQUEST

    def _read(self) -> Generator[int, bytes, None]:
        (version,) = _VERSION.unpack((yield _VERSION.size))
        if version != CLOCK_VERSION:
            raise WrongVersion(_REQUEST, CLOCK_VERSION, version)
        self._give(version)


class ClockReplyDecoder(StepDecoder[ClockReply]):
    """What a client hears: one reply."""

    what = _REPLY

    def _read(self) -> Generator[int, bytes, None]:
        (ticks,) = _TICKS.unpack((yield _TICKS.size))
        if not 0 <= ticks <= MAX_TICKS:
            raise Malformed(_REPLY, "ticks", f"0 to {MAX_TICKS}", ticks)
        (size,) = yield 1
        if size & _MORE:
            (high,) = yield 1
            size = size & ~_MORE | high << 7
        if size > _LONGEST_NAME:
            raise Malformed(_REPLY, "machine name", f"at most {_LONGEST_NAME} bytes", size)
        self._give(ClockReply(ticks_to_ns(ticks), utf8((yield size), _REPLY, "machine name")))


def clock_offset_ns(server_ns: int, sent_ns: int, received_ns: int) -> int:
    """Return what to add to the local clock for the server's, from one exchange.

    The server is taken to have answered in the middle between sending and receiving.
    """
    return server_ns - (sent_ns + (received_ns - sent_ns) // 2)
