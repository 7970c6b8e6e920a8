"""How does a lane use its log: append, read anywhere, give back the disk?"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import DamagedQueue
from penstock.core.interfaces import Bounds
from penstock.core.message import Message
from penstock.core.position import Position
from penstock.core.whole_files import sync_files, sync_names
from penstock.queue.log.consuming import open_log_reader
from penstock.queue.log.options import LogOptions
from penstock.queue.log.retention import Limits, trim
from penstock.queue.log.segments import numbers_of
from penstock.queue.log.writer import open_log_writer
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from penstock.dispatch.outbox.common_log import FirstMessages
    from penstock.queue.log.reader import LogReader
    from penstock.queue.log.writer import LogWriter
    from penstock.queue.options import Sync

__all__ = ["LaneLog"]

#: Bytes of a segment for each of its slots: smaller messages fill the slots first.
_PER_SLOT: Final = 256
_AT_ONCE: Final = 1024


class LaneLog:
    """The log of a lane. It is open only while it is in use: files are not free."""

    def __init__(
        self,
        folder: Path,
        segment: int,
        sync: Sync,
        first: FirstMessages | None = None,
        priority: int = 0,
    ) -> None:
        """Open it; make it if there is none.

        :param first: where its messages are until `make`, those of a class; there are no files then
        :raises StorageError: the operating system refuses.
        """
        self._folder = folder
        self._first, self._priority = first, priority
        self._url = f"log:{folder}"
        self._segment = segment
        # All lanes of a process have one thread that syncs them. So a write need not wait for the
        # disk when it begins a segment, and with it all who want something of the outbox.
        self._sync: Sync = "none" if isinstance(sync, float) else sync
        self._writer: LogWriter | None = None
        #: One that reads on, and one that goes where it is sent.
        self._readers: dict[str, LogReader] = {}
        self._places: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._synced = self._trimmed = -1
        #: When something was written or read last (monotonic seconds).
        self.used = time.monotonic()
        self._is_new = False
        self._bounds = self._open() if first is None else Bounds(0, 0, len(self._records()))
        #: The oldest message there is, and the number of the next.
        self.oldest, self.head = self._bounds.oldest, self._bounds.end

    @property
    def epoch(self) -> int:
        """The epoch of the log; 0: it is not made yet."""
        return self._bounds.epoch

    def _open(self) -> Bounds:
        try:
            self._is_new = not numbers_of(self._folder)
            self._writer = self._open_writer()
            return self._reader("next").bounds()
        except BaseException:
            self.suspend()
            raise

    def _records(self) -> list[tuple[bytes, int]]:
        return [] if self._first is None else self._first.lanes.get(self._priority, [])

    def make(self) -> None:
        """Make the files, if there are none, and write to them what is elsewhere.

        :raises StorageError: there is no space; all is as before, and can be tried again.
        """
        if self._first is None:
            return
        bounds = self._open()
        try:
            left = self._records()[bounds.end :]
            for kind, run in itertools.groupby(left, key=lambda each: each[1]):
                assert self._writer is not None
                self._writer.write_many([record for record, _ in run], kind)
        except BaseException:
            self.suspend()
            raise
        self._bounds = bounds
        self._first = None

    def successor(self, epoch: int, seq: int) -> int | None:
        """Return up to where a number of an epoch means the same message; None: nowhere.

        After a power failure the numbers that the disk did not get are given again.
        """
        return self._bounds.successor(epoch, seq)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing that has to be brought to the disk."""
        return self.head == self._synced

    def _open_writer(self) -> LogWriter:
        slots = max(2, self._segment // _PER_SLOT)
        options = LogOptions(segment=self._segment, segment_slots=slots, sync=self._sync)
        return open_log_writer(self._url, self._folder, options)

    def _reader(self, which: str) -> LogReader:
        reader = self._readers.get(which)
        if reader is None:
            options = LogOptions(damaged="skip")
            reader = open_log_reader(self._url, self._folder, Position.START, options)
            self._readers[which] = reader
        return reader

    def write(self, records: Sequence[bytes], types: Sequence[int]) -> None:
        """Append; `head` says how far that came, also when it raises.

        :raises StorageError: there is no space.
        """
        self.used = time.monotonic()
        if self._first is not None:
            self._write_first(self._first, records, types)
            return
        writer = self._writer
        if writer is None:
            writer = self._writer = self._open_writer()
            self._check(self._reader("next").bounds().end, self.head)
        end = self.head + len(records)
        at = 0
        try:
            runs = itertools.groupby(types) if len(set(types)) > 1 else ((types[0], types),)
            for kind, run in runs:
                count = len(list(run))
                last = writer.write_many(records[at : at + count], kind)
                at += count
                self.head += count
        except BaseException:
            last = writer.statistics().last_seq
            if last is not None:
                self.head = max(self.head, last + 1)
            raise
        if last is not None:
            self._check(last + 1, end)

    def _write_first(
        self, first: FirstMessages, records: Sequence[bytes], types: Sequence[int]
    ) -> None:
        try:
            first.write(self._priority, records, types)
        finally:
            self.head = len(self._records())

    def _check(self, found: int, expected: int) -> None:
        if found != expected:
            hint = "nobody else may write to it, or remove it; restart the dispatcher"
            raise DamagedQueue(self._url, "head", 0, expected, found, hint=hint)

    def read(self, which: str, at: int, count: int) -> tuple[list[Message], int]:
        """Return some of the messages from there on, at least one, and where it goes on.

        Those that are missing between are not in the log any more.

        :raises DamagedQueue: the log cannot be read there.
        """
        if self._first is not None:
            return self._read_first(at, count)
        self.used = time.monotonic()
        reader = self._reader(which)
        if self._places.get(which) != at:
            reader.seek(at)
        messages = reader.read_many(count)
        if messages:
            end = messages[-1].seq + 1
        else:
            end = min(reader.statistics().next_seq or 0, self.head)
            if end <= at:
                self._check(at, self.head)
        self._places[which] = end
        return messages, end

    def _read_first(self, at: int, count: int) -> tuple[list[Message], int]:
        found = enumerate(self._records()[at : at + count], at)
        messages = [
            Message(seq, 0, 0, kind, 0, None, None, record) for seq, (record, kind) in found
        ]
        return messages, at + len(messages)

    def payloads(self) -> set[bytes]:
        """Return all that can be read."""
        found: set[bytes] = set()
        at = self.oldest
        while at < self.head:
            messages, at = self.read("any", at, _AT_ONCE)
            found.update(message.payload for message in messages)
        return found

    def last_message(self) -> Message | None:
        """Return the newest message that is there."""
        if self._first is not None:
            messages, _ = self._read_first(self.head - 1, 1)
            return messages[0] if messages else None
        reader = self._reader("any")
        self._places.pop("any", None)
        reader.seek(Position.LAST)
        return reader.read(0)

    # --- for a thread of its own, but not while it is closed -------------------------------------

    def sync(self) -> None:
        """Return when all messages are on the disk.

        :raises StorageError: the device refuses.
        """
        head = self.head
        if self._writer is not None and head != self._synced:
            self._writer.sync()
            if self._is_new:  # its files were made without waiting for the disk
                with storage_errors("syncing", str(self._folder)):
                    sync_files(self._folder)
                    sync_names(self._folder.parent)
                self._is_new = False
            self._synced = head

    def free(self, floor: int) -> None:
        """Remove the segments that are below the floor as a whole.

        :raises StorageError: the operating system refuses.
        """
        if floor != self._trimmed:
            trim(self._folder, Limits(before_seq=floor), None, self._sizes)
            self._trimmed = floor

    # --- closing --------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Close all files; the next call opens them again."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._places.clear()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
