"""How do payloads that are C structs become columns?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import numpy as np
import pyarrow as pa

from penstock.core.decoding.decoder import (
    MOST_VALUES,
    Bytes,
    Decoder,
    Failure,
    Part,
    too_many_values,
    valid_text,
)
from penstock.core.decoding.schema import filled_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.core.decoding.layout import Item, Layout

__all__ = ["Complex", "StructDecoder"]

#: A complex number is a struct of `re` and `im`; or two neighbours in an array of numbers.
Complex = Literal["struct", "array"]

#: Spark has no unsigned numbers and no half precision: the next type that holds every value.
_TYPES: Final = {
    "b1": (pa.bool_(), np.bool_),
    "i1": (pa.int8(), np.int8),
    "i2": (pa.int16(), np.int16),
    "i4": (pa.int32(), np.int32),
    "i8": (pa.int64(), np.int64),
    "u1": (pa.int16(), np.int16),
    "u2": (pa.int32(), np.int32),
    "u4": (pa.int64(), np.int64),
    "u8": (pa.decimal128(20, 0), np.uint64),
    "f2": (pa.float32(), np.float32),
    "f4": (pa.float32(), np.float32),
    "f8": (pa.float64(), np.float64),
    "c8": (pa.float32(), np.complex64),
    "c16": (pa.float64(), np.complex128),
}
_NOTHING: Final = np.empty(0, np.uint8)


class StructDecoder(Decoder):
    """Looks at the payloads' bytes through numpy: no Python for each row."""

    format: ClassVar[str] = "struct"

    def __init__(self, layout: Layout, complex: Complex, prefix: str) -> None:
        super().__init__(
            pa.schema([(item.name, _column_type(item, complex)) for item in layout.all_items]),
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
            return found.data.reshape(count, layout.size).view(layout.dtype).reshape(
                count
            ), _NOTHING
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
            _column_of(heads[f"f{i}"], item, self._complex) for i, item in enumerate(layout.items)
        ]
        if layout.tail is not None:
            counts = (found.lengths - layout.size) // layout.tail.size
            tail = layout.tail
            columns.append(_tail_of(tails, counts, tail, self._complex))
        return columns

    def _bad_text(
        self, heads: NDArray[Any], found: Bytes, tails: NDArray[np.uint8]
    ) -> dict[int, str]:
        """Find rows with text that is not UTF-8, and the field."""
        bad: dict[int, str] = {}
        for i, item in enumerate(self._layout.items):
            if _is_text(item):
                valid = valid_text(_bytes_of(heads[f"f{i}"], item))
                if valid is not None:
                    rows = np.flatnonzero(~valid) // max(1, item.values)
                    bad |= dict.fromkeys(rows.tolist(), item.name)
        tail = self._layout.tail
        if tail is not None and _is_text(tail):
            sizes = found.lengths - self._layout.size
            if _is_byte_tail(tail):
                valid = valid_text(Bytes.from_lengths(tails, sizes).binary())
                rows = np.arange(len(found))
            else:
                valid = valid_text(_bytes_of(tails.view(tail.dtype), tail))
                rows = np.repeat(np.arange(len(found)), sizes // tail.dtype.itemsize)
            if valid is not None:
                bad |= dict.fromkeys(rows[~valid].tolist(), tail.name)
        return bad


# --- numpy's values as Arrow columns ---------------------------------------------------------


def _is_text(item: Item) -> bool:
    """Tell whether a field is text, which may turn out not to be UTF-8."""
    return item.dtype.kind == "S"


def _column_type(item: Item, complex: Complex) -> pa.DataType:
    """Return the Arrow type of a field's column."""
    kind, depth = _leaf_type(item.dtype, complex), len(item.shape)
    if item.dtype.kind == "c" and complex == "array":
        depth = max(depth, 1)
    if _is_byte_tail(item):
        depth = 0
    for _ in range(depth):
        kind = filled_list(kind)
    return kind


def _column_of(values: NDArray[Any], item: Item, complex: Complex) -> pa.Array:
    """Turn the values of a field, one row each, into a column."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return _nested(flat, item, list(item.shape), None, complex)


def _tail_of(
    raw: NDArray[np.uint8], counts: NDArray[np.int64], item: Item, cx: Complex
) -> pa.Array:
    """Turn the tails of all rows, one behind the other, into a column."""
    if _is_byte_tail(item):
        binary = _binary(raw, np.concatenate(([0], np.cumsum(counts))))
        return binary.cast(pa.string()) if _is_text(item) else binary
    return _nested(raw.view(item.dtype), item, list(item.shape[1:]), counts, cx)


def _bytes_of(values: NDArray[Any], item: Item) -> pa.Array:
    """Turn values of a fixed number of bytes into binary, text up to its first NUL."""
    size = item.dtype.itemsize
    flat = np.ascontiguousarray(values).reshape(-1)
    raw = flat.view(np.uint8).reshape(len(flat), size)
    if not _is_text(item):
        return _binary(raw.reshape(-1), np.arange(len(flat) + 1, dtype=np.int64) * size)
    is_end = raw == 0
    lengths = np.where(is_end.any(axis=1), is_end.argmax(axis=1), size)
    kept = raw[np.arange(size) < lengths[:, None]]
    return _binary(kept, np.concatenate(([0], np.cumsum(lengths))))


def _is_byte_tail(item: Item) -> bool:
    """Tell whether a field is text or bytes of any length, which is one value and no array."""
    return item.shape == (-1,) and item.dtype.kind in "SV" and item.dtype.itemsize == 1


def _leaf_type(dtype: np.dtype[np.generic], complex: Complex) -> pa.DataType:
    if dtype.kind == "S":
        return pa.string()
    if dtype.kind == "V":
        return pa.binary()
    kind = _TYPES[f"{dtype.kind}{dtype.itemsize}"][0]
    if dtype.kind == "c" and complex == "struct":
        return pa.struct([("re", kind), ("im", kind)])
    return kind


def _nested(
    flat: NDArray[Any],
    item: Item,
    lengths: list[int],
    counts: NDArray[np.int64] | None,
    complex: Complex,
) -> pa.Array:
    """Make the leaves, and lists around them: of fixed lengths, and of `counts` at the outside."""
    column = _leaf(flat, item, complex)
    if item.dtype.kind == "c" and complex == "array":
        if lengths:
            lengths[-1] *= 2
        elif counts is not None:
            counts = counts * 2
        else:
            lengths = [2]
    for length in reversed(lengths):
        offsets = np.arange(0, len(column) + 1, length, dtype=np.int64)
        column = _list(offsets, column)
    if counts is not None:
        column = _list(np.concatenate(([0], np.cumsum(counts))), column)
    return column


def _leaf(flat: NDArray[Any], item: Item, complex: Complex) -> pa.Array:
    dtype = item.dtype
    if dtype.kind in "SV":
        binary = _bytes_of(flat, item)
        return binary.cast(pa.string()) if _is_text(item) else binary
    if dtype.kind == "b":  # any byte but 0 is true, as in C
        return pa.array(flat.view(np.uint8) != 0)
    kind, native = _TYPES[f"{dtype.kind}{dtype.itemsize}"]
    plain: NDArray[Any] = flat.astype(native, copy=False)
    if dtype.kind == "c":
        parts = plain.view(kind.to_pandas_dtype())
        if complex == "array":
            return pa.array(parts)
        halves = [pa.array(np.ascontiguousarray(parts[i::2])) for i in (0, 1)]
        return pa.StructArray.from_arrays(halves, ["re", "im"])
    if pa.types.is_decimal(kind):
        wide = np.zeros((len(plain), 2), np.uint64)
        wide[:, 0] = plain
        return pa.Array.from_buffers(kind, len(plain), [None, pa.py_buffer(wide)])
    return pa.array(plain)


def _list(offsets: Sequence[int] | NDArray[np.int64], values: pa.Array) -> pa.Array:
    places = pa.array(_narrow(np.asarray(offsets)))
    return pa.ListArray.from_arrays(places, values, type=filled_list(values.type))


def _binary(raw: NDArray[np.uint8], offsets: NDArray[np.int64]) -> pa.Array:
    buffers = [None, pa.py_buffer(_narrow(offsets)), pa.py_buffer(np.ascontiguousarray(raw))]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _narrow(offsets: NDArray[np.int64]) -> NDArray[np.int32]:
    if offsets[-1] > MOST_VALUES:
        raise too_many_values(f"{offsets[-1]:,}")
    return offsets.astype(np.int32)
