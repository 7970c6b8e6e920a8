"""How are messages appended to a wide queue?"""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import InPlaceWriter
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    DamagedQueue,
    LockTimeout,
    MessageTooLarge,
    StorageError,
    Unsupported,
)
from penstock.core.interfaces import Writer
from penstock.core.overflow import QueueFull
from penstock.core.statistics import WriterStatistics
from penstock.core.stream_id import StreamId
from penstock.queue.liveness import LockFile
from penstock.queue.options import Creation
from penstock.queue.wide import _ring
from penstock.queue.wide.columns import rows_of
from penstock.queue.wide.creation import recover
from penstock.queue.wide.holding import Holding
from penstock.queue.wide.layout import HeaderFlag
from penstock.queue.wide.queue_file import QueueFile, create_queue, protect
from penstock.queue.wide.reservation import Reservation
from penstock.queue.wide.space import Space
from penstock.queue.wide.syncing import Syncing

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.queue.wide.options import WideOptions

__all__ = ["WideWriter"]

log = logging.getLogger(__name__)

#: While another writer is there, look again this often (seconds).
_LOOK_FOR_WRITER: Final = 0.01


class WideWriter(_ring.RingWriter, InPlaceWriter, Writer):
    """Appends to a wide queue. `write` and `write_many` are in C."""

    def __init__(self, url: str, path: str, options: WideOptions, file: QueueFile) -> None:
        Writer.__init__(self, url)
        self._path = path
        self._options = options
        self._file = file
        self._waited = 0.0
        self._seen = 0  # messages, when the path was looked at last
        self._reservation: Callable[[], Reservation | None] = lambda: None
        self._is_closed = False
        self._holding: Holding | None = None
        self._syncing: Syncing | None = None
        try:
            self._locks = LockFile(file.descriptor)
            self._space = Space(self, file)
            self._open()
        except BaseException:
            self.close()
            raise
        _writers.add(self)

    def _open(self) -> None:
        options, file = self._options, self._file
        self._begin_writing()
        recover(self._path, file, self._locks)
        protect(file)
        if not self._resume():
            raise self._damage()
        file.prefault()
        self._space.begin()
        if options.hold:
            self._holding = Holding(self, file, options)
        self._syncing = Syncing(self, file, "none" if file.is_memory else options.sync)

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
        if size < 0:
            raise ValueError(f"a reservation of {size} bytes")
        if size > self._file.geometry.buffer_size:
            self._refused += 1
            raise self._too_large(size)
        start = self._reserve(size, type, subtype, time_ns, created_ns, stream, attributes)
        reservation = Reservation(self._file.memory[start : start + size], self)
        self._reservation = weakref.ref(reservation)
        return reservation

    def _abort(self) -> None:
        """Give up the reservation under way."""
        self._commit(-1)

    def flush(self) -> None:
        """With a `sync` policy, as `sync`. Otherwise readers see everything already: nothing."""
        self._check_open()
        if self._syncing is not None and self._syncing.policy != "none":
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
        match code:
            case _ring.TOO_LARGE:
                raise self._too_large(size)
            case _ring.FULL if HeaderFlag.KEEPS in self._file.flags:
                raise QueueFull(self._file.geometry.slots, hint="nothing is overwritten in a log")
            case _ring.FULL | _ring.CHANGED if self._holding:
                began = time.monotonic()
                try:
                    self._holding.make_room(is_full=code == _ring.FULL)
                finally:
                    self._waited += time.monotonic() - began
            case _ring.NO_SPACE:
                self._space.make_room(size)
            case _ring.GUARDED if self._syncing is not None:
                self._syncing.make_room()
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
        if self._syncing is not None and not self._file.is_memory:
            self._syncing.sync()

    def _look(self, *_: int) -> None:
        """Go over to another queue, once a second at most, when the path names another or none."""
        if not self._file.is_named():
            since = self._messages - self._seen
            log.warning("%s was removed, with the last %s messages in it", self.url, f"{since:,}")
            self._go_over()
        self._seen = self._messages

    def _go_over(self) -> None:
        """Write to the queue that the path names now; make one like this if it names none."""
        try:
            new = self._successor()
            self._let_go()
            self._holding = self._syncing = None
            self._file = new
            self._locks = LockFile(new.descriptor)
            self._space = Space(self, new)
            self._open()
        except BaseException:
            self.close()  # there is nothing that could be written to
            raise

    def _successor(self) -> QueueFile:
        old = self._file
        if self._options.create is not Creation.NEVER:
            stream = bytes(old.header["stream"][0])
            with suppress(AlreadyExists):
                create_queue(
                    self._path,
                    old.geometry,
                    flags=old.flags,
                    compression=old.compression,
                    stream=StreamId(stream) if any(stream) else None,
                    mode=old.mode,
                )
        new = QueueFile.open(self._path, writable=True)
        if new.compression is not old.compression:
            new.close()
            raise Unsupported(
                f"{self.url} was created anew with other compression", hint="open it again"
            )
        return new

    # --- closing --------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            self._raise_closed()

    def _raise_closed(self) -> None:
        raise Closed(f"{self.url} was closed")

    def _raise_cut(self) -> None:
        raise self._file.cut_off()

    def close(self) -> None:
        if self._is_closed or not self._detach(False):
            return
        self._is_closed = True
        if (reservation := self._reservation()) is not None:
            reservation.give_up()
        self._let_go()

    def _let_go(self) -> None:
        try:
            if self._syncing is not None:
                self._syncing.close()
        finally:
            if self._holding is not None:
                self._holding.close()
            if hasattr(self, "_locks"):
                self._locks.close()
            self._file.close()

    def leave_to_parent(self) -> None:
        """Stop being a writer in a forked process: the queue has one, the parent."""
        self._is_closed = True
        self._detach(True)


_writers: weakref.WeakSet[WideWriter] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for writer in list(_writers):
        writer.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
