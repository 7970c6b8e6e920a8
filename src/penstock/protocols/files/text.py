"""How are messages lines of CSV and JSON?"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from penstock.core.batch import BATCH_SCHEMA, batch_from_messages, messages_from_batch
from penstock.core.errors import Malformed
from penstock.core.json_lines import (
    JSON_KEYS,
    json_line,
    json_text,
    message_from_json,
    read_lines,
)
from penstock.core.message import Message
from penstock.core.options import Options
from penstock.protocols.files.formats import (
    AT_ONCE,
    FileFormat,
    WriterOptions,
    messages_of,
    python_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from penstock.core.batch import Batch
    from penstock.protocols.files.formats import RowSink

__all__ = ["CsvFormat", "JsonLinesFormat"]

#: Bytes of a CSV file parsed at a time, and the longest line.
_BLOCK: Final = 64 << 20
#: An integer that a float may not have.
_LARGE_INTEGER: Final = r"^\s*[+-]?[0-9]{16,}\s*$"
#: The largest payload: as base64 and quoted, it still fits in a block.
_LARGEST_PAYLOAD: Final = 24 << 20


# --- CSV ------------------------------------------------------------------------------------------


class CsvReaderOptions(Options):
    """Options of `csv:` for readers."""

    #: Types of the columns: numbers and times where all values are, or text.
    types: Literal["guess", "text"] = "guess"


class CsvFormat(FileFormat):
    """`csv:`: a header and a line per message. A binary payload is in `payload_b64`."""

    reader_options = CsvReaderOptions
    largest = _LARGEST_PAYLOAD

    def sink(self, file: BinaryIO, schema: pa.Schema, options: WriterOptions) -> RowSink:
        del options
        return _CsvSink(file, schema)

    def batches(self, path: Path, skip: int, options: CsvReaderOptions) -> Iterator[Batch]:
        try:
            for rows in self._rows(path, options):
                kept = rows.slice(skip)
                skip = max(0, skip - rows.num_rows)
                for at in range(0, kept.num_rows, AT_ONCE):
                    yield messages_of(path, _joined(path, kept.slice(at, AT_ONCE)))
        except (pa.ArrowException, UnicodeDecodeError) as error:
            hint = (
                "if a column has not one type, add ?types=text" if "convers" in str(error) else None
            )
            raise Malformed(
                str(path), "its content", "CSV with a header", error, hint=hint
            ) from None

    def _rows(self, path: Path, options: CsvReaderOptions) -> Iterator[pa.RecordBatch]:
        if not path.stat().st_size:
            return
        known = {name: pa.int64() for name in ("seq", "time_ns", "created_ns")}
        known |= {name: pa.int32() for name in ("type", "subtype")}
        known |= {name: pa.string() for name in ("stream", "attributes_b64", "payload_b64")}
        known |= {"payload": pa.binary()}
        names = _header(path)
        if options.types == "text" or not {"payload", "payload_b64"} & set(names):
            is_text = options.types == "text"
            known = {name: pa.string() for name in names if is_text}
        with _open(path, known) as reader:
            kinds = reader.schema
            found = [each.name for each in kinds if pa.types.is_float64(each.type)]
            found = [
                name for name in found if kinds.get_field_index(name) >= 0
            ]  # not two of a name
            if not found or options.types == "text":
                yield from reader
                return
        # A column with an integer beyond 64 bits looks like one of floats, which have fewer digits.
        texts: set[str] | None = None
        with _open(path, known | dict.fromkeys(found, pa.string())) as reader:
            for rows in reader:
                if texts is None:
                    texts = {name for name in found if _loses_digits(rows.column(name))}
                yield _with_floats(path, rows, [name for name in found if name not in texts])


def _open(path: Path, types: Mapping[str, pa.DataType]) -> pacsv.CSVStreamingReader:
    return pacsv.open_csv(
        path,
        read_options=pacsv.ReadOptions(block_size=_BLOCK, use_threads=False),
        parse_options=pacsv.ParseOptions(newlines_in_values=True),
        convert_options=pacsv.ConvertOptions(
            column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    )


def _loses_digits(texts: pa.Array) -> bool:
    """Tell whether one of these numbers is an integer that a float does not have."""
    large = texts.filter(pc.match_substring_regex(texts, _LARGE_INTEGER))
    return any(int(text) != int(float(text)) for text in large.to_pylist())


def _with_floats(path: Path, rows: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    """Return rows in which columns of text are floats.

    :raises Malformed: a float does not have all digits of an integer there.
    """
    for name in names:
        texts = pc.utf8_trim_whitespace(rows.column(name))
        if _loses_digits(texts):
            raise Malformed(
                str(path),
                f"column {name}",
                "numbers of at most 15 digits, as before",
                "a larger integer",
                hint="add ?types=text",
            )
        index = rows.schema.get_field_index(name)
        rows = rows.set_column(index, name, texts.cast(pa.float64()))
    return rows


def _header(path: Path) -> list[str]:
    """Return the names of the columns."""
    with path.open("rb") as file:
        first = file.readline(_BLOCK)
    table = pacsv.read_csv(pa.BufferReader(first))
    return list(table.schema.names)


def _joined(path: Path, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Decode base64 columns, and merge them into the columns of bytes."""
    for name, coded, decode in (
        ("payload", "payload_b64", _from_base64),
        ("attributes", "attributes_b64", _from_base64),
        ("stream", "stream", bytes.fromhex),
    ):
        at = rows.schema.get_field_index(coded)
        if at < 0 or not pa.types.is_string(rows.column(at).type):
            continue
        # A quoted nothing is empty; elsewhere other programs quote what they leave out, too.
        nothing = (None,) if name == "attributes" else (None, "")
        try:
            column = pa.array(
                [None if text in nothing else decode(text) for text in rows.column(at).to_pylist()],
                pa.binary(),
            )
        except ValueError as error:
            raise Malformed(str(path), f"column {coded}", "text of bytes", error) from None
        there = rows.schema.get_field_index(name)
        if name == "payload" and there >= 0:
            column = pc.coalesce(column, rows.column(there).cast(pa.binary()))
        rows = rows.remove_column(at)
        there = rows.schema.get_field_index(name)
        rows = rows.remove_column(there) if there >= 0 else rows
        rows = rows.append_column(name, column)
    return rows


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


