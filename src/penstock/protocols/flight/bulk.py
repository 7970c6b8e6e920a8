"""How does a writer send large amounts to a server, past gRPC?

The client sends a key that it got from the server over Flight; the server replies with a welcome
or a failure. Then the client sends pieces, any number ahead of the answers: a head, a `Piece` as
JSON, a batch of `BATCH_SCHEMA` as one Arrow IPC message. The server answers each in order with a
head and an `Outcome` as JSON; or with a `Failure`, which ends the connection.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import ConnectionLost, Malformed, PenstockError
from penstock.core.url import is_loopback
from penstock.protocols.connection import Connection as Stream
from penstock.protocols.flight.errors import (
    ServerStopping,
    UnknownWriter,
    describe_error,
    error_from,
)
from penstock.protocols.flight.wire import (
    EMPTY,
    MAX_RECORD,
    ActionKind,
    BulkOpened,
    Failure,
    Outcome,
    Piece,
    Put,
)
from penstock.protocols.server import End, Limits, Refused, Server, Session, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.protocols.flight.access import Clients
    from penstock.protocols.flight.answers import Answers
    from penstock.protocols.flight.client import Connection, Target
    from penstock.protocols.flight.server import ServerOptions

__all__ = [
    "ANSWER",
    "HEAD",
    "HELLO",
    "BulkPort",
    "BulkStream",
    "Head",
    "Pack",
    "encode_answer",
    "encode_hello",
    "open_bulk",
    "parse_answer",
    "parse_answer_head",
    "parse_head",
    "parse_hello",
    "unpack_batch",
]

log = logging.getLogger(__name__)

# --- bytes ----------------------------------------------------------------------------------------


_MAGIC: Final = b"PNBULK\x01\n"
_MARK: Final = 0x4543_4950
#: Magic, key.
HELLO: Final = struct.Struct("<8s16s")
#: Mark, bytes of the record, bytes of the batch.
HEAD: Final = struct.Struct("<IIQ")
#: Kind of answer, bytes of the record.
ANSWER: Final = struct.Struct("<II")
_WELCOME, _OUTCOME, _FAILURE = 0x434C_4557, 0x434F_5554, 0x4C49_4146

#: Bytes of a batch on the wire beyond those in memory: metadata and alignment.
_SURPLUS: Final = 64 << 10


class Head(NamedTuple):
    """The head of a piece: the bytes of its record and of its batch."""

    record: int
    batch: int


def encode_hello(key: str) -> bytes:
    """Encode the first message of a client."""
    return HELLO.pack(_MAGIC, bytes.fromhex(key))


def parse_hello(data: bytes) -> str:
    """Return the key.

    :raises Malformed: the peer is not a Penstock client.
    """
    magic, key = HELLO.unpack(data)
    if magic != _MAGIC:
        raise Malformed("bulk hello", "magic", _MAGIC, magic)
    said: str = key.hex()
    return said


# --- pieces ---------------------------------------------------------------------------------------


class _Parts:
    """A file object that keeps the buffers written to it, without copies."""

    closed = False

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def write(self, data: Any) -> int:
        self.kept.append(data)
        return len(data)

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class Pack:
    """Encodes pieces for the wire, without copying messages."""

    def __init__(self) -> None:
        self._parts = _Parts()
        self._writer = pa.ipc.new_stream(self._parts, BATCH_SCHEMA)
        self._writer.write_batch(EMPTY)  # with the schema before it, which both ends know

    def encode(self, batch: Batch, piece: Piece) -> list[Any]:
        """Return the bytes of a piece as a list of buffers."""
        self._parts.kept = []
        self._writer.write_batch(batch)
        parts, self._parts.kept = self._parts.kept, []
        record = piece.to_bytes()
        head = HEAD.pack(_MARK, len(record), sum(map(len, parts)))
        return [head, record, *parts]


def parse_head(data: bytes, limit: int) -> Head:
    """Parse the head of a piece whose batch may have at most `limit` bytes.

    :raises Malformed: it is not a head, or the piece is larger than allowed.
    """
    mark, record, batch = HEAD.unpack(data)
    if mark != _MARK:
        raise Malformed("bulk head", "mark", _MARK, mark)
    if record > MAX_RECORD:
        raise Malformed("bulk head", "record", f"at most {MAX_RECORD}", record)
    if batch > limit + _SURPLUS:
        raise Malformed("bulk head", "batch", f"at most {limit + _SURPLUS}", batch)
    return Head(record, batch)


def unpack_batch(buffer: Any) -> Batch:
    """Parse a batch, whose columns refer to the given memory.

    :raises Malformed: it is not a batch of messages.
    """
    try:
        return pa.ipc.read_record_batch(buffer, BATCH_SCHEMA)
    except (pa.ArrowException, OSError, EOFError) as error:
        raise Malformed("batch", "its bytes", "Arrow IPC", error) from None


# --- answers --------------------------------------------------------------------------------------


def encode_answer(said: Outcome | Failure | None) -> bytes:
    """Encode an answer of the server; None: welcome."""
    if said is None:
        return ANSWER.pack(_WELCOME, 0)
    record = said.to_bytes()
    return ANSWER.pack(_OUTCOME if isinstance(said, Outcome) else _FAILURE, len(record)) + record


def parse_answer_head(data: bytes) -> Head:
    """Parse the head of an answer: how many bytes follow.

    :raises Malformed: the peer is not a Penstock server.
    """
    kind, length = ANSWER.unpack(data)
    if kind not in {_WELCOME, _OUTCOME, _FAILURE}:
        raise Malformed("bulk answer", "kind", "that of an answer", kind)
    if length > MAX_RECORD:
        raise Malformed("bulk answer", "length", f"at most {MAX_RECORD}", length)
    return Head(length, 0)


def parse_answer(head: bytes, record: bytes) -> Outcome | Failure | None:
    """Parse an answer; None: welcome.

    :raises Malformed: it is not an answer.
    """
    kind, _ = ANSWER.unpack(head)
    if kind == _WELCOME:
        return None
    return (Outcome if kind == _OUTCOME else Failure).from_bytes(record)


# --- a writer -------------------------------------------------------------------------------------


#: Seconds to connect; a port that takes longer is not used.
_TO_CONNECT: Final = 2.0


def open_bulk(connection: Connection, put: Put) -> BulkStream | None:
    """Open a bulk connection for a writer, or return None where the server offers none.

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
    """The bulk connection of one writer, for any number of pieces."""

    is_accepted = True  # by the welcome

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

    def send(self, batch: Batch, piece: Piece) -> bool:
        """Send a piece; False: the connection broke, and `receive` returns what came before that.

        :raises ConnectionLost: the server cannot be reached.
        """
        try:
            self._asked_at = time.monotonic()
            self._stream.send(*self._pack.encode(batch, piece))
        except ConnectionLost:
            raise  # from the check of the server
        except OSError:
            return False
        return True

    def receive(self) -> Outcome:
        """Wait for the next answer.

        :raises ConnectionLost: the connection broke.
        :raises PenstockError: the server's failure; the connection has ended.
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
            raise  # from the check of the server
        except OSError as error:
            raise ConnectionLost(self._target.server, str(error)) from None
        answer = parse_answer(bytes(head), bytes(record))
        if isinstance(answer, Failure):
            raise error_from(answer)
        return answer

    def _ask_after_it(self) -> None:
        """Check that the server is alive: an append may wait for a reader without limit."""
        if time.monotonic() - self._asked_at < self._target.options.call_timeout:
            return
        self._asked_at = time.monotonic()
        try:
            self._connection.check()
        except ConnectionLost:
            raise
        except PenstockError:
            pass  # it refuses the request, but it is alive

    def end(self) -> None:
        """Do nothing: the connection stays open for the next call."""

    @property
    def is_whole(self) -> bool:
        """Whether the connection is usable: between calls, the server sends nothing but its end."""
        return self._stream.is_quiet()

    def __del__(self) -> None:
        if hasattr(self, "_stream"):
            self.close()  # of a writer that was not closed; without a warning, as for Flight's own

    def close(self) -> None:
        self._stream.close()


def _encrypted(plain: socket.socket, target: Target) -> socket.socket:
    if not target.is_encrypted:
        return plain
    ca = target.options.ca
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    return context.wrap_socket(plain, server_hostname=target.host)


# --- the server -----------------------------------------------------------------------------------


#: Seconds in which a key has to be sent, from its issue and from the connection.
_TO_COME: Final = 10.0
_TO_SAY_HELLO: Final = 5.0
#: Most unused keys.
_MOST_KEYS: Final = 1000
#: The buffer of a client is freed after this many idle seconds.
_QUIET: Final = 2.0
#: A piece that makes no progress for this long (seconds) is given up. The client can use gRPC.
_STALLED: Final = 60.0
#: Least bytes of a piece per second after the time above.
_SLOWEST: Final = 4096


class _Keys:
    """The issued keys, and the writer of each. Safe to share between threads."""

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
        """Return the writer of a key, and invalidate the key.

        :raises UnknownWriter: the key was not issued, or has expired.
        """
        with self._lock:
            until, put, peer = self._given.pop(key, (0.0, None, ""))
        if put is None or time.monotonic() > until:
            raise UnknownWriter("this key was not given to anybody, or is used up")
        return put, peer


class BulkPort:
    """A port where known writers append without gRPC.

    It serves from construction until `close`.
    """

    def __init__(
        self,
        serves: int,
        options: ServerOptions,
        answers: Answers,
        clients: Clients,
    ) -> None:
        """Listen beside the server at port `serves`.

        :raises StorageError: the port is in use.
        :raises OSError: a certificate is not valid.
        """
        self._serves = serves
        self.options = options
        self.answers = answers
        self.clients = clients
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
        """Issue a key to a writer.

        :raises UnknownWriter: the writer was not opened at this server.
        """
        put = Put.from_bytes(body)
        self.answers.writers.find(put.writer)
        return BulkOpened(port=self.port, key=self.keys.give(put, peer), serves=self._serves)

    def close(self, grace: float) -> None:
        """Stop: accept no connections; answer pieces under way, and read no more."""
        self._server.stop(grace)


class _BulkSession(Session):
    """One connection of a writer."""

    def __init__(self, connection: Stream, port: BulkPort) -> None:
        super().__init__(connection)
        self._port = port
        self._memory: mmap.mmap | None = None
        #: Appends the client's pieces; set once it has sent a key.
        self._append: Callable[[Batch, Piece], Outcome] | None = None
        self._peer = ""
        #: Whether the client has the answers to everything that was appended.
        self._is_answered = True

    def serve(self) -> bool:
        try:
            if self._append is None:
                self._append = self._meet()
            # An idle client keeps neither a buffer nor a thread.
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
        """Append a piece, and answer it; False: the session is over."""
        found = self._next_piece()
        if found is None:
            return False
        batch, piece = found
        port = self._port
        with port.clients.calling(self._peer):
            self._is_answered = False
            outcome = append(batch, piece)
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
        """Return memory for a batch; reused, since that is much faster than allocating."""
        if self._memory is None or len(self._memory) < size:
            room = max(1 << 16, 1 << (size - 1).bit_length())
            self._memory = mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self._memory

    def _answer(self, said: Outcome | Failure | None) -> None:
        self.connection.send(encode_answer(said))
        self._is_answered = True

    def close(self) -> None:
        """At an orderly stop, tell the client that its unanswered pieces were not appended."""
        is_all_told = self._append is not None and self._is_answered
        if is_all_told and self._port.answers.is_stopping() and self.connection.is_writable():
            with contextlib.suppress(OSError):
                self._answer(describe_error(ServerStopping()))

    def _hear_out(self, seconds: float) -> None:
        """Discard pieces that were sent ahead, until the client disconnects."""
        self.connection.expect(seconds)
        view = memoryview(bytearray(1 << 16))
        with contextlib.suppress(TimeoutError):
            while self.connection.receive(view):
                pass
