"""How are the lanes of an outbox opened, noted down and brought to the disk, together?"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

from penstock.core.whole_files import sync_files, sync_names
from penstock.dispatch.outbox.lane import Lane
from penstock.dispatch.outbox.lane_log import LaneLog
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

    from penstock.dispatch.outbox.common_log import FirstMessages
    from penstock.dispatch.outbox.lane import LaneOptions
    from penstock.dispatch.outbox.latest import Latest
    from penstock.dispatch.outbox.records import Columns
    from penstock.queue.options import Sync

__all__ = ["LABEL", "Lanes", "restore"]

_STATE: Final = "state"
_NOTES: Final = "settled"
LABEL: Final = "receiver"
#: A lane has its files open for so long after they were used (seconds).
_IDLE: Final = 5.0


class Lanes:
    """The lanes by class, and the files that they share. Whoever calls has the outbox's lock."""

    def __init__(
        self,
        folder: Path,
        options: LaneOptions,
        lock_timeout: float,
        first: FirstMessages | None = None,
    ) -> None:
        """Open those that there are.

        :param first: where the messages of an outbox without files are, until `make`
        :raises LockTimeout: another process has the outbox open.
        :raises StorageError: the operating system refuses.
        :raises DamagedQueue: a log cannot be read.
        """
        self._folder = folder
        self._options = options
        self._syncs = options.sync != "none"
        self._lanes: dict[int, Lane] = {}
        self._keyed = Keyed()
        self._noted: dict[int, tuple[int, int]] = {}
        self._findings: list[str] = []
        self._lock_timeout = lock_timeout
        #: What has to be done at the end, whatever fails.
        self._at_end = contextlib.ExitStack()
        self._first = first
        #: The same, when there are files that are still to be brought to the disk.
        self._made: FirstMessages | None = None
        self._is_new = False
        if first is not None:
            self._state = StateFile(folder / _STATE)
            for priority in first.lanes:
                lane = self._open_lane(priority)
                self._state.last_arrival = max(self._state.last_arrival, lane.last_arrival)
            return
        with storage_errors("creating", str(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        with self._owned() as undo:
            self._state = StateFile(folder / _STATE)
            self._open_state(undo)
            self._open()

    @contextlib.contextmanager
    def _owned(self) -> Iterator[contextlib.ExitStack]:
        """Be the only one who has the outbox open, from now on if all goes well."""
        with contextlib.ExitStack() as undo:
            undo.callback(WriterLock(self._folder, self._lock_timeout).close)
            undo.callback(self._suspend)
            yield undo
            self._at_end = undo.pop_all()

    def _open_state(self, undo: contextlib.ExitStack) -> None:
        # With a time between, whoever brings things to the disk does it with this file, too.
        self._is_new = self._options.sync != "batch" and self._state.is_new
        self._state.open(sync=self._options.sync == "batch")
        undo.callback(self._state.close)

    def make(self) -> None:
        """Make the files, if there are none yet; messages are written to them from now on.

        :raises StorageError: the operating system refuses; it can be tried again.
        """
        if self._first is None:
            return
        with storage_errors("creating", str(self._folder)):
            self._folder.mkdir(parents=True, exist_ok=True)
        # Synced in any case: without it nobody knows whose the folder is.
        save_notes(self._folder / LABEL, self._first.label, sync=True)
        with self._owned() as undo:
            for lane in self._lanes.values():
                lane.log.make()
                self._state.set_lane(lane.priority, lane.log.epoch, lane.settled)
            self._open_state(undo)
        self._first, self._made = None, self._first

    @property
    def is_made(self) -> bool:
        return self._first is None

    @property
    def is_to_be_made(self) -> bool:
        """Whether there are no files, and should be: what is settled is noted down in them."""
        if self._first is None:
            return False
        return self._first.has_to_go or any(lane.queued < lane.head for lane in self)

    def _open(self) -> None:
        state = self._state
        notes, damage = load_notes(self._folder / _NOTES)
        for error in filter(None, (state.damage, damage)):
            self._findings.append(f"{error}; messages come again")
        for priority in range(CLASSES):
            if state.lane(priority).epoch or self._folder_of(priority).exists():
                lane = self._open_lane(priority, notes.get(priority))
                state.last_arrival = max(state.last_arrival, lane.last_arrival)
                if lane.queued and self._syncs:
                    lane.log.sync()
                lane.log.suspend()
        if state.is_new and state.damage is None and self._lanes:
            self._findings.append("the file of the state was gone; messages come again")
        state.keep()

    def _folder_of(self, priority: int) -> Path:
        return self._folder / f"cs{priority}"

    def _open_lane(self, priority: int, notes: LaneNotes | None = None) -> Lane:
        state, folder = self._state.lane(priority), self._folder_of(priority)
        lane = Lane(
            folder, priority, self._options, state, notes or LaneNotes(), self._keyed, self._first
        )
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
        if self._first is not None and not self._first.has_room(
            sum(len(record) for own in records for record in own)
        ):
            self.make()
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
        # Without a sync, what the common log has may be there after a power failure, too.
        if self._syncs or self._made is not None:
            for lane in lanes:
                lane.log.sync()
            self._state.sync()
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
        """Keep what is known above the floors; without the lock, but not while this closes.

        :raises StorageError: there is no space; then more comes again after a crash, no more.
        """
        try:
            save_notes(self._folder / _NOTES, notes, sync=self._syncs)
        except BaseException:
            self._noted = {}  # the next time again
            raise

    def rest(self, *, at_once: bool) -> None:
        """Close the files of lanes that were not used for some time, if all is on the disk."""
        until = time.monotonic() - (0.0 if at_once else _IDLE)
        for lane in self._lanes.values():
            if lane.log.used <= until and (lane.log.is_settled or not self._syncs):
                lane.log.suspend()

    def close(self) -> None:
        """Bring everything to the disk, and let go.

        :raises StorageError: the device refuses.
        """
        try:
            if self.is_to_be_made:
                self.make()
            if self._first is None:
                self.bring_to_disk(list(self._lanes.values()))
                self.save_notes(self._notes())
        finally:
            self._at_end.close()

    def let_go(self) -> None:
        """Close all files as they are."""
        self._at_end.close()

    def discard(self) -> None:
        """Hear that nothing of the outbox is needed any more."""
        for first in filter(None, (self._first, self._made)):
            first.end()

    def _suspend(self) -> None:
        with contextlib.ExitStack() as each:
            for lane in self._lanes.values():
                each.callback(lane.log.suspend)


def restore(
    folder: Path, first: FirstMessages, segment: int, sync: Sync, *, is_begun: bool
) -> None:
    """Write messages to the files of an outbox that is not open, those that are not there.

    :param is_begun: whether it is the outbox that they were to be moved to
    :raises StorageError: the operating system refuses.
    """
    state = StateFile(folder / _STATE)
    state.open(sync=True)
    state.close()
    for priority, records in first.lanes.items():
        own = LaneLog(folder / f"cs{priority}", segment, sync)
        try:
            # After a power failure any of them may be missing, not only the last.
            known = own.payloads()
            settled = state.lane(priority).floor if is_begun else 0
            left = [each for each in records[settled:] if each[0] not in known]
            if left:
                own.write(*zip(*left, strict=True))
            own.sync()
        finally:
            own.suspend()
