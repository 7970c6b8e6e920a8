"""How are directories of volumes and grids written and read as streams? `cfradial:`, `cfgrid:`."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.capabilities import AppendOnce, Tabular, Tended, Worded
from penstock.core.endpoints import Endpoint, Identity, endpoint_of, open_writer
from penstock.core.errors import (
    Closed,
    InvalidURL,
    LockTimeout,
    Malformed,
    NotFound,
    PenstockError,
    PositionError,
    StorageError,
)
from penstock.core.interfaces import BookedWriter, BytesLike, Reader, StreamInfo
from penstock.core.message import Message
from penstock.core.options import Duration, Options, parse_options
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.statistics import Loss, LossLedger, ReaderStatistics
from penstock.core.url import URL
from penstock.core.worker import Worker
from penstock.queue.storage import storage_error
from penstock.radar.beams import batch_from_rows, check_beams, field_names, gates_of
from penstock.radar.cfradial import file_name, write_cfradial
from penstock.radar.grids import (
    Grid,
    GridOptions,
    check_griddable,
    grid_beams,
    grid_from_row,
    grid_name,
    grid_row,
    is_grid_row,
    read_grid,
    write_grid,
)
from penstock.radar.iwrf.files import is_data_folder
from penstock.radar.volume_files import read_volume
from penstock.radar.volumes import Product, VolumeSettings, VolumeStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.core.position import PositionLike
    from penstock.core.provenance import Commit, Noted
    from penstock.core.stream_id import StreamId

__all__ = ["CfGridEndpoint", "CfRadialEndpoint", "FilesEndpoint", "files_below"]

log = logging.getLogger(__name__)

#: A writer looks for volumes that have ended after so many messages or seconds.
_PENDING: Final = 256
_LOOK: Final = 1.0


class _ReaderOptions(Options):
    """Options of `cfradial:` and `cfgrid:` for readers."""

    #: At a file that cannot be read: raise an error, or count it as lost and go on.
    damaged: Literal["fail", "skip"] = "fail"
    #: Files are looked for this often, while there are none.
    every: Duration = 0.5


class _WriterOptions(Options):
    """Options of both for writers."""

    #: Seconds without a ray after which an open volume ends.
    timeout: Duration = 120.0
    #: Rays after which it ends in any case.
    max_rays: int = 100_000
    #: Write latest_data_info when a file is complete.
    announce: bool = True
    #: Tell the DataMapper of this machine.
    datamapper: bool = True
    #: What becomes of an open volume when the writer is closed.
    close: Literal["write", "keep"] = "write"
    lock_timeout: Duration = 30.0

    def settings(self) -> VolumeSettings:
        return VolumeSettings(
            self.timeout, self.max_rays, self.announce, self.datamapper, self.lock_timeout
        )


class _GridWriterOptions(_WriterOptions, GridOptions):
    """Options of `cfgrid:` for writers."""


class _Volumes:
    """The product of `cfradial:`."""

    data_type = "netCDF"

    def check(self, rows: pa.Table) -> None:
        if is_grid_row(rows.schema):
            raise Malformed("rows of a volume", "columns", "those of beams", "those of a grid")

    def path_of(self, rows: pa.Table) -> str:
        return file_name(check_beams(rows))

    def write(self, path: Path, rows: pa.Table, comment: str) -> None:
        write_cfradial(path, check_beams(rows), comment)

    def time_ns(self, rows: pa.Table) -> int:
        return int(pc.min(rows.column("time_ns")).as_py())


class _Grids:
    """The product of `cfgrid:`: of a volume of beams, or of a row that is a grid already."""

    data_type = "netCDF"

    def __init__(self, options: GridOptions) -> None:
        self._options = options
        self._last: tuple[pa.Table, Grid] | None = None

    def check(self, rows: pa.Table) -> None:
        if is_grid_row(rows.schema):
            for at in range(rows.num_rows):
                grid_from_row(rows.slice(at, 1))
            return
        for radar in rows.column("radar").unique():
            names = rows.column("radar")
            is_of = pc.equal(names, radar) if radar.is_valid else pc.is_null(names)
            check_griddable(rows.filter(is_of), self._options)

    def _grid(self, rows: pa.Table) -> Grid:
        if self._last is None or self._last[0] is not rows:
            is_row = is_grid_row(rows.schema)
            grid = grid_from_row(rows) if is_row else grid_beams(check_beams(rows), self._options)
            self._last = (rows, grid)
        return self._last[1]

    def path_of(self, rows: pa.Table) -> str:
        return grid_name(self._grid(rows))

    def write(self, path: Path, rows: pa.Table, comment: str) -> None:
        write_grid(path, self._grid(rows), comment)

    def time_ns(self, rows: pa.Table) -> int:
        return self._grid(rows).time_ns


class FilesEndpoint(Tabular, Tended, AppendOnce, Endpoint):
    """A directory of files that are made from rows."""

    #: What names its options for writers.
    writer_options: type[_WriterOptions]

    def __init__(self) -> None:
        #: When this process began to write to a directory, by its path.
        self._began: dict[Path, int] = {}

    def path_of(self, url: URL) -> Path:
        """Return the directory that a URL names, or one file.

        :raises InvalidURL: the URL names no directory.
        """
        if url.host is not None:
            raise InvalidURL(
                url.text,
                f"{url.scheme}: is a directory on this machine and has no host",
                hint=f"write {url.scheme}:/dir",
            )
        if not url.path:
            raise InvalidURL(url.text, "it names no directory", hint=f"write {url.scheme}:/dir")
        return Path(url.path)

    @abstractmethod
    def product(self, options: _WriterOptions) -> Product:
        """Return the product that rows become."""

    @abstractmethod
    def rows_in(self, path: Path) -> pa.Table:
        """Return the rows of a file."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        options = parse_options(url, _ReaderOptions)
        return FilesReader(url.text, self.path_of(url), start, options, self.rows_in)

    def open_writer(self, url: URL) -> Writer:
        options = parse_options(url, self.writer_options)
        self._began.pop(self.path_of(url), None)
        return VolumeWriter(url.text, self._store(url), keeps_open=options.close == "keep")

    def create(self, url: URL, *, replace: bool = False) -> None:  # noqa: ARG002 - it stays
        self.path_of(url).mkdir(parents=True, exist_ok=True)

    def describe(self, url: URL) -> StreamInfo:
        path = self.path_of(url)
        if not path.exists():
            raise NotFound(f"there is no {path}")
        files = list(files_below(path))
        times = [file.stat().st_mtime_ns for file in files]
        store = None if path.is_file() else VolumeStore(path, _Volumes())
        return StreamInfo(
            url=url.text,
            layout=url.scheme,
            storage="files",
            slots=0,
            buffer_size=0,
            oldest_seq=None,
            youngest_seq=None,
            count=len(files),
            bytes=sum(file.stat().st_size for file in files),
            oldest_time_ns=min(times, default=None),
            youngest_time_ns=max(times, default=None),
            fill=0.0,
            blocking=False,
            details={
                "newest": str(max(files, default="")) or None,
                "open": [str(volume) for volume in store.open_volumes()] if store else [],
                "unwritten": [str(volume) for volume in store.unwritten_volumes()] if store else [],
            },
        )

    def identity(self, url: URL) -> Identity:
        return Identity.of(url, path=str(self.path_of(url)))

    def messages_of(self, url: URL, rows: pa.RecordBatch) -> Batch:
        table = pa.Table.from_batches([rows])
        product = self.product(parse_options(url, self.writer_options))
        if is_grid_row(table.schema):
            product.check(table)
            return batch_from_rows(table)
        beams = check_beams(table)
        product.check(beams)
        return batch_from_rows(beams)

    # --- exactly once: as the log behind it --------------------------------------------------

    def append_once(self, url: URL, commit: Commit) -> int:
        store = self._store(url)
        endpoint, log_url = self._log(url)
        if endpoint.noted(log_url, commit) is None:
            for batch in commit.batches():  # what is in the log has to become volumes
                store.check_rows(batch)
        count = endpoint.append_once(log_url, commit)
        try:
            store.advance()
        except Malformed as error:  # the batch is taken: to fail would hold up those behind it
            log.warning("%s: %s", url, error)
        return count

    def noted(self, url: URL, commit: Commit) -> Noted | None:
        endpoint, log_url = self._log(url)
        return endpoint.noted(log_url, commit)

    def has_batches(self, url: URL) -> bool:
        endpoint, log_url = self._log(url)
        return endpoint.has_batches(log_url)

    def reread(self, url: URL) -> Reader:
        endpoint, log_url = self._log(url)
        return endpoint.reread(log_url)

    def tend(self, url: URL) -> None:
        self._store(url).advance()

    def _log(self, url: URL) -> tuple[AppendOnce, URL]:
        log_url = URL.parse(self._store(url).log_url)
        endpoint = endpoint_of(log_url)
        assert isinstance(endpoint, AppendOnce)
        return endpoint, log_url

    def _store(self, url: URL) -> VolumeStore:
        options, path = parse_options(url, self.writer_options), self.path_of(url)
        # A volume is not cut because its writer was away for longer than its timeout.
        since = self._began.setdefault(path, time.time_ns())
        return VolumeStore(path, self.product(options), options.settings(), since_ns=since)


