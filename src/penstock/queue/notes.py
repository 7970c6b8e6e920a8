"""What does a stream remember of those that append to it batch by batch?"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.core.errors import DamagedQueue, LockTimeout
from penstock.core.provenance import Ends, Ranges, ranges_from_json, ranges_to_json
from penstock.core.whole_files import sync_names, write_whole
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.core.interfaces import Bounds

__all__ = ["Delivered", "Note", "NoteFile", "Piece", "StreamNotes"]

#: Writers that are remembered for each stream.
_MOST_WRITERS: Final = 1000
_VERSION: Final = 2
#: Seconds to wait for others who write notes in the same folder.
_PATIENCE: Final = 20.0


class Piece(NamedTuple):
    """Messages in the stream: which life of it, the number of the first, and how many."""

    epoch: int
    start: int
    messages: int

    def now(self, bounds: Bounds) -> Piece:
        """Return what is left of it, by the numbers of a stream that a power failure cut."""
        end = bounds.successor(self.epoch, self.start + self.messages)
        if end is None:
            return self
        start = min(self.start, end)
        return Piece(bounds.epoch, start, end - start)


class Delivered(NamedTuple):
    """What is known of a batch that is in the stream."""

    batch: int
    #: Where its messages are.
    pieces: tuple[Piece, ...]
    ranges: Ranges | None = None
    digest: str | None = None
    run: str | None = None

    def is_whole(self, messages: int) -> bool:
        """Tell whether the last part of it, of so many messages, is all there."""
        return not self.pieces or self.pieces[-1].messages == messages

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "ranges": ranges_to_json(self.ranges)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Delivered:
        one = cls(**fields)
        pieces = tuple(Piece(*map(int, piece)) for piece in one.pieces)
        return one._replace(pieces=pieces, ranges=ranges_from_json(fields["ranges"]))


class Note(NamedTuple):
    """What a query did last to a stream."""

    batch: int
    #: How many messages of the batch are appended here; some may have been there before.
    count: int  # type: ignore[assignment]
    #: The number of the first of them, and the life of the stream that it counts in; None where
    #: the stream cannot be read.
    start: int | None
    epoch: int | None
    is_done: bool
    #: Where the messages are until then: path, partition and number of each file.
    files: tuple[tuple[str, int, int], ...] = ()
    #: What the batch is made of; if that is not known, a digest of its rows.
    ranges: Ranges | None = None
    digest: str | None = None
    #: The name of the query from its start to its end, and where Spark keeps how far it is.
    run: str | None = None
    checkpoint: str | None = None
    #: What Spark called the query before, when its checkpoint had lost the name.
    names: tuple[str, ...] = ()
    #: Messages of the batch that were there before: of others, which it includes.
    before: tuple[Piece, ...] = ()
    #: Batches before this one, and how far each stream was delivered before those.
    earlier: tuple[Delivered, ...] = ()
    base: Ends = {}  # noqa: RUF012 - never changed

    def now(self, bounds: Bounds) -> Note:
        """Return the note by the numbers of a stream that a power failure cut since."""
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

    def delivered(self, bounds: Bounds | None) -> Delivered:
        """Return what is in the stream of the batch."""
        pieces = self.before
        if self.start is not None and self.epoch is not None:
            there = self.count
            if not self.is_done and bounds is not None and bounds.epoch == self.epoch:
                there = max(0, min(there, bounds.end - self.start))
            pieces = (*pieces, Piece(self.epoch, self.start, there))
        return Delivered(self.batch, pieces, self.ranges, self.digest, self.run)

    def to_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "ranges": ranges_to_json(self.ranges),
            "earlier": [one.to_json() for one in self.earlier],
            "base": {key: [str(epoch), end] for key, (epoch, end) in self.base.items()},
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Note:
        """Read a note, also one of before there were ranges in it.

        :raises ValueError: it is none; or a `KeyError` or `TypeError`.
        """
        note = cls(**fields)
        base = {key: (int(epoch), int(end)) for key, (epoch, end) in note.base.items()}
        return note._replace(
            files=tuple((str(p), int(n), int(m)) for p, n, m in note.files),
            names=tuple(map(str, note.names)),
            ranges=ranges_from_json(note.ranges),
            before=tuple(Piece(*map(int, piece)) for piece in note.before),
            earlier=tuple(Delivered.from_json(one) for one in fields.get("earlier", ())),
            base=base,
        )


class StreamNotes(ABC):
    """Small notes that a stream keeps, one for each writer by its name; any JSON object.

    They are where the stream is, so that a writer on another machine finds them, too.
    """

    #: Where they are, for people.
    where: str

    @abstractmethod
    def read(self) -> dict[str, dict[str, Any]]:
        """Return all notes, that of the writer who was there last at the end.

        :raises DamagedQueue: they are not what `write` wrote.
        :raises StorageError: they cannot be read.
        """

    @abstractmethod
    def write(self, name: str, note: Mapping[str, Any] | None, *, sync: bool) -> None:
        """Keep the note of a writer, or (None) forget it.

        :param sync: return when it is on the disk
        :raises StorageError: there is no space, or no permission.
        """

    def damaged(self, found: object) -> DamagedQueue:
        """Return the error that says what is wrong with them."""
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
        """Return the notes of the stream at a path, however that is written."""
        path = Path(stream).resolve()
        return cls(path.with_name(f"{path.name}.commits.json"))

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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # The writer of another query, or a server for one, may be at it at the same time.
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


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others out meanwhile; the lock of a folder leaves no file behind.

    :raises LockTimeout: somebody does not let go of it.
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
