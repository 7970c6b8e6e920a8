"""How are the lanes of an outbox opened, noted down and brought to the disk, together?"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from penstock.core.whole_files import sync_files, sync_names
from penstock.dispatch.outbox.lane import Lane
from penstock.dispatch.outbox.latest import Keyed
from penstock.dispatch.outbox.records import CLASSES, encode
from penstock.dispatch.outbox.settled import BLOCK
from penstock.dispatch.outbox.sidecar import LaneNotes, load_notes, pack_notes, save_notes
from penstock.dispatch.outbox.state_file import StateFile
from penstock.queue.log.locking import WriterLock
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from penstock.dispatch.outbox.lane import LaneOptions
    from penstock.dispatch.outbox.latest import Latest
    from penstock.dispatch.outbox.records import Columns

__all__ = ["Lanes"]

_STATE: Final = "state"
_NOTES: Final = "settled"
#: A lane in which nothing is queued has its files open for so long (seconds).
_IDLE: Final = 30.0


class Lanes:
    """The lanes by class, and the files that they share. Whoever calls has the outbox's lock."""

    def __init__(self, folder: Path, options: LaneOptions, lock_timeout: float) -> None:
        """Open those that there are.

        :raises LockTimeout: another process has the outbox open.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: a log cannot be read.
        """
        self._folder = folder
        self._options = options
        self._syncs = options.sync != "none"
        self._lanes: dict[int, Lane] = {}
        self._keyed = Keyed()
        #: For each lane its head, and since when that is the same.
        self._used: dict[int, tuple[int, float]] = {}
        self._noted: dict[int, tuple[int, int]] = {}
        self._findings: list[str] = []
        with storage_errors("creating", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo:
            owner = WriterLock(folder, lock_timeout)
            undo.callback(owner.close)
            # With a time between, whoever brings things to the disk does it with these files, too.
            self._state = StateFile(folder / _STATE, sync=options.sync == "batch")
            self._is_new = isinstance(options.sync, float) and self._state.is_new
            undo.callback(self._state.close)
            undo.callback(self._suspend)
            self._open()
            #: What has to be done at the end, whatever fails.
            self._at_end = undo.pop_all()

    def _open(self) -> None:
        state = self._state
        notes, damage = load_notes(self._folder / _NOTES)
        for error in filter(None, (state.damage, damage)):
            self._findings.append(f"{error}; messages come again")
        for priority in range(CLASSES):
            if state.lane(priority).epoch or self._folder_of(priority).exists():
                lane = self._open_lane(priority, notes.get(priority))
                state.last_arrival = max(state.last_arrival, lane.last_arrival)
                if not lane.queued:
                    lane.log.suspend()
        if state.is_new and state.damage is None and self._lanes:
            self._findings.append("the file of the state was gone; messages come again")
        state.keep()

    def _folder_of(self, priority: int) -> Path:
        return self._folder / f"cs{priority}"

    def _open_lane(self, priority: int, notes: LaneNotes | None = None) -> Lane:
        state, folder = self._state.lane(priority), self._folder_of(priority)
        lane = Lane(folder, priority, self._options, state, notes or LaneNotes(), self._keyed)
        self._lanes[priority] = lane
        self._state.set_lane(priority, lane.log.epoch, lane.settled)
        return lane

    def __iter__(self) -> Iterator[Lane]:
        """Yield them, the lowest class first."""
        return (lane for _, lane in sorted(self._lanes.items()))

    def of(self, priority: int) -> Lane | None:
        """Return the lane of a class; None: there never was a message of it."""
        return self._lanes.get(priority)

    @property
    def findings(self) -> list[str]:
        """What was wrong, and what was done about it."""
        return self._findings + [what for lane in self for what in lane.findings]

    @property
    def last_arrival(self) -> int:
        return self._state.last_arrival

    def held(self) -> tuple[int, int]:
        """Return the messages that have room here, and their bytes."""
        messages = size = 0
        for lane in self._lanes.values():
            messages += lane.queued - len(lane.leaving)
            size += lane.bytes - sum(lane.leaving.values())
        return messages, size

    # --- in -------------------------------------------------------------------------------------

    def store(self, columns: Columns, now_ms: int, key: int | None = None) -> None:
        """Append messages to their lanes; return when they are stored.

        :raises ValueError: a number does not fit; none is stored.
        :raises StorageError: there is no space; some may be stored.
        """
        columns = columns._replace(arrivals=self._numbered(columns.arrivals))
        classes = set(columns.priorities)
        parts = [columns] if len(classes) == 1 else [columns.of_class(each) for each in classes]
        records = [encode(part, now_ms, key) for part in parts]
        try:
            for part, own in zip(parts, records, strict=True):
                self._lane(part.priorities[0]).append(part, own, now_ms, key)
        finally:
            self._state.keep()

    def in_the_way(self, key: int, most: int) -> tuple[Lane, Latest] | None:
        """Return the oldest message of a key that waits, and its lane, if so many do."""
        lanes = self._lanes

        def is_queued(message: Latest) -> bool:
            return message.seq not in lanes[message.priority].settled

        self._keyed.tidy(self.held()[0], is_queued)
        oldest = self._keyed.oldest_above(
            key, most, is_queued, lambda it: lanes[it.priority].is_waiting(it.seq)
        )
        return None if oldest is None else (lanes[oldest.priority], oldest)

    def _lane(self, priority: int) -> Lane:
        return self._lanes.get(priority) or self._open_lane(priority)

    def _numbered(self, arrivals: Sequence[int]) -> Sequence[int]:
        """Give an arrival number to those that have none."""
        last = self._state.last_arrival
        if not any(arrivals):
            arrivals = range(last + 1, last + 1 + len(arrivals))
            last = arrivals[-1]
        elif all(arrivals):
            last = max(last, *arrivals)
        else:
            given, arrivals = arrivals, []
            for number in given:
                arrivals.append(number or last + 1)
                last = max(last, arrivals[-1])
        self._state.last_arrival = last
        return arrivals

    def note(self, lanes: Iterable[Lane]) -> None:
        """Keep the floors of these lanes: they outlive this process."""
        for lane in lanes:
            self._state.set_lane(lane.priority, lane.log.epoch, lane.settled)
        self._state.keep()

    # --- upkeep ---------------------------------------------------------------------------------

    def new_notes(self) -> bytes | None:
        """Return what there is to note down about messages above the floors; None: nothing new."""
        states = {
            lane.priority: (lane.settled.changes, lane.head // BLOCK if lane.queued else 0)
            for lane in self._lanes.values()
        }
        if states == self._noted:
            return None
        self._noted = states
        return self._notes()

    def _notes(self) -> bytes:
        return pack_notes({lane.priority: lane.notes() for lane in self._lanes.values()})

    def bring_to_disk(self, lanes: Sequence[Lane]) -> None:
        """Bring all that is written to the disk; without the lock, but not while this closes.

        :raises StorageError: the device refuses.
        """
        if self._syncs:
            for lane in lanes:
                lane.log.sync()
            self._state.sync()
            if self._is_new:
                with storage_errors("syncing", str(self._folder)):
                    sync_files(self._folder)
                    sync_names(self._folder)
                    sync_names(self._folder.parent)
                self._is_new = False

    def save_notes(self, notes: bytes) -> None:
        """Keep what is known above the floors; without the lock, but not while this closes.

        :raises StorageError: there is no space; then more comes again after a crash, no more.
        """
        try:
            save_notes(self._folder / _NOTES, notes, sync=self._syncs)
        except BaseException:
            self._noted = {}  # the next time again
            raise

    def rest(self) -> None:
        """Close the files of lanes that were not used for some time."""
        now = time.monotonic()
        for lane in self._lanes.values():
            head, since = self._used.get(lane.priority, (-1, now))
            if lane.queued or head != lane.head:
                self._used[lane.priority] = lane.head, now
            elif lane.log.is_open and now - since >= _IDLE:
                lane.log.suspend()

    def close(self) -> None:
        """Bring everything to the disk, and let go.

        :raises StorageError: the device refuses.
        """
        with self._at_end:
            self.bring_to_disk(list(self._lanes.values()))
            self.save_notes(self._notes())

    def let_go(self) -> None:
        """Close all files as they are."""
        self._at_end.close()

    def _suspend(self) -> None:
        with contextlib.ExitStack() as each:
            for lane in self._lanes.values():
                each.callback(lane.log.suspend)
