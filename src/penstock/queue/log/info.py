"""What does a log hold now, who writes to it, and who reads it?"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import DamagedQueue, NotFound, Unsupported
from penstock.core.interfaces import Bounds, StreamInfo
from penstock.queue.cursor_file import CursorFile
from penstock.queue.groups.leases import describe_groups
from penstock.queue.log.retention import CURSORS, GROUPS
from penstock.queue.log.segments import Segment, disk_bytes, look, no_log, numbers_of, path_of
from penstock.queue.log.settings import load_settings
from penstock.queue.log.writer_lock import writer_pid
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import State

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.queue.log.settings import Settings

__all__ = ["Listed", "describe_log", "is_set_aside", "list_segments"]

#: Files that recovery sets aside for inspection.
_ASIDE: Final = re.compile(r".*\.(damaged|torn)-\d+")


class Listed(NamedTuple):
    """A listed segment: its content, or its damage."""

    path: Path
    #: Number of its first message.
    first: int
    #: Bytes on the disk.
    disk: int
    #: None if it is not readable.
    segment: Segment | None
    #: None if it is readable.
    damage: DamagedQueue | None

    @property
    def state(self) -> str:
        """`live`, `sealed`, or `damaged`."""
        if self.segment is None:
            return "damaged"
        return State(self.segment.state).name.lower()


def list_segments(folder: Path) -> list[Listed]:
    """Inspect every segment of a log, the oldest first.

    :raises NotFound: there is no log at this path.
    """
    found = []
    for number in numbers_of(folder):
        path = path_of(folder, number)
        try:
            segment = look(folder, number)
            found.append(Listed(path, number, segment.disk, segment, None))
        except NotFound:
            continue  # removed meanwhile
        except DamagedQueue as error:
            found.append(Listed(path, number, disk_bytes(path), None, error))
    if not found:
        raise no_log(folder)
    return found


def describe_log(url: str, folder: Path) -> StreamInfo:
    """Describe a log without changing it.

    :raises NotFound: there is no log at this path.
    :raises DamagedQueue: none of its segments is readable.
    """
    listed = list_segments(folder)
    segments = [one.segment for one in listed if one.segment is not None]
    damage = next((one.damage for one in listed if one.damage is not None), None)
    if not segments:
        assert damage is not None
        raise damage
    filled = [segment for segment in segments if segment.count]
    disk = sum(one.disk for one in listed)
    try:
        settings = load_settings(folder)
    except (DamagedQueue, Unsupported):
        settings = None
    newest = segments[-1]
    retain = None if settings is None else settings.retain
    return StreamInfo(
        url=url,
        layout="log",
        storage="memory" if str(folder).startswith("/dev/shm/") else "files",  # noqa: S108
        slots=sum(segment.geometry.slots for segment in segments),
        buffer_size=sum(segment.geometry.buffer_size for segment in segments),
        oldest_seq=filled[0].tail if filled else None,
        youngest_seq=filled[-1].head - 1 if filled else None,
        count=sum(segment.count for segment in segments),
        bytes=sum(segment.used for segment in segments),
        oldest_time_ns=filled[0].oldest_ns if filled else None,
        youngest_time_ns=filled[-1].newest_ns if filled else None,
        fill=round(min(1.0, disk / retain), 4) if retain else 0.0,
        blocking=False,
        details={
            "epoch": newest.epoch,
            "stream": None if settings is None or not settings.stream else str(settings.stream),
            "compression": None if settings is None else settings.compress.value,
            "crc": None if settings is None else settings.crc,
            "segments": len(listed),
            "bytes_on_disk": disk,
            "retain": retain,
            "retain_age": None if settings is None else settings.retain_age,
            "hold": [] if settings is None else list(settings.hold),
            "created_ns": None if settings is None else settings.created_ns,
            "writer_pid": writer_pid(folder),
            "cursors": _cursors(folder, newest, settings),
            "groups": describe_groups(folder / GROUPS, newest.head),
            "damaged_segments": [str(one.path) for one in listed if one.damage is not None],
            "set_aside": _set_aside(folder),
        },
    )


def _cursors(folder: Path, newest: Segment, settings: Settings | None) -> list[dict[str, Any]]:
    path = folder / CURSORS
    if not os.access(path, os.R_OK | os.W_OK):
        return []
    with CursorFile(str(path)) as cursors:
        entries = cursors.entries()
    lineage = () if settings is None else settings.lineage_of(newest.epoch)
    bounds = Bounds(newest.epoch, 0, newest.head, lineage)
    found = []
    for entry in entries:
        seq = bounds.successor(entry.epoch, entry.seq)
        is_here = seq is not None  # otherwise of an earlier log: it will start at the oldest
        found.append(
            {
                "name": entry.name,
                "pid": (entry.pid or None) if is_here else None,
                "alive": entry.alive and is_here,
                "next_seq": seq or 0,
                "behind": max(0, newest.head - (seq or 0)),
            }
        )
    return found


def is_set_aside(name: str) -> bool:
    """Tell whether a file is one that recovery set aside for inspection."""
    return _ASIDE.fullmatch(name) is not None


def _set_aside(folder: Path) -> list[str]:
    with storage_errors("looking at", str(folder)):
        return sorted(str(path) for path in folder.iterdir() if is_set_aside(path.name))
