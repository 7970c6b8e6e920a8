"""How are messages written to a classic queue, concurrently with other writers?"""

from __future__ import annotations

import logging
import time
from collections.abc import Sized
from typing import TYPE_CHECKING, Final, TypeAlias

from penstock.core.batch import messages_from_batch
from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import (
    DamagedQueue,
    InvalidOption,
    MessageTooLarge,
    PenstockError,
    WriteTimeout,
)
from penstock.core.interfaces import BookedWriter
from penstock.queue.classic._appender import (
    BUSY,
    FORKED,
    GONE,
    IRREGULAR,
    TOO_LARGE,
    WAIT,
    WRITTEN,
    SecondThread,
)
from penstock.queue.classic.compression import compress
from penstock.queue.classic.creation import open_to_write
from penstock.queue.classic.layout import FRAME_EXTRA, MAX_BUFFER, Status, id_distance, unwrap
from penstock.queue.classic.options import CANNOT_CARRY
from penstock.queue.classic.slots import (
    check_sizes,
    eviction_is_unfinished,
    finish_eviction,
    live_span,
    read_status,
    youngest_seq,
)
from penstock.queue.options import Creation
from penstock.queue.storage import storage_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.message import Message
    from penstock.core.stream_id import StreamId
    from penstock.queue.classic._appender import Entry
    from penstock.queue.classic.options import ClassicOptions

__all__ = ["ClassicWriter"]

log = logging.getLogger(__name__)

# --- the writer ---------------------------------------------------------------------------------


_SECOND = 1_000_000_000
_INT32 = range(-(2**31), 2**31)

#: Messages prepared at a time by `write_many` and `write_batch`.
_PREPARED = 1024

#: Most attempts to complete a write that was interrupted; then the queue is damaged.
_MOST_SETBACKS = 3


