"""Batches of messages for the tests of decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.decoding import decoder_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.decoding import Decoded

#: What a message has, and Spark's source adds to it.
_SCHEMA = pa.schema(
    [("url", pa.string()), *((field.name, field.type) for field in BATCH_SCHEMA),
     ("time", pa.timestamp("us", "UTC"))]
)  # fmt: skip


def batch_of(payloads: Sequence[bytes | None], first: int = 0) -> pa.RecordBatch:
    """Return messages as the source gives them, with these payloads."""
    count = len(payloads)
    columns: dict[str, Any] = {
        "url": ["fmq:/radar/iq"] * count,
        "seq": range(first, first + count),
        "time_ns": [1_700_000_000_000_000_000 + i for i in range(count)],
        "created_ns": [1_700_000_000_000_000_500 + i for i in range(count)],
        "type": [7] * count,
        "subtype": [8] * count,
        "stream": [b"s" * 16] * count,
        "attributes": [b"attributes"] * count,
        "payload": payloads,
        "time": [1_700_000_000_000_000] * count,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in _SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


def decode_all(payloads: Sequence[bytes | None], **options: Any) -> Decoded:
    """Decode payloads, and check that each became rows or a failure."""
    decoded = decoder_for(options).decode(batch_of(payloads))
    return checked(decoded, len(payloads))


def checked(decoded: Decoded, count: int) -> Decoded:
    """Check what holds for every result."""
    decoded.rows.validate(full=True)
    failed = [failure.row for failure in decoded.failures]
    assert failed == sorted(set(failed))
    if decoded.origin is None:
        assert decoded.rows.num_rows == count
        assert not failed
    else:
        origin = decoded.origin.tolist()
        assert len(origin) == decoded.rows.num_rows
        assert origin == sorted(origin)
        assert not set(origin) & set(failed)
        assert set(origin) | set(failed) <= set(range(count))
    return decoded


def rows_of(payloads: Sequence[bytes | None], **options: Any) -> list[dict[str, Any]]:
    """Decode payloads of which none fails."""
    decoded = decode_all(payloads, **options)
    assert not decoded.failures
    rows: list[dict[str, Any]] = decoded.rows.to_pylist()
    return rows


def failures_of(payloads: Sequence[bytes | None], **options: Any) -> dict[int, str]:
    """Return the place and the reason of payloads that fail."""
    return {each.row: each.reason for each in decode_all(payloads, **options).failures}
