"""How is a batch written to files exactly once, whatever dies in between?

Spark writes the batch into a folder that nobody looks at. Then a note beside it says which files
are about to appear, they are moved to where they belong, and the note says that it is done. A batch
that is replayed is skipped if its note says so; if not, whatever it had moved is removed first. So
a plain listing of the directory shows each row once, without any index of Spark's.
"""

from __future__ import annotations

import json
import posixpath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyarrow import fs

from penstock.core.errors import DamagedQueue, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame

__all__ = ["write_once"]

#: Spark and Arrow overlook what begins with an underscore.
_HIDDEN: Final = "_penstock"


def write_once(
    frame: DataFrame,
    kind: str,
    target: str,
    query: str,
    batch: int,
    partition_by: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> None:
    """Add the rows of a batch of a query to the files in a directory, unless they are there.

    :raises StorageError: there is no space, or no permission.
    """
    try:
        place = _Place(target, query)
        note = place.note()
        if (note["batch"], note["done"]) >= (batch, True):
            place.clean(batch)
            return
        if note["batch"] == batch:
            place.remove(note["files"])
        folder = place.uri(f"{place.hidden}/{batch}")
        writer = frame.write.mode("overwrite").options(**dict(options or {}))
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        writer.format(kind).save(folder)
        moves = place.moves(batch)
        place.put(batch, list(moves.values()), is_done=False)
        place.move(moves)
        place.put(batch, list(moves.values()), is_done=True)
        place.clean(batch)
    except OSError as error:
        raise StorageError("writing", target, error) from error


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

    def note(self) -> dict[str, Any]:
        path = self._path(f"{self.hidden}.json")
        if self._fs.get_file_info(path).type == fs.FileType.NotFound:
            return {"batch": -1, "done": True, "files": []}
        with self._fs.open_input_stream(path) as stream:
            text = stream.read()
        try:
            note = dict(json.loads(text))
            return {key: note[key] for key in ("batch", "done", "files")}
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedQueue(
                path, "note", 0, "JSON with batch, done and files", text[:80], hint="move it away"
            ) from error

    def put(self, batch: int, files: list[str], *, is_done: bool) -> None:
        note = {"batch": batch, "done": is_done, "files": files}
        path = self._path(f"{self.hidden}.json")
        self._fs.create_dir(posixpath.dirname(path), recursive=True)
        with self._fs.open_output_stream(f"{path}.new") as stream:
            stream.write(json.dumps(note).encode())
        self._fs.move(f"{path}.new", path)

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
