"""Which beams make a volume, and how does none get lost on the way to its file?

Beams are appended to a log first, in a hidden folder of the directory. A book beside it says how
far they were sorted into volumes, which volumes are open, and which are being written. A volume
that has ended is noted in the book, written under a temporary name, brought to the disk, renamed,
announced, and only then struck out. So whatever dies in between, the same volume is written again,
to the same file and with the same bytes, and announced at most once more.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ValidationError

from penstock.core.batch import Batch, batch_from_messages
from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.decoding.arrow_stream import read_stream
from penstock.core.decoding.decoder import Refused
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import (
    DamagedQueue,
    LockTimeout,
    Malformed,
    NotFound,
    PenstockError,
    StorageError,
)
from penstock.core.position import Position
from penstock.core.url import escaped
from penstock.core.whole_files import keep_whole, sync_names, write_whole
from penstock.queue.classic.device import lock_held, open_lock_file
from penstock.queue.log.endpoint import trim_log
from penstock.queue.log.retention import Limits
from penstock.queue.storage import storage_errors
from penstock.radar.beams import gates_of, together
from penstock.radar.grids import is_grid_row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.core.interfaces import BytesLike, Reader
    from penstock.core.message import Message

__all__ = ["Product", "VolumeSettings", "VolumeStore"]

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000_000
_HIDDEN: Final = ".penstock"
_BEAMS, _BOOK, _LOCK = "beams", "volumes.json", "volumes"
_AT_ONCE: Final = 1000
_LARGEST_ROW: Final = 1 << 30
_COLUMNS: Final = (
    "radar",
    "volume_number",
    "start_of_volume",
    "end_of_volume",
    "start_range",
    "gate_spacing",
)

#: Why a volume has ended.
Reason = Literal["end", "next", "timeout", "full", "closed"]
_IN_WORDS: Final[dict[Reason, str]] = {
    "end": "its last ray says so",
    "next": "the next volume has begun",
    "timeout": "no ray came any more",
    "full": "it has as many rays as a volume may have",
    "closed": "its writer was closed",
}


class Product(Protocol):
    """What is made of the rows of a volume: a file and its name."""

    #: For latest_data_info.
    data_type: str

    def check(self, rows: pa.Table) -> None:
        """Check that a file can be made of rows, before they are taken.

        :raises Malformed: none can.
        """

    def path_of(self, rows: pa.Table) -> str:
        """Return the path below the directory."""

    def write(self, path: Path, rows: pa.Table, comment: str) -> None:
        """Write the file. The same rows always give the same bytes.

        :raises OSError: the operating system refuses.
        """

    def time_ns(self, rows: pa.Table) -> int:
        """Return what the volume's time is to those who wait for it."""


class VolumeSettings(NamedTuple):
    """How volumes are assembled."""

    #: Seconds without a ray after which an open volume ends.
    timeout: float = 120.0
    #: Rays after which it ends in any case.
    max_rays: int = 100_000
    #: Whether latest_data_info is written when a file is complete.
    announce: bool = True
    #: Whether the DataMapper of this machine is told, too.
    datamapper: bool = True
    #: Seconds to wait for another process that assembles in this directory.
    lock_timeout: float = 30.0


class Volume(BaseModel):
    """Which messages of the log are one volume."""

    radar: str | None = None
    number: int | None = None
    start_range: float = 0.0
    gate_spacing: float = 0.0
    #: First and last numbers of messages, in runs.
    runs: list[tuple[int, int]] = []
    rays: int = 0
    #: Whether its first ray has come: parts of a volume may come in another order.
    has_start: bool = False
    #: When its newest ray was measured, and when its last ray came.
    newest_ns: int = 0
    arrived_ns: int = 0
    reason: Reason | None = None

    def add(self, ray: _Ray) -> None:
        if self.runs and self.runs[-1][1] + 1 == ray.seq:
            self.runs[-1] = (self.runs[-1][0], ray.seq)
        else:
            self.runs.append((ray.seq, ray.seq))
        self.rays += 1
        self.has_start |= ray.starts
        self.newest_ns = max(self.newest_ns, ray.time_ns)
        self.arrived_ns = max(self.arrived_ns, ray.created_ns)

    def __str__(self) -> str:
        number = "a volume" if self.number is None else f"volume {self.number}"
        return f"{number} of {self.radar or 'a radar without a name'}, {self.rays:,} rays"


