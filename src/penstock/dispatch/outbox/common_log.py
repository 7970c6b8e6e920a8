"""Where are the messages of outboxes that have no files of their own yet?

To make the files of an outbox takes milliseconds, and to bring them to the disk much longer; and
they stay for as long as its receiver is away. So the first messages of all new outboxes are in one
log. An outbox has files of its own when it has more than some messages, or something to note down
about them, or when too much of this log would have to be kept for it.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import struct
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import StorageError
from penstock.core.position import Position
from penstock.queue.log.consuming import open_log_reader
from penstock.queue.log.options import LogOptions
from penstock.queue.log.retention import Limits, trim
from penstock.queue.log.segments import is_log
from penstock.queue.log.writer import open_log_writer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.core.message import Message
    from penstock.queue.log.writer import LogWriter
    from penstock.queue.options import Sync

__all__ = ["CommonLog", "FirstMessages"]

log = logging.getLogger(__name__)

#: Which outbox; the class of the message, or one of those below; the type of the message.
_HEADER: Final = struct.Struct("<QBB")
#: What follows is the label of an outbox, JSON; nothing of an outbox is needed any more.
_LABEL, _GONE = 0xFE, 0xFF
#: The field of a label that tells apart outboxes that were in the same folder one after the other.
_ID: Final = "id"
_AT_ONCE: Final = 1024
#: Bytes of a segment for each of its slots: smaller messages fill the slots first.
_PER_SLOT: Final = 256


#: An outbox is in the common log up to so many bytes, and until so much is behind its beginning.
_MOST_OF_ONE: Final = 64 << 10
_MOST_BEHIND: Final = 8 << 20


class _Place(NamedTuple):
    """Where an outbox begins in the common log: its number, and the bytes before."""

    seq: int
    bytes: int


class CommonLog:
    """One log for the first messages of all new outboxes. Safe to share between threads."""

    def __init__(self, folder: Path, segment: int, sync: Sync) -> None:
        self._folder = folder
        size = segment + _HEADER.size
        slots = max(2, size // _PER_SLOT)
        self._options = LogOptions(segment=size, segment_slots=slots, sync=sync)
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        #: Where those outboxes begin that have no files yet.
        self._begins: dict[int, _Place] = {}
        self._end = _Place(0, 0)
        self._trimmed = 0

    def open(self) -> list[FirstMessages]:
        """Return the outboxes that have no files, as they were left.

        :raises StorageError: the operating system refuses.
        """
        if not is_log(self._folder):
            return []
        url = f"log:{self._folder}"
        # The writer mends what a power failure left.
        self._writer = open_log_writer(url, self._folder, self._options)
        found: dict[int, FirstMessages] = {}
        options = LogOptions(damaged="skip")
        with open_log_reader(url, self._folder, Position.START, options) as reader:
            while messages := reader.read_many(_AT_ONCE):
                for message in messages:
                    self._meet(message, found)
            lost, end = reader.statistics().lost, reader.bounds().end
        if lost:
            log.error("%s: %d messages of new receivers are damaged", self._folder, lost)
        self._end = _Place(end, self._end.bytes)
        if not found:
            self.close()
        return list(found.values())

    def _meet(self, message: Message, found: dict[int, FirstMessages]) -> None:
        token, tag, kind = _HEADER.unpack_from(message.payload)
        rest = message.payload[_HEADER.size :]
        if tag == _LABEL:
            self._begins[token] = _Place(message.seq, self._end.bytes)
            found[token] = FirstMessages(self, token, rest, is_labelled=True)
        elif tag == _GONE:
            found.pop(token, None)
            self._begins.pop(token, None)
        elif token in found:
            found[token].add(tag, [(rest, kind)])
        self._end = _Place(message.seq + 1, self._end.bytes + len(message.payload))

    def begin(self, label: Mapping[str, str]) -> FirstMessages:
        """Return where a new outbox stores its first messages; it is known by its label."""
        token = secrets.randbits(63)
        return FirstMessages(self, token, json.dumps({**label, _ID: token}).encode())

    def write(self, token: int, payloads: Sequence[bytes]) -> int:
        """Append; return how many that were, which are fewer when there is no space.

        :raises StorageError: there is no space for any.
        """
        with self._lock:
            if self._writer is None:
                self._writer = open_log_writer(f"log:{self._folder}", self._folder, self._options)
            begin = self._end
            try:
                last = self._writer.write_many(payloads)
            except StorageError:
                last = self._writer.statistics().last_seq
                if last is None or last < begin.seq:
                    raise
            count = 0 if last is None else last + 1 - begin.seq
            size = sum(map(len, payloads[:count]))
            self._end = _Place(begin.seq + count, begin.bytes + size)
            self._begins.setdefault(token, begin)
            return count

    def is_far_behind(self, token: int) -> bool:
        """Tell whether too much has to be kept for the sake of one outbox."""
        begin = self._begins.get(token)
        return begin is not None and self._end.bytes - begin.bytes > _MOST_BEHIND

    def end(self, token: int) -> None:
        """Note that an outbox has its files, or is gone: what is here of it is needed no more."""
        if token not in self._begins:
            return
        try:
            self.write(token, [_HEADER.pack(token, _GONE, 0)])
        except StorageError:
            log.warning("%s: messages may come again", self._folder, exc_info=True)
        with self._lock:
            del self._begins[token]
            floor = min((it.seq for it in self._begins.values()), default=self._end.seq)
            if floor != self._trimmed:
                trim(self._folder, Limits(before_seq=floor), None)
                self._trimmed = floor

    def sync(self) -> None:
        """Return when all is on the disk.

        :raises StorageError: the device refuses.
        """
        if self._writer is not None:
            self._writer.sync()

    def close(self) -> None:
        """Let go; what is needed stays.

        :raises StorageError: the device refuses.
        """
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
                if not self._begins:
                    shutil.rmtree(self._folder, ignore_errors=True)


class FirstMessages:
    """The messages of an outbox that are in the common log, and in memory, too."""

    def __init__(
        self, common: CommonLog, token: int, label: bytes, *, is_labelled: bool = False
    ) -> None:
        self._common = common
        self._token = token
        self.label = label
        self._is_labelled = is_labelled
        #: The records and their types, by class.
        self.lanes: dict[int, list[tuple[bytes, int]]] = {}
        self._bytes = 0

    def add(self, priority: int, records: Sequence[tuple[bytes, int]]) -> None:
        """Note what is in the log."""
        self.lanes.setdefault(priority, []).extend(records)
        self._bytes += sum(len(record) for record, _ in records)

    def write(self, priority: int, records: Sequence[bytes], types: Sequence[int]) -> None:
        """Append records; `lanes` says how far that came, also when it raises.

        :raises StorageError: there is no space.
        """
        token = self._token
        left = list(zip(records, types, strict=True))
        while left:
            own = [_HEADER.pack(token, priority, kind) + record for record, kind in left]
            if not self._is_labelled:
                own.insert(0, _HEADER.pack(token, _LABEL, 0) + self.label)
            count = self._common.write(token, own) - (not self._is_labelled)
            self._is_labelled = True
            self.add(priority, left[:count])
            del left[:count]

    def has_room(self, size: int) -> bool:
        """Tell whether so many more bytes may be written."""
        return self._bytes + size <= _MOST_OF_ONE

    @property
    def has_to_go(self) -> bool:
        """Whether the outbox should have files of its own by now."""
        return self._common.is_far_behind(self._token)

    def end(self) -> None:
        """Hear that the outbox has its files, or is gone."""
        self._common.end(self._token)
