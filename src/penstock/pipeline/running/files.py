"""How is a batch written to files exactly once, whatever dies in between?

Spark writes the batch into a folder that nobody looks at. Then a note beside it says which files
are about to appear and what they are made of, they are moved to where they belong, and the note
says that it is done. A batch that is replayed is skipped if its note says so; if not, whatever it
had moved is removed first. So a plain listing of the directory shows each row once, without any
index of Spark's.

A batch of the same number that has more in it, since the checkpoint has fallen back, takes the
place of what it includes; one that is made of something else is refused.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyarrow import fs

from penstock.core.errors import DamagedQueue, StorageError
from penstock.core.provenance import (
    Ends,
    Origin,
    Ranges,
    Verdict,
    ends_after,
    judge,
    ranges_from_json,
    ranges_to_json,
    room_for,
)
from penstock.core.whole_files import sync_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame

__all__ = ["run_of", "write_once"]

log = logging.getLogger(__name__)

#: Spark and Arrow overlook what begins with an underscore.
_HIDDEN: Final = "_penstock"


class _Written(NamedTuple):
    """What is known of a batch whose files are there."""

    batch: int
    files: tuple[str, ...] = ()
    #: None: of before notes had it.
    ranges: Ranges | None = None
    run: str | None = None

    @property
    def digest(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "ranges": ranges_to_json(self.ranges)}


class _Note(NamedTuple):
    """What a query did last to the files in a directory."""

    batch: int
    done: bool
    #: Of the batch; while it is not done, also those that it takes the place of.
    files: tuple[str, ...] = ()
    ranges: Ranges | None = None
    run: str | None = None
    checkpoint: str | None = None
    #: Batches before this one, and how far each stream was delivered before those.
    earlier: tuple[_Written, ...] = ()
    base: Ends = {}  # noqa: RUF012 - never changed

    def known(self) -> list[_Written]:
        return [*self.earlier, _Written(self.batch, self.files, self.ranges, self.run)]

    def to_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "ranges": ranges_to_json(self.ranges),
            "earlier": [one.to_json() for one in self.earlier],
            "base": {key: [str(epoch), end] for key, (epoch, end) in self.base.items()},
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> _Note:
        note = cls(**stored)
        earlier = (
            _Written(
                int(one["batch"]),
                tuple(one["files"]),
                ranges_from_json(one["ranges"]),
                one["run"],
            )
            for one in stored.get("earlier", ())
        )
        return note._replace(
            batch=int(note.batch),
            files=tuple(note.files),
            ranges=ranges_from_json(stored.get("ranges")),
            earlier=tuple(earlier),
            base={key: (int(epoch), int(end)) for key, (epoch, end) in note.base.items()},
        )


def write_once(
    frame: DataFrame,
    kind: str,
    target: str,
    query: str,
    batch: int,
    partition_by: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
    origin: Origin = Origin(),  # noqa: B008 - never changed
) -> None:
    """Add the rows of a batch of a query to the files in a directory, unless they are there.

    :raises StorageError: there is no space, or no permission.
    :raises AnotherBatch: what was written under this number was made of something else.
    """
    try:
        place = _Place(target, query)
        note = place.note()
        earlier, base, old = _judged(target, note, batch, origin)
        if earlier is None:
            place.clean(batch)
            return
        folder = place.uri(f"{place.hidden}/{batch}")
        writer = frame.write.mode("overwrite").options(**dict(options or {}))
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        writer.format(kind).save(folder)
        moves = place.moves(batch)
        new = _Note(
            batch,
            done=False,
            files=tuple(dict.fromkeys((*moves.values(), *old))),
            ranges=origin.ranges,
            run=origin.run,
            checkpoint=origin.checkpoint,
            earlier=tuple(earlier),
            base=base,
        )
        place.put(new)
        place.remove(old)
        place.move(moves)
        place.sync(moves.values())
        place.put(new._replace(done=True, files=tuple(moves.values())))
        place.clean(batch)
    except OSError as error:
        raise StorageError("writing", target, error) from error


def _judged(
    target: str, note: _Note | None, batch: int, origin: Origin
) -> tuple[list[_Written] | None, Ends, Sequence[str]]:
    """Return the batches before this one, and the files that it takes the place of.

    None: it is there.
    """
    if note is None:
        return [], {}, ()
    known = note.known()
    if note.batch == batch and not note.done and note.ranges in (None, origin.ranges):
        return list(note.earlier), note.base, note.files
    verdict, at = judge(target, known, note.base, batch, origin.ranges)
    if verdict is Verdict.SAME and (note.done or at < len(known) - 1):
        return None, {}, ()
    if verdict in {Verdict.GROWN, Verdict.UNSURE}:
        log.warning("%s: batch %d takes the place of what it had before", target, batch)
    earlier, base = known[:at], note.base
    dropped = room_for([one.to_json() for one in earlier])
    for one in earlier[:dropped]:
        base = ends_after(base, one.ranges)
    return earlier[dropped:], base, [name for one in known[at:] for name in one.files]


def run_of(target: str, query: str, batch: int) -> str | None:
    """Return which run of a query wrote a batch; None: none, as far as known.

    :raises DamagedQueue: the note cannot be read.
    """
    note = _Place(target, query).note()
    # What was only begun is written again, by whoever comes next.
    known = [] if note is None else note.known() if note.done else note.earlier
    return next((one.run for one in known if one.batch == batch), None)


class _Place:
    """A directory of files, and what one query has done there."""

    def __init__(self, target: str, query: str) -> None:
        if "://" in target or target.startswith("file:"):
            self._fs, self._root = fs.FileSystem.from_uri(target)
            self._uri = target.rstrip("/")
        else:
            self._fs, self._root = fs.LocalFileSystem(), str(Path(target).absolute())
            self._uri = f"file://{self._root}"
        self._root = self._root.rstrip("/")
        self._query = query
        self.hidden = f"{_HIDDEN}/{query}"

    def uri(self, relative: str) -> str:
        return f"{self._uri}/{relative}"

    def note(self) -> _Note | None:
        path = self._path(f"{self.hidden}.json")
        if self._fs.get_file_info(path).type == fs.FileType.NotFound:
            return None
        with self._fs.open_input_stream(path) as stream:
            text = stream.read()
        try:
            return _Note.from_json(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedQueue(
                path, "note", 0, "JSON with batch, done and files", text[:80], hint="move it away"
            ) from error

    def put(self, note: _Note) -> None:
        path = self._path(f"{self.hidden}.json")
        self._fs.create_dir(posixpath.dirname(path), recursive=True)
        with self._fs.open_output_stream(f"{path}.new") as stream:
            stream.write(json.dumps(note.to_json()).encode())
        self._sync(f"{path}.new")
        self._fs.move(f"{path}.new", path)
        self._sync_names(path)

    def sync(self, files: Iterable[str]) -> None:
        """Return when files that were moved are on the disk."""
        for name in files:
            self._sync(self._path(name))
        for one in {posixpath.dirname(name): name for name in files}.values():
            self._sync_names(self._path(one))

    def _sync(self, path: str) -> None:
        if isinstance(self._fs, fs.LocalFileSystem):  # others see to it themselves
            with Path(path).open("rb") as file:
                os.fsync(file.fileno())

    def _sync_names(self, path: str) -> None:
        if isinstance(self._fs, fs.LocalFileSystem):
            folder = Path(path).parent
            while str(folder).startswith(self._root):
                sync_names(folder)
                folder = folder.parent

    def moves(self, batch: int) -> dict[str, str]:
        """Return where each file that Spark wrote belongs."""
        folder = self._path(f"{self.hidden}/{batch}")
        moves = {}
        found = self._fs.get_file_info(fs.FileSelector(folder, recursive=True))
        for index, file in enumerate(sorted(f.path for f in found if f.type == fs.FileType.File)):
            partition, name = posixpath.split(file[len(folder) + 1 :])
            if name.startswith(("_", ".")):
                continue
            ending = name[name.index(".") :] if "." in name else ""
            # The query's own name is in it, so that several may write to one directory.
            name = f"batch-{batch:08d}-{index:05d}-{self._query[:8]}{ending}"
            moves[file[len(self._root) + 1 :]] = posixpath.join(partition, name)
        return moves

    def move(self, moves: Mapping[str, str]) -> None:
        for folder in {posixpath.dirname(to) for to in moves.values()} - {""}:
            self._fs.create_dir(self._path(folder), recursive=True)
        for source, to in moves.items():
            self._fs.move(self._path(source), self._path(to))

    def remove(self, files: Sequence[str]) -> None:
        for name in files:
            path = self._path(name)
            if self._fs.get_file_info(path).type == fs.FileType.File:
                self._fs.delete_file(path)

    def clean(self, batch: int) -> None:
        folder = self._path(f"{self.hidden}/{batch}")
        if self._fs.get_file_info(folder).type == fs.FileType.Directory:
            self._fs.delete_dir(folder)

    def _path(self, relative: str) -> str:
        return f"{self._root}/{relative}"
