"""Which notes does a stream keep about writers that append batches?

A `Note` is about the last batch of one writer. `StreamNotes` stores those of all writers, usually
in a `NoteFile` beside the stream; `WriterNotes` finds and stores those of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.endpoints import file_name_of, identity
from penstock.core.errors import DamagedQueue, LockTimeout
from penstock.core.provenance import (
    Commit,
    Ends,
    Noted,
    Ranges,
    ranges_from_json,
    ranges_to_json,
)
from penstock.core.url import URL
from penstock.core.whole_files import make_folder, sync_names, write_whole
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.core.interfaces import Bounds

__all__ = [
    "DeliveredBatch",
    "Note",
    "NoteFile",
    "Piece",
    "StreamNotes",
    "WriterNotes",
    "noted",
    "notes_beside",
]

#: Most writers to remember for each stream.
_MOST_WRITERS: Final = 1000
_VERSION: Final = 2
_ENDING: Final = ".commits.json"
#: Seconds to wait for other processes that write notes in the same folder.
_PATIENCE: Final = 20.0


class Piece(NamedTuple):
    """A run of messages in a stream: epoch, first number and count."""

    epoch: int
    start: int
    messages: int

    def now(self, bounds: Bounds) -> Piece:
        """Map the piece to the current epoch, after power failures cut the stream."""
        end = bounds.successor(self.epoch, self.start + self.messages)
        if end is None:
            return self
        start = min(self.start, end)
        return Piece(bounds.epoch, start, end - start)


class DeliveredBatch(NamedTuple):
    """A batch that was appended to the stream."""

    batch: int
    #: The runs of its messages.
    pieces: tuple[Piece, ...]
    ranges: Ranges | None = None
    digest: str | None = None
    run: str | None = None

    def is_whole(self, messages: int) -> bool:
        """Tell whether the last piece has all of its `messages`."""
        return not self.pieces or self.pieces[-1].messages == messages

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "ranges": ranges_to_json(self.ranges)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> DeliveredBatch:
        one = cls(**fields)
        pieces = tuple(Piece(*map(int, piece)) for piece in one.pieces)
        return one._replace(pieces=pieces, ranges=ranges_from_json(fields["ranges"]))


class Note(NamedTuple):
    """The last append of a writer (query) to a stream."""

    batch: int
    #: Messages of the batch to append here; those in `before` do not count.
    count: int  # type: ignore[assignment]
    #: The number of the first of them, and its epoch; None if the stream cannot be read.
    start: int | None
    epoch: int | None
    is_done: bool
    #: Staged files until it is done: path, partition and count of messages.
    files: tuple[tuple[str, int, int], ...] = ()
    #: Source ranges of the batch; if unknown, a digest of its rows.
    ranges: Ranges | None = None
    digest: str | None = None
    #: The id of the query's run, and the path of its Spark checkpoint.
    run: str | None = None
    checkpoint: str | None = None
    #: Earlier names of the query, whose checkpoint lost them.
    names: tuple[str, ...] = ()
    #: Messages of the batch that were in the stream before.
    before: tuple[Piece, ...] = ()
    #: Earlier batches, and the end of each source before those.
    earlier: tuple[DeliveredBatch, ...] = ()
    base: Ends = {}  # noqa: RUF012 - never changed
    #: How many pieces of `before` were there when this attempt began. `files` have only the rest of
    #: the batch.
    begun: int = 0
    #: Another writer appended after the attempt: `before` says what of it is there, not `start`.
    is_pinned: bool = False

    def now(self, bounds: Bounds) -> Note:
        """Map the note to the current epoch, after power failures cut the stream."""
        note = self
        if self.start is not None and self.epoch is not None:
            epoch, start, _ = Piece(self.epoch, self.start, 0).now(bounds)
            note = note._replace(epoch=epoch, start=start)
        return note._replace(
            before=tuple(piece.now(bounds) for piece in self.before),
            earlier=tuple(
                one._replace(pieces=tuple(piece.now(bounds) for piece in one.pieces))
                for one in self.earlier
            ),
        )

    def delivered(self, bounds: Bounds | None) -> DeliveredBatch:
        """Return the part of the batch that is in the stream."""
        pieces = self.before
        if self.start is not None and self.epoch is not None:
            there = self.count
            if not self.is_done and bounds is not None and bounds.epoch == self.epoch:
                there = max(0, min(there, bounds.end - self.start))
            pieces = (*pieces, Piece(self.epoch, self.start, there))
        return DeliveredBatch(self.batch, pieces, self.ranges, self.digest, self.run)

    def to_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "ranges": ranges_to_json(self.ranges),
            "earlier": [one.to_json() for one in self.earlier],
            "base": {key: [str(epoch), end] for key, (epoch, end) in self.base.items()},
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Note:
        """Decode a note, also of the old format without ranges.

        :raises ValueError: it is no note; or a `KeyError` or `TypeError`.
        """
        note = cls(**fields)
        base = {key: (int(epoch), int(end)) for key, (epoch, end) in note.base.items()}
        return note._replace(
            files=tuple((str(p), int(n), int(m)) for p, n, m in note.files),
            names=tuple(map(str, note.names)),
            ranges=ranges_from_json(note.ranges),
            before=tuple(Piece(*map(int, piece)) for piece in note.before),
            earlier=tuple(DeliveredBatch.from_json(one) for one in fields.get("earlier", ())),
            base=base,
            # Earlier releases did not say so.
            is_pinned=note.is_pinned or (note.start is None and bool(note.before)),
        )


class StreamNotes(ABC):
    """Notes kept with a stream: a JSON object for each writer, by name.

    They are stored where the stream is, so that a writer on another machine finds them, too.
    """

    #: Location, for messages.
    where: str

    @abstractmethod
    def read(self) -> dict[str, dict[str, Any]]:
        """Return all notes, the latest last.

        :raises DamagedQueue: the notes are malformed.
        :raises StorageError: the notes cannot be read.
        """

    @abstractmethod
    def write(self, name: str, note: Mapping[str, Any] | None, *, sync: bool) -> None:
        """Store the note of a writer, or (None) remove it.

        :param sync: sync it to disk
        :raises StorageError: there is no space, or no permission.
        """

    def damaged(self, found: object) -> DamagedQueue:
        """Return the error for malformed notes."""
        hint = "move it away, if no query was at work with the stream when it was damaged"
        what = "JSON with queries"
        return DamagedQueue(self.where, "notes", 0, what, str(found)[:80], hint=hint)


class NoteFile(StreamNotes):
    """Notes in a small file beside the stream: `NAME.commits.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.where = str(path)

    @classmethod
    def beside(cls, stream: str) -> NoteFile:
        """Return the notes of the stream at a path; links are resolved."""
        path = Path(stream).resolve()
        return cls(path.with_name(f"{path.name}{_ENDING}"))

    def read(self) -> dict[str, dict[str, Any]]:
        with storage_errors("reading", str(self.path)):
            try:
                text = self.path.read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                return {}
        try:
            return {str(name): dict(note) for name, note in json.loads(text)["queries"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.damaged(text) from error

    def write(self, name: str, note: Mapping[str, Any] | None, *, sync: bool) -> None:
        with storage_errors("writing", str(self.path)):
            make_folder(self.path.parent)
            # Another query's writer, or a server, may write at the same time.
            with _locked(self.path.parent):
                notes = self.read()
                notes.pop(name, None)
                if note is not None:
                    notes[name] = dict(note)
                for old in list(notes)[:-_MOST_WRITERS]:
                    del notes[old]
                text = json.dumps({"version": _VERSION, "queries": notes}).encode()
                write_whole(self.path, text, sync=sync)
                if sync:
                    sync_names(self.path.parent)


def notes_beside(url: str, folder: Path) -> Path:
    """Return the note file of a stream that keeps none itself, the same for all its URLs.

    An existing file of an earlier release is used: it was named by the URL, or by the kind for a
    stream of a Flight server, which had no notes of its own.
    """
    kind = URL.parse(url).options.get("kind", "")
    names = (str(identity(url)), url, f"{url.partition('?')[0]}?kind={kind}")
    files = [folder / f"{file_name_of(name)}{_ENDING}" for name in names]
    return next(filter(Path.exists, files), files[0])


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which leaves no lock file behind.

    :raises LockTimeout: another process keeps it locked.
    """
    names = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(names, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise LockTimeout(
                        f"somebody has locked {folder} for {_PATIENCE:.0f} s",
                        hint="lsof shows who; it is locked while a note of a writer is kept there",
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(names)


# --- those about one writer -----------------------------------------------------------------------


class WriterNotes:
    """The notes of a stream about one writer."""

    def __init__(self, kept: StreamNotes, commit: Commit, suffix: str = "") -> None:
        """Read the notes.

        :param kept: the store of the notes; `commit.notes` is searched, too
        :param suffix: suffix of the writers' names in the store
        :raises DamagedQueue: the notes are not readable.
        """
        self._kept = kept
        self._writer = commit.writer
        self._origin = commit.origin
        self._own = None if commit.notes is None else NoteFile(commit.notes)
        self._suffix = suffix
        #: Earlier name of the writer, if the note was found under it.
        self._old: str | None = None
        self._notes = kept.read()

    def get(self) -> Note | None:
        """Return the note of the writer, or None.

        A writer whose checkpoint lost its name is found by the path of its checkpoint.
        """
        found = self._notes.get(f"{self._writer}{self._suffix}")
        if found is None and self._own is not None:  # written before streams kept notes
            found = self._own.read().get(self._writer)
        if found is None:
            found = self._renamed()
        if found is None:
            return None
        try:
            return Note.from_json(found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._kept.damaged(found) from error

    def _renamed(self) -> dict[str, Any] | None:
        """Return the note of this writer under another of its names, or None."""
        origin = self._origin
        others = {
            name: note
            for name, note in self._notes.items()
            if name.endswith(self._suffix)
            and origin.checkpoint is not None
            and note.get("checkpoint") == origin.checkpoint
            and (origin.is_renamed or self._writer in note.get("names", ()))
        }
        if not others:
            return None
        self._old = max(others, key=lambda name: int(others[name].get("batch", 0)))
        note = others[self._old]
        name = self._old.removesuffix(self._suffix)
        return {**note, "names": [*dict.fromkeys((*note.get("names", ()), name))]}

    def put(self, note: Note) -> None:
        """Store a note; sync it unless it is done.

        If a power failure loses a done note, the batch is compared again, and found complete.

        :raises StorageError: there is no space, or no permission.
        """
        name = f"{self._writer}{self._suffix}"
        self._kept.write(name, note.to_json(), sync=not note.is_done)
        self._notes[name] = note.to_json()
        if self._old is not None:
            self._kept.write(self._old, None, sync=False)
            self._old = None

    def begun_by_others(self) -> dict[str, Note]:
        """Return the unfinished notes of other writers, by name."""
        found = {}
        for name, stored in self._notes.items():
            is_own = name in (f"{self._writer}{self._suffix}", self._old)
            if is_own or not name.endswith(self._suffix) or stored.get("is_done", True):
                continue
            try:
                found[name] = Note.from_json(stored)
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # its own writer raises the error
        return found

    def put_for(self, name: str, note: Note) -> None:
        """Store the note of another writer."""
        self._kept.write(name, note.to_json(), sync=True)
        self._notes[name] = note.to_json()


def noted(notes: WriterNotes, batch: int) -> Noted | None:
    """Return what the notes say about a batch, or None."""
    note = notes.get()
    if note is None:
        return None
    if note.batch == batch:
        return Noted(note.is_done, [path for path, _, _ in note.files], note.run)
    return next((Noted(True, (), one.run) for one in note.earlier if one.batch == batch), None)
