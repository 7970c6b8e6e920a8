"""Where do tasks stage their messages until the batch is complete?"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, Batch
from penstock.core.provenance import Staged
from penstock.core.whole_files import sync_names
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Staging", "remove_batch", "remove_files"]


class Staging:
    """The staged files of one task. Streams that get the same messages share a file.

    A task may run twice, even concurrently; each attempt has files of its own.
    """

    def __init__(self, folder: Path, partition: int) -> None:
        self._folder = folder
        self._partition = partition
        self._mark = f"{partition:05d}-{os.getpid()}-{secrets.token_hex(4)}"
        self._files: dict[tuple[str, ...], _File] = {}

    def add(self, urls: Sequence[str], batch: Batch) -> None:
        """Stage a batch once for all of these streams.

        :raises StorageError: there is no space, or no permission.
        """
        streams = tuple(urls)
        with storage_errors("staging in", str(self._folder)):
            if streams not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._files[streams] = _File(
                    self._folder / f"{self._mark}-{len(self._files)}.arrow"
                )
            self._files[streams].write(batch)

    def finish(self, *, sync: bool = False) -> list[Staged]:
        """Close the files, and return them; with `sync`, sync them to disk."""
        done = []
        with storage_errors("staging in", str(self._folder)):
            for streams, file in self._files.items():
                file.close()
                if sync:
                    _sync(file.path)
                done += [
                    Staged(url, str(file.path), self._partition, file.messages) for url in streams
                ]
        return done

    def discard(self) -> None:
        """Remove the files of a task that failed."""
        remove_files([str(file.path) for file in self._files.values()])


class _File:
    """A staged file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages = 0
        self._file = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._file, BATCH_SCHEMA)

    def write(self, batch: Batch) -> None:
        self._writer.write_batch(batch)
        self.messages += batch.num_rows

    def close(self) -> None:
        self._writer.close()
        self._file.close()


def remove_files(paths: Sequence[str]) -> None:
    """Remove staged files, and the folders of batch and query if they are empty."""
    for path in map(Path, paths):
        path.unlink(missing_ok=True)
        _remove_empty(path.parent)
        _remove_empty(path.parent.parent)


def remove_batch(folder: Path, batch: int) -> None:
    """Remove the staged files of a batch and of all earlier ones."""
    if not folder.is_dir():
        return
    for old in folder.iterdir():
        if old.name.isdigit() and int(old.name) <= batch:
            shutil.rmtree(old, ignore_errors=True)
    _remove_empty(folder)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    sync_names(path.parent)


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return  # not empty
