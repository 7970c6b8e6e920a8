"""How are pulses kept in files? `iwrf:DIR`, or one file: `iwrf:NAME.iwrf_ts`.

Packets back to back, in files of a day's directory whose names begin with the time of their first
pulse: `DIR/20250615/20250615_150640.500_015_045.sim.fl32.iwrf_ts`. Sorted by name they are one
stream, of which each packet is a message. The last file may grow, and another may come. A message's
number counts the packets from the oldest file on.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import sys
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import numpy as np
from pydantic import Field

from penstock.core.batch import numbers_of
from penstock.core.capabilities import Replayable
from penstock.core.errors import Malformed, NotFound
from penstock.core.interfaces import Ancestor, Bounds
from penstock.core.options import Duration, Options
from penstock.core.overflow import DropReason
from penstock.core.position import Position, check_seek
from penstock.core.statistics import Loss
from penstock.queue.storage import storage_error, storage_errors
from penstock.radar.iwrf.framing import Framing, frame
from penstock.radar.iwrf.messages import (
    PacketReader,
    PacketWriter,
    Reminder,
    batch_of,
    packets_of,
)
from penstock.radar.iwrf.packets import BY_ELEVATION, ID_BASE, Encoding, Kind, read, time_ns_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.core.position import PositionLike
    from penstock.radar.iwrf.pulses import Metadata

__all__ = [
    "SUFFIX",
    "FileOptions",
    "IwrfFileReader",
    "IwrfFileWriter",
    "file_name",
    "files_in",
    "is_data_folder",
]

log = logging.getLogger(__name__)

SUFFIX: Final = ".iwrf_ts"
#: Bytes read at a time; a packet may be larger.
_CHUNK: Final = 8 << 20
#: While nothing comes, look this often (seconds) at the end of the last file, and at the directory.
_LOOK: Final = 0.02
_LOOK_AROUND: Final = 0.25
#: The last file is not written to any more if nobody did for so long (seconds).
_LEFT_ALONE: Final = 60.0
#: Files whose packets were counted are remembered, so many at most.
_REMEMBERED: Final = 10_000
#: What files begin with that an RVP8 wrote, which are of another format.
_RVP8: Final = b"rvp"
#: Degrees that nobody means.
_ABSURD: Final = 1e6
_SENT: Final = {
    1: "single",
    **dict.fromkeys((2, 3, 4), "alt"),
    **dict.fromkeys((5, 6), "sim"),
    7: "honly",
    8: "vonly",
}
_STAGGERED: Final = {2: "stag23", 3: "stag34", 4: "stag45"}
_PACKING: Final[dict[int, str]] = {
    Encoding.FL32: "fl32",
    Encoding.SCALED_SI16: "scaled",
    Encoding.DBM_PHASE_SI16: "dbm_phase",
    Encoding.SIGMET_FL16: "sigmet",
}


class FileOptions(Options):
    """Options of `iwrf:DIR`."""

    #: Reader: deliver only packets of this kind.
    type: int | None = None
    #: Reader: wait for the directory to be there, in seconds.
    wait: Annotated[Duration, Field(ge=0)] = 0.0
    #: Writer: begin another file after so long, by the packets' time.
    seconds: Annotated[Duration, Field(gt=0)] = 60.0
    #: Writer: sync words after so long, in front of metadata said again; 0: never.
    repeat: Annotated[Duration, Field(ge=0)] = 1.0


# --- what is in a file ----------------------------------------------------------------------------


@dataclass
class _Counted:
    """The counted packets of a file."""

    path: Path
    #: The number of packets before each of some places, the place, and the time of the first.
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    packets: int = 0
    #: How far it was looked at, and what of that belongs to no packet.
    end: int = 0
    skipped: int = 0
    #: Whether that is all.
    is_done: bool = False

    def count(self, *, is_last: bool) -> None:
        """Count the packets of a file; only the last file may still grow."""
        while not self.is_done:
            read = _read_chunk(self.path, self.end, is_last=is_last)
            if read is None:
                return
            batch, end, found, is_over = read
            if batch.num_rows:
                time_ns = int(numbers_of(batch, "time_ns")[0])
                self.marks.append((self.packets, self.end, time_ns))
            self.packets += batch.num_rows
            self.skipped += found.skipped_bytes
            self.is_done = is_over and not is_last
            if end == self.end:
                return
            self.end = end


def _read_chunk(
    path: Path, start: int, *, is_last: bool, first_seq: int = 0
) -> tuple[Batch, int, Framing, bool] | None:
    """Read packets from an offset of a file; return where they end, and where packets are.

    The last value says whether the file ended. None: the file was removed.

    :param is_last: the file may still grow: half a packet at its end is left for later
    """
    size = _CHUNK
    while True:
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                data = np.fromfile(file, np.uint8, size)
                written = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error("reading", str(path), error) from error
        is_over = len(data) < size
        if not start and data[:3].tobytes() == _RVP8:
            raise Malformed(
                str(path),
                "its beginning",
                "an IWRF packet",
                "an RVP8's tsarchive",
                hint="convert it with LROSE's TsConvert",
            )
        may_grow = is_last and time.time() - written < _LEFT_ALONE
        found = frame(data, is_end=is_over and not may_grow)
        if found.end or is_over:
            batch = batch_of(data, found.runs, first_seq)
            return batch, start + found.end, found, is_over
        size *= 2  # a packet larger than that


_counted: OrderedDict[tuple[str, int], _Counted] = OrderedDict()


def _counted_of(path: Path) -> _Counted | None:
    """Return the cached count of a file; None: it was removed."""
    try:
        key = (str(path), path.stat().st_ino)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error("reading", str(path), error) from error
    known = _counted.setdefault(key, _Counted(path))
    _counted.move_to_end(key)
    while len(_counted) > _REMEMBERED:
        _counted.popitem(last=False)
    return known


def files_in(place: Path) -> list[Path]:
    """Return the files of a stream in their order: those of a directory, or one.

    :raises NotFound: the path does not exist.
    :raises StorageError: a folder cannot be listed.
    """
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise NotFound(f"there is no {place}", hint="give a directory of .iwrf_ts files, or one")
    found: list[Path] = []
    with storage_errors("reading", str(place)):
        for entry in _entries_of(place):
            if not entry.is_dir():
                found += _files_among([entry])
            elif is_data_folder(entry.name):
                found += _files_among(_entries_of(entry))
    return sorted(found, key=lambda path: (path.name, str(path)))


def is_data_folder(name: str) -> bool:
    """Tell whether a folder of a data directory may have data: a file system has its own, too."""
    return not name.startswith(".") and name != "lost+found"


def _entries_of(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing if it was removed."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("reading", os.fspath(folder), error) from error


def _files_among(entries: list[os.DirEntry[str]]) -> list[Path]:
    return [Path(entry.path) for entry in entries if entry.name.endswith(SUFFIX)]


class Sizes(NamedTuple):
    """The size of a stream on disk."""

    files: int
    bytes: int
    #: Bytes that belong to no packet.
    skipped: int


# --- reading --------------------------------------------------------------------------------------


class IwrfFileReader(Replayable, PacketReader):
    """Reads the packets of files, the oldest first, and follows the last as it grows."""

    renumbers = True

    _longest_pause = _LOOK

    def __init__(self, url: str, place: Path, start: Position, options: FileOptions) -> None:
        super().__init__(url, options.type)
        self._place = place
        deadline = time.monotonic() + options.wait
        while not place.exists() and time.monotonic() < deadline:
            time.sleep(_LOOK)
        #: Files in their order; those that were removed stay, because numbers count them.
        self._files = files_in(place)
        #: Files with a name before that of the newest when they came: they are not read.
        self._late: dict[Path, _Counted] = {}
        #: Packets of files that were counted or read: numbers count them also when they are gone.
        self._packets: dict[Path, int] = {}
        self._looked = time.monotonic()
        #: Which file, the number of its first packet, and how far in it.
        self._index = self._first = self._offset = 0
        #: Whether the file was read to its end, as far as that was written.
        self._is_read = False
        #: The number from which on packets are wanted: what is damaged before it is not lost.
        self._since = 0
        self.seek(start)

    def _fill(self) -> bool:
        """Read more packets; False if there are none now."""
        while True:
            if self._index >= len(self._files) and not self._look_around():
                return False
            is_last = self._index == len(self._files) - 1
            path = self._files[self._index]
            read = _read_chunk(path, self._offset, is_last=is_last, first_seq=self._next)
            if read is None:
                self._miss(path)
                continue
            batch, end, found, self._is_read = read
            self._note_skipped(found, path.name, self._since)
            is_new = end > self._offset
            self._offset = end
            if batch.num_rows:
                self._next += batch.num_rows
                self._ready = batch
                return True
            if is_new:
                continue
            if not is_last:
                self._stand_behind(path)
            elif not self._look_around():
                return False

    def _stand_behind(self, path: Path) -> None:
        """Go on to the next file; what this one had stays known, should it be removed."""
        self._packets[path] = self._next - self._first
        self._stand_in(self._index + 1, self._next)

    def _stand_in(self, index: int, first: int) -> None:
        """Go to the beginning of a file whose first packet has this number."""
        self._index, self._offset, self._is_read = index, 0, False
        self._first = self._next = first
        self._ready = None

    def _miss(self, path: Path) -> None:
        """Go on behind a file that was removed; count what was not read of it."""
        known = self._packets.get(path, 0)
        unread = self._first + known - self._next
        if (not known or unread < 0) and not self._is_read:
            unread = 1  # nobody knows how many packets it had, or by how many it had grown
        if unread > 0:
            end = self._next + unread
            if (wanted := max(self._next, self._since)) < end:
                log.warning("%s: %s was removed before it was read", self.url, path.name)
                self._damaged.add(Loss(wanted, end - 1, DropReason.RETENTION))
            self._next = end
        self._stand_behind(path)

    def _pass_over(self, path: Path) -> None:
        """Count the packets of a file that came too late; it may still grow."""
        if path not in self._late:
            log.warning("%s: %s came too late, and is not read", self.url, path.name)
            self._late[path] = _Counted(path)
        late = self._late[path]
        before = late.packets
        late.count(is_last=True)
        if late.packets > before:
            last = self._next + late.packets - before - 1
            self._damaged.add(Loss(self._next, last, DropReason.EXPIRED))

    def _look_around(self) -> bool:
        """Look for new files; tell whether one came."""
        now, before = time.monotonic(), len(self._files)
        if now - self._looked >= _LOOK_AROUND or not self._files:
            self._looked = now
            last = self._files[-1].name if self._files else ""
            known = set(self._files)
            for path in files_in(self._place):
                if path in known:
                    continue
                if path in self._late or path.name < last:
                    self._pass_over(path)
                else:
                    self._files.append(path)
        return len(self._files) > before

    def available(self) -> Iterator[Message]:
        """Yield the packets that are in the files now.

        By their place: their time is that of the radar, whose clock may be ahead of this one.
        """
        self._looked = float("-inf")
        self._look_around()
        last = len(self._files) - 1
        try:
            size = self._files[-1].stat().st_size if self._files else 0
        except OSError:  # it was removed: go on behind it, so that what is missing is counted
            last, size = last + 1, 0
        while messages := self._take(1):
            yield messages[0]
            if self._ready is None and (self._index, self._offset) >= (last, size):
                return

    # --- where it stands ----------------------------------------------------------------------

    def _counts(self) -> list[_Counted]:
        """Return the counts of all files."""
        self._looked = float("-inf")
        self._look_around()
        return [
            self._count_of(path, is_last=index == len(self._files) - 1)
            for index, path in enumerate(self._files)
        ]

    def _count_of(self, path: Path, *, is_last: bool) -> _Counted:
        """Return the count of a file; one that was removed keeps its last count."""
        counted = _counted_of(path)
        if counted is None:
            return _Counted(path, packets=self._packets.get(path, 0), is_done=True)
        counted.count(is_last=is_last)
        self._packets[path] = counted.packets
        return counted

    def bounds(self) -> Bounds:
        """Return the bounds of the stream; each file is scanned once for it."""
        self._check_open()
        ends = accumulate(each.packets for each in self._counts())
        lineage = [Ancestor(*each) for each in zip(_epochs_of(self._files), ends, strict=True)]
        if not lineage:
            return Bounds(0, 0, 0)
        return Bounds(lineage[-1].epoch, 0, lineage[-1].end, tuple(lineage[:-1]))

    @property
    def epoch(self) -> int:
        read = islice(_epochs_of(self._files), self._index + 1)
        return deque(read, maxlen=1).pop() if self._files else 0

    def sizes(self) -> Sizes:
        """Return how much there is."""
        counted = self._counts()
        return Sizes(len(counted), sum(c.end for c in counted), sum(c.skipped for c in counted))

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        place = Position.of(position)
        if place.anchor == "start":
            self._since = 0
            self._stand_in(0, 0)
            return
        counted = self._counts()
        end = sum(each.packets for each in counted)
        match place.anchor:
            case "end":
                target = end
            case "last":
                target = max(end - 1, 0)
            case "time":
                self._stand_at_time(counted, place.value)
                return
            case _:
                target = check_seek(self.url, place.value, 0, end)
        self._stand_at(counted, target)

    def _stand_at(self, counted: list[_Counted], seq: int) -> None:
        self._since = seq
        self._stand_in(0, 0)
        for index, each in enumerate(counted):
            if seq < self._next + each.packets or index == len(counted) - 1:
                before = [mark for mark in each.marks if mark[0] <= seq - self._next]
                packets, self._offset, _ = before[-1] if before else (0, 0, 0)
                self._next += packets
                break
            self._stand_in(index + 1, self._next + each.packets)
        while self._next < seq and (self._ready is not None or self._fill()):
            assert self._ready is not None
            first = self._next - self._ready.num_rows
            if seq < self._next:
                self._ready = self._ready.slice(max(0, seq - first))  # it may have been removed
                return
            self._ready = None

    def _stand_at_time(self, counted: list[_Counted], time_ns: int) -> None:
        before, seq = 0, 0
        for each in counted:
            for packets, _, first in each.marks:
                if first < time_ns:
                    seq = before + packets
            before += each.packets
        self._stand_at(counted, seq)
        self._since = sys.maxsize  # nothing is lost until the place is known
        while self._ready is not None or self._fill():
            assert self._ready is not None
            later = np.flatnonzero(numbers_of(self._ready, "created_ns") >= time_ns)
            if len(later):
                seq = int(numbers_of(self._ready, "seq")[later[0]])
                break
            self._ready = None
        else:
            seq = self._next
        self._stand_at(counted, seq)

    def close(self) -> None:
        self._is_closed = True
        self._ready = None


def _epochs_of(files: list[Path]) -> Iterator[int]:
    """Yield an epoch for each file, which continues those before.

    A number counts the packets of all files before it. So its epoch is made of their names: where
    one came late, or is gone, the numbers behind it are of another epoch.
    """
    names = blake2b(digest_size=8)
    for path in files:
        names.update(path.name.encode(errors="surrogateescape") + b"\0")
        yield int.from_bytes(names.digest(), "little") >> 1 or 1


# --- writing --------------------------------------------------------------------------------------


def file_name(time_ns: int, state: Metadata, pulse: np.void | None = None) -> str:
    """Return the path of a file as LROSE's programs choose it: a day's directory and a name."""
    seconds, nanos = divmod(time_ns, 1_000_000_000)
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    name = f"{moment:%Y%m%d_%H%M%S}.{nanos // 1_000_000:03d}"
    packing = ""
    if pulse is not None:
        is_rhi = int(pulse["scan_mode"]) in BY_ELEVATION
        angles = (pulse["fixed_az"], pulse["elevation"]), (pulse["fixed_el"], pulse["azimuth"])
        fixed, moving = angles[0] if is_rhi else angles[1]
        name += f"_{_number(float(fixed) * 10)}_{_number(float(moving))}"
        name += ".rhi" if is_rhi else ""
        packing = _PACKING.get(int(pulse["iq_encoding"]), "")
    staggered = _STAGGERED.get(int(state.number(Kind.TS_PROCESSING, "prf_mode") or 0))
    sent = _SENT.get(int(state.number(Kind.TS_PROCESSING, "xmit_rcv_mode") or 0))
    parts = [part for part in (staggered or sent, packing) if part]
    return f"{moment:%Y%m%d}/{'.'.join([name, *parts])}{SUFFIX}"


def _number(value: float) -> str:
    """Return a number of three digits or more, with its sign if it is negative."""
    return f"{round(value):03d}" if np.isfinite(value) and abs(value) < _ABSURD else "000"


@dataclass
class _Unwritten:
    """Packets of a call that are not written yet."""

    #: Packets, those that say something again among them.
    pieces: list[bytes] = field(default_factory=list)
    messages: int = 0
    size: int = 0

    def clear(self) -> None:
        self.pieces, self.messages, self.size = [], 0, 0


class IwrfFileWriter(PacketWriter):
    """Writes packets into files; readers may follow them as they grow.

    A file begins with sync words and all metadata. Both are repeated from time to time, so that a
    reader can resynchronise after damage.
    """

    def __init__(self, url: str, directory: Path, options: FileOptions) -> None:
        super().__init__(url)
        self._directory = directory
        self._length = int(options.seconds * 1e9)
        self._reminder = Reminder(options.repeat)
        self._fd: int | None = None
        self._began = 0
        #: Of packets that came before the first pulse: they go where that goes.
        self._waiting: list[bytes] = []
        #: The file that is written to.
        self.path: Path | None = None
        with storage_errors("creating", str(directory)):
            directory.mkdir(parents=True, exist_ok=True)

    def _write(self, payloads: list[bytes]) -> None:
        self._check_open()
        unwritten = _Unwritten()
        for payload in payloads:
            try:
                packets = packets_of(payload)
            except Malformed:
                self._append(unwritten)
                self._refused += 1
                raise
            self._choose_file(packets, unwritten)
            for kind, packet in packets:
                if kind == Kind.PULSE:
                    time_ns = int(time_ns_of(read(packet))[0])
                    if self._reminder.is_due(time_ns):
                        again = self._reminder.packets(time_ns, sync=True)
                        unwritten.pieces += [each for _, each in again]
                self._reminder.note(kind, packet)
                unwritten.pieces.append(packet)
            unwritten.messages += 1
            unwritten.size += len(payload)
        self._append(unwritten)

    def _choose_file(self, packets: list[tuple[int, bytes]], unwritten: _Unwritten) -> None:
        """Choose the file of a message by its first pulse; a message is never split."""
        kinds = [kind for kind, _ in packets]
        if Kind.PULSE not in kinds:
            return
        first = kinds.index(Kind.PULSE)
        header = read(packets[first][1])
        time_ns = int(time_ns_of(header)[0])
        if self._fd is not None and abs(time_ns - self._began) >= self._length:
            self._append(unwritten)
            self._close_file()
        if self._fd is None:
            self._open(file_name(time_ns, self._reminder.state, header[0]), time_ns)
            # What comes just before it need not be said again.
            before = self._waiting + unwritten.pieces + [packet for _, packet in packets[:first]]
            there = {int.from_bytes(each[:4], "little") - ID_BASE for each in before}
            again = self._reminder.packets(time_ns, sync=Kind.SYNC not in there)
            self._waiting[:0] = [packet for kind, packet in again if kind not in there]

    def _open(self, name: str, time_ns: int) -> None:
        path = self._directory / name
        with storage_errors("writing", str(path)):
            path.parent.mkdir(exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.path, self._began = path, time_ns

    def _append(self, unwritten: _Unwritten) -> None:
        """Write the rest of a call and count it; an error changes neither."""
        if self._fd is None:  # there was no pulse yet
            self._waiting += unwritten.pieces
        else:
            self._flush_to_file(unwritten.pieces)
        if unwritten.messages:
            self._messages += unwritten.messages
            self._bytes += unwritten.size
            self._last_seq = self._messages - 1
        unwritten.clear()

    def _flush_to_file(self, pieces: list[bytes]) -> None:
        """Append to the file, all or nothing: a partial write is truncated."""
        assert self._fd is not None
        data = memoryview(b"".join([*self._waiting, *pieces]))
        before = os.fstat(self._fd).st_size
        done = 0
        with storage_errors("writing", str(self.path)):
            try:
                while done < len(data):
                    done += os.write(self._fd, data[done:])
            except OSError:
                os.ftruncate(self._fd, before)
                raise
        self._waiting = []

    def _place_waiting(self) -> None:
        """Write packets to a file of their own when no pulse has followed them."""
        if self._fd is None and self._waiting:
            time_ns = int(time_ns_of(read(self._waiting[0]))[0])
            self._open(file_name(time_ns, self._reminder.state), time_ns)
            self._flush_to_file([])

    def flush(self) -> None:
        """Sync written packets to disk."""
        self._place_waiting()
        if self._fd is not None:
            with storage_errors("writing", str(self.path)):
                os.fdatasync(self._fd)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with storage_errors("writing", str(self.path)):
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)

    def close(self) -> None:
        """Close the file; packets without a following pulse get a file of their own."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._place_waiting()
        finally:
            self._close_file()
