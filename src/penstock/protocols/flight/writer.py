"""How are messages appended to a stream on another machine, each of them once?"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.batch import batch_from_messages, check_batch
from penstock.core.books import BookedWriter
from penstock.core.errors import (
    ConnectionLost,
    Malformed,
    MessageTooLarge,
    NotFound,
    PenstockError,
    Unacknowledged,
)
from penstock.core.message import Message
from penstock.core.retry import retry
from penstock.protocols.flight.bulk_client import open_bulk
from penstock.protocols.flight.client import FAREWELL, Connection, Target
from penstock.protocols.flight.errors import UnknownWriter
from penstock.protocols.flight.failures import error_from
from penstock.protocols.flight.pieces import OVERHEAD, payload_bytes, pieces_of
from penstock.protocols.flight.sending import BROKEN, Call, PutStream
from penstock.protocols.flight.sources import EMPTY
from penstock.protocols.flight.wire import (
    ActionKind,
    CloseWriter,
    OpenWriter,
    Outcome,
    Piece,
    Put,
    WriterOpened,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.stream_id import StreamId
    from penstock.protocols.flight.bulk_client import BulkStream
    from penstock.protocols.flight.sending import Stream

__all__ = ["FlightWriter"]

log = logging.getLogger(__name__)

#: Batches sent ahead of the server's answers.
_AHEAD: Final = 8
#: Messages of `write_many` in one batch, at most.
_AT_ONCE: Final = 8192
#: Where no bulk connection was to be had, it is not tried again for so long (seconds).
_BETWEEN_TRIES: Final = 10.0
#: While a stream is not there yet, look this often (seconds).
_LOOK_FOR_STREAM: Final = 0.1


class FlightWriter(BookedWriter):
    """Appends to a stream behind a Flight server. What a call returned for is appended there.

    When the connection breaks, the server is asked what it has, and gets the rest: every message
    once. If it was started anew meanwhile nobody knows, and `Unacknowledged` says so.
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
        # It empties the stream once, and not again when the connection was broken.
        if self._options.get("create") == "always":
            del self._options["create"]

    def _open(self) -> None:
        """Become known to the server, under a name that it has not heard before."""
        before, self._id = self._id, secrets.token_hex(16)
        self._number = 0
        self._attempt = 0
        question = OpenWriter(**self._target.names(options=self._options, writer=self._id))
        answer = self._connection.ask(ActionKind.OPEN_WRITER, question)
        opened = WriterOpened.from_bytes(answer)
        self._instance = opened.instance
        self._largest = min(opened.max_message, 1 << 30)
        self._bulk_from = 0.0 if self._target.options.bulk else math.inf
        if before:
            self._forget(before)
        self.cannot_carry = opened.cannot_carry  # type: ignore[misc]

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
        """Do on the server what the stream's own `flush` does: bring it to the disk, or nothing."""
        self._check_open()

        def piece() -> Iterator[tuple[Batch, Piece]]:
            yield EMPTY, self._piece(flush=True)  # numbered when it is sent, not before

        self._deliver(Call(piece()))

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
            # The time to mend a connection is counted from when it broke, and each time anew.
            while not retry(
                lambda: self._get_on_with(call),
                self._connection.retry_policy(),
                on_retry=self._note_break,
            ):
                pass
        except ConnectionLost as error:
            self._refuse_rest(call, refused)
            self._begin_afresh()
            if isinstance(error, Unacknowledged) or not call.in_doubt:
                error.add_note(f"{call.written:,} messages of this call are appended")
                raise
            raise self._unacknowledged(call, error.reason) from error
        except BaseException:
            self._refuse_rest(call, refused)
            self._begin_afresh()
            raise
        if call.failure is not None:
            self._refuse_rest(call, refused)
            raise call.failure
        return call.last_seq

    def _refuse_rest(self, call: Call, before: int) -> None:
        """Count what of a call is not appended, for all that is known: an error tells the caller.

        Of payloads that are made as they are sent, those that were not asked for are not offered.
        """
        if call.offered is None:
            self._refused += sum(one.batch.num_rows for one in call.sent)
        else:
            self._refused = before + call.offered - call.written

    def _get_on_with(self, call: Call) -> bool:
        """Send what is left; False: the connection broke, but it got on."""
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

    def _begin_afresh(self) -> None:
        """Make sure that nothing of a call that failed is taken for a part of the next."""
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
        """Return what carries the next pieces: who comes again gets a connection that stays."""
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
        """Send batches, some ahead of the answers, until all of them are answered."""
        again = deque(call.sent)
        waiting = 0
        while True:
            while waiting < _AHEAD and (one := again.popleft() if again else call.next()):
                stream.send(one.batch, one.piece)
                waiting += 1
            if not waiting:
                stream.end()
                return
            outcome = stream.receive()
            waiting -= 1
            self._enter(call, outcome)
            if outcome.failure is not None:
                stream.end()
                raise self._refusal(call, outcome)

    def _enter(self, call: Call, outcome: Outcome) -> None:
        """Take over what became of a batch."""
        one = call.sent[0]
        if outcome.number != one.piece.number or outcome.written > one.batch.num_rows:
            answered = f"the answer for batch {one.piece.number}"
            raise Malformed("flight Outcome", "number", answered, outcome.number)
        call.sent.popleft()
        call.written += outcome.written
        self._messages += outcome.written
        self._bytes += payload_bytes(one.batch.slice(0, outcome.written))
        self._refused += one.batch.num_rows - outcome.written if outcome.failure else 0
        self._waited += outcome.waited
        self._headers_dropped += outcome.headers_dropped
        if outcome.last_seq is not None:
            call.last_seq = self._last_seq = outcome.last_seq

    def _refusal(self, call: Call, outcome: Outcome) -> PenstockError:
        assert outcome.failure is not None
        error = error_from(outcome.failure)
        error.add_note(f"{call.written:,} messages of this call are appended")
        return error

    def _handle(self, call: Call, failure: PenstockError) -> None:
        """Decide what a failed attempt means for what is not answered."""
        self._drop_bulk()
        if isinstance(failure, ConnectionLost):
            self._connection.drop()
            for one in call.sent:
                one.is_in_doubt = True
            raise failure
        if not isinstance(failure, UnknownWriter):
            raise failure
        # Nothing of this attempt was appended. Of an earlier one, nobody knows.
        if call.in_doubt:
            reason = "the server was started anew, or has forgotten this writer"
            raise self._unacknowledged(call, reason)
        self._instance = ""
        raise ConnectionLost(self._target.server, str(failure))

    def _open_again(self, call: Call) -> None:
        """Become known anew, and number what is not sent yet from the beginning."""
        self._open()
        for one in call.sent:
            one.piece = one.piece.model_copy(update={"number": self._piece().number})
            one.is_in_doubt = False

    # --- books and closing ------------------------------------------------------------------------

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._drop_bulk()
        self._forget(self._id)
        self._connection.drop()

    def _forget(self, id: str) -> None:
        with suppress(PenstockError):  # it would be forgotten anyway, later
            self._connection.ask(ActionKind.CLOSE_WRITER, CloseWriter(writer=id), FAREWELL)


def _batches(payloads: Iterable[BytesLike], type: int, subtype: int, chunk: int) -> Iterator[Batch]:
    """Yield many payloads as batches of a good size, as they come.

    When the next one cannot be had, those before it come first.
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
