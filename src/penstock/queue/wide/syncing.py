"""When do messages get to the disk itself, to survive a power failure?"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.retry import Backoff
from penstock.core.worker import Worker
from penstock.queue.storage import no_thread, storage_errors
from penstock.queue.wide.layout import HeaderFlag

if TYPE_CHECKING:
    from penstock.queue.options import Sync
    from penstock.queue.wide._ring import RingWriter
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Syncing"]

log = logging.getLogger(__name__)

#: `guard` of a queue that may be overwritten as a whole.
_EVERYTHING: Final = 2**64 - 1
#: While the device refuses, it is tried again after this many seconds at most.
_LONGEST_PAUSE: Final = 1.0


class Syncing:
    """Brings a queue's messages to the disk: after every call, or every few milliseconds.

    What was synced must be found after a power failure, also when the writer was overwriting by
    then. So it passes with `tail` only what the disk knows may go: messages below `guard`. A sync
    moves that on, ahead of what will be needed, and never past what an earlier one brought there.
    """

    def __init__(self, writer: RingWriter, file: QueueFile, policy: Sync) -> None:
        self._writer: RingWriter = weakref.proxy(writer)  # which has this one
        self._file = file
        self.policy: Final = policy
        #: `head` and `tail` at the last sync that was done; none yet.
        self._synced, self._freed = -1, 0
        #: How often the writer had to wait since then.
        self._overrun = 0
        self._failure: Exception | None = None
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
        """Return when everything written up to now is on the disk.

        :raises StorageError: the device refuses, now or earlier in the background.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        with self._lock:
            self._sync(self._next_guard(may_overwrite=False))

    def make_room(self) -> None:
        """Return when the disk knows that more may be overwritten.

        :raises StorageError: the device refuses.
        """
        with self._lock:
            self._overrun += 1
            if self.policy == "batch":
                self._sync(self._next_guard())
            else:
                # It goes around faster than it is synced: what was synced is overwritten anyway.
                self._sync(_EVERYTHING)

    def _next_guard(self, *, may_overwrite: bool = True) -> int:
        """Return up to where the writer may pass next; `may_overwrite`: also all of it, as before.

        Who asks for a sync is told that these messages are safe.
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
        if guard in (0, _EVERYTHING):  # there was none: from now on
            guard = max(goal, 1)
            self._store(guard)
        return max(goal, guard)

    def _sync(self, guard: int) -> None:
        head, tail = self._file.field("head"), self._file.field("tail")
        self._file.header["guard_next"] = guard
        with storage_errors("syncing", self._file.path):
            os.fdatasync(self._file.descriptor)
        self._store(guard)
        if tail > self._freed:
            self._overrun = 0
        self._synced, self._freed = head, tail

    def _store(self, guard: int) -> None:
        # The writer first: what it passed before it heard of this, `tail` says.
        self._writer._guard = guard  # noqa: SLF001 - a part of it
        self._file.header["guard"] = guard

    def _sync_in_background(self, _: Worker) -> None:
        if self._file.field("head") != self._synced:
            with self._lock:
                self._sync(self._next_guard())

    def _note_failure(self, error: Exception) -> None:
        self._failure = error  # for the next who asks

    def close(self) -> None:
        """Sync what is left, if that was asked for, and end.

        :raises StorageError: the device refuses, now or earlier in the background.
        """
        if self._worker is not None:
            self._worker.stop()
        if self.policy == "none":
            return
        self.sync()
        if HeaderFlag.MANY_WRITERS not in self._file.flags:
            # Nothing is missing, whatever becomes of the machine until there is a writer again.
            self._file.header["boot_id"] = np.void(bytes(16))
