"""What happens to the n-th datagram, block or connection? Uses no sockets and no clock."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from penstock.relay.faults.model import Direction, Faults

__all__ = ["BLOCK", "Dice", "Fate", "StreamPieces", "datagram_fate", "garbled", "stream_pieces"]

#: Bytes of a stream that one decision is about.
BLOCK: Final = 1024
#: The most later datagrams that overtake one.
_FARTHEST: Final = 3

_NUMBER = struct.Struct("<Q")
#: One draw per decision, so that enabling one fault does not change the others.
_DRAWS = struct.Struct("<8Q")
_DROP, _DUPLICATE, _DELAY, _REORDER, _DISTANCE, _GARBLE, _PLACE, _MASK = range(8)
_REFUSE = 0


class Fate(NamedTuple):
    """What happens to one datagram."""

    is_dropped: bool = False
    is_duplicated: bool = False
    #: Seconds of delay.
    delay: float = 0.0
    #: How many later datagrams go first.
    overtaken_by: int = 0
    #: The index of the changed byte (modulo the length) and the value XORed to it.
    garble: tuple[int, int] | None = None


PASSES: Final = Fate()


class Dice:
    """Random draws for one client and direction: the n-th depend only on n and the arguments here.

    They come from a hash instead of a stateful generator, so that threads, reconnects and other
    clients do not affect them.
    """

    def __init__(self, seed: int, client: int, what: Direction | str) -> None:
        self._hash = hashlib.blake2b(
            f"{seed}/{client}/{what}/".encode(), digest_size=_DRAWS.size, usedforsecurity=False
        )

    def draws(self, n: int) -> tuple[int, ...]:
        """Return the eight 64-bit numbers of the n-th item."""
        one = self._hash.copy()
        one.update(_NUMBER.pack(n))
        return _DRAWS.unpack(one.digest())

    def refuses(self, share: float) -> bool:
        """Tell whether a connection is refused, with probability `share`."""
        return bool(share) and _hits(self.draws(0)[_REFUSE], share)


def datagram_fate(dice: Dice, n: int, faults: Faults) -> Fate:
    """Decide about the n-th datagram of a client in one direction."""
    f = faults
    if not (f.drop or f.duplicate or f.reorder or f.garble or f.jitter):
        return Fate(delay=f.delay) if f.delay else PASSES
    draws = dice.draws(n)
    if _hits(draws[_DROP], f.drop):
        return Fate(is_dropped=True)
    return Fate(
        is_duplicated=_hits(draws[_DUPLICATE], f.duplicate),
        delay=_delay(draws, f),
        overtaken_by=1 + draws[_DISTANCE] % _FARTHEST if _hits(draws[_REORDER], f.reorder) else 0,
        garble=(draws[_PLACE], _mask(draws)) if _hits(draws[_GARBLE], f.garble) else None,
    )


def garbled(data: bytes, garble: tuple[int, int]) -> bytes:
    """Return a datagram with one byte changed; an empty one stays as it is."""
    if not data:
        return data
    changed = bytearray(data)
    changed[garble[0] % len(data)] ^= garble[1]
    return bytes(changed)


class StreamPieces(NamedTuple):
    """What remains of a run of a stream's bytes."""

    pieces: list[bytes]
    dropped: int
    garbled: int
    #: Seconds of delay.
    delay: float


def stream_pieces(dice: Dice, offset: int, data: bytes, faults: Faults) -> StreamPieces:
    """Decide about the bytes of a stream from `offset` on.

    Each block of the stream has one fate, however its bytes are split into runs.
    """
    first = offset // BLOCK
    delay = _delay(dice.draws(first), faults) if faults.jitter else faults.delay
    if not (faults.drop or faults.garble):
        return StreamPieces([data], 0, 0, delay)
    pieces: list[bytes] = []
    dropped = changed = 0
    kept_from: int | None = None  # where the run of kept bytes began
    whole = bytearray(data)
    for block in range(first, (offset + len(data) - 1) // BLOCK + 1):
        draws = dice.draws(block)
        begin = max(block * BLOCK - offset, 0)
        end = min((block + 1) * BLOCK - offset, len(data))
        if _hits(draws[_DROP], faults.drop):
            dropped += end - begin
            if kept_from is not None:
                pieces.append(bytes(whole[kept_from:begin]))
                kept_from = None
            continue
        kept_from = begin if kept_from is None else kept_from
        place = block * BLOCK + draws[_PLACE] % BLOCK - offset
        if begin <= place < end and _hits(draws[_GARBLE], faults.garble):
            whole[place] ^= _mask(draws)
            changed += 1
    if kept_from is not None:
        pieces.append(bytes(whole[kept_from:]))
    return StreamPieces(pieces, dropped, changed, delay)


def _hits(draw: int, share: float) -> bool:
    # 53 bits are what a float holds exactly; so a share of 1 always hits.
    return (draw >> 11) * 2.0**-53 < share


def _delay(draws: tuple[int, ...], faults: Faults) -> float:
    if not faults.jitter:
        return faults.delay
    return faults.delay + faults.jitter * (2 * (draws[_DELAY] >> 11) * 2.0**-53 - 1)


def _mask(draws: tuple[int, ...]) -> int:
    return 1 + draws[_MASK] % 255  # never 0, which would change nothing
