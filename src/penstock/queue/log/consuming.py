"""How does a reader of a log find its place again, however it ended?"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.core.errors import Closed, CursorInUse, DamagedQueue
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.queue.cursor_file import CursorFile
from penstock.queue.groups.reader import GroupReader
from penstock.queue.log.reader import CompressedLogReader, LogReader, open_newest
from penstock.queue.log.recovery import is_unsettled
from penstock.queue.log.retention import CURSORS, GROUPS
from penstock.queue.wide.compression import Compression

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.core.message import Message
    from penstock.queue.cursors import Cursor
    from penstock.queue.log.options import LogOptions
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Consumer", "open_log_member", "open_log_reader"]

log = logging.getLogger(__name__)


class Consumer(LogReader):
    """A reader whose place has a name: `cursor=NAME`.

    What a call returned is confirmed by the next call, by `acknowledge` and by closing. So a
    message that was being worked on when the process died comes again.
    """

    def __init__(
        self, url: str, folder: Path, start: Position, options: LogOptions, file: QueueFile
    ) -> None:
        assert options.cursor is not None
        self._name = options.cursor
        self._confirmed = (-1, -1)
        self._cursors: CursorFile | None = None
        self._place: Cursor | None = None
        super().__init__(url, folder, start, options, file)

    def _meet(self, start: Position) -> None:
        self._use(self._file, self._file.field("tail"))
        self._cursors = CursorFile(str(self._places.folder / CURSORS))
        place = self._cursors.claim(self._name, epoch=self._epoch)
        # It is moved only when this reader stands where it shall: an error must not move it.
        if place.is_new:
            self.seek(start)
        elif (known := self._known_place(place)) is not None:
            self._go_to(known)
        else:
            log.warning("%s was created anew since %s read it", self.url, self._name)
            self._restarts += 1
            self.seek(Position.START)
        self._place = place
        self._confirm()

    def _known_place(self, place: Cursor) -> int | None:
        """Return where this reader left off; None: in a log that was here before.

        :raises DamagedQueue: there was never such a message.
        """
        bounds = self.bounds()
        seq = bounds.successor(place.epoch, place.seq)
        if seq is None or seq <= bounds.end:
            return seq
        if is_unsettled(self._places.folder):  # the disk got its place, and not the messages
            return bounds.end
        assert self._cursors is not None
        raise DamagedQueue(
            self._cursors.path,
            f"the position of the cursor {self._name}",
            self._cursors.offset(place),
            f"up to {bounds.end}, the number of the next message",
            seq,
            hint="another cursor=NAME starts anew; a writer after a power failure mends it",
        )

    def _take_up_anew(self, file: QueueFile) -> None:
        super()._take_up_anew(file)
        if self._cursors is None or self._cursors.is_named():
            return
        # The file of cursors was removed with the log.
        self._place = None
        self._cursors.close()
        self._cursors = CursorFile(str(self._places.folder / CURSORS))
        self._place = self._cursors.claim(self._name, epoch=self._epoch)
        self._confirmed = (-1, -1)

    def read(self, timeout: float | None = None) -> Message | None:
        self._confirm()
        return super().read(timeout)

    def _peek(self, timeout: float | None) -> Message | None:
        self._confirm()
        return super()._peek(timeout)

    def acknowledge(self) -> None:
        """Say that everything read so far is done."""
        super().acknowledge()
        self._confirm()

    def _confirm(self) -> None:
        place, now = self._place, (self._epoch, self._next)
        if place is not None and now != self._confirmed and not self._is_collecting:
            place.move(self._next, self._epoch)
            self._confirmed = now

    def _close(self, *, finished: bool) -> None:
        if finished and not self._is_closed:
            with suppress(Closed):
                self._confirm()
        super()._close(finished=finished)
        if self._is_closed:
            self._place = None
            if self._cursors is not None:
                self._cursors.close()
                self._cursors = None

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        self._place = None  # it is the parent's
        self._close(finished=False)


class CompressedConsumer(Consumer, CompressedLogReader):
    """A consumer of a log whose payloads are compressed."""


class HeldPlace:
    """The cursor `group:NAME`, which retention respects when a writer says `hold=group:NAME`."""

    def __init__(self, folder: Path, group: str) -> None:
        self._path = folder / CURSORS
        self._name = f"group:{group}"

    def __call__(self, epoch: int, seq: int) -> None:
        """Let go of what is settled, if anybody holds it for the group."""
        if not self._path.exists():
            return
        with CursorFile(str(self._path)) as cursors:
            entry = cursors.find(self._name)
            if entry is None or (entry.epoch, entry.seq) == (epoch, seq):
                return
            with suppress(CursorInUse), cursors.claim(self._name) as cursor:
                cursor.move(seq, epoch)


def open_log_member(url: str, folder: Path, start: Position, options: LogOptions) -> GroupReader:
    """Open a reader of the group that the options name; a new group begins at `start`.

    :raises NotFound: there is no such log.
    :raises DamagedQueue: it is not readable.
    """
    assert options.group is not None
    return GroupReader(
        url,
        lambda: open_log_reader(url, folder, start, options),
        folder / GROUPS,
        options,
        lost=DropReason.RETENTION,
        hold=HeldPlace(folder, options.group),
    )


def open_log_reader(url: str, folder: Path, start: Position, options: LogOptions) -> LogReader:
    """Open a reader, of the kind that the log needs.

    :raises NotFound: there is no such log.
    :raises DamagedQueue: it is not readable.
    :raises CursorInUse: somebody else reads from that named place.
    """
    file = open_newest(folder, options.wait)
    is_plain = file.compression is Compression.NONE
    if options.cursor is None:
        kind = LogReader if is_plain else CompressedLogReader
    else:
        kind = Consumer if is_plain else CompressedConsumer
    return kind(url, folder, start, options, file)
