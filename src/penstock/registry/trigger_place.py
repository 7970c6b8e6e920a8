"""Where does a trigger go on, however it ended the last time?

A named cursor holds the number of the next entry. The queue of latest_data_info has no epoch to
tell whether it was made anew; so the cursor's epoch is a fingerprint of the entry before it.
"""

from __future__ import annotations

import hashlib
import logging
import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, PositionError
from penstock.core.position import Position
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.cursor_file import CursorFile

if TYPE_CHECKING:
    from penstock.core.message import Message

__all__ = ["TriggerPlace", "check_name", "cursors_path", "open_entries"]

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
#: The fingerprint of nothing.
_NOBODY: Final = 0


def check_name(name: str) -> str:
    """Make sure that files can be called by it.

    :raises InvalidOption: they cannot.
    """
    if not _NAME.fullmatch(name):
        raise InvalidOption("name", name, "is up to 64 letters, digits, dots and dashes")
    return name


def cursors_path(state: str) -> str:
    """Return the file of the places of all triggers that keep theirs in a directory."""
    return str(Path(state) / "_penstock_on.cursors")


def open_entries(queue: str) -> ClassicReader:
    """Open the queue of latest_data_info at its start."""
    return ClassicReader(
        f"fmq:{queue}", queue, Position.START, ClassicOptions(damaged="skip", wait=0.0)
    )


class TriggerPlace:
    """The place of one trigger, which belongs to one process at a time."""

    def __init__(self, state: str, name: str) -> None:
        self._path = cursors_path(state)
        self._name = name
        self._open = ExitStack()
        self._file: int | None = None

    def claim(self, queue: str, start: Position, *, is_there: bool) -> None:
        """Own the place; a new one stands at `start`, or at 0 where there is no queue yet.

        :raises CursorInUse: another process has this trigger.
        """
        self._claim(self._first(queue, start) if is_there else 0)

    def _claim(self, seq: int) -> None:
        cursors = self._open.enter_context(CursorFile(self._path))
        self._cursor = self._open.enter_context(cursors.claim(self._name, epoch=_NOBODY, seq=seq))
        self._file = _inode(self._path)

    @staticmethod
    def _first(queue: str, start: Position) -> int:
        with open_entries(queue) as reader:
            reader.seek(start)
            return reader.statistics().next_seq or 0

    def stand(self, reader: ClassicReader, queue: str) -> bool:
        """Let a reader stand at the place; False: the queue was made anew, and it is at its start.

        What the queue has no more is counted as lost by the reader.
        """
        seq = self._cursor.seq
        try:
            reader.seek(Position.sequence(seq))
            is_same = self._is_same(queue, seq, self._cursor.epoch)
        except PositionError:
            is_same = False
        if not is_same:
            log.warning("%s was made anew since %s read it", reader.url, self._name)
            reader.seek(Position.START)
        return is_same

    @staticmethod
    def _is_same(queue: str, seq: int, fingerprint: int) -> bool:
        """Tell whether the entry before a place is the one that was done last."""
        if fingerprint == _NOBODY:
            return True
        # Two stores move a cursor. A kill between them leaves the fingerprint one behind.
        with open_entries(queue) as reader:
            bounds = reader.bounds()
            known = [at for at in (seq - 1, seq - 2) if bounds.oldest <= at < bounds.end]
            for at in known:
                reader.seek(at)
                message = reader.read(timeout=0)
                if message is not None and _fingerprint(message) == fingerprint:
                    return True
        return not known

    def move_past(self, message: Message) -> None:
        """Say that this entry, and all before it, are done."""
        if _inode(self._path) != self._file:
            # Somebody cleans the directory up. What is kept in a file that is gone is not kept.
            log.warning("%s is gone; it is made anew", self._path)
            self._open.close()
            self._claim(message.seq)
        self._cursor.move(message.seq + 1, _fingerprint(message))

    def close(self) -> None:
        self._open.close()


def _inode(path: str) -> int | None:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return None


def _fingerprint(message: Message) -> int:
    what = b"%d %d %b" % (message.seq, message.created_ns, message.payload)
    number = int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little")
    return number or 1
