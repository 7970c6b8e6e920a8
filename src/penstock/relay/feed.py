"""Which messages of the source does a relay copy, and when is it complete?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from penstock.core.batch import numbers_of, without_origins
from penstock.core.capabilities import (
    Grouped,
    Held,
    KeepsOrigin,
    OriginTimed,
    Replayable,
    SourceTimed,
)
from penstock.core.errors import PenstockError, PositionError
from penstock.core.interfaces import UNKNOWN_END, Reader
from penstock.core.position import Position
from penstock.relay.outages import retried

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.core.retry import OnRetry, RetryPolicy
    from penstock.core.statistics import ReaderStatistics
    from penstock.relay.config import RelayOptions
    from penstock.relay.outages import StoppableClock

__all__ = ["Feed", "Left", "books_within", "newest_in", "payload_bytes", "shifted"]

log = logging.getLogger(__name__)

# --- the feed -----------------------------------------------------------------------------------


#: Later than every time.
_FOREVER: Final = 2**63 - 1
#: While following, check this often (seconds) whether to stop.
_PATIENCE: Final = 0.5
#: Approximate payload bytes per batch, so that large messages do not fill the memory.
_BYTES_AT_ONCE: Final = 8 << 20
#: Messages of the first read, when their size is still unknown.
_FIRST_READ: Final = 16
#: Decay of the remembered message size with each read.
_FORGET: Final = 0.9
#: Nanoseconds after which messages appended at a time are certainly readable.
_OVER_NS: Final = 1_000_000_000


class Feed:
    """Reads the source up to the relay's end, across outages. Not thread-safe."""

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        options: RelayOptions,
        clock: StoppableClock,
        policy: RetryPolicy,
        on_outage: OnRetry,
        on_return: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._options = options
        self._clock = clock
        self._policy = policy
        self._on_outage = on_outage
        self._on_return = on_return
        self._keeps_origin = isinstance(writer, KeepsOrigin)
        is_origin = options.by == "origin"
        has_origins = self._keeps_origin or is_origin
        self._read_batch = reader.read_batch_with_origins if has_origins else reader.read_batch
        #: The time range to copy, and its column; None: all times.
        self._during: tuple[int, int] | None = None
        self._time = "origin_ns" if is_origin else "time_ns"
        self._end = options.end
        if options.by != "append":
            self._during, self._end = _times(options)
        self._newest: int | None = None
        if self._end in {Position.END, Position.LAST}:
            newest = newest_in(reader)
            self._end = None if newest is None else Position.sequence(newest)
        if not options.follow and self._end is None:
            self._newest = reader.newest_seq()
        self._is_over = self._is_empty_range()
        self._limit = min(options.batch, _FIRST_READ)
        self._largest = 1.0
        self._restarts = reader.statistics().restarts
        #: The epoch of the source's sequence numbers; None: it cannot be read again.
        self.epoch = self._epoch_now()
        #: The reader's statistics after the last call, without losses beyond the end.
        self.books: ReaderStatistics = books_within(reader, options.end)

    def _is_empty_range(self) -> bool:
        """Tell whether no message can be in the range.

        Then nothing is read, so nothing counts as lost.
        """
        if self._during is not None:
            return self._during[0] >= self._during[1]
        start, end = self._options.start, self._end
        if end is None:
            return self._options.end is not None  # the end of an empty stream
        if end.anchor == "seq":
            next_seq = self._reader.statistics().next_seq
            return next_seq is not None and next_seq > end.value
        return start.anchor == end.anchor == "time" and start.value > end.value

    def next(self) -> Batch | None:
        """Return the next batch; None: the end is reached, or the relay is told to stop.

        :raises StopAsked: the relay was told to stop during an outage of the source.
        """
        while not self._is_over and not self._clock.should_stop():
            if not self._find_time():
                return None
            batch = self._read()
            if batch.num_rows:
                batch = self._cut(batch)
                if self._during is not None:
                    batch = _of_time(batch, self._time, *self._during)
                if batch.num_rows:
                    return batch if self._keeps_origin else without_origins(batch)
            elif not self._options.follow or self._is_past():
                self._is_over = True
        return None

    def _find_time(self) -> bool:
        """Seek to the next message in the time range, if the reader can; False: none is left."""
        reader, next_seq = self._reader, self.books.next_seq
        if self._during is None or next_seq is None:
            return True
        if self._time == "time_ns" and isinstance(reader, SourceTimed):
            found = reader.next_happened(next_seq, *self._during)
        elif self._time == "origin_ns" and isinstance(reader, OriginTimed):
            found = reader.next_originated(next_seq, *self._during)
        else:
            return True
        if found is not None and found > next_seq:
            reader.seek(found)
        return found is not None or self._options.follow

    def go_back(self, seq: int) -> None:
        """Seek back to a message that was read but not copied.

        :raises PenstockError: a held reader cannot; closed without an error, it would be behind it.
        """
        try:
            self._reader.seek(seq)
        except PenstockError:
            if isinstance(self._reader, Held) and self._reader.hold is not None:
                raise
            # Others are redelivered, or were not stored anyway.

    def successor(self, epoch: int | None, seq: int) -> int | None:
        """Return the number now of message `seq` of an earlier epoch; None: it is gone."""
        if epoch is None or not isinstance(self._reader, Replayable):
            return None
        try:
            return self._reader.bounds().successor(epoch, seq)
        except PenstockError:
            return None

    def _read(self) -> Batch:
        timeout = _PATIENCE if self._options.follow else 0
        batch = retried(
            lambda: self._read_batch(self._limit, timeout),
            self._policy,
            self._clock,
            self._on_outage,
        )
        self._on_return()
        # Also without messages: there may be losses.
        self.books = books_within(self._reader, self._options.end)
        if batch.num_rows:
            self._adapt(batch)
            if isinstance(self._reader, Replayable) and (known := self._reader.epoch) is not None:
                self.epoch = known
            elif self.books.restarts != self._restarts:
                self._restarts = self.books.restarts
                self.epoch = self._epoch_now()
        return batch

    def _adapt(self, batch: Batch) -> None:
        """Adapt the batch size to the size of the messages."""
        self._largest = max(payload_bytes(batch) / batch.num_rows, self._largest * _FORGET, 1.0)
        self._limit = max(1, min(self._options.batch, int(_BYTES_AT_ONCE / self._largest)))

    def _cut(self, batch: Batch) -> Batch:
        """Remove messages after the end."""
        if self._end is None:
            # The whole batch, although some messages are newer: they would be read in vain.
            if self._newest is not None and batch.column("seq")[-1].as_py() >= self._newest:
                self._is_over = True
            return batch
        name = "seq" if self._end.anchor == "seq" else "created_ns"
        column = numbers_of(batch, name)
        beyond = np.flatnonzero(column > self._end.value)
        if len(beyond):
            self._is_over = True
            first = int(beyond[0])
            # A reader with a named position must not count these as read.
            self.go_back(batch.column("seq")[first].as_py())
            return batch.slice(0, first)
        self._is_over = name == "seq" and int(column[-1]) == self._end.value
        return batch

    def _is_past(self) -> bool:
        """Tell whether the end time has passed, so that no more messages can come."""
        if self._end is None or self._end.anchor != "time":
            return False
        return self._clock.now_ns() > self._end.value + _OVER_NS

    def _epoch_now(self) -> int | None:
        reader = self._reader
        if not isinstance(reader, Replayable):
            return None
        known = reader.epoch
        return reader.bounds().epoch if known is None else known


