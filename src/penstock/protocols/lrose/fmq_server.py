"""How are the queues of one machine served to LROSE's clients, and to ours?"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from penstock.core.errors import (
    AlreadyExists,
    InvalidOption,
    LockTimeout,
    MessageTooLarge,
    NotFound,
    PenstockError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.options import Directory, Duration, Size  # noqa: TC001 - pydantic reads them
from penstock.core.position import Position
from penstock.protocols.lrose.addresses import QueueRoot, default_port
from penstock.protocols.lrose.datamapper_client import Registrar, below_data_dir
from penstock.protocols.lrose.ds_message import Category, DsMessage
from penstock.protocols.lrose.ds_server import DsServer, ServingOptions
from penstock.protocols.lrose.fmq_messages import (
    NOTHING_THERE,
    PAYLOAD_AT,
    Messages,
    decode_messages,
    encode_written,
    failure_reply,
    find_write,
    is_write,
    marked_reply,
    written_reply,
)
from penstock.protocols.lrose.fmq_queues import (
    MOST_MESSAGES,
    ServedClassic,
    ServedQueue,
    ServedWide,
    WideWriters,
    layout_of,
    unpacked,
)
from penstock.protocols.lrose.fmq_wire import OURS, SOCKET_ID, Op, OpenMode, SeekTo, decode_init
from penstock.queue.classic.compression import Method
from penstock.queue.classic.creation import open_device
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.classic.layout import (
    BUFFER_COOKIE,
    FRAME_EXTRA,
    ID_COUNT,
    MAX_SLOTS,
    STATUS_MAGIC,
    STATUS_SIZE,
    stat_size,
)
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors
from penstock.queue.wide.file import Geometry, file_of
from penstock.queue.wide.layout import MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import EllipsisType

    from penstock.protocols.connection import Connection
    from penstock.protocols.lrose.ds_server import Answer, Encoded
    from penstock.protocols.lrose.fmq_wire import Init

__all__ = ["FmqServer", "FmqServerOptions", "FmqSession", "Registrations", "Shared"]

log = logging.getLogger(__name__)

# --- the server ---------------------------------------------------------------------------------


class FmqServerOptions(ServingOptions):
    """Options of `serve fmqp`."""

    #: The directory that all queues are below.
    root: Directory
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default_factory=lambda: default_port("fmqp")
    )
    #: The layout of queues that clients create. LROSE's programs on this machine know classic.
    layout: Literal["classic", "wide"] = "classic"
    #: Most bytes and slots of a queue that a client creates.
    max_queue: Annotated[Size, Field(ge=4096)] = 1 << 30
    max_slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] = 1_000_000
    #: How long a write waits for another writer's lock.
    lock_timeout: Duration = 30.0
    #: Nothing may be written or created.
    read_only: bool = False
    #: Serve queues in shared memory, too: any whose key a client can guess.
    shared_memory: bool = False


class FmqServer(DsServer):
    """A DsFmqServer. Serves from construction until `close`."""

    def __init__(self, options: FmqServerOptions) -> None:
        self._shared = Shared(options)
        super().__init__(
            options,
            lambda connection: FmqSession(self._shared, connection),
            grants=f"{'read' if options.read_only else 'read, write and create'} its queues",
        )

    @property
    def url(self) -> str:
        """The prefix of the URLs of its queues."""
        return f"fmqp://{self.address}"

    def close(self) -> None:
        super().close()
        self._shared.close()


# --- one client ---------------------------------------------------------------------------------


#: Seconds between two looks at a queue while a client waits for messages.
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.025
#: Seconds between two looks for a queue while a client waits for it.
_LOOK_FOR_QUEUE: Final = 0.25
#: Most messages that a client of ours may request at a time.
_MOST_FOR_OURS: Final = 1000
#: Most seconds that one request may wait.
_LONGEST_WAIT: Final = 30.0

_WRITTEN: Final = written_reply(-1)


class FmqSession:
    """One client: one queue, one position in it."""

    socket_id = SOCKET_ID

    def __init__(self, shared: Shared, connection: Connection) -> None:
        self._shared = shared
        self._connection = connection
        self._queue: ServedQueue | None = None
        #: Registers writes with the DataMapper, if the client wants that.
        self._registrar: Registrar | None = None
        self._is_ours = False
        self._written = 0
        self._method = Method.GZIP
        self.is_over = False

    # --- requests ---------------------------------------------------------------------------

    def handle_payload(self, payload: bytes) -> Answer | EllipsisType:
        """Execute a WRITE without decoding it twice; `...` for all other requests."""
        return self._write(payload) if is_write(payload) else ...

    def handle_frame(self, buffer: bytearray, size: int, seq: int) -> bytes | None:
        """Execute a WRITE of one plain message, if that is possible without waiting."""
        queue = self._queue
        if queue is None or (append := queue.append_plain) is None:
            return None
        found = find_write(buffer, size)
        if found is None:
            return None
        type, subtype, end = found
        try:
            number = append(buffer, type, subtype, PAYLOAD_AT, end)
        except (PenstockError, RuntimeError):
            return None  # `handle_payload` reports the error
        if number is None:
            return None
        self._note_write(queue)
        return encode_written(seq, number % ID_COUNT if self._is_ours else -1)

    def handle(self, request: DsMessage) -> Answer:
        if request.category == Category.END_SERIES or request.type == Op.CLOSE:
            self.is_over = True
            return None
        match request.type:
            case Op.INIT:
                return self._open(request)
            case Op.READ:
                return self._read(request)
            case Op.WRITE:
                return self._write(request.to_bytes())
            case Op.SEEK:
                return self._seek(request)
            case Op.SEEK_TO_ID:
                return self._seek_to_id(request)
            case Op.SET_COMPRESSION_METHOD:
                return self._set_compression(request)
            case Op.SET_BLOCKING_WRITE | Op.SET_SINGLE_WRITER | Op.SET_REG_WITH_DMAP:
                return self._set_writing(request)
            case _:
                raise Unsupported(f"there is no request {request.type}")

    def failure(self, request: DsMessage, error: Exception) -> tuple[int, DsMessage]:
        is_ours = self._is_ours or request.flags == OURS
        text = self._shared.root.hide(str(error))
        return failure_reply(request, error, text, self._written, is_ours=is_ours)

    def _done(self, request: DsMessage) -> DsMessage:
        return DsMessage(Op.REPLY, request.type)

    def _opened(self) -> ServedQueue:
        if self._queue is None:
            raise Unsupported("no queue is open on this connection", hint="send INIT first")
        return self._queue

    # --- opening ----------------------------------------------------------------------------

    def _open(self, request: DsMessage) -> DsMessage:
        init = decode_init(request)
        self._is_ours = init.is_ours
        path = self._shared.root.path(init.url)
        self.close()
        self._queue = self._open_queue(path, init)
        log.info("%s: %s opens %s", self._connection.peer, init.proc_name, path)
        return self._done(request)._replace(flags=OURS if init.is_ours else 0)

    def _open_queue(self, path: str, init: Init) -> ServedQueue:
        while True:
            try:
                return self._try_to_open(path, init)
            except NotFound:
                if not _waits(init):
                    raise
            # The queue is being created: one of its files exists already.
            self._sleep(_LOOK_FOR_QUEUE)

    def _try_to_open(self, path: str, init: Init) -> ServedQueue:
        shared = self._shared
        creation = _creation_of(init, shared.options)
        layout = layout_of(path)
        if layout is None and creation in {None, Creation.NEVER}:
            layout = self._wait_for_queue(path, init)
        start = Position.START if init.open_position == SeekTo.START else Position.END
        if layout is None or creation is Creation.ALWAYS:
            _check_geometry(init, shared.options)
            start = Position.START
            _check_replaceable(path, layout or shared.options.layout)
        if (layout or shared.options.layout) == "wide":
            with shared.opening:
                return ServedWide(
                    path,
                    start=start,
                    creation=creation,
                    slots=init.num_slots,
                    size=max(init.buf_size, 4096),
                    writers=shared.wide_writers,
                )
        return ServedClassic(
            path,
            start=start,
            creation=creation,
            slots=init.num_slots,
            size=init.buf_size,
            compression=self._method if init.compress else None,
        )

    def _sleep(self, seconds: float) -> None:
        """Wait, while the client is connected.

        :raises ConnectionAbortedError: the client has left.
        """
        if self._connection.has_ended():
            raise ConnectionAbortedError("the client left before it had an answer")
        time.sleep(seconds)

    def _wait_for_queue(self, path: str, init: Init) -> str:
        """Wait for a queue while the client does; clients of ours get an error instead."""
        pause = _FIRST_PAUSE
        while (layout := layout_of(path)) is None:
            if not _waits(init):
                raise NotFound(f"there is no queue {path}", hint="create it first")
            self._sleep(pause)
            pause = min(pause * 2, _LOOK_FOR_QUEUE)
        return layout

    def _set_compression(self, request: DsMessage) -> DsMessage:
        try:
            self._method = Method(request.sub_type).written
        except ValueError:
            raise InvalidOption("method", request.sub_type, "must be from 0 to 5") from None
        if self._method is not Method.NONE:
            self._method = Method.GZIP  # as LROSE's queues do (docs/specs/lrose.md 1.13)
        if isinstance(self._queue, ServedClassic):
            self._queue.set_compression(self._method)
        return self._done(request)

    # --- reading ----------------------------------------------------------------------------

    def _read(self, request: DsMessage) -> Answer:
        queue = self._opened()
        most = MOST_MESSAGES
        if self._is_ours and request.flags > 0:
            most = min(request.flags, _MOST_FOR_OURS) - 1
        found = queue.take(request.sub_type, most)
        if found == NOTHING_THERE and self._is_ours and request.mode > 0:
            found = self._wait_and_take(queue, request, most)
        return self._marked(queue, found)

    def _marked(self, queue: ServedQueue, reply: Encoded) -> Encoded:
        """Add the number of recreations for a client of ours: ids alone may not show it."""
        if not self._is_ours or not queue.restarts or reply == NOTHING_THERE:
            return reply
        return marked_reply(reply, queue.restarts)

    def _wait_and_take(self, queue: ServedQueue, request: DsMessage, most: int) -> Encoded:
        """Return the next messages once there are some, or after the timeout."""
        deadline = time.monotonic() + min(request.mode / 1000, _LONGEST_WAIT)
        pause = _FIRST_PAUSE
        with self._shared.waiting(queue.path) as appended:
            while (left := deadline - time.monotonic()) > 0:
                appended.wait(min(pause, left))
                appended.clear()
                pause = min(pause * 2, _LONGEST_PAUSE)
                found = queue.take(request.sub_type, most)
                if found != NOTHING_THERE:
                    return found
                self._sleep(0)
        return NOTHING_THERE

    def _seek(self, request: DsMessage) -> Answer:
        try:
            place = SeekTo(request.sub_type)
        except ValueError:
            raise InvalidOption("seek", request.sub_type, "must be from 0 to 3") from None
        self._opened().seek(place)
        return self._done(request)

    def _seek_to_id(self, request: DsMessage) -> Answer:
        self._opened().seek_after_id(request.sub_type)
        return self._done(request)

    # --- writing ----------------------------------------------------------------------------

    def _write(self, payload: bytes) -> Answer:
        queue = self._opened()
        _, messages = decode_messages(payload)
        self._written = 0
        if not messages.ids:
            return _WRITTEN
        if not self._is_ours:
            messages = messages._replace(times=[0] * len(messages.ids))
        stored = messages.payloads
        if any(messages.pre_compressed):
            # An empty one is LROSE's NULL message, which is not compressed.
            flags = [
                int(bool(packed and payload))
                for packed, payload in zip(messages.pre_compressed, messages.payloads, strict=True)
            ]
            messages = messages._replace(pre_compressed=flags)
            plain = unpacked(messages, self._shared.options.max_message)
            # Compressed payloads are stored as received; a wide queue handles them itself.
            if isinstance(queue, ServedWide):
                stored = plain
        if self._is_ours:
            last = self._append(queue, messages, stored)
            self._note_write(queue)
            return written_reply(last)
        self._append_all_that_fit(queue, messages, stored)
        return _WRITTEN

    def _append_all_that_fit(
        self, queue: ServedQueue, messages: Messages, stored: list[bytes]
    ) -> None:
        """Append as LROSE's server: after a message that is too large, the others all the same.

        Its clients do not learn which one it was, and drop all of them.
        """
        failure: MessageTooLarge | None = None
        appended = 0
        while messages.ids:
            self._written = 0
            try:
                self._append(queue, messages, stored)
            except MessageTooLarge as error:
                failure = failure or error
                following = self._written + 1
                appended += self._written
                messages, stored = messages.rows(following), stored[following:]
            else:
                appended += len(stored)
                break
        if appended:
            self._note_write(queue)
        if failure is not None:
            raise failure

    def _append(self, queue: ServedQueue, messages: Messages, stored: list[bytes]) -> int:
        """Append; retry while another writer, or a reader that is behind, blocks it.

        Returns the id of the last message.
        """
        deadline = time.monotonic() + self._shared.options.lock_timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                return queue.append(messages, stored, self._written)
            except (LockTimeout, WriteTimeout) as in_the_way:
                self._written += queue.appended
                if isinstance(in_the_way, LockTimeout) and time.monotonic() > deadline:
                    raise
            except BaseException:
                self._written += queue.appended
                raise
            self._sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def _note_write(self, queue: ServedQueue) -> None:
        """Wake waiting readers, and note the write for the DataMapper."""
        self._shared.wake(queue.path)
        if self._registrar is not None:
            self._registrar.note()

    def _set_writing(self, request: DsMessage) -> DsMessage:
        queue = self._opened()
        if request.type == Op.SET_BLOCKING_WRITE:
            queue.set_blocking()
        elif request.type == Op.SET_REG_WITH_DMAP:
            self._end_registering()
            if request.sub_type:
                path = self._shared.root.as_told(queue.path)
                self._registrar = self._shared.registrations.get(path, request.mode)
        # The lock is taken also for a single writer.
        return self._done(request)

    def _end_registering(self) -> None:
        registrar, self._registrar = self._registrar, None
        if registrar is not None:
            self._shared.registrations.put_back(registrar)

    def close(self) -> None:
        self._end_registering()
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()


_WAITING_MODES: Final = {OpenMode.BLOCKING_READ_ONLY, OpenMode.BLOCKING_READ_WRITE}


def _waits(init: Init) -> bool:
    return not init.is_ours and OpenMode(init.open_mode) in _WAITING_MODES


# --- what all clients share ---------------------------------------------------------------------


class Shared:
    """State shared by all clients of a server. Safe to share between threads."""

    def __init__(self, options: FmqServerOptions) -> None:
        self.options = options
        self.root = QueueRoot(options.root, shared_memory=options.shared_memory)
        self.wide_writers = WideWriters()
        self.registrations = Registrations()
        #: Held while a wide queue is opened.
        self.opening = threading.Lock()
        #: Events of waiting readers, by the path of the queue.
        self._waiting: defaultdict[str, set[threading.Event]] = defaultdict(set)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def waiting(self, path: str) -> Iterator[threading.Event]:
        """Yield an event that is set whenever a client has appended to a queue."""
        event = threading.Event()
        with self._lock:
            self._waiting[path].add(event)
        try:
            yield event
        finally:
            with self._lock:
                self._waiting[path].discard(event)
                if not self._waiting[path]:
                    del self._waiting[path]

    def wake(self, path: str) -> None:
        """Wake the readers that wait for messages of a queue."""
        if self._waiting:
            with self._lock:
                for event in self._waiting.get(path, ()):
                    event.set()

    def close(self) -> None:
        self.registrations.close()


# --- creation -----------------------------------------------------------------------------------

_CREATIONS: Final = {
    OpenMode.CREATE: Creation.ALWAYS,
    OpenMode.READ_WRITE: Creation.MISSING,
    OpenMode.READ_ONLY: None,
    OpenMode.BLOCKING_READ_ONLY: None,
    OpenMode.BLOCKING_READ_WRITE: Creation.NEVER,
}

_STATUS: Final = STATUS_MAGIC.to_bytes(4)
_WIDE: Final = MAGIC.to_bytes(8, "little")
#: First bytes of the files of a queue.
_LOOK_AT: Final = STATUS_SIZE


def _creation_of(init: Init, options: FmqServerOptions) -> Creation | None:
    """Return how the queue is opened for writing, or None for reading.

    :raises Unsupported: the server is read-only.
    """
    try:
        mode = OpenMode(init.open_mode)
    except ValueError:
        raise InvalidOption("openMode", init.open_mode, "must be from 0 to 4") from None
    creation = _CREATIONS[mode]
    if creation is not None and options.read_only:
        raise Unsupported("this server serves for reading only")
    return creation


def _check_geometry(init: Init, options: FmqServerOptions) -> None:
    """Check that a new queue is within the limits for clients.

    :raises InvalidOption: it is too large, or its size is not valid.
    """
    if not 1 <= init.num_slots <= options.max_slots:
        raise InvalidOption(
            "numSlots", init.num_slots, f"this server makes 1 to {options.max_slots:,}"
        )
    whole = _bytes_of(init, options.layout)
    if init.buf_size < FRAME_EXTRA or whole > options.max_queue:
        raise InvalidOption(
            "bufSize",
            init.buf_size,
            f"this server makes queues of at most {options.max_queue:,} bytes, slots included",
            hint=None if init.buf_size < FRAME_EXTRA else f"this one would have {whole:,}",
        )


def _bytes_of(init: Init, layout: str) -> int:
    if layout == "wide":
        return Geometry.fitting(init.num_slots, init.buf_size, 0).file_size
    return stat_size(init.num_slots) + init.buf_size


def _check_replaceable(path: str, layout: str) -> None:
    """Check that a new queue replaces nothing but a queue.

    LROSE's server overwrites any file, for every client.

    :raises AlreadyExists: another file is in its place.
    """
    with storage_errors("reading", path):
        if layout == "wide":
            _check(file_of(path), _head(file_of(path)), _WIDE)
        elif shared_memory_key(path) is not None:
            _check_segments(path)
        else:
            stat = _head(f"{path}.stat")
            _check(f"{path}.stat", stat, _STATUS)
            if not stat.startswith(_STATUS):  # else it is a queue, whatever its buffer is like
                _check(f"{path}.buf", _head(f"{path}.buf"), BUFFER_COOKIE)


def _check_segments(path: str) -> None:
    try:
        device = open_device(path, writable=False)
    except NotFound:
        return
    try:
        _check(path, device.read_stat(0, _LOOK_AT), _STATUS)
    finally:
        device.close()


def _head(file: str) -> bytes:
    """Return the first bytes of a file; empty if it does not exist."""
    try:
        # Do not block on a named pipe.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.read(descriptor, _LOOK_AT)
    finally:
        os.close(descriptor)


def _check(what: str, head: bytes, cookie: bytes) -> None:
    # Zeros are left by a process that died while it created the queue.
    if not head.startswith(cookie) and head.strip(b"\0"):
        raise AlreadyExists(
            f"there is {what}, and it is no queue",
            hint="choose another name, or have it removed where the server is",
        )


# --- registration with the data map -------------------------------------------------------------

#: The data type of queues in a map.
_DATATYPE: Final = "fmq"
#: Times in a map are whole seconds: registering more often adds nothing.
_SHORTEST: Final = 1
#: Most queues registered at a time; each takes a thread.
_MOST: Final = 256
#: A registrar unused for this many seconds has no request pending, and can be closed.
_AT_REST: Final = 10.0


class Registrations:
    """The registrars of queues, each shared by all clients of a queue and interval.

    Safe to share between threads.

    They outlive their clients, so that reconnecting clients do not start thread after thread while
    a map hangs.
    """

    def __init__(self, most: int = _MOST, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = now
        self._registrars: dict[tuple[str, int], Registrar] = {}
        self._users: dict[Registrar, int] = {}
        self._left_at: dict[Registrar, float] = {}
        self._lock = threading.Lock()

    def get(self, path: str, interval: int) -> Registrar:
        """Return the registrar of a queue for an `interval` in seconds; `put_back` must follow.

        :raises Unsupported: too many queues are registered already.
        """
        interval = max(interval, _SHORTEST)
        key = below_data_dir(path), interval
        with self._lock:
            registrar = self._registrars.get(key)
            if registrar is None:
                if len(self._registrars) >= self._most:
                    self._make_room()
                # Logged at DEBUG: clients could fill the log.
                registrar = Registrar(key[0], _DATATYPE, interval=interval, level=logging.DEBUG)
                self._registrars[key] = registrar
                self._users[registrar] = 0
            self._users[registrar] += 1
            self._left_at.pop(registrar, None)
            return registrar

    def put_back(self, registrar: Registrar) -> None:
        with self._lock:
            if registrar in self._users:
                self._users[registrar] -= 1
                if not self._users[registrar]:
                    self._left_at[registrar] = self._now()

    def _make_room(self) -> None:
        latest = self._now() - _AT_REST
        rested = [each for each, left_at in self._left_at.items() if left_at <= latest]
        if not rested:
            raise Unsupported(
                f"this server registers {self._most} queues already",
                hint="register this one from the program that writes to it",
            )
        for each in rested:
            self._end(each)

    def _end(self, registrar: Registrar) -> None:
        registrar.close(patience=0)  # others wait for the lock
        del self._registrars[registrar.directory, int(registrar.interval)]
        del self._users[registrar]
        self._left_at.pop(registrar, None)

    def close(self) -> None:
        with self._lock:
            for each in list(self._users):
                self._end(each)
