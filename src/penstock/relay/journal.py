"""How does a relay know, after it was killed, what it had copied?

Before a batch is written to the target, a note records its messages and its start in the target.
It overwrites the note before the last one, so one of the two is always intact. A note means that
everything before it arrived; how much of its batch arrived is found in the target itself. A third
slot records a state that was on disk on both sides, for recovery after a power failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.capabilities import AppendOnce, Replayable
from penstock.core.errors import (
    CursorInUse,
    DamagedQueue,
    InvalidOption,
    NotFound,
    PenstockError,
    Unsupported,
)
from penstock.core.interfaces import Closable
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.core.whole_files import make_whole
from penstock.queue.storage import LockFile, storage_errors
from penstock.queue.wide.file import boot_id
from penstock.relay.outages import side

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader

__all__ = [
    "MOST_RUNS",
    "Arrived",
    "Journal",
    "Note",
    "Tail",
    "TargetCut",
    "arrived",
    "bounds_of",
    "check_end",
    "resume",
    "runs_of",
]

# --- the journal --------------------------------------------------------------------------------

_MAGIC: Final = b"PNRELAY\0"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sII")
_SLOT_SIZE: Final = 8192
_SLOTS: Final = 3
_SYNCED: Final = 2
#: CRC of what follows; generation, source epoch, next, target epoch, target start, has target,
#: runs.
_NOTE: Final = struct.Struct("<IQQQQQII")
_RUN: Final = struct.Struct("<QQ")
_LOCK: Final = 1 << 62
#: At the end of the header: the boot id of the machine while it is in use; zeros: it is synced.
_BOOT_AT: Final = _SLOT_SIZE - 16

#: The most runs of consecutive numbers in one note; a batch with more is split.
MOST_RUNS: Final = (_SLOT_SIZE - _NOTE.size) // _RUN.size


class Note(NamedTuple):
    """The last batch that a relay started to write."""

    #: The epoch of the source's sequence numbers.
    source_epoch: int
    #: The first message after the batch.
    next: int
    #: The epoch of the target, and the first number of the batch in it; None: unknown.
    target: tuple[int, int] | None = None
    #: The messages of the batch: the first number and the count of each run. Empty: it arrived.
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def messages(self) -> int:
        return sum(length for _, length in self.runs)


def runs_of(seqs: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return the runs of consecutive numbers, as first number and length."""
    if not len(seqs):
        return ()
    starts = np.flatnonzero(np.diff(seqs) != 1) + 1
    edges = [0, *starts.tolist(), len(seqs)]
    return tuple((int(seqs[a]), b - a) for a, b in pairwise(edges))


