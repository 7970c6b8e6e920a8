"""A batch is cut into pieces that are small enough, and nothing is left out."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.batch import batch_from_messages
from penstock.core.message import Message
from penstock.protocols.flight.pieces import payload_bytes, pieces_of


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.none() | st.integers(0, 500)), max_size=40),
    st.integers(200, 5000),
)
def test_pieces_hold_all_messages_in_order_within_the_limit(
    sizes: list[tuple[int, int | None]], limit: int
) -> None:
    messages = [
        Message(i, i, i, 0, 0, None, None if own is None else bytes(own), bytes(size))
        for i, (size, own) in enumerate(sizes)
    ]
    batch = batch_from_messages(messages)
    pieces = list(pieces_of(batch, limit))
    assert pa.Table.from_batches(pieces).equals(pa.Table.from_batches([batch]))
    assert all(piece.nbytes <= limit or piece.num_rows == 1 for piece in pieces)
    assert sum(map(payload_bytes, pieces)) == sum(size for size, _ in sizes)
