"""How do payloads that are C structs become columns?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.pipeline.decoding.arrays import (
    bytes_of,
    column_of,
    column_type,
    is_byte_tail,
    is_text,
    tail_of,
)
from penstock.pipeline.decoding.buffers import Bytes, valid_text
from penstock.pipeline.decoding.result import Decoder, Failure, Part

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.decoding.arrays import Complex
    from penstock.pipeline.decoding.layout import Layout

__all__ = ["StructDecoder"]


class StructDecoder(Decoder):
    """Looks at the payloads' bytes through numpy: no Python for each row."""

    format: ClassVar[str] = "struct"

    def __init__(self, layout: Layout, complex: Complex, prefix: str) -> None:
        super().__init__(
            pa.schema([(item.name, column_type(item, complex)) for item in layout.all_items]),
            prefix,
        )
        self._layout = layout
        self._complex = complex

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        layout = self._layout
        found = Bytes.of(payloads)
        over = found.lengths - layout.size
        is_good = over == 0 if layout.tail is None else (over >= 0) & (over % layout.tail.size == 0)
        failures: list[Failure] = []
        if not is_good.all():
            failures = [
                Failure(row, layout.expected(), f"{found.lengths[row]:,} bytes")
                for row in np.flatnonzero(~is_good).tolist()
            ]
            found = found.only(is_good)
        heads, tails = self._split(found)
        origin = np.flatnonzero(is_good) if failures else None
        bad = self._bad_text(heads, found, tails)
        if bad:
            rows = np.arange(len(found)) if origin is None else origin
            failures += [
                Failure(int(rows[row]), "text in UTF-8", f"other bytes in {name}")
                for row, name in bad.items()
            ]
            kept = np.ones(len(found), np.bool_)
            kept[list(bad)] = False
            found, origin = found.only(kept), rows[kept]
            heads, tails = self._split(found)
        return Part(self._columns(heads, tails, found), origin, failures)

    def _split(self, found: Bytes) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Return the fixed part of each row, and the bytes of all tails."""
        layout = self._layout
        count = len(found)
        if layout.tail is None:  # one behind the other: nothing is copied
            return found.data.reshape(count, layout.size).view(layout.dtype).reshape(count), _NONE
        if not layout.size:
            return np.empty(count, layout.dtype), found.data
        heads = found.starts[:, None] + np.arange(layout.size)
        is_tail = np.ones(len(found.data), np.bool_)
        is_tail[heads.reshape(-1)] = False
        fixed = found.data[heads].view(layout.dtype).reshape(count)
        return fixed, found.data[is_tail]

    def _columns(
        self, heads: NDArray[Any], tails: NDArray[np.uint8], found: Bytes
    ) -> list[pa.Array]:
        layout = self._layout
        columns = [
            column_of(heads[f"f{i}"], item, self._complex) for i, item in enumerate(layout.items)
        ]
        if layout.tail is not None:
            counts = (found.lengths - layout.size) // layout.tail.size
            tail = layout.tail
            columns.append(tail_of(tails, counts, tail, self._complex))
        return columns

    def _bad_text(
        self, heads: NDArray[Any], found: Bytes, tails: NDArray[np.uint8]
    ) -> dict[int, str]:
        """Find rows with text that is not UTF-8, and the field."""
        bad: dict[int, str] = {}
        for i, item in enumerate(self._layout.items):
            if is_text(item):
                valid = valid_text(bytes_of(heads[f"f{i}"], item))
                if valid is not None:
                    rows = np.flatnonzero(~valid) // max(1, item.values)
                    bad |= dict.fromkeys(rows.tolist(), item.name)
        tail = self._layout.tail
        if tail is not None and is_text(tail):
            sizes = found.lengths - self._layout.size
            if is_byte_tail(tail):
                valid = valid_text(Bytes.from_lengths(tails, sizes).binary())
                rows = np.arange(len(found))
            else:
                valid = valid_text(bytes_of(tails.view(tail.dtype), tail))
                rows = np.repeat(np.arange(len(found)), sizes // tail.dtype.itemsize)
            if valid is not None:
                bad |= dict.fromkeys(rows[~valid].tolist(), tail.name)
        return bad


_NONE: NDArray[np.uint8] = np.empty(0, np.uint8)
