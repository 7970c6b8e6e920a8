"""How is the outbox of an earlier release taken over, which had a log for each priority?"""

from __future__ import annotations

import contextlib
import heapq
import logging
import shutil
import struct
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue, StorageError
from penstock.core.whole_files import sync_files, sync_names
from penstock.dispatch.outbox.log import CLASSES, OutboxLog, decode, with_class
from penstock.dispatch.outbox.state import (
    BLOCK,
    Floor,
    Reason,
    StateFile,
    newest_slot,
    read_notes,
    where_to_go_on,
)
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["take_over"]

log = logging.getLogger(__name__)

_VERSION: Final = 1
#: The position of the version in the files of state and notes, after the magic.
_VERSION_AT: Final = slice(8, 12)
#: For each class: epoch, first, floor, and the counts below the floor by reason.
_LANE_WORDS: Final = 3 + len(Reason)
_WORDS: Final = 2 + CLASSES * _LANE_WORDS
#: In the notes: class, epoch, number of blocks with marks, number of blocks with contents.
_LANE: Final = struct.Struct("<QQQQ")
_NUMBER: Final = struct.Struct("<Q")
_CONTENTS: Final = struct.Struct("<QQQ")
_AT_ONCE: Final = 512
#: Number of findings kept.
_FINDINGS: Final = 100


class _Notes(NamedTuple):
    """The settled messages of a lane above its floor."""

    epoch: int
    #: The reason of each message by block; 0: not settled.
    marks: dict[int, bytes]


def take_over(folder: Path, segment: int) -> list[str]:
    """Move the queued messages from an earlier release's logs to one log; return the faults found.

    Atomic: after a crash either the old or the new files count, as the version of the state says.

    :raises Unsupported: a newer Penstock wrote it.
    :raises StorageError: the operating system refuses; the next call starts again, or goes on.
    """
    with storage_errors("opening", str(folder)):
        logs = {p: path for p in range(CLASSES) if (path := folder / f"cs{p}").exists()}
    state, new, moving = folder / "state", folder / "log", folder / "log.new"
    if not logs and not moving.exists() and _version(state) != _VERSION:
        return []
    with storage_errors("taking over", str(folder)):
        if moving.exists():
            if _version(state) > _VERSION:
                moving.rename(new)
                sync_names(folder)
            else:
                shutil.rmtree(moving)
    findings: list[str] = []
    if not new.exists():
        try:
            findings = _Move(folder, logs, moving, segment).run()
        except StorageError:
            # With the new state in place, as when only its name was not synced, the new log counts.
            if _version(state) <= _VERSION:
                shutil.rmtree(moving, ignore_errors=True)
            raise
        with storage_errors("taking over", str(folder)):
            moving.rename(new)
            sync_names(folder)
    with storage_errors("taking over", str(folder)):
        if _version(folder / "settled") == _VERSION:
            (folder / "settled").unlink()
        for path in logs.values():
            shutil.rmtree(path)
    return findings


def _version(path: Path) -> int:
    with storage_errors("reading", str(path)):
        try:
            return int.from_bytes(path.read_bytes()[_VERSION_AT], "little")
        except FileNotFoundError:
            return 0


