"""Is every message of a log as its writer made it, and is none missing?"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import DamagedQueue, NotFound
from penstock.queue.log.info import list_segments
from penstock.queue.log.segments import look
from penstock.queue.wide.layout import State
from penstock.queue.wide.queue_file import QueueFile
from penstock.queue.wide.verification import first_bad

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.queue.log.info import Listed

__all__ = ["Checked", "check_log"]


class Checked(NamedTuple):
    """A segment that was checked."""

    path: Path
    #: Number of its first message.
    first: int
    #: Messages in it.
    messages: int
    #: Bytes of them.
    bytes: int
    #: What is wrong, in words; none when it is whole.
    faults: tuple[str, ...]


def check_log(folder: Path) -> Iterator[Checked]:
    """Check every segment, the oldest first. The log may be written to and read meanwhile.

    :raises NotFound: there is no log.
    """
    end: int | None = None
    every = list_segments(folder)
    filled = [one.first for one in every if one.segment is not None and one.segment.count]
    last = max(filled, default=0)
    for listed in every:
        faults = []
        if listed.first < last and listed.state == "live" and _is_live(folder, listed.first):
            faults.append("it takes messages, and is not the newest: the next writer seals it")
        if end is not None and listed.first > end:
            faults.append(f"messages {end} to {listed.first - 1} are missing before it")
        if end is not None and listed.first < end:
            faults.append(f"it begins with message {listed.first}, which was in the one before")
        checked = _check(listed)
        if checked is None:
            continue  # retention removed it
        faults += checked.faults
        end = None if listed.segment is None else listed.segment.head
        yield checked._replace(faults=tuple(faults))


def _is_live(folder: Path, first: int) -> bool:
    """Look again: who wrote may have sealed it since."""
    with contextlib.suppress(NotFound, DamagedQueue):
        return look(folder, first).state == State.LIVE
    return False


def _check(listed: Listed) -> Checked | None:
    segment = listed.segment
    if segment is None:
        return Checked(listed.path, listed.first, 0, 0, (str(listed.damage),))
    faults: tuple[str, ...] = ()
    try:
        file = QueueFile.open(str(listed.path), writable=False)
    except NotFound:
        return None
    except DamagedQueue as error:
        return Checked(listed.path, listed.first, 0, 0, (str(error),))
    try:
        bad = first_bad(file)
        if bad is not None and bad >= file.field("tail"):
            faults = (f"message {bad} is not as its writer made it",)
    finally:
        file.close()
    return Checked(listed.path, listed.first, segment.count, segment.used, faults)