class CfRadialEndpoint(FilesEndpoint):
    """`cfradial:/dir`: beams become files of volumes there, and its files become beams."""

    writer_options = _WriterOptions

    def product(self, options: _WriterOptions) -> Product:  # noqa: ARG002 - all volumes are alike
        return _Volumes()

    def rows_in(self, path: Path) -> pa.Table:
        return read_volume(path)


class CfGridEndpoint(FilesEndpoint):
    """`cfgrid:/dir`: beams or grids become files of grids there, and its files become rows."""

    writer_options = _GridWriterOptions

    def product(self, options: _WriterOptions) -> Product:
        assert isinstance(options, GridOptions)
        return _Grids(options)

    def rows_in(self, path: Path) -> pa.Table:
        return grid_row(read_grid(path))


def files_below(path: Path) -> Iterator[Path]:
    """Yield the files of a directory in the order of their names, which is that of their times.

    :raises StorageError: a folder cannot be listed.
    """
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path, onerror=_refuse_unless_removed):
        folders[:] = sorted(name for name in folders if is_data_folder(name))
        for name in sorted(names):
            # Files at work end so, ours and those of LROSE's Radx.
            if not name.startswith(("_", ".")) and not name.endswith((".new", ".tmp")):
                yield Path(folder, name)


def _refuse_unless_removed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise storage_error("reading", str(error.filename), error) from error


