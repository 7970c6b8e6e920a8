"""What does the server of queues do for one of its clients? Spec lrose 2.5, 2.6."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import (
    InvalidOption,
    LockTimeout,
    NotFound,
    PenstockError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.position import Position
from penstock.protocols.lrose.ds_message import (
    Category,
    DsMessage,
)
from penstock.protocols.lrose.fmq_classic import ServedClassic
from penstock.protocols.lrose.fmq_creation import check_geometry, check_replaceable, creation_of
from penstock.protocols.lrose.fmq_messages import Messages, decode_messages, is_write, written_reply
from penstock.protocols.lrose.fmq_queues import MOST_MESSAGES, ServedQueue, layout_of, unpacked
from penstock.protocols.lrose.fmq_replies import NOTHING_THERE, failure_reply, marked_reply
from penstock.protocols.lrose.fmq_short import PAYLOAD_AT, encode_written, find_write
from penstock.protocols.lrose.fmq_wide import ServedWide
from penstock.protocols.lrose.fmq_wire import OURS, SOCKET_ID, Op, OpenMode, SeekTo, decode_init
from penstock.queue.classic.compression import Method
from penstock.queue.classic.layout import ID_COUNT
from penstock.queue.options import Creation

if TYPE_CHECKING:
    from types import EllipsisType

    from penstock.protocols.connection import Connection
    from penstock.protocols.lrose.datamapper_registrar import Registrar
    from penstock.protocols.lrose.fmq_shared import Shared
    from penstock.protocols.lrose.fmq_wire import Init
    from penstock.protocols.lrose.sessions import Answer, Encoded

__all__ = ["FmqSession"]

log = logging.getLogger(__name__)

#: While a client waits for messages, its queue is looked at this often (seconds).
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.025
#: While a client waits for a queue, it is looked for this often (seconds).
_LOOK_FOR_QUEUE: Final = 0.25
#: A client of ours may ask for so many messages at a time.
_MOST_FOR_OURS: Final = 1000
#: The longest that a client may wait with one request (seconds).
_LONGEST_WAIT: Final = 30.0

_WRITTEN: Final = written_reply(-1)


class FmqSession:
    """One client: one queue, one place in it."""

    socket_id = SOCKET_ID

    def __init__(self, shared: Shared, connection: Connection) -> None:
        self._shared = shared
        self._connection = connection
        self._queue: ServedQueue | None = None
        #: Hears of every write, if the client wants that.
        self._registrar: Registrar | None = None
        self._is_ours = False
        self._written = 0
        self._method = Method.GZIP
        self.is_over = False

    # --- requests ---------------------------------------------------------------------------

    def handle_payload(self, payload: bytes) -> Answer | EllipsisType:
        """Carry out a WRITE without taking it apart twice; `...` for everything else."""
        return self._write(payload) if is_write(payload) else ...

    def handle_frame(self, buffer: bytearray, size: int, seq: int) -> bytes | None:
        """Carry out a WRITE of one plain message if that is done at once."""
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
            return None  # the long way says what it is
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
            # Somebody is just making it: one of its files is there already.
            self._sleep(_LOOK_FOR_QUEUE)

    def _try_to_open(self, path: str, init: Init) -> ServedQueue:
        shared = self._shared
        creation = creation_of(init, shared.options)
        layout = layout_of(path)
        if layout is None and creation in {None, Creation.NEVER}:
            layout = self._wait_for_queue(path, init)
        start = Position.START if init.open_position == SeekTo.START else Position.END
        if layout is None or creation is Creation.ALWAYS:
            check_geometry(init, shared.options)
            start = Position.START
            check_replaceable(path, layout or shared.options.layout)
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
        """Wait, while the client is there.

        :raises ConnectionAbortedError: it has left.
        """
        if self._connection.has_ended():
            raise ConnectionAbortedError("the client left before it had an answer")
        time.sleep(seconds)

    def _wait_for_queue(self, path: str, init: Init) -> str:
        """Wait for a queue as long as the client does; ours rather hear that there is none."""
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
            self._method = Method.GZIP  # as LROSE's queues do (spec lrose 1.13)
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
        """Tell a client of ours how often its queue was created anew: ids alone may not show it."""
        if not self._is_ours or not queue.restarts or reply == NOTHING_THERE:
            return reply
        return marked_reply(reply, queue.restarts)

    def _wait_and_take(self, queue: ServedQueue, request: DsMessage, most: int) -> Encoded:
        """Return what is there when there is something, or the time is over."""
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
            # What is compressed is stored as it came; a wide queue has its own ways for that.
            if isinstance(queue, ServedWide):
                stored = plain
        last = self._append(queue, messages, stored)
        self._note_write(queue)
        return written_reply(last) if self._is_ours else _WRITTEN

    def _append(self, queue: ServedQueue, messages: Messages, stored: list[bytes]) -> int:
        """Append, again and again while another writer, or a reader that is behind, is in the way.

        It returns the id of the last.
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
        """Tell those who want to hear of it."""
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
