"""How do payloads that are JSON objects become columns?"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from penstock.core.decoding.decoder import (
    Bytes,
    Decoder,
    Failure,
    Parsed,
    Part,
    Refused,
    parse_all,
    valid_text,
)
from penstock.core.decoding.schema import Wrong, has_type
from penstock.core.decoding.values import (
    ValueChanged,
    check_times,
    count_infinite,
    has_times,
    replace_leaves,
    wide_decimal,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["JsonDecoder", "check_json_schema"]

_OBJECT: Final = "a JSON object"
_SPACE: Final = " \t\r\n"
_OPEN, _CLOSE, _TAB, _FEED, _RETURN, _BLANK = b"{}\t\n\r "


def check_json_schema(schema: pa.Schema) -> None:
    """Refuse types without a common JSON representation.

    :raises Wrong: a column has such a type.
    """
    for field in schema:
        if has_type(field.type, "map", "binary"):
            raise Wrong(
                f"column {field.name}: JSON cannot be read as {field.type}",
                hint="take it as STRING or STRUCT<…>, and use unbase64() or from_json() after it",
            )
        if has_type(field.type, "date") and not pa.types.is_date(field.type):
            raise Wrong(
                f"column {field.name}: a DATE inside of another type is not read",
                hint="take it as STRING, and use to_date() after it",
            )


class JsonDecoder(Decoder):
    """Parses all payloads of a batch as lines of one text, by Arrow's parser."""

    format: ClassVar[str] = "json"

    def __init__(self, schema: pa.Schema, prefix: str) -> None:
        super().__init__(schema, prefix)
        self._read_as = _with_leaves(schema, _readable)
        self._timed = [field.name for field in schema if has_times(field.type)]
        self._narrow = [field.name for field in schema if has_type(field.type, "float32")]

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        failures: list[Failure] = []
        is_object = _looks_like_object(Bytes.of(payloads))
        if not is_object.all():
            payloads = pc.ascii_trim(payloads.view(pa.large_string()), _SPACE).view(
                pa.large_binary()
            )
            is_object = _looks_like_object(Bytes.of(payloads))
        failures += [
            Failure(row, _OBJECT, "other text" if len(payloads[row].as_py()) else "nothing")
            for row in np.flatnonzero(~is_object).tolist()
        ]
        if (is_text := valid_text(payloads)) is not None:
            failures += [
                Failure(row, _OBJECT, "bytes that are not UTF-8")
                for row in np.flatnonzero(~is_text & is_object).tolist()
            ]
            is_object &= is_text
        texts = Bytes.of(payloads)
        if failures:
            texts = texts.only(is_object)
        texts = Bytes(_on_one_line(texts.data), texts.offsets)
        columns, origin, refused = parse_all(
            texts.lengths, lambda start, end: self._parse(texts.slice(start, end)), self._plain
        )
        if failures:
            places = np.flatnonzero(is_object)
            origin = places[origin]
            refused = [each._replace(row=int(places[each.row])) for each in refused]
        elif not refused:
            return Part(columns, None, ())
        return Part(columns, origin, failures + refused)

    def _parse(self, texts: Bytes) -> Parsed:
        """Parse lines, each of which starts with `{` and ends with `}`.

        After a `}`, another `{` is valid only where a new object starts, and no string spans lines:
        so each line gives at least one row, and as many rows as lines means one row each.
        Otherwise a bad line could be hidden by another one.
        """
        lines = texts.lines()
        try:
            table = self._read(lines, self._read_as).cast(self._plain)
            for name in self._timed:
                check_times(table.column(name))
        except (pa.ArrowInvalid, ValueChanged) as error:
            raise Refused(_OBJECT + " of the schema", _plainly(error)) from None
        if table.num_rows != len(texts):
            raise Refused(_OBJECT, f"{table.num_rows}")
        self._check_infinite(table, lines)
        return Parsed(table, None)

    def _read(self, lines: pa.Buffer, schema: pa.Schema) -> pa.Table:
        return pj.read_json(
            pa.BufferReader(lines),
            read_options=pj.ReadOptions(use_threads=False, block_size=lines.size + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            ),
        )

    def _check_infinite(self, table: pa.Table, lines: pa.Buffer) -> None:
        """Refuse a number too large for a FLOAT: as a DOUBLE, only `Infinity` is infinite."""
        found = {name: count_infinite(table.column(name)) for name in self._narrow}
        if not any(found.values()):
            return
        doubles = self._read(lines, _with_leaves(self._read_as, _double))
        if any(count_infinite(doubles.column(name)) != found[name] for name in found):
            raise Refused(_OBJECT + " of the schema", "a number that is too large for a FLOAT")


def _with_leaves(schema: pa.Schema, replace: Callable[[pa.DataType], pa.DataType]) -> pa.Schema:
    return pa.schema([(field.name, replace_leaves(field.type, replace)) for field in schema])


def _readable(kind: pa.DataType) -> pa.DataType:
    """Return the type to parse as, before the cast to the column's type.

    The parser supports no dates, and converts a time with a zone to UTC even if the column has no
    zone.
    """
    if pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is None):
        return pa.string()
    return wide_decimal(kind)


def _double(kind: pa.DataType) -> pa.DataType:
    return pa.float64() if pa.types.is_float32(kind) else kind


def _plainly(error: Exception) -> str:
    # Only one payload is parsed here, so the number in the error has no meaning.
    return str(error).removeprefix("JSON parse error: ").removesuffix(" in row 0")


def _looks_like_object(texts: Bytes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found = texts.lengths >= len("{}")
    # An empty payload may be at the very end of the buffer, where no byte follows.
    starts, ends = texts.starts[found], texts.ends[found]
    found[found] = (texts.data[starts] == _OPEN) & (texts.data[ends - 1] == _CLOSE)
    return found


def _on_one_line(
    data: np.ndarray[tuple[int], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Replace newlines by tabs: equivalent between values, and as invalid inside strings."""
    if not (data < _BLANK).any():  # true for most payloads
        return data
    return np.where((data == _FEED) | (data == _RETURN), np.uint8(_TAB), data)