class VolumeWriter(BookedWriter):
    """Appends beams to the log of a directory, and writes complete volumes to files."""

    def __init__(self, url: str, store: VolumeStore, *, keeps_open: bool) -> None:
        super().__init__(url)
        self._store = store
        self._keeps_open = keeps_open
        self._pending = 0
        self._looked = time.monotonic()
        self._turn = threading.Lock()
        self._log = open_writer(store.log_url)
        # A volume that stays open ends by its timeout, also if nothing is written any more.
        self._worker = Worker(
            f"volumes of {url}", lambda _: self._look(), log=log, every=_LOOK
        ).start()

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,  # noqa: ARG002 - the log knows best
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        now = time.time_ns() if time_ns is None else time_ns
        message = Message(0, now, 0, type, subtype, stream, attributes, bytes(payload))
        last = self.write_batch(batch_from_messages([message]))
        assert last is not None
        return last

    def write_batch(self, batch: Batch) -> int | None:
        self._check_open()
        payloads = batch.column("payload").to_pylist()
        before = self._log.statistics().messages
        try:
            self._store.check(batch)
            with self._turn:
                last = self._log.write_batch(batch)
        finally:  # an error in the middle: those before it are taken
            books = self._log.statistics()
            taken = books.messages - before
            self._refused += len(payloads) - taken
            self._last_seq = books.last_seq
            self._messages += taken
            self._bytes += sum(map(len, payloads[:taken]))
            self._pending += taken
        if self._pending >= _PENDING or time.monotonic() - self._looked >= _LOOK:
            with self._turn:
                self._log.flush()
            try:
                self._look()
            except (StorageError, LockTimeout, Malformed) as error:
                # The beams are taken: an error here would make its caller send them again.
                self._pending, self._looked = 0, time.monotonic()
                log.warning("%s: volumes wait in their log: %s", self.url, error)
        return last

    def flush(self) -> None:
        self._check_open()
        with self._turn:
            self._log.flush()
        self._look()

    def _look(self, *, finish: bool = False) -> None:
        with self._turn:
            self._store.advance(finish=finish)
            self._pending, self._looked = 0, time.monotonic()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._worker.stop()
        try:
            self._log.close()
            self._look(finish=not self._keeps_open)
        finally:
            for volume in self._store.open_volumes():
                log.warning("%s: %s: it stays open for the next writer", self.url, volume)


