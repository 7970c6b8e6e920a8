"""How are messages read from a stream on another machine, whatever happens to the connection?"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyarrow import flight

from penstock.core.batch import check_batch, messages_from_batch
from penstock.core.capabilities import Held, Replayable
from penstock.core.errors import (
    Closed,
    ConnectionLost,
    Malformed,
    NotFound,
    PenstockError,
    ServerBusy,
)
from penstock.core.interfaces import Ancestor, Bounds, Concluding, Reader
from penstock.core.position import Position, check_seek
from penstock.core.retry import retry
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics
from penstock.protocols.flight.client import FAREWELL, Connection, Target
from penstock.protocols.flight.errors import HoldLost
from penstock.protocols.flight.wire import (
    EMPTY,
    Acknowledge,
    ActionKind,
    Forget,
    Hold,
    Locate,
    Located,
    Mark,
    Spot,
    Take,
    Told,
    check_buffers,
    payload_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.core.position import PositionLike

__all__ = ["Arrivals", "FlightReader", "read_chunk"]

log = logging.getLogger(__name__)

#: Seconds that one call waits on the server; Ctrl-C takes effect between calls.
_SLICE: Final = 0.5
#: Seconds between two looks for a stream that does not exist yet.
_LOOK_FOR_STREAM: Final = 0.1
#: Most seconds between two acknowledgements while messages are read.
_BETWEEN_ACKNOWLEDGEMENTS: Final = 0.05

#: What Flight raises for failures of a call.
_BROKEN: Final = (flight.FlightError, pa.ArrowException, OSError)


class FlightReader(Concluding, Replayable, Held, Reader):
    """Reads a stream behind a Flight server.

    One call streams the existing messages, batch by batch, no faster than they are read. Each call
    carries the reader's position, so it resumes there after a broken connection or a restart of
    the server.

    With `hold=NAME` the writer waits for this reader. Each call acknowledges the messages that the
    call before returned, so a message in work when the process dies is redelivered.
    """

    #: Each look is a request to the server.
    _longest_pause = 0.05

    def __init__(self, target: Target, start: Position) -> None:
        super().__init__(target.url)
        self._target = target
        self._connection = Connection(target)
        self._id = secrets.token_hex(16)
        self._name = target.options.name
        self._stream: Any = None
        self._lease: Any = None
        self._is_closed = False
        self._wait = 0.0
        self._arrivals = Arrivals()
        self._filtered = self._restarts = 0
        self._losses = LossLedger()
        self._acknowledged_at = 0.0
        #: Since when `_has_news` has found no connection.
        self._lost_since: float | None = None
        try:
            #: The mark after the last batch received, where the next request starts; and the
            #: stream's end as last told.
            self._mark, self._end = self._open(start)
        except BaseException:
            self.close()
            raise
        self._done = self._mark

    def _open(self, start: Position) -> tuple[Mark, int]:
        deadline = time.monotonic() + self._target.options.wait
        while True:
            try:
                if self._name is None:
                    located = self._locate(start)
                    return located.mark, located.end
                told = self._hold(start, None)
            except (NotFound, ConnectionLost):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_FOR_STREAM)
            else:
                self._filtered, self._restarts, self._losses = self._counters_with(told)
                self._report(told)
                return told.mark, told.end

    def _names(self, **more: Any) -> dict[str, Any]:
        return self._target.names(options=dict(self._target.passed_on), reader=self._id, **more)

    def _locate(self, position: Position | None) -> Located:
        spot = None if position is None else Spot.of(position)
        hold = None if spot is None else self._name
        question = Locate(**self._names(at=spot, hold=hold))
        located = Located.from_bytes(self._connection.ask(ActionKind.LOCATE, question))
        if position is not None and position.anchor == "seq":
            check_seek(self.url, position.value, located.oldest, located.end)  # not all servers do
        return located

    def _hold(self, start: Position, done: Mark | None) -> Told:
        """Hold the name while the stream of this call is open."""
        ticket = Hold(
            **self._target.names(reader=self._id, name=self._name, at=Spot.of(start), done=done)
        )
        self._drop_lease()
        try:
            self._lease = self._get(ticket)
            chunk = self._lease.read_chunk()
        except StopIteration:
            raise ConnectionLost(self._target.server, "it held the name no longer") from None
        except _BROKEN as error:
            self._drop_lease()
            raise self._connection.understood(error) from None
        return read_chunk(chunk)[1]

    def _get(self, ticket: Take | Hold) -> Any:
        client, options = self._connection.client, self._connection.options()
        return client.do_get(flight.Ticket(ticket.to_bytes()), options)

    # --- reading ----------------------------------------------------------------------------------

    # What a call took is put back if a signal keeps it from its caller.

    def read(self, timeout: float | None = None) -> Message | None:
        self._arrivals.settle()
        try:
            messages = self.read_many(1, timeout)
            return messages[0] if messages else None
        except BaseException:
            self._arrivals.put_back()
            raise

    def read_many(self, n: int, timeout: float | None = 0) -> list[Message]:
        self._arrivals.settle()
        try:
            has_messages = n > 0 and self._has_messages(timeout)
            return self._arrivals.take_messages(n) if has_messages else []
        except BaseException:
            self._arrivals.put_back()
            raise

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        self._arrivals.settle()
        try:
            has_messages = n > 0 and self._has_messages(timeout)
            return self._arrivals.take_batch(n) if has_messages else EMPTY
        except BaseException:
            self._arrivals.put_back()
            raise

    def _take(self, limit: int) -> list[Message]:
        self._arrivals.settle()
        try:
            return self.read_many(limit)
        except BaseException:
            self._arrivals.put_back()
            raise

    def _has_messages(self, timeout: float | None) -> bool:
        """Wait for messages to deliver; False: none came in time."""
        self._check_open()
        self._give_back()
        if self._arrivals:
            return True
        deadline = None if timeout is None else time.monotonic() + timeout
        policy = self._connection.retry_policy()
        while True:
            left = _SLICE if deadline is None else deadline - time.monotonic()
            self._wait = max(0.0, min(left, _SLICE))
            # However long a reconnect takes: False only after an answer without messages.
            has_come = retry(self._advance, policy, on_retry=self._note_break)
            self._lost_since = None
            if has_come:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def _has_news(self) -> bool:
        self._check_open()
        self._give_back()
        if self._arrivals:
            return True
        self._wait = 0.0
        try:
            has_news = self._advance()  # what it receives stays in `_arrivals`
        except (ConnectionLost, ServerBusy):
            # One attempt a look: the caller waits for other readers, too.
            now = time.monotonic()
            if self._lost_since is None:
                self._lost_since = now
            if now - self._lost_since >= self._target.options.retry:
                raise
            return False
        self._lost_since = None
        return has_news

    def _note_break(self, attempt: int, error: Exception, delay: float) -> None:
        if attempt == 1:
            log.warning("%s: %s; trying again from seq %d", self.url, error, self._mark.seq)
        del delay

    def _advance(self) -> bool:
        """Fetch the next run of messages; False: none (in the time allowed)."""
        asked = asked_again = False
        while True:
            if self._stream is None:
                if asked:
                    return False
                self._begin()
                asked = True
            try:
                if not self._receive():
                    self._stream = None
                elif self._arrivals:
                    return True
            except HoldLost as error:
                if asked_again:
                    raise
                log.warning("%s: %s; taking it again", self.url, error)
                self._hold(Position.START, self._position())
                asked, asked_again = False, True

    def _begin(self) -> None:
        done = self._position() if self._name else None
        ticket = Take(
            **self._names(
                at=self._mark,
                wait=self._wait,
                chunk=self._target.options.chunk,
                hold=self._name,
                done=done,
            )
        )
        try:
            self._stream = self._get(ticket)
        except _BROKEN as error:
            raise self._broken(error) from None
        if done is not None:
            self._note_done(done)

    def _receive(self) -> bool:
        """Receive one run of messages, or a report without messages; False: the stream ended."""
        try:
            run = self._receive_run()
            if run is None:
                return False
            batches, told = run
            self._arrivals.add(batches)
            changed = told.mark, told.end, *self._counters_with(told)
            # In one statement without a call: after an interrupt before it, nothing has changed.
            self._mark, self._end, self._filtered, self._restarts, self._losses = changed
        except BaseException:
            # Also after Ctrl-C: the next request starts at the old mark, and gets this run again.
            self._drop_stream()
            self._arrivals.clear()
            raise
        self._report(told)
        return True

    def _receive_run(self) -> tuple[list[Batch], Told] | None:
        """Return the batches of one run, and its report; None: the stream ended."""
        batches: list[Batch] = []
        while True:
            try:
                chunk = self._stream.read_chunk()
            except StopIteration:
                if batches:
                    raise self._broken(OSError("the answer ended within a run")) from None
                return None
            except _BROKEN as error:
                raise self._broken(error) from None
            batch, told = read_chunk(chunk)
            if batch is not None:
                batches.append(batch)
            if not told.more:
                return batches, told

    def _broken(self, error: BaseException) -> PenstockError:
        """Drop the broken stream, and return the error."""
        self._drop_stream()
        failure = self._connection.understood(error)
        if isinstance(failure, ConnectionLost):
            self._drop_lease()
            self._connection.drop()
        return failure

    def _counters_with(self, told: Told) -> tuple[int, int, LossLedger]:
        """Return `_filtered`, `_restarts` and `_losses` with what happened before a run."""
        ledger = self._losses
        if told.lost:
            losses = [Loss(each.first, each.last, each.reason) for each in told.losses]
            ledger = ledger.with_losses(losses)
            ledger.total += max(0, told.lost - sum(loss.count for loss in losses))
        return self._filtered + told.filtered, self._restarts + told.restarts, ledger

    def _report(self, told: Told) -> None:
        """Log what was counted."""
        if told.restarts:
            log.warning("%s was created anew", self.url)
        if told.lost:
            latest = self._losses.ranges()[-1:]
            log.warning("%s: %s; %s in all", self.url, *latest, f"{self._losses.total:,}")

    # --- where it stands --------------------------------------------------------------------------

    def _position(self) -> Mark:
        """Return the mark of the next message to deliver."""
        seq = self._arrivals.next_seq()
        return self._mark if seq is None else Mark(epoch=self._mark.epoch, seq=seq)

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        self._drop_stream()
        place = Position.of(position)
        policy = self._connection.retry_policy()
        located = retry(lambda: self._seek(place), policy)
        changed = self._arrivals.emptied(), located.mark, located.end
        # In one statement without a call: after an interrupt before it, it stands where it stood.
        self._arrivals, self._mark, self._end = changed
        if self._name:
            self._note_done(self._mark)

    def _seek(self, place: Position) -> Located:
        try:
            return self._locate(place)
        except HoldLost:
            self._hold(Position.START, self._position())
            return self._locate(place)

    def newest_seq(self) -> int | None:
        return self._look().newest

    @property
    def epoch(self) -> int:
        return self._mark.epoch

    @property
    def hold(self) -> str | None:
        return self._name

    def bounds(self) -> Bounds:
        located = self._look()
        lineage = tuple(Ancestor(mark.epoch, mark.seq) for mark in located.lineage)
        return Bounds(located.mark.epoch, located.oldest, located.end, lineage)

    def _look(self) -> Located:
        self._check_open()
        return retry(lambda: self._locate(None), self._connection.retry_policy())

    # --- what is done with ------------------------------------------------------------------------

    def acknowledge(self) -> None:
        """Acknowledge all messages read so far. Has an effect only with `hold`.

        :raises ConnectionLost: the server cannot be reached.
        """
        self._check_open()
        if self._name is None or self._position() == self._done:
            return
        retry(self._say_done, self._connection.retry_policy())

    def _say_done(self) -> None:
        done = self._position()
        question = Acknowledge(**self._target.names(reader=self._id, name=self._name, done=done))
        try:
            self._connection.ask(ActionKind.ACKNOWLEDGE, question)
        except HoldLost:
            self._hold(Position.START, done)
        self._note_done(done)

    def _give_back(self) -> None:
        """Acknowledge what the previous call returned, unless the next request does so anyway."""
        if self._name is None or (not self._arrivals and self._stream is None):
            return
        if time.monotonic() - self._acknowledged_at > _BETWEEN_ACKNOWLEDGEMENTS:
            self.acknowledge()

    def _note_done(self, done: Mark) -> None:
        self._done = done
        self._acknowledged_at = time.monotonic()

    # --- counters and closing ---------------------------------------------------------------------

    def statistics(self) -> ReaderStatistics:
        next_seq = self._position().seq
        return ReaderStatistics(
            messages=self._arrivals.messages,
            bytes=self._arrivals.bytes,
            lost=self._losses.total,
            filtered=self._filtered,
            restarts=self._restarts,
            next_seq=next_seq,
            backlog=max(0, self._end - next_seq),
            losses=self._losses.ranges(),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")

    def _close(self, *, finished: bool) -> None:
        if self._is_closed:
            return
        if finished and self._name is not None and hasattr(self, "_done"):
            try:
                if self._position() != self._done:
                    self._say_done()
            except PenstockError as error:
                log.warning("%s: what was read last will come again: %s", self.url, error)
        self._is_closed = True
        self._drop_stream()
        self._drop_lease()
        with suppress(PenstockError):  # it would be forgotten anyway, later
            self._connection.ask(ActionKind.FORGET, Forget(reader=self._id), FAREWELL)
        self._connection.drop()

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        _cancel(stream)

    def _drop_lease(self) -> None:
        lease, self._lease = self._lease, None
        _cancel(lease)


def _cancel(stream: Any) -> None:
    if stream is not None:
        with suppress(*_BROKEN):
            stream.cancel()


# --- what has come --------------------------------------------------------------------------------


class Arrivals:
    """Batches received together, and how much of them was delivered."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._offset = 0
        #: The first batch as messages, once they are read one by one.
        self._messages: list[Message] | None = None
        #: Messages delivered so far, and their payload bytes.
        self.messages = 0
        self.bytes = 0
        #: The first batch and all of the above before the last take, until that is settled.
        self._before: tuple[Batch, int, list[Message] | None, int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, batches: Iterable[Batch]) -> None:
        self._batches.extend(batches)

    def emptied(self) -> Arrivals:
        """Return one without batches, with the counters of this one."""
        anew = Arrivals()
        anew.messages, anew.bytes = self.messages, self.bytes
        return anew

    def clear(self) -> None:
        self._before = None
        self._batches.clear()
        self._offset = 0
        self._messages = None

    def next_seq(self) -> int | None:
        """Return the number of the next message to deliver, or None."""
        if not self._batches:
            return None
        seq: int = self._batches[0].column("seq")[self._offset].as_py()
        return seq

    def settle(self) -> None:
        """Note that what was taken before has come to the caller."""
        self._before = None

    def put_back(self) -> None:
        """Return to where this stood before the last take, unless that is settled."""
        before, self._before = self._before, None
        if before is not None:
            batch, self._offset, self._messages, self.messages, self.bytes = before
            if not self._batches or self._batches[0] is not batch:
                self._batches.appendleft(batch)

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
        batch = self._batches[0]
        self._before = batch, self._offset, self._messages, self.messages, self.bytes
        self._offset += count
        self.messages += count
        self.bytes += size
        if self._offset >= batch.num_rows:
            self._batches.popleft()
            self._offset = 0
            self._messages = None


def read_chunk(chunk: Any) -> tuple[Batch | None, Told]:
    """Return the batch of a chunk, if it has one, and its metadata.

    :raises Malformed: the chunk is not valid.
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
