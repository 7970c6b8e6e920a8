"""How are messages appended to a log?"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import (
    DamagedQueue,
    MessageTooLarge,
    NotFound,
    PenstockError,
    StorageError,
    Unsupported,
)
from penstock.core.whole_files import sync_names
from penstock.core.worker import Worker
from penstock.queue.log.creation import open_to_write
from penstock.queue.log.retention import AgeClock, Limits, trim
from penstock.queue.log.segments import begin_segment, look, numbers_of, path_of, seal
from penstock.queue.options import Creation
from penstock.queue.storage import LockFile, no_thread, storage_errors, write_again
from penstock.queue.wide import _ring
from penstock.queue.wide.compression import CompressingWriter
from penstock.queue.wide.file import protect
from penstock.queue.wide.layout import HEADER, PAGE, Compression
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.writer import Space, WideWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.queue.log.creation import Opened
    from penstock.queue.log.options import LogOptions
    from penstock.queue.log.recovery import Recovery
    from penstock.queue.log.settings import Settings
    from penstock.queue.options import Sync
    from penstock.queue.wide.file import QueueFile

__all__ = ["LogWriter", "open_log_writer"]

log = logging.getLogger(__name__)

#: How often (seconds) retention is applied.
_BETWEEN_TRIMS: Final = 60.0

_HEAD_AT: Final = HEADER.fields["head"].offset
_BOOT_ID_AT: Final = HEADER.fields["boot_id"].offset


class LogWriter(WideWriter):
    """Appends to a log: to its newest segment, and to a new one when that is full.

    A call continues in the new segment. Appending is as fast as to a wide queue.
    """

    def __init__(self, url: str, folder: Path, options: LogOptions, opened: Opened) -> None:
        self._folder = folder
        self._log_options = options
        self._settings = opened.settings
        self._log_lock = opened.lock
        self._keeper: Keeper | None = None
        #: Full segments, to be sealed.
        self._full: list[tuple[QueueFile, LockFile]] = []
        #: Result of the recovery when the log was opened.
        self.recovery: Recovery = opened.recovery
        wide = WideOptions(lock_timeout=options.lock_timeout, sync=options.sync)
        super().__init__(url, str(folder), wide, opened.file)
        self._waited += opened.lock.waited

    def _open(self) -> None:
        self._begin_writing()
        protect(self._file)
        if not self._resume():
            raise self._damage()
        self._created_ns = max(self._created_ns, self._last_created_ns())
        self._space.begin()
        self._retention = _Retention(self._folder, self._settings)
        #: The current segment, as the keeper has it or is about to.
        self._unsynced = Unsynced(self._file)
        self._keeper = Keeper(self._unsynced, self._options.sync, self._retention)
        weakref.finalize(self, self._keeper.stop).atexit = False
        self._retain()

    def _last_created_ns(self) -> int:
        """Return the append time of the log's last message, even if this segment is empty."""
        for number in reversed(numbers_of(self._folder)):
            with contextlib.suppress(NotFound, DamagedQueue):
                newest = look(self._folder, number).newest_ns
                if newest is not None:
                    return newest
        return self._created_ns

    # --- a new segment ---------------------------------------------------------------------------

    def _make_room(self, code: int, size: int) -> None:
        if code == _ring.FULL and not self._file.is_named():
            super()._look()  # the log was removed
        elif code == _ring.FULL:
            self._roll()
        else:
            super()._make_room(code, size)

    def _roll(self) -> None:
        """Switch to a new segment, and seal the current one.

        The new one exists before the old one is sealed, so that a reader of a sealed segment finds
        the next. All steps that can fail come before the switch.

        :raises StorageError: no space, or no descriptor; the current segment is unchanged.
        """
        assert self._keeper is not None
        self._keeper.roll(self._unsynced)  # a signal may have prevented it
        before = self._file, self._locks, self._space, self._unsynced
        first, created_ns, sync = self._head, self._created_ns, self._options.sync
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self._stay, before, path_of(self._folder, first))
                new = begin_segment(self._folder, self._settings, first, sync=sync != "none")
                undo.callback(new.close)
                locks = LockFile(new.descriptor)
                undo.callback(locks.close)
                unsynced = Unsynced(new)
                undo.callback(unsynced.close)
                space = Space(self, new)
                if error := self._attach(new.mapping, locks.fd, 0, sync == "batch"):
                    raise StorageError("writing to", new.path, OSError(error, os.strerror(error)))
                self._full.append(before[:2])
                self._file, self._locks, self._space, self._unsynced = new, locks, space, unsynced
                self._resume()
                self._created_ns = created_ns  # append times never decrease, even if the clock does
                space.begin()
                undo.pop_all()
        finally:
            if self._file is not before[0]:  # even if a signal came right after the switch
                try:
                    self._seal_full()
                finally:
                    # After that: what it syncs is then sealed on the disk, too.
                    self._keeper.roll(self._unsynced)
        self._retain()

    def _stay(self, before: tuple[QueueFile, LockFile, Space, Unsynced], path: Path) -> None:
        """Return to the current segment after `_roll` failed or a signal interrupted it.

        Its next message has the number that names the new segment. So if that one cannot be
        removed, or the C core may still use it, the writer is closed.
        """
        self._file, self._locks, self._space, self._unsynced = before
        self._full = [full for full in self._full if full[0] is not self._file]
        sync_each = self._options.sync == "batch"
        error = self._attach(self._file.mapping, self._locks.fd, 0, sync_each)
        try:
            path.unlink(missing_ok=True)
        except OSError as refused:
            error = refused.errno or error
        if error:
            log.error("%s is closed: %s, and cannot be undone", self.url, os.strerror(error))
            self.close()
        else:
            self._resume()
            self._space.begin()

    def _seal_full(self) -> None:
        while self._full:  # more than one after a signal
            file, locks = self._full[0]
            seal(file)
            del self._full[0]
            locks.close()
            file.close()

    def _retain(self) -> None:
        """Apply retention. A failure is logged, and does not stop the writer."""
        assert self._keeper is not None
        try:
            self._keeper.tidy()
        except PenstockError:
            log.warning("%s: old segments cannot be removed", self.url, exc_info=True)

    def _look(self, *_: int) -> None:
        """Follow the path, and roll a segment with expired messages; once a second at most."""
        super()._look()
        age = self._settings.retain_age
        if age is None or self._file.field("head") == self._file.field("first_seq"):
            return
        oldest = self._file.slot(self._file.field("first_seq")).created_ns
        if oldest < time.time_ns() - int(age * 1e9) and self._is_past(oldest, age):
            # A slowly filling segment would keep expired messages.
            try:
                self._roll()
            except PenstockError:
                log.warning("%s: no new segment can be made", self.url, exc_info=True)

    def _is_past(self, created_ns: int, age: float) -> bool:
        now = self._retention.clock.now_ns()
        return now is not None and created_ns < now - int(age * 1e9)

    def _go_over(self) -> None:
        """Recreate the removed log, and continue in it."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_up)
            self._let_go()
            options = replace(self._log_options, create=Creation.MISSING)
            anew = self._settings.begun_anew(self._head)
            opened = open_to_write(self._folder, options, anew)
            kind, self._settings = self._settings.compress, opened.settings
            self._log_lock, self.recovery = opened.lock, opened.recovery
            self._file, self._locks = opened.file, LockFile(opened.file.descriptor)
            self._space = Space(self, opened.file)
            if opened.settings.compress is not kind:
                self._let_go()
                raise Unsupported(
                    f"{self.url} was created anew with other compression", hint="open it again"
                )
            self._open()
            undo.pop_all()

    def _give_up(self) -> None:
        self._detach(False)
        self._is_closed = True

    # --- overrides of the queue's writer ----------------------------------------------------------

    def _too_large(self, size: int) -> MessageTooLarge:
        return MessageTooLarge(
            size,
            self._file.geometry.buffer_size,
            hint="create a log with larger segments: segment=…",
        )

    def _sync(self, *_: int) -> None:
        if self._keeper is None:
            return
        self._keeper.roll(self._unsynced)  # a signal may have prevented it
        if self._keeper.is_doubtful and self._head > self._file.field("first_seq"):
            self._roll()  # only a segment that does not change can be written again
        self._keeper.sync()

    def flush(self) -> None:
        """Sync all messages so far to disk, unless `sync=none`."""
        self._check_open()
        if self.syncs:
            self.sync()

    @property
    def syncs(self) -> bool:
        return self._options.sync != "none"

    def _let_go(self) -> None:
        keeper, self._keeper = self._keeper, None
        with contextlib.ExitStack() as undo:
            undo.callback(self._log_lock.close)
            if keeper is not None:
                undo.callback(keeper.close)
                undo.callback(keeper.roll, self._unsynced)  # as in `_sync`
            undo.callback(super()._let_go)
            self._seal_full()


class CompressingLogWriter(LogWriter, CompressingWriter):
    """Appends to a log whose payloads are compressed."""


class _Retention:
    """Applies the retention of a log, in the writer's thread and in the background."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._limits = Limits(settings.retain, settings.retain_age)
        self.has_limits = self._limits != Limits()
        self._sizes: dict[int, int] = {}
        self.clock = AgeClock(folder)
        self._held_by: str | None = None
        self._lock = threading.Lock()

    def __call__(self) -> None:
        if not self.has_limits:
            return
        with self._lock:
            done = trim(self._folder, self._limits, self._settings, self._sizes, self.clock)
            if done.held_by not in (None, self._held_by):
                log.warning(
                    "%s keeps more than its limits, for the cursor %s", self._folder, done.held_by
                )
            self._held_by = done.held_by


