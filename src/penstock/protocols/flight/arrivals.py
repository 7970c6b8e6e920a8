"""Which messages have come from a server, and are not handed out yet?"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from penstock.core.batch import check_batch, messages_from_batch
from penstock.core.errors import Malformed
from penstock.protocols.flight.pieces import payload_bytes
from penstock.protocols.flight.wire import Told

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.message import Message

__all__ = ["Arrivals", "check_buffers", "read_chunk"]


class Arrivals:
    """Batches that came together, and how much of them was handed out."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._offset = 0
        #: The first batch as messages, once somebody wants them one by one.
        self._messages: list[Message] | None = None
        #: Messages handed out so far, and their payload bytes.
        self.messages = 0
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, batches: Iterable[Batch]) -> None:
        self._batches.extend(batches)

    def clear(self) -> None:
        self._batches.clear()
        self._offset = 0
        self._messages = None

    def next_seq(self) -> int | None:
        """Return the number of the next message to hand out; None: there is none."""
        if not self._batches:
            return None
        seq: int = self._batches[0].column("seq")[self._offset].as_py()
        return seq

    def take_messages(self, n: int) -> list[Message]:
        if self._messages is None:
            self._messages = list(messages_from_batch(self._batches[0]))
        messages = self._messages[self._offset : self._offset + n]
        self._pass(len(messages), sum(len(message.payload) for message in messages))
        return messages

    def take_batch(self, n: int) -> Batch:
        batch = self._batches[0].slice(self._offset, n)
        self._pass(batch.num_rows, payload_bytes(batch))
        return batch

    def _pass(self, count: int, size: int) -> None:
        self._offset += count
        self.messages += count
        self.bytes += size
        if self._offset >= self._batches[0].num_rows:
            self._batches.popleft()
            self._offset = 0
            self._messages = None


def read_chunk(chunk: Any) -> tuple[Batch | None, Told]:
    """Return the batch of a chunk, if there is one, and what the server told with it.

    :raises Malformed: it is not what a server sends.
    """
    if chunk.app_metadata is None:
        raise Malformed("flight Told", "metadata", "there", "none")
    told = Told.from_bytes(chunk.app_metadata.to_pybytes())
    batch = chunk.data
    if batch is None or not batch.num_rows:
        return None, told
    check_buffers(batch)
    check_batch(batch)
    return batch, told


def check_buffers(batch: Batch) -> None:
    """Make sure that a batch from outside is what it says, before anything goes by its offsets.

    :raises Malformed: it is not.
    """
    try:
        batch.validate(full=True)
    except ValueError as error:
        raise Malformed("batch", "its buffers", "whole", error) from None