class _Book(BaseModel):
    """The state: how far the log was sorted into volumes."""

    epoch: int | None = None
    #: The number of the next message to be looked at.
    position: int = 0
    open: list[Volume] = []
    #: Those that have ended, and are not yet in a file that was announced.
    writing: list[Volume] = []


class _Ray(NamedTuple):
    """The parts of a message that decide its volume."""

    seq: int
    created_ns: int
    time_ns: int
    radar: str | None
    number: int | None
    starts: bool
    ends: bool
    start_range: float
    gate_spacing: float
    #: A row that is a whole file by itself, as a grid is.
    is_whole: bool = False


class VolumeStore:
    """The volumes of one directory. Processes that share it take turns."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        product: Product,
        settings: VolumeSettings = VolumeSettings(),  # noqa: B008 - never changed
        clock: Clock = SYSTEM_CLOCK,
        *,
        since_ns: int = 0,
    ) -> None:
        self._directory = Path(directory)
        self._product = product
        self._settings = settings
        self._clock = clock
        #: When somebody began to look for rays: before that, silence says nothing.
        self._since_ns = since_ns
        self._hidden = self._directory / _HIDDEN
        #: Where beams are appended to.
        self.log_url = f"log:{escaped(str((self._hidden / _BEAMS).absolute()))}"
        #: Files written so far.
        self.files = 0
        #: Why no file can be made of a volume, by the epoch and number of its first message. The
        #: next store, which may have other options, tries again.
        self._impossible: dict[tuple[int | None, int], Exception] = {}

    def check(self, batch: Batch) -> None:
        """Check messages before they are appended.

        :raises Malformed: no file can be made of one.
        """
        beams = _check_rows(batch, self._product)
        if beams is not None:
            _check_values(beams)

    def check_rows(self, batch: Batch) -> None:
        """Check only that messages are rows, as a pipeline may have rays without gates.

        :raises Malformed: one is none.
        """
        _check_rows(batch, self._product)

    def advance(self, *, finish: bool = False) -> int:
        """Write the ended volumes; return their number.

        :param finish: end those that are open, too
        :raises StorageError: the disk is full or access is denied; nothing is lost.
        :raises LockTimeout: another process holds the directory.
        :raises Malformed: no file can be made of a volume; it stays, the others are written.
        """
        try:
            reader = open_reader(self.log_url, trace=False)
        except NotFound:
            return 0
        with reader, self._lock():
            book = self._read_book(reader)
            count = self._write_all(book, reader)  # what somebody did not bring to its end
            if self._sort(book, reader, finish=finish):
                self._put(book)
                count += self._write_all(book, reader)
                self._trim(book)
        self.files += count
        if book.writing:
            volume = book.writing[0]
            error = self._impossible[book.epoch, volume.runs[0][0]]
            raise Malformed(str(volume), "rays", "those of a file", f"{error}") from error
        return count

    def open_volumes(self) -> list[Volume]:
        """Return the open volumes."""
        return self._stored().open

    def unwritten_volumes(self) -> list[Volume]:
        """Return those that have ended, and whose file could not be written yet."""
        return self._stored().writing

    # --- into volumes ------------------------------------------------------------------------

    def _sort(self, book: _Book, reader: Reader, *, finish: bool) -> bool:
        """Sort new messages into volumes; tell whether the state has changed."""
        ended = len(book.writing)
        begun = {(volume.radar, volume.number) for volume in book.open if volume.has_start}
        rays = _ordered(list(self._new_rays(book, reader)), begun)
        for ray in rays:
            self._place(book, ray)
        deadline = self._clock.now_ns() - int(self._settings.timeout * _SECOND)
        for volume in list(book.open):
            if finish:
                self._end(book, volume, "closed")
            elif max(volume.arrived_ns, self._since_ns) < deadline:
                self._end(book, volume, "timeout")
        return bool(rays) or len(book.writing) > ended

    def _new_rays(self, book: _Book, reader: Reader) -> Iterator[_Ray]:
        end = reader.bounds().end
        reader.seek(Position.sequence(book.position))
        while book.position < end:
            messages = reader.read_many(min(_AT_ONCE, end - book.position))
            for message in messages:
                yield _glance(message)
            book.position = messages[-1].seq + 1 if messages else end

    def _place(self, book: _Book, ray: _Ray) -> None:
        if ray.is_whole:
            volume = Volume(radar=ray.radar, number=ray.number)
            volume.add(ray)
            book.open.append(volume)
            self._end(book, volume, "end")
            return
        others = [volume for volume in book.open if volume.radar == ray.radar]
        for volume in others:
            # One that is late must not end the volume that has begun meanwhile. Without numbers
            # nothing else tells where a volume begins.
            is_next = volume.number != ray.number or ray.starts
            is_sure = ray.number is None and ray.starts
            if is_next and (is_sure or volume.newest_ns < ray.time_ns):
                self._end(book, volume, "next")
        volume = self._volume_of(book, ray)
        volume.add(ray)
        if volume.rays >= self._settings.max_rays:
            self._end(book, volume, "full")
        if ray.ends:
            for each in list(book.open):
                if (each.radar, each.number) == (ray.radar, ray.number):
                    self._end(book, each, "end")

    def _volume_of(self, book: _Book, ray: _Ray) -> Volume:
        """Return the volume of a ray. Rays of other gates are in a file of their own."""
        key = (ray.radar, ray.number, ray.start_range, ray.gate_spacing)
        for volume in book.open:
            if (volume.radar, volume.number, volume.start_range, volume.gate_spacing) == key:
                return volume
        volume = Volume(
            radar=ray.radar,
            number=ray.number,
            start_range=ray.start_range,
            gate_spacing=ray.gate_spacing,
        )
        book.open.append(volume)
        return volume

    def _end(self, book: _Book, volume: Volume, reason: Reason) -> None:
        if reason in {"timeout", "full"}:
            log.warning("%s: %s: ended, for %s", self._directory, volume, _IN_WORDS[reason])
        volume.reason = reason
        book.open.remove(volume)
        book.writing.append(volume)

    # --- into files --------------------------------------------------------------------------

    def _write_all(self, book: _Book, reader: Reader) -> int:
        """Write the ended volumes, except those of which no file can be made; count them."""
        count = 0
        for volume in list(book.writing):
            place = book.epoch, volume.runs[0][0]
            if place in self._impossible:
                continue
            try:
                self._write(volume, reader)
            except (StorageError, LockTimeout):
                raise
            except Exception as error:
                log.exception("%s: %s: it stays in the log", self._directory, volume)
                self._impossible[place] = error
                continue
            book.writing.remove(volume)
            self._put(book)
            count += 1
        return count

    def _write(self, volume: Volume, reader: Reader) -> None:
        rows = _rows(_messages(volume, reader))
        reason = volume.reason or "closed"
        comment = "" if reason in {"end", "next"} else f"ended without its last ray: {reason}"
        wanted = self._directory / self._product.path_of(rows)
        # One name: what a killed process left there does not stay.
        unfinished = wanted.with_name(f"{wanted.name}.new")
        with storage_errors("writing", str(wanted)):
            wanted.parent.mkdir(parents=True, exist_ok=True)
            self._product.write(unfinished, rows, comment)
            path = _free_path(wanted, unfinished)
            keep_whole(unfinished, path)
            sync_names(self._directory)
        if self._settings.announce:
            self._announce(path, self._product.time_ns(rows))
        log.info("%s: %s, since %s", path, volume, _IN_WORDS[reason])

    def _announce(self, path: Path, time_ns: int) -> None:
        entry = {
            "rel_data_path": str(path.relative_to(self._directory)),
            "file_ext": path.suffix.removeprefix("."),
            "data_type": self._product.data_type,
            "writer": "penstock",
            "latest_time": time_ns // _SECOND,
        }
        url = f"latest:{escaped(str(self._directory.absolute()))}"
        with open_writer(url, datamapper=self._settings.datamapper) as writer:
            writer.write(json.dumps(entry).encode(), time_ns=time_ns)

    # --- the book ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        path = str(self._hidden / _LOCK)
        with storage_errors("locking", path):
            lock = open_lock_file(path)
        try:
            with lock_held(lock, f"{path}.lock", self._settings.lock_timeout):
                yield
        finally:
            os.close(lock)

    def _stored(self) -> _Book:
        path = self._hidden / _BOOK
        try:
            return _Book.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return _Book()
        except ValidationError as error:
            raise DamagedQueue(
                str(path), "book of volumes", 0, "what was written there", f"{error}"
            ) from error
        except OSError as error:
            raise StorageError("reading", str(path), error) from error

    def _read_book(self, reader: Reader) -> _Book:
        book, bounds = self._stored(), reader.bounds()
        if book.epoch is not None:
            position = bounds.successor(book.epoch, book.position)
            if position is None:
                log.warning("%s: the log of beams was made anew", self._directory)
                book = _Book(position=bounds.oldest)
            elif position < book.position:  # a power failure cut it, and numbers come again
                book.position = position
                for volumes in (book.open, book.writing):
                    volumes[:] = [cut for volume in volumes if (cut := _cut(volume, position)).runs]
        book.epoch = bounds.epoch
        book.position = max(book.position, bounds.oldest)
        return book

    def _put(self, book: _Book) -> None:
        path = self._hidden / _BOOK
        with storage_errors("writing", str(path)):
            write_whole(path, book.model_dump_json().encode(), sync=True)
            sync_names(self._hidden)

    def _trim(self, book: _Book) -> None:
        first = [run[0] for volume in (*book.open, *book.writing) for run in volume.runs]
        trim_log(self.log_url, Limits(before_seq=min([*first, book.position])))


def _ordered(rays: list[_Ray], begun: set[_Key]) -> list[_Ray]:
    """Group rays by volume in order of arrival; sort each group by time.

    A start ray that came first stays first, and an end ray that came last stays last. Volumes
    without numbers keep the order of arrival.

    :param begun: radars and numbers of volumes whose first rays came before
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    groups = list(_volumes_of(rays, begun))
    for group, ray in zip(groups, rays, strict=True):
        first.setdefault(group, ray.seq)
        last[group] = ray.seq

    def place(item: tuple[int, _Ray]) -> tuple[int, int, int, int]:
        group, ray = item
        is_first = ray.starts and ray.seq == first[group]
        is_last = ray.ends and ray.seq == last[group]
        time_ns = 0 if ray.number is None else ray.time_ns
        return group, is_last - is_first, time_ns, ray.seq

    return [ray for _, ray in sorted(zip(groups, rays, strict=True), key=place)]