class Journal(Closable):
    """The file with the notes of one relay. For one process at a time."""

    def __init__(self, path: Path, source: str, target: str) -> None:
        """Open or create it.

        :raises CursorInUse: another process uses it.
        :raises DamagedQueue: the file is not a journal.
        :raises InvalidOption: it belongs to a relay of other streams.
        :raises StorageError: the operating system refuses.
        """
        self.path = path
        names = [str(side(url).identity(URL.parse(url))) for url in (source, target)]
        self._between = json.dumps(names).encode()
        plain = [url.partition("?")[0] for url in (source, target)]
        #: The key in earlier releases: the URLs, without their options.
        self._between_urls = json.dumps(plain).encode()
        if len(self._between) > _BOOT_AT - _HEADER.size:
            raise InvalidOption("state", str(path), "the URLs are too long to be kept in it")
        with storage_errors("opening", str(path)):
            if not path.exists():
                head = _HEADER.pack(_MAGIC, _VERSION, len(self._between)) + self._between
                make_whole(path, head.ljust(_SLOT_SIZE * (1 + _SLOTS), b"\0"))
            self._locks = LockFile(str(path))
        try:
            self._fd = self._locks.fd
            self._check()
            self._generation, self._note = max(
                (self._load(slot) for slot in (0, 1)), key=lambda found: found[0]
            )
            self.synced = self._load(_SYNCED)[1]
            #: Whether the machine crashed since: notes may be missing that were not synced.
            self.is_behind = self._begin_boot()
        except BaseException:
            self._locks.close()
            raise

    @property
    def note(self) -> Note | None:
        """The last note; None before the first."""
        return self._note

    def put(self, note: Note) -> None:
        """Write a note. It survives the end of this process, but not a power failure; see `sync`.

        :raises StorageError: the operating system refuses.
        """
        self._generation += 1
        self._write(self._generation % 2, note)
        self._note = note

    def sync(self, on_disk: Note | None) -> None:
        """Sync the journal, with a note of what the target has on disk; None: that is unknown.

        :raises StorageError: the operating system refuses.
        """
        if on_disk is not None:
            self._write(_SYNCED, on_disk)
            self.synced = on_disk
        with storage_errors("writing", str(self.path)):
            os.fdatasync(self._fd)

    def close(self) -> None:
        if self._locks.is_open and self.synced is not None and self.synced == self._note:
            with contextlib.suppress(OSError):  # then what it says is checked
                os.pwrite(self._fd, bytes(16), _BOOT_AT)
        self._locks.close()

    def _begin_boot(self) -> bool:
        """Store the boot id on the disk; tell whether there is that of an earlier run."""
        with storage_errors("writing", str(self.path)):
            now = boot_id().ljust(16, b"\0")
            before = os.pread(self._fd, 16, _BOOT_AT)
            if before != now:
                os.pwrite(self._fd, now, _BOOT_AT)
                os.fdatasync(self._fd)
        return any(before) and before != now

    def _check(self) -> None:
        if not self._locks.try_lock(_LOCK):
            hint = "end the other relay, or give this one a state of its own"
            raise CursorInUse(str(self.path), 0, hint=hint)
        with storage_errors("reading", str(self.path)):
            head = os.pread(self._fd, _SLOT_SIZE, 0)
        if len(head) < _HEADER.size or head[: len(_MAGIC)] != _MAGIC:
            hint = "give the path of a relay's state, or of a file that is not there yet"
            raise DamagedQueue(str(self.path), "magic", 0, _MAGIC, head[:8], hint=hint)
        _, version, length = _HEADER.unpack_from(head)
        if version != _VERSION:
            raise Unsupported(
                f"{self.path} is the state of a relay of version {version}; this Penstock knows "
                f"{_VERSION}",
                hint="use the Penstock that made it, or a newer one",
            )
        between = head[_HEADER.size : _HEADER.size + length]
        if between not in {self._between, self._between_urls}:
            raise InvalidOption(
                "state",
                str(self.path),
                f"belongs to a relay between {between.decode(errors='replace')}",
                hint="give this relay a state of its own",
            )

    def _write(self, slot: int, note: Note) -> None:
        epoch, start = note.target or (0, 0)
        body = _NOTE.pack(
            0,
            self._generation,
            note.source_epoch,
            note.next,
            epoch,
            start,
            note.target is not None,
            len(note.runs),
        )[4:] + b"".join(_RUN.pack(*run) for run in note.runs)
        data = struct.pack("<I", zlib.crc32(body)) + body
        with storage_errors("writing", str(self.path)):
            os.pwrite(self._fd, data, _SLOT_SIZE * (1 + slot))

    def _load(self, slot: int) -> tuple[int, Note | None]:
        """Return the generation and note of a slot; (0, None) if it is empty or torn."""
        with storage_errors("reading", str(self.path)):
            data = os.pread(self._fd, _SLOT_SIZE, _SLOT_SIZE * (1 + slot))
        if len(data) < _NOTE.size:
            return 0, None
        crc, generation, source_epoch, seq, epoch, start, has_target, runs = _NOTE.unpack_from(data)
        end = _NOTE.size + runs * _RUN.size
        if runs > MOST_RUNS or not generation or zlib.crc32(data[4:end]) != crc:
            return 0, None
        return generation, Note(
            source_epoch,
            seq,
            (epoch, start) if has_target else None,
            tuple(_RUN.iter_unpack(data[_NOTE.size : end])),
        )


# --- what arrived in the target -----------------------------------------------------------------

#: Fields that must be equal.
_COMPARED: Final = ("payload", "type", "subtype", "time_ns", "stream", "attributes")
_AT_ONCE: Final = 1000


class Tail(NamedTuple):
    """The end of a target: its epoch, and the sequence number of its next message."""

    epoch: int
    seq: int


class TargetCut(PenstockError):
    """A target lost copied messages in a power failure."""

    def __init__(self, url: str, missing: int) -> None:
        hint = "with --state they are copied again; otherwise copy them by --from"
        super().__init__(
            f"{url} lost its last {missing:,} messages, which were copied, with the power",
            hint=hint,
        )
        self.url = url
        #: How many messages were lost.
        self.missing = missing


