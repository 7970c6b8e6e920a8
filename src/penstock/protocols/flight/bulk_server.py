"""How does a server take pieces past gRPC, from writers that it knows?"""

from __future__ import annotations

import contextlib
import logging
import mmap
import secrets
import socket
import ssl
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.core.errors import PenstockError
from penstock.protocols.flight.bulk_pipe import Pipe
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
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
#: After a connection that could not be taken, so long (seconds) before the next.
_PAUSE: Final = 0.1
#: A client that is quiet for so long (seconds) need not have memory kept for it.
_QUIET: Final = 2.0
#: A piece that does not go on for so long (seconds) never will. The client has other ways.
_STALLED: Final = 60.0


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

        :raises OSError: the port is taken, or a certificate is not right.
        """
        self._serves = serves
        self._options = options
        self._answers = answers
        self._clients = clients
        self._on_appended = on_appended
        self._context: ssl.SSLContext | None = None
        if options.tls_cert is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(options.tls_cert, options.tls_key)
        self._keys = _Keys()
        self._lock = threading.Lock()
        self._guests: dict[_Guest, threading.Thread] = {}
        self._is_closed = False
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        port = options.bulk_port if isinstance(options.bulk_port, int) else 0
        self._listener = socket.create_server((options.host.strip("[]"), port), family=family)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True, name="flight bulk port").start()

    def __len__(self) -> int:
        return len(self._guests)

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
        self._answers.writers.pen(put.writer)
        return BulkOpened(port=self.port, key=self._keys.give(put, peer), serves=self._serves)

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    log.warning("a bulk connection could not be taken: %s", error)
                    time.sleep(_PAUSE)
                continue
            with self._lock:
                if self._is_closed or len(self._guests) >= self._options.max_clients:
                    connection.close()  # it goes on by Flight
                    continue
                guest = _Guest(connection)
                thread = threading.Thread(
                    target=self._entertain, args=(guest,), daemon=True, name="flight bulk"
                )
                self._guests[guest] = thread
            thread.start()

    def _entertain(self, guest: _Guest) -> None:
        try:
            guest.meet(self._context)
            self._serve(guest)
        except (OSError, PenstockError) as error:
            log.debug("a bulk connection ended: %s", error)
        except Exception:
            log.exception("a bulk connection failed")
        finally:
            guest.close()
            with self._lock:
                self._guests.pop(guest, None)

    def _serve(self, guest: _Guest) -> None:
        try:
            put, peer = self._keys.take(guest.hello())
            append = self._answers.put(put)
            guest.answer(None)
            while (found := guest.next_piece(self._options)) is not None:
                batch, piece = found
                with self._clients.calling(peer):
                    outcome = append(batch, piece)
                    self._on_appended(batch, outcome)
                    guest.answer(self._answers.hidden(outcome))
                del batch, found  # its memory is used again
                if outcome.failure is not None:
                    guest.hear_out()
                    return
        except PenstockError as error:
            guest.answer(self._answers.hide(describe_error(error)))
            guest.hear_out()

    def close(self, grace: float) -> None:
        """Let nobody in any more; whoever is served gets an answer, but is not heard again."""
        with self._lock:
            self._is_closed = True
            guests = dict(self._guests)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for connections
        self._listener.close()
        for guest in guests:
            guest.hear_no_more()
        deadline = time.monotonic() + grace
        for guest, thread in guests.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            guest.close()


class _Guest:
    """One connection, from the server's side."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pipe: Pipe | None = None
        self._memory: mmap.mmap | None = None

    def meet(self, context: ssl.SSLContext | None) -> None:
        self._connection.settimeout(_TO_SAY_HELLO)
        if context is not None:
            self._connection = context.wrap_socket(self._connection, server_side=True)
        self._pipe = Pipe(self._connection, _TO_SAY_HELLO)

    @property
    def pipe(self) -> Pipe:
        assert self._pipe is not None
        return self._pipe

    def hello(self) -> str:
        said = bytearray(HELLO.size)
        if not self.pipe.receive(memoryview(said), _give_up):
            raise ConnectionResetError("it left without a word")
        self.pipe.wait_for(_QUIET)
        return parse_hello(bytes(said))

    def next_piece(self, options: ServerOptions) -> tuple[Batch, Piece] | None:
        """Wait for a piece; None: there are no more."""

        def be_patient(silence: float) -> None:
            self._memory = None
            if silence > options.idle:
                raise TimeoutError("it was idle for too long")

        said = bytearray(HEAD.size)
        if not self.pipe.receive(memoryview(said), be_patient):
            return None
        head = parse_head(bytes(said), options.max_message)
        record = bytearray(head.record)
        room = self._room(head.batch)
        for view in (memoryview(record), memoryview(room)[: head.batch]):
            if len(view) and not self.pipe.receive(view, _give_up_when_stalled):
                raise ConnectionResetError("it ended in the middle of a piece")
        return unpack_batch(pa.py_buffer(room).slice(0, head.batch)), Piece.from_bytes(
            bytes(record)
        )

    def _room(self, size: int) -> mmap.mmap:
        """Return memory for a batch: the same again and again, which is much faster than new."""
        if self._memory is None or len(self._memory) < size:
            room = max(1 << 16, 1 << (size - 1).bit_length())
            self._memory = mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self._memory

    def answer(self, said: Outcome | Failure | None) -> None:
        self.pipe.send([encode_answer(said)], _give_up)

    def hear_out(self) -> None:
        """Take what was sent ahead, and forget it, until the client has heard and leaves."""
        view = memoryview(bytearray(1 << 16))
        while self.pipe.receive(view, _give_up_when_stalled):
            pass

    def hear_no_more(self) -> None:
        if self._pipe is None:
            self.close()
        else:
            self._pipe.hear_no_more()

    def close(self) -> None:
        self._connection.close()


def _give_up(silence: float) -> None:
    raise TimeoutError(f"it does not listen for {silence:g} s")


def _give_up_when_stalled(silence: float) -> None:
    if silence > _STALLED:
        raise TimeoutError("a piece does not go on")
