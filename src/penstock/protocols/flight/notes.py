"""How does a writer find the notes that a stream on another machine keeps of it?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.core.errors import Malformed, Unsupported
from penstock.core.retry import retry
from penstock.protocols.flight.client import Connection
from penstock.protocols.flight.wire import ActionKind, Noted, Stream, WriteNote
from penstock.queue.notes import StreamNotes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.protocols.flight.client import Target
    from penstock.protocols.flight.wire import Record

__all__ = ["ServerNotes"]


class ServerNotes(StreamNotes):
    """Notes that the server of a stream keeps beside it. A broken connection is tried again."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.where = target.url

    def read(self) -> dict[str, dict[str, Any]]:
        """Return all notes.

        :raises Unsupported: the server is an older one, and keeps none.
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
            # To say the same twice does no harm.
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
