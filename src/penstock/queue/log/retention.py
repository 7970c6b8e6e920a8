"""Which segments of a log go, and when?"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue, NotFound
from penstock.core.whole_files import write_whole
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.segments import disk_bytes, look, numbers_of, path_of, remove_segment
from penstock.queue.wide.file import boot_id
from penstock.queue.wide.layout import State

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.settings import Settings

__all__ = ["CLOCK", "CURSORS", "GROUPS", "AgeClock", "Limits", "Trimmed", "held_by", "trim"]

log = logging.getLogger(__name__)

#: File of the positions of a log's readers.
CURSORS: Final = "cursors"
#: Directory of the states of a log's groups.
GROUPS: Final = "groups"
#: File of the last clock reading.
CLOCK: Final = "clock"

#: Forward step of the wall clock (nanoseconds) that is accepted at once.
_CORRECTION: Final = 60_000_000_000
#: A larger step is accepted after it has lasted this long (nanoseconds).
_BELIEVED: Final = 3_600_000_000_000


class Limits(NamedTuple):
    """Retention limits; None: no limit."""

    #: Most bytes on disk.
    retain: int | None = None
    #: Greatest age (seconds) of a segment's newest message.
    retain_age: float | None = None
    #: Keep messages from this number on.
    before_seq: int | None = None
    #: Keep messages appended from this time on.
    before_ns: int | None = None


@dataclass
class _Reading:
    """A reading of the wall clock, with the boot id and the time since boot."""

    boot: str
    wall_ns: int
    running_ns: int
    #: Time since boot when the wall clock was first seen ahead.
    ahead_since_ns: int | None = None
    #: Time since boot until which the wall clock may not be set yet.
    unset_until_ns: int | None = None


class AgeClock:
    """The clock for the age of messages, protected against jumps of the wall clock.

    A wall clock that is a day ahead for a second would expire a day of messages. The time since
    boot does not jump, so it predicts the wall clock.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CLOCK
        self._last: _Reading | None = None

    def now_ns(self, *, keep: bool = True) -> int | None:
        """Return the time; None soon after boot, while the wall clock cannot be verified.

        :param keep: save the reading for later processes
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
            with contextlib.suppress(OSError):  # the reading is optional
                text = json.dumps(asdict(now)).encode() + b"\n"
                write_whole(self._path, text, sync=False, as_folder=True)
        return found

    def _ahead(self, last: _Reading, now: _Reading, expected: int) -> int:
        """Return the time to use when the wall clock is ahead of `expected`."""
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
        with contextlib.suppress(OSError, TypeError, ValueError):
            last = _Reading(**json.loads(self._path.read_bytes()))
            later = last.ahead_since_ns, last.unset_until_ns
            needed = (last.wall_ns, last.running_ns, *(ns for ns in later if ns is not None))
            if all(isinstance(ns, int) for ns in needed):
                return last
        return None


class Trimmed(NamedTuple):
    """Result of `trim`."""

    #: Segments removed.
    segments: int
    #: Messages removed.
    messages: int
    #: Bytes on disk freed.
    bytes: int
    #: Bytes on disk that the log still uses.
    left: int
    #: The cursor that kept `trim` from removing more, or None.
    held_by: str | None


class Held(NamedTuple):
    """The held cursor that is furthest behind."""

    name: str
    seq: int


def trim(
    folder: Path,
    limits: Limits,
    settings: Settings | None,
    sizes: dict[int, int] | None = None,
    clock: AgeClock | None = None,
) -> Trimmed:
    """Remove the oldest segments that exceed the limits and that no held cursor needs.

    The newest segment stays. Safe while the log is written and read. A caller that trims
    repeatedly passes the same `sizes` (a cache of sealed segments' sizes) and `clock`.

    :raises StorageError: the operating system reports an error.
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
    known.update((number, sizes[number]) for number in numbers[:-2])  # the last two may change
    return sizes


class _Candidate(NamedTuple):
    """A complete segment that may be removed."""

    end: int
    newest_ns: int | None
    messages: int
    is_empty: bool


def _candidate(folder: Path, number: int, following: int) -> _Candidate | None:
    try:
        segment = look(folder, number)
    except NotFound:
        return None
    except DamagedQueue:  # content unknown
        with contextlib.suppress(FileNotFoundError):
            changed = path_of(folder, number).stat().st_mtime_ns
            return _Candidate(following, changed, 0, is_empty=False)
        return None
    if segment.state == State.LIVE:
        return None
    return _Candidate(segment.head, segment.newest_ns, segment.count, segment.count == 0)


def _oldest_ns(folder: Path, limits: Limits, clock: AgeClock | None) -> int | None:
    """Return the time from which on messages are kept; None: no limit by time."""
    oldest = limits.before_ns
    if limits.retain_age is not None:
        now = AgeClock(folder).now_ns(keep=False) if clock is None else clock.now_ns()
        if now is not None:
            oldest = max(oldest or 0, now - int(limits.retain_age * 1e9))
    return oldest


def _must_go(segment: _Candidate, total: int, limits: Limits, oldest_ns: int | None) -> bool:
    if segment.is_empty:
        return True  # its removal was interrupted
    if limits.retain is not None and total > limits.retain:
        return True
    if limits.before_seq is not None and segment.end <= limits.before_seq:
        return True
    if oldest_ns is None or segment.newest_ns is None:
        return False
    return segment.newest_ns < oldest_ns


def held_by(folder: Path, settings: Settings) -> Held | None:
    """Return the held cursor that is furthest behind; None: the log holds none.

    A cursor that is missing, or belongs to an earlier log, needs all messages.
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
