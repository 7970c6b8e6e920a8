"""How does a named reader of a log resume at its position, even after a crash?"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.errors import Closed, CursorInUse, DamagedQueue
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.whole_files import make_folder
from penstock.queue.cursor_file import CursorFile
from penstock.queue.log.reader import CompressedLogReader, LogReader, open_newest
from penstock.queue.log.recovery import is_unsettled
from penstock.queue.log.retention import CURSORS, GROUPS
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import Compression

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.message import Message
    from penstock.queue.cursors import Cursor
    from penstock.queue.groups.reader import GroupReader
    from penstock.queue.log.options import LogOptions
    from penstock.queue.wide.file import QueueFile

__all__ = ["Consumer", "open_log_member", "open_log_reader"]

log = logging.getLogger(__name__)


class Consumer(LogReader):
    """A reader with a named position: `hold=NAME`, or `cursor=NAME`.

    The next call, `acknowledge` and `close` confirm the messages of a call. So a message in
    work when the process dies is redelivered.
    """

    def __init__(
        self, url: str, folder: Path, start: Position, options: LogOptions, file: QueueFile
    ) -> None:
        name = options.reader_name()
        assert name is not None
        self._name = name
        self._confirmed = (-1, -1)
        self._cursors: CursorFile | None = None
        self._place: Cursor | None = None
        super().__init__(url, folder, start, options, file)

    @property
    def hold(self) -> str:
        return self._name

    def _meet(self, start: Position) -> None:
        self._use(self._file, self._file.field("tail"))
        self._cursors = CursorFile(str(self._index.folder / CURSORS), as_folder=True)
        place = self._cursors.claim(self._name, epoch=self._epoch)
        # Set `_place` only after the seek succeeded: an error must not move the cursor.
        if place.is_new:
            self.seek(start)
        elif (known := self._known_place(place)) is not None:
            self._seek_segment(known)
        else:
            log.warning("%s was created anew since %s read it", self.url, self._name)
            self._restarts += 1
            self.seek(Position.START)
        self._place = place
        self._confirm()

    def _known_place(self, place: Cursor) -> int | None:
        """Return the position to resume at; None: it belongs to an earlier log at this path.

        :raises DamagedQueue: the position is beyond the end of the log.
        """
        bounds = self.bounds()
        seq = bounds.successor(place.epoch, place.seq)
        if seq is None or seq <= bounds.end:
            return seq
        if is_unsettled(self._index.folder):  # the disk has the cursor, but not the messages
            return bounds.end
        assert self._cursors is not None
        raise DamagedQueue(
            self._cursors.path,
            f"the position of the cursor {self._name}",
            self._cursors.offset(place),
            f"up to {bounds.end}, the number of the next message",
            seq,
            hint="another hold=NAME starts anew; a writer after a power failure mends it",
        )

    def _take_up_anew(self, file: QueueFile) -> None:
        super()._take_up_anew(file)
        if self._cursors is None or self._cursors.is_named():
            return
        # The cursor file was removed with the log.
        cursors = CursorFile(str(self._index.folder / CURSORS), as_folder=True)
        try:
            place = cursors.claim(self._name, epoch=self._epoch)
        except BaseException:  # it keeps the removed file: the next call claims again
            cursors.close()
            raise
        removed, self._cursors, self._place = self._cursors, cursors, place
        self._confirmed = (-1, -1)
        removed.close()

    def read(self, timeout: float | None = None) -> Message | None:
        self._confirm()
        return super().read(timeout)

    def _peek(self, timeout: float | None) -> Message | None:
        self._confirm()
        return super()._peek(timeout)

    def acknowledge(self) -> None:
        """Confirm all messages read so far."""
        super().acknowledge()
        self._confirm()

    def _confirm(self) -> None:
        place, now = self._place, (self._epoch, self._next)
        if place is not None and now != self._confirmed and not self._is_collecting:
            place.move(self._next, self._epoch)
            self._confirmed = now

    def _close(self, *, finished: bool) -> None:
        was_closed = self._is_closed
        super()._close(finished=finished)
        if self._is_closed:
            if finished and not was_closed and not self._is_in_call:
                with suppress(Closed):
                    self._confirm()
            self._place = None
            if self._cursors is not None:
                self._cursors.close()
                self._cursors = None

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._place = None  # the parent owns it
        self._close(finished=False)


class CompressedConsumer(Consumer, CompressedLogReader):
    """A consumer of a log whose payloads are compressed."""


class HeldPlace:
    """The cursor `group:NAME`, which retention respects if a writer sets `hold=group:NAME`."""

    def __init__(self, folder: Path, group: str) -> None:
        self._path = folder / CURSORS
        self._name = f"group:{group}"

    def __call__(self, epoch: int, seq: int) -> None:
        """Advance the group's cursor to `seq`, if it exists."""
        if not self._path.exists():
            return
        with CursorFile(str(self._path)) as cursors:
            entry = cursors.find(self._name)
            if entry is None or (entry.epoch, entry.seq) == (epoch, seq):
                return
            with suppress(CursorInUse), cursors.claim(self._name) as cursor:
                cursor.move(seq, epoch)


def open_log_member(url: str, folder: Path, start: Position, options: LogOptions) -> GroupReader:
    """Open a reader of the group `options.group`; a new group starts at `start`.

    :raises NotFound: there is no log at this path.
    :raises DamagedQueue: it is not readable.
    """
    from penstock.queue.groups.reader import GroupReader  # noqa: PLC0415 - few need it

    assert options.group is not None

    def open_stream(*, may_wait: bool) -> LogReader:
        chosen = options if may_wait else replace(options, wait=0.0)
        reader = open_log_reader(url, folder, start, chosen)
        try:
            _make_groups(folder)
        except BaseException:
            reader.close()
            raise
        return reader

    return GroupReader(
        url,
        open_stream,
        folder / GROUPS,
        options,
        lost=DropReason.RETENTION,
        hold=HeldPlace(folder, options.group),
    )


def _make_groups(folder: Path) -> None:
    """Create the directory of the groups of a log, with the permissions of the log's own."""
    groups = folder / GROUPS
    with storage_errors("creating", str(groups)):
        if make_folder(groups):
            groups.chmod(folder.stat().st_mode & 0o777)


def open_log_reader(url: str, folder: Path, start: Position, options: LogOptions) -> LogReader:
    """Open a reader: plain or decompressing, with or without a named position.

    :raises NotFound: there is no log at this path.
    :raises DamagedQueue: it is not readable.
    :raises CursorInUse: another reader has this name.
    """
    is_named = options.reader_name() is not None
    file = open_newest(folder, options.wait)
    is_plain = file.compression is Compression.NONE
    if not is_named:
        kind = LogReader if is_plain else CompressedLogReader
    else:
        kind = Consumer if is_plain else CompressedConsumer
    return kind(url, folder, start, options, file)