#: A radar and the number of its volume.
_Key: TypeAlias = tuple[str | None, int | None]


@dataclass
class _CurrentVolume:
    """One of the volumes that have the same radar and number, one after the other."""

    volume: int
    has_start: bool
    last: _Ray


def _volumes_of(rays: Iterable[_Ray], begun: set[_Key]) -> Iterator[int]:
    """Yield the volume of each ray, in order of arrival.

    All volumes of a radar may have the same number. The next one begins where a ray that ends is
    followed by one that starts. But Spark may append the parts of one volume in another order:
    then the start is older than the end, and the only one.
    """
    volumes: dict[_Key, _CurrentVolume] = {}
    count = itertools.count()
    for ray in rays:
        key = (ray.radar, ray.number)
        current = volumes.get(key)
        has_start = current is None and key in begun
        is_next = current is not None and current.last.ends and ray.starts
        if current is None or (
            is_next and (current.has_start or current.last.time_ns < ray.time_ns)
        ):
            current = volumes[key] = _CurrentVolume(next(count), has_start, last=ray)
        current.has_start |= ray.starts
        current.last = ray
        yield current.volume


def _free_path(wanted: Path, unfinished: Path) -> Path:
    """Return a path for a file; an existing file of other beams is kept."""
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_stem(f"{wanted.stem}_{number}")
        if not path.exists() or filecmp.cmp(path, unfinished, shallow=False):
            break
    if path != wanted:
        log.warning("%s has other beams in it; writing %s", wanted, path.name)
    return path


