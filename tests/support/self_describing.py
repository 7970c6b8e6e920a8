"""How does a payload prove that it is whole, and say which one it is?"""

from __future__ import annotations

import hashlib
import random
import struct
from typing import NamedTuple

__all__ = ["SMALLEST", "Content", "Maker", "check"]

_HEAD = struct.Struct("<IQI")
_DIGEST = 32
#: Bytes of the smallest payload.
SMALLEST = _HEAD.size + _DIGEST


class Content(NamedTuple):
    """What a payload says about itself."""

    writer: int
    number: int


class Maker:
    """Makes payloads of random sizes: head, noise, sha256 over both."""

    def __init__(self, writer: int, smallest: int, largest: int) -> None:
        self._writer = writer
        self._sizes = (max(smallest, SMALLEST), max(largest, SMALLEST))
        self._random = random.Random(writer)
        self._noise = self._random.randbytes(max(1 << 16, 2 * largest))

    def make(self, number: int) -> bytes:
        size = self._random.randint(*self._sizes)
        at = self._random.randrange(len(self._noise) - size)
        length = size - SMALLEST
        body = _HEAD.pack(self._writer, number, length) + self._noise[at : at + length]
        return body + hashlib.sha256(body).digest()


def check(payload: bytes) -> Content:
    """Return what a payload says; a torn one does not get past this."""
    body, digest = payload[:-_DIGEST], payload[-_DIGEST:]
    assert hashlib.sha256(body).digest() == digest, f"a torn payload of {len(payload)} bytes"
    writer, number, length = _HEAD.unpack_from(body)
    assert length == len(payload) - SMALLEST
    return Content(writer, number)
