"""Where are the streams of a machine, which exist, and who owns them?"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import (
    DamagedQueue,
    InvalidStreamId,
    NotFound,
    StorageError,
    Unsupported,
)
from penstock.core.stream_id import StreamId
from penstock.queue.ownership import Owner, Ownership
from penstock.queue.storage import storage_error, storage_errors
from penstock.queue.wide.creation import create_from_options
from penstock.queue.wide.file import Geometry, QueueFile, file_of, mark
from penstock.queue.wide.info import describe_wide
from penstock.queue.wide.layout import Compression, HeaderFlag, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.queue.wide.options import WideOptions

__all__ = [
    "StreamKind",
    "StreamPlace",
    "StreamState",
    "list_places",
    "list_streams",
    "make_streams_directory",
    "remove_stream",
    "streams_directory",
]

log = logging.getLogger(__name__)

_FILE: Final = re.compile(r"([0-9a-f]{32})\.(input|output)\.fmq")


class StreamKind(StrEnum):
    """The direction of a stream, seen from its creator."""

    #: The creator reads, others write.
    INPUT = "input"
    #: The creator writes, others read.
    OUTPUT = "output"


class StreamState(NamedTuple):
    """State of an existing stream."""

    stream: StreamId
    kind: StreamKind
    #: The creator's name; empty if unknown.
    owner: str
    #: The creator's process, or the last one's.
    pid: int
    #: Whether its creator is alive.
    alive: bool
    #: Messages that can be read now.
    messages: int
    #: Total of messages written.
    written: int
    #: URL for the `penstock` command.
    url: str


def list_streams(directory: str | os.PathLike[str] | None = None) -> list[StreamState]:
    """Return the existing streams, sorted by id."""
    found = []
    for place in list_places(directory):
        with contextlib.suppress(NotFound):  # removed meanwhile
            try:
                found.append(place.state())
            except DamagedQueue as damage:
                log.warning("%s", damage)
    return found


def list_places(directory: str | os.PathLike[str] | None = None) -> list[StreamPlace]:
    """Return the places of existing streams, sorted by id, without opening them."""
    folder = os.fspath(directory or streams_directory())
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("reading", folder, error) from error
    return [
        StreamPlace(StreamId.parse(match[1]), StreamKind(match[2]), folder)
        for match in filter(None, map(_FILE.fullmatch, names))
    ]


def remove_stream(
    stream: StreamId, kind: StreamKind, directory: str | os.PathLike[str] | None = None
) -> None:
    """Remove a stream whose creator is gone.

    :raises AlreadyOwned: the stream has a live creator.
    :raises NotFound: there is no such stream.
    """
    place = StreamPlace.of(stream, kind, directory)
    if not place.exists():
        raise place.not_found()
    with place.claimed("penstock, which removes it") as ownership:
        place.remove(ownership)


def streams_directory() -> str:
    """Return the directory of streams: $PENSTOCK_STREAMS, or the user's own in /dev/shm."""
    return os.environ.get("PENSTOCK_STREAMS") or f"/dev/shm/penstock-{os.getuid()}"  # noqa: S108


def make_streams_directory(directory: str) -> None:
    """Create the directory of streams if it is missing.

    :raises StorageError: creation failed, or the user's directory belongs to another user.
    """
    folder = Path(directory)
    with storage_errors("creating", directory):
        if directory != f"/dev/shm/penstock-{os.getuid()}":  # noqa: S108
            folder.mkdir(parents=True, exist_ok=True)
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        # Any user could have created a directory of this name.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            cause = OSError(errno.EACCES, "it is not a directory of this user's")
            raise StorageError("using", directory, cause, hint="choose another: $PENSTOCK_STREAMS")


