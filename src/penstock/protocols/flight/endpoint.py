"""What is behind a `flight:` URL?"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Listable
from penstock.core.endpoints import Endpoint, Identity, is_named_by
from penstock.core.errors import ConnectionLost, InvalidOption, Unsupported
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.protocols.flight.client import (
    Target,
    create_stream,
    describe_stream,
    identify_stream,
    list_streams,
)
from penstock.protocols.flight.notes import ServerNotes
from penstock.protocols.flight.options import DEFAULT_PORT
from penstock.protocols.flight.reader import FlightReader
from penstock.protocols.flight.writer import FlightWriter
from penstock.queue.append_once import NotedAppends, Notes
from penstock.queue.notes import NoteFile

if TYPE_CHECKING:
    from penstock.core.capabilities import Commit
    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer

__all__ = ["FlightEndpoint"]

log = logging.getLogger(__name__)

#: Options by which a server is reached. All others are for its readers and writers.
_CONNECTION: Final = frozenset(
    {"kind", "tls", "ca", "token_file", "retry", "call_timeout", "chunk", "bulk"}
)
#: Bytes of one batch on the wire: what a relay reads at a time, with its columns.
_RELAY_CHUNK: Final = 10 << 20


class FlightEndpoint(NotedAppends, Listable, Endpoint):
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
        # A batch goes as a whole: to cut it would cost more than the pieces gain.
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

    def _notes_for(self, url: URL, commit: Commit) -> Notes:
        # Whoever names the stream in another way has another note of it: one query may have both.
        named = f"{url.text.partition('?')[0]}?kind={url.options.get('kind', '')}"
        suffix = hashlib.sha256(named.encode(errors="surrogateescape")).hexdigest()[:12]
        try:
            return Notes(self.notes(url), commit, f" {suffix}")
        except Unsupported as error:
            if commit.notes is None:
                raise
            log.warning("%s: its notes are kept in %s: %s", url, commit.notes.parent, error)
            return Notes(NoteFile(commit.notes), commit)

    def has_batches(self, url: URL) -> bool:
        with suppress(ConnectionLost, Unsupported):  # whoever writes there will say so
            return super().has_batches(url)
        return False
