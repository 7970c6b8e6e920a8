"""How does a server take pieces past gRPC, from writers that it knows?"""

from __future__ import annotations

import contextlib
import logging
import mmap
import secrets
import ssl
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.core.errors import PenstockError
from penstock.protocols.flight.bulk_wire import (
    HEAD,
    HELLO,
    encode_answer,
    parse_head,
    parse_hello,
    unpack_batch,
)
from penstock.protocols.flight.errors import UnknownWriter
from penstock.protocols.flight.failures import describe_error
from penstock.protocols.flight.options import is_loopback
from penstock.protocols.flight.wire import BulkOpened, Piece, Put
from penstock.protocols.server import End, Limits, Refused, Server, Session, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.protocols.connection import Connection
    from penstock.protocols.flight.access import Clients
    from penstock.protocols.flight.answering import Answers
    from penstock.protocols.flight.options import ServerOptions
    from penstock.protocols.flight.wire import Failure, Outcome

__all__ = ["BulkPort"]

log = logging.getLogger(__name__)

#: Who connects says a key within so many seconds of asking for it, and of connecting.
_TO_COME: Final = 10.0
_TO_SAY_HELLO: Final = 5.0
#: Keys that nobody came with yet.
_MOST_KEYS: Final = 1000
#: A client that is quiet for so long (seconds) need not have memory kept for it.
_QUIET: Final = 2.0
#: A piece that does not go on for so long (seconds) never will. The client has other ways.
_STALLED: Final = 60.0
#: Bytes of a piece that come in a second, at least, after the time above.
_SLOWEST: Final = 4096


class _Keys:
    """The keys that were given out, and to whom. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: OrderedDict[str, tuple[float, Put, str]] = OrderedDict()

    def give(self, put: Put, peer: str) -> str:
        key = secrets.token_hex(16)
        with self._lock:
            self._given[key] = (time.monotonic() + _TO_COME, put, peer)
            if len(self._given) > _MOST_KEYS:
                self._given.popitem(last=False)
        return key

    def take(self, key: str) -> tuple[Put, str]:
        """Return who was given a key. It is good for once.

        :raises UnknownWriter: nobody was, or too long ago.
        """
        with self._lock:
            until, put, peer = self._given.pop(key, (0.0, None, ""))
        if put is None or time.monotonic() > until:
            raise UnknownWriter("this key was not given to anybody, or is used up")
        return put, peer


class BulkPort:
    """A port where writers that the server knows may come, to append without gRPC between.

    It serves as soon as it is made.
    """

    def __init__(
        self,
        serves: int,
        options: ServerOptions,
        answers: Answers,
        clients: Clients,
        on_appended: Callable[[Batch, Outcome], None],
    ) -> None:
        """Listen beside the server at port `serves`.

        :raises StorageError: the port is taken.
        :raises OSError: a certificate is not right.
        """
        self._serves = serves
        self.options = options
        self.answers = answers
        self.clients = clients
        self.on_appended = on_appended
        self.keys = _Keys()
        context: ssl.SSLContext | None = None
        if options.tls_cert is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(options.tls_cert, options.tls_key)
        self._server = Server(
            "flight bulk",
            listen_tcp(
                options.host, options.bulk_port if isinstance(options.bulk_port, int) else 0
            ),
            lambda connection: _BulkSession(connection, self),
            Limits(
                max_clients=options.max_clients,
                first_message=_TO_SAY_HELLO,
                idle=options.idle,
                stalled=_STALLED,
            ),
            log=log,
            tls=context,
        ).start()
        self.port = self._server.port

    def __len__(self) -> int:
        return self._server.statistics().open

    @staticmethod
    def is_wanted(options: ServerOptions) -> bool:
        if options.bulk_port is None:
            return is_loopback(options.host)
        return options.bulk_port != "off"

    def open(self, body: bytes, peer: str) -> BulkOpened:
        """Let a writer come.

        :raises UnknownWriter: this server never heard of it.
        """
        put = Put.from_bytes(body)
        self.answers.writers.pen(put.writer)
        return BulkOpened(port=self.port, key=self.keys.give(put, peer), serves=self._serves)

    def close(self, grace: float) -> None:
        """Let nobody in any more; whoever is served gets an answer, but is not heard again."""
        self._server.stop(grace)


class _BulkSession(Session):
    """One connection of a writer."""

    def __init__(self, connection: Connection, port: BulkPort) -> None:
        super().__init__(connection)
        self._port = port
        self._memory: mmap.mmap | None = None
        #: Appends what it sends, once it came with a key.
        self._append: Callable[[Batch, Piece], Outcome] | None = None
        self._peer = ""

    def serve(self) -> bool:
        try:
            if self._append is None:
                self._append = self._meet()
            # A client that is quiet need not have memory, nor a thread, kept for it.
            while self.connection.is_readable(_QUIET):
                if not self._take_piece(self._append):
                    return False
        except PenstockError as error:
            self._answer(self._port.answers.hide(describe_error(error)))
            self._hear_out(_TO_SAY_HELLO if self._append is None else _STALLED)
            if isinstance(error, UnknownWriter):
                raise Refused(End.TOKEN, str(error)) from error
            raise
        self._memory = None
        return True

    def _meet(self) -> Callable[[Batch, Piece], Outcome]:
        said = bytearray(HELLO.size)
        if not self.connection.receive_all(memoryview(said)):
            raise ConnectionResetError("it left without a word")
        put, self._peer = self._port.keys.take(parse_hello(bytes(said)))
        append = self._port.answers.put(put)
        self.connection.welcome()
        self._answer(None)
        return append

    def _take_piece(self, append: Callable[[Batch, Piece], Outcome]) -> bool:
        """Append a piece, and answer; False: there are no more, or shall be none."""
        found = self._next_piece()
        if found is None:
            return False
        batch, piece = found
        port = self._port
        with port.clients.calling(self._peer):
            outcome = append(batch, piece)
            port.on_appended(batch, outcome)
            self._answer(port.answers.hidden(outcome))
        if outcome.failure is not None:
            self._hear_out(_STALLED)
        return outcome.failure is None

    def _next_piece(self) -> tuple[Batch, Piece] | None:
        said = bytearray(HEAD.size)
        if not self.connection.receive_all(memoryview(said), _STALLED):
            return None
        head = parse_head(bytes(said), self._port.options.max_message)
        record = bytearray(head.record)
        room = self._room(head.batch)
        for view in (memoryview(record), memoryview(room)[: head.batch]):
            self.connection.expect(_STALLED + len(view) / _SLOWEST)
            if len(view) and not self.connection.receive_all(view):
                raise ConnectionResetError("it ended in the middle of a piece")
        self.connection.until = None
        return unpack_batch(pa.py_buffer(room).slice(0, head.batch)), Piece.from_bytes(
            bytes(record)
        )

    def _room(self, size: int) -> mmap.mmap:
        """Return memory for a batch: the same again and again, which is much faster than new."""
        if self._memory is None or len(self._memory) < size:
            room = max(1 << 16, 1 << (size - 1).bit_length())
            self._memory = mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self._memory

    def _answer(self, said: Outcome | Failure | None) -> None:
        self.connection.send(encode_answer(said))

    def _hear_out(self, seconds: float) -> None:
        """Take what was sent ahead, and forget it, until the client has heard and leaves."""
        self.connection.expect(seconds)
        view = memoryview(bytearray(1 << 16))
        with contextlib.suppress(TimeoutError):
            while self.connection.receive(view):
                pass
