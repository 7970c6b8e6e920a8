"""How do payloads that are lines of comma-separated values become rows?"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pv

from penstock.core.decoding.decoder import (
    Bytes,
    Decoder,
    Failure,
    Parsed,
    Part,
    Refused,
    one_array,
    parse_all,
)
from penstock.core.decoding.schema import Wrong
from penstock.core.decoding.values import (
    ValueChanged,
    check_times,
    count_infinite,
    decimals_of_text,
    has_times,
    is_read_right,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["CsvDecoder", "check_csv_schema"]

_MARK: Final = b"\xef\xbb\xbf"
_FEED, _RETURN, _QUOTE = b'\n\r"'


def check_csv_schema(schema: pa.Schema) -> None:
    """Refuse nested types.

    :raises Wrong: a column has such a type.
    """
    for field in schema:
        if field.type.num_fields:
            raise Wrong(
                f"column {field.name}: a value between commas cannot be {field.type}",
                hint="take it as STRING, and use from_json() or split() after it",
            )


class CsvDecoder(Decoder):
    """Parses all payloads of a batch as one text, by Arrow's parser."""

    format: ClassVar[str] = "csv"

    def __init__(
        self, schema: pa.Schema, prefix: str, *, delimiter: str, header: bool, nulls: Sequence[str]
    ) -> None:
        super().__init__(schema, prefix)
        self._delimiter = delimiter.encode()
        self._header = header
        self._nulls = list(nulls)
        # The parser lets decimals overflow silently: parse them as text first.
        self._decimals = {f.name: f.type for f in schema if pa.types.is_decimal(f.type)}
        self._types = {
            field.name: pa.string() if field.name in self._decimals else field.type
            for field in schema
        }
        self._timed = [field.name for field in schema if has_times(field.type)]
        self._whole = [field.name for field in schema if pa.types.is_integer(field.type)]
        self._floating = [field.name for field in schema if pa.types.is_floating(field.type)]

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        trimmed = pc.ascii_rtrim(_without_marks(payloads).view(pa.large_string()), "\r\n")
        texts = Bytes.of(trimmed.view(pa.large_binary()))
        is_empty = texts.lengths == 0
        failures = [Failure(row, "lines", "nothing") for row in np.flatnonzero(is_empty).tolist()]
        texts, bad = _with_plain_quotes(texts, self._delimiter)
        found = "a quote that is never closed, or has text behind it"
        failures += [Failure(row, "lines", found) for row in bad]
        is_good = ~is_empty
        is_good[bad] = False
        places = np.flatnonzero(is_good)
        if failures:
            texts = texts.only(is_good)
        columns: list[list[pa.Array]] = []
        origins: list[NDArray[np.int64]] = []
        for names, rows, bodies in self._groups(texts):
            if missing := sorted(set(self._plain.names) - set(names)):
                found = f"a header without {', '.join(missing)}"
                failures += [Failure(int(places[row]), "a header", found) for row in rows]
                continue
            found_columns, origin, refused = self._group(names, bodies)
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

    def _groups(self, texts: Bytes) -> Iterator[tuple[list[str], NDArray[np.int64], Bytes]]:
        """Group payloads by their columns, and remove their headers."""
        if not self._header:
            yield self._plain.names, np.arange(len(texts)), texts
            return
        headers, bodies = _split_first_line(texts)
        encoded = headers.dictionary_encode()
        codes = encoded.indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        known = encoded.dictionary.to_pylist()
        cuts = np.searchsorted(codes[order], np.arange(1, len(known)))
        for header, rows in zip(known, np.split(order, cuts), strict=False):
            yield self._names(header), rows, Bytes.of(bodies.take(pa.array(rows)))

    def _names(self, header: bytes) -> list[str]:
        try:
            names = [each.decode().strip() for each in _values_of_line(header, self._delimiter)]
        except UnicodeDecodeError:
            return []
        return names if len(set(names)) == len(names) else []

    def _group(
        self, names: list[str], texts: Bytes
    ) -> tuple[list[pa.Array], NDArray[np.int64], list[Failure]]:
        lines = _lines_of(texts, self._delimiter)
        failures = _other_lines(lines, len(names))
        counts = lines.counts
        places = np.arange(len(texts))
        if failures:
            is_good = np.ones(len(texts), np.bool_)
            is_good[[each.row for each in failures]] = False
            texts, counts, places = texts.only(is_good), counts[is_good], places[is_good]

        def parse(start: int, end: int) -> Parsed:
            expected = counts[start:end]
            part = texts.slice(start, end)
            if not expected.all():  # only a header
                part = part.only(expected > 0)
            rows = self._parse(names, part.lines())
            if rows.num_rows != expected.sum():
                raise Refused(f"{expected.sum():,} lines", f"{rows.num_rows:,}")
            return Parsed(rows, expected)

        columns, origin, refused = parse_all(texts.lengths, parse, self._plain)
        failures += [each._replace(row=int(places[each.row])) for each in refused]
        return columns, places[origin], failures

    def _parse(self, names: list[str], text: pa.Buffer) -> pa.Table:
        """Parse lines that all have the expected number of values."""
        if not text.size:
            return self._plain.empty_table()
        try:
            table = self._read(names, text, self._types)
            for name, kind in self._decimals.items():
                words = one_array(table.column(name))
                is_null = pc.is_in(words, pa.array(self._nulls, pa.string()))
                words = pc.if_else(is_null, None, pc.ascii_trim_whitespace(words))
                decimals = decimals_of_text(words, kind)
                place = table.schema.get_field_index(name)
                table = table.set_column(place, self._plain.field(name), decimals)
            for name in self._timed:
                check_times(table.column(name))
            self._check_numbers(table, names, text)
        except (pa.ArrowInvalid, ValueChanged) as error:
            found = str(error).removeprefix("CSV parse error: ")
            raise Refused(f"lines of {len(names)} values of the schema", found) from None
        return table

    def _check_numbers(self, table: pa.Table, names: list[str], text: pa.Buffer) -> None:
        """Check numbers that the parser may have misread, such as hexadecimal or infinite ones."""
        doubtful = [name for name in self._floating if count_infinite(table.column(name))]
        if self._whole and _may_be_hexadecimal(text):
            doubtful += self._whole
        if not doubtful:
            return
        words = self._read(names, text, dict.fromkeys(doubtful, pa.string()))
        for name in doubtful:
            if not is_read_right(one_array(words.column(name)), one_array(table.column(name))):
                kind = self._types[name]
                raise ValueChanged(f"a number in {name} that is too large or no plain {kind}")

    def _read(self, names: list[str], text: pa.Buffer, types: dict[str, pa.DataType]) -> pa.Table:
        # The parser strips a byte order mark, which here would belong to the first value.
        has_mark = bytes(text[: len(_MARK)]) == _MARK
        return pv.read_csv(
            pa.BufferReader(b"\n" + bytes(text) if has_mark else text),
            read_options=pv.ReadOptions(
                use_threads=False,
                block_size=text.size + 2,
                column_names=names,
                skip_rows=int(has_mark),
            ),
            parse_options=pv.ParseOptions(
                delimiter=self._delimiter.decode(), newlines_in_values=True
            ),
            convert_options=pv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=self._nulls,
                strings_can_be_null=False,
            ),
        )


