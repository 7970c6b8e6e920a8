"""How does a program read the values of an imported stream?"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.delivery_policy import DeliveryPolicy, DeliveryQueue
from penstock.core.errors import Closed
from penstock.core.interfaces import Closable
from penstock.core.position import Position
from penstock.core.worker import Worker
from penstock.protocols.psi.store.catalog import psi_message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.message import Message
    from penstock.core.overflow import BufferStatistics
    from penstock.protocols.psi.codecs import Codec
    from penstock.protocols.psi.envelope import PsiMessage
    from penstock.protocols.psi.metadata import StreamMetadata
    from penstock.protocols.psi.store.streams import Store

__all__ = ["ImportedStream", "Received"]

log = logging.getLogger(__name__)

_PATIENCE: Final = 0.1
_TAKEN_AT_ONCE: Final = 256


class Received(NamedTuple):
    """A value, its times and its sequence number."""

    value: Any
    originating_ns: int
    creation_ns: int
    sequence_id: int


class ImportedStream(Closable):
    """Reads one stream of a store to its end. For one thread.

    With a policy there is a queue between the store and the reader, which drops messages and counts
    them, or slows down the reading of the store.
    """

    def __init__(
        self,
        store: Store,
        metadata: StreamMetadata,
        *,
        from_first: bool,
        policy: DeliveryPolicy | None = None,
    ) -> None:
        self._store = store
        self.name = metadata.name
        self.id = metadata.id
        self._reader = store.reader(id=metadata.id)
        #: Messages that were read.
        self.messages = 0
        #: Messages that never came, or were overwritten in the local store.
        self.lost = 0
        self._sequence = 0 if from_first else None
        self._queue: DeliveryQueue[Message] | None = None
        self._worker: Worker | None = None
        if policy is not None:
            self._queue = DeliveryQueue(policy, time_of=lambda message: message.time_ns)
            self._worker = Worker(f"psi-read-{self.name}", self._fill, log=log).start()

    @property
    def codec(self) -> Codec:
        return self._store.catalog.codec(self.id)

    def take(self, limit: int, timeout: float | None = 0) -> list[Message]:
        """Return up to `limit` messages as the store has them; wait for the first one."""
        if self._queue is None:
            return self._take(limit, timeout)
        try:
            return self._queue.get_many(limit, timeout)
        except Closed:
            return []  # the end

    def _take(self, limit: int, timeout: float | None) -> list[Message]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            is_over = self._is_all_here()  # before the read: nothing can be appended in between
            end, last, first = self._store.reached(self.id)
            if self._sequence is None and first is not None:
                self._sequence = first - 1
            left = _PATIENCE if deadline is None else min(_PATIENCE, deadline - time.monotonic())
            found = self._reader.read_many(limit, 0 if is_over else max(0.0, left))
            before = self._sequence, self.lost, self.messages
            try:
                for message in found:
                    self._count(message.subtype)
                    self.messages += 1
            except BaseException:  # the next call reads them again
                self._sequence, self.lost, self.messages = before
                self._reader.seek(found[0].seq)
                raise
            is_behind = self._sequence is not None and last != self._sequence
            if not found and is_behind and self._has_passed(end):
                self._count(last + 1)  # all up to there was overwritten
                self._sequence = last
            if found or is_over or (deadline is not None and time.monotonic() >= deadline):
                return found

    def rewind(self) -> None:
        """Go to the oldest message of the store. Not for a stream with a policy."""
        self._reader.seek(Position.START)
        self._sequence = None

    def read_messages(self, limit: int, timeout: float | None = 0) -> list[PsiMessage]:
        """Return up to `limit` messages as psi has them; wait for the first one."""
        return [psi_message(message) for message in self.take(limit, timeout)]

    def read(self, timeout: float | None = None) -> Received | None:
        """Return the next value; None at the end of the stream, or after the timeout.

        :raises Malformed: the payload is not of the stream's type.
        """
        found = self.read_messages(1, timeout)
        return self._received(found[0]) if found else None

    @property
    def is_over(self) -> bool:
        """Whether the stream has ended, and all of it was read from the store."""
        if self._worker is not None and self._worker.is_alive:
            return False
        return self._is_all_here()

    def _is_all_here(self) -> bool:
        return self._store.metadata(self.id).is_closed

    def statistics(self) -> BufferStatistics | None:
        """Return the counts of the policy; None without one."""
        return None if self._queue is None else self._queue.statistics()

    def _fill(self, _: Worker) -> None:
        queue = self._queue
        assert queue is not None
        try:
            while True:
                is_over = self._is_all_here()
                found = self._take(_TAKEN_AT_ONCE, _PATIENCE)
                for message in found:
                    queue.put(message)
                if is_over and not found:
                    return
        except Closed:
            return  # the reader was closed
        finally:
            queue.close()

    def __iter__(self) -> Iterator[Received]:
        """Yield values until the stream ends."""
        while (received := self.read()) is not None:
            yield received

    def _received(self, message: PsiMessage) -> Received:
        return Received(self.codec.decode(message.payload), *message[2:4], message.sequence_id)

    def _count(self, sequence: int) -> None:
        expected = None if self._sequence is None else self._sequence + 1
        if expected is not None and sequence != expected:
            # A lower number: the stream was recreated, and counts from 1.
            self.lost += sequence - (1 if sequence < expected else expected)
        self._sequence = sequence

    def _has_passed(self, end: int) -> bool:
        """Tell whether the reader has read, or lost, all before a number in the queue."""
        place = self._reader.statistics().next_seq
        return place is not None and place >= end

    def close(self) -> None:
        """Close the reader of the store. Idempotent."""
        if self._queue is not None and self._worker is not None:
            self._queue.close()
            self._worker.join()
        self._reader.close()
