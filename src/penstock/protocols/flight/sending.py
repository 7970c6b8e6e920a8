"""What of a writer's call is sent, what of it is answered, and by which stream does it go?"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
from pyarrow import flight

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import ConnectionLost
from penstock.protocols.flight.wire import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.batch import Batch
    from penstock.protocols.flight.client import Connection
    from penstock.protocols.flight.wire import Piece, Put

__all__ = ["BROKEN", "Call", "PutStream", "Sent", "Stream"]

#: What Flight raises when a connection breaks, or the server has something to say.
BROKEN: Final = (flight.FlightError, pa.ArrowException, OSError)


@dataclass(slots=True)
class Sent:
    """A batch that the server has not answered for yet."""

    batch: Batch
    piece: Piece
    #: It was on its way when a connection broke.
    is_in_doubt: bool = False


class Call:
    """One call of a user: what it still has to send, and what the server said so far."""

    def __init__(self, batches: Iterator[tuple[Batch, Piece]], offered: int | None = None) -> None:
        self._coming = batches
        #: Messages that the user gave; None: nobody knows, they come one by one.
        self.offered = offered
        self.sent: deque[Sent] = deque()
        self.written = 0
        self.last_seq: int | None = None
        #: Why there is nothing more to send, if it is not the end.
        self.failure: Exception | None = None

    def next(self) -> Sent | None:
        """Return what is to be sent next; None: that was all."""
        try:
            for batch, piece in self._coming:
                one = Sent(batch, piece)
                self.sent.append(one)
                return one
        except Exception as error:  # noqa: BLE001 - raised when what was sent is answered
            self.failure = error
        return None

    @property
    def in_doubt(self) -> int:
        return sum(one.batch.num_rows for one in self.sent if one.is_in_doubt)


class Stream(Protocol):
    """What carries pieces to the server, and its answers back, each in its turn."""

    def send(self, batch: Batch, piece: Piece) -> None:
        """Send a piece."""

    def receive(self) -> Outcome:
        """Wait for the next answer."""

    def end(self) -> None:
        """Say that the call is over: everything that counts is answered."""


class PutStream:
    """A Flight stream, for one call."""

    def __init__(self, connection: Connection, put: Put) -> None:
        self._server = connection.target.server
        descriptor = flight.FlightDescriptor.for_command(put.to_bytes())
        client, options = connection.client, connection.options()
        self._stream, self._answers = client.do_put(descriptor, BATCH_SCHEMA, options)

    def send(self, batch: Batch, piece: Piece) -> None:
        self._stream.write_with_metadata(batch, piece.to_bytes())

    def receive(self) -> Outcome:
        answer = self._answers.read()
        if answer is None:
            self._stream.close()  # says why
            raise ConnectionLost(self._server, "it ended the call")
        return Outcome.from_bytes(answer.to_pybytes())

    def end(self) -> None:
        with suppress(*BROKEN):
            self._stream.close()