def _other_lines(lines: _Lines, columns: int) -> list[Failure]:
    """Return a failure for each text with a line that has another number of values."""
    places = np.flatnonzero(lines.values != columns)
    owners, first = np.unique(lines.owners[places], return_index=True)
    expected = f"lines of {columns} values"
    return [
        Failure(row, expected, f"one of {values}" if values else "an empty line")
        for row, values in zip(owners.tolist(), lines.values[places[first]].tolist(), strict=True)
    ]


def _may_be_hexadecimal(text: pa.Buffer) -> bool:
    data = text.to_pybytes()
    return b"0x" in data or b"0X" in data


def _without_marks(payloads: pa.LargeBinaryArray) -> pa.LargeBinaryArray:
    """Remove byte order marks, which would become part of the first value."""
    has_mark = pc.starts_with(payloads, _MARK).to_numpy(zero_copy_only=False)
    if not has_mark.any():
        return payloads
    texts = Bytes.of(payloads)
    kept = np.ones(len(texts.data), np.bool_)
    kept[texts.starts[has_mark][:, None] + np.arange(len(_MARK))] = False
    return Bytes.from_lengths(texts.data[kept], texts.lengths - len(_MARK) * has_mark).binary()


# --- lines and values ------------------------------------------------------------------------
#
# All texts are checked as one buffer, before parsing: so a text that is no table is found by
# itself, and cannot swallow the next one.


