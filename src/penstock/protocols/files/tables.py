"""How are messages rows of Parquet and Arrow files?"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.decoding.arrow_stream import check_columns, extents_of, unfolded
from penstock.core.decoding.decoder import Refused
from penstock.core.errors import Malformed
from penstock.protocols.files.formats import (
    AT_ONCE,
    LARGEST,
    FileFormat,
    WriterOptions,
    messages_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from penstock.core.batch import Batch
    from penstock.protocols.files.formats import RowSink

__all__ = ["ArrowFormat", "ParquetFormat"]

#: Limits, before the metadata of a file are trusted.
_MOST_COLUMNS: Final = 10_000
_LARGEST_TEXT: Final = 100 << 20
_DICTIONARY: Final = frozenset(("RLE_DICTIONARY", "PLAIN_DICTIONARY"))
#: The magic bytes of an Arrow file; an Arrow stream has none.
_MAGIC: Final = b"ARROW1\0\0"


class ParquetOptions(WriterOptions):
    """Options of `parquet:` for writers."""

    compression: Literal["none", "snappy", "gzip", "zstd", "lz4", "brotli"] = "zstd"


class ParquetFormat(FileFormat):
    """`parquet:`: the format of pandas, DuckDB, Spark and others."""

    writer_options = ParquetOptions

    def sink(self, file: BinaryIO, schema: pa.Schema, options: ParquetOptions) -> RowSink:
        # Payloads are seldom equal, and a dictionary of them costs time and memory.
        texts = [field.name for field in schema if field.name not in {"payload", "attributes"}]
        sink: RowSink = pq.ParquetWriter(
            file, schema, compression=options.compression, use_dictionary=texts
        )
        return sink

    def batches(self, path: Path, skip: int, options: Any) -> Iterator[Batch]:
        del options
        with _arrow_errors(path, "a Parquet file"), self._open(path) as file:
            folded = _folded_columns(file)
            groups = list(range(file.num_row_groups))
            while groups and skip >= (rows := file.metadata.row_group(groups[0]).num_rows):
                skip -= rows
                del groups[0]
            if not groups:
                return
        with _arrow_errors(path, "a Parquet file"), self._open(path, folded) as file:
            for rows in file.iter_batches(batch_size=AT_ONCE, row_groups=groups):
                kept = rows.slice(skip)
                skip = max(0, skip - rows.num_rows)
                if kept.num_rows:
                    yield messages_of(path, _unfolded(path, kept))

    def count(self, path: Path, options: Any) -> int:
        del options
        with _arrow_errors(path, "a Parquet file"), self._open(path) as file:
            return int(file.metadata.num_rows)

    def _open(self, path: Path, folded: list[str] | None = None) -> pq.ParquetFile:
        file = pq.ParquetFile(
            path,
            read_dictionary=folded,
            buffer_size=1 << 20,
            pre_buffer=False,
            thrift_string_size_limit=_LARGEST_TEXT,
            thrift_container_size_limit=1_000_000,
        )
        if file.metadata.num_columns > _MOST_COLUMNS:
            raise Malformed(
                str(path), "columns", f"at most {_MOST_COLUMNS:,}", file.metadata.num_columns
            )
        return file


def _folded_columns(file: pq.ParquetFile) -> list[str]:
    """Return the dictionary-encoded columns of bytes, where few bytes can become many."""
    names = set()
    for group in range(file.num_row_groups):
        described = file.metadata.row_group(group)
        for index in range(described.num_columns):
            column = described.column(index)
            if column.physical_type == "BYTE_ARRAY" and not _DICTIONARY.isdisjoint(
                column.encodings
            ):
                names.add(column.path_in_schema)
    return sorted(names)


def _unfolded(path: Path, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with dictionary columns decoded.

    :raises Malformed: the result would be too large.
    """
    for index, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            column = rows.column(index)
            if (size := unfolded(column)) > LARGEST:
                raise Malformed(
                    str(path), f"bytes in column {field.name}", f"at most {LARGEST:,}", size
                )
            plain = column.cast(field.type.value_type)
            rows = rows.set_column(index, field.with_type(field.type.value_type), plain)
    return rows


class ArrowFormat(FileFormat):
    """`arrow:`: Arrow files (IPC, Feather); Arrow streams can be read, too."""

    def sink(self, file: BinaryIO, schema: pa.Schema, options: WriterOptions) -> RowSink:
        del options
        packed = pa.ipc.IpcWriteOptions(compression="zstd")
        sink: RowSink = pa.ipc.new_file(file, schema, options=packed)
        return sink

    def batches(self, path: Path, skip: int, options: Any) -> Iterator[Batch]:
        del options
        with _arrow_errors(path, "an Arrow file"), pa.memory_map(str(path)) as file:
            is_file = file.read(len(_MAGIC)) == _MAGIC
            counts = list(_checked(path, file, len(_MAGIC) if is_file else 0))
            file.seek(0)
            reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            check_columns(reader.schema, reader.schema.names)
            for index, rows in enumerate(counts):
                batch = None if is_file else reader.read_next_batch()
                if skip >= rows:
                    skip -= rows
                    continue
                if batch is None:
                    batch = reader.get_batch(index)
                batch.validate(full=True)
                for at in range(skip, rows, AT_ONCE):
                    yield messages_of(path, _unfolded(path, batch.slice(at, AT_ONCE)))
                skip = 0

    def count(self, path: Path, options: Any) -> int:
        del options
        with _arrow_errors(path, "an Arrow file"), pa.memory_map(str(path)) as file:
            is_file = file.read(len(_MAGIC)) == _MAGIC
            return sum(_checked(path, file, len(_MAGIC) if is_file else 0))


def _checked(path: Path, file: pa.MemoryMappedFile, start: int) -> Iterator[int]:
    """Yield the number of rows of each batch, after checking its size in memory."""
    file.seek(start)
    for rows, size, is_dictionary in extents_of(file):
        if size > LARGEST:
            raise Malformed(str(path), "bytes in a batch", f"at most {LARGEST:,}", size)
        if not is_dictionary:
            yield rows


@contextmanager
def _arrow_errors(path: Path, expected: str) -> Iterator[None]:
    try:
        yield
    except Refused as error:
        raise Malformed(str(path), "its content", expected, error.found) from None
    except (pa.ArrowException, ValueError) as error:
        if isinstance(error, Malformed):
            raise
        raise Malformed(str(path), "its content", expected, error) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise Malformed(str(path), "its content", expected, error) from None  # Arrow's own
