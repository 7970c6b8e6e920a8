"""How is a batch written to files exactly once, whatever dies in between?

Spark writes the batch into a hidden folder. Then a note beside it names the files about to appear
and the ranges that they are made of, the files are moved to their place, and the note is marked as
done. A replayed batch is skipped if its note is done; if not, the files that it had moved are
removed first. So a plain listing of the directory shows each row once, without an index of Spark's.

A batch of the same number with more messages, after an older checkpoint was restored, replaces
those that it includes; one made of other messages is refused.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa
from pyarrow import fs

from penstock.core.decoding.options import StructOptions, parse_decoding
from penstock.core.decoding.structs import encode_structs
from penstock.core.endpoints import open_writer
from penstock.core.errors import DamagedQueue, StorageError, Unsupported
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
from penstock.core.url import escaped
from penstock.core.whole_files import sync_names
from penstock.pipeline.spark_process import freeze_modules

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

__all__ = ["Files", "run_of", "write_once"]

log = logging.getLogger(__name__)

#: Spark and Arrow ignore names that start with an underscore.
_HIDDEN: Final = "_penstock"


class _Written(NamedTuple):
    """A batch whose files are written."""

    batch: int
    files: tuple[str, ...] = ()
    #: None: written before notes had ranges.
    ranges: Ranges | None = None
    run: str | None = None

    @property
    def digest(self) -> None:
        return None

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "ranges": ranges_to_json(self.ranges)}


class _Note(NamedTuple):
    """The latest batch of a query in a directory."""

    batch: int
    done: bool
    #: Files of the batch; while it is not done, also those that it replaces.
    files: tuple[str, ...] = ()
    ranges: Ranges | None = None
    run: str | None = None
    checkpoint: str | None = None
    #: Previous batches, and where each stream stood before them.
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


class Files(NamedTuple):
    """Options of a file sink."""

    kind: str
    target: str
    partition_by: Sequence[str] = ()
    #: Options of Spark's writer.
    options: Mapping[str, str] = {}
    #: The layout of a record, for `struct`.
    layout: Any = None
    #: Whether to announce complete files in latest_data_info.
    announce: bool = False


def write_once(
    frame: DataFrame,
    files: Files,
    query: str,
    batch: int,
    origin: Origin = Origin(),  # noqa: B008 - never changed
) -> None:
    """Write the rows of a batch of a query as files of a directory, unless done before.

    :raises StorageError: there is no space, or no permission.
    :raises AnotherBatch: the batch written under this number had other contents.
    """
    target = files.target
    try:
        place = _Place(target, query)
        note = place.note()
        earlier, base, old = _judged(target, note, batch, origin)
        if earlier is None:
            place.clean(batch)
            return
        folder = place.uri(f"{place.hidden}/{batch}")
        _save(frame, files, folder)
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
        if files.announce:
            # Before the note is done: after a crash files are announced twice rather than never.
            place.announce(moves.values(), files.kind)
        place.put(new._replace(done=True, files=tuple(moves.values())))
        place.clean(batch)
    except OSError as error:
        raise StorageError("writing", target, error) from error


def _save(frame: DataFrame, files: Files, folder: str) -> None:
    """Write the rows into a hidden folder."""
    if files.kind == "struct":
        _save_structs(frame, files, folder)
        return
    writer = frame.write.mode("overwrite").options(**dict(files.options))
    if files.partition_by:
        writer = writer.partitionBy(*files.partition_by)
    writer.format(files.kind).save(folder)


def _save_structs(frame: DataFrame, files: Files, folder: str) -> None:
    """Write records, one file per task, and remove the files of failed attempts."""
    storage, path = fs.FileSystem.from_uri(folder)
    if storage.get_file_info(path).type == fs.FileType.Directory:
        storage.delete_dir_contents(path)
    storage.create_dir(path, recursive=True)
    layout = parse_decoding({"format": "struct", "layout": files.layout})
    assert isinstance(layout, StructOptions)
    found = frame.mapInArrow(_Records(folder, layout), "name string").collect()
    kept = {row.name for row in found}
    for file in storage.get_file_info(fs.FileSelector(path)):
        if file.base_name not in kept:
            storage.delete_file(file.path)


class _Records:
    """Writes the rows of one task to a file, and yields its name."""

    def __init__(self, folder: str, options: StructOptions) -> None:
        self._folder = folder
        self._options = options

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        freeze_modules()
        layout = self._options.described()
        storage, path = fs.FileSystem.from_uri(self._folder)
        name = f"part-{uuid.uuid4().hex}.bin"
        count = 0
        with storage.open_output_stream(f"{path}/{name}") as stream:
            for batch in batches:
                stream.write(encode_structs(layout, batch))
                count += batch.num_rows
        if count:
            yield pa.record_batch({"name": [name]})


def _judged(
    target: str, note: _Note | None, batch: int, origin: Origin
) -> tuple[list[_Written] | None, Ends, Sequence[str]]:
    """Return the batches before this one, their base, and the files that it replaces.

    None instead of the batches: this one is already written.
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
    """Return the run of a query that wrote a batch; None: it is not known.

    :raises DamagedQueue: the note cannot be parsed.
    """
    note = _Place(target, query).note()
    # An unfinished batch will be written again by the next run.
    known = [] if note is None else note.known() if note.done else note.earlier
    return next((one.run for one in known if one.batch == batch), None)


class _Place:
    """A directory of files, with the note of one query."""

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
        """Sync moved files and their directories to disk."""
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
        """Return the final path of each file that Spark wrote."""
        folder = self._path(f"{self.hidden}/{batch}")
        moves = {}
        found = self._fs.get_file_info(fs.FileSelector(folder, recursive=True))
        for index, file in enumerate(sorted(f.path for f in found if f.type == fs.FileType.File)):
            partition, name = posixpath.split(file[len(folder) + 1 :])
            if name.startswith(("_", ".")):
                continue
            ending = name[name.index(".") :] if "." in name else ""
            # With the query's id, so that several queries may write to one directory.
            name = f"batch-{batch:08d}-{index:05d}-{self._query[:8]}{ending}"
            moves[file[len(self._root) + 1 :]] = posixpath.join(partition, name)
        return moves

    def move(self, moves: Mapping[str, str]) -> None:
        for folder in {posixpath.dirname(to) for to in moves.values()} - {""}:
            self._fs.create_dir(self._path(folder), recursive=True)
        for source, to in moves.items():
            self._fs.move(self._path(source), self._path(to))

    def announce(self, files: Iterable[str], kind: str) -> None:
        """Announce files in the directory's latest_data_info."""
        if not isinstance(self._fs, fs.LocalFileSystem):
            raise Unsupported(
                f"{self._uri} is not on this machine, and has no latest_data_info",
                hint="leave announce out",
            )
        with open_writer(f"latest:{escaped(self._root)}") as writer:
            for name in sorted(files):
                ending = Path(name).suffix.removeprefix(".") or kind
                entry = {"rel_data_path": name, "file_ext": ending, "data_type": kind}
                writer.write(json.dumps({**entry, "writer": "penstock"}).encode())

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
