"""Which part of a stream does a bounded query read?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.core.batch import numbers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.batch import Batch

__all__ = ["Slice", "Times", "slices_from_json", "slices_to_json"]

#: A range of source times: start, and exclusive end; nanoseconds since 1970.
Times = tuple[int, int]


class Slice(NamedTuple):
    """Messages `start` to `end` - 1 of an epoch of a stream, optionally of a time range."""

    epoch: int
    start: int
    end: int
    #: Only messages with these source times.
    times: Times | None = None
    #: Messages of other queries, which are left out: first message, end, and times.
    others: tuple[tuple[int, int, Times | None], ...] = ()

    def of(self, batch: Batch) -> Batch:
        """Filter a batch by `times` and `others`.

        The caller has to limit it to `start` and `end`.
        """
        if self.times is None and not self.others:
            return batch
        seqs, happened = numbers_of(batch, "seq"), numbers_of(batch, "time_ns")
        meant = np.ones(len(seqs), dtype=bool)
        if self.times is not None:
            meant &= (happened >= self.times[0]) & (happened < self.times[1])
        for start, end, times in self.others:
            theirs = (seqs >= start) & (seqs < end)
            if times is not None:
                theirs &= (happened >= times[0]) & (happened < times[1])
            meant &= ~theirs
        import pyarrow as pa  # noqa: PLC0415 - it is loaded; most slices need none of it

        return batch if meant.all() else batch.filter(pa.array(meant))


def slices_to_json(slices: Mapping[str, Slice]) -> str:
    """Encode slices of streams as an option of the source."""
    return json.dumps(
        {url: [str(one.epoch), *one[1:]] for url, one in slices.items()}, sort_keys=True
    )


def slices_from_json(text: str | Mapping[str, Any]) -> dict[str, Slice]:
    """Parse the text of `slices_to_json`.

    :raises ValueError: it has another form.
    """
    given = json.loads(text) if isinstance(text, str) else text
    try:
        return {
            str(url): Slice(
                int(epoch),
                int(start),
                int(end),
                _times(times),
                tuple((int(low), int(high), _times(then)) for low, high, then in others),
            )
            for url, (epoch, start, end, times, others) in given.items()
        }
    except (TypeError, AttributeError) as error:
        raise ValueError("expected slices of streams") from error


def _times(given: Any) -> Times | None:
    return None if given is None else (int(given[0]), int(given[1]))
