"""Which segments of a log go, and when?"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from pydantic import BaseModel

from penstock.core.errors import DamagedQueue, NotFound
from penstock.core.whole_files import write_whole
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.freeing import remove_segment
from penstock.queue.log.segments import disk_bytes, look, numbers_of, path_of
from penstock.queue.wide.creation import boot_id
from penstock.queue.wide.layout import State

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.settings import Settings

__all__ = ["CLOCK", "CURSORS", "GROUPS", "AgeClock", "Limits", "Trimmed", "held_by", "trim"]

log = logging.getLogger(__name__)

#: The name of the file that keeps the positions of a log's readers.
CURSORS: Final = "cursors"
#: The name of the folder that keeps what its groups of readers have settled.
GROUPS: Final = "groups"
#: The name of the file that keeps what the clock was.
CLOCK: Final = "clock"

#: A clock may be corrected by so much (nanoseconds) without being asked why.
_CORRECTION: Final = 60_000_000_000
#: One that is further ahead is believed when it has been so for this time (nanoseconds).
_BELIEVED: Final = 3_600_000_000_000


class Limits(NamedTuple):
    """What may stay. Each is None for no limit."""

    #: Bytes on the disk.
    retain: int | None = None
    #: Seconds since the newest message of a segment.
    retain_age: float | None = None
    #: Messages from this one on.
    before_seq: int | None = None
    #: Messages that were appended from this moment on.
    before_ns: int | None = None


class _Reading(BaseModel):
    """What the clock was, in which run of the machine, and how long that had been running."""

    boot: str
    wall_ns: int
    running_ns: int
    #: When the clock was first seen to be ahead, by how long the machine had been running.
    ahead_since_ns: int | None = None
    #: When the machine will have been running for long enough for its clock to be set.
    unset_until_ns: int | None = None


class AgeClock:
    """The time that age is measured by. A clock that jumps ahead removes nothing.

    A clock that is a day ahead for a second makes everything a day old. How long the machine has
    been running does not jump, so it tells what the clock should be.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CLOCK
        self._last: _Reading | None = None

    def now_ns(self, *, keep: bool = True) -> int | None:
        """Return the time; None right after the machine started, when no clock can be compared.

        :param keep: whether to note it down, for those who come later
        """
        boot = boot_id().hex()
        wall, running = time.time_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        last = self._last or self._load()
        now = _Reading(boot=boot, wall_ns=wall, running_ns=running)
        found: int | None = wall
        if last is not None and last.boot != boot:
            now.unset_until_ns, found = running + _CORRECTION, None
        elif last is not None and (last.unset_until_ns or 0) > running:
            now.unset_until_ns, found = last.unset_until_ns, None
        elif last is not None:
            expected = last.wall_ns + running - last.running_ns
            if wall > expected + _CORRECTION:
                found = self._ahead(last, now, expected)
        self._last = now
        if keep:
            with contextlib.suppress(OSError):  # then the next one knows less
                write_whole(self._path, now.model_dump_json().encode() + b"\n", sync=False)
        return found

    def _ahead(self, last: _Reading, now: _Reading, expected: int) -> int:
        """Return the time, when the clock is ahead of what is expected."""
        since = now.running_ns if last.ahead_since_ns is None else last.ahead_since_ns
        is_believed = now.running_ns - since >= _BELIEVED
        if is_believed or last.ahead_since_ns is None:
            self._say(now.wall_ns - expected, is_believed=is_believed)
        if not is_believed:
            now.wall_ns, now.ahead_since_ns = expected, since
        return now.wall_ns

    def _say(self, ahead: int, *, is_believed: bool) -> None:
        log.warning(
            "%s: the clock is %s s ahead of what it was; %s",
            self._path.parent,
            f"{ahead / 1e9:,.0f}",
            "it has been so for an hour, and is believed"
            if is_believed
            else "nothing is removed for its age by that until it has been so for an hour",
        )

    def _load(self) -> _Reading | None:
        with contextlib.suppress(OSError, ValueError):
            return _Reading.model_validate_json(self._path.read_bytes())
        return None