def _cut(volume: Volume, position: int) -> Volume:
    runs = [(a, min(b, position - 1)) for a, b in volume.runs if a < position]
    rays = sum(b - a + 1 for a, b in runs)
    return volume.model_copy(update={"runs": runs, "rays": rays})


def _messages(volume: Volume, reader: Reader) -> Iterator[Batch]:
    for first, last in volume.runs:
        reader.seek(Position.sequence(first))
        at = first
        while at <= last:
            messages = reader.read_many(min(_AT_ONCE, last - at + 1))
            messages = [message for message in messages if message.seq <= last]
            if not messages:
                break
            yield batch_from_messages(messages)
            at = messages[-1].seq + 1


def _rows(batches: Iterable[Batch]) -> pa.Table:
    parts = [
        _row_of(payload.as_py(), "a beam of the log")
        for batch in batches
        for payload in batch.column("payload")
    ]
    if not parts:
        raise PenstockError("the beams of a volume are gone from its log")
    return parts[0] if is_grid_row(parts[0].schema) else together(parts)


def _row_of(payload: BytesLike, what: str) -> pa.Table:
    try:
        return read_stream(pa.py_buffer(payload), None, max_size=_LARGEST_ROW, max_rows=1)
    except Refused as error:
        raise Malformed(what, "payload", error.expected, error.found) from None