def check_end(url: str, bounds: Bounds, tail: Tail) -> int | None:
    """Return the number of `tail` in the current epoch of a target; None: it was recreated.

    :raises TargetCut: messages before `tail` are missing.
    """
    start = bounds.successor(tail.epoch, tail.seq)
    if start is None or not bounds.epoch:  # a classic queue has no epoch
        return start
    if min(start, bounds.end) < tail.seq:
        raise TargetCut(url, tail.seq - min(start, bounds.end))
    return start


def bounds_of(url: str, options: dict[str, str]) -> Bounds | None:
    """Return the bounds of a target; None: unknown.

    :raises ConnectionLost: its server cannot be reached.
    """
    with _Target(url, options) as target:
        return target.bounds


class Arrived(NamedTuple):
    """What is known of a batch in the target."""

    #: How many messages, from the first on, are or were there.
    messages: int
    #: How many of the others may have been there: as many of somebody's are overwritten.
    in_doubt: int
    #: The end of the target now; None: unknown.
    end: Tail | None


def arrived(
    url: str,
    options: dict[str, str],
    tail: Tail,
    batch: Batch,
    lacking: Collection[str] = (),
) -> Arrived:
    """Look for the messages of a batch in the target after `tail`.

    They are searched one by one, in order, so messages of other writers do not matter. Overwritten
    ones had arrived if a later one of the batch is there. `lacking` are the fields that the target
    does not store.

    :raises ConnectionLost: its server cannot be reached.
    :raises TargetCut: messages before `tail` are missing.
    """
    with _Target(url, options) as target:
        bounds = target.bounds
        if bounds is None:
            return Arrived(0, 0, None)
        now = Tail(bounds.epoch, bounds.end)
        start = check_end(url, bounds, tail)
        if start is None or bounds.end <= start:
            return Arrived(0, 0, now)
        gone = min(max(0, bounds.oldest - start), batch.num_rows)
        fields = [name for name in _COMPARED if name not in lacking]
        wanted = list(_rows(batch, fields))
        #: The first message of the batch that is there may be any of these.
        firsts = {row: at for at, row in reversed([*enumerate(wanted[: gone + 1])])}
        found = 0
        for row in target.rows(max(start, bounds.oldest), bounds.end, fields):
            if found == len(wanted):
                break
            if not found:
                found = firsts.get(row, -1) + 1
            elif row == wanted[found]:
                found += 1
        return Arrived(found, 0 if found else gone, now)


class _Target(Closable):
    """The target, opened temporarily for reading."""

    def __init__(self, url: str, options: dict[str, str]) -> None:
        self._reader: Reader | None = None
        self.bounds: Bounds | None = None
        endpoint = side(url)
        if not isinstance(endpoint, AppendOnce):  # its end cannot be read
            return
        try:
            self._reader = endpoint.reread(URL.parse(url, options))
        except NotFound:
            return
        if isinstance(self._reader, Replayable):
            self.bounds = self._reader.bounds()

    def rows(self, start: int, end: int, fields: list[str]) -> Iterator[tuple[object, ...]]:
        assert self._reader is not None
        self._reader.seek(start)
        while batch := self._reader.read_batch(_AT_ONCE, timeout=0):
            yield from _rows(batch, fields)
            if batch.column("seq")[-1].as_py() >= end - 1:
                return

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()


def _rows(batch: Batch, fields: list[str]) -> Iterator[tuple[object, ...]]:
    return zip(*(batch.column(name).to_pylist() for name in fields), strict=True)


# --- resumption ---------------------------------------------------------------------------------

log = logging.getLogger(__name__)


def resume(
    journal: Journal,
    reader: Reader,
    target: Bounds | None,
    arrived: Callable[[Tail, Batch], Arrived],
) -> int:
    """Move a reader to the position in the journal; return how many messages may be duplicated.

    `target` are the current bounds of the target; `arrived` looks for the messages of a batch in
    the target after a tail.
    """
    if journal.note is None or not isinstance(reader, Replayable):
        return 0
    source = reader.bounds()
    note = _translated(journal.note, source)
    if note is None or (source.epoch == 0 and note.next > source.end):
        reader.seek(Position.START)
        again = min(journal.note.next, source.end) if reader.renumbers else 0
        twice = f"; {again:,} messages may come twice" if again else ""
        log.warning("%s was created anew since it was copied%s", reader.url, twice)
        return again
    place, in_doubt = _resume_at(journal, note, reader, target, arrived)
    if journal.is_behind and note.target is not None and target is not None and not in_doubt:
        start = target.successor(*note.target)
        if start is not None:
            tail = Tail(target.epoch, start)
            place, in_doubt = _behind_what_arrived(reader, min(place, source.end), tail, arrived)
    # Not beyond the end: a source that lost its last messages in a power failure reuses their
    # numbers.
    reader.seek(min(place, source.end))
    return in_doubt


