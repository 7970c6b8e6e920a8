"""How is a batch appended exactly once, whatever dies in between?

Before anything is appended, a note beside the stream says which batch of which query begins at
which number, how many messages it has, and in which files they are staged. After it, the note says
that it is done. A batch that Spark replays is skipped if it is done. If it is not, the files of the
first attempt are taken, since rows may come in another order the second time; what follows that
number in the stream is what the earlier attempt appended, which is compared, and the rest is
appended. A stream of ours has one writer at a time, so nobody else's messages are among them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import DamagedQueue, NotFound, PenstockError, Unsupported
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.core.whole_files import sync_names, write_whole
from penstock.pipeline.file_names import file_name
from penstock.pipeline.staging import Staged, staged_batches
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds, Reader, Writer

__all__ = ["Note", "Notes", "Stranger", "append_once", "notes_of"]

log = logging.getLogger(__name__)

#: Queries that are remembered for each stream.
_MOST_QUERIES: Final = 1000
#: Options of writers mean nothing to a reader; `hold` would make it one that is waited for.
_WRITERS_ONLY: Final = frozenset(
    {"policy", "timeout", "keep", "lock_timeout", "sync", "retain", "retain_age", "hold", "create"}
)
#: What of a message has to be the same. Its time may be the time of the attempt.
_COMPARED: Final = ("payload", "type", "subtype", "stream", "attributes")


class Stranger(PenstockError):
    """Somebody else wrote between two attempts to append a batch."""


class Note(NamedTuple):
    """What a query did last to a stream."""

    batch: int
    #: How many messages the batch has for this stream.
    count: int  # type: ignore[assignment]
    #: The number of the first of them, and the life of the stream that it counts in; None where
    #: the stream cannot be read.
    start: int | None
    epoch: int | None
    is_done: bool
    #: Where the messages are until then: path, partition and number of each file.
    files: tuple[tuple[str, int, int], ...] = ()


class Notes:
    """What was appended to a stream by which query, in a small file beside it."""

    def __init__(self, path: Path) -> None:
        """Read it.

        :raises DamagedQueue: it is not what `put` wrote.
        """
        self._path = path
        self._queries: dict[str, Note] = {}
        with storage_errors("reading", str(path)):
            try:
                text = path.read_text(encoding="utf-8")
            except FileNotFoundError:
                return
        try:
            self._queries = {query: _note(n) for query, n in json.loads(text)["queries"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "move it away, if no query was at work with the stream when it was damaged"
            raise DamagedQueue(
                str(path), "notes", 0, "JSON with queries", text[:80], hint=hint
            ) from error

    def get(self, query: str) -> Note | None:
        return self._queries.get(query)

    def put(self, query: str, note: Note) -> None:
        """Keep a note: one that is not done is there also after a power failure.

        Without one that is done the batch would be compared once more, and found.

        :raises StorageError: there is no space, or no permission.
        """
        self._queries.pop(query, None)
        self._queries[query] = note
        for old in list(self._queries)[:-_MOST_QUERIES]:
            del self._queries[old]
        stored = {query: note._asdict() for query, note in self._queries.items()}
        text = json.dumps({"version": 1, "queries": stored}).encode()
        with storage_errors("writing", str(self._path)):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, text, sync=not note.is_done)
            if not note.is_done:
                sync_names(self._path.parent)


def _note(fields: dict[str, Any]) -> Note:
    note = Note(**fields)
    return note._replace(files=tuple((str(p), int(n), int(m)) for p, n, m in note.files))


def notes_of(url: str, folder: Path) -> Path:
    """Return where the notes of a stream are: beside it, or in `folder` if it is elsewhere.

    Each stream has its own, however its URL is written.
    """
    parsed = URL.parse(url)
    if parsed.scheme in {"fmq", "log"} and parsed.host is None:
        name = parsed.path.rstrip("/")
        if parsed.scheme == "fmq":  # a log of the same name may stand beside it
            name = f"{name.removesuffix('.fmq')}.fmq"
        path = Path(name).resolve()
        return path.with_name(f"{path.name}.commits.json")
    if parsed.scheme.startswith("flight"):  # all other options are about how to get there
        url = f"{url.partition('?')[0]}?kind={parsed.options.get('kind', '')}"
    return folder / f"{file_name(url)}.commits.json"


def append_once(url: str, parts: Sequence[Staged], query: str, batch: int, folder: Path) -> int:
    """Append a batch of a query to a stream, unless it is there already; return how many were new.

    :raises Stranger: somebody else wrote to the stream in between.
    """
    with open_writer(url) as writer:  # from here on nobody else appends
        notes = Notes(notes_of(url, folder))
        note = notes.get(query)
        if note is not None and (note.batch, note.is_done) >= (batch, True):
            log.warning("%s: batch %d is there already, and skipped", url, batch)
            return 0
        bounds = _bounds(url)
        there = 0
        if note is None or note.batch != batch or not _goes_on(note, bounds):
            note = _begin(batch, parts, bounds)
            notes.put(query, note)
        else:
            parts = _first_attempt(url, note) or parts
            there = _check_there(url, note, parts, bounds)
        new = _append(writer, _after(staged_batches(parts), there))
        writer.flush()
        notes.put(query, note._replace(is_done=True, files=()))
        return new


def _begin(batch: int, parts: Sequence[Staged], bounds: Bounds | None) -> Note:
    files = tuple((part.path, part.partition, part.messages) for part in parts)
    count = sum(part.messages for part in parts)
    if bounds is None:
        return Note(batch, count, None, None, is_done=False, files=files)
    return Note(batch, count, bounds.end, bounds.epoch, is_done=False, files=files)


def _goes_on(note: Note, bounds: Bounds | None) -> bool:
    """Tell whether what was begun may be in the stream that is there now."""
    if bounds is None or note.start is None or note.epoch != bounds.epoch:
        return False
    return note.start <= bounds.end  # classic queues have no epoch, and begin anew with 0


def _first_attempt(url: str, note: Note) -> list[Staged]:
    """Return what was to be appended the first time, if it is all there still."""
    parts = [Staged(url, path, partition, messages) for path, partition, messages in note.files]
    try:
        rows = sum(batch.num_rows for batch in staged_batches(parts))
    except (NotFound, pa.ArrowInvalid, OSError):
        return []
    return parts if rows == note.count else []


def _append(writer: Writer, batches: Iterable[Batch]) -> int:
    new = 0
    for batch in batches:
        writer.write_batch(batch)
        new += batch.num_rows
    return new


def _after(batches: Iterable[Batch], there: int) -> Iterator[Batch]:
    """Yield what follows the first so many messages."""
    for batch in batches:
        if there < batch.num_rows:
            yield batch.slice(there)
        there = max(0, there - batch.num_rows)


def _bounds(url: str) -> Bounds | None:
    """Return what is in a stream; None where it cannot be read."""
    try:
        with _reader(url) as reader:
            return reader.bounds()
    except (NotFound, Unsupported):
        return None


def _reader(url: str) -> Reader:
    path, _, options = url.partition("?")
    kept = [o for o in options.split("&") if o and o.partition("=")[0] not in _WRITERS_ONLY]
    return open_reader(f"{path}?{'&'.join(kept)}" if kept else path, start=Position.START)


def _check_there(url: str, note: Note, parts: Sequence[Staged], bounds: Bounds | None) -> int:
    """Return how many messages of the batch are in the stream, after a look at each of them."""
    assert bounds is not None
    assert note.start is not None
    there = min(bounds.end - note.start, note.count)
    if there > sum(part.messages for part in parts):
        raise _stranger(url, note.start)
    # What is overwritten by now was ours or older.
    at = max(note.start, bounds.oldest)
    end = note.start + there
    with _reader(url) as reader:
        reader.seek(at)
        for mine in _after(staged_batches(parts), at - note.start):
            left = mine.slice(0, max(0, end - at))
            while left.num_rows:
                found = reader.read_batch(left.num_rows, timeout=0)
                if not found.num_rows or found.column("seq")[0].as_py() != at:
                    raise _stranger(url, at)
                same = left.slice(0, found.num_rows)
                if any(same.column(name) != found.column(name) for name in _COMPARED):
                    raise _stranger(url, at)
                at += found.num_rows
                left = left.slice(found.num_rows)
    return there


def _stranger(url: str, at: int) -> Stranger:
    return Stranger(
        f"{url}: messages from {at} on are not those of the batch that was being appended",
        hint="somebody else wrote to it meanwhile; look at what is there, then remove the note "
        "(*.commits.json) to append the whole batch again",
    )
