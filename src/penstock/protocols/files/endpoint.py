"""How is a file of another tool written and read as a stream?

A file is complete or does not exist: it is written under a temporary name, and renamed on `close`.
Row numbers are the sequence numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.batch import (
    BATCH_SCHEMA,
    batch_from_messages,
    check_batch,
    integers_in,
    messages_from_batch,
    numbers_of,
)
from penstock.core.capabilities import AllOrNone, Replayable
from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.decoding import Rows, decoder_for, decoding_from_text, parse_decoding
from penstock.core.endpoints import Endpoint, Identity
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    InvalidOption,
    InvalidURL,
    LockTimeout,
    MessageTooLarge,
    NotFound,
    PenstockError,
    StorageError,
)
from penstock.core.interfaces import BookedWriter, Bounds, Concluding, Reader, StreamInfo
from penstock.core.message import Message
from penstock.core.options import parse_options
from penstock.core.position import Position, check_seek
from penstock.core.statistics import ReaderStatistics
from penstock.core.whole_files import keep_whole
from penstock.protocols.files.mcap_files import McapFormat
from penstock.protocols.files.tables import ArrowFormat, ParquetFormat
from penstock.protocols.files.text import CsvFormat, JsonLinesFormat
from penstock.queue.endpoint import token_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike, Writer
    from penstock.core.position import PositionLike
    from penstock.core.stream_id import StreamId
    from penstock.core.url import URL
    from penstock.protocols.files.formats import FileFormat, WriterOptions

__all__ = [
    "ArrowEndpoint",
    "CsvEndpoint",
    "FileEndpoint",
    "FileReader",
    "FileWriter",
    "JsonLinesEndpoint",
    "McapEndpoint",
    "ParquetEndpoint",
    "check_replaceable",
]

log = logging.getLogger(__name__)

#: Columns of a message kept beside the decoded payload, unless `keep` is set.
_KEPT: Final = ["seq", "time_ns", "created_ns", "type", "subtype"]
#: Rows and bytes buffered before a write: many small groups are slow to read.
_ROWS: Final = 65_536
_BYTES: Final = 32 << 20


class FileEndpoint(Endpoint):
    """A file, such as `parquet:out.parquet`."""

    format: ClassVar[FileFormat]

    def open_reader(self, url: URL, start: Position) -> Reader:
        options = parse_options(url, self.format.reader_options)
        reader = FileReader(url.text, _path_of(url), self.format, options)
        reader.seek(start)
        return reader

    def open_writer(self, url: URL) -> Writer:
        options = parse_options(url, self.format.writer_options)
        return FileWriter(url.text, _path_of(url), self.format, options)

    def reread(self, url: URL) -> Reader:
        known = self.format.reader_options.model_fields
        options = {name: value for name, value in url.options.items() if name in known}
        return self.open_reader(dataclasses.replace(url, options=options), Position.START)

    def describe(self, url: URL) -> StreamInfo:
        path = _path_of(url)
        options = parse_options(url, self.format.reader_options)
        with FileReader(url.text, path, self.format, options) as reader:
            bounds = reader.bounds()
        changed = path.stat()
        return StreamInfo(
            url=url.text,
            layout=url.scheme,
            storage="file",
            slots=0,
            buffer_size=0,
            oldest_seq=0 if bounds.end else None,
            youngest_seq=bounds.end - 1 if bounds.end else None,
            count=bounds.end,
            bytes=changed.st_size,
            oldest_time_ns=None,
            youngest_time_ns=None,
            fill=0.0,
            blocking=False,
            details={"changed_ns": changed.st_mtime_ns},
        )

    def identity(self, url: URL) -> Identity:
        return Identity.of(url)

    def cannot_carry(self, url: URL) -> Mapping[str, str]:
        # Which of them are kept beside a decoded payload, the writer finds out.
        return {} if "decode" in url.options else self.format.cannot_carry

    def storage_of(self, url: URL) -> str | None:
        return token_of(str(_path_of(url)))


class ParquetEndpoint(FileEndpoint):
    """`parquet:/path/name.parquet`."""

    format = ParquetFormat()


class ArrowEndpoint(FileEndpoint):
    """`arrow:/path/name.arrow`."""

    format = ArrowFormat()


class CsvEndpoint(FileEndpoint):
    """`csv:/path/name.csv`."""

    format = CsvFormat()


class JsonLinesEndpoint(FileEndpoint):
    """`jsonl:/path/name.jsonl`."""

    format = JsonLinesFormat()


class McapEndpoint(FileEndpoint):
    """`mcap:/path/name.mcap`."""

    format = McapFormat()


def _path_of(url: URL) -> Path:
    if url.host is not None or not url.path or url.path.endswith("/"):
        raise InvalidURL(
            url.text,
            f"{url.scheme}: is a file on this machine",
            hint=f"write {url.scheme}:/path/name",
        )
    if url.path == "-":
        raise InvalidURL(
            url.text,
            f"{url.scheme}: is a file, not a pipe",
            hint=f"cat --json prints to standard output, put --jsonl - reads; a file is "
            f"{url.scheme}:./-",
        )
    return Path(url.path)


# --- writing --------------------------------------------------------------------------------------


class FileWriter(AllOrNone, Concluding, BookedWriter):
    """Writes a file, which appears under its name, complete, on `close`."""

    def __init__(self, url: str, path: Path, format: FileFormat, options: WriterOptions) -> None:
        super().__init__(url)
        self._path = path
        self._largest = format.largest
        self._rows: Rows | None = None
        schema = BATCH_SCHEMA
        self.cannot_carry = format.cannot_carry  # type: ignore[misc]  # by what is kept of it
        if options.decode is not None:
            self._rows = _decoded(options.decode)
            kept = [BATCH_SCHEMA.field(name) for name in self._rows.keep]
            schema = pa.schema([*kept, *self._rows.new])
            self.cannot_carry = {  # type: ignore[misc]
                name: "left out" for name in ("stream", "attributes") if name not in self._rows.keep
            }
        self._failed = 0
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = self._pending_bytes = 0
        #: A write failed, so that rows are missing in the file.
        self._is_broken = False
        self._unfinished = path.with_name(f"{path.name}.new")
        with contextlib.ExitStack() as stack, _storage_errors("writing", self._unfinished):
            check_replaceable(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = stack.enter_context(_locked_file(self._unfinished))
            stack.callback(self._unfinished.unlink, missing_ok=True)
            # Under the lock: another writer may just have finished it.
            if not options.replace and path.exists():
                raise AlreadyExists(
                    f"there is a file {path}",
                    hint="add ?replace=true to write over it, or remove it",
                )
            self._sink = format.sink(self._file, schema, options)
            stack.pop_all()

    def write(
        self,
        payload: BytesLike,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        now = SYSTEM_CLOCK.now_ns()
        message = Message(
            self._messages,
            now if time_ns is None else time_ns,
            now if created_ns is None else created_ns,
            type,
            subtype,
            stream,
            attributes,
            bytes(payload),
        )
        last = self.write_batch(batch_from_messages([message]))
        assert last is not None
        return last

    def write_batch(self, batch: Batch) -> int | None:
        """Append messages; keep their `seq` and `created_ns`.

        Messages with `created_ns` 0 get new ones.

        :raises MessageTooLarge: one can never fit; those before it are appended.
        """
        self._check_open()
        check_batch(batch)
        if not batch.num_rows:
            return None
        before = self._messages
        try:
            self._check_whole()
            fitting, too_large = self._fitting(batch)
            if fitting.num_rows:
                self._append(fitting)
        finally:
            self._refused += batch.num_rows - (self._messages - before)
        if too_large is not None:
            raise too_large
        return self._last_seq

    def _fitting(self, batch: Batch) -> tuple[Batch, MessageTooLarge | None]:
        """Return the messages before the first one that is too large, and the error about that."""
        if self._largest is None:
            return batch, None
        sizes = integers_in(pc.binary_length(batch.column("payload")))
        too_large = np.flatnonzero(sizes > self._largest)
        if not len(too_large):
            return batch, None
        first = int(too_large[0])
        return batch.slice(0, first), MessageTooLarge(
            int(sizes[first]), self._largest, hint="parquet: and arrow: take larger ones"
        )

    def _append(self, batch: Batch) -> None:
        sizes = pc.binary_length(batch.column("payload"))
        batch = self._numbered(batch)
        if self._rows is not None:
            batch, failures = self._rows.of(batch)
            self._failed += len(failures)
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        self._pending_bytes += batch.nbytes
        if self._pending_rows >= _ROWS or self._pending_bytes >= _BYTES:
            self._write_pending()
        self._messages += len(sizes)
        self._bytes += pc.sum(sizes).as_py()
        self._last_seq = self._messages - 1

    def _numbered(self, batch: Batch) -> Batch:
        is_new = numbers_of(batch, "created_ns") == 0
        if is_new.any():
            own = {
                "seq": pa.array(range(self._messages, self._messages + batch.num_rows)),
                "created_ns": pa.scalar(SYSTEM_CLOCK.now_ns()),
            }
            for name, values in own.items():
                at = batch.schema.get_field_index(name)
                chosen = pc.if_else(pa.array(is_new), values, batch.column(at))
                batch = batch.set_column(at, BATCH_SCHEMA.field(name), chosen)
        return batch

    def _write_pending(self) -> None:
        table = pa.Table.from_batches(self._pending).combine_chunks()
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        self._is_broken = True  # until all of it is written
        with _storage_errors("writing", self._unfinished):
            for rows in table.to_batches():
                self._sink.write(rows)
        self._is_broken = False

    def _check_whole(self) -> None:
        """Check that no write has failed, after which the file could only have a gap.

        :raises PenstockError: one has.
        """
        if self._is_broken:
            raise PenstockError(
                f"{self.url}: a write failed, and rows would be missing in the file",
                hint="make room, and begin again",
            )

    def _close(self, *, finished: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if finished:
                self._check_whole()
                if self._pending:
                    self._write_pending()
                with _storage_errors("writing", self._path):
                    self._sink.close()
                    self._file.flush()
                    keep_whole(self._unfinished, self._path)
            elif self._messages:
                log.warning("%s was not finished: nothing is left of it", self.url)
        finally:
            self._abandon()
        if finished and self._failed:
            log.warning(
                "%s: %d payloads did not decode: see its column decode_error",
                self.url,
                self._failed,
            )

    def _abandon(self) -> None:
        """Close and remove the unfinished file, unless it has its name."""
        with contextlib.suppress(FileNotFoundError):
            if self._unfinished.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
                self._unfinished.unlink()
                with contextlib.suppress(OSError, ValueError, pa.ArrowException):
                    self._sink.close()  # or it would warn when garbage-collected
        with contextlib.suppress(OSError):  # write errors were raised before
            self._file.close()


def check_replaceable(path: Path) -> None:
    """Check that a file of this name would take the place of a file, or of nothing.

    :raises InvalidOption: a folder, a pipe or a device has the name.
    """
    if path.is_dir():
        raise InvalidOption("path", str(path), "is a folder", hint="give the name of a file in it")
    is_special = path.exists() and not path.is_file()
    # /dev/stdout is a link, perhaps to a file: a rename would take the link from the whole machine.
    folder = path.parent.resolve()
    if is_special or folder == Path("/dev") or folder.is_relative_to("/proc"):
        raise InvalidOption(
            "path", str(path), "is no file that can be replaced", hint="choose another name"
        )


def _decoded(text: str) -> Rows:
    given = {"keep": _KEPT, "on_error": "skip", **decoding_from_text(text)}
    options = parse_decoding(given)
    if options.on_error == "dead_letter":
        raise InvalidOption("on_error", options.on_error, "a file takes skip or fail")
    return Rows(decoder_for(options), options, BATCH_SCHEMA.names)


def _locked_file(path: Path) -> BinaryIO:
    """Open and lock an empty file. Data left by a killed process is removed.

    :raises LockTimeout: another writer has the lock.
    """
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                file.truncate()
                return file
        except BlockingIOError:
            file.close()
            raise LockTimeout(
                f"another writer is at work on {path.name}", hint="write to another file, or wait"
            ) from None
        except FileNotFoundError:  # it was renamed meanwhile
            pass
        file.close()


@contextlib.contextmanager
def _storage_errors(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, PenstockError):
            raise
        raise StorageError(doing, str(path), error) from error


# --- reading --------------------------------------------------------------------------------------


class FileReader(Replayable, Reader):
    """Reads a file from any row on. Rows added later are not read."""

    renumbers = True

    def __init__(self, url: str, path: Path, format: FileFormat, options: Any) -> None:
        super().__init__(url)
        self._path = path
        self._format = format
        self._options = options
        self.cannot_carry = format.cannot_carry  # type: ignore[misc]  # by the kind of file
        self._is_closed = False
        self._messages = self._bytes = 0
        self._next = 0
        self._end: int | None = None
        if not path.is_file():
            raise NotFound(
                f"there is no file {path}", hint="give the whole name of the file, as `ls` shows it"
            )
        changed = path.stat()
        life = f"{changed.st_ino}:{changed.st_size}:{changed.st_mtime_ns}".encode()
        self._epoch = int.from_bytes(hashlib.blake2b(life, digest_size=8).digest()) >> 1
        self._batches: Iterator[Batch] = iter(())
        self._pending: Batch | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    def bounds(self) -> Bounds:
        if self._end is None:
            self._end = self._format.count(self._path, self._options)
        if self._end is None:
            self._end = sum(batch.num_rows for batch in self._all())
        return Bounds(self._epoch, 0, self._end)

    def newest_seq(self) -> int | None:
        if self._end is None:
            self._end = self._format.count(self._path, self._options)
        return self._end - 1 if self._end else None

    def seek(self, position: PositionLike) -> None:
        self._check_open()
        place = Position.of(position)
        self._parse_from(0 if place.anchor == "start" else self._number(place))

    def _number(self, place: Position) -> int:
        if place.anchor == "time":
            before = 0
            for batch in self._all():
                is_there = numbers_of(batch, "created_ns") >= place.value
                if is_there.any():
                    return before + int(is_there.argmax())
                before += batch.num_rows
            return before
        end = self.bounds().end
        if place.anchor == "seq":
            return check_seek(self.url, place.value, 0, end)
        return max(0, end - 1) if place.anchor == "last" else end

    def _all(self) -> Iterator[Batch]:
        with _storage_errors("reading", self._path):
            yield from self._format.batches(self._path, 0, self._options)

    def _take(self, limit: int) -> list[Message]:
        batch = self.read_batch(limit)
        try:
            return list(messages_from_batch(batch))
        except BaseException:
            self._parse_from(self._next - batch.num_rows)
            self._messages -= batch.num_rows
            self._bytes -= _size(batch)
            raise

    def read_batch(self, n: int, timeout: float | None = 0) -> Batch:
        del timeout  # a file has no later messages
        pending = self._parsed()
        if pending is None or n < 1:
            return batch_from_messages([])
        batch, rest = pending.slice(0, n), pending.slice(n)
        count, left, size = batch.num_rows, rest.num_rows, _size(batch)
        end = self._next + count
        numbers = pa.array(range(self._next, end), pa.int64())
        batch = batch.set_column(0, BATCH_SCHEMA.field("seq"), numbers)
        # No call from here on: whoever is interrupted before gets them at the next read.
        self._pending = rest if left else None
        self._next = end
        self._messages += count
        self._bytes += size
        return batch

    def _parse_from(self, seq: int) -> None:
        batches = self._format.batches(self._path, seq, self._options)
        self._next, self._pending, self._batches = seq, None, batches

    def _parsed(self) -> Batch | None:
        """Return the next rows, parsed and not read yet; None: the end is reached."""
        self._check_open()
        if self._pending is None:
            try:
                with _storage_errors("reading", self._path):
                    self._pending = next(self._batches, None)
            except BaseException:
                # An iterator that has failed is at its end: the next read would find no error. One
                # that a signal interrupted may have gone on.
                self._parse_from(self._next)
                raise
        return self._pending

    def _has_news(self) -> bool:
        return self._parsed() is not None  # the end of most files is known only there

    def available(self) -> Iterator[Message]:
        # Up to its end, whenever they were appended: a file has no later messages.
        while messages := self._take(1):
            yield messages[0]

    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(
            messages=self._messages,
            bytes=self._bytes,
            lost=0,
            filtered=0,
            restarts=0,
            next_seq=self._next,
            backlog=0 if self._end is None else self._end - self._next,
            losses=(),
        )

    def close(self) -> None:
        self._is_closed = True
        self._batches, self._pending = iter(()), None

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.url} was closed")


def _size(batch: Batch) -> int:
    """Return the bytes of the payloads of a batch."""
    return pc.sum(pc.binary_length(batch.column("payload"))).as_py() or 0