class _Lines(NamedTuple):
    """The lines of all texts, in order."""

    #: Number of lines of each text.
    counts: NDArray[np.int64]
    #: For each line: the index of its text, and its number of values; 0 for an empty line.
    owners: NDArray[np.int64]
    values: NDArray[np.int64]


def _with_plain_quotes(texts: Bytes, delimiter: bytes) -> tuple[Bytes, list[int]]:
    """Normalise quotes, so that each one starts or ends a value, or is doubled inside one.

    Returns the texts, and the indices of those with an unclosed quote or with text after a closing
    quote; these texts are replaced by empty ones.
    """
    odd = _with_other_quotes(texts, delimiter)
    if not len(odd):
        return texts, []
    bad = []
    written = texts.binary().to_pylist()
    for place in odd.tolist():
        plain = _written_plainly(written[place], delimiter)
        if plain is None:
            bad.append(place)
        written[place] = plain or b""
    return Bytes.of(pa.array(written, pa.large_binary())), bad


def _lines_of(texts: Bytes, delimiter: bytes) -> _Lines:
    """Find the lines of texts with normalised quotes and no newline after the last line."""
    starts, stops = _line_ends(texts)
    commas = _outside_of_quotes(texts, np.flatnonzero(texts.data == delimiter[0]))
    is_text = texts.lengths > 0
    begins, ends = texts.starts[is_text], texts.ends[is_text]
    counts = is_text.astype(np.int64)
    if len(starts):
        begins = np.sort(np.concatenate([begins, stops]))
        ends = np.sort(np.concatenate([ends, starts]))
        counts += np.bincount(_owners(texts, starts), minlength=len(texts))
    values = np.searchsorted(commas, ends) - np.searchsorted(commas, begins) + 1
    values[begins == ends] = 0
    owners = np.repeat(np.arange(len(texts), dtype=np.int64), counts)
    return _Lines(counts, owners, values)


def _split_first_line(texts: Bytes) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
    """Return the first line of each text, and the rest."""
    starts, stops = _line_ends(texts)
    first = np.searchsorted(starts, texts.starts)
    has_more = first < np.searchsorted(starts, texts.ends)
    head_ends, body_starts = texts.ends.copy(), texts.ends.copy()
    head_ends[has_more] = starts[first[has_more]]
    body_starts[has_more] = stops[first[has_more]]
    # Each text is three: a line, its end, and the rest.
    cuts = np.column_stack([texts.starts, head_ends, body_starts]).reshape(-1)
    thirds = Bytes(texts.data, np.append(cuts, texts.offsets[-1])).binary()
    places = np.arange(len(texts)) * 3
    return thirds.take(pa.array(places)), thirds.take(pa.array(places + 2))


def _values_of_line(line: bytes, delimiter: bytes) -> list[bytes]:
    """Return the values of one line with normalised quotes."""
    return [
        value[1:-1].replace(b'""', b'"') if value.startswith(b'"') else value
        for value, _ in _values(line, delimiter) or ()
    ]


