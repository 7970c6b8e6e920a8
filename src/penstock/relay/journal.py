"""How does a relay know, after it was killed, what it had copied?

Before a batch goes to the target, a note says which messages it has and where in the target it
begins. It is written over the note before the last one, so one of the two is always whole. That
there is a note means that all before it arrived; what of it arrived, the target itself tells. A
third place has what was on the disk on both sides at some moment, for after a power failure.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.core.closing import Closable
from penstock.core.errors import CursorInUse, DamagedQueue, InvalidOption, Unsupported
from penstock.core.url import URL
from penstock.core.whole_files import make_whole
from penstock.queue.liveness import LockFile
from penstock.queue.storage import storage_errors
from penstock.relay.patience import side

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["MOST_RUNS", "Journal", "Note", "runs_of"]

_MAGIC: Final = b"PNRELAY\0"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sII")
_PLACE_SIZE: Final = 8192
_PLACES: Final = 3
_SYNCED: Final = 2
#: CRC of what follows; generation, source epoch, next, target epoch, target start, has target,
#: runs.
_NOTE: Final = struct.Struct("<IQQQQQII")
_RUN: Final = struct.Struct("<QQ")
_LOCK: Final = 1 << 62

#: Runs of consecutive numbers in one note, at most; a batch with more is cut.
MOST_RUNS: Final = (_PLACE_SIZE - _NOTE.size) // _RUN.size


class Note(NamedTuple):
    """The last thing that a relay began to do."""

    #: The life of the source that the numbers count in.
    source_epoch: int
    #: The first message that is not in the batch, nor before it.
    next: int
    #: The life of the target, and the number that the batch begins with; None: it is not known.
    target: tuple[int, int] | None = None
    #: The messages of the batch: the first number and the count of each run. Empty: it arrived.
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def messages(self) -> int:
        return sum(length for _, length in self.runs)


def runs_of(seqs: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return the runs of consecutive numbers: the first of each, and how many."""
    if not len(seqs):
        return ()
    starts = np.flatnonzero(np.diff(seqs) != 1) + 1
    edges = [0, *starts.tolist(), len(seqs)]
    return tuple((int(seqs[a]), b - a) for a, b in pairwise(edges))


class Journal(Closable):
    """The file where one relay keeps its notes. For one process at a time."""

    def __init__(self, path: Path, source: str, target: str) -> None:
        """Open it, or make it.

        :raises CursorInUse: another process goes by it.
        :raises DamagedQueue: it is no such file.
        :raises InvalidOption: it belongs to a relay of other streams.
        :raises StorageError: the operating system refuses.
        """
        self.path = path
        names = [str(side(url).identity(URL.parse(url))) for url in (source, target)]
        self._between = json.dumps(names).encode()
        plain = [url.partition("?")[0] for url in (source, target)]
        #: As earlier releases kept it: by the URLs, without their options.
        self._between_urls = json.dumps(plain).encode()
        if len(self._between) > _PLACE_SIZE - _HEADER.size:
            raise InvalidOption("state", str(path), "the URLs are too long to be kept in it")
        with storage_errors("opening", str(path)):
            if not path.exists():
                head = _HEADER.pack(_MAGIC, _VERSION, len(self._between)) + self._between
                make_whole(path, head.ljust(_PLACE_SIZE * (1 + _PLACES), b"\0"))
            self._locks = LockFile(str(path))
        try:
            self._fd = self._locks.fd
            self._check()
            self._generation, self._note = max(
                (self._load(place) for place in (0, 1)), key=lambda found: found[0]
            )
            self.synced = self._load(_SYNCED)[1]
        except BaseException:
            self._locks.close()
            raise

    @property
    def note(self) -> Note | None:
        """The last note; None before the first."""
        return self._note

    def put(self, note: Note) -> None:
        """Keep a note. It survives the end of this process; see `sync` for more.

        :raises StorageError: the operating system refuses.
        """
        self._generation += 1
        self._write(self._generation % 2, note)
        self._note = note

    def sync(self, note: Note) -> None:
        """Keep a note of what is on the disk of the target, and bring that to the disk.

        :raises StorageError: the operating system refuses.
        """
        self._write(_SYNCED, note)
        self.synced = note
        with storage_errors("writing", str(self.path)):
            os.fdatasync(self._fd)

    def close(self) -> None:
        self._locks.close()

    def _check(self) -> None:
        if not self._locks.try_lock(_LOCK):
            hint = "end the other relay, or give this one a state of its own"
            raise CursorInUse(str(self.path), 0, hint=hint)
        with storage_errors("reading", str(self.path)):
            head = os.pread(self._fd, _PLACE_SIZE, 0)
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

    def _write(self, place: int, note: Note) -> None:
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
            os.pwrite(self._fd, data, _PLACE_SIZE * (1 + place))

    def _load(self, place: int) -> tuple[int, Note | None]:
        """Return a note and its generation; none if there is none, or half of one."""
        with storage_errors("reading", str(self.path)):
            data = os.pread(self._fd, _PLACE_SIZE, _PLACE_SIZE * (1 + place))
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
