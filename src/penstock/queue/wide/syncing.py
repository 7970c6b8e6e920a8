"""When do messages get to the disk itself, to survive a power failure?"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from penstock.queue.storage import no_thread, storage_errors

if TYPE_CHECKING:
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Syncing"]

log = logging.getLogger(__name__)


class Syncing:
    """Brings a queue's messages to the disk: after every call, or every few milliseconds."""

    def __init__(self, file: QueueFile, policy: str | float) -> None:
        self._file = file
        self._synced = -1
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if isinstance(policy, float):
            self._thread = threading.Thread(
                target=self._run, args=(policy,), name="penstock-sync", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError as error:
                raise no_thread(file.path) from error

    @staticmethod
    def sync_file(file: QueueFile) -> None:
        """Return when everything written up to now is on the disk.

        :raises StorageError: the device refuses.
        """
        with storage_errors("syncing", file.path):
            os.fdatasync(file.descriptor)

    def sync(self) -> None:
        """Sync now, or raise what an earlier sync in the background met."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self.sync_file(self._file)

    def _run(self, interval: float) -> None:
        while not self._stop.wait(interval):
            head = self._file.field("head")
            if head == self._synced:
                continue
            try:
                self.sync_file(self._file)
                self._synced = head
            except Exception as error:
                log.exception("%s", self._file.path)
                self._failure = error

    def close(self) -> None:
        """Sync what is left, and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.sync()
