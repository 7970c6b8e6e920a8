"""How are the bytes of many payloads looked at as one buffer?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Bytes", "valid_text"]

_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Payloads, one behind the other and without a gap, and where each starts."""

    data: NDArray[np.uint8]
    #: One more than there are payloads: the last is where all end.
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, payloads: pa.LargeBinaryArray) -> Bytes:
        """Look at payloads of which none is null, without a copy; they may be part of more."""
        _, offsets, data = payloads.buffers()
        if not len(payloads):
            return cls(_NOTHING, np.zeros(1, np.int64))
        places = np.frombuffer(offsets, np.int64, len(payloads) + 1, payloads.offset * 8)
        start, end = int(places[0]), int(places[-1])
        raw = _NOTHING if start == end else np.frombuffer(data, np.uint8, end - start, start)
        return cls(raw, places - start)

    @classmethod
    def from_lengths(cls, data: NDArray[np.uint8], lengths: NDArray[np.int64]) -> Bytes:
        return cls(data, np.concatenate(([0], np.cumsum(lengths))).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def starts(self) -> NDArray[np.int64]:
        return self.offsets[:-1]

    @property
    def ends(self) -> NDArray[np.int64]:
        return self.offsets[1:]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def only(self, kept: NDArray[np.bool_]) -> Bytes:
        """Return some of the payloads, again without a gap."""
        lengths = self.lengths
        return Bytes.from_lengths(self.data[np.repeat(kept, lengths)], lengths[kept])

    def slice(self, start: int, end: int) -> Bytes:
        """Return the payloads from `start` up to `end`, without a copy."""
        places = self.offsets[start : end + 1]
        return Bytes(self.data[places[0] : places[-1]], places - places[0])

    def at(self, index: int) -> bytes:
        return self.data[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def counts(self, byte: int) -> NDArray[np.int64]:
        """Return how often a byte is in each payload."""
        places = np.flatnonzero(self.data == byte)
        return np.diff(np.searchsorted(places, self.offsets)).astype(np.int64)

    def lines(self) -> pa.Buffer:
        """Return all payloads, each with a line feed behind it."""
        nothing, feed = (pa.scalar(text, pa.large_binary()) for text in (b"", b"\n"))
        lines = pc.binary_join_element_wise(self.binary(), nothing, feed).buffers()[2]
        return lines.slice(0, len(self.data) + len(self))

    def binary(self) -> pa.LargeBinaryArray:
        buffers = [None, pa.py_buffer(self.offsets), pa.py_buffer(self.data)]
        return pa.Array.from_buffers(pa.large_binary(), len(self), buffers)


def valid_text(values: pa.Array) -> NDArray[np.bool_] | None:
    """Tell which values are UTF-8; None: all are."""
    try:
        values.cast(pa.large_string() if pa.types.is_large_binary(values.type) else pa.string())
    except pa.ArrowInvalid:
        return np.array([_is_text(value) for value in values.to_pylist()], np.bool_)
    return None


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