class Trimmed(NamedTuple):
    """What went."""

    #: Segments that were removed.
    segments: int
    #: Messages that were in them.
    messages: int
    #: Bytes of the disk that they had.
    bytes: int
    #: What the log has now.
    left: int
    #: The cursor that more had to stay for, or None.
    held_by: str | None


class Held(NamedTuple):
    """The cursor that is furthest behind, of those that are waited for."""

    name: str
    seq: int


def trim(
    folder: Path,
    limits: Limits,
    settings: Settings | None,
    sizes: dict[int, int] | None = None,
    clock: AgeClock | None = None,
) -> Trimmed:
    """Remove the oldest segments, as far as the limits ask for it and no held cursor needs them.

    The newest segment stays. A log may be written to and read meanwhile. Who trims again and again
    keeps the `sizes` of what is sealed, which do not change, and the `clock`.

    :raises StorageError: the operating system refuses.
    """
    numbers = numbers_of(folder)
    sizes = _sizes(folder, numbers, {} if sizes is None else sizes)
    left = total = sum(sizes.values())
    held = None if settings is None else held_by(folder, settings)
    oldest_ns = _oldest_ns(folder, limits, clock)
    segments = messages = 0
    blocking = None
    for number, following in itertools.pairwise(numbers):
        candidate = _candidate(folder, number, following)
        if candidate is None or not _must_go(candidate, left, limits, oldest_ns):
            break
        if held is not None and held.seq < candidate.end:
            blocking = held.name
            break
        remove_segment(path_of(folder, number))
        left -= sizes[number]
        segments += 1
        messages += candidate.messages
    if segments:
        log.info("%s: %s segments with %s messages were removed", folder, segments, messages)
    return Trimmed(segments, messages, total - left, left, blocking)


def _sizes(folder: Path, numbers: list[int], known: dict[int, int]) -> dict[int, int]:
    for number in numbers:
        if number not in known:
            known[number] = disk_bytes(path_of(folder, number))
    sizes = {number: known[number] for number in numbers}
    known.clear()
    known.update((number, sizes[number]) for number in numbers[:-2])  # the others may be in work
    return sizes


class _Candidate(NamedTuple):
    """A segment that gets no more messages."""

    end: int
    newest_ns: int | None
    messages: int
    is_empty: bool


def _candidate(folder: Path, number: int, following: int) -> _Candidate | None:
    try:
        segment = look(folder, number)
    except NotFound:
        return None
    except DamagedQueue:  # nobody can tell what is in it
        with contextlib.suppress(FileNotFoundError):
            changed = path_of(folder, number).stat().st_mtime_ns
            return _Candidate(following, changed, 0, is_empty=False)
        return None
    if segment.state == State.LIVE:
        return None
    return _Candidate(segment.head, segment.newest_ns, segment.count, segment.count == 0)


def _oldest_ns(folder: Path, limits: Limits, clock: AgeClock | None) -> int | None:
    """Return the moment from which on messages stay; None: they all do."""
    oldest = limits.before_ns
    if limits.retain_age is not None:
        now = AgeClock(folder).now_ns(keep=False) if clock is None else clock.now_ns()
        if now is not None:
            oldest = max(oldest or 0, now - int(limits.retain_age * 1e9))
    return oldest


def _must_go(segment: _Candidate, total: int, limits: Limits, oldest_ns: int | None) -> bool:
    if segment.is_empty:
        return True  # somebody died while removing it
    if limits.retain is not None and total > limits.retain:
        return True
    if limits.before_seq is not None and segment.end <= limits.before_seq:
        return True
    if oldest_ns is None or segment.newest_ns is None:
        return False
    return segment.newest_ns < oldest_ns


def held_by(folder: Path, settings: Settings) -> Held | None:
    """Return the cursor that is furthest behind, of those that a log holds; None: it holds none.

    One that is not there, or was last here in an earlier log, needs everything.
    """
    names = settings.hold
    if not names:
        return None
    path = folder / CURSORS
    if not path.exists():
        return Held(names[0], 0)
    with CursorFile(str(path)) as cursors:
        found = {name: cursors.find(name) for name in names}
    places = (
        Held(name, 0 if entry is None else settings.successor(entry.epoch, entry.seq) or 0)
        for name, entry in found.items()
    )
    return min(places, key=lambda place: place.seq)
