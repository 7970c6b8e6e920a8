"""How does a small table outlive a crash?

Every change is a line at the end of a file: a checksum and JSON. Reading them all again gives the
table; a line that a crash cut off is not there. When most lines are out of date the file is
written anew.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from typing import TYPE_CHECKING, Any, Final

from penstock.core.whole_files import sync_names
from penstock.dispatch.outbox.sidecar import save_notes
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Journal"]

log = logging.getLogger(__name__)

#: Lines beyond those in use, from which on the file is written anew.
_SPARE: Final = 1024

Record = dict[str, Any]


class Journal:
    """The file of a table. Not to be shared between threads without a lock."""

    def __init__(self, path: Path) -> None:
        """Read the file, or make it.

        :raises StorageError: the operating system refuses.
        """
        self._path = path
        self._lines = 0
        #: Whether the file may end within a line, which then ends before the next one.
        self._is_torn = False
        with storage_errors("opening", str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)

    def replay(self) -> list[Record]:
        """Return all changes, the oldest first, and cut off what a crash left.

        :raises StorageError: the operating system refuses.
        """
        with storage_errors("reading", str(self._path)):
            data = self._path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                self._file.truncate(whole)
        found = []
        for number, line in enumerate(data[:whole].splitlines(), start=1):
            if not line:
                continue
            record = _read(line)
            if record is None:
                log.warning("%s: line %d is damaged, and left out", self._path, number)
            else:
                found.append(record)
        self._lines = len(found)
        return found

    def append(self, records: Iterable[Record]) -> None:
        """Keep changes; when this returns they outlive everything.

        :raises StorageError: the operating system refuses; then none is kept.
        """
        lines = [_line(record) for record in records]
        if not lines:
            return
        with storage_errors("writing", str(self._path)):
            end = os.fstat(self._file.fileno()).st_size
            data = (b"\n" if self._is_torn else b"") + b"".join(lines)
            self._is_torn = True
            try:
                written = self._file.write(data)
                if written < len(data):
                    raise OSError(28, "there is no space left")  # noqa: TRY301 - as a write would
                os.fdatasync(self._file.fileno())
            except OSError:
                self._file.truncate(end)
                self._is_torn = False
                raise
        self._is_torn = False
        self._lines += len(lines)

    def is_long(self, in_use: int) -> bool:
        """Tell whether most of it is out of date."""
        return self._lines > 2 * in_use + _SPARE

    def rewrite(self, records: Iterable[Record]) -> None:
        """Keep only these.

        :raises StorageError: the operating system refuses; then all is as before.
        """
        lines = [_line(record) for record in records]
        save_notes(self._path, b"".join(lines), sync=True)
        with storage_errors("opening", str(self._path)):
            sync_names(self._path.parent)  # or what is appended now is lost with the name
            self._file.close()
            self._file = self._path.open("a+b", buffering=0)
        self._lines = len(lines)

    def close(self) -> None:
        self._file.close()


def _line(record: Record) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(line: bytes) -> Record | None:
    checksum, _, text = line.partition(b" ")
    try:
        if int(checksum, 16) != zlib.crc32(text):
            return None
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
