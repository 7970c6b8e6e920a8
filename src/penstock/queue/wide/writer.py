"""How are messages appended to a wide queue?"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from penstock.core.capabilities import InPlaceWriter, KeepsOrigin
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    DamagedQueue,
    LockTimeout,
    MessageTooLarge,
    NotFound,
    StorageError,
    Unsupported,
)
from penstock.core.interfaces import Writer
from penstock.core.overflow import QueueFull
from penstock.core.retry import Backoff
from penstock.core.statistics import WriterStatistics
from penstock.core.worker import Worker
from penstock.queue.options import Creation
from penstock.queue.storage import LockFile, no_thread, storage_errors, write_again
from penstock.queue.wide import _ring
from penstock.queue.wide.creation import create_from_options, create_queue
from penstock.queue.wide.file import QueueFile, protect
from penstock.queue.wide.layout import ALIGN, PAGE, SLOT, Compression, HeaderFlag, State
from penstock.queue.wide.readers import HeldReaders, check_held

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from penstock.core.batch import Batch
    from penstock.core.stream_id import StreamId
    from penstock.queue.options import Sync
    from penstock.queue.wide.options import WideOptions

__all__ = ["DiskSync", "Reservation", "Space", "WideWriter", "open_wide_writer"]

log = logging.getLogger(__name__)

#: Poll interval (seconds) while waiting for a queue to appear.
_LOOK_FOR_QUEUE: Final = 0.02
#: Poll interval (seconds) while another process writes to the queue.
_LOOK_FOR_WRITER: Final = 0.01
#: No limit of a sequence number or position. As `guard`: everything may be overwritten.
_EVERYTHING: Final = 2**64 - 1
#: Disk space allocated ahead (bytes): as much as is in use, between these limits.
_LEAST_AHEAD: Final = 64 << 10
_AHEAD: Final = 4 << 20
#: Longest pause (seconds) before a failed sync is retried.
_LONGEST_PAUSE: Final = 1.0


def open_wide_writer(url: str, path: str, options: WideOptions) -> WideWriter:
    """Open a writer, plain or compressing; create the queue as `options.create` says.

    :raises NotFound: there is no queue at this path.
    :raises LockTimeout: another process writes to it.
    """
    path = os.path.abspath(path)  # noqa: PTH100 - the process may change its directory
    while True:
        file = _open_or_make(path, options)
        kind = WideWriter
        if file.compression is not Compression.NONE:
            from penstock.queue.wide.compression import CompressingWriter  # noqa: PLC0415 - a subclass: import cycle

            kind = CompressingWriter
        with suppress(_Replaced):
            return kind(url, path, options, file)
        if options.create is Creation.ALWAYS:  # it was emptied once, as asked
            options = replace(options, create=Creation.MISSING)


class _Replaced(Closed):
    """The queue was resized, replaced or removed while a writer waited for its lock."""


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
                time.sleep(_LOOK_FOR_QUEUE)
            continue
        if file.field("state") != State.REPLACED or file.is_current():
            return file
        file.close()  # replaced meanwhile


class WideWriter(_ring.RingWriter, InPlaceWriter, KeepsOrigin, Writer):
    """Appends to a wide queue. `write` and `write_many` are in C."""

    def __init__(self, url: str, path: str, options: WideOptions, file: QueueFile) -> None:
        Writer.__init__(self, url)
        self._path = path
        self._options = options
        self._file = file
        self._waited = 0.0
        self._seen = 0  # count of messages at the last check of the path
        self._reservation: Callable[[], Reservation | None] = lambda: None
        self._is_closed = False
        self._held: HeldReaders | None = None
        self._disk: DiskSync | None = None
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
        if not file.is_named():
            raise _Replaced(f"{self.url} was removed", hint="open it again")
        if options.hold:
            check_held(file, options)
        if file.needs_recovery():
            from penstock.queue.wide.recovery import recover  # noqa: PLC0415 - loads numpy

            recover(self._path, file, self._locks)
        elif not any(file.header.boot_id):
            file.begin_boot()
        if not self._resume():
            raise self._damage()
        protect(file)
        file.prefault()
        self._space.begin()
        if options.hold:
            self._held = HeldReaders(self, file, options)
        self._disk = DiskSync(self, file, "none" if file.is_memory else options.sync)

    def _begin_writing(self) -> None:
        """Become the writer; wait up to `lock_timeout` for another one.

        :raises LockTimeout: another process still writes.
        """
        deadline = time.monotonic() + self._options.lock_timeout
        began = time.monotonic()
        timeout_ns = int(min(self._options.lock_timeout, 1e9) * 1e9)
        sync_each = self._options.sync == "batch"
        while error := self._attach(self._file.mapping, self._locks.fd, timeout_ns, sync_each):
            if error == errno.EPIPE:
                raise self._ended()
            if error != errno.EBUSY:
                cause = OSError(error, os.strerror(error))
                raise StorageError("writing to", self._file.path, cause)
            if time.monotonic() >= deadline:
                raise self._lock_timeout()
            time.sleep(_LOOK_FOR_WRITER)
        self._waited += time.monotonic() - began

    def _ended(self) -> Closed:
        """Return the error for a queue that takes no more messages."""
        if self._file.field("state") != State.REPLACED:
            return Closed(f"{self.url} was sealed; it takes no more messages")
        if not self._file.is_named():
            return _Replaced(f"{self.url} was replaced", hint="open it again")
        return Closed(
            f"{self.url} was removed, and is there again; it takes no more messages",
            hint="copy what is in it, then empty it: penstock create --replace",
        )

    # --- writing --------------------------------------------------------------------------------

    def write_batch(self, batch: Batch) -> int | None:
        from penstock.queue.wide.arrow import rows_of  # noqa: PLC0415 - loads Arrow

        rows, blocks, payloads = rows_of(batch, self._file.geometry.buffer_size)
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
        """Abort the open reservation."""
        self._commit(-1)

    def flush(self) -> None:
        """Sync, unless `sync=none`. Readers see all messages without it."""
        self._check_open()
        if self.syncs:
            self.sync()

    @property
    def syncs(self) -> bool:
        return self._disk is not None and self._disk.policy != "none"

    def sync(self) -> None:
        """Sync all messages so far to disk; no effect for a queue in memory.

        :raises StorageError: the sync fails.
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

    # --- irregular cases; called by the C core ----------------------------------------------------

    def _make_room(self, code: int, size: int) -> None:
        """Handle the reason `code` why a message of `size` bytes cannot be placed yet, or raise."""
        match code:
            case _ring.TOO_LARGE:
                raise self._too_large(size)
            case _ring.FULL if HeaderFlag.KEEPS in self._file.flags:
                raise QueueFull(self._file.geometry.slots, hint="nothing is overwritten in a log")
            case _ring.FULL | _ring.CHANGED if self._held:
                began = time.monotonic()
                try:
                    self._held.make_room(is_full=code == _ring.FULL)
                finally:
                    self._waited += time.monotonic() - began
            case _ring.NO_SPACE:
                self._space.make_room(size)
            case _ring.GUARDED if self._disk is not None:
                self._disk.make_room()
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
            hint="a queue keeps its size: penstock resize, or create --replace with a larger size=",
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
        if self._disk is not None and not self._file.is_memory:
            self._disk.sync()

    def _look(self, *_: int) -> None:
        """Switch to another queue if the path does not name this one; once a second at most."""
        if not self._file.is_named():
            self._tell_removed()
            self._go_over()
        self._seen = self._messages

    def _tell_removed(self) -> None:
        """Log that the queue was removed, and how much was written since the last look."""
        since, self._seen = self._messages - self._seen, self._messages
        log.warning(
            "%s was removed with all its messages; the last %s of them were just written",
            self.url,
            f"{since:,}",
        )

    def _go_over(self) -> None:
        """Switch to the queue that the path names now; recreate it if there is none."""
        try:
            is_open = False
            while not is_open:
                new = self._successor()
                self._let_go()
                self._held = self._disk = None
                self._file = new
                self._locks = LockFile(new.descriptor)
                self._space = Space(self, new)
                with suppress(_Replaced):
                    self._open()
                    is_open = True
        except BaseException:
            self.close()  # there is no queue to write to
            raise

    def _successor(self) -> QueueFile:
        old = self._file
        if self._options.create is not Creation.NEVER:
            with suppress(AlreadyExists):
                create_queue(
                    self._path,
                    old.geometry,
                    flags=old.flags,
                    compression=old.compression,
                    stream=old.header.stream,
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
        if self._messages > self._seen and not self._file.is_named():
            self._tell_removed()
        if (reservation := self._reservation()) is not None:
            reservation.give_up()
        self._let_go()

    def _let_go(self) -> None:
        try:
            if self._disk is not None:
                self._disk.close()
        finally:
            if self._held is not None:
                self._held.close()
            if hasattr(self, "_locks"):
                self._locks.close()
            self._file.close()

    def leave_to_parent(self) -> None:
        """Close in a forked process: the parent stays the writer."""
        self._is_closed = True
        self._detach(True)


_writers: weakref.WeakSet[WideWriter] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for writer in list(_writers):
        writer.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


# --- reservations: messages written in place ------------------------------------------------------


class Reservation:
    """Memory of a queue for one payload, invisible to readers until `commit`.

    As a context manager it commits at the end, and aborts on an exception.
    """

    __slots__ = ("__weakref__", "_is_open", "_writer", "buffer")

    def __init__(self, buffer: memoryview, writer: WideWriter) -> None:
        #: Writable memory of the payload.
        self.buffer = buffer
        self._writer = writer
        self._is_open = True

    def commit(self, size: int | None = None) -> int:
        """Append the message with the first `size` bytes of the buffer, or all; return its number.

        :raises ValueError: committed or aborted before, or `size` is out of range.
        """
        if not self._is_open:
            raise ValueError("this reservation was committed or aborted before")
        if size is not None and not 0 <= size <= self.buffer.nbytes:
            raise ValueError(f"{size} bytes of a reservation of {self.buffer.nbytes}")
        size = self.buffer.nbytes if size is None else size
        self._is_open = False  # done, even if a step after the append fails
        self.buffer.release()
        seq = self._writer._commit(size)  # noqa: SLF001 - a part of it
        assert seq is not None
        return seq

    def abort(self) -> None:
        """Discard the message. Idempotent; no effect after `commit`."""
        if self._is_open:
            self._is_open = False
            self.buffer.release()
            with suppress(Closed):  # the writer has aborted it
                self._writer._abort()  # noqa: SLF001

    def give_up(self) -> None:
        """Release the memory, because the writer was closed."""
        self._is_open = False
        with suppress(BufferError):  # the caller still has a view of it
            self.buffer.release()

    def __del__(self) -> None:
        self.abort()  # an open reservation blocks the writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._is_open:
            self.commit()


# --- disk space -----------------------------------------------------------------------------------


class Space:
    """Allocates disk space of a sparse queue, because a write without it raises SIGBUS."""

    def __init__(self, writer: _ring.RingWriter, file: QueueFile) -> None:
        self._writer: _ring.RingWriter = weakref.proxy(writer)  # it owns this object
        self._file = file

    def begin(self) -> None:
        """Determine which space is allocated already."""
        if HeaderFlag.SPARSE not in self._file.flags:
            return
        writer, geometry = self._writer, self._file.geometry
        written = writer._head - self._file.field("first_seq")  # noqa: SLF001 - a part of it
        around = writer._position >= geometry.buffer_size  # noqa: SLF001
        writer._ready_position = _EVERYTHING if around else writer._position  # noqa: SLF001
        writer._ready_seq = (  # noqa: SLF001
            _EVERYTHING if written >= geometry.slots else writer._head  # noqa: SLF001
        )

    def make_room(self, size: int) -> None:
        """Allocate space for the next message, and more ahead.

        :raises StorageError: no space.
        """
        writer, geometry = self._writer, self._file.geometry
        position = writer._position  # noqa: SLF001 - the writer's own part
        end = position + -(-size // ALIGN) * ALIGN
        if end > writer._ready_position:  # noqa: SLF001
            # A message that does not fit before the end goes to the start; allocate up to the end
            # anyway, for a smaller one of a later round.
            goal = min(end, geometry.buffer_size)
            got = self._get(geometry.buffer_offset, position, goal, geometry.buffer_size)
            writer._ready_position = (  # noqa: SLF001
                _EVERYTHING if got >= geometry.buffer_size else got
            )
        next_seq = writer._head  # noqa: SLF001
        if next_seq >= writer._ready_seq:  # noqa: SLF001
            # The slot of `first_seq` may be in the middle of the table.
            start = next_seq % geometry.slots * SLOT.size
            table = geometry.slots * SLOT.size
            got = self._get(geometry.slots_offset, start, start + SLOT.size, table)
            ready = next_seq + (got - start) // SLOT.size
            around = ready - self._file.field("first_seq") >= geometry.slots
            writer._ready_seq = _EVERYTHING if around else ready  # noqa: SLF001

    def _get(self, base: int, start: int, goal: int, limit: int) -> int:
        """Allocate from `start` to at least `goal`; return the end of the allocated space.

        :raises DamagedQueue: the file was truncated, and would become longer again.
        :raises StorageError: no space.
        """
        with storage_errors("looking at", self._file.path):
            size = os.fstat(self._file.descriptor).st_size
        if size < self._file.geometry.file_size:
            raise self._file.cut_off()
        start = start // PAGE * PAGE
        ahead = min(max(start, _LEAST_AHEAD), _AHEAD)
        for end in (min(limit, max(goal, start + ahead)), goal):
            try:
                os.posix_fallocate(self._file.descriptor, base + start, end - start)
            except OSError as error:
                if error.errno not in {errno.ENOSPC, errno.EDQUOT} or end == goal:
                    raise StorageError(
                        "getting space for",
                        self._file.path,
                        error,
                        hint="free some space; the message was not written",
                    ) from error
            else:
                return end
        raise AssertionError("the goal was tried last")


# --- sync to disk ---------------------------------------------------------------------------------


class DiskSync:
    """Syncs a queue's messages to disk: after every call, or at an interval.

    Synced messages must survive a power failure, even while the writer overwrites. So `tail` may
    pass only messages below `guard`, which is on disk. A sync advances `guard` ahead of need, but
    never past the messages that an earlier sync brought to disk.
    """

    def __init__(self, writer: _ring.RingWriter, file: QueueFile, policy: Sync) -> None:
        self._writer: _ring.RingWriter = weakref.proxy(writer)  # it owns this object
        self._file = file
        self.policy: Final = policy
        #: `head` and `tail` at the last sync; -1: none yet.
        self._synced, self._freed = -1, 0
        #: How often the writer had to wait for `guard` since then.
        self._overrun = 0
        self._failure: Exception | None = None
        self._has_failed = False
        #: The kernel takes pages that it could not write for written: the next sync may succeed
        #: without them.
        self._is_doubtful = False
        self._is_many = HeaderFlag.MANY_WRITERS in file.flags
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        if policy == "none":
            return
        self.sync()
        if isinstance(policy, float):
            self._worker = Worker(
                f"syncing {file.path}",
                self._sync_in_background,
                log=log,
                every=policy,
                backoff=Backoff(initial=policy, maximum=max(policy, _LONGEST_PAUSE)),
                on_failure=self._note_failure,
            )
            try:
                self._worker.start()
            except RuntimeError as error:
                raise no_thread(file.path) from error

    def sync(self) -> None:
        """Sync all messages so far to disk.

        :raises StorageError: the sync fails, now or earlier in the background.
        """
        failure, self._failure = self._failure, None
        with self._lock:
            if self._is_doubtful:
                with storage_errors("writing again", self._file.path):
                    self._write_again()
            self._sync(self._next_guard(may_overwrite=False))
            self._is_doubtful = False
        if failure is not None:
            raise failure

    def _write_again(self) -> None:
        if self._is_many:  # others may write at the same time
            self._file.write_again()
        else:
            write_again(self._file.descriptor, self._file.geometry.slots_offset)

    def make_room(self) -> None:
        """Advance `guard` on disk, so that more messages may be overwritten.

        :raises StorageError: the sync fails.
        """
        with self._lock:
            self._overrun += 1
            if self.policy == "batch":
                self._sync(self._next_guard())
            else:
                # The writer wraps around between two syncs: synced messages are overwritten anyway.
                self._drop_guard()

    def _next_guard(self, *, may_overwrite: bool = True) -> int:
        """Return the next `guard`; with `may_overwrite` it may stay without limit.

        An explicit sync does not allow that: it promises that its messages are safe.
        """
        tail = self._file.field("tail")
        count = self._file.field("head") - tail
        guard, freed = self._file.field("guard"), tail - self._freed
        if self._synced < 0:
            goal = tail
        else:
            ahead = max(count // 4, 2 * freed, 1) << min(self._overrun, 40)
            goal = min(tail + ahead, self._synced)
        is_overwritten = guard == _EVERYTHING and self._synced >= 0 and freed > count // 2
        if is_overwritten and may_overwrite:
            return guard
        if guard in (0, _EVERYTHING):  # none before: start here
            guard = max(goal, 1)
            self._store(guard)
        return max(goal, guard)

    def _drop_guard(self) -> None:
        """Remove the limit of overwriting, after `guard_next`, the end of the sync, is on disk.

        After a power failure, the remaining synced messages precede that number. The writer waits
        meanwhile, so nothing changes between the two syncs.
        """
        self._sync(self._file.field("guard"))
        self._bring_to_disk(self._synced)
        self._store(_EVERYTHING)

    def _sync(self, guard: int) -> None:
        head, tail = self._file.field("head"), self._file.field("tail")
        self._bring_to_disk(None if guard == _EVERYTHING else guard)
        is_guarded = self._file.field("guard") != _EVERYTHING
        if guard != _EVERYTHING:
            self._store(guard)
        elif not is_guarded:  # otherwise another writer has promised that its messages are safe
            self._file.header["guard_next"] = head
        if tail > self._freed:
            self._overrun = 0
        self._synced, self._freed = head, tail

    def _bring_to_disk(self, mark: int | None) -> None:
        """Sync the file, with this number or a higher one as `guard_next`."""
        header = self._file.header
        while True:
            if mark is not None:
                # Any number is right that a sync of another writer found, up to its `head`.
                header["guard_next"] = max(mark, header["guard_next"]) if self._is_many else mark
            try:
                with storage_errors("syncing", self._file.path):
                    os.fdatasync(self._file.descriptor)
            except StorageError:
                self._has_failed = self._is_doubtful = True
                raise
            if mark is None or header["guard_next"] >= mark:
                return  # otherwise another writer stored its own meanwhile

    def _store(self, guard: int) -> None:
        # The writer first: `tail` shows what it passed before.
        self._writer._guard = guard  # noqa: SLF001 - a part of it
        self._file.header["guard"] = guard

    def _sync_in_background(self, _: Worker) -> None:
        if self._file.field("head") != self._synced:
            with self._lock:
                self._sync(self._next_guard())

    def _note_failure(self, error: Exception) -> None:
        self._failure = error  # the next `sync` raises it

    def close(self) -> None:
        """Stop, and sync the rest unless `sync=none`.

        :raises StorageError: the sync fails, now or earlier in the background.
        """
        if self._worker is not None:
            self._worker.stop()
        if self.policy == "none":
            return
        self.sync()
        if not self._is_many and not self._has_failed:
            # All is synced: a crash of the machine before the next writer needs no recovery.
            # Not after a failure: the kernel may have dropped pages that it could not write.
            self._file.header.boot_id = bytes(16)
