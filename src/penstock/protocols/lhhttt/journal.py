"""How are the messages of a queue stored, read ahead, redelivered and settled?

A log on disk (the journal) or in memory, with one writer and one consumer group. The group knows
only that this queue holds what it has read; the queue knows which client holds which message.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import shutil
import tempfile
import time
from bisect import bisect_right
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import LeaseLost, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.url import URL
from penstock.protocols.lhhttt.commands import format_tags
from penstock.protocols.lhhttt.frames import Frames
from penstock.protocols.lhhttt.runs import Run, RunMap, count_of, merged, runs_of_batch
from penstock.queue.groups.reader import GroupReader
from penstock.queue.log.settings import load_settings
from penstock.queue.log.writer import LogWriter
from penstock.queue.storage import LockFile, storage_errors
from penstock.queue.wide.layout import Compression

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Ancestor
    from penstock.core.message import Message
    from penstock.protocols.lhhttt.commands import Tags
    from penstock.protocols.lhhttt.interface import QueueSettings
    from penstock.protocols.lhhttt.runs import Range

__all__ = ["Journal"]

log = logging.getLogger(__name__)

#: The group in the log.
_GROUP: Final = "lhhttt"
#: Messages, and about how many bytes of them, that are read ahead of those who ask.
_AHEAD: Final = 2048
_AHEAD_BYTES: Final = 1 << 20
#: What is done is settled when there is so much of it, or after so many seconds.
_SETTLED_AT_ONCE: Final = 4096
_SETTLED_AFTER: Final = 0.02
#: Seconds after which that is tried again when it failed.
_SETTLED_AGAIN: Final = 1.0
#: A message whose delay is over, and which does not come, is looked for again after so long.
_LOOKED_FOR_AGAIN: Final = 1.0
#: Seconds between two looks at how much memory a log takes.
_LOOKED_AT_MEMORY: Final = 0.5
#: Messages at the end of a journal in which repeated requests of before a restart are looked for.
_REMEMBERED_MESSAGES: Final = 100_000
#: Bytes in a segment of a log in memory, and so of a message, at least and at most.
_SEGMENT: Final = 1 << 20
_LARGEST_SEGMENT: Final = 64 << 20
#: Where logs in memory are, by which name, and what of them their owner locks.
_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - each is its owner's alone
_NAME: Final = "penstock-lhhttt-"
_LOCK: Final = "owner.lock"
#: Tells of a message that it belongs to no request.
_NOBODYS: Final = b"-"
#: Bytes that the note of a message takes in its segment, at most: see `_write_noted`.
_LARGEST_NOTE: Final = 96


class Journal(Closable):
    """The messages of one queue. Not safe to share between threads."""

    def __init__(
        self,
        settings: QueueSettings,
        remember: Callable[[bytes, int, int], None],
        come_by: Callable[[float], None],
    ) -> None:
        """Open the journal, or make a log in memory.

        :param remember: called with each stored request: client, number, messages that are missing
        :param come_by: called with the time at which `redeliver` and `settle` are due

        :raises PenstockError: the journal cannot be opened, or another has it.
        """
        self._settings = settings
        self._come_by = come_by
        #: Messages at hand: those that come again, which are given first, and the others.
        self._again = RunMap()
        self._ready: deque[Run] = deque()
        self._ready_count = 0
        #: Messages that the group gives again after a while; and when which of them.
        self._delayed = RunMap()
        self._due: list[tuple[float, list[Range]]] = []
        #: Those of them that the group does not know yet: it could not be written.
        self._returned: list[tuple[float, list[Range]]] = []
        self._is_unreadable = False
        #: Messages to be settled, and by when.
        self._done: list[Range] = []
        self._done_count = 0
        self._settle_at: float | None = None
        self._is_failing = False
        #: Messages that are not done; those of them that were given out; and the bytes of all.
        self.held = self.out = self.held_bytes = 0
        #: The number behind all that were ever given out, and those below it that were given to
        #: nobody since the start.
        self._given = 0
        self._unseen = RunMap()
        self.recovered = self.queued = self.redelivered = 0
        #: Messages that went to the dead letters since the beginning of the group.
        self._dead = 0
        #: Whether messages of a request are missing behind the last that is stored.
        self._is_cut = False
        self._is_unsynced = False
        #: Whether the log is as large in memory as it may be; when to look next; and how many
        #: messages were stored when somebody looked last.
        self.is_pinned = False
        self._looks_at = 0.0
        self._looked_at = 0
        #: What all was settled below, when it was looked at last.
        self._floor = -1
        self._memory = _MemoryFolder() if settings.journal is None else None
        try:
            self._open(remember)
        except BaseException:
            if self._memory is not None:
                self._memory.close()
            raise

    def _open(self, remember: Callable[[bytes, int, int], None]) -> None:
        settings = self._settings
        if settings.journal is None:
            assert self._memory is not None
            segment = min(max(_SEGMENT, settings.capacity_bytes), _LARGEST_SEGMENT)
            kept = settings.capacity_bytes + segment
            url = f"log:{self._memory.path}/queue?segment={segment}&retain={kept}&crc=false"
            self._syncs = False
        else:
            url = settings.journal
            # By batches of requests, and not by messages.
            self._syncs = URL.parse(url).options.get("sync") == "batch"
        path = url.partition("?")[0]
        sync = {"sync": "none"} if self._syncs or self._memory else {}
        writer = open_writer(url, hold=f"group:{_GROUP}", **sync)
        assert isinstance(writer, LogWriter)
        self._writer = writer
        letters = {"deliveries": settings.deliveries, "dead": settings.dead}
        given = {name: value for name, value in letters.items() if value is not None}
        try:
            note = _LARGEST_NOTE if self._memory is None else 0
            #: The largest message that the log certainly takes, in bytes.
            self.largest = _largest(Path(URL.parse(path).path), note)
            # Nobody else is in the group: what this queue has stays its own, however long it takes.
            reader = open_reader(path, group=_GROUP, lease="365d", **sync, **given)
            assert isinstance(reader, GroupReader)
            self._reader = reader
            try:
                self._recover(path, remember)
            except BaseException:
                reader.close()
                raise
        except BaseException:
            writer.close()
            raise

    def _recover(self, path: str, remember: Callable[[bytes, int, int], None]) -> None:
        """Count what the log holds, and recall the requests that stored it."""
        books = self._reader.group()
        self.held = self.recovered = books.lag
        self._dead = self._dead_before = books.dead
        self._given = books.next_seq
        unsettled = self._reader.unsettled([(books.floor, books.next_seq)])
        for first, end in unsettled:
            unread = memoryview(bytes(4 * (end - first + 1))).cast("i")
            self._unseen.add(Run(first, unread, b""))
        is_held = _membership([*unsettled, (books.next_seq, 1 << 63)])
        with open_reader(path) as reader:
            bounds = reader.bounds()
            self._epoch: int = bounds.epoch
            self._lineage: tuple[Ancestor, ...] = bounds.lineage
            first = min(books.floor, bounds.end - _REMEMBERED_MESSAGES)
            reader.seek(max(bounds.oldest, first))

            def messages() -> Iterator[Message]:
                while some := reader.read_many(1000):
                    self.held_bytes += sum(len(each.payload) for each in some if is_held(each.seq))
                    yield from some

            for client, seq, left in _requests(messages()):
                self._is_cut = left > 0
                if client:
                    remember(client, seq, left)

    # --- storing ------------------------------------------------------------------------------

    def append(
        self, messages: Sequence[bytes], size: int, request: tuple[bytes, int] | None = None
    ) -> None:
        """Store messages of `size` bytes in all, for a client's request or for a legacy PUT.

        :raises PenstockError: some could not be stored; those before them are counted.
        """
        stored = len(messages)
        try:
            if self._memory is not None or not messages:
                self._write(messages)
            else:
                self._write_noted(messages, request)
        except PenstockError:
            stored = self._writer.statistics().messages - self.queued
            size = sum(map(len, messages[:stored]))
            raise
        finally:
            self._is_unsynced = True
            if stored:
                self._is_cut = request is not None and stored < len(messages)
            self.queued += stored
            self.held += stored
            self.held_bytes += size

    def _write_noted(self, messages: Sequence[bytes], request: tuple[bytes, int] | None) -> None:
        """Store messages; the first and the last of a request carry its client and number.

        The first also says how many follow, so that after a crash in between it is known how many
        are missing. See `_requests`.
        """
        write, left = self._writer.write, len(messages) - 1
        if request is None:
            if self._is_cut:
                write(messages[0], attributes=_NOBODYS)
            self._write(messages[1:] if self._is_cut else messages)
            return
        if left:
            write(messages[0], attributes=b"%b:%d:%d" % (*request, left))
            self._write(messages[1:-1])
        write(messages[-1], attributes=b"%b:%d:0" % request)

    def _write(self, messages: Sequence[bytes]) -> None:
        if isinstance(messages, Frames):
            self._writer.write_parts(messages.data, messages.places)
        else:
            self._writer.write_many(messages)

    def sync(self) -> None:
        """Sync the log to disk, if the journal's options ask for it."""
        if self._syncs and self._is_unsynced:
            self._writer.sync()
            self._is_unsynced = False

    # --- giving -------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Messages that are neither leased nor delayed."""
        return self.held - self.out - self._delayed.count

    @property
    def delayed_bytes(self) -> int:
        """Bytes of the messages that wait for their redelivery time."""
        return self._delayed.size

    def next(self) -> Run | None:
        """Return the next run of deliverable messages, or None."""
        if not self._again.count and not self._ready:
            self._read_ahead()
        return self._again.next() or (self._ready[0] if self._ready else None)

    def take(self, run: Run, count: int) -> Run:
        """Hand out the first messages of the run that `next` returned."""
        part = run.part(run.first, run.first + count)
        if self._ready and run is self._ready[0]:
            self._ready.popleft()
            self._ready_count -= count
            if count < run.count:
                self._ready.appendleft(run.part(part.end, run.end))
        else:
            self._again.remove(part)
        self.out += count
        self._given = max(self._given, part.end)
        if self._unseen.count:
            self._unseen.take(*part.range)
        return part

    def not_given(self, first: int, end: int) -> list[Range]:
        """Return the parts of a range that are not done, and were given to nobody here."""
        fresh = max(first, self._given)
        unseen = [part.range for part in self._unseen.within(first, end)]
        return [*unseen, (fresh, end)] if fresh < end else unseen

    def take_again(self, first: int, end: int) -> list[Run]:
        """Hand out again the messages of a range that are ready for redelivery."""
        runs = self._again.take(first, end)
        self.out += sum([run.count for run in runs])
        return runs

    def _read_ahead(self) -> None:
        if self.waiting <= self._ready_count + self._again.count:
            return
        # What is leased keeps all in memory that was read with it.
        most = _AHEAD_BYTES * self.held // max(1, self.held_bytes)
        try:
            batch = self._reader.read_batch(min(_AHEAD, max(1, most)))
            self._take_in(batch)
            if not len(batch):
                self._recount()
        except PenstockError as error:
            self._note_unreadable(error)
        else:
            self._is_unreadable = False

    def _take_in(self, batch: Batch) -> int:
        """Sort a batch into new and redelivered messages; return the number of redelivered ones."""
        before = self.redelivered
        for run in runs_of_batch(batch):
            at = run.first
            for part in self._delayed.take(*run.range):
                self._make_ready(run, at, part.first)
                self._again.add(run.part(*part.range))
                self.redelivered += part.count
                at = part.end
            self._make_ready(run, at, run.end)
        return self.redelivered - before

    def _make_ready(self, run: Run, first: int, end: int) -> None:
        if first < end:
            self._ready.append(run.part(first, end))
            self._ready_count += end - first

    def _recount(self) -> None:
        """Update the counters with what the group settled itself: dead letters and losses."""
        books = self._reader.group()
        self._dead = books.dead
        self.held = books.lag - self._done_count
        if not self.held:
            self.held_bytes = 0

    # --- what comes back ----------------------------------------------------------------------

    def finish(self, runs: Sequence[Run]) -> None:
        """Note that handed-out messages are done."""
        if not runs:
            return
        ranges = [run.range for run in runs]
        count = count_of(ranges)
        self.out -= count
        self.held -= count
        self.held_bytes -= sum([run.size for run in runs])
        self._done += ranges
        self._done_count += count
        if self._settle_at is None:
            self._settle_at = time.monotonic() + _SETTLED_AFTER
            self._come_by(self._settle_at)

    def settle(self, now: float, *, everything: bool = False) -> None:
        """Settle finished messages in the group, when enough have gathered or time is up.

        While the group's file cannot be written, they wait: only a restart would redeliver them.

        :raises PenstockError: it cannot be written, and `everything` is asked for.
        """
        if self._settle_at is None:
            return
        is_due = now >= self._settle_at
        if not self._done and not self._is_failing:
            self._settle_at = None if is_due else self._settle_at
            return
        if everything or is_due or (self._done_count >= _SETTLED_AT_ONCE and not self._is_failing):
            try:
                # Those that it does not hold were settled by a call before, which failed later.
                with contextlib.suppress(LeaseLost):
                    self._reader.ack_ranges(merged(self._done))
                self._done, self._done_count = [], 0
                if self._is_failing:
                    self._recount()
            except PenstockError as error:
                if everything:
                    raise
                if not self._is_failing:
                    log.warning("finished messages are not settled, and wait: %s", error)
                self._is_failing = True
                self._settle_at = now + _SETTLED_AGAIN
                return
            self._is_failing = False
            # More is likely to be done soon: the timer comes by itself, and is not woken for it.
            self._settle_at = now + _SETTLED_AFTER

    def give_again(self, runs: Sequence[Run], delay: float = 0.0) -> None:
        """Take handed-out messages back, and redeliver them after `delay` seconds."""
        if not runs:
            return
        ranges = merged([run.range for run in runs])
        self.out -= count_of(ranges)
        for run in runs:
            self._delayed.add(Run(run.first, run.offsets, b""))  # it is read again
        now = time.monotonic()
        self._returned.append((now + delay, ranges))
        heapq.heappush(self._due, (now + delay, ranges))
        self._come_by(now + delay)
        self.redeliver(now)

    def redeliver(self, now: float) -> None:
        """Read the messages that are due for redelivery; try again later if that fails."""
        ranges: list[Range] = []
        while self._due and self._due[0][0] <= now:
            ranges += heapq.heappop(self._due)[1]
        try:
            self._return(now)
            self._read_again(ranges, now)
        except PenstockError as error:
            self._note_unreadable(error)
            heapq.heappush(self._due, (now + _LOOKED_FOR_AGAIN, ranges))
        else:
            self._is_unreadable = False

    def _return(self, now: float) -> None:
        while self._returned:
            due, ranges = self._returned[0]
            # Those that it does not hold were returned by a call before, which failed later.
            with contextlib.suppress(LeaseLost):
                self._reader.nack_ranges(ranges, max(0.0, due - now))
            del self._returned[0]

    def _read_again(self, ranges: Sequence[Range], now: float) -> None:
        while missing := [part.range for each in ranges for part in self._delayed.within(*each)]:
            if not self._take_in(self._reader.read_batch(count_of(missing))):
                break
        if not missing:
            return
        # The group made dead letters of some, or has lost them; the rest may come yet.
        left = self._reader.unsettled(missing)
        runs = [run for each in left for run in self._delayed.take(*each)]
        for run in [run for each in missing for run in self._delayed.take(*each)]:
            self.held_bytes -= run.size
        for run in runs:
            self._delayed.add(run)
        if left:
            heapq.heappush(self._due, (now + _LOOKED_FOR_AGAIN, left))
        self._recount()

    def _note_unreadable(self, error: PenstockError) -> None:
        if not self._is_unreadable:
            log.warning("messages cannot be read or given back, and wait: %s", error)
        self._is_unreadable = True

    def delayed(self, first: int, end: int) -> list[Range]:
        """Return the part of a range that waits for its redelivery time."""
        return [part.range for part in self._delayed.within(first, end)]

    @property
    def comes_at(self) -> float | None:
        """When `redeliver` or `settle` is due next, or None."""
        moments = [self._settle_at, self._due[0][0] if self._due else None]
        return min([each for each in moments if each is not None], default=None)

    # --- tags ---------------------------------------------------------------------------------

    @property
    def epochs(self) -> frozenset[int]:
        """The epochs in the tags of its messages."""
        return frozenset(epoch for epoch, _, _ in self._numbering())

    def _numbering(self) -> Iterator[tuple[int, int, int]]:
        """Yield each epoch of the log with its first number and the first of the next epoch."""
        first = 0
        for ancestor in self._lineage:
            yield ancestor.epoch, first, ancestor.end
            first = ancestor.end
        yield self._epoch, first, 1 << 63

    def tags_of(self, ranges: Iterable[Range]) -> bytes:
        """Return the tags of messages, in the order of their numbers."""
        return format_tags(
            [
                (epoch, max(first, low), min(end, high) - 1)
                for first, end in merged(ranges)
                for epoch, low, high in self._numbering()
                if first < high and low < end
            ]
        )

    def ranges_of(self, tags: Tags) -> tuple[list[Range], Tags]:
        """Return the message numbers that tags name, and the tags that were never issued."""
        known: list[Range] = []
        unknown: list[tuple[int, int, int]] = []
        spans = {epoch: range(low, high) for epoch, low, high in self._numbering()}
        for epoch, first, last in tags:
            span = spans.get(epoch, range(0))
            if first in span and last in span:
                known.append((first, last + 1))
            else:
                unknown.append((epoch, first, last))
        return known, unknown

    # --- memory, books, and the end -----------------------------------------------------------

    def look_at_memory(self, now: float) -> None:
        """Check whether one old message keeps too much of an in-memory log alive."""
        has_grown = self.queued != self._looked_at or self.is_pinned
        if self._memory is None or now < self._looks_at or not has_grown:
            return
        self._looks_at = now + _LOOKED_AT_MEMORY
        self._looked_at = self.queued
        used = self._memory.used()
        books = self._reader.group()
        # The log gives memory back as it is written to: so it has to go on when the oldest is done.
        is_stuck = books.lag > 0 and books.floor == self._floor
        self._floor = books.floor
        is_pinned = is_stuck and used > 2 * (self._settings.capacity_bytes + _LARGEST_SEGMENT)
        if is_pinned and not self.is_pinned:
            log.warning("the queue takes no more until its oldest message is done: it fills memory")
        self.is_pinned = is_pinned

    def count_dead(self) -> tuple[int, int]:
        """Return the number of dead letters, and of messages that the log lost."""
        self._recount()
        return self._dead - self._dead_before, self._reader.statistics().lost

    def close(self) -> None:
        """Settle finished messages; leased ones are redelivered after the next start."""
        try:
            self.settle(time.monotonic(), everything=True)
            # What no client was given has not been delivered.
            ahead = [run.range for run in (*self._ready, *self._again.within(0, 1 << 63))]
            self._reader.give_back_ranges(merged(ahead))
        finally:
            self._reader.close()
            self._writer.close()
            if self._memory is not None:
                self._memory.close()


