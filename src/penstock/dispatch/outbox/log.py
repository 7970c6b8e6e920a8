"""How do the messages of outboxes get to the disk, and back: records, and the logs of them?"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import struct
import threading
import time
from collections import Counter
from hashlib import blake2b
from itertools import groupby, repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import DamagedQueue, StorageError
from penstock.core.interfaces import Bounds
from penstock.core.message import Message
from penstock.core.position import Position
from penstock.core.whole_files import sync_files, sync_names
from penstock.queue.log.consumer import open_log_reader
from penstock.queue.log.options import LogOptions
from penstock.queue.log.retention import Limits, trim
from penstock.queue.log.segments import is_log, numbers_of
from penstock.queue.log.writer import open_log_writer
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.queue.log.reader import LogReader
    from penstock.queue.log.writer import LogWriter
    from penstock.queue.options import Sync

__all__ = [
    "CLASSES",
    "OVERHEAD",
    "Columns",
    "CommonLog",
    "Entry",
    "FirstMessages",
    "Item",
    "OutboxLog",
    "Part",
    "decode",
    "encode",
    "in_order",
    "items_of",
    "key_of",
    "with_class",
]

log = logging.getLogger(__name__)

#: Priority classes, CS0 to CS6.
CLASSES: Final = 7

#: Arrival number, expires_at_ms, stored_ms, source key, type of message, flags, class, reserved.
_RECORD: Final = struct.Struct("<QQQQBBB5x")
_CLASS_AT: Final = 34
#: Follows the header if `_HAS_KEY` is set: the key of the messages that it supersedes.
_KEY: Final = struct.Struct("<Q")
_HAS_KEY: Final = 1

#: Bytes that a record adds to its message, at most.
OVERHEAD: Final = _RECORD.size + _KEY.size

_pack, _unpack = _RECORD.pack, _RECORD.unpack_from
_SIZE: Final = _RECORD.size


class Entry(NamedTuple):
    """A message to be stored for a receiver."""

    #: Its priority class, 0 to 6: CS0 to CS6.
    priority: int
    #: Its arrival number; 0: assign the next one.
    arrival: int
    #: When it expires, milliseconds since 1970 UTC; 0: never.
    expires_at_ms: int
    #: Its source, as a 64-bit number; messages of one source keep their order.
    source: int
    #: The kind of message, 0 to 255.
    type: int
    #: The message itself.
    raw: bytes


class Item(NamedTuple):
    """A stored message."""

    priority: int
    #: Its number in the log.
    seq: int
    arrival: int
    expires_at_ms: int
    #: When it was stored, milliseconds since 1970 UTC.
    stored_ms: int
    source: int
    type: int
    raw: bytes


class Columns(NamedTuple):
    """The messages of an `append` in columns, one for each field of `Entry`: the fast form."""

    priorities: Sequence[int]
    arrivals: Sequence[int]
    times: Sequence[int]
    sources: Sequence[int]
    types: Sequence[int]
    raws: Sequence[bytes]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Columns:
        """Return the columns of one or more messages."""
        return cls(*zip(*entries, strict=True))

    def entries(self) -> list[Entry]:
        """Return the messages one by one."""
        return list(map(Entry._make, zip(*self, strict=True)))

    def first(self, count: int) -> Columns:
        """Return the columns of the first `count` messages."""
        return self if count == len(self.raws) else Columns._make(column[:count] for column in self)


def encode(columns: Columns, stored_ms: int, key: int | None = None) -> list[bytes]:
    """Return the records of messages, all with `key` if it is given.

    :raises ValueError: a number is out of range.
    """
    rows = zip(*columns, strict=True)
    flags, tail = (0, b"") if key is None else (_HAS_KEY, _KEY.pack(key))
    try:
        return [
            _pack(n, ms, stored_ms, source, kind, flags, priority) + tail + raw
            for priority, n, ms, source, kind, raw in rows
        ]
    except struct.error as error:
        raise ValueError(f"a number of a message does not fit: {error}") from None


def items_of(columns: Columns, first: int, stored_ms: int) -> list[Item]:
    """Return the items of messages stored from number `first` on."""
    priorities, arrivals, times, sources, types, raws = columns
    numbers = range(first, first + len(raws))
    rows = zip(
        priorities, numbers, arrivals, times, repeat(stored_ms), sources, types, raws, strict=False
    )
    return list(map(Item._make, rows))


def with_class(record: bytes, priority: int) -> bytes:
    """Return a record with its class set; earlier releases left it out."""
    return record[:_CLASS_AT] + bytes((priority,)) + record[_CLASS_AT + 1 :]


def decode(message: Message, keys: dict[int, int]) -> Item | None:
    """Decode a record and add its key, if any, to `keys`; return None if it is invalid."""
    payload = message.payload
    if len(payload) < _SIZE:
        return None
    arrival, expires_at_ms, stored_ms, source, kind, flags, priority = _unpack(payload)
    if priority >= CLASSES:
        return None
    start = _SIZE
    if flags:
        if flags != _HAS_KEY or len(payload) < OVERHEAD:
            return None
        (keys[message.seq],) = _KEY.unpack_from(payload, _SIZE)
        start = OVERHEAD
    raw = payload[start:]
    return Item(priority, message.seq, arrival, expires_at_ms, stored_ms, source, kind, raw)


def key_of(key: int | bytes) -> int:
    """Return the 64-bit number of a key."""
    if isinstance(key, int):
        return key & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little")


class Part(NamedTuple):
    """Messages for one receiver with the same key policy."""

    #: Their positions among the messages of all parts.
    places: Sequence[int]
    columns: Columns
    #: Their common key, and how many messages of that key may wait; None: no key.
    latest: tuple[bytes, int] | None = None

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Part:
        """Return a part of one or more messages, without a key."""
        return cls(range(len(entries)), Columns.of(entries))


def in_order(parts: Sequence[Part]) -> Iterator[Part]:
    """Merge parts by the places of their messages; yield the runs with the same key."""
    if len(parts) == 1:
        yield parts[0]
        return
    rows = sorted(
        row
        for part in parts
        for row in zip(part.places, repeat(part.latest), *part.columns, strict=False)
    )
    for latest, some in groupby(rows, key=itemgetter(1)):
        places, _, *columns = zip(*some, strict=True)
        yield Part(places, Columns(*columns), latest)


#: Bytes of a segment per slot.
_PER_SLOT: Final = 256
_AT_ONCE: Final = 1024


class OutboxLog:
    """The log of one outbox. Its files are open only while in use, to save descriptors."""

    def __init__(
        self,
        folder: Path,
        segment: int,
        sync: Sync,
        first: FirstMessages | None = None,
    ) -> None:
        """Open the log, or create it.

        :param first: the messages of an outbox that has no files until `make`
        :raises StorageError: the operating system refuses.
        """
        self._folder = folder
        self._first = first
        self._url = f"log:{folder}"
        self._segment = segment
        # The upkeep thread syncs all outboxes of a process, so a write that starts a segment need
        # not wait for the disk while it holds the outbox's lock.
        self._sync: Sync = "none" if isinstance(sync, float) else sync
        self._writer: LogWriter | None = None
        #: "next" reads sequentially, "any" seeks.
        self._readers: dict[str, LogReader] = {}
        self._places: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._synced = self._trimmed = -1
        #: Time of the last read or write (monotonic seconds).
        self.used = time.monotonic()
        self._is_new = False
        self._bounds = self._open() if first is None else Bounds(0, 0, len(first.records))
        #: The number of the oldest message, and that of the next one to be written.
        self.oldest, self.head = self._bounds.oldest, self._bounds.end

    @property
    def epoch(self) -> int:
        """The epoch of the log; 0 before `make`."""
        return self._bounds.epoch

    def _open(self) -> Bounds:
        try:
            self._is_new = not numbers_of(self._folder)
            self._writer = self._open_writer()
            return self._reader("next").bounds()
        except BaseException:
            self.suspend()
            raise

    def make(self) -> None:
        """Create the files if none exist, and write the first messages to them.

        :raises StorageError: the disk is full; the call can be repeated.
        """
        if self._first is None:
            return
        bounds = self._open()
        try:
            left = self._first.records[bounds.end :]
            for kind, run in groupby(left, key=lambda each: each[1]):
                assert self._writer is not None
                self._writer.write_many([record for record, _ in run], kind)
        except BaseException:
            self.suspend()
            raise
        self._bounds = bounds
        self._first = None

    def successor(self, epoch: int, seq: int) -> int | None:
        """Return the number, at most `seq`, up to which those of an epoch are valid; None: none is.

        After a power failure the numbers of unsynced messages are reused.
        """
        return self._bounds.successor(epoch, seq)

    @property
    def is_settled(self) -> bool:
        """Whether all messages are synced."""
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
        """Append records; `head` counts those written, also when it raises.

        :raises StorageError: the disk is full.
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
            runs = groupby(types) if len(set(types)) > 1 else ((types[0], types),)
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
            first.write(records, types)
        finally:
            self.head = len(first.records)

    def _check(self, found: int, expected: int) -> None:
        if found != expected:
            hint = "nobody else may write to it, or remove it; restart the dispatcher"
            raise DamagedQueue(self._url, "head", 0, expected, found, hint=hint)

    def read(self, which: str, at: int, count: int) -> tuple[list[Message], int]:
        """Return up to `count` messages from `at` on, and where to continue.

        Numbers missing in between are no longer in the log.

        :raises DamagedQueue: the log cannot be read there.
        """
        if self._first is not None:
            return _read_first(self._first, at, count)
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

    def payloads(self) -> set[bytes]:
        """Return the payloads of all readable messages."""
        found: set[bytes] = set()
        at = self.oldest
        while at < self.head:
            messages, at = self.read("any", at, _AT_ONCE)
            found.update(message.payload for message in messages)
        return found

    def last_message(self) -> Message | None:
        """Return the newest message, or None."""
        if self._first is not None:
            messages, _ = _read_first(self._first, self.head - 1, 1)
            return messages[0] if messages else None
        reader = self._reader("any")
        self._places.pop("any", None)
        reader.seek(Position.LAST)
        return reader.read(0)

    # --- called by the upkeep thread, never during `suspend` -------------------------------------

    def sync(self) -> None:
        """Sync all messages to the disk.

        :raises StorageError: the device refuses.
        """
        head = self.head
        if self._writer is not None and head != self._synced:
            self._writer.sync()
            if self._is_new:  # its files were created without a sync
                with storage_errors("syncing", str(self._folder)):
                    sync_files(self._folder)
                    sync_names(self._folder.parent)
                self._is_new = False
            self._synced = head

    def free(self, floor: int) -> None:
        """Remove the segments that are entirely below the floor.

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


def _read_first(first: FirstMessages, at: int, count: int) -> tuple[list[Message], int]:
    found = enumerate(first.records[at : at + count], at)
    messages = [Message(seq, 0, 0, kind, 0, None, None, record) for seq, (record, kind) in found]
    return messages, at + len(messages)


#: Token of the outbox; class of the message, or `_LABEL` or `_GONE`; type of the message.
_HEADER: Final = struct.Struct("<QBB")
#: The label of an outbox follows, as JSON; the entries of an outbox are obsolete.
_LABEL, _GONE = 0xFE, 0xFF
#: The field of a label that distinguishes successive outboxes of the same folder.
_ID: Final = "id"
#: An outbox leaves the common log when it has more bytes than the first, or when the log has grown
#: by more than the second since the outbox began.
_MOST_OF_ONE: Final = 64 << 10
_MOST_BEHIND: Final = 8 << 20


class _Place(NamedTuple):
    """A position in the common log: a message number, and the bytes before it."""

    seq: int
    bytes: int


class CommonLog:
    """One log for the first messages of all new outboxes. Thread-safe."""

    def __init__(self, folder: Path, segment: int, sync: Sync) -> None:
        self._folder = folder
        size = segment + _HEADER.size
        slots = max(2, size // _PER_SLOT)
        self._options = LogOptions(segment=size, segment_slots=slots, sync=sync)
        self._lock = threading.Lock()
        self._writer: LogWriter | None = None
        #: The start of each outbox without files, by token.
        self._begins: dict[int, _Place] = {}
        self._end = _Place(0, 0)
        self._trimmed = 0
        #: Number of messages that `open` found damaged, or without the label of their outbox.
        self.damaged = 0

    def open(self) -> list[FirstMessages]:
        """Open the log, if it exists; return the outboxes without files.

        :raises StorageError: the operating system refuses.
        """
        if not is_log(self._folder):
            return []
        url = f"log:{self._folder}"
        # The writer repairs the log after a power failure.
        self._writer = open_log_writer(url, self._folder, self._options)
        found: dict[int, FirstMessages] = {}
        #: Number of messages by token whose label is missing.
        strays: Counter[int] = Counter()
        options = LogOptions(damaged="skip")
        with open_log_reader(url, self._folder, Position.START, options) as reader:
            while messages := reader.read_many(_AT_ONCE):
                for message in messages:
                    self._meet(message, found, strays)
            lost, end = reader.statistics().lost, reader.bounds().end
        # Without its label nobody knows whose a message is. The labels are no messages.
        self.damaged = max(0, lost - len(strays)) + strays.total()
        if self.damaged:
            log.error("%s: %d messages of new receivers are damaged", self._folder, self.damaged)
        self._end = _Place(end, self._end.bytes)
        if not found:
            self.close()
        return list(found.values())

    def _meet(
        self, message: Message, found: dict[int, FirstMessages], strays: Counter[int]
    ) -> None:
        token, tag, kind = _HEADER.unpack_from(message.payload)
        rest = message.payload[_HEADER.size :]
        if tag == _LABEL:
            self._begins[token] = _Place(message.seq, self._end.bytes)
            found[token] = FirstMessages(self, token, rest, is_labelled=True)
        elif tag == _GONE:
            found.pop(token, None)
            strays.pop(token, None)  # the segment of its label was removed
            self._begins.pop(token, None)
        elif token in found:
            found[token].add([(with_class(rest, tag), kind)])
        else:
            strays[token] += 1
        self._end = _Place(message.seq + 1, self._end.bytes + len(message.payload))

    def begin(self, label: Mapping[str, str]) -> FirstMessages:
        """Return the store of a new outbox's first messages; `label` identifies the outbox."""
        token = secrets.randbits(63)
        return FirstMessages(self, token, json.dumps({**label, _ID: token}).encode())

    def write(self, token: int, payloads: Sequence[bytes]) -> int:
        """Append payloads; return how many were written, fewer than given if the disk is full.

        :raises StorageError: none could be written.
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
        """Tell whether one outbox keeps too much of the log from being trimmed."""
        begin = self._begins.get(token)
        return begin is not None and self._end.bytes - begin.bytes > _MOST_BEHIND

    def end(self, token: int) -> None:
        """Note that the entries of an outbox are obsolete: it has its own files, or is gone."""
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
        """Sync the log to the disk.

        :raises StorageError: the device refuses.
        """
        if self._writer is not None:
            self._writer.sync()

    def close(self) -> None:
        """Close the log; remove it if no outbox needs it.

        :raises StorageError: the device refuses.
        """
        with self._lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
                if not self._begins:
                    shutil.rmtree(self._folder, ignore_errors=True)
                    self._end, self._trimmed = _Place(0, 0), 0  # the next log starts at 0


class FirstMessages:
    """The messages of an outbox without files: in the common log and in memory."""

    def __init__(
        self, common: CommonLog, token: int, label: bytes, *, is_labelled: bool = False
    ) -> None:
        self._common = common
        self._token = token
        self.label = label
        self._is_labelled = is_labelled
        #: The records and their types.
        self.records: list[tuple[bytes, int]] = []
        self._bytes = 0

    def add(self, records: Sequence[tuple[bytes, int]]) -> None:
        """Add records that are in the common log."""
        self.records.extend(records)
        self._bytes += sum(len(record) for record, _ in records)

    def write(self, records: Sequence[bytes], types: Sequence[int]) -> None:
        """Append records; `self.records` has those written, also when it raises.

        :raises StorageError: the disk is full.
        """
        token = self._token
        left = list(zip(records, types, strict=True))
        while left:
            own = [_HEADER.pack(token, record[_CLASS_AT], kind) + record for record, kind in left]
            if not self._is_labelled:
                own.insert(0, _HEADER.pack(token, _LABEL, 0) + self.label)
            count = self._common.write(token, own) - (not self._is_labelled)
            self._is_labelled = True
            self.add(left[:count])
            del left[:count]

    def has_room(self, size: int) -> bool:
        """Tell whether `size` more bytes may be written."""
        return self._bytes + size <= _MOST_OF_ONE

    @property
    def has_to_go(self) -> bool:
        """Whether the outbox now needs its own files."""
        return self._common.is_far_behind(self._token)

    def end(self) -> None:
        """Mark the entries as obsolete: the outbox has its own files, or is gone."""
        self._common.end(self._token)
