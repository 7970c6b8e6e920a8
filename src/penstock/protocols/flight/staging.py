"""How does a server keep what tasks have staged, and append it once?

A task sends its messages in one call, once it has them all; the server keeps them in a file below
its root, where no stream can be. The commit is one small request: the server appends the files of
the attempts that it names, in the order of their partitions, and notes the batch as every stream
that appends once does (`penstock.queue.append_once`). No message passes through the committer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, check_batch
from penstock.core.capabilities import AppendOnce, StagingFull
from penstock.core.endpoints import endpoint_of
from penstock.core.errors import Malformed, MessageTooLarge, NotFound, PenstockError
from penstock.core.provenance import Commit, Origin, Staged, ranges_from_json
from penstock.core.url import URL
from penstock.core.whole_files import write_whole
from penstock.core.worker import Worker
from penstock.protocols.flight.access import STAGING
from penstock.protocols.flight.errors import describe_error, error_from
from penstock.protocols.flight.wire import (
    CommitStaged,
    Committed,
    Outcome,
    Piece,
    Stage,
    StagedFile,
    Unstage,
    check_buffers,
)
from penstock.queue.append_once import append_noted, notes_of
from penstock.queue.notes import StreamNotes, WriterNotes
from penstock.queue.storage import no_thread, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from penstock.core.batch import Batch
    from penstock.protocols.flight.access import Place, Root
    from penstock.protocols.flight.server import ServerOptions
    from penstock.protocols.flight.shared_writers import Writers
    from penstock.protocols.flight.wire import Failure

__all__ = ["Commits", "StagingArea"]

log = logging.getLogger(__name__)

#: Commits whose outcome is remembered, for clients that did not receive it.
_OUTCOMES_KEPT: Final = 1000
#: Seconds between two looks for files that were never committed.
_BETWEEN_LOOKS: Final = 30.0
#: Files of at least this many bytes are synced when they are complete; otherwise the sync of the
#: commit's note would have to wait for them.
_LARGE: Final = 8 << 20
#: Bytes of a file without messages, and of each batch in its index (measured; rounded up).
_EMPTY_FILE: Final = 1100
_BLOCK: Final = 24
#: Marker in the folder of a batch: an append was started, and its notes may name the files.
_BEGUN: Final = "begun"
#: Folder of what is to be removed.
_REMOVED: Final = "removed"
#: A file as notes name it: BATCH/NAME.
_NAME: Final = re.compile(r"[0-9]+/[0-9A-Za-z-]+\.arrow")


class StagingArea:
    """The staged files of a server, up to `max_staged` bytes. Safe to share between threads.

    What is removed is first moved aside, which is quick; `clean` does the rest in another thread.
    So a batch that is staged again is never mistaken for the one before.
    """

    def __init__(self, root: Root, options: ServerOptions) -> None:
        # Beside the files that Spark on this machine stages for streams of the same folder.
        self._folder = root.folder / STAGING / "flight"
        self._removed = self._folder / _REMOVED
        self._root = root
        self._options = options
        #: Held while files and folders are created, moved and counted.
        self._lock = threading.Lock()
        #: Bytes of the complete files, of those being received, and of all together.
        self._kept: dict[Path, int] = {}
        self._coming: dict[Path, int] = {}
        self._total = 0
        #: Commits under way, by the folder of their batch.
        self._in_use: Counter[Path] = Counter()
        self._looked_at = 0.0
        self._count(self._look())

    def folder_of(self, place: Place, asked: Stage | CommitStaged | Unstage) -> Path:
        """Return the folder of a writer's batches for a stream; it need not exist."""
        named = f"{place.name}\0{asked.writer}{asked.suffix}"
        return self._folder / hashlib.sha256(named.encode()).hexdigest()[:32]

    @contextmanager
    def staging(self, place: Place, asked: Stage) -> Iterator[Callable[[Batch, Piece], Outcome]]:
        """Yield the function that stages the batches of one call; remove an incomplete file."""
        folder = self.folder_of(place, asked) / str(asked.batch)
        arrival = _Arrival(self, folder, _file_name(asked), self._options.max_message)
        try:
            yield arrival.add
        finally:
            arrival.end()

    def make_room(self, part: Path, size: int) -> None:
        """Reserve `size` more bytes for a file that is being received.

        :raises StagingFull: the limit would be exceeded.
        """
        limit = self._options.max_staged
        with self._lock:
            if self._total + size > limit:
                hint = "make batches smaller (maxOffsetsPerTrigger), or serve with --max-staged"
                raise StagingFull(limit, hint=hint)
            self._coming[part] = self._coming.get(part, 0) + size
            self._total += size

    def open(self, part: Path) -> pa.OSFile:
        """Create a file to receive into, and its folder."""
        with self._lock:  # an empty folder may be removed at any other time
            part.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            return pa.OSFile(str(part), "wb")

    def keep(self, part: Path, path: Path) -> None:
        """Give a received file its final name, and count its bytes instead of the reserved."""
        with self._lock:
            size = part.stat().st_size
            part.rename(path)
            self._forget(part)
            self._forget(path)
            self._kept[path] = size
            self._total += size

    def drop(self, part: Path) -> None:
        """End the reservation of a file, and remove what was received of it."""
        with self._lock:
            self._forget(part)
            if part.exists():
                self._discard([part])

    def _forget(self, path: Path) -> None:
        self._total -= self._kept.pop(path, 0) + self._coming.pop(path, 0)

    def files(self, place: Place, asked: CommitStaged | Unstage) -> list[Staged]:
        """Return the staged files as paths of this machine; they need not exist."""
        folder = self.folder_of(place, asked) / str(asked.batch)
        return [
            Staged(place.url, str(folder / _file_name(file)), file.partition, file.messages)
            for file in asked.files
        ]

    @contextmanager
    def committing(self, place: Place, asked: CommitStaged) -> Iterator[None]:
        """Mark a batch as begun, and keep all of its files as long as the context lasts."""
        folder = self.folder_of(place, asked) / str(asked.batch)
        mark = json.dumps({"stream": place.name, "kind": place.kind}).encode()
        with storage_errors("staging in", str(folder)), self._lock:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(folder / _BEGUN, mark, sync=False)
            self._in_use[folder] += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use[folder] -= 1
                self._in_use += Counter()  # without those that are 0

    def remove(self, place: Place, asked: Unstage) -> None:
        """Remove files of a batch, or all of it and of those before; see `Stages.unstage`."""
        folder = self.folder_of(place, asked)
        if asked.is_done:
            self.give_up(folder, asked.batch)
            return
        paths = [Path(file.path) for file in self.files(place, asked)]
        with self._lock:
            if folder / str(asked.batch) not in self._in_use:
                needed = _needed(place, folder)
                self._discard([path for path in paths if path not in needed])

    def give_up(self, folder: Path, batch: int) -> None:
        """Remove a batch of a writer, and those before it, except where a commit is under way."""
        with self._lock:
            for old in list(folder.iterdir()) if folder.is_dir() else ():
                if old.name.isdigit() and int(old.name) <= batch and old not in self._in_use:
                    for path in old.iterdir():
                        if path not in self._coming:  # those count until their call ends
                            self._forget(path)
                    self._discard([old])

    def _discard(self, paths: Sequence[Path]) -> None:
        """Move files or folders aside for `clean`, and remove the folders that are then empty."""
        for path in paths:
            self._removed.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileNotFoundError):
                path.rename(self._removed / secrets.token_hex(16))
            self._forget(path)
            for folder in (path.parent, path.parent.parent):
                if folder != self._folder:
                    _remove_empty(folder)

    def clean(self) -> None:
        """Remove what was moved aside."""
        with self._lock:  # another thread may remove the empty folder
            aside = list(self._removed.iterdir()) if self._removed.is_dir() else []
        for path in aside:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with self._lock:
            _remove_empty(self._removed)

    def expire(self) -> None:
        """Remove what was moved aside, and files that nobody needed for `keep_staged`."""
        self.clean()
        now = time.monotonic()
        if now - self._looked_at < min(_BETWEEN_LOOKS, self._options.keep_staged):
            return
        self._looked_at = now
        found = self._look()
        self._count(found)
        before = time.time() - self._options.keep_staged
        for folder in {path.parent for path, info in found.items() if info.st_mtime < before}:
            with self._lock, suppress(FileNotFoundError):
                self._expire_batch(folder, before)

    def _look(self) -> dict[Path, os.stat_result]:
        """Return the files of all batches; one may be removed at any time."""
        found = {}
        for name, folders, files in os.walk(self._folder):
            folders[:] = [folder for folder in folders if folder != _REMOVED]
            for path in (Path(name) / file for file in files):
                with suppress(FileNotFoundError):
                    found[path] = path.stat()
        return found

    def _count(self, found: Mapping[Path, os.stat_result]) -> None:
        """Correct the count by what is on the disk: an append may have staged files, too."""
        with self._lock:
            for path in [path for path in self._kept if path not in found and not path.exists()]:
                self._forget(path)
            for path, info in found.items():
                is_known = path in self._kept or path in self._coming
                if not is_known and path.name != _BEGUN and path.exists():
                    self._kept[path] = info.st_size
                    self._total += info.st_size

    def _expire_batch(self, folder: Path, before: float) -> None:
        """Remove the old files of a batch, except those that an unfinished append needs."""
        mark = folder / _BEGUN
        needed: Container[Path] = ()
        if folder in self._in_use:
            return
        if mark.exists():
            if mark.stat().st_mtime >= before:
                return
            try:
                stream = json.loads(mark.read_bytes())
                place = self._root.place(stream["stream"], stream["kind"], may_make=True)
                needed = _needed(place, folder.parent)
            except (PenstockError, ValueError, TypeError, LookupError) as error:
                log.warning("what was staged in %s is kept, as its notes are not readable: %s",
                            folder.name, error)  # fmt: skip
                mark.touch()  # look, and say so, again after `keep_staged`
                return
        files = {path for path in folder.iterdir() if path != mark}
        old = {
            path
            for path in files - self._coming.keys()
            if path not in needed and path.stat().st_mtime < before
        }
        if old:
            names = ", ".join(sorted(path.name for path in old)[:3])
            log.warning("nobody needed %d staged files: removed (%s)", len(old), names)
        self._discard([*old, *([mark] if old == files and mark.exists() else [])])


