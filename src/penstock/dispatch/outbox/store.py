"""How are the files of an outbox made, kept and brought to the disk?"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PenstockError
from penstock.core.whole_files import sync_files, sync_names
from penstock.core.worker import Worker
from penstock.dispatch.outbox.backlog import Backlog
from penstock.dispatch.outbox.log import OutboxLog
from penstock.dispatch.outbox.migration import take_over
from penstock.dispatch.outbox.state import (
    BLOCK,
    Notes,
    StateFile,
    load_notes,
    pack_notes,
    save_notes,
)
from penstock.queue.log.writer_lock import WriterLock
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.dispatch.outbox.backlog import BacklogOptions
    from penstock.dispatch.outbox.log import FirstMessages
    from penstock.dispatch.outbox.outbox import Outbox
    from penstock.queue.options import Sync

__all__ = ["LABEL", "Store", "look_after", "restore"]

log = logging.getLogger(__name__)

_LOG: Final = "log"
_STATE: Final = "state"
_NOTES: Final = "settled"
LABEL: Final = "receiver"
#: A log closes its files after this idle time (seconds).
_IDLE: Final = 5.0


class Store:
    """The log, the state and the notes of an outbox. The caller holds the outbox's lock."""

    def __init__(
        self,
        folder: Path,
        options: BacklogOptions,
        lock_timeout: float,
        first: FirstMessages | None = None,
    ) -> None:
        """Open the files; with `first`, create none until `make`.

        :param first: the messages of an outbox that has no files yet
        :raises LockTimeout: another process has the outbox open.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: the log cannot be read.
        """
        self._folder = folder
        self._options = options
        self._syncs = options.sync != "none"
        #: What the saved notes are of, and those that `new_notes` returned last.
        self._noted = self._noting = (-1, -1)
        self._findings: list[str] = []
        self._lock_timeout = lock_timeout
        #: Callbacks that `close` runs in any case.
        self._at_end = contextlib.ExitStack()
        #: The messages of an outbox that has no files yet; None: it has files.
        self.first = first
        #: The same after `make`, until the new files are synced.
        self._made: FirstMessages | None = None
        self._is_new = False
        if first is not None:
            self.state = StateFile(folder / _STATE)
            self._open_backlog(Notes())
            self._resume()
            return
        with storage_errors("creating", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        with self._owned() as undo:
            self._findings += take_over(folder, options.segment)
            self.state = StateFile(folder / _STATE)
            self._open_state(undo)
            self._open(undo)

    @contextlib.contextmanager
    def _owned(self) -> Iterator[contextlib.ExitStack]:
        """Lock the outbox against other processes: until `close`, or the body raises."""
        with contextlib.ExitStack() as undo:
            undo.callback(WriterLock(self._folder, self._lock_timeout).close)
            yield undo
            self._at_end = undo.pop_all()

    def _open_state(self, undo: contextlib.ExitStack) -> None:
        # If `sync` is a time, `bring_to_disk` syncs the new file.
        self._is_new = self._options.sync != "batch" and self.state.is_new
        self.state.open(sync=self._options.sync == "batch")
        undo.callback(self.state.close)

    def _open(self, undo: contextlib.ExitStack) -> None:
        state = self.state
        notes, damage = load_notes(self._folder / _NOTES)
        for error in filter(None, (state.damage, damage)):
            self._findings.append(f"{error}; messages come again")
        was_there = (self._folder / _LOG).exists()
        backlog = self._open_backlog(notes)
        undo.callback(backlog.log.suspend)
        self._resume()
        if backlog.queued and self._syncs:
            backlog.log.sync()
        backlog.log.suspend()
        if state.is_new and state.damage is None and was_there:
            self._findings.append("the file of the state was gone; messages come again")
        state.keep()

    def _open_backlog(self, notes: Notes) -> Backlog:
        log = self._folder / _LOG
        self.backlog = Backlog(log, self._options, self.state.floor, notes, self.first)
        return self.backlog

    def _resume(self) -> None:
        """Go on from where the backlog is."""
        self.state.last_arrival = max(self.state.last_arrival, self.backlog.last_arrival)
        self.backlog.save_floor(self.state)

    def make(self) -> None:
        """Create the files if none exist; from now on messages are written to them.

        :raises StorageError: the operating system refuses; the call can be repeated.
        """
        if self.first is None:
            return
        with storage_errors("creating", str(self._folder)):
            self._folder.mkdir(parents=True, exist_ok=True)
        # Always synced: only the label says which receiver owns the folder.
        save_notes(self._folder / LABEL, self.first.label, sync=True)
        with self._owned() as undo:
            undo.callback(self.backlog.log.suspend)
            self.backlog.log.make()
            self.backlog.save_floor(self.state)
            self._open_state(undo)
        self.first, self._made = None, self.first

    @property
    def is_to_be_made(self) -> bool:
        """Whether files are missing and needed, for example because a message was settled."""
        if self.first is None:
            return False
        return self.first.has_to_go or self.backlog.queued < self.backlog.log.head

    @property
    def findings(self) -> list[str]:
        """Faults found in the files, and how each was handled."""
        return self._findings + self.backlog.findings

    # --- upkeep ---------------------------------------------------------------------------------

    def new_notes(self) -> bytes | None:
        """Return the encoded notes if they changed since they were saved, else None."""
        backlog = self.backlog
        known = (backlog.marks.changes, backlog.marks.head // BLOCK if backlog.queued else 0)
        if known == self._noted:
            return None
        self._noting = known
        return pack_notes(backlog.notes())

    def bring_to_disk(self) -> None:
        """Sync all files. Needs no lock, but must not run during `close`.

        :raises StorageError: the device refuses.
        """
        # Also without `sync`: the common log gives up its copy below.
        if self._syncs or self._made is not None:
            self.backlog.log.sync()
            self.state.sync()
            if self._is_new:
                with storage_errors("syncing", str(self._folder)):
                    sync_files(self._folder)
                    sync_names(self._folder)
                    sync_names(self._folder.parent)
                self._is_new = False
        if self._made is not None:
            self._made.end()
            self._made = None

    def save_notes(self, notes: bytes) -> None:
        """Save the notes that `new_notes` returned. Needs no lock, but must not run during `close`.

        :raises StorageError: the disk is full; the only effect is more redelivery after a crash.
        """
        save_notes(self._folder / _NOTES, notes, sync=self._syncs)
        self._noted = self._noting

    def rest(self, *, at_once: bool) -> None:
        """Close the files of the log if it is idle (or `at_once`) and synced."""
        until = time.monotonic() - (0.0 if at_once else _IDLE)
        own = self.backlog.log
        if own.used <= until and (own.is_settled or not self._syncs):
            own.suspend()

    def close(self) -> None:
        """Sync and close all files.

        :raises StorageError: the device refuses.
        """
        try:
            if self.is_to_be_made:
                self.make()
            if self.first is None:
                self.bring_to_disk()
                self.save_notes(pack_notes(self.backlog.notes()))
        finally:
            self._at_end.close()

    def let_go(self) -> None:
        """Close all files without syncing."""
        self._at_end.close()

    def discard(self) -> None:
        """Drop the outbox's entries in the common log."""
        for first in filter(None, (self.first, self._made)):
            first.end()


def restore(
    folder: Path, first: FirstMessages, segment: int, sync: Sync, *, is_begun: bool
) -> None:
    """Write the missing messages of `first` to the files of an outbox that is not open.

    :param is_begun: whether the folder belongs to the outbox of `first`
    :raises StorageError: the operating system refuses.
    """
    take_over(folder, segment)
    state = StateFile(folder / _STATE)
    state.open(sync=True)
    state.close()
    own = OutboxLog(folder / _LOG, segment, sync)
    try:
        # After a power failure any message may be missing, not only the last ones.
        known = own.payloads()
        settled = state.floor.floor if is_begun else 0
        left = [each for each in first.records[settled:] if each[0] not in known]
        if left:
            own.write(*zip(*left, strict=True))
        own.sync()
    finally:
        own.suspend()


#: Longest pause of the upkeep thread (seconds).
_LONGEST_PAUSE: Final = 1.0
#: Time for creating files in one round (seconds); the rest waits for the next round.
_LONGEST_MAKING: Final = 0.25


class _Upkeep:
    """One thread that tends all open outboxes; it ends with the last of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: weakref.WeakKeyDictionary[Outbox, tuple[float, float]] = (
            weakref.WeakKeyDictionary()
        )
        self._worker: Worker | None = None

    def add(self, outbox: Outbox, interval: float) -> None:
        with self._lock:
            self._due[outbox] = (time.monotonic() + interval, interval)
            if self._worker is None or not self._worker.is_alive:
                self._worker = Worker("outboxes", self._run, log=log, restart=True).start()
            self._worker.wake()

    def _run(self, worker: Worker) -> None:
        while (pause := self._work()) is not None:
            worker.wait(pause)

    def _work(self) -> float | None:
        """Tend the outboxes that are due; return the pause, or None if no outbox is open."""
        now = time.monotonic()
        with self._lock:
            for outbox in list(self._due):
                if outbox.is_closed:
                    del self._due[outbox]
            if not self._due:
                self._worker = None
                return None
            due = [outbox for outbox, (at, _) in self._due.items() if at <= now]
            # Outboxes without files come last: their messages are safe in the common log.
            due.sort(key=lambda outbox: outbox.is_to_be_made)
        for outbox in due:
            began = time.monotonic()
            if outbox.is_to_be_made and began - now >= _LONGEST_MAKING:
                break
            with self._lock:
                interval = self._due[outbox][1]
                self._due[outbox] = (began + interval, interval)
            try:
                outbox.tend()
            except PenstockError as error:
                log.warning("%s: it could not be brought to the disk: %s", outbox.folder, error)
            except Exception:
                log.exception("%s: it could not be brought to the disk", outbox.folder)
        del due
        with self._lock:
            soonest = min((at for at, _ in self._due.values()), default=now)
        return min(max(0.0, soonest - time.monotonic()), _LONGEST_PAUSE)


_upkeep = _Upkeep()


def look_after(outbox: Outbox, interval: float) -> None:
    """Call `tend` of an outbox every `interval` seconds until it is closed."""
    _upkeep.add(outbox, interval)