def _behind_what_arrived(
    reader: Reader, place: int, tail: Tail, arrived: Callable[[Tail, Batch], Arrived]
) -> tuple[int, int]:
    """Return the first number from `place` on that is not in the target after `tail`.

    After a power failure the target may have more than the last note that got to the disk says.

    :returns: also, how many messages from there on may be there.
    """
    while True:
        reader.seek(place)
        batch = reader.read_batch(_AT_ONCE, timeout=0)
        if not batch.num_rows:
            return place, 0
        count, in_doubt, _ = arrived(tail, batch)
        if count:
            log.warning("%d messages are in the target that no note tells of", count)
            place = batch.column("seq")[count - 1].as_py() + 1
            tail = tail._replace(seq=tail.seq + count)
        if count < batch.num_rows:
            return place, in_doubt


def _translated(note: Note, source: Bounds) -> Note | None:
    """Return a note with the numbers of the source's current epoch; None: it was recreated.

    After a power failure the source may end before the copied messages: their numbers are reused.
    """
    cut = source.successor(note.source_epoch, note.next)
    if cut is None:
        return None
    runs = ((first, min(count, cut - first)) for first, count in note.runs)
    kept = tuple((first, count) for first, count in runs if count > 0)
    return note._replace(source_epoch=source.epoch, next=cut, runs=kept)


def _resume_at(
    journal: Journal,
    note: Note,
    reader: Reader,
    target: Bounds | None,
    arrived: Callable[[Tail, Batch], Arrived],
) -> tuple[int, int]:
    """Return the number to resume at, and how many messages may be copied twice."""
    if note.target is None or target is None:
        return (note.runs[0][0], note.messages) if note.runs else (note.next, 0)
    epoch, start = note.target
    there = target.successor(epoch, start)
    if there is not None and min(there, target.end) < start:
        return _before_power_failed(journal, note, reader.bounds(), target)
    if not note.runs:
        return note.next, 0
    if there is None:  # it was recreated
        return note.runs[0][0], 0
    batch = _read_again(reader, note)
    if batch.num_rows == note.messages:
        count, in_doubt, _ = arrived(Tail(target.epoch, start), batch)
    else:  # the source no longer has them: nothing to compare
        count, in_doubt = min(target.end - start, note.messages), 0
    return _number(note, count), in_doubt


def _before_power_failed(
    journal: Journal, note: Note, source: Bounds, target: Bounds
) -> tuple[int, int]:
    """Return the last synced position: the target has lost its last messages."""
    log.warning("the target ends earlier than it did: its last messages were lost with the power")
    synced = None if journal.synced is None else _translated(journal.synced, source)
    if synced is not None and synced.target is not None:
        epoch, start = synced.target
        there = target.successor(epoch, start)
        if there is not None and min(there, target.end) >= start:
            return synced.next, target.end - start
    # Nothing tells what the target kept, such as one with sync=none: all of it may come twice.
    log.warning("no note tells how much it has on its disk: all that is there is copied again")
    return source.oldest, max(0, min(note.next - source.oldest, target.end - target.oldest))


def _number(note: Note, index: int) -> int:
    """Return the sequence number at `index` in the batch, or `next` after its end."""
    for first, length in note.runs:
        if index < length:
            return first + index
        index -= length
    return note.next


def _read_again(reader: Reader, note: Note) -> Batch:
    """Read the messages of the batch again, as far as the source still has them."""
    wanted = {seq for first, length in note.runs for seq in range(first, first + length)}
    last = max(wanted)
    found = []
    reader.seek(note.runs[0][0])
    while batch := reader.read_batch(len(wanted), timeout=0):
        found += [message for message in messages_from_batch(batch) if message.seq in wanted]
        if batch.column("seq")[-1].as_py() >= last:
            break
    return batch_from_messages(found)
