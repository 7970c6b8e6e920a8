"""How is a batch cut into pieces of a limited size?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.core.batch import Batch

__all__ = ["OVERHEAD", "payload_bytes", "pieces_of"]

#: Bytes of a message in a batch besides payload, attributes and stream: its numbers and offsets.
OVERHEAD = 48


def payload_bytes(batch: Batch) -> int:
    """Return the bytes of all payloads."""
    return pc.sum(pc.binary_length(batch.column("payload"))).as_py() or 0


def pieces_of(batch: Batch, limit: int) -> Iterator[Batch]:
    """Yield the batch in pieces of up to `limit` bytes; a message larger than that goes alone."""
    if batch.nbytes <= limit:
        yield batch
        return
    ends = np.cumsum(_sizes(batch))
    start, count = 0, batch.num_rows
    while start < count:
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield batch.slice(start, stop - start)
        start = stop


def _sizes(batch: Batch) -> NDArray[np.int64]:
    sizes = np.full(batch.num_rows, OVERHEAD + 16, np.int64)
    for name in ("payload", "attributes"):
        lengths = pc.fill_null(pc.binary_length(batch.column(name)), 0)
        sizes += lengths.to_numpy(zero_copy_only=False)
    return sizes