def _line_ends(texts: Bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and stop of each line ending: LF, CR or CR LF."""
    data = texts.data
    marks = np.flatnonzero((data == _FEED) | (data == _RETURN))
    marks = _outside_of_quotes(texts, marks)
    is_second = np.zeros(len(marks) + 1, np.bool_)
    is_second[1:-1] = (
        (np.diff(marks) == 1) & (data[marks[:-1]] == _RETURN) & (data[marks[1:]] == _FEED)
    )
    kept = ~is_second[:-1]
    starts = marks[kept]
    return starts, starts + 1 + is_second[1:][kept]


def _outside_of_quotes(texts: Bytes, places: NDArray[np.int64]) -> NDArray[np.int64]:
    quotes = np.flatnonzero(texts.data == _QUOTE)
    if not len(quotes):
        return places
    # Every text has an even number of them.
    outside: NDArray[np.int64] = places[np.searchsorted(quotes, places) % 2 == 0]
    return outside


def _owners(texts: Bytes, places: NDArray[np.int64]) -> NDArray[np.int64]:
    owners: NDArray[np.int64] = np.searchsorted(texts.offsets, places, side="right") - 1
    return owners


def _with_other_quotes(texts: Bytes, delimiter: bytes) -> NDArray[np.int64]:
    """Find texts with a quote that is neither at the edge of a value nor doubled."""
    data = texts.data
    quotes = np.flatnonzero(data == _QUOTE)
    if not len(quotes):
        return quotes
    owners = _owners(texts, quotes)
    counts = np.bincount(owners, minlength=len(texts))
    number = np.arange(len(quotes)) - np.searchsorted(quotes, texts.starts)[owners]
    is_edge = np.zeros(256, np.bool_)
    is_edge[[_QUOTE, _FEED, _RETURN, delimiter[0]]] = True
    before, after = data[np.maximum(quotes - 1, 0)], data[np.minimum(quotes + 1, len(data) - 1)]
    can_open = is_edge[before] | (quotes == texts.starts[owners])
    can_close = is_edge[after] | (quotes + 1 == texts.ends[owners])
    is_plain = np.where(number % 2 == 0, can_open, can_close)
    is_odd = counts % 2 == 1
    is_odd[owners[~is_plain]] = True
    return np.flatnonzero(is_odd)


@lru_cache
def _pattern(delimiter: bytes) -> re.Pattern[bytes]:
    """Return a pattern for a value and its terminator."""
    comma = re.escape(delimiter)
    edge: Final = rb"(?:" + comma + rb"|\r\n?|\n|\Z)"
    quoted: Final = rb'"[^"]*+(?:""[^"]*+)*+"(?=' + edge + rb")"
    plain: Final = rb'(?:[^"\r\n' + comma + rb"][^\r\n" + comma + rb"]*+)?+"
    return re.compile(rb"(" + quoted + rb"|(?!\")" + plain + rb")(" + edge + rb")")


def _values(text: bytes, delimiter: bytes) -> list[tuple[bytes, bytes]] | None:
    """Return the raw values, each with its terminator; None: the text does not parse."""
    values: list[tuple[bytes, bytes]] = []
    at = 0
    while (found := _pattern(delimiter).match(text, at)) is not None:
        value, edge = found[1], found[2]
        values.append((value, edge))
        at = found.end()
        if not edge:
            return values
    return None


def _written_plainly(text: bytes, delimiter: bytes) -> bytes | None:
    """Quote values that contain a quote; None: the quotes are wrong."""
    values = _values(text, delimiter)
    if values is None:
        return None
    return b"".join(
        b'"' + value.replace(b'"', b'""') + b'"' + edge
        if b'"' in value and not value.startswith(b'"')
        else value + edge
        for value, edge in values
    )
