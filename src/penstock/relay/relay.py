"""How is a target kept in step with a source, whatever breaks in between?"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.batch import (
    batch_from_messages,
    integers_in,
    messages_from_batch,
    numbers_of,
)
from penstock.core.capabilities import Grouped, KeepsOrigin
from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.delivery_policy import DeliveryQueue
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    InvalidOption,
    LeaseLost,
    MessageTooLarge,
    PenstockError,
    Unacknowledged,
    WriteTimeout,
)
from penstock.core.overflow import DropCounts, DropReason
from penstock.core.quota import parse_quota
from penstock.core.worker import Worker
from penstock.relay.copy import check_apart, check_kept
from penstock.relay.feed import Feed, Left, books_within, payload_bytes, shifted
from penstock.relay.journal import (
    MOST_RUNS,
    Arrived,
    Journal,
    Note,
    Tail,
    TargetCut,
    arrived,
    bounds_of,
    check_end,
    resume,
    runs_of,
)
from penstock.relay.outages import (
    StopAsked,
    StoppableClock,
    connection_options,
    outage_policy,
    retried,
)
from penstock.relay.pacing import Pacer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.batch import Batch
    from penstock.core.delivery_policy import DeliveryPolicy
    from penstock.core.interfaces import Reader, Writer
    from penstock.core.message import Message
    from penstock.relay.config import RelayOptions

__all__ = ["Relay", "RelayStatistics"]


class RelayStatistics(NamedTuple):
    """Counters of a relay: `read == copied + sum(dropped.values()) + held`, at any moment."""

    #: Messages taken from the source.
    read: int
    #: Messages that are in the target.
    copied: int
    #: Their payload bytes.
    bytes: int
    #: Messages dropped, by reason: by the policy, or because the target will never accept them.
    dropped: dict[DropReason, int]
    #: Messages read and not yet in the target. A relay with a state reads them again, and a group
    #: delivers them again; if the source delivers once only, they are dropped as `abandoned` when
    #: the relay stops.
    held: int
    #: Messages that were gone before they could be read.
    lost: int
    #: Messages that may be copied twice: sent again because the target could not be queried, or
    #: leased to another reader of the group meanwhile.
    in_doubt: int
    #: Number of outages.
    outages: int
    #: Unread messages in the source, at the last check.
    backlog: int
    #: Copied messages that no receiver took before the target was closed: see `WriterStatistics`.
    untaken: int = 0

    def plus(self, earlier: RelayStatistics) -> RelayStatistics:
        """Return the sum of these counters and those of an earlier relay of the same streams."""
        dropped = dict(earlier.dropped)
        for reason, count in self.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
        return RelayStatistics(
            read=earlier.read + self.read,
            copied=earlier.copied + self.copied,
            bytes=earlier.bytes + self.bytes,
            dropped=dropped,
            held=earlier.held + self.held,
            lost=earlier.lost + self.lost,
            in_doubt=earlier.in_doubt + self.in_doubt,
            outages=earlier.outages + self.outages,
            backlog=self.backlog,
            untaken=earlier.untaken + self.untaken,
        )

    @property
    def missing(self) -> int:
        """Messages lost unintentionally."""
        return self.lost + self.dropped.get(DropReason.ABANDONED, 0) + self.untaken


log = logging.getLogger(__name__)

#: Interval (seconds) of syncs to disk on both sides, with a state.
_BETWEEN_SYNCS: Final = 1.0
#: Seconds to deliver the messages in memory on a stop.
_DRAIN: Final = 0.5
#: Interval (seconds) at which a wait checks for a pause.
_BETWEEN_KEYS: Final = 0.05
#: Interval (seconds) at which a waiting thread checks for a stop.
_LOOK: Final = 0.2


class Relay:
    """Copies a reader to a writer, for one run. `statistics` is thread-safe."""

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        options: RelayOptions,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_progress: Callable[[RelayStatistics], None] | None = None,
        is_paused: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        check_kept(reader, writer, None if options.state is None else str(options.state))
        if isinstance(reader, Grouped):
            _check_shared(options)
        self._reader = reader
        self._writer = writer
        self._options = options
        self._on_progress = on_progress
        self._is_paused = is_paused
        self._clock = StoppableClock(should_stop, clock)
        self._policy = outage_policy(options.longest_outage)
        self._quota = None if options.quota is None else parse_quota(options.quota, clock)
        self._pacer = None if options.speed is None else Pacer(options.speed, clock)
        self._connection = connection_options(options.target)
        self._queue = None if options.policy is None else self._new_queue(options.policy)
        #: Messages that were read but not queued: the relay stops, or the source was recreated.
        self._unqueued: Batch | None = None
        #: Reads for the queue, until it is told that reading is over.
        self._reading: Worker | None = None
        self._is_reading_over = False
        #: The epoch of the numbers of the messages being written: the feed may be further.
        self._epoch: int | None = None
        self._journal: Journal | None = None
        self._tail: Tail | None = None
        self._synced_at = clock.monotonic()
        self._is_connected = True
        #: Copied pieces of a group that wait for a flush to be acknowledged.
        self._unflushed: list[Batch] = []
        self._lost_before = books_within(reader, options.end).lost
        self._feed: Feed | None = None
        self._lock = threading.Lock()
        #: With a queue: those read before the present one was made.
        self._read = 0
        self._copied = self._bytes = self._in_doubt = self._outages = 0
        self._dropped = DropCounts()
        #: The reason of the current outage, or None.
        self.trouble: str | None = None

    def _new_queue(self, policy: DeliveryPolicy) -> DeliveryQueue[Message]:
        return DeliveryQueue(policy, time_of=lambda message: message.time_ns, clock=self._clock)

    def statistics(self) -> RelayStatistics:
        with self._lock:
            queue = self._queue
            # Ours first: what the queue hands over afterwards counts as held.
            copied, bytes, in_doubt, read = self._copied, self._bytes, self._in_doubt, self._read
            dropped = self._dropped.as_dict()
        feed = self._feed
        books = None if feed is None else feed.books
        if queue is not None:
            waiting = queue.statistics()
            unqueued = self._unqueued
            read += waiting.accepted + (0 if unqueued is None else unqueued.num_rows)
            for reason, count in waiting.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
        return RelayStatistics(
            read=read,
            copied=copied,
            bytes=bytes,
            dropped=dropped,
            held=read - copied - sum(dropped.values()),
            lost=0 if books is None else books.lost - self._lost_before,
            in_doubt=in_doubt,
            outages=self._outages,
            backlog=0 if books is None else books.backlog,
            untaken=self._writer.statistics().untaken,
        )

    def run(self) -> RelayStatistics:
        """Copy until the end, or until told to stop.

        :raises InvalidOption: both sides are one stream; nothing was copied.
        :raises PenstockError: an error that retries cannot fix; copied messages stay.
        """
        with contextlib.ExitStack() as stack:
            options = self._options
            if options.state is not None:
                journal = Journal(options.state, options.source, options.target)
                self._journal = stack.enter_context(journal)
            stack.callback(self._abandon_held)
            stack.callback(self._doubt_unflushed)
            with contextlib.suppress(StopAsked):
                self._start()
                self._copy_all()
                self._note_end(is_flushed=self._flush())
        return self.statistics()

    def _doubt_unflushed(self) -> None:
        """Count copied messages that were never acknowledged: the group delivers them again."""
        self._in_doubt += sum(piece.num_rows for piece in self._unflushed)

    def _abandon_held(self) -> None:
        """Count held messages as dropped, if the source cannot deliver them again."""
        if self._feed is None or self._feed.epoch is not None:
            return
        takes_back = isinstance(self._reader, Grouped) and self._reader.redelivers
        if (held := self.statistics().held) and not takes_back:
            log.warning("%d messages were taken from %s for nothing", held, self._reader.url)
            with self._lock:
                self._dropped.add(DropReason.ABANDONED, held)

    # --- the two ways -----------------------------------------------------------------------------

    def _copy_all(self) -> None:
        """Copy until the end. After a cut of the target, restart there, if there is a journal."""
        while True:
            try:
                if self._queue is None:
                    self._copy()
                else:
                    self._copy_through(self._queue)
            except TargetCut as error:
                if self._journal is None:
                    raise
                log.warning("%s; they are copied again", error)
            else:
                return
            if self._reading is not None:
                self._reading.join()  # it uses the reader, which is about to be moved
            self._forget_held()
            self._start()

    def _forget_held(self) -> None:
        """Remove what was read and not copied from the counters: it is read again."""
        if self._queue is not None:
            self._replace_queue(self._queue)
            self._unqueued = None
        with self._lock:
            self._read = self._copied + self._dropped.total

    def _replace_queue(self, old: DeliveryQueue[Message]) -> DeliveryQueue[Message]:
        """Return a new queue in place of a closed one, whose counts stay."""
        books = old.statistics()
        with self._lock:
            self._read += books.accepted
            for reason, count in books.dropped.items():
                self._dropped.add(reason, count)
            self._queue = self._new_queue(old.delivery)
            return self._queue

    def _start(self) -> None:
        retried(self._prepare, self._policy, self._clock, self._note_outage)
        self.trouble = None

    def _prepare(self) -> None:
        """Find the positions of both sides, and resume there."""
        target = self._options.target
        check_apart(self._options.source, target)
        there_now = bounds_of(target, self._connection)
        self._tail = None if there_now is None else Tail(there_now.epoch, there_now.end)
        in_doubt = 0
        if self._journal is not None:

            def there(tail: Tail, batch: Batch) -> Arrived:
                sent = shifted(batch, self._options.clock_offset)
                return arrived(target, self._connection, tail, sent, self._writer.cannot_carry)

            in_doubt = resume(self._journal, self._reader, there_now, there)
        self._feed = Feed(
            self._reader,
            self._writer,
            self._options,
            StoppableClock(lambda: self._is_reading_over or self._clock.should_stop(), self._clock),
            self._policy,
            self._note_outage,
            self._note_return,
        )
        self._epoch = self._feed.epoch
        self._in_doubt += in_doubt
        if self._journal is not None and self._feed.epoch is None:
            log.warning("%s cannot be read again; its state keeps nothing", self._reader.url)
            self._journal = None
        elif self._journal is not None and self._journal.note is None:
            # A start such as `end` keeps its first meaning even if killed before the first message.
            place = self._feed.books.next_seq
            if place is not None:
                self._journal.put(Note(self._feed.epoch or 0, place, self._tail))

    def _copy(self) -> None:
        """Read and write alternately: a slow target slows down reading."""
        assert self._feed is not None
        while (batch := self._feed.next()) is not None:
            with self._lock:
                self._read += batch.num_rows
            self._epoch = self._feed.epoch
            left = self._write(batch)
            if left is not None:
                self._feed.go_back(left)
                raise StopAsked

    def _copy_through(self, queue: DeliveryQueue[Message]) -> None:
        """Read in a separate thread, so that the policy applies while the target is slow."""
        assert self._feed is not None
        while self._copy_epoch(queue):
            queue = self._replace_queue(queue)
            self._epoch = self._feed.epoch

    def _copy_epoch(self, queue: DeliveryQueue[Message]) -> bool:
        """Copy until the end, or until the source is recreated; tell whether it was.

        Then all that was read before is written: notes are about messages of one epoch.
        """
        assert self._feed is not None
        failure: list[BaseException] = []
        self._is_reading_over = False
        self._reading = Worker(
            "penstock-relay-reader", lambda _: self._fill(queue, failure), log=log
        ).start()
        left = None
        is_recreated = False
        stop_at: float | None = None
        try:
            while left is None:
                if stop_at is None and self._clock.should_stop():
                    stop_at = time.monotonic() + _DRAIN
                if stop_at is not None and time.monotonic() > stop_at:
                    break
                try:
                    messages = queue.get_many(self._options.batch, _LOOK)
                except Closed:  # reading has ended, and all of it was taken
                    is_recreated = not failure and self._feed.epoch != self._epoch
                    break
                if messages:
                    left = messages[0].seq  # if it fails: how much arrived is unknown
                    is_copied = isinstance(self._writer, KeepsOrigin)
                    left = self._write(batch_from_messages(messages, origins=is_copied))
            is_cut_short = left is not None
        finally:
            self._is_reading_over = True
            queue.close()
            self._reading.join(_DRAIN * 4)
            # Also after an error: a held place would have passed what waits in memory.
            if not is_recreated:
                waiting = queue.peek()
                if left is None and waiting is not None:
                    left = waiting.seq
                self._go_back(left)
        for error in failure:
            raise error
        if is_cut_short:
            raise StopAsked  # how much of its piece arrived is unknown: the note stays
        return is_recreated

    def _go_back(self, left: int | None) -> None:
        """Seek back to the first message that was not written: `left`, or the first unqueued."""
        assert self._feed is not None
        if left is not None and self._feed.epoch != self._epoch:
            left = self._feed.successor(self._epoch, left)
            if left is None:
                self._abandon_queued()
        if left is None and self._unqueued is not None:
            left = self._unqueued.column("seq")[0].as_py()
        if left is not None:
            self._feed.go_back(left)

    def _abandon_queued(self) -> None:
        """Count what was queued of a source that was recreated: it cannot be read again."""
        unqueued = 0 if self._unqueued is None else self._unqueued.num_rows
        if gone := self.statistics().held - unqueued:
            log.warning("%d messages of %s are gone: it was recreated", gone, self._reader.url)
            with self._lock:
                self._dropped.add(DropReason.ABANDONED, gone)

    def _fill(self, queue: DeliveryQueue[Message], failure: list[BaseException]) -> None:
        assert self._feed is not None
        try:
            batch, self._unqueued = self._unqueued, None
            while batch := batch or self._feed.next():
                if self._feed.epoch != self._epoch:
                    self._unqueued = batch
                    return
                for index, message in enumerate(messages_from_batch(batch)):
                    if not self._put(queue, message):
                        self._unqueued = batch.slice(index)
                        return
                batch = None
        except StopAsked:
            pass
        except BaseException as error:  # noqa: BLE001 - raised on the thread that runs the relay
            failure.append(error)
        finally:
            queue.close()

    def _put(self, queue: DeliveryQueue[Message], message: Message) -> bool:
        """Add a message to the queue; False: the relay stops."""
        while True:
            try:
                queue.put(message, _LOOK)
            except WriteTimeout:
                if self._clock.should_stop():
                    return False
            except Closed:
                return False
            else:
                return True

    # --- writing ----------------------------------------------------------------------------------

    def _write(self, batch: Batch) -> int | None:
        """Write a batch in pieces; return the first unwritten number if told to stop, else None."""
        seqs = batch.column("seq")
        batch = shifted(batch, self._options.clock_offset)
        done = 0
        try:
            for piece in self._pieces(batch):
                self._deliver(piece)
                done += piece.num_rows
                if self._on_progress is not None:
                    self._on_progress(self.statistics())
        except StopAsked:
            first: int = seqs[done].as_py()
            return first
        return None

    def _pieces(self, batch: Batch) -> Iterator[Batch]:
        """Yield the pieces that may be sent at once, each when it is due."""
        while batch.num_rows:
            piece = batch.slice(0, self._fits(batch))
            if self._pacer is not None:
                count, delay = self._pacer.next(numbers_of(piece, "time_ns"))
                self._wait(delay)
                piece = piece.slice(0, count)
            if self._quota is not None:
                size = payload_bytes(piece)
                delay = self._quota.delay(size, piece.column("time_ns")[0].as_py())
                self._clock.sleep(delay)
            self._wait(0)
            yield piece
            batch = batch.slice(piece.num_rows)

    def _wait(self, seconds: float) -> None:
        """Sleep for `seconds`, plus the time paused."""
        until = self._clock.monotonic() + seconds
        while (is_paused := self._is_paused()) or self._clock.monotonic() < until:
            began = self._clock.monotonic()
            self._clock.sleep(_BETWEEN_KEYS if is_paused else min(until - began, _BETWEEN_KEYS))
            if is_paused:
                paused = self._clock.monotonic() - began
                until += paused
                if self._pacer is not None:
                    self._pacer.postpone(paused)

    def _fits(self, batch: Batch) -> int:
        count: int = batch.num_rows
        if self._journal is not None:
            runs = runs_of(numbers_of(batch, "seq"))[:MOST_RUNS]
            count = sum(length for _, length in runs)
        if self._quota is not None:
            import pyarrow.compute as pc  # noqa: PLC0415 - most relays have no quota, and start sooner

            sizes = integers_in(pc.binary_length(batch.column("payload"))).astype("int64")
            count = min(count, int((sizes.cumsum() <= self._quota.at_once).sum()))
        return max(1, count)

    def _deliver(self, piece: Batch) -> None:
        """Write a piece to the target, with retries.

        :raises StopAsked: told to stop during an outage. How much of it arrived is unknown.
        """
        left = Left(piece)
        self._note(piece)
        try:
            while left.batch.num_rows:
                retried(lambda: self._attempt(left), self._policy, self._clock, self._note_outage)
        except BaseException:
            if self._journal is None:  # else the next run asks the target
                self._in_doubt += left.unknown
            with contextlib.suppress(PenstockError):  # the first error says more
                self._settle(piece.slice(0, piece.num_rows - left.batch.num_rows))
            raise
        self.trouble = None
        self._settle(piece)
        now = self._clock.monotonic()
        if self._journal is not None and now - self._synced_at >= _BETWEEN_SYNCS:
            self._synced_at = now
            if self._flush():
                self._journal.sync(self._on_disk(self._note_behind(piece)))

    def _settle(self, piece: Batch) -> None:
        """Tell a group what is done, as soon as the target has flushed it."""
        if not isinstance(self._reader, Grouped) or not piece.num_rows:
            return
        self._unflushed.append(piece)
        if self._flush():
            for flushed in self._unflushed:
                self._ack(self._reader, flushed)
            self._unflushed.clear()

    def _ack(self, reader: Grouped, piece: Batch) -> None:
        """Settle copied messages; those whose lease ran out are delivered again."""
        try:
            reader.ack(piece)
        except LeaseLost as error:
            log.warning("%s: %s; they may be copied twice", self._reader.url, error)
            self._in_doubt += error.count

    def _flush(self) -> bool:
        """Flush the target; tell whether that succeeded."""
        if not self._is_connected:
            return False
        try:
            self._writer.flush()
        except ConnectionLost as error:
            self._is_connected = False
            log.warning("%s", error)
        return self._is_connected

    def _attempt(self, left: Left) -> None:
        # After a broken connection, the writer's first call should be a write, not a flush.
        self._is_connected = False
        if left.is_in_doubt:
            self._query_target(left)
            if not left.batch.num_rows:
                return
        before = self._writer.statistics().messages
        try:
            last = self._writer.write_batch(left.batch)
        except Unacknowledged as error:
            left.is_in_doubt = True
            left.unknown = error.in_doubt
            self._count_copied(left, error.acknowledged)
            raise
        except MessageTooLarge:
            self._is_connected = True
            self._count_copied(left, self._writer.statistics().messages - before)
            if self._options.refused == "stop":
                raise
            with self._lock:
                self._dropped.add(DropReason.REFUSED)
            log.warning("%s will never take message %d", self._writer.url, left.first_seq)
            left.batch = left.whole = left.batch.slice(1)
            self._move_tail(self._writer.statistics().last_seq)
            self._note(left.batch)
        except BaseException:
            self._count_copied(left, self._writer.statistics().messages - before)
            left.is_in_doubt = True
            raise
        else:
            self._is_connected = True
            count = left.batch.num_rows
            self._count_copied(left, count)
            self._check_end(last, count)
            self._move_tail(last)

    def _check_end(self, last: int | None, count: int) -> None:
        """Check that the target has everything before a piece, by the number it assigned.

        :raises TargetCut: the target lost messages in a power failure.
        """
        if self._tail is None or last is None or last + 1 >= self._tail.seq + count:
            return
        there_now = bounds_of(self._options.target, self._connection)
        if there_now is not None and check_end(self._options.target, there_now, self._tail) is None:
            self._tail = Tail(there_now.epoch, last + 1)  # it was recreated

    def _move_tail(self, last: int | None) -> None:
        if self._tail is not None and last is not None:
            self._tail = self._tail._replace(seq=last + 1)

    def _query_target(self, left: Left) -> None:
        """Query the target how much of a piece arrived; if it cannot be queried, send it again."""
        if self._tail is None:
            self._in_doubt += left.unknown
        else:
            # A server may still have a part of it waiting; this ends what waits.
            self._writer.flush()
            tail, lacking = self._tail, self._writer.cannot_carry
            there = arrived(self._options.target, self._connection, tail, left.whole, lacking)
            already = left.whole.num_rows - left.batch.num_rows
            self._in_doubt += max(0, there.in_doubt - already)
            self._count_copied(left, max(0, there.messages - already))
            if there.end is not None and there.end.epoch != tail.epoch:
                self._tail = there.end
                self._note(left.batch)
                left.whole = left.batch
        left.is_in_doubt = False
        left.unknown = 0

    def _count_copied(self, left: Left, count: int) -> None:
        """Count the first `count` messages of a piece as copied."""
        with self._lock:
            self._copied += count
            self._bytes += payload_bytes(left.batch.slice(0, count))
        left.batch = left.batch.slice(count)

    # --- notes ------------------------------------------------------------------------------------

    def _note(self, piece: Batch) -> None:
        """Record in the journal what is about to be written."""
        if self._journal is not None and piece.num_rows:
            runs = runs_of(numbers_of(piece, "seq"))
            self._journal.put(self._note_behind(piece)._replace(runs=runs))

    def _note_behind(self, piece: Batch) -> Note:
        behind = piece.column("seq")[-1].as_py() + 1
        return Note(self._epoch or 0, behind, self._tail)

    def _note_end(self, *, is_flushed: bool) -> None:
        """Record that nothing is in transit, so later writes of others do not matter."""
        if self._journal is not None and self._journal.note is not None:
            note = self._journal.note._replace(runs=(), target=self._tail)
            self._journal.put(note)
            if is_flushed:
                self._journal.sync(self._on_disk(note))

    def _on_disk(self, note: Note) -> Note | None:
        """Return a note of flushed messages if they are on the target's disk, else None."""
        return note if self._writer.syncs else None

    def _note_outage(self, attempt: int, error: Exception, delay: float) -> None:
        del delay
        self.trouble = str(error)
        if attempt == 1:
            self._outages += 1
            log.warning("%s; trying again", error)

    def _note_return(self) -> None:
        self.trouble = None


def _check_shared(options: RelayOptions) -> None:
    """Refuse options that take messages out of a group without copying them.

    :raises InvalidOption: `policy` or `by` is given.
    """
    if options.policy is not None:
        raise InvalidOption(
            "policy",
            options.policy,
            "drops messages that a group would deliver again",
            hint="leave it out: a group's messages wait in its stream",
        )
    if options.by != "append":
        raise InvalidOption(
            "by",
            options.by,
            "leaves out messages that a group would deliver again, for ever",
            hint="leave out the group: a plain reader selects by time",
        )