def _largest(folder: Path, note: int) -> int:
    """Return the size of the largest message that a log certainly takes, with its note."""
    settings = load_settings(folder)
    assert settings is not None  # the log's writer has saved them
    largest = settings.geometry.buffer_size - note
    if settings.compress is not Compression.NONE:  # what cannot be compressed becomes larger
        largest -= largest // 128 + 256
    return largest


def _membership(ranges: Sequence[Range]) -> Callable[[int], bool]:
    """Return a function that tells whether a number is in one of some sorted ranges."""
    starts = [first for first, _ in ranges]

    def is_within(number: int) -> bool:
        at = bisect_right(starts, number) - 1
        return at >= 0 and number < ranges[at][1]

    return is_within


def _requests(messages: Iterable[Message]) -> Iterator[tuple[bytes, int, int]]:
    """Yield for each message its request: client, number, and how many messages follow."""
    client, seq, left = b"", 0, 0
    for message in messages:
        if message.attributes is None:
            client, left = (client, left - 1) if left else (b"", 0)
        else:
            client, seq, left = _parse_note(message.attributes)
        yield client, seq, left


def _parse_note(attributes: bytes) -> tuple[bytes, int, int]:
    name, _, left = attributes.rpartition(b":")
    name, _, seq = name.rpartition(b":")
    if name and seq.isdigit() and left.isdigit():
        return name, int(seq), int(left)
    return b"", 0, 0  # the journal was another's before


