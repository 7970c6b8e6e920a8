"""What is in a wide queue's file, and did it change?"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import Message, Position, open_reader
from support.wide_oracle import list_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SMALL", "put_state", "row", "stored", "unchanged"]

#: Options of a small queue.
SMALL = "slots=8&size=4096"


def stored(path: str) -> list[bytes]:
    """Return the payloads in a queue, by the oracle, which a reader has to agree with."""
    payloads = [message.payload for message in list_queue(f"{path}.fmq").messages]
    with open_reader(f"fmq:{path}", start=Position.START) as reader:
        assert [message.payload for message in reader.read_many(100_000)] == payloads
    return payloads


def row(payload: bytes, **fields: Any) -> Message:
    """Return a message for a batch to write."""
    return Message(0, 1, 1, 0, 0, None, None, payload)._replace(**fields)


def put_state(path: str, state: int) -> None:
    """Store a state as the format says: with its complement, then alone."""
    with Path(f"{path}.fmq").open("r+b") as file:
        file.seek(416)
        file.write(state.to_bytes(4, "little") + (state ^ 0xFFFFFFFF).to_bytes(4, "little"))
        file.seek(396)
        file.write(state.to_bytes(4, "little"))


@contextlib.contextmanager
def unchanged(path: str) -> Iterator[None]:
    """Make sure that no byte of a queue changes, but for who opened it last."""
    file = Path(f"{path}.fmq")
    before = file.read_bytes()
    yield
    after = file.read_bytes()
    for at, size in ((392, 4), (400, 16)):  # the writer's pid, and the machine's boot id
        after = after[:at] + before[at : at + size] + after[at + size :]
    assert after == before