def _check_rows(batch: Batch, product: Product) -> pa.Table | None:
    """Check that each message is one ray of a volume, or one grid, as the product takes it.

    :returns: the rays; None: there are none
    :raises Malformed: a message is neither.
    """
    rows = [_row_of(payload.as_py(), "a beam") for payload in batch.column("payload")]
    for row in rows:
        if row.num_rows != 1:
            raise Malformed("a beam", "rows", 1, row.num_rows)
    rays = [row for row in rows if not is_grid_row(row.schema)]
    for row in rows:
        if is_grid_row(row.schema):
            product.check(row)
    if not rays:
        return None
    beams = together(rays)
    product.check(beams)
    return beams


def _check_values(beams: pa.Table) -> None:
    """Check that rays say where they are, and have gates.

    :raises Malformed: one does not.
    """
    for name in ("azimuth", "elevation", "start_range", "gate_spacing"):
        values = beams.column(name).to_numpy()
        if not np.isfinite(values).all():
            raise Malformed("a beam", name, "a number", values[~np.isfinite(values)][0])
    if beams.column("gate_spacing").to_numpy().min() <= 0:
        raise Malformed("a beam", "gate_spacing", "above 0", "0 or less")
    if not gates_of(beams).all():
        raise Malformed("a beam", "gates", "at least one, in one field", 0)


def _glance(message: Message) -> _Ray:
    row = _row_of(message.payload, f"message {message.seq} of the log of beams")
    names = [name for name in _COLUMNS if name in row.column_names]
    known: dict[str, Any] = row.select(names).to_pylist()[0]
    return _Ray(
        message.seq,
        message.created_ns,
        message.time_ns,
        known.get("radar"),
        known.get("volume_number"),
        starts=bool(known.get("start_of_volume")),
        ends=bool(known.get("end_of_volume")),
        start_range=known.get("start_range", 0.0),
        gate_spacing=known.get("gate_spacing", 0.0),
        is_whole=is_grid_row(row.schema),
    )