class Unsynced:
    """A segment that is not synced yet, with a descriptor of its own."""

    def __init__(self, file: QueueFile) -> None:
        """Duplicate the descriptor, so that the writer may close the segment.

        :raises StorageError: no descriptor left.
        """
        self.path = file.path
        with storage_errors("holding", file.path):
            self._descriptor = os.dup(file.descriptor)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        #: A sync failed. The kernel takes the pages that it could not write for written, so that
        #: the next sync may succeed without them.
        self.has_failed = False

    @property
    def head(self) -> bytes:
        with storage_errors("reading", self.path):
            return os.pread(self._descriptor, 8, _HEAD_AT)

    def sync(self) -> None:
        """Sync the segment to disk.

        :raises StorageError: the sync fails.
        """
        with storage_errors("syncing", self.path):
            try:
                os.fdatasync(self._descriptor)
            except OSError:
                self.has_failed = True
                raise

    def sync_sealed(self) -> None:
        """Sync a segment that does not change any more, and mark it as synced.

        After a failure, all of its pages are written again.

        :raises StorageError: it fails.
        """
        if self.has_failed:
            self.write_again()
        self.has_failed = True
        self.sync()
        self.mark_synced()
        self.has_failed = False

    def write_again(self) -> None:
        """Make all pages of a segment that does not change any more dirty, for the next sync.

        :raises StorageError: it fails.
        """
        fd = self._descriptor
        with storage_errors("writing again", self.path):
            # Of the header only what nobody else writes: its page is dirty then.
            os.pwrite(fd, os.pread(fd, 16, _BOOT_ID_AT), _BOOT_ID_AT)
            write_again(fd, PAGE)

    def mark_synced(self) -> None:
        """Clear the boot id: the segment is synced, and needs no check after a crash."""
        with storage_errors("syncing", self.path):
            os.pwrite(self._descriptor, bytes(16), _BOOT_ID_AT)

    def close(self) -> None:
        self._close()


