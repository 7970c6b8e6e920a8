"""How is a batch appended exactly once, whatever dies in between?

Before anything is appended, a note beside the stream says which batch of which query begins at
which number. After it, the note says that it is done. A batch that Spark replays is skipped if it
is done. If it is not, what follows that number in the stream is what an earlier attempt appended,
which is compared, and the rest is appended. A stream of ours has one writer at a time, so nobody
else's messages are among them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import DamagedQueue, NotFound, PenstockError, Unsupported
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Reader

__all__ = ["Notes", "Stranger", "append_once", "notes_of"]

#: Queries that are remembered for each stream.
_MOST_QUERIES: Final = 1000
#: Messages that are compared at a time.
_AT_ONCE: Final = 4096


class Stranger(PenstockError):
    """Somebody else wrote between two attempts to append a batch."""


class Notes:
    """What was appended to a stream by which query, in a small file beside it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queries: dict[str, dict[str, Any]] = {}
        with storage_errors("reading", str(path)):
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                return
        try:
            self._queries = dict(json.loads(text)["queries"])
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedQueue(
                str(path), "notes", 0, "JSON with queries", text[:80], hint="move it away"
            ) from error

    def get(self, query: str) -> dict[str, Any] | None:
        return self._queries.get(query)

    def put(self, query: str, batch: int, start: int | None, *, is_done: bool) -> None:
        """Note it, so that it is there also after a power failure.

        :raises StorageError: there is no space, or no permission.
        """
        self._queries.pop(query, None)
        self._queries[query] = {"batch": batch, "start": start, "done": is_done}
        for old in list(self._queries)[:-_MOST_QUERIES]:
            del self._queries[old]
        unfinished = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        with storage_errors("writing", str(self._path)):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("w", encoding="utf-8") as file:
                json.dump({"version": 1, "queries": self._queries}, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self._path)


def notes_of(url: str, folder: Path) -> Path:
    """Return where the notes of a stream are: beside it, or in `folder` if it is elsewhere."""
    parsed = URL.parse(url)
    if parsed.scheme in {"fmq", "log"} and parsed.host is None:
        path = Path(parsed.path.removesuffix(".fmq"))
        return path.with_name(f"{path.name}.commits.json")
    name = "".join(c if c.isalnum() else "-" for c in url.partition("?")[0])
    return folder / f"{name}.commits.json"


def append_once(url: str, batches: Iterable[Batch], query: str, batch: int, folder: Path) -> int:
    """Append a batch of a query to a stream, unless it is there already; return how many were new.

    :raises Stranger: somebody else wrote to the stream in between.
    """
    with open_writer(url) as writer:  # from here on nobody else appends
        notes = Notes(notes_of(url, folder))
        note = notes.get(query)
        if note is not None and (note["batch"], note["done"]) >= (batch, True):
            return 0
        table = pa.Table.from_batches(list(batches))
        end = _end_of(url)
        skip = 0
        if note is not None and note["batch"] == batch and end is not None:
            skip = end - int(note["start"])
            _compare(url, table, int(note["start"]), end)
        else:
            notes.put(query, batch, end, is_done=False)
        new = table.slice(skip)
        for part in new.to_batches():
            writer.write_batch(part)
        writer.flush()
        notes.put(query, batch, end, is_done=True)
        return int(new.num_rows)


def _end_of(url: str) -> int | None:
    """Return the number of the next message of a stream; None where it cannot be read."""
    try:
        with _reader(url) as reader:
            return reader.bounds().end
    except (NotFound, Unsupported):
        return None


def _reader(url: str) -> Reader:
    # Options of writers mean nothing to a reader.
    return open_reader(url.partition("?")[0], start=Position.START)


def _compare(url: str, table: pa.Table, start: int, end: int) -> None:
    """Make sure that the messages from `start` on are the first of the batch."""
    if end - start > table.num_rows:
        raise _stranger(url, start)
    with _reader(url) as reader:
        at = max(start, reader.bounds().oldest)  # what is overwritten by now was ours or older
        reader.seek(at)
        while at < end:
            found = reader.read_batch(min(_AT_ONCE, end - at), timeout=0)
            if not found.num_rows:
                return
            at = found.column("seq")[0].as_py()
            mine = table.slice(at - start, found.num_rows)
            for name in ("payload", "type", "subtype"):
                if mine.column(name).combine_chunks() != found.column(name):
                    raise _stranger(url, at)
            at += found.num_rows


def _stranger(url: str, at: int) -> Stranger:
    return Stranger(
        f"{url}: messages from {at} on are not those of the batch that was being appended",
        hint="somebody else wrote to it meanwhile; look at what is there, then remove the note "
        "(*.commits.json) to append the whole batch again",
    )
