"""How are many texts parsed in one go, and the bad ones among them found?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.pipeline.decoding.result import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["Parsed", "Refused", "one_array", "parse_all"]

#: Bytes of one go. A parser holds a few times this.
_MOST_BYTES: Final = 64 << 20

#: So few are parsed one by one rather than halved again.
_FEW: Final = 6


class Refused(Exception):
    """At least one of the payloads does not parse."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected, found)
        self.expected = expected
        self.found = found


class Parsed(NamedTuple):
    """What some payloads became."""

    rows: pa.Table
    #: Rows of each payload; None: one each.
    counts: NDArray[np.int64] | None


def parse_all(
    lengths: NDArray[np.int64],
    parse: Callable[[int, int], Parsed],
    schema: pa.Schema,
    at_once: int = _MOST_BYTES,
) -> tuple[list[pa.Array], NDArray[np.int64], list[Failure]]:
    """Parse all payloads, as many at a time as can be.

    `parse(start, end)` either takes all of a range or refuses it as a whole. A range that is
    refused is halved until the payloads stand alone that do not parse: k bad ones of n cost
    about k log(n) calls, and all others are still parsed many at a time. `at_once` is the most that
    the lengths of one call add up to, where a payload is not longer by itself.
    """
    pieces: list[pa.Table] = []
    origins: list[NDArray[np.int64]] = []
    failures: list[Failure] = []
    waiting = _ranges(lengths, at_once)[::-1]
    while waiting:
        start, end = waiting.pop()
        try:
            rows, counts = parse(start, end)
        except Refused as refused:
            if end - start == 1:
                failures.append(Failure(start, refused.expected, refused.found))
            elif end - start <= _FEW:
                waiting += [(row, row + 1) for row in reversed(range(start, end))]
            else:
                middle = (start + end) // 2
                waiting += [(middle, end), (start, middle)]
            continue
        places = np.arange(start, end, dtype=np.int64)
        pieces.append(rows)
        origins.append(places if counts is None else np.repeat(places, counts))
    whole = pa.concat_tables([schema.empty_table(), *pieces]).combine_chunks()
    origin = np.concatenate(origins) if origins else np.empty(0, np.int64)
    return [one_array(column) for column in whole.columns], origin, failures


def _ranges(lengths: NDArray[np.int64], at_once: int) -> list[tuple[int, int]]:
    if not len(lengths):
        return []
    group = np.cumsum(lengths) // at_once
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(lengths)]
    return [(start, end) for start, end in pairwise(cuts) if start < end]


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece."""
    chunks: Sequence[pa.Array] = column.chunks
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [column.combine_chunks()])