class FilesReader(Worded, Reader):
    """Reads the rows of a directory's files in order, and follows new files."""

    cannot_carry = {"type": "is 0", "subtype": "is 0"}  # noqa: RUF012 - never changed

    def __init__(
        self,
        url: str,
        path: Path,
        start: Position,
        options: _ReaderOptions,
        rows_in: Callable[[Path], pa.Table],
    ) -> None:
        super().__init__(url)
        if not path.exists():
            raise NotFound(f"there is no {path}")
        self._path = path
        self._options = options
        self._rows_in = rows_in
        self._seen: set[Path] = set()
        self._listed: deque[Path] = deque()
        self._waiting: deque[Message] = deque()
        self._next = 0
        self._is_closed = False
        self._messages = self._bytes = 0
        self._lost = LossLedger()
        self.seek(start)

    def seek(self, position: PositionLike) -> None:
        place = Position.of(position)
        if place.anchor not in {"start", "end"}:
            raise PositionError(
                f"{self.url}: files have no numbers to go to; found {place}",
                hint="start with the oldest file (start) or the next to come (end)",
            )
        self._waiting.clear()
        self._listed.clear()
        self._looked = -float("inf")
        self._seen = set(files_below(self._path)) if place.anchor == "end" else set()

    def available(self) -> Iterator[Message]:
        """Yield the rows of the files that are there now.

        By their names: the time of a file may be that of a machine whose clock is ahead.
        """
        self._looked = -float("inf")
        there = set(files_below(self._path))
        while messages := self._take(1):
            yield messages[0]
            if not self._waiting and there <= self._seen:
                return

    def in_words(self, message: Message) -> str:
        rows = _rows_in(message.payload)
        if is_grid_row(rows.schema):
            grid = grid_from_row(rows)
            return (
                f"{grid.radar or 'a grid'}, {len(grid.x)} x {len(grid.y)} x {len(grid.z)} cells: "
                f"{', '.join(grid.fields)}"
            )
        ray = check_beams(rows)
        known = ray.select(["radar", "volume_number", "sweep_number"]).to_pylist()[0]
        azimuth, elevation = (ray.column(n)[0].as_py() for n in ("azimuth", "elevation"))
        return (
            f"{known['radar'] or 'a radar'}, volume {known['volume_number']}, "
            f"sweep {known['sweep_number']}, azimuth {azimuth:.2f}, elevation {elevation:.2f}, "
            f"{int(gates_of(ray)[0])} gates: {', '.join(field_names(ray.schema))}"
        )

    def close(self) -> None:
        self._waiting.clear()
        self._listed.clear()
        self._is_closed = True

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=self._lost.total,
            filtered=0,
            restarts=0,
            next_seq=self._next,
            backlog=len(self._waiting),
            losses=self._lost.ranges(),
        )

    def _has_news(self) -> bool:
        self._fill(1)
        return bool(self._waiting)

    def _fill(self, count: int) -> None:
        """Read files until `count` messages are waiting, or there are no more."""
        if self._is_closed:
            raise Closed(f"{self.url} was closed")
        try:
            while len(self._waiting) < count and (path := self._next_file()) is not None:
                self._waiting.extend(self._messages_in(path))
                self._seen.add(self._listed.popleft())
        except PenstockError:
            if not self._waiting:  # otherwise the next call raises it
                raise

    def _take(self, limit: int) -> list[Message]:
        self._fill(limit)
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        taken = [message._replace(seq=self._next + i) for i, message in enumerate(taken)]
        self._next += len(taken)
        self._messages += len(taken)
        self._bytes += sum(message.size for message in taken)
        return taken

    def _next_file(self) -> Path | None:
        if not self._listed and time.monotonic() - self._looked >= self._options.every:
            self._listed = deque(file for file in files_below(self._path) if file not in self._seen)
            self._looked = time.monotonic()
        return self._listed[0] if self._listed else None

    def _messages_in(self, path: Path) -> Iterator[Message]:
        try:
            created = path.stat().st_mtime_ns
            rows = self._rows_in(path)
        except (FileNotFoundError, NotFound):
            log.warning("%s: %s was removed before it was read", self.url, path)
            self._lost.add(Loss(self._next, self._next, DropReason.RETENTION))
            return
        except Malformed as error:
            if self._options.damaged == "fail":
                raise
            log.warning("%s: %s", self.url, error)
            # Nobody knows how many rows it had: it counts as one.
            self._lost.add(Loss(self._next, self._next, DropReason.DAMAGED))
            return
        for message in messages_from_batch(batch_from_rows(rows)):
            yield message._replace(created_ns=created)


def _rows_in(payload: bytes) -> pa.Table:
    with pa.ipc.open_stream(payload) as stream:  # of our own making
        return stream.read_all()