class _Arrival:
    """The file of one call; it gets its final name when it is complete."""

    def __init__(self, area: StagingArea, folder: Path, name: str, largest: int) -> None:
        self._area = area
        self._largest = largest
        self._path = folder / name
        self._part = folder / f"{name}.{secrets.token_hex(8)}"
        self._file: Any = None
        self._writer: Any = None

    def add(self, batch: Batch, piece: Piece) -> Outcome:
        """Write a batch to the file, and return the outcome; the last piece completes the file."""
        try:
            if batch.nbytes > self._largest:
                hint = "send less at a time, or start the server with a larger --max-message"
                raise MessageTooLarge(batch.nbytes, self._largest, hint=hint)
            check_buffers(batch)
            check_batch(batch)
            with storage_errors("staging in", str(self._part.parent)):
                self._write(batch)
                if piece.flush:
                    self._finish()
        except PenstockError as error:
            return Outcome(number=piece.number, written=0, failure=describe_error(error))
        return Outcome(number=piece.number, written=batch.num_rows)

    def _write(self, batch: Batch) -> None:
        if self._writer is None:
            self._area.make_room(self._part, _EMPTY_FILE)
            self._file = self._area.open(self._part)
            self._writer = pa.ipc.new_file(self._file, BATCH_SCHEMA)
        if batch.num_rows:
            self._area.make_room(self._part, pa.ipc.get_record_batch_size(batch) + _BLOCK)
            self._writer.write_batch(batch)

    def _finish(self) -> None:
        self._close()
        if self._part.stat().st_size >= _LARGE:
            with self._part.open("rb") as file:
                os.fsync(file.fileno())
        self._area.keep(self._part, self._path)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._file.close()

    def end(self) -> None:
        with suppress(OSError, pa.ArrowException):
            self._close()
        self._area.drop(self._part)


