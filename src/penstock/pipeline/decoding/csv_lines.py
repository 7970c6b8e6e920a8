"""Where are the lines and the values of many texts of comma-separated values?

Looked at as one buffer, before any of it is parsed: so a text that is no table is known by
itself, and cannot take in the next one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.pipeline.decoding.buffers import Bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Lines", "lines_of", "split_first_line", "values_of_line", "with_plain_quotes"]

_FEED, _RETURN, _QUOTE = b'\n\r"'


class Lines(NamedTuple):
    """The lines of all texts, one after the other."""

    #: Of each text.
    counts: NDArray[np.int64]
    #: For each line: which text it is of, and how many values it has; an empty line has none.
    owners: NDArray[np.int64]
    values: NDArray[np.int64]


def with_plain_quotes(texts: Bytes, delimiter: bytes) -> tuple[Bytes, list[int]]:
    """Write the texts so that each quote begins or ends a value, or is one of a pair in it.

    Returns the texts, and the places of those in which a quote is never closed, or text follows
    one that is; these are empty then.
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


def lines_of(texts: Bytes, delimiter: bytes) -> Lines:
    """Find the lines of texts with plain quotes and no line end behind the last line."""
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
    return Lines(counts, owners, values)


def split_first_line(texts: Bytes) -> tuple[pa.LargeBinaryArray, pa.LargeBinaryArray]:
    """Return the first line of each text, and the lines behind it."""
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


def values_of_line(line: bytes, delimiter: bytes) -> list[bytes]:
    """Return the values of one line with plain quotes."""
    return [
        value[1:-1].replace(b'""', b'"') if value.startswith(b'"') else value
        for value, _ in _values(line, delimiter) or ()
    ]


def _line_ends(texts: Bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the ends of lines start and stop: a feed, a return, or both."""
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
    """Find texts with a quote that is not at the edge of a value, nor one of a pair."""
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
    """Return what finds a value, and what ends it."""
    comma = re.escape(delimiter)
    edge: Final = rb"(?:" + comma + rb"|\r\n?|\n|\Z)"
    quoted: Final = rb'"[^"]*+(?:""[^"]*+)*+"(?=' + edge + rb")"
    plain: Final = rb'(?:[^"\r\n' + comma + rb"][^\r\n" + comma + rb"]*+)?+"
    return re.compile(rb"(" + quoted + rb"|(?!\")" + plain + rb")(" + edge + rb")")


def _values(text: bytes, delimiter: bytes) -> list[tuple[bytes, bytes]] | None:
    """Return the values as they are written, each with what ends it; None: they are none."""
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
    """Put quotes around values that have one inside; None: the quotes are wrong."""
    values = _values(text, delimiter)
    if values is None:
        return None
    return b"".join(
        b'"' + value.replace(b'"', b'""') + b'"' + edge
        if b'"' in value and not value.startswith(b'"')
        else value + edge
        for value, edge in values
    )
