"""Where are the notes that a queue or a log keeps of its writers?"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import DamagedQueue, LockTimeout
from penstock.core.notes import StreamNotes
from penstock.core.whole_files import sync_names, write_whole
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["NoteFile"]

#: Writers that are remembered for each stream.
_MOST_WRITERS: Final = 1000
_VERSION: Final = 2
#: Seconds to wait for others who write notes in the same folder.
_PATIENCE: Final = 20.0


class NoteFile(StreamNotes):
    """Notes in a small file beside the stream: `NAME.commits.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path

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

    def damaged(self, found: object) -> DamagedQueue:
        """Return the error that says what is wrong with the file."""
        hint = "move it away, if no query was at work with the stream when it was damaged"
        where = str(self.path)
        return DamagedQueue(where, "notes", 0, "JSON with queries", str(found)[:80], hint=hint)

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
