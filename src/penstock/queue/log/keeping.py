"""What happens to a log in the background, while it is written?"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.queue.options import Sync
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Keeper"]

log = logging.getLogger(__name__)

#: Retention is looked at this often (seconds).
_BETWEEN_TRIMS: Final = 60.0

assert HEADER.fields is not None
_HEAD_AT: Final = HEADER.fields["head"][1]
_BOOT_ID_AT: Final = HEADER.fields["boot_id"][1]


class Keeper:
    """Brings messages to the disk, and calls `tidy` about once a minute.

    It has descriptors of its own, so that the writer can close a segment that is to be synced.
    """

    def __init__(self, file: QueueFile, sync: Sync, tidy: Callable[[], None]) -> None:
        self._policy = sync
        self.tidy = tidy
        self._path, self._active = file.path, os.dup(file.descriptor)
        self._synced_head = b""
        self._sealed: deque[tuple[str, int]] = deque()
        self._failure: Exception | None = None
        self._ends = False
        self._changed = threading.Condition()
        #: Whoever syncs has it. `roll` needs it not: a write does not wait for the disk.
        self._syncing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="penstock-log", daemon=True)
        self._thread.start()

    def roll(self, file: QueueFile) -> None:
        """Go on with another segment; the one up to now gets no more messages.

        :raises StorageError: with `sync=batch`: the device refuses.
        """
        with self._changed:
            self._sealed.append((self._path, self._active))
            self._path, self._active = file.path, os.dup(file.descriptor)
            self._changed.notify()
        if self._policy == "batch":
            self.sync()

    def sync(self) -> None:
        """Return when everything written up to now is on the disk.

        :raises StorageError: the device refuses, now or earlier in the background.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        with self._syncing:
            self._sync_sealed()
            self._sync_active()

    def close(self) -> None:
        """End, and sync what is left unless that was never asked for.

        :raises StorageError: the device refuses, now or earlier in the background.
        """
        self.stop()
        with self._changed:
            self._changed.notify()
        self._thread.join()
        try:
            if self._policy != "none" or self._failure is not None:
                self.sync()
        finally:
            for _, descriptor in self._sealed:
                os.close(descriptor)
            self._sealed.clear()
            os.close(self._active)

    def stop(self) -> None:
        """Let the thread end by itself, at some time."""
        self._ends = True

    def _sync_sealed(self) -> None:
        """Sync in order, and say so in each: it need not be checked after a crash."""
        while self._sealed:
            path, descriptor = self._sealed.popleft()
            try:
                with storage_errors("syncing", path):
                    os.fdatasync(descriptor)
                    os.pwrite(descriptor, bytes(16), _BOOT_ID_AT)
            finally:
                os.close(descriptor)

    def _sync_active(self) -> None:
        with self._changed:
            path, descriptor = self._path, os.dup(self._active)
        try:
            with storage_errors("syncing", path):
                head = os.pread(descriptor, 8, _HEAD_AT)
                if head != self._synced_head:
                    os.fdatasync(descriptor)
                    self._synced_head = head
        finally:
            os.close(descriptor)

    def _run(self) -> None:
        interval = self._policy if isinstance(self._policy, float) else _BETWEEN_TRIMS
        trim_at = time.monotonic() + _BETWEEN_TRIMS
        while True:
            with self._changed:
                patience = min(interval, max(0.0, trim_at - time.monotonic()))
                self._changed.wait_for(lambda: self._ends or self._sealed, patience)
            if self._ends:
                return
            self._try(self._sync_in_background)
            if time.monotonic() >= trim_at:
                trim_at = time.monotonic() + _BETWEEN_TRIMS
                self._try(self.tidy)

    def _sync_in_background(self) -> None:
        try:
            with self._syncing:
                self._sync_sealed()
                if isinstance(self._policy, float):
                    self._sync_active()
        except Exception as error:
            self._failure = error  # for the next who asks
            raise

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("%s", self._path)
