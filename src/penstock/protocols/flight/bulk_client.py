"""How does a writer send much, past gRPC?"""

from __future__ import annotations

import math
import socket
import ssl
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import ConnectionLost, Malformed, PenstockError
from penstock.protocols.connection import Connection as Stream
from penstock.protocols.flight.bulk_wire import (
    ANSWER,
    Pack,
    encode_hello,
    parse_answer,
    parse_answer_head,
)
from penstock.protocols.flight.failures import error_from
from penstock.protocols.flight.wire import ActionKind, BulkOpened, Failure, Outcome

if TYPE_CHECKING:
    from penstock.core.batch import Batch
    from penstock.protocols.flight.client import Connection, Target
    from penstock.protocols.flight.wire import Piece, Put

__all__ = ["BulkStream", "open_bulk"]

#: A port that cannot be reached within so many seconds is not there for us.
_TO_CONNECT: Final = 2.0


def open_bulk(connection: Connection, put: Put) -> BulkStream | None:
    """Open a bulk connection for a writer; None where there is none to be had.

    :raises ConnectionLost: the server itself cannot be reached.
    """
    target = connection.target
    try:
        opened = BulkOpened.from_bytes(connection.ask(ActionKind.OPEN_BULK, put))
    except ConnectionLost:
        raise
    except PenstockError:
        return None  # an older server, or it has none; whatever else is wrong, Flight will say
    if opened.serves != target.port:
        return None  # we came through something else, which does not lead to that port
    try:
        return BulkStream(connection, opened)
    except (OSError, PenstockError):
        return None


class BulkStream:
    """A connection of one writer, for as many pieces as it likes."""

    def __init__(self, connection: Connection, opened: BulkOpened) -> None:
        target = connection.target
        self._target = target
        self._connection = connection
        self._pack = Pack()
        self._asked_at = 0.0
        plain = socket.create_connection((target.host, opened.port), _TO_CONNECT)
        try:
            self._stream = Stream(_encrypted(plain, target), stalled=math.inf)
            self._stream.expect(_TO_CONNECT)
            self._say_hello(opened.key)
        except BaseException:
            plain.close()
            raise

    def _say_hello(self, key: str) -> None:
        self._stream.send(encode_hello(key))
        if self._answer() is not None:
            raise Malformed("bulk answer", "kind", "welcome", "an outcome")
        self._stream.until = None
        self._stream.on_silence = self._ask_after_it

    def send(self, batch: Batch, piece: Piece) -> None:
        """Send a piece.

        :raises ConnectionLost: the connection broke.
        """
        try:
            self._asked_at = time.monotonic()
            self._stream.send(*self._pack.encode(batch, piece))
        except ConnectionLost:
            raise  # the server was asked after
        except OSError as error:
            raise ConnectionLost(self._target.server, str(error)) from None

    def receive(self) -> Outcome:
        """Wait for the next answer.

        :raises ConnectionLost: the connection broke.
        :raises PenstockError: what the server has to say against it; then it has ended.
        """
        outcome = self._answer()
        if outcome is None:
            raise Malformed("bulk answer", "kind", "an outcome", "welcome")
        return outcome

    def _answer(self) -> Outcome | None:
        head = bytearray(ANSWER.size)
        self._asked_at = time.monotonic()
        try:
            if not self._stream.receive_all(memoryview(head)):
                raise ConnectionResetError("it ended the connection")
            record = bytearray(parse_answer_head(bytes(head)).record)
            if record and not self._stream.receive_all(memoryview(record)):
                raise ConnectionResetError("it ended in the middle of an answer")
        except ConnectionLost:
            raise  # the server was asked after
        except OSError as error:
            raise ConnectionLost(self._target.server, str(error)) from None
        answer = parse_answer(bytes(head), bytes(record))
        if isinstance(answer, Failure):
            raise error_from(answer)
        return answer

    def _ask_after_it(self) -> None:
        """Make sure that the server lives: it may wait for a reader for as long as it likes."""
        if time.monotonic() - self._asked_at < self._target.options.call_timeout:
            return
        self._asked_at = time.monotonic()
        try:
            self._connection.check()
        except ConnectionLost:
            raise
        except PenstockError:
            pass  # it has something against the question; but it is there

    def end(self) -> None:
        """Stay: the next call goes the same way."""

    @property
    def is_whole(self) -> bool:
        """Whether it can be used: between two calls, nothing comes from the server but the end."""
        return self._stream.is_quiet()

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self.close()  # of a writer that nobody closed; without a warning, as for Flight's own

    def close(self) -> None:
        self._stream.close()


def _encrypted(plain: socket.socket, target: Target) -> socket.socket:
    if not target.is_encrypted:
        return plain
    ca = target.options.ca
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    return context.wrap_socket(plain, server_hostname=target.host)