class _CsvSink:
    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._is_plain = schema == BATCH_SCHEMA
        rows = self._text(pa.RecordBatch.from_pylist([], schema))
        self._writer = pacsv.CSVWriter(file, rows.schema)

    def write(self, rows: pa.RecordBatch) -> None:
        self._writer.write_batch(self._text(rows))

    def close(self) -> None:
        self._writer.close()

    def _text(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Convert rows to CSV's types: numbers and text."""
        columns: dict[str, pa.Array] = {}
        for field in rows.schema:
            column = rows.column(field.name)
            if self._is_plain and field.name == "payload":
                columns |= _payload_columns(column)
            elif self._is_plain and field.name == "attributes":
                columns["attributes_b64"] = _texts(column, _base64)
            elif pa.types.is_nested(field.type):
                columns[field.name] = _texts(column, json_text)
            elif pa.types.is_binary(field.type) or pa.types.is_fixed_size_binary(field.type):
                columns[field.name] = _texts(column, bytes.hex)
            else:
                columns[field.name] = column
        return pa.RecordBatch.from_pydict(columns)


def _texts(column: pa.Array, text: Any) -> pa.Array:
    values = [None if value is None else text(value) for value in column.to_pylist()]
    return pa.array(values, pa.string())


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _payload_columns(column: pa.Array) -> dict[str, pa.Array]:
    """Split payloads into two columns: text, and others as base64."""
    texts: list[str | None] = []
    coded: list[str | None] = []
    for payload in column.to_pylist():
        try:
            text = None if b"\0" in payload else payload.decode()
        except UnicodeDecodeError:
            text = None
        texts.append(text)
        coded.append(_base64(payload) if text is None else None)
    return {"payload": pa.array(texts, pa.string()), "payload_b64": pa.array(coded, pa.string())}


# --- JSON lines -----------------------------------------------------------------------------------


class JsonLinesFormat(FileFormat):
    """`jsonl:`: one object per line, as `cat --json` prints it. Other objects are payloads."""

    def sink(self, file: BinaryIO, schema: pa.Schema, options: WriterOptions) -> RowSink:
        del options
        return _JsonSink(file, is_plain=schema == BATCH_SCHEMA)

    def batches(self, path: Path, skip: int, options: Any) -> Iterator[Batch]:
        del options
        changed_ns = path.stat().st_mtime_ns
        for lines in read_lines(str(path)):
            kept = lines[skip:]
            skip = max(0, skip - len(lines))
            for at in range(0, len(kept), AT_ONCE):
                yield batch_from_messages(
                    [_message(line, path, n, changed_ns) for n, line in kept[at : at + AT_ONCE]]
                )


class _JsonSink:
    def __init__(self, file: BinaryIO, *, is_plain: bool) -> None:
        self._file = file
        self._is_plain = is_plain

    def write(self, rows: pa.RecordBatch) -> None:
        if self._is_plain:
            self._file.writelines([json_line(each) for each in messages_from_batch(rows)])
        else:
            self._file.writelines([json_text(row).encode() + b"\n" for row in python_rows(rows)])

    def close(self) -> None:
        """Do nothing: the format has no trailer."""


def _message(line: bytes, path: Path, number: int, changed_ns: int) -> Message:
    """Read a line: a message, or any other JSON object, which is then the payload."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(path), f"line {number}", "a JSON object", error) from None
    if not isinstance(fields, dict):
        raise Malformed(str(path), f"line {number}", "a JSON object", repr(line[:60]))
    if fields.keys() <= JSON_KEYS and not {"payload", "payload_b64"}.isdisjoint(fields):
        found = message_from_json(line, str(path), number, 0, 0)
        created = found.created_ns or changed_ns
        happened = found.time_ns if "time_ns" in fields else created
        return found._replace(time_ns=happened, created_ns=created)
    given = fields.get("time_ns")
    time_ns = given if isinstance(given, int) and abs(given) < 1 << 63 else changed_ns
    return Message(0, time_ns, changed_ns, 0, 0, None, None, line.strip())
