"""How are messages appended to a wide queue?"""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Final

from penstock.core.errors import (
    Closed,
    DamagedQueue,
    LockTimeout,
    MessageTooLarge,
    NotFound,
    PenstockError,
    StorageError,
    Unsupported,
)
from penstock.core.interfaces import BytesLike, Writer
from penstock.core.overflow import QueueFull
from penstock.core.statistics import WriterStatistics
from penstock.queue.liveness import LockFile
from penstock.queue.options import Creation
from penstock.queue.wide import _ring
from penstock.queue.wide.columns import rows_of
from penstock.queue.wide.compression import Compression
from penstock.queue.wide.creation import create_from_options, recover
from penstock.queue.wide.holding import Holding
from penstock.queue.wide.layout import HeaderFlag, State
from penstock.queue.wide.queue_file import QueueFile
from penstock.queue.wide.reservation import Reservation
from penstock.queue.wide.space import Space
from penstock.queue.wide.syncing import Syncing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.stream_id import StreamId
    from penstock.queue.wide.options import WideOptions

__all__ = ["WideWriter", "open_wide_writer"]

log = logging.getLogger(__name__)

#: While another writer is there, look again this often (seconds).
_LOOK_FOR_WRITER: Final = 0.01


class WideWriter(_ring.RingWriter, Writer):
    """Appends to a wide queue. `write` and `write_many` are in C."""

    def __init__(self, url: str, path: str, options: WideOptions, file: QueueFile) -> None:
        Writer.__init__(self, url)
        self._path = path
        self._options = options
        self._file = file
        self._waited = 0.0
        self._seen = 0  # messages, when the path was looked at last
        self._is_closed = False
        self._holding: Holding | None = None
        self._syncing: Syncing | None = None
        self._locks = LockFile(file.descriptor)
        self._space = Space(self, file)
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        _writers.add(self)

    def _open(self) -> None:
        options, file = self._options, self._file
        self._begin_writing()
        recover(self._path, file, self._locks)
        if not self._resume():
            raise self._damage()
        file.prefault()
        self._space.begin()
        if options.hold:
            self._holding = Holding(self, file, options)
        if options.sync != "none" and not file.is_memory:
            self._syncing = Syncing(file, options.sync)

    def _begin_writing(self) -> None:
        """Become the writer, when the one before has left.

        :raises LockTimeout: it did not leave.
        """
        deadline = time.monotonic() + self._options.lock_timeout
        began = time.monotonic()
        timeout_ns = int(min(self._options.lock_timeout, 1e9) * 1e9)
        sync_each = self._options.sync == "batch"
        while error := self._attach(self._file.mapping, self._locks.fd, timeout_ns, sync_each):
            if error == errno.EPIPE:
                raise Closed(f"{self.url} was sealed; it takes no more messages")
            if error != errno.EBUSY:
                cause = OSError(error, os.strerror(error))
                raise StorageError("writing to", self._file.path, cause)
            if time.monotonic() >= deadline:
                raise self._lock_timeout()
            time.sleep(_LOOK_FOR_WRITER)
        self._waited += time.monotonic() - began

    # --- writing --------------------------------------------------------------------------------

    def write_batch(self, batch: Batch) -> int | None:
        rows, blocks, payloads = rows_of(batch)
        if not len(rows):
            return None
        rows["created_ns"] = time.time_ns()
        return self._write_rows(rows, blocks, payloads)

    def reserve(
        self,
        size: int,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> Reservation:
        """Give memory of the queue for a payload of `size` bytes, to be filled in and committed.

            with writer.reserve(len(image)) as place:
                place.buffer[:] = image

        Nothing else can be written meanwhile.

        :raises MessageTooLarge: it can never fit.
        :raises WriteTimeout: a held reader is behind, and stayed so for the time allowed.
        """
        if size < 0:
            raise ValueError(f"a reservation of {size} bytes")
        if size > self._file.geometry.buffer_size:
            self._refused += 1
            raise self._too_large(size)
        start = self._reserve(size, type, subtype, time_ns, created_ns, stream, attributes)
        return Reservation(memoryview(self._file.mapping)[start : start + size], self._commit)

    def flush(self) -> None:
        """With a `sync` policy, as `sync`. Otherwise readers see everything already: nothing."""
        self._check_open()
        if self._syncing is not None:
            self.sync()

    def sync(self) -> None:
        """Return when everything written so far is on the disk, where the queue is on one.

        :raises StorageError: the device refuses.
        """
        self._check_open()
        if not self._file.is_memory:
            self._sync()

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(
            messages=self._messages,
            bytes=self._bytes,
            refused=self._refused,
            headers_dropped=0,
            waited=self._waited,
            last_seq=self._head - 1 if self._messages else None,
        )

    # --- what does not go as usual; called by the C core ------------------------------------------

    def _make_room(self, code: int, size: int) -> None:
        """Do what it takes before a message of `size` bytes can be placed, or raise."""
        began = time.monotonic()
        match code:
            case _ring.TOO_LARGE:
                raise self._too_large(size)
            case _ring.FULL if HeaderFlag.KEEPS in self._file.flags:
                raise QueueFull(self._file.geometry.slots, hint="nothing is overwritten in a log")
            case _ring.FULL | _ring.CHANGED if self._holding:
                self._holding.make_room(is_full=code == _ring.FULL)
                self._waited += time.monotonic() - began
            case _ring.NO_SPACE:
                self._space.make_room(size)
            case _ring.CLOSED:
                raise Closed(
                    f"{self.url} was sealed or created anew; it takes no more messages",
                    hint="open it again",
                )
            case _:
                raise self._damage()

    def _too_large(self, size: int) -> MessageTooLarge:
        return MessageTooLarge(
            size,
            self._file.geometry.buffer_size,
            hint="create a queue with a larger buffer: size=…",
        )

    def _damage(self) -> DamagedQueue:
        file = self._file
        return DamagedQueue(
            self._path, "head", 128, "the number behind the last message", file.field("head")
        )

    def _lock_timed_out(self, *_: int) -> None:
        raise self._lock_timeout()

    def _lock_timeout(self) -> LockTimeout:
        owner, patience = self._file.field("writer_pid"), self._options.lock_timeout
        if HeaderFlag.MANY_WRITERS in self._file.flags:
            return LockTimeout(
                f"process {owner} has had the lock of {self._path} for {patience:g} s",
                hint="it was stopped in a write, or has a reservation that it does not commit",
            )
        return LockTimeout(
            f"process {owner} writes to {self._path}; waited {patience:g} s",
            hint="a queue has one writer at a time, unless it was created with writers=many",
        )

    def _sync(self, *_: int) -> None:
        if self._syncing is not None:
            self._syncing.sync()
        else:
            Syncing.sync_file(self._file)

    def _look(self, *_: int) -> None:
        """Go over to another queue, once a second at most, when the path names another or none."""
        if not self._file.is_named():
            since = self._messages - self._seen
            log.warning("%s was removed, with the last %s messages in it", self.url, f"{since:,}")
            self._go_over()
        self._seen = self._messages

    def _go_over(self) -> None:
        options = self._options.model_copy(update={"create": Creation.MISSING})
        new = _open_or_make(self._path, options)
        if new.compression is not self._file.compression:
            new.close()
            raise Unsupported(
                f"{self.url} was created anew with other compression", hint="open it again"
            )
        self._let_go()
        self._holding = self._syncing = None
        self._file = new
        self._locks = LockFile(new.descriptor)
        self._space = Space(self, new)
        self._open()

    # --- closing --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            self._raise_closed()

    def _raise_closed(self) -> None:
        raise Closed(f"{self.url} was closed")

    def close(self) -> None:
        if self._is_closed or not self._detach(False):
            return
        self._is_closed = True
        self._let_go()

    def _let_go(self) -> None:
        try:
            if self._syncing is not None:
                self._syncing.close()
        finally:
            if self._holding is not None:
                self._holding.close()
            self._locks.close()
            self._file.close()

    def leave_to_parent(self) -> None:
        """Stop being a writer in a forked process: the queue has one, the parent."""
        self._is_closed = True
        self._detach(True)


class CompressingWriter(WideWriter):
    """Appends to a queue whose payloads are compressed."""

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
        try:
            small = self._compressed(payload)
        except BaseException:
            self._refused += 1
            raise
        seq = super().write(small, type, subtype, time_ns, created_ns, stream, attributes)
        self._bytes += memoryview(payload).nbytes - len(small)
        return seq

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        offered = list(payloads)
        small: list[bytes] = []
        failure: Exception | None = None
        for payload in offered:
            try:
                small.append(self._compressed(payload))
            except (PenstockError, TypeError) as error:  # those before it are written
                failure = error
                self._refused += len(offered) - len(small)
                break
        written = self._messages
        try:
            last = super().write_many(small, type, subtype)
        finally:
            done = self._messages - written
            self._bytes += sum(memoryview(payload).nbytes for payload in offered[:done])
            self._bytes -= sum(map(len, small[:done]))
        if failure is not None:
            raise failure
        return last

    def write_batch(self, batch: Batch) -> int | None:
        return Writer.write_batch(self, batch)

    def reserve(self, size: int, *_: object, **__: object) -> Reservation:
        raise Unsupported(
            f"{self.url} is compressed: {size} bytes of it cannot be used in place",
            hint="use write()",
        )

    def _compressed(self, payload: BytesLike) -> bytes:
        size, limit = memoryview(payload).nbytes, self._file.geometry.buffer_size
        if size > limit:  # so that a reader can tell a length that cannot be true
            raise self._too_large(size)
        return self._file.compression.compress(payload)


def open_wide_writer(url: str, path: str, options: WideOptions) -> WideWriter:
    """Open a writer, of the kind that the queue needs; make the queue if that is asked for.

    :raises NotFound: there is no such queue.
    :raises LockTimeout: another process writes to it.
    """
    file = _open_or_make(path, options)
    kind = WideWriter if file.compression is Compression.NONE else CompressingWriter
    return kind(url, path, options, file)


def _open_or_make(path: str, options: WideOptions) -> QueueFile:
    if options.create is Creation.ALWAYS:
        create_from_options(path, options, replace=True)
    deadline = time.monotonic() + options.wait
    while True:
        try:
            file = QueueFile.open(path, writable=True)
        except NotFound:
            if options.create is Creation.MISSING:
                create_from_options(path, options, replace=False)
            elif time.monotonic() >= deadline:
                raise
            else:
                time.sleep(_LOOK_FOR_WRITER)
            continue
        if file.field("state") != State.REPLACED or file.is_current():
            return file
        file.close()  # it was replaced this moment


_writers: weakref.WeakSet[WideWriter] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for writer in list(_writers):
        writer.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
