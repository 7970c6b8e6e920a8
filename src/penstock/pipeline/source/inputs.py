"""Which streams are behind the URLs of a source, and what of them can be read?

A stream that cannot be re-read is copied to a log, from which Spark reads it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.capabilities import Grouped, Held, Redelivering, Replayable
from penstock.core.endpoints import (
    Identity,
    file_name_of,
    find_streams,
    identity,
    open_reader,
    open_writer,
)
from penstock.core.errors import (
    Closed,
    CursorInUse,
    InvalidOption,
    NotFound,
    PenstockError,
    StorageError,
    Unsupported,
)
from penstock.core.position import Position
from penstock.core.retry import Backoff, RetryPolicy, retry
from penstock.core.url import URL
from penstock.core.whole_files import sync_names, write_whole
from penstock.core.worker import Worker
from penstock.pipeline.source.checkpoint import checksum
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.interfaces import Bounds, Reader

__all__ = ["Holders", "LiveCopy", "LostBefore", "Streams", "expand", "log_for"]

log = logging.getLogger(__name__)

#: After a restart the previous planning process may not have ended yet.
_LEAVING: Final = RetryPolicy(
    retry_on=(CursorInUse,), backoff=Backoff(initial=0.1, maximum=0.5), max_elapsed=10.0
)
#: Seconds for a stopping copy to copy what has come. A stream that goes on never has no more, and
#: the next planner waits for the log as long as its `lock_timeout`, by default 5 seconds.
_TIME_TO_DRAIN: Final = 2.0
#: Seconds for it to end, with the last batch synced and the count of losses stored.
_TIME_TO_STOP: Final = 10.0
#: File beside the log of a live stream: `NAME.lost.json`.
_LOST: Final = ".lost.json"
#: Bytes of each of its records: a page, so that no device writes both at once.
_RECORD: Final = 4096

#: Seconds between two checks whether a silent stream still exists.
_BETWEEN_CHECKS: Final = 1.0
_BETWEEN_REMOTE_CHECKS: Final = 10.0


def expand(urls: Sequence[str], of: Callable[[str], Identity] = identity) -> list[str]:
    """Expand URLs and patterns (`fmq:/data/*`) to the existing streams, in order.

    :param of: returns the identity of the stream of a URL, cached if possible
    :raises InvalidOption: one stream is named twice, with different options.
    """
    found: dict[Identity, str] = {}  # a stream is read once, whatever it is called
    for url in urls:
        for named in find_streams(url):
            first = found.setdefault(of(named), named)
            if named == url and first in urls and _options(first) != _options(url):
                raise InvalidOption(
                    "url",
                    url,
                    f"is the stream {first}, read in another way",
                    hint="read it by a source of its own",
                )
    return list(found.values())


def _options(url: str) -> Mapping[str, str]:
    return URL.parse(url).options


class Streams:
    """Open readers of many URLs, to get the bounds of their streams.

    A stream is named by its URL in the checkpoint, or else by its own. So a changed option in the
    URL, such as the path of a token, does not make it another stream.
    """

    def __init__(self, urls: Sequence[str], stage: str | None = None) -> None:
        self._patterns = urls
        self._stage = stage
        self._known: dict[str, Identity] = {}
        #: Keyed by identity, as all below: the name, and the URL to open.
        self._names: dict[Identity, str] = {}
        self._urls: dict[Identity, str] = {}
        self._readers: dict[Identity, Reader] = {}
        self._copies: dict[Identity, LiveCopy] = {}
        self._epochs: dict[Identity, int] = {}
        #: The last known end of each epoch of a stream.
        self._ends: dict[tuple[Identity, int], int] = {}
        #: When a stream was last known to exist.
        self._there: dict[Identity, float] = {}

    def use_names(self, names: Iterable[str]) -> None:
        """Use the names that a checkpoint has for streams."""
        self._names |= {self.identity_of(name): name for name in names}

    def identity_of(self, name: str) -> Identity:
        """Return the identity of a stream, cached: the same whatever it is called."""
        stream = self._known.get(name)
        if stream is None:
            stream = self._known[name] = identity(name)
        return stream

    def look(self, *, may_be_removed: bool = False) -> dict[str, Bounds]:
        """Return the bounds of every existing stream.

        :param may_be_removed: ignore a missing stream of a plain URL if it was seen before
        :raises NotFound: the stream of a plain URL does not exist.
        :raises Unsupported: a stream cannot be re-read, and is not staged.
        """
        found = {}
        for url in expand(self._patterns, self.identity_of):
            stream = self.identity_of(url)
            self._urls[stream] = url
            try:
                found[self._names.get(stream, url)] = self._look_at(stream)
            except NotFound:
                if url in self._patterns and not (may_be_removed and stream in self._epochs):
                    raise
                # A pattern found it, and it was removed just now.
        return found

    def _look_at(self, stream: Identity) -> Bounds:
        reader = self._reader(stream)
        if stream in self._copies:
            self._copies[stream].check()
        # While the old one is still open: `seek` may find a new stream in its place.
        newest, before = reader.newest_seq(), self._epochs.get(stream)
        before_end = None if before is None else self._ends.get((stream, before))
        if newest is not None and before is not None:
            self._ends[stream, before] = newest + 1
        try:
            reader.seek(Position.END)  # it reads nothing, and so never stays with an old queue
            bounds = reader.bounds()
        except (Unsupported, Closed):  # recreated, and needs another reader
            self._readers.pop(stream).close()
            bounds = self._reader(stream).bounds()
        is_silent = self._epochs.get(stream) == bounds.epoch and before_end == bounds.end
        self._ends[stream, bounds.epoch] = bounds.end
        self._epochs[stream] = bounds.epoch
        if is_silent and self._urls[stream] in self._patterns and stream not in self._copies:
            self._check_there(stream)  # what a pattern finds is there
        return bounds

    def _check_there(self, stream: Identity) -> None:
        """Check periodically that a silent stream was not removed.

        An open reader would still see a removed stream, and wait for ever.

        :raises NotFound: the stream was removed.
        """
        now = time.monotonic()
        pause = _BETWEEN_REMOTE_CHECKS if stream.path is None else _BETWEEN_CHECKS
        if now - self._there.get(stream, now - pause) < pause:
            return
        try:
            open_reader(self._urls[stream], start=Position.END).close()
        except NotFound:
            raise
        except PenstockError:
            return  # it exists; reading it will raise the error
        self._there[stream] = now

    def check_of(self, name: str, epoch: int, seq: int) -> str:
        """Return the checksum of a message of a stream; empty: it cannot be read."""
        stream = self.identity_of(name)
        with suppress(PenstockError):  # reading it will raise the error
            self.place(name)
            reader = self._reader(stream)
            if reader.bounds().epoch == epoch:
                reader.seek(seq)
                messages = reader.read_many(1)
                reader.seek(Position.END)
                if messages and messages[0].seq == seq:
                    return checksum(messages[0])
        return ""

    def is_near(self, name: str) -> bool:
        """Tell whether a stream is on this machine, so that checking it is cheap."""
        return self.identity_of(name).path is not None

    def end_seen(self, name: str, epoch: int) -> int | None:
        """Return the last known end of an epoch of a stream, or None."""
        return self._ends.get((self.identity_of(name), epoch))

    def end_of_removed(self, name: str, epoch: int) -> int | None:
        """Return the last known end of a removed stream, and close its reader."""
        stream = self.identity_of(name)
        reader = self._readers.pop(stream, None)
        if reader is not None:
            # The reader has the files open, and so sees all that was written.
            with suppress(PenstockError, OSError):
                newest = reader.newest_seq()
                if newest is not None and self._epochs.get(stream) == epoch:
                    self._ends[stream, epoch] = max(newest + 1, self._ends.get((stream, epoch), 0))
            reader.close()
        self._there.pop(stream, None)
        return self._ends.get((stream, epoch))

    def place(self, name: str) -> str:
        """Return the URL from which tasks read a stream: its own, or that of its log.

        :raises Unsupported: the stream cannot be re-read, and is not staged.
        """
        stream = self.identity_of(name)
        if stream not in self._urls:
            self._urls[stream] = self._url_of(stream, name)
        with suppress(NotFound):  # reading it will raise the error
            self._reader(stream)
        copy = self._copies.get(stream)
        return self._urls[stream] if copy is None else copy.place

    def _url_of(self, stream: Identity, name: str) -> str:
        """Return the URL of a stream that `look` has not seen yet."""
        return next(
            (
                url
                for url in expand(self._patterns, self.identity_of)
                if self.identity_of(url) == stream
            ),
            name,
        )

    def lost_before_staging(self) -> dict[str, LostBefore]:
        """Return how many messages live streams lost before staging."""
        return {
            self._names.get(stream, self._urls[stream]): copy.lost
            for stream, copy in self._copies.items()
        }

    def note_counted(self, name: str, count: int) -> None:
        """Store that Spark has stored an offset that counts `count` messages lost before staging.

        :raises StorageError: the operating system refuses.
        """
        copy = self._copies.get(self.identity_of(name))
        if copy is not None:
            copy.note_counted(count)

    def first_at(self, name: str, time_ns: int) -> int:
        """Return the number of the first message appended at `time_ns` or later."""
        with open_reader(self.place(name), start=Position.time(time_ns)) as reader:
            number = reader.statistics().next_seq
        if number is None:
            raise NotFound(f"{name}: there is no message at that time")
        return number

    def _reader(self, stream: Identity) -> Reader:
        reader = self._readers.get(stream)
        if reader is None:
            reader = self._readers[stream] = self._open(stream)
        return reader

    def _open(self, stream: Identity) -> Reader:
        url = self._urls[stream]
        reader = open_reader(url, start=Position.END)
        if isinstance(reader, Replayable):
            return reader
        if self._stage is None:
            reader.close()
            raise Unsupported(
                f"{url} cannot be read again, as Spark does after a failure",
                hint='keep it in a log: .option("stage", "log:/path/name")',
            )
        log = self._stage
        if len(self._patterns) > 1:
            log = log_for(str(stream), self._names.get(stream, url), below=self._stage)
        copy = self._copies[stream] = LiveCopy(reader, log)
        return open_reader(copy.place, start=Position.END)

    def stop_copies(self) -> None:
        """Stop the copies of live streams; what they have lost can still be asked for."""
        for staged in self._copies.values():
            staged.ask_to_stop()
        for staged in self._copies.values():
            staged.stop()

    def close(self) -> None:
        self.stop_copies()
        for reader in self._readers.values():
            reader.close()
        self._copies.clear()
        self._readers.clear()


def log_for(*names: str, below: str) -> str:
    """Return the log for a stream below `stage=`: an existing one of any of its names, or new.

    A new log gets the first name; earlier releases used the URL.
    """
    path, mark, options = below.partition("?")
    logs = [f"{path.rstrip('/')}/{file_name_of(name)}{mark}{options}" for name in names]
    places = {log: identity(log).path for log in logs}
    return next((log for log, at in places.items() if at is not None and at.exists()), logs[0])


class LostBefore(NamedTuple):
    """Messages that a live stream lost before its log, in the life of the log."""

    total: int
    #: How many of them a query has counted, in an offset that Spark has stored.
    counted: int

    def since(self, counted: int | None) -> int:
        """Return how many are new to an offset that counts `counted`; None: it counts none yet."""
        before = self.counted if counted is None else counted
        return self.total - before if before <= self.total else self.total  # the file was removed


class LiveCopy:
    """Copies a live stream to a log, in a thread of the planning process.

    Every batch is synced to disk before the next is read, so that messages which Spark has planned
    survive a power failure. What the stream lost before is counted in a file beside the log: a
    query that ends before its next batch is planned counts it when it is restarted. The file also
    has how much of it queries have counted: a query that ends before its first batch has no offset
    that could tell.
    """

    def __init__(self, reader: Reader, stage: str) -> None:
        """Start, and take ownership of the reader.

        :raises LockTimeout: another query writes to that log.
        """
        #: The log's URL for readers.
        self.place = stage.partition("?")[0]
        self._reader = reader
        synced = {} if "sync" in URL.parse(stage).options else {"sync": "batch"}
        try:
            self._writer = open_writer(stage, **synced)
        except BaseException:
            reader.close()
            raise
        path = Path(URL.parse(stage).path.rstrip("/")).resolve()
        try:
            self._count = _CountFile(path.with_name(f"{path.name}{_LOST}"))
        except BaseException:
            self._writer.close()
            reader.close()
            raise
        #: Lost before this copy began: a reader's own count begins with it.
        self._lost_earlier = self.lost.total
        #: Received messages that were not copied before the end.
        self._left = 0
        self._worker = Worker(f"the copy of {reader.url} to {self.place}", self._run, log=log)
        self._worker.start()

    def _run(self, worker: Worker) -> None:
        with self._writer:
            try:
                with self._reader:
                    self._copy(worker)
            except BaseException:
                self._count_left()
                try:
                    self._note()
                except StorageError as error:  # the first error says more
                    log.error("%s", error)  # noqa: TRY400 - it is of the disk
                raise
            self._count_left()
            self._note()

    def _copy(self, worker: Worker) -> None:
        from penstock.relay.copy import copy  # noqa: PLC0415 - most queries need none of it

        both = self._reader, self._writer
        copy(
            *both,
            follow=True,
            on_progress=lambda _: self._note(),
            should_stop=lambda: worker.is_stopping,
        )
        if isinstance(self._reader, Grouped):
            return  # what it has not read stays with the group
        # A reader may receive in a thread of its own: what it has received ends with it.
        # For a while: no number tells what had come by now. `created_ns` is often when it was read.
        until = time.monotonic() + _TIME_TO_DRAIN
        copy(
            *both,
            on_progress=lambda _: self._note(),
            should_stop=lambda: time.monotonic() > until,
        )

    def _note(self) -> None:
        """Store how many messages were lost before the log.

        :raises StorageError: the operating system refuses; no loss may go uncounted.
        """
        self._count.put_total(self._lost_earlier + self._reader.statistics().lost + self._left)

    @property
    def lost(self) -> LostBefore:
        """What the stream lost before its log, as stored."""
        return self._count.lost

    def note_counted(self, count: int) -> None:
        """Store that Spark has stored an offset that counts `count` of the lost messages.

        :raises StorageError: the operating system refuses.
        """
        self._count.put_counted(count)

    def _count_left(self) -> None:
        """Count received messages as lost that are not in the log: they ended with the reader.

        The reader is closed, so that nothing comes after the count; what its `close` counted as
        lost or left unread is in its statistics.
        """
        if isinstance(self._reader, Redelivering) and self._reader.redelivers:
            return
        received = self._reader.statistics()
        copied = self._writer.statistics().messages
        self._left = received.messages + received.backlog - copied
        if self._left:
            log.warning(
                "%s: %d messages had come and are lost: the copy to %s ended before them",
                *(self._reader.url, self._left, self.place),
            )

    def check(self) -> None:
        """Check that the copy is still running.

        :raises Exception: the error that ended it.
        """
        if self._worker.error is not None:
            raise self._worker.error

    def ask_to_stop(self) -> None:
        """Tell it to stop, without waiting for the end."""
        self._worker.ask_to_stop()

    def stop(self) -> None:
        """Stop: copy what has come, and sync it to disk."""
        self._worker.stop(_TIME_TO_STOP)


class _CountFile:
    """What was lost, and counted, in a small file that can be replaced when the disk is full.

    The file has two records of fixed size, each JSON with a checksum. A new one overwrites the
    older one, which needs no new space; a power failure meanwhile leaves the other. Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        """Read the counts, or create the file with 0.

        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._lock = threading.Lock()
        with storage_errors("reading", str(path)):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                data = b""
        found = [_lost_in(data[at : at + _RECORD]) for at in (0, _RECORD)]
        records = [LostBefore(0, 0) if lost is None else lost for lost in found]
        #: The last counts: they only grow.
        self.lost = max(records)
        if data and found == [None, None]:
            log.warning("%s is damaged, and counts from 0 on", path)
        #: The record to overwrite: the older one.
        self._next = records.index(min(records))
        if None in found:  # also that of 0.1: a single record, without a checksum
            with storage_errors("writing", str(path)):
                write_whole(path, _record_of(self.lost) * 2, sync=True)
                sync_names(path.parent)

    def put_total(self, total: int) -> None:
        """Store how many were lost; return when it is on the disk.

        :raises StorageError: the operating system refuses.
        """
        with self._lock:
            self._put(self.lost._replace(total=total))

    def put_counted(self, counted: int) -> None:
        """Store how many of them a query has counted; return when it is on the disk.

        :raises StorageError: the operating system refuses.
        """
        with self._lock:
            # An offset may be older than another query's, or be of a file that was removed.
            if self.lost.counted < counted <= self.lost.total:
                self._put(self.lost._replace(counted=counted))

    def _put(self, lost: LostBefore) -> None:
        if lost == self.lost:
            return
        with storage_errors("writing", str(self._path)), self._path.open("r+b") as file:
            file.seek(self._next * _RECORD)
            file.write(_record_of(lost))
            file.flush()
            os.fsync(file.fileno())
        self._next = 1 - self._next
        self.lost = lost


def _record_of(lost: LostBefore) -> bytes:
    fields = {"lost": lost.total, "counted": lost.counted}
    record = json.dumps({**fields, "crc32": zlib.crc32(b"%d %d" % lost)})
    return record.ljust(_RECORD - 1).encode() + b"\n"


def _lost_in(record: bytes) -> LostBefore | None:
    """Return the counts in a record; None: there are none, or they are torn."""
    try:
        fields = json.loads(record)
        total = int(fields["lost"])
        if "counted" in fields:
            lost = LostBefore(total, int(fields["counted"]))
            found = zlib.crc32(b"%d %d" % lost)
        else:  # of an earlier release: what was lost before a query began was never new to it
            lost, found = LostBefore(total, total), zlib.crc32(b"%d" % total)
        is_whole = fields.get("crc32", found) == found
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return lost if is_whole else None


class Holders:
    """Named readers that only mark how far the query has finished each stream."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._readers: dict[str, Reader] = {}

    def done(self, url: str, epoch: int, seq: int) -> None:
        """Move the reader of a stream to `seq`, so that the writer may overwrite older messages.

        :raises CursorInUse: another query uses this name.
        """
        reader = self._readers.get(url)
        if reader is not None and reader.bounds().epoch != epoch:
            # It was recreated. A reader that reads nothing never reaches the end of the old one.
            self._readers.pop(url).close()
            reader = None
        if reader is None:
            reader = self._readers[url] = retry(lambda: self._open(url), _LEAVING)
        if reader.bounds().epoch == epoch:
            reader.seek(seq)

    def _open(self, url: str) -> Reader:
        reader = open_reader(url, hold=self._name)
        if not isinstance(reader, Held):
            reader.close()
            raise Unsupported(f"{url} keeps no place of a reader: its writer waits for nobody")
        return reader

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
