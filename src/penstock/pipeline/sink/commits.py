"""How does a batch of Spark get into a stream exactly once?

A stream that supports `AppendOnce` keeps the note of the batch itself. For any other, the note is
in a file of the staging folder: exactly once then holds as long as that file is kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import AppendOnce
from penstock.core.endpoints import endpoint_of, identity, open_reader, open_writer
from penstock.core.position import Position
from penstock.core.provenance import Commit, Noted, Origin
from penstock.core.url import URL
from penstock.pipeline.spark_process import file_name
from penstock.queue.append_once import append_noted
from penstock.queue.notes import NoteFile, Notes, noted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.interfaces import Reader
    from penstock.core.provenance import Staged

__all__ = ["append_once", "has_batches", "known_of", "read_back"]

_ENDING: Final = ".commits.json"


def append_once(
    url: str,
    files: Sequence[Staged],
    query: str,
    batch: int,
    folder: Path,
    origin: Origin = Origin(),  # noqa: B008 - never changed
) -> int:
    """Append a batch of a query to a stream, unless done before; return the number of new messages.

    :raises Stranger: another writer appended to the stream in between.
    :raises AnotherBatch: the batch appended under this number had other contents.
    """
    endpoint = endpoint_of(url)
    commit = Commit(query, batch, files, origin, notes_beside(url, folder))
    if isinstance(endpoint, AppendOnce):
        return endpoint.append_once(URL.parse(url), commit)
    with open_writer(url) as writer:
        return append_noted(writer, _notes(commit), commit, lambda: read_back(url))


def known_of(
    url: str,
    query: str,
    batch: int,
    folder: Path,
    origin: Origin = Origin(),  # noqa: B008 - never changed
) -> Noted | None:
    """Return the note of a batch in a stream, or None."""
    endpoint = endpoint_of(url)
    commit = Commit(query, batch, (), origin, notes_beside(url, folder))
    if isinstance(endpoint, AppendOnce):
        return endpoint.noted(URL.parse(url), commit)
    return noted(_notes(commit), batch)


def has_batches(url: str) -> bool:
    """Tell whether a stream has noted batches of any query."""
    endpoint = endpoint_of(url)
    return isinstance(endpoint, AppendOnce) and endpoint.has_batches(URL.parse(url))


def read_back(url: str, start: Position = Position.START) -> Reader:
    """Open the stream of a writer's URL for reading."""
    endpoint = endpoint_of(url)
    if not isinstance(endpoint, AppendOnce):
        return open_reader(url, start)
    reader = endpoint.reread(URL.parse(url))
    if start != Position.START:
        reader.seek(start)
    return reader


def notes_beside(url: str, folder: Path) -> Path:
    """Return the note file of a stream that keeps none itself, the same for all its URLs.

    An existing file of an earlier release is used: it was named by the URL, or by the kind for a
    stream of a Flight server, which had no notes of its own.
    """
    kind = URL.parse(url).options.get("kind", "")
    names = (str(identity(url)), url, f"{url.partition('?')[0]}?kind={kind}")
    files = [folder / f"{file_name(name)}{_ENDING}" for name in names]
    return next(filter(Path.exists, files), files[0])


def _notes(commit: Commit) -> Notes:
    assert commit.notes is not None
    return Notes(NoteFile(commit.notes), commit)
