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
from penstock.core.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.core.decoding.layout import Item, Layout

__all__ = ["Complex", "StructDecoder", "encode_structs"]

#: A complex number is a struct of `re` and `im`, or two neighbours in an array.
Complex = Literal["struct", "array"]

#: Spark has no unsigned numbers and no half precision: use the next type that holds every value.
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
    """Decodes payloads by numpy: no Python code per row."""

    format: ClassVar[str] = "struct"

    def __init__(
        self,
        layout: Layout,
        complex: Complex,
        prefix: str,
        *,
        records: bool = False,
        skip: int = 0,
    ) -> None:
        super().__init__(
            pa.schema([(item.name, _column_type(item, complex)) for item in layout.all_items]),
            prefix,
        )
        self._layout = layout
        self._complex = complex
        self._records = records
        self._skip = skip

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        if not self._records and not self._skip:
            return self._decode_structs(Bytes.of(payloads))
        found, owner, failures = self._cut(Bytes.of(payloads))
        part = self._decode_structs(found)
        # One bad record makes its whole payload a failure.
        failures += [each._replace(row=int(owner[each.row])) for each in part.failures]
        wrong = np.isin(owner, [each.row for each in failures])
        if wrong.any():
            part, owner = self._decode_structs(found.only(~wrong)), owner[~wrong]
        first = {each.row: each for each in reversed(failures)}
        return Part(part.columns, owner, list(first.values()))

    def _cut(self, found: Bytes) -> tuple[Bytes, NDArray[np.int64], list[Failure]]:
        """Cut the header off, and with `records` split what follows.

        Return the structs, the payload of each, and the payloads of a wrong size. Without `records`
        sizes are left to `_decode_structs`: the last field may be of any length.
        """
        size, skip = self._layout.size, self._skip
        over = found.lengths - skip
        is_good = (over >= 0) & (over % size == 0) if self._records else over >= 0
        expected = f"{skip:,} bytes and "
        expected += f"structs of {size:,} each" if self._records else self._layout.expected()
        failures = [
            Failure(row, expected, f"{found.lengths[row]:,} bytes")
            for row in np.flatnonzero(~is_good).tolist()
        ]
        places = np.flatnonzero(is_good)
        starts, ends = found.starts[is_good] + skip, found.ends[is_good]
        parts = [found.data[a:b] for a, b in zip(starts, ends, strict=True)]
        data = np.concatenate(parts) if parts else _NOTHING
        lengths = ends - starts
        if self._records:
            counts = lengths // size
            places, lengths = np.repeat(places, counts), np.full(int(counts.sum()), size, np.int64)
        return Bytes.from_lengths(data, lengths), places, failures

    def _decode_structs(self, found: Bytes) -> Part:
        layout = self._layout
        over = found.lengths - layout.size
        is_good = over == 0 if layout.tail is None else (over >= 0) & (over % layout.tail.size == 0)
        failures: list[Failure] = []
        if not is_good.all():
            after = f" after the first {self._skip:,}" if self._skip else ""
            failures = [
                Failure(row, layout.expected(), f"{found.lengths[row]:,} bytes{after}")
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
        if layout.tail is None:  # contiguous: no copy
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


def encode_structs(layout: Layout, rows: pa.RecordBatch) -> bytes:
    """Encode rows as contiguous structs.

    :raises Malformed: a column is missing, or a value does not fit its field.
    """
    records = np.zeros(rows.num_rows, layout.dtype)
    if layout.tail is not None:
        raise Malformed("a layout of records", layout.tail.name, "a field of one size", "any size")
    for i, item in enumerate(layout.items):
        if item.name not in rows.schema.names:
            raise Malformed("rows for structs", f"column {item.name}", item.dtype, "no column")
        try:
            records[f"f{i}"] = _field_values(rows.column(item.name), item)
        except (ValueError, OverflowError, TypeError, pa.ArrowInvalid) as error:
            raise Malformed(
                "rows for structs", f"column {item.name}", f"{item.dtype}{list(item.shape)}", error
            ) from None
    return records.tobytes()


_NULL: Final = "null, which a struct has no place for"
#: Of numbers with a fraction: what Python's own have.
_WIDEST: Final = {"f": np.float64, "c": np.complex128}


def _field_values(column: pa.Array, item: Item) -> NDArray[Any]:
    if column.null_count:
        raise ValueError(_NULL)
    plain: list[Any] = column.to_pylist()
    if not plain:  # an array of none has no shape
        return np.zeros((0, *item.shape), item.dtype)
    if item.dtype.kind in "SV":
        return _texts(_flat(plain, item.shape), item).reshape(len(plain), *item.shape)
    if item.dtype.kind == "c":
        values = np.array(_complex(column, item)).reshape(len(plain), *item.shape)
    else:
        values = np.array(plain)
    if values.shape != (len(plain), *item.shape):
        raise ValueError(f"values of the shape {values.shape[1:]}")
    if values.dtype == object and any(each is None for each in values.flat):
        raise ValueError(_NULL)
    return _stored(values, item, is_whole=_is_whole(column.type))


def _flat(values: list[Any], shape: Sequence[int]) -> list[Any]:
    """Return the values in nested lists of a shape, in order.

    :raises ValueError: the lists have another shape.
    """
    for length in shape:
        for each in values:
            if not isinstance(each, list) or len(each) != length:
                raise ValueError(f"{each!r}, which is no list of {length}")
        values = [one for each in values for one in each]
    return values


def _complex(column: pa.Array, item: Item) -> list[complex]:
    """Return complex numbers, which are structs of `re` and `im`, or neighbours in lists."""
    values: list[Any] = column.to_pylist()
    if pa.types.is_struct(_innermost(column.type)):
        return [complex(each["re"], each["im"]) for each in _flat(values, item.shape)]
    *outer, last = item.shape or (1,)
    parts = _flat(values, (*outer, 2 * last))
    return list(map(complex, parts[::2], parts[1::2]))


def _stored(values: NDArray[Any], item: Item, *, is_whole: bool) -> NDArray[Any]:
    """Return numbers as a field has them; `is_whole`: none of them may be rounded."""
    with np.errstate(over="ignore", invalid="ignore"):  # which are errors here
        stored = values.astype(item.dtype)
    if item.dtype.kind in "biu" or (is_whole and item.dtype.kind == "f"):
        is_same = _compared(stored, values)
        if not is_same.all():
            raise ValueError(f"{values[~is_same][0]}")
    if item.dtype.kind in "fc":
        is_beyond = np.isinf(stored) & np.isfinite(values.astype(_WIDEST[item.dtype.kind]))
        if is_beyond.any():
            raise ValueError(f"{values[is_beyond][0]}")
    return stored


def _texts(values: list[Any], item: Item) -> NDArray[Any]:
    size = item.dtype.itemsize
    texts = [_text_bytes(text, is_text=_is_text(item)) for text in values]
    if max(map(len, texts), default=0) > size:
        raise ValueError(f"a text of more than {size} bytes")
    return np.frombuffer(b"".join(text.ljust(size, b"\0") for text in texts), item.dtype)


def _text_bytes(value: object, *, is_text: bool) -> bytes:
    """Return the bytes of a text, or of bytes."""
    if not isinstance(value, str | bytes):
        raise TypeError(f"{value!r}, which is no text")
    data = value.encode() if isinstance(value, str) else value
    if is_text and b"\0" in data:
        raise ValueError("a text with a NUL, which would end it")
    if is_text:
        data.decode()  # bytes have to be UTF-8, too
    return data


def _is_whole(kind: pa.DataType) -> bool:
    """Tell whether a column has whole numbers, which are not rounded as others are."""
    kind = _innermost(kind)
    return bool(pa.types.is_integer(kind) or (pa.types.is_decimal(kind) and not kind.scale))


def _innermost(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values in nested lists."""
    while pa.types.is_list(kind):
        kind = kind.value_type
    return kind


def _compared(stored: NDArray[Any], values: NDArray[Any]) -> NDArray[np.bool_]:
    """Compare numbers before and after; numpy would round whole numbers to compare them."""
    if stored.dtype.kind == "f":
        exact = 2 ** (np.finfo(stored.dtype).nmant + 1)
        if (np.abs(values) <= exact).all():
            return np.ones(values.shape, np.bool_)
        stored, values = stored.astype(object), values.astype(object)
    same: NDArray[np.bool_] = stored == values
    return same


# --- numpy's values as Arrow columns ---------------------------------------------------------


def _is_text(item: Item) -> bool:
    """Tell whether a field is text, which must be checked for UTF-8."""
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
    """Convert the values of a field, one per row, to a column."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return _nested(flat, item, list(item.shape), None, complex)


def _tail_of(
    raw: NDArray[np.uint8], counts: NDArray[np.int64], item: Item, cx: Complex
) -> pa.Array:
    """Convert the contiguous tails of all rows to a column."""
    if _is_byte_tail(item):
        binary = _binary(raw, np.concatenate(([0], np.cumsum(counts))))
        return binary.cast(pa.string()) if _is_text(item) else binary
    return _nested(raw.view(item.dtype), item, list(item.shape[1:]), counts, cx)


def _bytes_of(values: NDArray[Any], item: Item) -> pa.Array:
    """Convert fixed-size values to binary; text ends at its first NUL."""
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
    """Tell whether a field is text or bytes of variable length: one value, not an array."""
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
    """Build nested lists of the leaves: fixed `lengths` inside, `counts` outermost."""
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