class Keeper:
    """Syncs messages to disk, and calls `tidy` about once a minute.

    It has descriptors of its own, so that the writer can close a segment before it is synced.
    """

    def __init__(self, segment: Unsynced, sync: Sync, tidy: _Retention) -> None:
        """Start with this segment, and close it in the end.

        :raises StorageError: no thread left.
        """
        self._policy = sync
        self.tidy = tidy
        #: The last one takes messages; those before it are sealed, and not synced yet.
        self._segments = deque([segment])
        self._synced_head = b""
        #: The newest segment whose name is synced; None: names are synced at creation. With
        #: `sync=none`, only an explicit `sync` does that.
        self._named = "" if sync == "none" else None
        self._failure: Exception | None = None
        self._has_failed = False
        #: Held during a sync, so that no other thread closes a segment. `roll` does not take it:
        #: a write does not wait for the disk.
        self._syncing = threading.Lock()
        self._worker = Worker("penstock-log", self._run, log=log)
        # Otherwise the thread starts at the first roll: many logs are rarely written.
        if isinstance(sync, float) or tidy.has_limits:
            try:
                self._worker.start()
            except RuntimeError as error:
                segment.close()
                raise no_thread(segment.path) from error

    @property
    def _active(self) -> Unsynced:
        return self._segments[-1]

    def roll(self, following: Unsynced) -> None:
        """Switch to another segment; the current one is complete. Again, this does nothing.

        :raises StorageError: with `sync=batch`: the sync fails. The switch is done anyway.
        """
        if following is self._active:
            return
        self._segments.append(following)
        if self._policy == "batch":
            self.sync()
        else:
            with contextlib.suppress(RuntimeError):  # no thread left: the next sync does it
                self._worker.start()
            self._worker.wake()

    def sync(self) -> None:
        """Sync all messages so far to disk.

        :raises StorageError: the sync fails, now or earlier in the background.
        """
        failure, self._failure = self._failure, None
        with self._syncing:
            self._sync_all()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Stop; unless `sync=none`, sync the rest and mark the log as synced.

        :raises StorageError: the sync fails, now or earlier in the background.
        """
        self._worker.stop()
        try:
            if self._policy != "none" or self._failure is not None:
                if self._active.has_failed:  # it does not change any more
                    self._active.write_again()
                    self._synced_head = b""
                self.sync()
                if self._policy != "none" and not self._has_failed:
                    self._active.mark_synced()
        finally:
            for segment in self._segments:
                segment.close()

    @property
    def is_doubtful(self) -> bool:
        """Whether the current segment may not be on the disk though a sync succeeds."""
        return self._active.has_failed

    def stop(self) -> None:
        """Ask the thread to stop; also for a writer that was never closed."""
        self._worker.ask_to_stop()

    def _sync_all(self, *, active: bool = True) -> None:
        try:
            self._sync_sealed()
            if active:
                self._sync_active()
                self._sync_names()
        except Exception:
            self._has_failed = True
            raise

    def _sync_sealed(self) -> None:
        """Sync sealed segments in order, and mark each; one that failed stays the first."""
        while len(self._segments) > 1:
            segment = self._segments[0]
            segment.sync_sealed()
            del self._segments[0]
            segment.close()

    def _sync_active(self) -> None:
        segment = self._active
        head = segment.path.encode() + segment.head  # two segments may have the same head
        if head != self._synced_head:
            segment.sync()
            self._synced_head = head

    def _sync_names(self) -> None:
        path = self._active.path
        if self._named not in (None, path):
            with storage_errors("syncing", path):
                sync_names(Path(path).parent)
            self._named = path

    def _run(self, worker: Worker) -> None:
        interval = self._policy if isinstance(self._policy, float) else _BETWEEN_TRIMS
        trim_at = time.monotonic() + _BETWEEN_TRIMS
        while not worker.wait(min(interval, max(0.0, trim_at - time.monotonic()))):
            self._try(self._sync_in_background)
            if time.monotonic() >= trim_at:
                trim_at = time.monotonic() + _BETWEEN_TRIMS
                self._try(self.tidy)

    def _sync_in_background(self) -> None:
        try:
            with self._syncing:
                self._sync_all(active=isinstance(self._policy, float))
        except Exception as error:
            self._failure = error  # the next `sync` raises it
            raise

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s", self._active.path)


def open_log_writer(url: str, folder: Path, options: LogOptions) -> LogWriter:
    """Open a writer, plain or compressing; create the log as `options.create` says.

    :raises NotFound: there is no log at this path.
    :raises LockTimeout: another process writes to it.
    """
    opened = open_to_write(folder, options)
    is_plain = opened.settings.compress is Compression.NONE
    return (LogWriter if is_plain else CompressingLogWriter)(url, folder, options, opened)