class StreamPlace(NamedTuple):
    """Location of a stream."""

    stream: StreamId
    kind: StreamKind
    directory: str

    @classmethod
    def of(
        cls, stream: StreamId, kind: StreamKind, directory: str | os.PathLike[str] | None
    ) -> StreamPlace:
        if not stream.is_concrete:
            raise InvalidStreamId(
                "text", str(stream), "leaves a field open (ANY): it is a request, not a stream"
            )
        return cls(stream, kind, os.fspath(directory or streams_directory()))

    def __str__(self) -> str:
        return f"the {self.kind} stream {self.stream}"

    @property
    def path(self) -> str:
        # An id can name an input and an output stream at once (docs/specs/jrtc.md 4).
        return f"{self.directory}/{self.stream.hex()}.{self.kind}"

    @property
    def url(self) -> str:
        return "fmq:" + self.path.replace("%", "%25").replace("?", "%3F")

    @property
    def _owner_file(self) -> str:
        return f"{self.path}.owner"

    def exists(self) -> bool:
        return Path(file_of(self.path)).exists()

    def has(self, epoch: int) -> bool:
        """Tell whether the stream is there, in this epoch or one that continues it."""
        try:
            file = QueueFile.open(self.path, writable=False)
        except NotFound:
            return False
        except DamagedQueue:
            return True  # unknown
        found = {file.field("epoch"), *(one.epoch for one in file.header.lineage)}
        file.close()
        return epoch in found

    def owner(self) -> Owner:
        """Return its current or last creator; one without a name if unknown."""
        return Owner.of(self._owner_file) or Owner("", 0, alive=False)

    @contextlib.contextmanager
    def claimed(self, owner: str) -> Iterator[Ownership]:
        """Become the owner of the stream; released if the `with` block raises."""
        make_streams_directory(self.directory)
        ownership = Ownership.claim(self._owner_file, owner, str(self))
        try:
            yield ownership
        except BaseException:
            ownership.release(remove=not self.exists())
            raise

    def open_or_make(self, options: WideOptions) -> QueueFile:
        """Map the stream's queue, created if missing. The caller owns the stream."""
        while True:
            create_from_options(self.path, options, replace=False)
            file = QueueFile.open(self.path, writable=True)
            try:
                self._check(file, options)
                if file.field("state") == State.LIVE:
                    return file
                Path(file.path).unlink()  # its removal was interrupted
            except BaseException:
                file.close()
                raise
            file.close()

    def _check(self, file: QueueFile, options: WideOptions) -> None:
        many = HeaderFlag.MANY_WRITERS in file.flags
        own = file.header.stream or StreamId(bytes(16))  # zeros: an id, too
        if (
            own != self.stream
            or many is (self.kind is StreamKind.OUTPUT)
            or file.compression is not Compression.NONE
        ):
            raise Unsupported(f"{file.path} is not the queue of {self}", hint="move it away")
        asked = Geometry.fitting(options.slots, options.size, options.readers)
        if file.geometry != asked:
            log.warning("%s was there already, and keeps its size; remove it to change that", self)

    def remove(self, ownership: Ownership) -> None:
        """Remove the stream's files. The caller owns the stream."""
        with contextlib.suppress(NotFound, DamagedQueue):
            file = QueueFile.open(self.path, writable=True)
            mark(file, State.SEALED)  # wakes processes that have it open
            file.close()
        with storage_errors("removing", self.path):
            Path(file_of(self.path)).unlink(missing_ok=True)
        ownership.release(remove=True)

    def state(self) -> StreamState:
        info = describe_wide(self.url, self.path)
        written = 0 if info.youngest_seq is None else info.youngest_seq + 1
        return StreamState(self.stream, self.kind, *self.owner(), info.count, written, self.url)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Replace a `NotFound` of the queue by one of the stream."""
        try:
            yield
        except NotFound:
            raise self.not_found() from None

    def not_found(self) -> NotFound:
        is_output = self.kind is StreamKind.OUTPUT
        other = self._replace(kind=StreamKind.INPUT if is_output else StreamKind.OUTPUT)
        hint = "its creator has to make it first; wait=True waits for that"
        if other.exists():
            opener = "InputStream.open() writes to" if is_output else "OutputStream.open() reads"
            hint = f"there is an {other.kind} stream of that id: {opener} it"
        return NotFound(f"{self} does not exist in {self.directory}", hint=hint)
