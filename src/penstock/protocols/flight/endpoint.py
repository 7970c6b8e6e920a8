"""What is behind a `flight:` URL?"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.core.capabilities import Listable, Stages
from penstock.core.endpoints import Endpoint, Identity, is_named_by
from penstock.core.errors import ConnectionLost, InvalidOption, Malformed, Unsupported
from penstock.core.position import Position
from penstock.core.retry import retry
from penstock.core.url import URL
from penstock.protocols.flight.access import DEFAULT_PORT
from penstock.protocols.flight.client import (
    Connection,
    Target,
    create_stream,
    describe_stream,
    identify_stream,
    list_streams,
)
from penstock.protocols.flight.reader import FlightReader
from penstock.protocols.flight.staging_client import TaskPart, commit_staged, unstage
from penstock.protocols.flight.wire import ActionKind, Noted, Stream, WriteNote
from penstock.protocols.flight.writer import FlightWriter
from penstock.queue.append_once import NotedAppends
from penstock.queue.notes import NoteFile, StreamNotes, WriterNotes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.core.interfaces import Reader, StreamInfo, Writer
    from penstock.core.provenance import Commit
    from penstock.protocols.flight.wire import Record

__all__ = ["FlightEndpoint", "ServerNotes", "note_suffix"]

log = logging.getLogger(__name__)

#: Options of the connection. All others are for readers and writers.
_CONNECTION: Final = frozenset(
    {"kind", "tls", "ca", "token_file", "retry", "call_timeout", "chunk", "bulk"}
)
#: Bytes of one batch on the wire: as much as a relay reads at a time, with its columns.
_RELAY_CHUNK: Final = 10 << 20


class FlightEndpoint(NotedAppends, Stages, Listable, Endpoint):
    """`flight://host:port/stream`: a queue or a log of another machine."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        return FlightReader(Target.of(url), start)

    def open_writer(self, url: URL) -> Writer:
        target = Target.of(url)
        if target.options.cursor is not None:
            raise InvalidOption(
                "cursor", target.options.cursor, "is for readers, and would do nothing here"
            )
        return FlightWriter(target)

    def create(self, url: URL, *, replace: bool = False) -> None:
        create_stream(url, replace=replace)

    def describe(self, url: URL) -> StreamInfo:
        return describe_stream(url)

    def identity(self, url: URL) -> Identity:
        return Identity.of(url, kind="flight", port=DEFAULT_PORT, options=("kind",))

    def storage_of(self, url: URL) -> str | None:
        return identify_stream(url)

    def relay_options(self, url: URL) -> dict[str, str]:
        # A batch is sent in one piece: cutting it costs more than it gains.
        wanted = {"retry": "1", "chunk": str(_RELAY_CHUNK)}
        return {name: value for name, value in wanted.items() if name not in url.options}

    def reread(self, url: URL) -> Reader:
        options = {name: value for name, value in url.options.items() if name in _CONNECTION}
        return self.open_reader(replace(url, options=options), Position.START)

    def find(self, pattern: URL) -> list[str]:
        options = {name: value for name, value in pattern.options.items() if name in _CONNECTION}
        server = pattern.with_path("").partition("?")[0]
        found = [
            pattern.with_path(URL.parse(one.url).path) for one in list_streams(server, **options)
        ]
        return [url for url in found if is_named_by(url, pattern.text)]

    # --- batches once -----------------------------------------------------------------------------

    def notes(self, url: URL) -> ServerNotes:
        return ServerNotes(Target.of(url))

    def append_once(self, url: URL, commit: Commit) -> int:
        if not self._is_there(url, commit):
            return super().append_once(url, commit)
        self._bring_note(url, commit)
        return commit_staged(Target.of(url), commit, note_suffix(url)).new

    def _is_there(self, url: URL, commit: Commit) -> bool:
        """Tell whether the batch is staged at the server; otherwise it is in local files."""
        there = {file.is_there for file in commit.files}
        if len(there) > 1:
            raise Unsupported(
                f"{url}: some tasks have staged at the server, and some in a folder",
                hint="start the query again: was the server updated just now?",
            )
        if there:
            return there.pop()
        begun = self.noted(url, commit)
        return begun is not None and not any(Path(path).is_absolute() for path in begun.files)

    def _bring_note(self, url: URL, commit: Commit) -> None:
        """Copy to the server the note that an earlier release kept in a local file."""
        if commit.notes is None or not commit.notes.exists():
            return
        found, notes = NoteFile(commit.notes).read().get(commit.writer), self.notes(url)
        name = f"{commit.writer}{note_suffix(url)}"
        if found is not None and name not in notes.read():
            notes.write(name, found, sync=True)

    def stage(self, url: URL, writer: str, batch: int, partition: int) -> TaskPart:
        return TaskPart(Target.of(url), writer, note_suffix(url), batch, partition)

    def unstage(self, url: URL, commit: Commit, *, is_done: bool) -> None:
        unstage(Target.of(url), commit, note_suffix(url), is_done=is_done)

    def forget(self, url: URL, writer: str) -> None:
        self.notes(url).write(f"{writer}{note_suffix(url)}", None, sync=False)

    def _notes_for(self, url: URL, commit: Commit) -> WriterNotes:
        try:
            return WriterNotes(self.notes(url), commit, note_suffix(url))
        except Unsupported as error:
            if commit.notes is None:
                raise
            log.warning("%s: its notes are kept in %s: %s", url, commit.notes.parent, error)
            return WriterNotes(NoteFile(commit.notes), commit)

    def has_batches(self, url: URL) -> bool:
        with suppress(ConnectionLost, Unsupported):  # the writer will report it
            return super().has_batches(url)
        return False


def note_suffix(url: URL) -> str:
    """Return the suffix of the writer's name in a note: a hash of the stream's URL.

    Each spelling of the URL has its own note: one query may write to both.
    """
    named = f"{url.text.partition('?')[0]}?kind={url.options.get('kind', '')}"
    return f" {hashlib.sha256(named.encode(errors='surrogateescape')).hexdigest()[:12]}"


# --- notes ----------------------------------------------------------------------------------------


class ServerNotes(StreamNotes):
    """Notes that the server keeps beside a stream. Broken connections are retried."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.where = target.url

    def read(self) -> dict[str, dict[str, Any]]:
        """Return all notes.

        :raises Unsupported: the server is of an older release, which keeps no notes.
        """
        answer = self._ask(ActionKind.READ_NOTES, Stream(**self._target.names()))
        text = Noted.from_bytes(answer).notes
        try:
            return {str(name): dict(note) for name, note in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError):
            raise Malformed("flight Noted", "notes", "notes by writer", text[:60]) from None

    def write(self, name: str, note: Mapping[str, Any] | None, *, sync: bool) -> None:
        text = None if note is None else json.dumps(note)
        named = self._target.names(name=name, note=text, sync=sync)
        self._ask(ActionKind.WRITE_NOTE, WriteNote(**named))

    def _ask(self, kind: ActionKind, question: Record) -> bytes:
        connection = Connection(self._target)
        try:
            # Both actions are idempotent.
            return retry(lambda: connection.ask(kind, question), connection.retry_policy())
        except Malformed as error:
            if error.what == "flight action":
                raise Unsupported(
                    f"the server at {self._target.server} keeps no notes of writers",
                    hint="update Penstock there",
                ) from error
            raise
        finally:
            connection.drop()