def newest_in(reader: Reader) -> int | None:
    """Return the number of the newest message; None: the stream is empty.

    :raises PositionError: the end of the stream is not known.
    """
    newest = reader.newest_seq()
    if newest is not None:
        return newest
    if isinstance(reader, Replayable):
        bounds = reader.bounds()  # also of files whose rows must be counted
        is_known = bounds.end < UNKNOWN_END
        newest = bounds.end - 1 if bounds.end > bounds.oldest else None
    else:
        is_known = _is_countable(reader)
    if not is_known:
        raise PositionError(
            f"{reader.url}: its end is not known",
            hint="give the last message by a number or a time",
        )
    return newest


def _is_countable(reader: Reader) -> bool:
    """Tell whether a reader without a newest message has an empty stream."""
    return isinstance(reader, Grouped) and type(reader).newest_seq is not Reader.newest_seq


def books_within(reader: Reader, end: Position | None) -> ReaderStatistics:
    """Return the counters of a source, without losses beyond `end` if that is a number."""
    books = reader.statistics()
    return books.before(end.value + 1) if end is not None and end.anchor == "seq" else books


def _times(options: RelayOptions) -> tuple[tuple[int, int], Position | None]:
    """Return the time range to copy, and the end if it is not a time."""
    start = options.start.value if options.start.anchor == "time" else -_FOREVER
    if options.end is None or options.end.anchor != "time":
        return (start, _FOREVER), options.end
    return (start, options.end.value + 1), None


def _of_time(batch: Batch, name: str, start_ns: int, end_ns: int) -> Batch:
    times = numbers_of(batch, name)
    return batch.filter(pa.array((times >= start_ns) & (times < end_ns)))


# --- pieces of a batch --------------------------------------------------------------------------

_NS_PER_SECOND: Final = 1_000_000_000


class Left:
    """The part of a piece that is not copied yet."""

    def __init__(self, piece: Batch) -> None:
        #: The complete piece, as noted in the journal.
        self.whole = piece
        self.batch = piece
        #: Whether parts of it may be in the target.
        self.is_in_doubt = False
        #: How many messages, if the target cannot be queried.
        self.unknown = 0

    @property
    def first_seq(self) -> int:
        return int(self.batch.column("seq")[0].as_py())


def payload_bytes(batch: Batch) -> int:
    """Return the payload bytes of a batch without null payloads, from its offsets."""
    column = batch.column("payload")
    if not len(column):
        return 0
    wide = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    offsets = np.frombuffer(column.buffers()[1], wide)
    return int(offsets[column.offset + len(column)] - offsets[column.offset])


def shifted(batch: Batch, seconds: float) -> Batch:
    """Return a batch with its times shifted by `seconds`, to the target's clock."""
    if not seconds:
        return batch
    import pyarrow.compute as pc  # noqa: PLC0415 - most clocks are right, and relays start sooner

    # Saturated before, so that it fits after: a time at the end of time stays there.
    offset = round(seconds * _NS_PER_SECOND)
    low, high = max(-(2**63), -(2**63) - offset), min(2**63 - 1, 2**63 - 1 - offset)
    times = pc.max_element_wise(batch.column("time_ns"), pa.scalar(low, pa.int64()))
    times = pc.min_element_wise(times, pa.scalar(high, pa.int64()))
    times = pc.add(times, pa.scalar(offset, pa.int64()))
    index = batch.schema.get_field_index("time_ns")
    return batch.set_column(index, batch.schema.field(index), times)
