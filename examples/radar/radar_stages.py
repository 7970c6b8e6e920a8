"""What does the pipeline of storm-watch.yaml do with beams?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from moments import MOMENTS_DDL, moments_of_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame

__all__ = ["PACKED_HEADER", "moments", "packed", "packed_batches"]

#: What stands before the moments of a beam in a message; after it come, for each gate, float32 of
#: power, snr, dbz, velocity and width, one list after the other, NaN where there is no echo.
PACKED_HEADER: Final = np.dtype(
    [
        ("beam", "<i8"),
        ("volume", "<i4"),
        ("gates", "<i4"),
        ("azimuth", "<f4"),
        ("elevation", "<f4"),
        ("first_gate", "<f4"),
        ("gate_spacing", "<f4"),
    ]
)
_LISTS: Final = ("power", "snr", "dbz", "velocity", "width")


def moments(beams: DataFrame) -> DataFrame:
    """Turn beams into their moments, one row for each."""
    return beams.mapInArrow(moments_of_batches, MOMENTS_DDL)


def packed(rows: DataFrame) -> DataFrame:
    """Turn moments into messages: the sweep is the type, the payload is binary."""
    return rows.mapInArrow(packed_batches, "time_ns BIGINT, type INT, payload BINARY")


def packed_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Do it for batches of Arrow."""
    for batch in batches:
        if batch.num_rows:
            yield _packed(batch)


def _packed(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows, gates = batch.num_rows, len(batch["dbz"][0])
    layout = np.dtype([("header", PACKED_HEADER), ("lists", "<f4", (len(_LISTS), gates))])
    whole = np.zeros(rows, layout)
    header = whole["header"]
    header["gates"] = gates
    for name in PACKED_HEADER.names or ():
        if name != "gates":
            header[name] = batch[name].to_numpy(zero_copy_only=False)
    for index, name in enumerate(_LISTS):
        values = pc.list_flatten(batch[name]).to_numpy(zero_copy_only=False)
        whole["lists"][:, index] = values.reshape(rows, gates)
    ends = np.arange(rows + 1, dtype=np.int32) * layout.itemsize
    payload = pa.Array.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(whole)]
    )
    return pa.RecordBatch.from_pydict(
        {"time_ns": batch["time_ns"], "type": batch["sweep"], "payload": payload}
    )
