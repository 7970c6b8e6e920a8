"""How far has a query got in each of its streams?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.core.errors import Malformed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Offset", "Offsets", "offsets_from_json", "offsets_to_json"]


@dataclass(frozen=True, slots=True)
class Offset:
    """Where a batch ends in one stream, and where it began."""

    epoch: int
    #: The first message after the batch.
    end: int
    #: The first message of the batch. With it a batch is known by its end alone: Spark asks for
    #: the start of the very first batch anew after a failure, and "latest" has moved on by then.
    start: int
    #: Messages that are known to be lost since the query was begun. Spark has no metrics of
    #: sources in Python; what is in an offset is in the progress of every batch.
    lost: int = 0
    #: How often messages were lost that nobody could count.
    lost_unknown: int = 0
    #: Under which name tasks of this query report what they could not find; empty: they fail.
    reader: str = ""
    #: The stream was removed, and what was lost with it is counted.
    is_gone: bool = False


#: One for each URL.
Offsets = dict[str, Offset]


def offsets_to_json(offsets: Mapping[str, Offset]) -> dict[str, Any]:
    """Return what Spark stores. It compares the text, so the order is always the same."""
    return {
        url: {
            "end": offset.end,
            "epoch": str(offset.epoch),  # of 64 bits, which not all JSON readers keep
            "lost": offset.lost,
            "lost_unknown": offset.lost_unknown,
            "start": offset.start,
            **({"reader": offset.reader} if offset.reader else {}),
            **({"gone": True} if offset.is_gone else {}),
        }
        for url, offset in sorted(offsets.items())
    }


def offsets_from_json(stored: Mapping[str, Any]) -> Offsets:
    """Read again what Spark stored.

    :raises Malformed: it was not made by `offsets_to_json`.
    """
    offsets = {}
    for url, fields in stored.items():
        try:
            offsets[url] = Offset(
                int(fields["epoch"]),
                int(fields["end"]),
                int(fields["start"]),
                int(fields["lost"]),
                int(fields["lost_unknown"]),
                str(fields.get("reader", "")),
                bool(fields.get("gone", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Malformed(
                "offsets of the checkpoint",
                url,
                "epoch, end, start, lost, lost_unknown",
                fields,
                hint="it is of another source; give the query a new checkpointLocation",
            ) from error
    return offsets