class _MemoryFolder(Closable):
    """A folder in shared memory that is removed on close.

    Its owner holds a lock in it. A folder whose lock is free belonged to a killed process, and the
    next queue removes it.
    """

    def __init__(self) -> None:
        """Create the folder, and remove those of killed processes.

        :raises StorageError: there is not enough memory.
        """
        _remove_left()
        with storage_errors("creating a folder in", str(_MEMORY)):
            # Locked before it has the name by which others look for it.
            hidden = Path(tempfile.mkdtemp(prefix=f".{_NAME}", dir=_MEMORY))
            try:
                (hidden / _LOCK).touch()
                self._lock = LockFile(str(hidden / _LOCK))
                self._lock.try_lock(0)
                self.path = hidden.rename(_MEMORY / hidden.name.removeprefix("."))
            except BaseException:
                shutil.rmtree(hidden, ignore_errors=True)
                raise

    def used(self) -> int:
        """Return the bytes of memory that the folder takes."""
        used = 0
        for each in self.path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                used += each.stat().st_blocks * 512
        return used

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_left() -> None:
    for folder in _MEMORY.glob(f"{_NAME}*"):
        with contextlib.suppress(OSError, PenstockError):
            if folder.lstat().st_uid == os.geteuid() and _is_left(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(path: Path) -> bool:
    """Tell whether the lock is free: its owner is dead.

    :raises NotFound: there is nothing to lock.
    """
    lock = LockFile(str(path))
    try:
        return not lock.is_locked(0)
    finally:
        lock.close()
