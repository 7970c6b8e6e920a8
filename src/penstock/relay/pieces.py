"""What is left of a piece that is on its way?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from penstock.core.batch import Batch

__all__ = ["Left", "payload_bytes", "shifted"]

_NS_PER_SECOND: Final = 1_000_000_000


class Left:
    """What is left of a piece."""

    def __init__(self, piece: Batch) -> None:
        #: All of it, from the note on.
        self.whole = piece
        self.batch = piece
        #: Some of it may be in the target.
        self.is_in_doubt = False
        #: How many, where the target cannot be asked.
        self.unknown = 0

    @property
    def first_seq(self) -> int:
        return int(self.batch.column("seq")[0].as_py())


def payload_bytes(batch: Batch) -> int:
    """Return how many bytes of payload a batch has: none is missing, so its offsets tell."""
    column = batch.column("payload")
    if not len(column):
        return 0
    wide = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    offsets = np.frombuffer(column.buffers()[1], wide)
    return int(offsets[column.offset + len(column)] - offsets[column.offset])


def shifted(batch: Batch, seconds: float) -> Batch:
    """Return a batch with times of the target's clock."""
    if not seconds:
        return batch
    # Saturated before, so that it fits after: a time at the end of time stays there.
    offset = round(seconds * _NS_PER_SECOND)
    low, high = max(-(2**63), -(2**63) - offset), min(2**63 - 1, 2**63 - 1 - offset)
    times = pc.max_element_wise(batch.column("time_ns"), pa.scalar(low, pa.int64()))
    times = pc.min_element_wise(times, pa.scalar(high, pa.int64()))
    times = pc.add(times, pa.scalar(offset, pa.int64()))
    index = batch.schema.get_field_index("time_ns")
    return batch.set_column(index, batch.schema.field(index), times)
