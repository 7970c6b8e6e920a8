"""Where do tasks stage their messages until the batch is complete?"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA, Batch
from penstock.core.capabilities import Staged
from penstock.core.whole_files import sync_names
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Staging", "remove_batch", "remove_files"]


class Staging:
    """The staged files of one task, one for each stream.

    A task may run twice, even concurrently; each attempt has files of its own.
    """

    def __init__(self, folder: Path, partition: int) -> None:
        self._folder = folder
        self._partition = partition
        self._mark = f"{partition:05d}-{os.getpid()}-{secrets.token_hex(4)}"
        self._files: dict[str, tuple[Path, pa.OSFile, pa.ipc.RecordBatchFileWriter]] = {}
        self._counts: dict[str, int] = {}

    def add(self, url: str, batch: Batch) -> None:
        """Stage a batch for a stream.

        :raises StorageError: there is no space, or no permission.
        """
        with storage_errors("staging in", str(self._folder)):
            if url not in self._files:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                path = self._folder / f"{self._mark}-{len(self._files)}.arrow"
                file = pa.OSFile(str(path), "wb")
                self._files[url] = path, file, pa.ipc.new_file(file, BATCH_SCHEMA)
            self._files[url][2].write_batch(batch)
        self._counts[url] = self._counts.get(url, 0) + batch.num_rows

    def finish(self, *, sync: bool = False) -> list[Staged]:
        """Close the files, and return them; with `sync`, sync them to disk."""
        done = []
        with storage_errors("staging in", str(self._folder)):
            for url, (path, file, writer) in self._files.items():
                writer.close()
                file.close()
                if sync:
                    _sync(path)
                done.append(Staged(url, str(path), self._partition, self._counts[url]))
        return done

    def discard(self) -> None:
        """Remove the files of a task that failed."""
        remove_files([str(path) for path, _, _ in self._files.values()])


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
