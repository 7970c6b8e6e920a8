"""Which bytes does a payload recipe of the golden vectors stand for?"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["payload"]

_WORD = 0xFFFFFFFF


def payload(kind: str, seed: int, length: int) -> bytes:
    """Return the `length` bytes of recipe `kind` ("ramp", "zero", "text", "rand") and `seed`."""
    match kind:
        case "ramp":
            i = np.arange(length, dtype=np.uint32)
            return (seed * 31 + i * 7 + (i >> 8)).astype(np.uint8).tobytes()
        case "zero":
            return bytes(length)
        case "text":
            phrase = f"FMQ message {seed} ".encode()
            return (phrase * (length // len(phrase) + 1))[:length]
        case "rand":
            return bytes(islice(_xorshift(seed), length))
    raise ValueError(f"no such recipe: {kind!r}")


def _xorshift(seed: int) -> Iterator[int]:
    x = (seed * 2654435761 & _WORD) | 1
    while True:
        x ^= x << 13 & _WORD
        x ^= x >> 17
        x ^= x << 5 & _WORD
        yield x & 0xFF
