"""How do rows of a DataFrame become messages, and for which stream?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import InvalidOption, Malformed
from penstock.pipeline.options import check_target

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.core.batch import Batch

__all__ = ["COLUMNS", "Targets"]

#: Columns that mean something to a sink; others are refused, so that nothing is dropped silently.
COLUMNS: Final = frozenset(
    {
        *("payload", "type", "subtype", "time", "time_ns", "stream", "attributes", "url", "output"),
        *("seq", "created_ns"),  # of a source; the target gives its own
    }
)


class Targets:
    """Where the rows of a query go: one stream, or one for each name or URL in a column."""

    def __init__(self, url: str | None, outputs: Mapping[str, str], names: list[str]) -> None:
        """Look at what the rows have.

        :raises InvalidOption: there is no payload, or no target, or a column that says nothing.
        """
        _check_columns(names)
        self._url = url
        self._outputs = outputs
        self._column: str | None = None
        if outputs or "output" in names:
            self._column = "output"
            _check_outputs(url, outputs, names)
        elif url is None:
            self._column = "url"
            if "url" not in names:
                raise InvalidOption(
                    "url",
                    None,
                    "is missing",
                    hint='.option("url", "log:/path/name"), or a column url',
                )

    def messages(self, rows: pa.RecordBatch) -> Iterator[tuple[str, Batch]]:
        """Yield the rows as batches of messages, each with the URL that it goes to.

        :raises Malformed: a column has the wrong type, or a row goes nowhere.
        """
        if self._column is None:
            assert self._url is not None
            yield self._url, _batch_of(rows)
            return
        where = rows.column(rows.schema.get_field_index(self._column))
        for name in pc.unique(where).to_pylist():
            if name is None:
                raise _bad(self._column, "a value in every row", "null")
            part = rows.filter(pc.equal(where, pa.scalar(name, where.type)))
            yield self._url_of(name), _batch_of(part)

    def _url_of(self, name: str) -> str:
        if self._column == "url":
            check_target(name)  # an option is checked before, and a column has just come
            return name
        if name not in self._outputs:
            raise _bad("output", f"one of {', '.join(sorted(self._outputs))}", name)
        return self._outputs[name]


def _check_columns(names: list[str]) -> None:
    if "payload" not in names:
        raise InvalidOption(
            "columns",
            ", ".join(names),
            "a sink needs the column payload",
            hint='.withColumn("payload", …)',
        )
    unknown = sorted(set(names) - COLUMNS)
    if unknown:
        raise InvalidOption(
            "columns",
            ", ".join(unknown),
            "have no place in a message",
            hint="select the columns that are to be kept, or put them into payload",
        )


def _check_outputs(url: str | None, outputs: Mapping[str, str], names: list[str]) -> None:
    example = '.option("outputs", \'{"name": "log:/path/name"}\')'
    if not outputs:
        raise InvalidOption("outputs", None, "the column output names what it says", hint=example)
    if "output" not in names:
        raise InvalidOption("outputs", sorted(outputs), "there is no column output to choose by")
    if url is not None:
        raise InvalidOption("url", url, "outputs is given as well", hint="leave one of them out")


def _batch_of(rows: pa.RecordBatch) -> Batch:
    count = rows.num_rows
    given = {name: rows.column(i) for i, name in enumerate(rows.schema.names)}
    columns = []
    for field in BATCH_SCHEMA:
        name, column = field.name, given.get(field.name)
        if name in {"seq", "created_ns"}:
            column = pa.repeat(pa.scalar(0, pa.int64()), count)
        elif name == "time_ns" and column is None:
            name, column = "time", _times(given.get("time"), count)
        elif column is None:
            empty = pa.scalar(None if field.nullable else 0, field.type)
            column = pa.repeat(empty, count)
        if not field.nullable and column.null_count:
            raise _bad(name, "a value in every row", "null")
        if column.type != field.type:
            column = _cast(field, column)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA)


def _times(given: pa.Array | None, count: int) -> pa.Array:
    if given is None:
        return pa.repeat(pa.scalar(time.time_ns(), pa.int64()), count)
    try:
        micros = given.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
        return pc.multiply_checked(micros, pa.scalar(1000, pa.int64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _bad("time", "a timestamp from 1677 to 2262", f"{given.type}: {error}") from None


def _cast(field: pa.Field, column: pa.Array) -> pa.Array:
    try:
        if field.type == pa.binary(16):  # Spark has no binary of a fixed length
            column = column.cast(pa.binary())
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _bad(field.name, str(field.type), f"{column.type}: {error}") from None


def _bad(column: str, expected: str, found: str) -> Malformed:
    return Malformed("rows for the sink", f"column {column}", expected, found)
