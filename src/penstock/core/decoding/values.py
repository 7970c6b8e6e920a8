"""Is a value still the one that was sent, and does Spark accept it for its column?

Arrow's parsers and casts are fast but lenient: a decimal that is too large wraps around, a number
that is too large becomes infinite, a time loses its hours. Their results are checked here, column
by column.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "ValueChanged",
    "cast_unchanged",
    "check_times",
    "count_infinite",
    "decimals_of_text",
    "has_times",
    "is_read_right",
    "replace_leaves",
    "wide_decimal",
]

#: Digits of Arrow's widest decimals.
_WIDEST: Final = 76
#: Larger than every DECIMAL of Spark.
_LARGEST: Final = 1e39
_UTC: Final = frozenset({"UTC", "Etc/UTC", "Z", "+00:00"})
#: The years that Spark has, and Python: 1 to 9999.
_FIRST_DAY: Final = (dt.date.min - dt.date(1970, 1, 1)).days
_LAST_DAY: Final = (dt.date.max - dt.date(1970, 1, 1)).days
_DAY: Final = 86_400_000_000
_TEXT: Final = ("string", "large_string")


class ValueChanged(Exception):
    """A column cannot get its type without a change of values."""


# --- types ----------------------------------------------------------------------------------


def replace_leaves(kind: pa.DataType, replace: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a type with its leaf types replaced."""
    if pa.types.is_list(kind):
        return pa.list_(_replaced(kind.value_field, replace))
    if pa.types.is_map(kind):
        return pa.map_(_replaced(kind.key_field, replace), _replaced(kind.item_field, replace))
    if pa.types.is_struct(kind):
        return pa.struct([_replaced(field, replace) for field in kind])
    return replace(kind)


def _replaced(field: pa.Field, replace: Callable[[pa.DataType], pa.DataType]) -> pa.Field:
    return field.with_type(replace_leaves(field.type, replace))


def wide_decimal(kind: pa.DataType) -> pa.DataType:
    """Return a decimal type in which no number wraps around when rescaled to this one's scale.

    A parser accepts as many digits as the precision allows, and then appends zeros.
    """
    if not pa.types.is_decimal(kind):
        return kind
    return pa.decimal256(_WIDEST - kind.scale, kind.scale)


def has_times(kind: pa.DataType) -> bool:
    """Tell whether a type is or contains a date or a time."""
    if kind.num_fields:
        return any(has_times(kind.field(i).type) for i in range(kind.num_fields))
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


# --- values ---------------------------------------------------------------------------------


def check_times(column: pa.Array | pa.ChunkedArray) -> None:
    """Refuse times outside of the years 1 to 9999.

    :raises ValueChanged: a time is out of range.
    """
    for leaf in _leaves(column):
        if pa.types.is_date32(leaf.type):
            first, last, whole = _FIRST_DAY, _LAST_DAY, pa.int32()
        elif pa.types.is_timestamp(leaf.type):
            first, last, whole = _FIRST_DAY * _DAY, (_LAST_DAY + 1) * _DAY - 1, pa.int64()
        else:
            continue
        found = pc.min_max(leaf.view(whole))
        least, most = found["min"].as_py(), found["max"].as_py()
        if least is not None and (least < first or most > last):
            raise ValueChanged("a time outside of the years 1 to 9999")


def count_infinite(column: pa.Array | pa.ChunkedArray) -> int:
    """Count the values that are infinite."""
    return sum(
        pc.sum(pc.is_inf(leaf)).as_py() or 0
        for leaf in _leaves(column)
        if pa.types.is_floating(leaf.type)
    )


def decimals_of_text(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Parse decimals from text.

    :raises ValueChanged: one is too large.
    :raises pa.ArrowInvalid: one is no number, or has more digits than the type.
    """
    # Both would wrap around in the cast.
    longest = pc.max(pc.binary_length(text)).as_py() or 0
    size = pc.max(pc.abs(text.cast(pa.float64()))).as_py() or 0
    if longest > _WIDEST or not size < _LARGEST:
        raise ValueChanged(f"a number that is too large for {kind}")
    return text.cast(pa.decimal256(_WIDEST, kind.scale)).cast(kind)


def cast_unchanged(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column to another type, if no value changes.

    :raises ValueChanged: a value would change.
    :raises pa.ArrowException: the cast is not supported, or a value does not fit.
    """
    if column.type == kind:
        return column
    found = _cast(column, kind)
    _check_same(column, found)
    return found


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if _is_text(column.type) and pa.types.is_decimal(kind):
        return decimals_of_text(column, kind)
    wide = replace_leaves(kind, _widest_decimal)
    return column.cast(wide).cast(kind) if wide != kind else column.cast(kind)


def _widest_decimal(kind: pa.DataType) -> pa.DataType:
    return pa.decimal256(_WIDEST, kind.scale) if pa.types.is_decimal(kind) else kind


def _check_same(before: pa.Array, after: pa.Array) -> None:
    """Compare a column before and after a cast, leaf by leaf."""
    old, new = before.type, after.type
    if pa.types.is_map(new) and pa.types.is_map(old):
        _check_same(before.keys, after.keys)
        _check_same(before.items, after.items)
    elif pa.types.is_struct(new) and pa.types.is_struct(old):
        for field, child in zip(new, after.flatten(), strict=True):
            place = old.get_field_index(field.name)
            if place < 0:
                raise ValueChanged(f"no {field.name} in {old}, or more than one")
            _check_same(before.flatten()[place], child)
    elif new.num_fields:
        _check_same(before.flatten(), after.flatten())
    elif not _is_same(before, after):
        raise ValueChanged(f"a value of type {old} that {new} does not have")


def _is_same(before: pa.Array, after: pa.Array) -> bool:
    old, new = before.type, after.type
    if old == new or pa.types.is_null(old):
        return True
    if _is_text(old):
        return is_read_right(before, after)
    if _loses_zone(old, new):
        return False
    back = _cast(after, old)
    if pa.types.is_floating(old):  # what is not a number is not equal to itself
        before, back = (pc.if_else(pc.is_nan(each), None, each) for each in (before, back))
    return bool(back.equals(before))


def _loses_zone(old: pa.DataType, new: pa.DataType) -> bool:
    """Tell whether a cast drops a time zone, and with it the meaning of the time."""
    if not (pa.types.is_timestamp(old) and pa.types.is_timestamp(new)):
        return False
    return new.tz is None and old.tz is not None and old.tz not in _UTC


def is_read_right(text: pa.Array, values: pa.Array) -> bool:
    """Tell whether numbers were parsed in decimal and without overflow."""
    if pa.types.is_integer(values.type):  # 0x1F
        other = pc.and_(pc.is_valid(values), pc.match_substring_regex(text, "[xX]"))
    elif pa.types.is_floating(values.type):  # 1e400
        named = pc.match_substring_regex(text, r"^\s*[+-]?inf", ignore_case=True)
        other = pc.and_not(pc.is_inf(values), named)
    else:
        return True
    return not pc.any(other).as_py()


def _is_text(kind: pa.DataType) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in _TEXT)


def _leaves(column: pa.Array | pa.ChunkedArray) -> Iterator[pa.Array]:
    if isinstance(column, pa.ChunkedArray):
        for chunk in column.chunks:
            yield from _leaves(chunk)
    elif pa.types.is_map(column.type):
        yield from _leaves(column.keys)
        yield from _leaves(column.items)
    elif pa.types.is_struct(column.type):
        for child in column.flatten():
            yield from _leaves(child)
    elif column.type.num_fields:
        yield from _leaves(column.flatten())
    else:
        yield column
