"""How do several clients append to one stream, and how is each batch appended once?"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.batch import messages_from_batch
from penstock.core.endpoints import create, open_writer
from penstock.core.errors import (
    Closed,
    DamagedQueue,
    InvalidOption,
    Malformed,
    MessageTooLarge,
    PenstockError,
    StorageError,
    WriteTimeout,
)
from penstock.core.units import parse_duration
from penstock.protocols.flight.errors import ServerStopping, UnknownWriter, describe_error
from penstock.protocols.flight.wire import Kind, Outcome
from penstock.queue.storage import storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.protocols.flight.access import Place
    from penstock.protocols.flight.wire import Piece

__all__ = ["ClientWriter", "LentWriter", "Writers"]

log = logging.getLogger(__name__)

#: A writer idle for this long (seconds) is closed, so that other processes can write.
_LINGER: Final = 2.0
#: Seconds between two checks for a stop, while an append waits for a reader or another client.
_SLICE: Final = 0.5
#: Upper bound (seconds) of a client's `lock_timeout`.
_LONGEST_LOCK: Final = 30.0
#: Outcomes remembered for each client: more than it sends ahead.
_OUTCOMES_KEPT: Final = 64
#: Most writers remembered. The one idle longest is forgotten first.
_MOST_WRITERS: Final = 10_000

#: Errors after which a writer is reopened, as after those that are not of this project.
_REOPEN_AFTER: Final = (Closed, DamagedQueue, StorageError)

#: Options that affect every message: clients that share a writer need the same.
_SHARED: Final = ("hold", "policy", "timeout", "keep", "sync", "retain", "retain_age")


class Opened(NamedTuple):
    """What a client has to know of the writer of its stream; see `Writer`."""

    cannot_carry: dict[str, str]
    syncs: bool


class _Shared:
    """The one writer of a stream for all clients: opened on demand, closed when idle."""

    def __init__(
        self, place: Place, options: Mapping[str, str], is_stopping: Callable[[], bool]
    ) -> None:
        self.place = place
        self._is_stopping = is_stopping
        self.users = 0
        self.options = dict(options)
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._last_used = 0.0
        #: Whether nobody needs it any more: an append under way closes the writer at its end.
        self._is_over = False
        given = options.get("timeout")
        self._patience = None if given is None else parse_duration(given)
        self._own = dict(options)
        #: It waits in slices, so that a stop and a client that has left are noticed.
        self._slice = min(_SLICE, self._patience or _SLICE)
        if "hold" in options and place.kind is Kind.QUEUE:
            self._own["timeout"] = str(self._slice)
        lock = parse_duration(options.get("lock_timeout", "5"))
        self._own["lock_timeout"] = str(min(lock, _LONGEST_LOCK))

    def check(self, options: Mapping[str, str]) -> None:
        for option in _SHARED:
            if options.get(option) != self.options.get(option):
                raise InvalidOption(
                    option,
                    options.get(option),
                    f"other clients write to {self.place.name} with {self.options.get(option)!r}",
                    hint="all clients of a stream share one writer: give the same",
                )

    def opened(self) -> Opened:
        with self._lock:
            writer = self._ready()
            return Opened(dict(writer.cannot_carry), writer.syncs)

    def append(self, batch: Batch, piece: Piece, has_left: Callable[[], bool]) -> Outcome:
        """Append a batch; return how many messages were appended, and the failure if any.

        :param has_left: tells whether the client has closed its writer meanwhile
        """
        try:
            self._take_turn(has_left)
        except PenstockError as error:
            return _refused(piece, error)
        try:
            return self._append(batch, piece, has_left)
        finally:
            self._end_turn()

    def _take_turn(self, has_left: Callable[[], bool]) -> None:
        """Wait for the other clients of this stream.

        :raises ServerStopping, UnknownWriter: as `_check_is_wanted`.
        """
        while not self._lock.acquire(timeout=_SLICE):
            self._check_is_wanted(has_left)

    def _check_is_wanted(self, has_left: Callable[[], bool]) -> None:
        """Check that an append should begin, or wait on.

        :raises ServerStopping: the server stops.
        :raises UnknownWriter: the server has forgotten the writer, or the client has closed it.
        """
        if self._is_stopping():
            raise ServerStopping
        if has_left():
            raise UnknownWriter("the server has forgotten this writer")

    def _append(self, batch: Batch, piece: Piece, has_left: Callable[[], bool]) -> Outcome:
        try:
            # A busy client is answered like one that waits: the next server gets the rest.
            self._check_is_wanted(has_left)
            writer = self._ready()
        except Exception as error:  # noqa: BLE001 - whatever it is, the client has to hear of it
            return _refused(piece, _told(error, self.place))
        before, failure = writer.statistics(), None
        try:
            if piece.flush:
                writer.flush()
            elif piece.exact:
                self._write(writer, partial(_write_exactly, writer), batch, has_left)
            else:
                self._write(writer, writer.write_batch, batch, has_left)
        except Exception as error:  # noqa: BLE001 - a batch without an outcome would be sent again
            failure = describe_error(_told(error, self.place))
            if not isinstance(error, PenstockError) or isinstance(error, _REOPEN_AFTER):
                self._let_go_if_synced()  # the next call reopens it
        after = writer.statistics()
        written = after.messages - before.messages
        return Outcome(
            number=piece.number,
            written=written,
            last_seq=after.last_seq if written else None,
            waited=max(0.0, after.waited - before.waited),
            headers_dropped=after.headers_dropped - before.headers_dropped,
            failure=failure,
        )

    def _write(
        self,
        writer: Writer,
        write: Callable[[Batch], object],
        batch: Batch,
        has_left: Callable[[], bool] = lambda: False,
    ) -> None:
        """Write a batch; wait for held readers as long as the client wants to.

        :raises WriteTimeout: that was too long.
        :raises ServerStopping, UnknownWriter: as `_check_is_wanted`.
        """
        began = time.monotonic()
        while batch.num_rows:
            before = writer.statistics().messages
            try:
                write(batch)
            except WriteTimeout as error:
                self._check_is_wanted(has_left)
                done = writer.statistics().messages - before
                batch = batch.slice(done)
                if done:
                    began = time.monotonic()
                elif self._is_too_long(began):
                    raise self._timed_out(error) from None
            else:
                return

    def _timed_out(self, error: WriteTimeout) -> WriteTimeout:
        """Return an error with the client's timeout, in place of the slice that the writer has."""
        text = str(error).replace(f"waited {self._slice:g} s", f"waited {self._patience:g} s", 1)
        return WriteTimeout(text, hint=error.hint)

    @contextmanager
    def lend(self) -> Iterator[LentWriter]:
        """Lend the writer for exclusive use.

        :raises ServerStopping: the server stops.
        """
        self._take_turn(lambda: False)
        try:
            writer = self._ready()
            yield LentWriter(writer, lambda batch: self._write(writer, writer.write_batch, batch))
        except BaseException:
            self._let_go_if_synced()  # the next call reopens it
            raise
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        self._last_used = time.monotonic()
        if self._is_over:
            self._let_go()
        self._lock.release()

    def _is_too_long(self, began: float) -> bool:
        return self._patience is not None and time.monotonic() - began >= self._patience

    def _ready(self) -> Writer:
        if self._writer is None:
            self._writer = open_writer(self.place.url, **self._own)
            self._last_used = time.monotonic()
        return self._writer

    def _let_go(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except Exception:
                log.warning("%s could not be closed as it should", self.place.name, exc_info=True)

    def _let_go_if_synced(self) -> None:
        """Close the writer, unless a sync fails: only it knows what is to be written again."""
        if self._writer is not None and self._writer.syncs:
            try:
                self._writer.flush()
            except StorageError as error:
                log.warning("%s stays open until it is synced: %s", self.place.name, error)
                return
            except Exception as error:  # noqa: BLE001 - it cannot be used any more
                log.debug("%s: %s", self.place.name, error)
        self._let_go()

    def close_if_idle(self) -> None:
        """Close the writer if it was idle for `_LINGER` seconds."""
        if self._writer is None or not self._lock.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._last_used > _LINGER:
                self._last_used = time.monotonic()
                self._let_go_if_synced()
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the writer once the append under way is done; wait only briefly for that."""
        self._is_over = True
        if self._lock.acquire(timeout=2 * _SLICE + 1):
            try:
                self._let_go()
            finally:
                self._lock.release()


class LentWriter:
    """A lent writer, with the methods that `append_noted` needs."""

    def __init__(self, writer: Writer, write: Callable[[Batch], None]) -> None:
        self.url = writer.url
        self.cannot_carry = writer.cannot_carry
        self._writer = writer
        self._write = write
        self._before = writer.statistics()
        self._began: float | None = None
        #: Seconds from the first batch to the end of the last flush.
        self.seconds = 0.0

    def write_batch(self, batch: Batch) -> None:
        if self._began is None:
            self._began = time.monotonic()
        self._write(batch)

    def flush(self) -> None:
        self._writer.flush()
        if self._began is not None:
            self.seconds = time.monotonic() - self._began

    def appended(self) -> tuple[int, int]:
        """Return how many messages it has appended, and their payload bytes."""
        now = self._writer.statistics()
        return now.messages - self._before.messages, now.bytes - self._before.bytes


def _write_exactly(writer: Writer, batch: Batch) -> None:
    """Write messages with their own `created_ns`."""
    for m in messages_from_batch(batch):
        writer.write(m.payload, m.type, m.subtype, m.time_ns, m.created_ns, m.stream, m.attributes)


def _told(error: Exception, place: Place) -> PenstockError:
    """Return the error to send to the client."""
    if isinstance(error, PenstockError):
        return error
    if isinstance(error, OSError):
        return storage_error("writing to", place.name, error)
    log.error("writing to %s failed", place.name, exc_info=error)
    return PenstockError("the server failed while it appended; its log says why")


def _refused(piece: Piece, error: PenstockError) -> Outcome:
    return Outcome(number=piece.number, written=0, failure=describe_error(error))


class ClientWriter:
    """A client's writer: remembers outcomes, so that no batch is appended twice."""

    def __init__(self, shared: _Shared, on_appended: Callable[[Batch, Outcome], None]) -> None:
        self.shared = shared
        self._on_appended = on_appended
        self.last_used = time.monotonic()
        #: Whether the server has forgotten it: nothing more is appended.
        self.is_forgotten = False
        self._lock = threading.Lock()
        self._attempt = 0
        self._last = 0
        self._outcomes: OrderedDict[int, Outcome] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        """Whether an append is under way."""
        return self._lock.locked()

    def begin(self, attempt: int) -> None:
        """Let this stream of batches append, and no earlier one.

        :raises UnknownWriter: a later stream has started already.
        """
        with self._lock:
            if attempt <= self._attempt:
                raise UnknownWriter(f"stream {attempt} of this writer comes too late")
            self._attempt = attempt
            self.last_used = time.monotonic()

    def append(self, attempt: int, batch: Batch, piece: Piece) -> Outcome:
        """Append a batch unless it was appended before; return its outcome in either case.

        :raises UnknownWriter: a later stream of this writer took over.
        :raises Malformed: the batch before this one is missing, or the outcome is forgotten.
        """
        with self._lock:
            self.last_used = time.monotonic()
            if attempt != self._attempt:
                raise UnknownWriter("the client goes on by another stream")
            if piece.number <= self._last:
                if (known := self._outcomes.get(piece.number)) is not None:
                    return known
                raise Malformed("flight Piece", "number", f"above {self._last}", piece.number)
            if piece.number != self._last + 1:
                raise Malformed("flight Piece", "number", self._last + 1, piece.number)
            outcome = self.shared.append(batch, piece, lambda: self.is_forgotten)
            self._on_appended(batch, outcome)
            self.last_used = time.monotonic()
            self._last = piece.number
            self._outcomes[piece.number] = outcome
            if len(self._outcomes) > _OUTCOMES_KEPT:
                self._outcomes.popitem(last=False)
            return outcome

    def refuse(self, piece: Piece, size: int, limit: int) -> Outcome:
        """Return the outcome of a batch that is larger than the server accepts."""
        hint = "send less at a time, or start the server with a larger --max-message"
        return _refused(piece, MessageTooLarge(size, limit, hint=hint))


class Writers:
    """The writers of all clients. Safe to share between threads."""

    def __init__(
        self, is_stopping: Callable[[], bool], on_appended: Callable[[Batch, Outcome], None]
    ) -> None:
        """Write until `is_stopping`; call `on_appended` once for each batch."""
        self._is_stopping = is_stopping
        self._on_appended = on_appended
        self._lock = threading.Lock()
        self._shared: dict[Path, _Shared] = {}
        self._clients: dict[str, ClientWriter] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def open(self, id: str, place: Place, options: Mapping[str, str]) -> Opened:
        """Open a writer for a client.

        :raises InvalidOption: other clients write with other options.
        :raises PenstockError: the stream cannot be opened or created.
        """
        shared = self._join(place, options)
        try:
            opened = shared.opened()
        except BaseException:
            self._drop(shared)
            raise
        with self._lock:
            before = self._clients.pop(id, None)
            if before is None and len(self._clients) >= _MOST_WRITERS:
                before = self._clients.pop(min(self._clients, key=self._rank))
            self._clients[id] = ClientWriter(shared, self._on_appended)
        if before is not None:
            self._forget(before)
        return opened

    def _rank(self, id: str) -> tuple[bool, float]:
        """Return the order in which writers are forgotten."""
        return self._clients[id].is_busy, self._clients[id].last_used

    def _join(self, place: Place, options: Mapping[str, str]) -> _Shared:
        asked = dict(options)
        if asked.get("create") == "always":
            # Only once: the writer may be closed and reopened at any time.
            del asked["create"]
            create(place.url, replace=True, **asked)
        with self._lock:
            shared = self._shared.get(place.path)
            if shared is not None:
                shared.check(asked)
            else:
                shared = _Shared(place, asked, self._is_stopping)
                self._shared[place.path] = shared
            shared.users += 1
        return shared

    @contextmanager
    def lend(self, place: Place, options: Mapping[str, str]) -> Iterator[LentWriter]:
        """Lend the writer of a stream for exclusive use.

        :raises InvalidOption: other clients write with other options.
        :raises ServerStopping: the server stops.
        """
        shared = self._join(place, options)
        try:
            with shared.lend() as writer:
                yield writer
        finally:
            self._drop(shared)

    def find(self, id: str) -> ClientWriter:
        """Return a client's writer.

        :raises UnknownWriter: no writer has this id.
        """
        with self._lock:
            writer = self._clients.get(id)
            if writer is None:
                raise UnknownWriter("the server does not know this writer")
            return writer

    def forget(self, id: str) -> None:
        with self._lock:
            writer = self._clients.pop(id, None)
        if writer is not None:
            self._forget(writer)

    def _forget(self, writer: ClientWriter) -> None:
        writer.is_forgotten = True
        self._drop(writer.shared)

    def _drop(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            is_last = shared.users == 0
            if is_last and self._shared.get(shared.place.path) is shared:
                del self._shared[shared.place.path]
        if is_last:
            shared.close()

    def expire(self, idle: float) -> None:
        """Close idle writers; forget clients' writers without a call for `idle` seconds."""
        before = time.monotonic() - idle
        with self._lock:
            late = [
                id
                for id, writer in self._clients.items()
                if writer.last_used < before and not writer.is_busy
            ]
            shared = list(self._shared.values())
        for id in late:
            self.forget(id)
        for each in shared:
            each.close_if_idle()

    def close(self) -> None:
        with self._lock:
            shared, self._shared, self._clients = list(self._shared.values()), {}, {}
        for each in shared:
            each.close()
