"""How do payloads that are lines of comma-separated values become rows?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from penstock.pipeline.decoding.buffers import Bytes
from penstock.pipeline.decoding.bulk import Parsed, Refused, parse_all
from penstock.pipeline.decoding.result import Decoder, Failure, Part
from penstock.pipeline.decoding.types import Wrong

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["CsvDecoder", "check_csv_schema"]

_MARK: Final = b"\xef\xbb\xbf"
#: Perhaps: inside of quotes it is none.
_EMPTY_LINE: Final = re.compile(rb"(?:\A|\n|\r)[\r\n]")
_FEED, _RETURN, _QUOTE = b'\n\r"'


def check_csv_schema(schema: pa.Schema) -> None:
    """Refuse types that have other types inside.

    :raises Wrong: a column has such a type.
    """
    for field in schema:
        if field.type.num_fields:
            raise Wrong(
                f"column {field.name}: a value between commas cannot be {field.type}",
                hint="take it as STRING, and use from_json() or split() after it",
            )


class CsvDecoder(Decoder):
    """Lets Arrow's parser read the lines of all payloads of a batch as one text."""

    format: ClassVar[str] = "csv"

    def __init__(
        self, schema: pa.Schema, prefix: str, *, delimiter: str, header: bool, nulls: Sequence[str]
    ) -> None:
        super().__init__(schema, prefix)
        self._delimiter = delimiter
        self._header = header
        self._nulls = list(nulls)

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        texts = _without_marks(payloads)
        texts = pc.ascii_rtrim(texts.view(pa.large_string()), "\r\n").view(pa.large_binary())
        lengths = pc.binary_length(texts).to_numpy()
        is_empty = lengths == 0
        failures = [Failure(row, "lines", "nothing") for row in np.flatnonzero(is_empty).tolist()]
        places = np.flatnonzero(~is_empty)
        if failures:
            texts = texts.filter(pa.array(~is_empty))
        groups = self._by_header(texts) if self._header else [(None, np.arange(len(texts)), texts)]
        columns: list[list[pa.Array]] = []
        origins: list[NDArray[np.int64]] = []
        for names, rows, bodies in groups:
            if names is not None and (missing := sorted(set(self._plain.names) - set(names))):
                found = f"a header without {', '.join(missing)}"
                failures += [Failure(int(places[row]), "a header", found) for row in rows]
                continue
            found_columns, origin, refused = self._group(names or self._plain.names, bodies)
            columns.append(found_columns)
            origins.append(places[rows[origin]])
            failures += [each._replace(row=int(places[rows[each.row]])) for each in refused]
        return self._together(columns, origins, failures)

    def _together(
        self,
        columns: list[list[pa.Array]],
        origins: list[NDArray[np.int64]],
        failures: list[Failure],
    ) -> Part:
        origin = np.concatenate([np.empty(0, np.int64), *origins])
        if len(columns) <= 1:
            return Part(columns[0] if columns else self._nothing(), origin, failures)
        order = np.argsort(origin, kind="stable")
        together = [pa.concat_arrays(parts).take(order) for parts in zip(*columns, strict=True)]
        return Part(together, origin[order], failures)

    def _by_header(
        self, texts: pa.LargeBinaryArray
    ) -> list[tuple[list[str] | None, NDArray[np.int64], pa.LargeBinaryArray]]:
        """Take off the first lines, and put together payloads whose first line is the same."""
        parts = pc.split_pattern(texts, b"\n", max_splits=1)
        headers = pc.list_element(parts, 0)
        counts = pc.list_value_length(parts).to_numpy()
        flat = parts.flatten()
        at = np.concatenate(([0], np.cumsum(counts)))[:-1] + 1
        bodies = flat.take(pa.array(np.where(counts > 1, at, 0), mask=counts < 2))  # noqa: PLR2004
        bodies = bodies.fill_null(b"")
        encoded = headers.dictionary_encode()
        codes = encoded.indices.to_numpy()
        found: list[tuple[list[str] | None, NDArray[np.int64], pa.LargeBinaryArray]] = []
        for code, header in enumerate(encoded.dictionary.to_pylist()):
            rows = np.flatnonzero(codes == code)
            found.append((self._names(header), rows, bodies.take(pa.array(rows))))
        return found

    def _names(self, header: bytes) -> list[str]:
        try:
            table = pv.read_csv(
                pa.BufferReader(header.rstrip(b"\r") + b"\n"),
                read_options=pv.ReadOptions(use_threads=False, block_size=len(header) + 2),
                parse_options=pv.ParseOptions(delimiter=self._delimiter),
            )
            names = [name.strip() for name in table.column_names]
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return []
        return names if len(set(names)) == len(names) else []

    def _group(
        self, names: list[str], payloads: pa.LargeBinaryArray
    ) -> tuple[list[pa.Array], NDArray[np.int64], list[Failure]]:
        texts = Bytes.of(payloads)
        counts = np.where(texts.lengths > 0, texts.counts(_FEED) + 1, 0)
        # A line may also end with a return alone; a quote may stay open. Those stand alone.
        returns = texts.counts(_RETURN)
        is_odd = texts.counts(_QUOTE) % 2 == 1
        if returns.any():
            data = np.append(texts.data, 0)
            lone = np.flatnonzero((data[:-1] == _RETURN) & (data[1:] != _FEED))
            is_odd |= np.diff(np.searchsorted(lone, texts.offsets)) > 0

        def parse(start: int, end: int) -> Parsed:
            if end - start == 1:
                return self._alone(names, texts.at(start))
            if is_odd[start:end].any():
                raise Refused("lines", "some that need a closer look")
            expected = counts[start:end]
            part = texts.slice(start, end)
            if not expected.all():
                part = part.only(expected > 0)
            rows = self._read(names, part.lines())
            # No line gives two rows, so that as many as lines are one each.
            if rows.num_rows != expected.sum():
                raise Refused("lines", "lines that are empty or go on in the next")
            return Parsed(rows, expected)

        return parse_all(texts.lengths, parse, self._plain)

    def _alone(self, names: list[str], text: bytes) -> Parsed:
        """Parse one payload, in which a value may have line ends."""
        if not text:  # there was a header, and nothing else
            return Parsed(self._plain.empty_table(), np.zeros(1, np.int64))
        rows = self._read(names, pa.py_buffer(text + b"\n"))
        if text.count(_QUOTE) % 2:
            # An open quote would take in a line that comes behind it.
            line = b"x" + self._delimiter.encode() * (len(names) - 1)
            behind = self._read(names, pa.py_buffer(text + b"\n" + line + b"\n"), as_text=True)
            if behind.num_rows != rows.num_rows + 1:
                raise Refused("lines", "a quote that is never closed")
        if _EMPTY_LINE.search(text):
            with_empty = self._read(names, pa.py_buffer(text + b"\n"), skip_empty=False)
            if with_empty.num_rows != rows.num_rows:
                raise Refused("lines", "an empty line")
        return Parsed(rows, np.array([rows.num_rows]))

    def _read(
        self, names: list[str], text: pa.Buffer, *, skip_empty: bool = True, as_text: bool = False
    ) -> pa.Table:
        if not text.size:
            return self._plain.empty_table()
        types = {field.name: pa.string() if as_text else field.type for field in self._plain}
        try:
            return pv.read_csv(
                pa.BufferReader(text),
                read_options=pv.ReadOptions(
                    use_threads=False, block_size=text.size + 1, column_names=names
                ),
                parse_options=pv.ParseOptions(
                    delimiter=self._delimiter,
                    newlines_in_values=True,
                    ignore_empty_lines=skip_empty,
                ),
                convert_options=pv.ConvertOptions(
                    column_types=types,
                    include_columns=self._plain.names,
                    null_values=self._nulls,
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            found = str(error).removeprefix("CSV parse error: ")
            raise Refused(f"lines of {len(names)} values of the schema", found) from None


def _without_marks(payloads: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Take off marks of the byte order: editors write them, and the first value would have one."""
    has_mark = pc.starts_with(payloads, _MARK).to_numpy(zero_copy_only=False)
    if not has_mark.any():
        return payloads
    texts = Bytes.of(payloads)
    kept = np.ones(len(texts.data), np.bool_)
    kept[texts.starts[has_mark][:, None] + np.arange(len(_MARK))] = False
    return Bytes.from_lengths(texts.data[kept], texts.lengths - len(_MARK) * has_mark).binary()
