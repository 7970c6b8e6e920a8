"""Is every message of a log as its writer made it, and is none missing?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import DamagedQueue, NotFound
from penstock.queue.log.info import list_segments
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
    for listed in list_segments(folder):
        faults = []
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
