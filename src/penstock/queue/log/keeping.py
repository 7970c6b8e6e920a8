"""What happens to a log in the background, while it is written?"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from penstock.core.whole_files import sync_names
from penstock.core.worker import Worker
from penstock.queue.storage import no_thread, storage_errors
from penstock.queue.wide.layout import HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.queue.options import Sync
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Keeper", "Tidying", "Unsynced"]

log = logging.getLogger(__name__)

#: Retention is looked at this often (seconds).
_BETWEEN_TRIMS: Final = 60.0

assert HEADER.fields is not None
_HEAD_AT: Final = HEADER.fields["head"][1]
_BOOT_ID_AT: Final = HEADER.fields["boot_id"][1]


class Unsynced:
    """A segment that may not be on the disk yet, with a descriptor of its own."""

    def __init__(self, file: QueueFile) -> None:
        """Hold on to a segment, however soon its writer closes it.

        :raises StorageError: there is no descriptor left.
        """
        self.path = file.path
        with storage_errors("holding", file.path):
            self._descriptor = os.dup(file.descriptor)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def head(self) -> bytes:
        with storage_errors("reading", self.path):
            return os.pread(self._descriptor, 8, _HEAD_AT)

    def sync(self) -> None:
        """Return when it is on the disk.

        :raises StorageError: the device refuses.
        """
        with storage_errors("syncing", self.path):
            os.fdatasync(self._descriptor)

    def mark_synced(self) -> None:
        """Say in it that all of it is on the disk: it need not be checked after a crash."""
        with storage_errors("syncing", self.path):
            os.pwrite(self._descriptor, bytes(16), _BOOT_ID_AT)

    def close(self) -> None:
        self._close()


class Tidying(Protocol):
    """Whoever removes what a log need not keep."""

    #: Whether there is ever something to remove.
    has_limits: bool

    def __call__(self) -> None:
        """Remove it."""


class Keeper:
    """Brings messages to the disk, and calls `tidy` about once a minute.

    It has descriptors of its own, so that the writer can close a segment that is to be synced.
    """

    def __init__(self, file: QueueFile, sync: Sync, tidy: Tidying) -> None:
        """Begin with this segment.

        :raises StorageError: there is no descriptor, or no thread left.
        """
        self._policy = sync
        self.tidy = tidy
        self._active = Unsynced(file)
        self._synced_head = b""
        #: The newest segment whose name is on the disk. With `sync=none` a write does not wait for
        #: that, so whoever asks for a sync does.
        self._named = "" if sync == "none" else None
        self._sealed: deque[Unsynced] = deque()
        self._failure: Exception | None = None
        self._has_failed = False
        self._rolling = threading.Lock()
        #: Whoever syncs has it, and nobody else closes a segment. `roll` needs it not: a write
        #: does not wait for the disk.
        self._syncing = threading.Lock()
        self._worker = Worker("penstock-log", self._run, log=log)
        # Of many logs that are written now and then, each can do without until there is work.
        if isinstance(sync, float) or tidy.has_limits:
            try:
                self._worker.start()
            except RuntimeError as error:
                self._active.close()
                raise no_thread(file.path) from error

    def roll(self, following: Unsynced) -> None:
        """Go on with another segment; the one up to now gets no more messages.

        :raises StorageError: with `sync=batch`: the device refuses. It is done all the same.
        """
        with self._rolling:
            self._sealed.append(self._active)
            self._active = following
        if self._policy == "batch":
            self.sync()
        else:
            with contextlib.suppress(RuntimeError):  # no thread is left: the next sync does it
                self._worker.start()
            self._worker.wake()

    def sync(self) -> None:
        """Return when everything written up to now is on the disk.

        :raises StorageError: the device refuses, now or earlier in the background.
        """
        failure, self._failure = self._failure, None
        with self._syncing:
            self._sync_all()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End, and sync what is left unless that was never asked for. Then the log says so.

        :raises StorageError: the device refuses, now or earlier in the background.
        """
        self._worker.stop()
        try:
            if self._policy != "none" or self._failure is not None:
                self.sync()
                if self._policy != "none" and not self._has_failed:
                    self._active.mark_synced()
        finally:
            for segment in (*self._sealed, self._active):
                segment.close()
            self._sealed.clear()

    def stop(self) -> None:
        """Let the thread end; also for a writer that nobody closed."""
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
        """Sync in order, and say so in each."""
        while self._sealed:
            segment = self._sealed.popleft()
            try:
                segment.sync()
                segment.mark_synced()
            finally:
                segment.close()

    def _sync_active(self) -> None:
        with self._rolling:
            segment = self._active
        head = segment.path.encode() + segment.head  # another one may have the same
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
            self._failure = error  # for the next who asks
            raise

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s", self._active.path)
