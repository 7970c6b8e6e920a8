"""How are messages appended to a log?"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from penstock.core.errors import (
    DamagedQueue,
    MessageTooLarge,
    NotFound,
    PenstockError,
    StorageError,
    Unsupported,
)
from penstock.queue.liveness import LockFile
from penstock.queue.log.creation import open_to_write
from penstock.queue.log.freeing import seal
from penstock.queue.log.keeping import Keeper, Unsynced
from penstock.queue.log.retention import AgeClock, Limits, trim
from penstock.queue.log.segments import begin_segment, look, numbers_of, path_of
from penstock.queue.options import Creation
from penstock.queue.wide import _ring
from penstock.queue.wide.compressed import CompressingWriter
from penstock.queue.wide.compression import Compression
from penstock.queue.wide.layout import slots_of
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.queue_file import protect
from penstock.queue.wide.space import Space
from penstock.queue.wide.writer import WideWriter

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.creation import Opened
    from penstock.queue.log.options import LogOptions
    from penstock.queue.log.recovery import Recovery
    from penstock.queue.log.settings import Settings
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["LogWriter", "open_log_writer"]

log = logging.getLogger(__name__)


class LogWriter(WideWriter):
    """Appends to a log: to its newest segment, and to a new one when that is full.

    A call goes on in the new segment where it was; what is written is as fast as in a queue.
    """

    def __init__(self, url: str, folder: Path, options: LogOptions, opened: Opened) -> None:
        self._folder = folder
        self._log_options = options
        self._settings = opened.settings
        self._log_lock = opened.lock
        self._keeper: Keeper | None = None
        #: Segments that are to be sealed.
        self._full: list[tuple[QueueFile, LockFile]] = []
        #: What was found when the log was opened, and what was done about it.
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
        self._tidying = _Tidying(self._folder, self._settings)
        self._keeper = Keeper(self._file, self._options.sync, self._tidying)
        weakref.finalize(self, self._keeper.stop).atexit = False
        self._retain()

    def _last_created_ns(self) -> int:
        """Return when the last message of the log was appended, also when this segment has none."""
        for number in reversed(numbers_of(self._folder)):
            with contextlib.suppress(NotFound, DamagedQueue):
                newest = look(self._folder, number).newest_ns
                if newest is not None:
                    return newest
        return self._created_ns

    # --- a new segment ---------------------------------------------------------------------------

    def _make_room(self, code: int, size: int) -> None:
        if code == _ring.FULL and not self._file.is_named():
            super()._look()  # its log was removed
        elif code == _ring.FULL:
            self._roll()
        else:
            super()._make_room(code, size)

    def _roll(self) -> None:
        """Go on in a new segment, and seal the one up to now.

        The new one is there before the old one is sealed: whoever finds it sealed finds the next.
        Whatever can be refused comes before the change.

        :raises StorageError: there is no space, or no descriptor; the old one is as it was.
        """
        assert self._keeper is not None
        before = self._file, self._locks, self._space
        first, created_ns, sync = self._head, self._created_ns, self._options.sync
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
            self._file, self._locks, self._space = new, locks, space
            undo.pop_all()
        try:
            self._resume()
            self._created_ns = created_ns  # it never goes back, whatever the clock does
            self._space.begin()
            self._keeper.roll(unsynced)
        finally:
            self._seal_full()
        self._retain()

    def _stay(self, before: tuple[QueueFile, LockFile, Space], path: Path) -> None:
        """Go on in the segment up to now: refused, or a signal came at whatever moment.

        What fits into it gets the number that the new one is named by. So when that cannot be
        removed, or the core may be in it, nothing more can be written.
        """
        self._file, self._locks, self._space = before
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
        while self._full:  # more than one, if a signal came before
            file, locks = self._full[0]
            seal(file)
            del self._full[0]
            locks.close()
            file.close()

    def _retain(self) -> None:
        """Remove what may go. That it cannot be removed is no reason not to write."""
        assert self._keeper is not None
        try:
            self._keeper.tidy()
        except PenstockError:
            log.warning("%s: old segments cannot be removed", self.url, exc_info=True)

    def _look(self, *_: int) -> None:
        """Look around, once a second at most."""
        super()._look()
        age = self._settings.retain_age
        if age is None or self._file.field("head") == self._file.field("first_seq"):
            return
        slots = slots_of(self._file.mapping, self._file.geometry)
        oldest = int(slots[self._file.field("first_seq") % len(slots)]["created_ns"])
        if oldest < time.time_ns() - int(age * 1e9) and self._is_past(oldest, age):
            # It fills slowly, and would keep old messages for long.
            try:
                self._roll()
            except PenstockError:
                log.warning("%s: no new segment can be made", self.url, exc_info=True)

    def _is_past(self, created_ns: int, age: float) -> bool:
        now = self._tidying.clock.now_ns()
        return now is not None and created_ns < now - int(age * 1e9)

    def _go_over(self) -> None:
        """Make the log again, which was removed, and go on in it."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_up)
            self._let_go()
            options = self._log_options.model_copy(update={"create": Creation.MISSING})
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

    # --- as a queue, but for the names ------------------------------------------------------------

    def _too_large(self, size: int) -> MessageTooLarge:
        return MessageTooLarge(
            size,
            self._file.geometry.buffer_size,
            hint="create a log with larger segments: segment=…",
        )

    def _sync(self, *_: int) -> None:
        if self._keeper is not None:
            self._keeper.sync()

    def flush(self) -> None:
        """Bring everything written so far to the disk, unless the policy is `sync=none`."""
        self._check_open()
        if self._options.sync != "none":
            self.sync()

    def _let_go(self) -> None:
        keeper, self._keeper = self._keeper, None
        with contextlib.ExitStack() as undo:
            undo.callback(self._log_lock.close)
            if keeper is not None:
                undo.callback(keeper.close)
            undo.callback(super()._let_go)
            self._seal_full()


class CompressingLogWriter(LogWriter, CompressingWriter):
    """Appends to a log whose payloads are compressed."""


class _Tidying:
    """Applies a log's own retention, in the writer's thread and in the background."""

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


def open_log_writer(url: str, folder: Path, options: LogOptions) -> LogWriter:
    """Open a writer, of the kind that the log needs; make the log if that is asked for.

    :raises NotFound: there is no such log.
    :raises LockTimeout: another process writes to it.
    """
    opened = open_to_write(folder, options)
    is_plain = opened.settings.compress is Compression.NONE
    return (LogWriter if is_plain else CompressingLogWriter)(url, folder, options, opened)