class _Move:
    """Merges the queued messages of several logs into one, in order of arrival."""

    def __init__(self, folder: Path, logs: dict[int, Path], to: Path, segment: int) -> None:
        self._folder = folder
        self._logs = logs
        self._to = to
        self._segment = segment
        self._below = [0] * (len(Reason) + 1)
        self._findings: list[str] = []

    def run(self) -> list[str]:
        last_arrival, floors = self._floors()
        notes = self._notes()
        with contextlib.ExitStack() as stack:
            lanes = []
            for priority, path in self._logs.items():
                lane = OutboxLog(path, self._segment, "none")
                stack.callback(lane.suspend)
                lanes.append(self._queued(priority, lane, floors[priority], notes.get(priority)))
            own = OutboxLog(self._to, self._largest_segment(), "none")
            stack.callback(own.suspend)
            some: list[tuple[bytes, int]] = []
            for arrival, record, kind in heapq.merge(*lanes, key=itemgetter(0)):
                last_arrival = max(last_arrival, arrival)
                some.append((record, kind))
                if len(some) == _AT_ONCE:
                    own.write(*zip(*some, strict=True))
                    some.clear()
            if some:
                own.write(*zip(*some, strict=True))
            own.sync()
        with storage_errors("syncing", str(self._to)):
            sync_files(self._to)
            sync_names(self._folder)
        state = StateFile(self._folder / "state", anew=True)
        state.last_arrival = last_arrival
        state.set_floor(own.epoch, 0, self._below)
        state.write(sync=True)
        log.info("%s: %d messages are in one log now", self._folder, own.head)
        return self._findings[:_FINDINGS]

    def _largest_segment(self) -> int:
        """Return a segment size that fits every message."""
        with storage_errors("opening", str(self._folder)):
            files = [file for path in self._logs.values() for file in path.glob("*.fmq")]
            return max([self._segment, *(file.stat().st_size for file in files)])

    def _floors(self) -> tuple[int, list[Floor]]:
        """Return the largest arrival number, and the floor of each class."""
        words = [0] * _WORDS
        path = self._folder / "state"
        with storage_errors("opening", str(path)):
            is_there = path.exists()
        try:
            if is_there:
                words = memoryview(newest_slot(path, _VERSION, _WORDS)).cast("Q").tolist()
        except DamagedQueue as error:
            self._findings.append(f"{error}; messages come again")
        starts = range(2, _WORDS, _LANE_WORDS)
        lanes = [words[at : at + _LANE_WORDS] for at in starts]
        for own in lanes:
            for reason in Reason:
                self._below[reason] += own[2 + reason]
        return words[1], [Floor(own[0], own[2], [0, *own[3:]]) for own in lanes]

    def _notes(self) -> dict[int, _Notes]:
        path = self._folder / "settled"
        try:
            body = read_notes(path, _VERSION)
            return {} if body is None else _unpack(body)
        except DamagedQueue as error:
            self._findings.append(f"{error}; messages come again")
        except struct.error as error:
            self._findings.append(f"{path}: {error}; messages come again")
        return {}

    def _queued(
        self, priority: int, lane: OutboxLog, floor: Floor, notes: _Notes | None
    ) -> Iterator[tuple[int, bytes, int]]:
        """Yield arrival number, record and type of unsettled messages; count the settled ones."""
        below = self._below
        marks, what = where_to_go_on(floor, lane)
        if what:
            self._findings.append(f"cs{priority}: {what}")
            below[Reason.DAMAGED] += marks.below[Reason.DAMAGED] - floor.below[Reason.DAMAGED]
        known = None if notes is None else lane.successor(notes.epoch, lane.head)
        at = marks.floor
        while at < lane.head:
            messages, end = lane.read("any", at, min(_AT_ONCE, lane.head - at))
            found = {message.seq: message for message in messages}
            for seq in range(at, end):
                if notes is not None and known is not None and seq < known:
                    block = notes.marks.get(seq // BLOCK)
                    if block is not None and (reason := block[seq % BLOCK]):
                        below[reason] += 1
                        continue
                message = found.get(seq)
                item = None if message is None else decode(message, {})
                if item is None or message is None:
                    below[Reason.DAMAGED] += 1
                    self._findings.append(f"cs{priority}: message {seq} is damaged, or not there")
                else:
                    yield item.arrival, with_class(message.payload, priority), message.type
            at = end


def _unpack(body: memoryview) -> dict[int, _Notes]:
    lanes: dict[int, _Notes] = {}
    at = 0
    while at < len(body):
        priority, epoch, marked, contents = _LANE.unpack_from(body, at)
        at += _LANE.size
        notes = lanes[priority] = _Notes(epoch, {})
        for _ in range(marked):
            (number,) = _NUMBER.unpack_from(body, at)
            at += _NUMBER.size
            notes.marks[number] = _reasons(body[at : at + BLOCK])
            at += BLOCK
        at += contents * _CONTENTS.size
    return lanes


def _reasons(marks: Sequence[int]) -> bytes:
    if len(marks) < BLOCK or max(marks) > max(Reason):
        raise struct.error("the notes have marks that are none")
    return bytes(marks)
