"""What do LZO1X-compressed bytes hold?

LZO has no published specification. What follows is the stream as liblzo2's `lzo1x_*_compress`
write it: instructions that either carry literal bytes or copy bytes already decoded.

    first byte 18..255       copy (byte - 17) literals; below that it is an instruction
    0000LLLL                 after a copy without literals: copy 3 + length(L, 15) literals
    0000DDSS D               after 1..3 literals: copy 2 bytes from distance 1 + D (10 bits)
    0000DDSS D               after a run of literals: copy 3 bytes from 2049 + D (10 bits)
    0001HLLL DDDDDDSS D      copy 2 + length(L, 7) from 16384 + HD (15 bits); distance 16384 ends
    001LLLLL DDDDDDSS D      copy 2 + length(L, 31) from distance 1 + D (14 bits)
    LLLDDDSS D               copy 1 + L (3..8) from distance 1 + D (11 bits)

The D of the first byte are the low bits, those of the last byte the high ones; H is above them.
SS literals (0..3) follow the copy. `length(L, most)` is L when it is not zero; otherwise it is
`most`, plus 255 for every zero byte that follows, plus the first byte that is not zero.
"""

from __future__ import annotations

from penstock.core.errors import Malformed

__all__ = ["decompress"]

_WHAT = "LZO1X data"

# The smallest code of each kind of copy; codes below _FAR depend on the literals before.
_FAR = 0b0001_0000
_MIDDLE = 0b0010_0000
_NEAR = 0b0100_0000

#: The distance at which far copies begin; a copy from exactly there marks the end.
_FAR_DISTANCE = 16384

#: A first byte above this one is a number of literals plus this one.
_FIRST_LITERALS = 17

#: More literals than SS can express: what an instruction below 16 means depends on it.
_RUN = 4


class _Source:
    """The compressed bytes and how far they have been read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise Malformed(_WHAT, f"byte {self.at}", f"{count} more bytes", f"{self.left} left")
        start, self.at = self.at, self.at + count
        return self._data[start : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def word(self) -> int:
        return int.from_bytes(self.take(2), "little")

    def length(self, bits: int, most: int) -> int:
        if bits:
            return bits
        total = most
        while not (byte := self.byte()):
            total += 255
        return total + byte


class _Output:
    """The decoded bytes, which never outgrow `size`."""

    def __init__(self, size: int) -> None:
        self.data = bytearray()
        self._size = size

    def _reserve(self, count: int) -> None:
        total = len(self.data) + count
        if total > self._size:
            raise Malformed(_WHAT, "decoded length", self._size, f"at least {total}")

    def append(self, literals: bytes) -> None:
        self._reserve(len(literals))
        self.data += literals

    def copy(self, distance: int, count: int) -> None:
        if distance > len(self.data):
            raise Malformed(_WHAT, "copy distance", f"at most {len(self.data)}", distance)
        self._reserve(count)
        start = len(self.data) - distance
        # A copy may reach into what it writes itself: then its source repeats.
        pattern = self.data[start : start + count]
        repeats, rest = divmod(count, len(pattern))
        self.data += pattern * repeats + pattern[:rest]


def decompress(data: bytes, size: int) -> bytes:
    """Return the `size` bytes that `data` holds, one whole LZO1X stream.

    :raises Malformed: `data` ends early or late, copies from before the start of the output, or
        decodes to another number of bytes than `size`.
    """
    source, output = _Source(data), _Output(size)
    literals = 0  # how many came just before this instruction; _RUN stands for "more than 3"
    if data and data[0] > _FIRST_LITERALS:
        count = source.byte() - _FIRST_LITERALS
        output.append(source.take(count))
        literals = min(count, _RUN)
    while (copy := _next_copy(source, output, literals)) is not None:
        distance, count, literals = copy
        output.copy(distance, count)
        output.append(source.take(literals))
    if source.left:
        raise Malformed(_WHAT, f"byte {source.at}", "the end", f"{source.left} more bytes")
    if len(output.data) != size:
        raise Malformed(_WHAT, "decoded length", size, len(output.data))
    return bytes(output.data)


def _next_copy(source: _Source, output: _Output, literals: int) -> tuple[int, int, int] | None:
    """Return the next copy as (distance, count, literals after it); None at the end marker.

    A run of literals that stands before the copy goes to `output`.
    """
    code = source.byte()
    if code < _FAR and not literals:
        output.append(source.take(3 + source.length(code, 15)))
        literals = _RUN
        code = source.byte()
    if code >= _NEAR:
        return 1 + (code >> 2 & 7) + (source.byte() << 3), 1 + (code >> 5), code & 3
    if code >= _MIDDLE:
        count = 2 + source.length(code & 31, 31)
        word = source.word()
        return 1 + (word >> 2), count, word & 3
    if code >= _FAR:
        count = 2 + source.length(code & 7, 7)
        word = source.word()
        distance = _FAR_DISTANCE + ((code & 8) << 11) + (word >> 2)
        return None if distance == _FAR_DISTANCE else (distance, count, word & 3)
    nearest, count = (2049, 3) if literals == _RUN else (1, 2)
    return nearest + (code >> 2) + (source.byte() << 2), count, code & 3
