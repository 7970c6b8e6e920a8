"""How do payloads that are Arrow streams become rows?"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.pipeline.decoding.arrow_sizes import END, extent_of
from penstock.pipeline.decoding.bulk import Parsed, Refused, one_array, parse_all
from penstock.pipeline.decoding.result import Decoder, Part
from penstock.pipeline.decoding.values import ValueChanged, cast_unchanged, check_times

__all__ = ["ArrowDecoder"]

_STREAM: Final = "an Arrow stream"
#: Types whose values each have their own bytes. With others, such as views and runs, a few bytes
#: can stand for any number of values.
_VARIABLE: Final = ("string", "large_string", "binary", "large_binary")
_PLAIN: Final = (
    *("boolean", "integer", "floating", "decimal", "date", "timestamp", "time", "duration"),
    *("fixed_size_binary", *_VARIABLE),
)
_NESTED: Final = ("list", "large_list", "map", "struct")


class ArrowDecoder(Decoder):
    """Reads one stream a payload; its rows become rows, each with its message's columns."""

    format: ClassVar[str] = "arrow"

    def __init__(self, schema: pa.Schema, prefix: str, *, max_size: int, max_rows: int) -> None:
        super().__init__(schema, prefix)
        self._max_size = max_size
        self._max_rows = max_rows

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        def parse(start: int, end: int) -> Parsed:
            tables = [self._read(payloads[i].as_buffer()) for i in range(start, end)]
            counts = np.array([table.num_rows for table in tables], np.int64)
            return Parsed(pa.concat_tables(tables), counts)

        # Each payload is read by itself anyhow: groups of one.
        lengths = np.ones(len(payloads), np.int64)
        columns, origin, failures = parse_all(lengths, parse, self._plain, at_once=1)
        return Part(columns, origin, failures)

    def _read(self, payload: pa.Buffer) -> pa.Table:
        """Read one stream, after it is known to stay within the limits."""
        if payload.size < len(END) or bytes(payload[-len(END) :]) != END:
            raise Refused(_STREAM, "no end of a stream: it is something else, or was cut off")
        try:
            extent = extent_of(payload)
            self._check("bytes when unpacked", extent.size, self._max_size)
            self._check("rows", extent.rows, self._max_rows)
            if extent.length != payload.size:
                raise Refused(_STREAM, f"{payload.size - extent.length:,} bytes behind its end")
            with pa.ipc.open_stream(payload) as reader:
                self._check_columns(reader.schema)
                table = reader.read_all().select(self._plain.names).combine_chunks()
            table.validate(full=True)
            return pa.table(
                [self._column(table.column(field.name), field) for field in self._plain],
                schema=self._plain,
            )
        except (pa.ArrowException, ValueChanged, OSError, ValueError) as error:
            raise Refused(_STREAM + " of the schema", str(error)) from None

    def _check(self, what: str, found: int, most: int) -> None:
        if found > most:
            raise Refused(f"{_STREAM} of at most {most:,} {what}", f"{found:,}")

    def _check_columns(self, schema: pa.Schema) -> None:
        for field in self._plain:
            index = schema.get_field_index(field.name)
            if index < 0:
                raise Refused(_STREAM, f"no column {field.name}, or more than one")
            kind = schema.field(index).type
            if pa.types.is_dictionary(kind):
                is_known = _is_any(kind.value_type, _PLAIN)
            else:
                is_known = pa.types.is_null(kind) or _is_plain(kind)
            if not is_known:
                raise Refused(_STREAM, f"column {field.name} of type {kind}")

    def _column(self, chunks: pa.ChunkedArray, field: pa.Field) -> pa.Array:
        column = one_array(chunks)
        if pa.types.is_dictionary(column.type):
            # One large value that every row refers to.
            self._check("bytes", _unfolded(column), self._max_size)
            column = column.cast(column.type.value_type)
        column = cast_unchanged(column, field.type)
        check_times(column)
        return column


def _unfolded(chunk: pa.DictionaryArray) -> int:
    """Return the bytes of a dictionary's values, each as often as it is used."""
    kind = chunk.type.value_type
    if _is_any(kind, _VARIABLE):
        lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
        return int(pc.sum(lengths).as_py() or 0)
    return len(chunk) * int(kind.bit_width) // 8


def _is_plain(kind: pa.DataType) -> bool:
    if _is_any(kind, _NESTED):
        return all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    return _is_any(kind, _PLAIN)


def _is_any(kind: pa.DataType, names: tuple[str, ...]) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)