class ClassicWriter(BookedWriter):
    """Appends to an LROSE queue under LROSE's own lock."""

    cannot_carry = CANNOT_CARRY

    def __init__(
        self, url: str, path: str, options: ClassicOptions, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        super().__init__(url)
        self._path = path
        self._options = options
        # Called for every message: bypass the wrapper of the system clock.
        self._now_ns = time.time_ns if clock is SYSTEM_CLOCK else clock.now_ns
        self._method = options.compress.method
        #: Whether messages go to the native core unchanged.
        self._is_plain = self._method is None
        self._warned: set[str] = set()
        self._looked_at_path = 0
        self._device = open_to_write(path, options, options.create, self._now)
        try:
            self._meet()
            self._appender = self._device.appender()
        except BaseException:
            self._device.close()
            raise

    def _meet(self) -> None:
        """Check a queue just opened, and derive sequence numbers from its ids."""
        status = read_status(self._device)
        check_sizes(self._device, status)
        if eviction_is_unfinished(self._device, status):
            with self._device.locked(self._options.lock_timeout):
                status = finish_eviction(self._device, self._now())
        self._youngest = youngest_seq(status)
        if self._options.blocking:
            _warn_if_reader_is_unknown(status, self._warn)
        if self._options.blocking and status.nslots == 1:
            raise InvalidOption(
                "blocking", True, "a queue of one slot cannot block", hint="create it with slots=2"
            )

    @property
    def syncs(self) -> bool:
        return False  # as LROSE's own queues

    def _now(self) -> int:
        return _second(self._now_ns())

    # --- writing ----------------------------------------------------------------------------

    def write(
        self,
        payload: BytesLike | None,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        """Append one message; see `Writer.write`. A payload of None is LROSE's NULL message.

        The queue stores one time, in seconds: `created_ns` if given, else `time_ns`, else now.
        """
        is_bare = time_ns is None and created_ns is None and stream is None and attributes is None
        if self._is_plain and is_bare and isinstance(payload, bytes):
            seq = self._write_plain(payload, type, subtype)
            if seq is not None:
                return seq
        if stream is not None or attributes is not None:
            self._drop_header(stream, attributes)
        now = self._now() if created_ns is None else _second(created_ns)
        moment = now if time_ns is None or created_ns is not None else _second(time_ns)
        last = self._append([self._entry(payload, type, subtype, moment)], now)
        assert last is not None
        return last

    def _write_plain(
        self,
        payload: bytes | bytearray,
        type: int,
        subtype: int,
        begin: int = 0,
        end: int | None = None,
    ) -> int | None:
        """Append `payload[begin:end]` by the fast path; None: the fast path does not apply."""
        now = self._now_ns() // _SECOND
        if now != self._looked_at_path:
            return None
        if end is None:
            end = len(payload)
        try:
            outcome = self._appender.append_one(
                payload, begin, end, type, subtype, now, self._options.blocking
            )
        except OverflowError:
            return None
        except SecondThread:  # another thread is writing: the count is of its message
            self._refused += 1
            raise
        except BaseException as error:  # the disk fails, or a signal
            if self._count_written([(payload, end - begin, type, subtype, now, 0)], 0):
                self._last_seq = self._youngest  # the signal came after that
            else:
                self._refused += 1
            if isinstance(error, OSError):
                raise storage_error("writing to", self._path, error) from error
            raise
        if outcome != WRITTEN:
            return None
        self._messages += 1
        self._bytes += end - begin
        seq = self._youngest + 1
        id = self._appender.last_id
        if id != seq:
            seq = unwrap(id, self._youngest)
        self._youngest = self._last_seq = seq
        return seq

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        entries = (self._entry(payload, type, subtype, self._now()) for payload in payloads)
        return self._append_all(entries, len(payloads) if isinstance(payloads, Sized) else 0)

    def write_batch(self, batch: Batch) -> int | None:
        entries = (self._entry_of(m) for m in messages_from_batch(batch))
        return self._append_all(entries, batch.num_rows)

    def _append_all(self, entries: Iterable[Entry], offered: int) -> int | None:
        """Append messages in chunks; after an error, also those that preceded it.

        Of `offered` messages, those behind an error are refused. An iterator need not tell how many
        it has, and is not read on.
        """
        last = None
        prepared: list[Entry] = []
        before = self._messages + self._refused
        try:
            for entry in entries:
                prepared.append(entry)
                if len(prepared) == _PREPARED:
                    full, prepared = prepared, []
                    last = self._append(full, self._now())
        finally:
            try:
                if prepared:
                    last = self._append(prepared, self._now())
            finally:
                self._refused += max(0, offered - (self._messages + self._refused - before))
        return last

    def _entry_of(self, m: Message) -> Entry:
        if m.stream is not None or m.attributes is not None:
            self._drop_header(m.stream, m.attributes)
        return self._entry(m.payload, m.type, m.subtype, _second(m.time_ns))

    def _entry(self, payload: BytesLike | None, type: int, subtype: int, moment: int) -> Entry:
        """Prepare a message for the native core."""
        for field_name, value in (("type", type), ("subtype", subtype)):
            if value not in _INT32:
                self._refused += 1
                raise InvalidOption(field_name, value, "does not fit in 32 bits")
        if payload is None:
            return (b"", 0, type, subtype, moment, 0)
        if not isinstance(payload, bytes | bytearray):
            payload = self._as_bytes(payload)
        length = len(payload)
        if length > MAX_BUFFER:  # more than the native core can count
            self._check_open()
            self._refused += 1
            raise self._too_large(length)
        if self._method is None:
            return (payload, length, type, subtype, moment, 0)
        return (compress(payload, self._method), length, type, subtype, moment, 1)

    def _as_bytes(self, payload: BytesLike) -> memoryview:
        """Return a byte view of a buffer, whose items may be larger.

        :raises TypeError: it is no buffer, or not contiguous.
        """
        try:
            view = payload if isinstance(payload, memoryview) else memoryview(payload)
            is_bytes = view.ndim == 1 and view.format == "B" and view.c_contiguous
            return view if is_bytes else view.cast("B")
        except (TypeError, ValueError, BufferError):
            self._refused += 1
            raise TypeError(
                f"a payload is bytes, or an object that has its bytes in one piece; "
                f"found {payload.__class__.__name__}"
            ) from None

    def _append(self, entries: list[Entry], now: int) -> int | None:
        self._check_open()
        blocking = self._options.blocking
        done = setbacks = 0
        waiting: _ReaderWait | None = None
        try:
            self._look_at_path(now)
            while done < len(entries):
                try:
                    outcome = self._appender.append(entries, done, now, blocking, False)
                    if outcome == BUSY:
                        outcome = self._append_in_turn(entries, done, now)
                    done += self._count_written(entries, done)
                except SecondThread:  # another thread is writing: the count is of its messages
                    raise
                except BaseException:  # a signal, before or while the written ones were counted
                    done += self._count_written(entries, done)
                    raise
                if outcome == WRITTEN:
                    setbacks = 0
                    waiting = None
                    continue
                setbacks += 1 if outcome == IRREGULAR else 0
                if outcome == WAIT:
                    waiting = waiting or self._reader_wait()
                    self._waited += waiting.pause()
                else:
                    self._resolve(outcome, entries[done], now, setbacks)
        except BaseException as error:
            self._refused += len(entries) - done
            if isinstance(error, OSError) and not isinstance(error, PenstockError):
                raise storage_error("writing to", self._path, error) from error
            raise
        finally:
            if done:
                self._last_seq = self._youngest
        return self._last_seq

    def _count_written(self, entries: list[Entry], start: int) -> int:
        """Count the messages from `start` on that the last call of the native core wrote.

        If a signal is raised here, nothing is counted: nothing is called from the assignment on.
        """
        written = self._appender.count
        if written:
            size = sum([entry[1] for entry in entries[start : start + written]])
            youngest = unwrap(self._appender.last_id, self._youngest)
            self._messages, self._bytes, self._youngest = (
                self._messages + written,
                self._bytes + size,
                youngest,
            )
        return written

    def _reader_wait(self) -> _ReaderWait:
        _warn_if_buffer_wraps_first(read_status(self._device), self._warn)
        return _ReaderWait(self.url, self._options.timeout, self._warn)

    def _append_in_turn(self, entries: list[Entry], done: int, now: int) -> int:
        """Wait for the writers' lock, then append."""
        began = time.monotonic()
        with self._device.locked(self._options.lock_timeout):
            self._waited += time.monotonic() - began
            return self._appender.append(entries, done, now, self._options.blocking, True)

    def _resolve(self, outcome: int, entry: Entry, now: int, setbacks: int) -> None:
        """Handle an outcome that the native core cannot resolve, so that it can continue; or raise.

        :raises MessageTooLarge: the message can never fit.
        :raises DamagedQueue: the queue is inconsistent.
        """
        if outcome == TOO_LARGE:
            raise self._too_large(max(entry[1], len(entry[0])))
        if outcome == GONE:
            self._follow_path("was removed or replaced; going on with the new one")
        elif outcome == FORKED:
            self._follow_path("was opened by the parent of this process; opening it again")
        elif outcome == IRREGULAR:
            with self._device.locked(self._options.lock_timeout):
                status = finish_eviction(self._device, now)
            if setbacks > _MOST_SETBACKS:
                raise DamagedQueue(self._path, "status", 0, "one that fits its slots", status)

    def _too_large(self, size: int) -> MessageTooLarge:
        # LROSE cannot read a message whose plain length is above its buffer's
        # (docs/specs/lrose.md 6.1 item 3).
        buf_size = read_status(self._device).buf_size
        return MessageTooLarge(
            size,
            buf_size // 4 * 4 - FRAME_EXTRA,  # a payload is padded to words
            hint=f"create the queue with a larger size= (it has {buf_size:,} bytes)",
        )

    def _look_at_path(self, now: int) -> None:
        """Check once a second whether the queue was moved, which the native core does not see."""
        if now == self._looked_at_path:
            return
        if not self._device.is_current():
            self._follow_path("was removed or replaced; going on with the new one")
        self._looked_at_path = now

    def _follow_path(self, why: str) -> None:
        """Switch to the queue that the path names now; recreate it if it was removed."""
        log.warning("%s %s", self.url, why)
        never = self._options.create is Creation.NEVER
        creation = Creation.NEVER if never else Creation.MISSING
        fresh = open_to_write(self._path, self._options, creation, self._now)
        gone = self._device
        self._device = fresh
        try:
            self._meet()
            self._appender = fresh.appender()
        except BaseException:
            self._device = gone
            fresh.close()
            raise
        gone.close()

    # --- counters and closing ---------------------------------------------------------------

    def _warn(self, subject: str, text: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning("%s %s", self.url, text)

    def _drop_header(self, stream: StreamId | None, attributes: bytes | None) -> None:
        self._headers_dropped += (stream is not None) + (attributes is not None)
        self._warn("header", "has no place for stream and attributes; they are dropped")

    def _release(self) -> None:
        # The native core uses the memory of a shared-memory queue: release it first.
        del self._appender
        self._device.close()

    def __del__(self) -> None:
        # An unclosed writer should not leak descriptors.
        if not getattr(self, "_is_closed", True) and hasattr(self, "_appender"):
            self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._is_plain = False
            self._release()


def _second(time_ns: int) -> int:
    """Convert to seconds, limited to 32 bits: the years 1901 to 2038."""
    return min(max(time_ns // _SECOND, -(2**31)), 2**31 - 1)


# --- blocking (docs/specs/lrose.md 1.10) --------------------------------------------------------

#: Logs a warning (text) once for each subject.
_Warn: TypeAlias = "Callable[[str, str], None]"

#: Pauses (seconds) of a blocking writer between checks for its reader; LROSE: 200 ms.
_FIRST_PAUSE: Final = 0.000_1
_LONGEST_PAUSE: Final = 0.005
#: Seconds without progress of a reader until a warning.
_NOBODY_READS: Final = 5.0


class _ReaderWait:
    """One wait for the reader of a blocking queue."""

    def __init__(self, url: str, timeout: float | None, warn: _Warn) -> None:
        self._url = url
        self._timeout = timeout
        self._warn = warn
        self._began = time.monotonic()
        self._pauses = 0

    def pause(self) -> float:
        """Sleep once, and return for how long; then the caller retries the message.

        :raises WriteTimeout: the reader did not move for `timeout` seconds.
        """
        waited = time.monotonic() - self._began
        if self._timeout is not None and waited >= self._timeout:
            raise WriteTimeout(
                f"{self._url} is full and its reader has not moved for {waited:.1f} s",
                hint="start the reader, or write without blocking=true",
            )
        if waited > _NOBODY_READS:
            self._warn("nobody", "is full, blocking, and nobody reads it; still waiting")
        began = time.monotonic()
        time.sleep(min(_FIRST_PAUSE * 2.0**self._pauses, _LONGEST_PAUSE))
        self._pauses = min(self._pauses + 1, 32)
        return time.monotonic() - began


def _warn_if_buffer_wraps_first(status: Status, warn: _Warn) -> None:
    """Warn that LROSE's own writers would not block here."""
    if live_span(status) < status.nslots:
        warn(
            "wraps",
            "blocks on its buffer, not on its slots; LROSE's own writers would overwrite "
            "messages here: create it with fewer slots or a larger size",
        )


def _warn_if_reader_is_unknown(status: Status, warn: _Warn) -> None:
    """Warn if the position of the queue's reader is unknown."""
    behind = id_distance(status.youngest_id, status.last_id_read)
    if live_span(status) and not 0 <= behind < live_span(status):
        warn(
            "unknown",
            "was not blocking until now: messages that are in it already may be overwritten "
            "before its reader, which has not said yet where it is, comes to them",
        )
