"""How are messages appended to a stream on another machine, each of them once?"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
from pyarrow import flight

from penstock.core.batch import BATCH_SCHEMA, batch_from_messages, check_batch
from penstock.core.errors import (
    ConnectionLost,
    Malformed,
    MessageTooLarge,
    NotFound,
    PenstockError,
    Unacknowledged,
)
from penstock.core.interfaces import BookedWriter
from penstock.core.message import Message
from penstock.core.retry import retry
from penstock.protocols.flight.bulk import open_bulk
from penstock.protocols.flight.client import FAREWELL, Connection, Target
from penstock.protocols.flight.errors import ServerStopping, UnknownWriter, error_from
from penstock.protocols.flight.wire import (
    EMPTY,
    OVERHEAD,
    ActionKind,
    CloseWriter,
    OpenWriter,
    Outcome,
    Piece,
    Put,
    WriterOpened,
    payload_bytes,
    pieces_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.stream_id import StreamId
    from penstock.protocols.flight.bulk import BulkStream
    from penstock.protocols.flight.wire import Stage

__all__ = ["BROKEN", "Call", "FlightWriter", "PutStream", "Sent", "Stream"]

log = logging.getLogger(__name__)

#: What Flight raises when a connection breaks, or the server reports an error.
BROKEN: Final = (flight.FlightError, pa.ArrowException, OSError)


@dataclass(slots=True)
class Sent:
    """A batch without an answer of the server yet."""

    batch: Batch
    piece: Piece
    #: Whether it was in flight when its answer was lost.
    is_in_doubt: bool = False


class Call:
    """One call of the user: what is left to send, and the answers so far."""

    def __init__(self, batches: Iterator[tuple[Batch, Piece]], offered: int | None = None) -> None:
        self._coming = batches
        #: Messages that the user gave; None: unknown, from an iterator.
        self.offered = offered
        self.sent: deque[Sent] = deque()
        self.written = 0
        self.last_seq: int | None = None
        #: Why the iterator of messages failed, if it did.
        self.failure: Exception | None = None

    def next(self) -> Sent | None:
        """Return the next batch to send, or None."""
        try:
            for batch, piece in self._coming:
                one = Sent(batch, piece)
                self.sent.append(one)
                return one
        except Exception as error:  # noqa: BLE001 - raised when what was sent is answered
            self.failure = error
        return None

    @property
    def unanswered(self) -> int:
        return sum(one.batch.num_rows for one in self.sent)

    @property
    def in_doubt(self) -> int:
        return sum(one.batch.num_rows for one in self.sent if one.is_in_doubt)


class Stream(Protocol):
    """Carries pieces to the server, and the answers back in order."""

    #: Whether the server has answered: it cannot refuse the whole call any more.
    is_accepted: bool

    def send(self, batch: Batch, piece: Piece) -> bool:
        """Send a piece; False: the connection broke, and `receive` says what came before that.

        After an exception, the answers that have not been received are lost.
        """

    def receive(self) -> Outcome:
        """Wait for the next answer.

        After an exception, nothing without an answer was appended, unless the connection broke.
        """

    def end(self) -> None:
        """End the call, after all answers."""


class PutStream:
    """A Flight stream, for one call."""

    def __init__(self, connection: Connection, put: Put | Stage) -> None:
        self._server = connection.target.server
        descriptor = flight.FlightDescriptor.for_command(put.to_bytes())
        client, options = connection.client, connection.options()
        self._stream, self._answers = client.do_put(descriptor, BATCH_SCHEMA, options)
        self.is_accepted = False

    def send(self, batch: Batch, piece: Piece) -> bool:
        self._stream.write_with_metadata(batch, piece.to_bytes())
        return True

    def receive(self) -> Outcome:
        answer = self._answers.read()
        if answer is None:
            self._stream.close()  # says why
            raise ConnectionLost(self._server, "it ended the call")
        self.is_accepted = True
        return Outcome.from_bytes(answer.to_pybytes())

    def end(self) -> None:
        with suppress(*BROKEN):
            self._stream.close()


# --- the writer -----------------------------------------------------------------------------------


#: Batches sent ahead of the server's answers.
_AHEAD: Final = 8
#: Most messages of `write_many` in one batch.
_AT_ONCE: Final = 8192
#: Seconds until a failed bulk connection is tried again.
_BETWEEN_TRIES: Final = 10.0
#: Seconds between two looks for a stream that does not exist yet.
_LOOK_FOR_STREAM: Final = 0.1


class FlightWriter(BookedWriter):
    """Appends to a stream behind a Flight server. When a call returns, its messages are appended.

    When the connection breaks, the server skips what it has and gets the rest: every message once.
    If the server restarted meanwhile, that is unknown: `Unacknowledged`.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target.url)
        self._target = target
        self._connection = Connection(target)
        self._bulk: BulkStream | None = None
        self._id = ""
        try:
            self._open_when_there()
        except BaseException:
            self._is_closed = True
            self._connection.drop()
            raise

    def _open_when_there(self) -> None:
        deadline = time.monotonic() + self._target.options.wait
        options = dict(self._target.passed_on)
        if self._target.options.hold is not None:
            options["hold"] = self._target.options.hold  # for a writer: the readers it waits for
        self._options = options
        while True:
            try:
                self._open()
            except (NotFound, ConnectionLost):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK_FOR_STREAM)
            else:
                break
        # It empties the stream once, and not again after a reconnect.
        if self._options.get("create") == "always":
            del self._options["create"]

    def _open(self) -> None:
        """Open a writer at the server, under a new id.

        What the one before has waiting at the server is ended first, so that nothing of it is
        appended after this.
        """
        if self._id:
            self._connection.ask(ActionKind.CLOSE_WRITER, CloseWriter(writer=self._id))
        self._id = secrets.token_hex(16)
        self._number = 0
        self._attempt = 0
        question = OpenWriter(**self._target.names(options=self._options, writer=self._id))
        answer = self._connection.ask(ActionKind.OPEN_WRITER, question)
        opened = WriterOpened.from_bytes(answer)
        self._instance = opened.instance
        self._largest = min(opened.max_message, 1 << 30)
        self._bulk_from = 0.0 if self._target.options.bulk else math.inf
        self.cannot_carry = opened.cannot_carry  # type: ignore[misc]
        self._syncs = opened.syncs

    # --- writing ----------------------------------------------------------------------------------

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        self._check_open()
        now = time.time_ns()
        time_ns = now if time_ns is None else time_ns
        kept = now if created_ns is None else created_ns
        message = Message(0, time_ns, kept, type, subtype, stream, attributes, bytes(payload))
        batch = batch_from_messages([message])
        last = self._append([batch], exact=created_ns is not None, offered=1)
        assert last is not None
        return last

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        self._check_open()
        return self._append(_batches(payloads, type, subtype, self._target.options.chunk))

    def write_batch(self, batch: Batch) -> int | None:
        self._check_open()
        check_batch(batch)
        return self._append([batch], offered=batch.num_rows)

    def flush(self) -> None:
        """Call the stream's own `flush` on the server: sync to the disk, or nothing."""
        self._check_open()

        def piece() -> Iterator[tuple[Batch, Piece]]:
            yield EMPTY, self._piece(flush=True)  # numbered when it is sent, not before

        self._deliver(Call(piece()))

    @property
    def syncs(self) -> bool:
        return self._syncs

    def _append(
        self, batches: Iterable[Batch], *, exact: bool = False, offered: int | None = None
    ) -> int | None:
        def pieces() -> Iterator[tuple[Batch, Piece]]:
            for batch in batches:
                for piece in pieces_of(batch, min(self._target.options.chunk, self._largest)):
                    self._check_size(piece)
                    yield piece, self._piece(exact=exact)

        return self._deliver(Call(pieces(), offered))

    def _piece(self, *, flush: bool = False, exact: bool = False) -> Piece:
        self._number += 1
        return Piece(number=self._number, flush=flush, exact=exact)

    def _check_size(self, batch: Batch) -> None:
        if batch.nbytes > self._largest:
            self._refused += batch.num_rows
            raise MessageTooLarge(
                batch.nbytes,
                self._largest,
                hint="start the server with a larger --max-message",
            )

    # --- one call, over as many connections as it takes ------------------------------------------

    def _deliver(self, call: Call) -> int | None:
        refused = self._refused
        try:
            # The time for reconnects counts from each break.
            while not retry(
                lambda: self._send_rest(call),
                self._connection.retry_policy(),
                on_retry=self._note_break,
            ):
                pass
        except BaseException as error:
            self._refuse_rest(call, refused)
            self._reset()
            note = f"{call.written:,} messages of this call are appended"
            if not isinstance(error, PenstockError):  # Ctrl-C, while answers were awaited
                if call.unanswered:
                    note += f"; of {call.unanswered:,} more it is not known"
            elif call.in_doubt and not isinstance(error, Unacknowledged):
                reason = error.reason if isinstance(error, ConnectionLost) else str(error)
                raise self._unacknowledged(call, reason) from error
            error.add_note(note)
            raise
        if call.failure is not None:
            self._refuse_rest(call, refused)
            raise call.failure
        return call.last_seq

    def _refuse_rest(self, call: Call, before: int) -> None:
        """Count the messages of a failed call that are not known to be appended.

        Payloads that an iterator has not produced yet are not counted.
        """
        if call.offered is None:
            self._refused += call.unanswered
        else:
            self._refused = before + call.offered - call.written

    def _send_rest(self, call: Call) -> bool:
        """Send what is left; False: the connection broke, but there was progress."""
        before = call.sent[0] if call.sent else None
        try:
            self._attempt_to_send(call)
        except ConnectionLost as error:
            after = call.sent[0] if call.sent else None
            if isinstance(error, Unacknowledged) or before is after:
                raise
            self._note_break(1, error, 0.0)
            return False
        return True

    def _unacknowledged(self, call: Call, reason: str) -> Unacknowledged:
        return Unacknowledged(
            self._target.server,
            reason,
            acknowledged=call.written,
            in_doubt=call.in_doubt,
            hint="look at the end of the stream before you write them again",
        )

    def _reset(self) -> None:
        """Have the next call open a new writer, so that nothing of a failed one counts for it."""
        self._drop_bulk()
        self._connection.drop()
        self._instance = ""

    def _note_break(self, attempt: int, error: Exception, delay: float) -> None:
        if attempt == 1:
            log.warning("%s: %s; trying again", self.url, error)
        del delay

    def _attempt_to_send(self, call: Call) -> None:
        if not self._instance:
            self._open_again(call)
        try:
            self._exchange(call, self._stream())
        except PenstockError as error:
            self._handle(call, error)
        except BROKEN as error:
            self._handle(call, self._connection.understood(error))

    def _stream(self) -> Stream:
        """Return the stream for the next pieces: a bulk connection from the second one on."""
        self._connection.check_process()
        is_first = not self._attempt
        if self._bulk is not None and not self._bulk.is_whole:
            self._drop_bulk()  # it ended while nothing was under way, so nothing is in doubt
        if self._bulk is None and not is_first and time.monotonic() >= self._bulk_from:
            self._bulk = open_bulk(self._connection, self._next_put())
            if self._bulk is None:
                self._bulk_from = time.monotonic() + _BETWEEN_TRIES
        return self._bulk or PutStream(self._connection, self._next_put())

    def _next_put(self) -> Put:
        self._attempt += 1
        return Put(writer=self._id, instance=self._instance, attempt=self._attempt)

    def _drop_bulk(self) -> None:
        bulk, self._bulk = self._bulk, None
        if bulk is not None:
            bulk.close()

    def _exchange(self, call: Call, stream: Stream) -> None:
        """Send batches, several ahead of the answers, until all are answered."""
        again = deque(call.sent)
        waiting: deque[Sent] = deque()
        is_open = True
        while True:
            while is_open and len(waiting) < _AHEAD:
                one = again.popleft() if again else call.next()
                if one is None:
                    break
                try:
                    is_open = stream.send(one.batch, one.piece)
                except (PenstockError, *BROKEN):
                    for sent in waiting:
                        sent.is_in_doubt = stream.is_accepted or sent.is_in_doubt
                    raise
                waiting.append(one)
            if is_open and not waiting:
                stream.end()
                return
            outcome = stream.receive()
            waiting.popleft()
            failure = self._count(call, outcome)
            if failure is not None:
                stream.end()
                raise failure

    def _count(self, call: Call, outcome: Outcome) -> PenstockError | None:
        """Count the messages of an answered batch; return why the rest of it was not appended."""
        one = call.sent[0]
        if outcome.number != one.piece.number or outcome.written > one.batch.num_rows:
            answered = f"the answer for batch {one.piece.number}"
            raise Malformed("flight Outcome", "number", answered, outcome.number)
        call.sent.popleft()
        call.written += outcome.written
        self._messages += outcome.written
        self._bytes += payload_bytes(one.batch.slice(0, outcome.written))
        self._waited += outcome.waited
        self._headers_dropped += outcome.headers_dropped
        if outcome.last_seq is not None:
            call.last_seq = self._last_seq = outcome.last_seq
        if outcome.failure is None:
            return None
        for later in call.sent:
            later.is_in_doubt = False  # nothing behind a failure is appended
        failure = error_from(outcome.failure)
        if isinstance(failure, ServerStopping | UnknownWriter):
            rest = one.batch.slice(outcome.written)
            call.sent.appendleft(Sent(rest, one.piece) if outcome.written else one)
            one.is_in_doubt = False
        else:
            self._refused += one.batch.num_rows - outcome.written
        return failure

    def _handle(self, call: Call, failure: PenstockError) -> None:
        """Decide how to proceed with unanswered batches after a failed attempt."""
        self._drop_bulk()
        if isinstance(failure, ConnectionLost):
            self._connection.drop()
        if isinstance(failure, ServerStopping):
            reason = failure.reason
        elif isinstance(failure, UnknownWriter):
            reason = "the server was started anew, or has forgotten this writer"
        else:
            if isinstance(failure, ConnectionLost):
                for one in call.sent:
                    one.is_in_doubt = True
            raise failure
        # Nothing without an answer was appended, except perhaps by an earlier attempt. The rest is
        # for a new writer, at the server that is there then.
        if call.in_doubt:
            raise self._unacknowledged(call, reason)
        self._instance = ""
        raise ConnectionLost(self._target.server, reason)

    def _open_again(self, call: Call) -> None:
        """Open a new writer, and renumber the unanswered batches from the start."""
        self._open()
        for one in call.sent:
            one.piece = one.piece.model_copy(update={"number": self._piece().number})
            one.is_in_doubt = False

    # --- counters and closing ---------------------------------------------------------------------

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._drop_bulk()
        with suppress(PenstockError):  # it would be forgotten anyway, later
            farewell = CloseWriter(writer=self._id)
            self._connection.ask(ActionKind.CLOSE_WRITER, farewell, FAREWELL)
        self._connection.drop()


def _batches(payloads: Iterable[BytesLike], type: int, subtype: int, chunk: int) -> Iterator[Batch]:
    """Yield payloads as batches of suitable size, as they are produced.

    If producing the next one fails, those before it are yielded first.
    """
    messages: list[Message] = []
    size = 0
    try:
        for payload in payloads:
            now = time.time_ns()
            messages.append(Message(0, now, now, type, subtype, None, None, bytes(payload)))
            size += len(messages[-1].payload) + OVERHEAD
            if size >= chunk or len(messages) >= _AT_ONCE:
                yield batch_from_messages(messages)
                messages, size = [], 0
    except GeneratorExit:
        raise
    except Exception:
        if messages:
            yield batch_from_messages(messages)
        raise
    if messages:
        yield batch_from_messages(messages)
