"""Which segments of a log go, and when?"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue, NotFound
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.freeing import remove_segment
from penstock.queue.log.segments import disk_bytes, look, numbers_of, path_of
from penstock.queue.wide.layout import State

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.settings import Settings

__all__ = ["CURSORS", "Limits", "Trimmed", "held_by", "trim"]

log = logging.getLogger(__name__)

#: The name of the file that keeps the positions of a log's readers.
CURSORS: Final = "cursors"


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
    folder: Path, limits: Limits, settings: Settings | None, sizes: dict[int, int] | None = None
) -> Trimmed:
    """Remove the oldest segments, as far as the limits ask for it and no held cursor needs them.

    The newest segment stays. A log may be written to and read meanwhile. Who trims again and again
    keeps the `sizes` of what is sealed, which do not change.

    :raises StorageError: the operating system refuses.
    """
    numbers = numbers_of(folder)
    sizes = _sizes(folder, numbers, {} if sizes is None else sizes)
    left = total = sum(sizes.values())
    held = None if settings is None else held_by(folder, settings)
    segments = messages = 0
    blocking = None
    for number, following in itertools.pairwise(numbers):
        candidate = _candidate(folder, number, following)
        if candidate is None or not _must_go(candidate, left, limits):
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


def _must_go(segment: _Candidate, total: int, limits: Limits) -> bool:
    if segment.is_empty:
        return True  # somebody died while removing it
    if limits.retain is not None and total > limits.retain:
        return True
    if limits.before_seq is not None and segment.end <= limits.before_seq:
        return True
    oldest = limits.before_ns
    if limits.retain_age is not None:
        oldest = max(oldest or 0, time.time_ns() - int(limits.retain_age * 1e9))
    return oldest is not None and segment.newest_ns is not None and segment.newest_ns < oldest


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
