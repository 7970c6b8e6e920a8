"""Where are the streams of a machine, which are there, and whose are they?"""

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
from penstock.queue.wide.compression import Compression
from penstock.queue.wide.creation import create_from_options
from penstock.queue.wide.info import describe_wide
from penstock.queue.wide.layout import Geometry, HeaderFlag, State
from penstock.queue.wide.queue_file import QueueFile, file_of, mark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.queue.wide.options import WideOptions

__all__ = [
    "StreamKind",
    "StreamPlace",
    "StreamState",
    "list_streams",
    "remove_stream",
    "streams_directory",
]

log = logging.getLogger(__name__)

_FILE: Final = re.compile(r"([0-9a-f]{32})\.(input|output)\.fmq")


class StreamKind(StrEnum):
    """Which side of a stream its creator is on."""

    #: The creator reads what others write.
    INPUT = "input"
    #: The creator writes what others read.
    OUTPUT = "output"


class StreamState(NamedTuple):
    """A stream that exists."""

    stream: StreamId
    kind: StreamKind
    #: The name that its creator gave itself; empty if it is not known.
    owner: str
    #: The creator's process, or the last one's.
    pid: int
    #: Whether its creator is there now.
    alive: bool
    #: Messages that can be read now.
    messages: int
    #: Messages that were ever written.
    written: int
    #: What `penstock` shows it by.
    url: str


def list_streams(directory: str | os.PathLike[str] | None = None) -> list[StreamState]:
    """Return the streams that exist, in the order of their ids."""
    folder = os.fspath(directory or streams_directory())
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("reading", folder, error) from error
    found = []
    for match in filter(None, map(_FILE.fullmatch, names)):
        place = StreamPlace(StreamId.parse(match[1]), StreamKind(match[2]), folder)
        with contextlib.suppress(NotFound):  # removed meanwhile
            try:
                found.append(place.state())
            except DamagedQueue as damage:
                log.warning("%s", damage)
    return found


def remove_stream(
    stream: StreamId, kind: StreamKind, directory: str | os.PathLike[str] | None = None
) -> None:
    """Remove a stream that its creator left behind.

    :raises AlreadyOwned: it has a creator.
    :raises NotFound: there is none.
    """
    place = StreamPlace.of(stream, kind, directory)
    if not place.exists():
        raise place.not_found()
    with place.claimed("penstock, which removes it") as ownership:
        place.remove(ownership)


def streams_directory() -> str:
    """Return where streams are: in $PENSTOCK_STREAMS, else in memory, in a place of the user's."""
    return os.environ.get("PENSTOCK_STREAMS") or f"/dev/shm/penstock-{os.getuid()}"  # noqa: S108


class StreamPlace(NamedTuple):
    """Where a stream is."""

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
        # An id can name an input and an output stream at once (jrtc 4).
        return f"{self.directory}/{self.stream.hex()}.{self.kind}"

    @property
    def url(self) -> str:
        return "fmq:" + self.path.replace("%", "%25").replace("?", "%3F")

    @property
    def _owner_file(self) -> str:
        return f"{self.path}.owner"

    def exists(self) -> bool:
        return Path(file_of(self.path)).exists()

    @contextlib.contextmanager
    def claimed(self, owner: str) -> Iterator[Ownership]:
        """Own the stream; it is let go of again if what follows fails."""
        self._make_directory()
        ownership = Ownership.claim(self._owner_file, owner, str(self))
        try:
            yield ownership
        except BaseException:
            ownership.release(remove=not self.exists())
            raise

    def _make_directory(self) -> None:
        folder = Path(self.directory)
        with storage_errors("creating", self.directory):
            if self.directory != f"/dev/shm/penstock-{os.getuid()}":  # noqa: S108
                folder.mkdir(parents=True, exist_ok=True)
                return
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            # Anybody can make a directory of this name there.
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                cause = OSError(errno.EACCES, "it is not a directory of this user's")
                raise StorageError(
                    "using", self.directory, cause, hint="choose another: $PENSTOCK_STREAMS"
                )

    def open_or_make(self, options: WideOptions) -> QueueFile:
        """Map the stream's queue. The caller owns the stream."""
        while True:
            create_from_options(self.path, options, replace=False)
            file = QueueFile.open(self.path, writable=True)
            try:
                self._check(file, options)
                if file.field("state") == State.LIVE:
                    return file
                Path(file.path).unlink()  # somebody was killed who was removing it
            except BaseException:
                file.close()
                raise
            file.close()

    def _check(self, file: QueueFile, options: WideOptions) -> None:
        own = bytes(file.header["stream"][0])
        many = HeaderFlag.MANY_WRITERS in file.flags
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
            mark(file, State.SEALED)  # for those who have it open
            file.close()
        with storage_errors("removing", self.path):
            Path(file_of(self.path)).unlink(missing_ok=True)
        ownership.release(remove=True)

    def state(self) -> StreamState:
        info = describe_wide(self.url, self.path)
        owner = Owner.of(self._owner_file) or Owner("", 0, alive=False)
        written = 0 if info.youngest_seq is None else info.youngest_seq + 1
        return StreamState(self.stream, self.kind, *owner, info.count, written, self.url)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say in the words of streams that there is none."""
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