class StagedNotes(StreamNotes):
    """The notes of a stream, with files named relative to the writer's folder.

    So clients do not see paths of the server, and a note from a client names no other files.
    """

    def __init__(self, kept: StreamNotes, folder: Path) -> None:
        self._kept = kept
        self._folder = folder
        self.where = kept.where

    def read(self) -> dict[str, dict[str, Any]]:
        return {
            name: {**note, "files": self._paths(note)} for name, note in self._kept.read().items()
        }

    def _paths(self, note: Mapping[str, Any]) -> list[list[Any]]:
        """Return the files with a valid name; others count as missing."""
        with suppress(TypeError, ValueError):
            return [
                [str(self._folder / path), partition, messages]
                for path, partition, messages in note.get("files", ())
                if _NAME.fullmatch(path)
            ]
        return []

    def write(self, name: str, note: Mapping[str, Any] | None, *, sync: bool) -> None:
        if note is not None:
            files = [[os.path.relpath(path, self._folder), *rest] for path, *rest in note["files"]]
            note = {**note, "files": files}
        self._kept.write(name, note, sync=sync)


class _Job:
    """A commit, run in its own thread; its client may ask for the outcome repeatedly."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.outcome = Committed(is_done=True)
        #: Not the error itself, whose traceback would keep the request and its files in memory.
        self.failure: Failure | None = None


class Commits:
    """Appends staged batches. Safe to share between threads."""

    def __init__(self, area: StagingArea, writers: Writers) -> None:
        self._area = area
        self._writers = writers
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}

    def commit(
        self, place: Place, asked: CommitStaged, on_appended: Callable[[int, int], None]
    ) -> Committed:
        """Start a commit, or find the one under way; wait up to `asked.wait` seconds for it.

        :raises Malformed: a file is named twice.
        :raises PenstockError: the commit failed.
        """
        named = Counter((file.partition, file.id) for file in asked.files)
        if len(named) < len(asked.files):
            twice = named.most_common(1)[0][0][1]
            raise Malformed("flight CommitStaged", "files", "each file once", f"{twice} again")
        with self._lock:
            job = self._jobs.get(asked.id)
            if job is None:
                job = _Job()
                self._start(job, place, asked, on_appended)
                self._jobs[asked.id] = job
                self._evict()
        if not job.is_over.wait(asked.wait):
            return Committed(is_done=False)
        if job.failure is not None:
            raise error_from(job.failure)
        return job.outcome

    def _start(
        self,
        job: _Job,
        place: Place,
        asked: CommitStaged,
        on_appended: Callable[[int, int], None],
    ) -> None:
        def run(_: object) -> None:
            try:
                job.outcome = self._append(place, asked, on_appended)
            except PenstockError as error:
                job.failure = describe_error(error)
            except Exception:
                log.exception("%s: a commit failed", place.name)
                said = PenstockError("the server failed while it committed; its log says why")
                job.failure = describe_error(said)
            finally:
                job.is_over.set()

        try:
            Worker(f"flight commit {place.name}", run, log=log).start()
        except RuntimeError:
            raise no_thread(place.name) from None

    def _evict(self) -> None:
        """Forget the oldest outcomes beyond `_OUTCOMES_KEPT`, but no commit under way."""
        over = [id_ for id_, job in self._jobs.items() if job.is_over.is_set()]
        for id_ in over[: max(0, len(self._jobs) - _OUTCOMES_KEPT)]:
            del self._jobs[id_]

    def _append(
        self, place: Place, asked: CommitStaged, on_appended: Callable[[int, int], None]
    ) -> Committed:
        folder = self._area.folder_of(place, asked)
        files = self._area.files(place, asked)
        commit = Commit(asked.writer, asked.batch, files, _origin_of(asked))
        endpoint, url = endpoint_of(place.url), URL.parse(place.url)
        assert isinstance(endpoint, AppendOnce)  # as all that a server has
        with self._area.committing(place, asked):
            missing = [file for file in files if not Path(file.path).exists()]
            if missing:
                raise NotFound(
                    f"{place.name}: what {len(missing)} of {len(files)} tasks have staged for "
                    f"batch {asked.batch} is not here any more",
                    hint="start the query again: its tasks stage it anew",
                )
            with self._writers.lend(place, asked.options) as writer:
                notes = WriterNotes(StagedNotes(notes_of(place.url), folder), commit, asked.suffix)
                try:
                    new = append_noted(writer, notes, commit, lambda: endpoint.reread(url))
                finally:
                    on_appended(*writer.appended())
                seconds = writer.seconds
        # The files of this batch stay until the client has received the outcome (`Unstage`).
        self._area.give_up(folder, asked.batch - 1)
        log.info("%s: batch %d, %d messages in %.3f s", place.name, asked.batch, new, seconds)
        return Committed(is_done=True, new=new, seconds=seconds)

    def close(self, grace: float = 3.0) -> None:
        """Wait up to `grace` seconds for commits under way, which notice the stop."""
        with self._lock:
            jobs = list(self._jobs.values())
        until = time.monotonic() + grace
        for job in jobs:
            job.is_over.wait(max(0.0, until - time.monotonic()))


def _origin_of(asked: CommitStaged) -> Origin:
    try:
        ranges = None if asked.ranges is None else ranges_from_json(json.loads(asked.ranges))
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        said = (asked.ranges or "")[:60]
        raise Malformed("flight CommitStaged", "ranges", "ranges by source", said) from None
    return Origin(ranges, asked.checkpoint, asked.run, asked.is_renamed)


def _file_name(file: Stage | StagedFile) -> str:
    return f"{file.partition:05d}-{file.id}.arrow"


def _needed(place: Place, folder: Path) -> set[Path]:
    """Return the files in a writer's folder that unfinished notes of a stream name."""
    notes = StagedNotes(notes_of(place.url), folder).read().values()
    unfinished = (note for note in notes if not note.get("is_done", True))
    return {Path(path) for note in unfinished for path, _, _ in note["files"]}


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty
        folder.rmdir()
