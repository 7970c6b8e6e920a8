"""What is a file format, and how are its rows messages?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import Malformed
from penstock.core.json_lines import json_text
from penstock.core.options import Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from penstock.core.batch import Batch

__all__ = [
    "AT_ONCE",
    "LARGEST",
    "FileFormat",
    "RowSink",
    "WriterOptions",
    "json_rows",
    "messages_of",
    "python_rows",
]

#: Rows per read.
AT_ONCE: Final = 4096
#: The most bytes of one batch in memory.
LARGEST: Final = 1 << 30
#: Message fields that a row may have beside its own columns.
_HEADER: Final = ("seq", "time_ns", "created_ns", "type", "subtype")


class WriterOptions(Options):
    """Options of all formats, for writers."""

    #: Write decoded payloads instead of bytes: `struct:<dHH`, as in `cat --decode`.
    decode: str | None = None
    #: Whether to replace an existing file.
    replace: bool = False


class RowSink(Protocol):
    """A file that is being written."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows."""

    def close(self) -> None:
        """Write the end of the format. The file itself stays open."""


class FileFormat(ABC):
    """A file format."""

    #: Its options in a URL.
    reader_options: ClassVar[type[Options]] = Options
    writer_options: ClassVar[type[WriterOptions]] = WriterOptions
    #: Fields of a message that it cannot store.
    cannot_carry: ClassVar[Mapping[str, str]] = {}
    #: The largest payload that it can store; None: no limit.
    largest: ClassVar[int | None] = None

    @abstractmethod
    def sink(self, file: BinaryIO, schema: pa.Schema, options: Any) -> RowSink:
        """Start a file of rows: messages, or columns of decoded payloads."""

    @abstractmethod
    def batches(self, path: Path, skip: int, options: Any) -> Iterator[Batch]:
        """Yield the messages of a file after the first `skip`. Their `seq` is ignored.

        :raises Malformed: the file has another format, is damaged, or exceeds a limit.
        :raises OSError: the operating system refuses.
        """

    def count(self, path: Path, options: Any) -> int | None:  # noqa: ARG002 - for those that know
        """Return how many messages a file has, if its metadata tell; else None."""
        return None


# --- rows and messages ----------------------------------------------------------------------------


def messages_of(path: Path, rows: pa.RecordBatch) -> Batch:
    """Convert rows of any columns to messages.

    A row with a column `payload` is a message; in others, the columns that are no message fields
    become a JSON object. Missing fields are 0, or the time of the file.

    :raises Malformed: a column does not fit.
    """
    changed_ns = path.stat().st_mtime_ns
    columns: dict[str, pa.Array] = {}
    for name in _HEADER:
        column = _column(rows, name)
        if column is not None and pa.types.is_integer(column.type):
            default = changed_ns if name.endswith("_ns") else 0
            columns[name] = _cast(path, name, pc.fill_null(column, default))
    payload = _column(rows, "payload")
    if payload is not None and _is_bytes(payload.type):
        columns["payload"] = _cast(path, "payload", pc.fill_null(payload, b""))
        for name in ("stream", "attributes"):
            column = _column(rows, name)
            if column is not None and _is_bytes(column.type):
                columns[name] = _cast(path, name, column)
    else:
        rest = [name for name in rows.schema.names if name not in columns]
        columns["payload"] = pa.array(json_rows(rows.select(rest)), pa.binary())
    if "time_ns" not in columns:
        columns["time_ns"] = columns.get("created_ns", pa.scalar(changed_ns, pa.int64()))
    columns.setdefault("created_ns", pa.scalar(changed_ns, pa.int64()))
    arrays = [_filled(columns.get(field.name), field, rows.num_rows) for field in BATCH_SCHEMA]
    return pa.record_batch(arrays, schema=BATCH_SCHEMA)


def json_rows(rows: pa.RecordBatch) -> list[bytes]:
    """Convert rows to JSON objects, without null values."""
    return [
        json_text(
            {name: value for name, value in row.items() if value is not None},
            ensure_ascii=False,
            compact=True,
        ).encode(errors="surrogatepass")
        for row in python_rows(rows)
    ]


def python_rows(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as dictionaries; times keep their nanoseconds, for which Python has no type."""
    for index, field in enumerate(rows.schema):
        if field.type == pa.time64("ns") or (
            pa.types.is_timestamp(field.type)
            and field.type.unit == "ns"
            and field.type.tz in {None, "UTC"}
        ):
            texts = _texts_of_times(rows.column(index))
            rows = rows.set_column(index, field.with_type(pa.string()), texts)
    found: list[dict[str, Any]] = rows.to_pylist()
    return found


def _texts_of_times(column: pa.Array) -> pa.Array:
    """Return times as ISO 8601 has them: with 9 digits of a second, 6, or none, as needed."""
    is_time = pa.types.is_time(column.type)
    zone = "" if is_time or column.type.tz is None else "+00:00"
    known = pc.is_valid(column).to_numpy(zero_copy_only=False)
    nanos = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
    moments = np.datetime_as_string(nanos.astype("datetime64[ns]"))
    texts = [
        (text[11:] if is_time else text).removesuffix("000").removesuffix(".000000") + zone
        for text in moments.tolist()
    ]
    return pa.array(texts, pa.string(), mask=~known)


def _column(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    index = rows.schema.get_field_index(name)  # -1 also if two columns have the name
    return None if index < 0 else rows.column(index)


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_fixed_size_binary(kind)
    )


def _cast(path: Path, name: str, column: pa.Array) -> pa.Array:
    field = BATCH_SCHEMA.field(name)
    try:
        if pa.types.is_fixed_size_binary(field.type) and column.type != field.type:
            return pa.array(column.cast(pa.binary()).to_pylist(), field.type)
        return column.cast(field.type)
    except (pa.ArrowException, ValueError) as error:
        raise Malformed(str(path), f"column {name}", field.type, error) from None


def _filled(column: pa.Array | pa.Scalar | None, field: pa.Field, count: int) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    if column is None and field.nullable:
        return pa.nulls(count, field.type)
    return pa.repeat(pa.scalar(0, field.type) if column is None else column, count)
