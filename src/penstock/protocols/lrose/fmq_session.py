"""What does the server of queues do for one of its clients? Spec lrose 2.5, 2.6."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

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
    from collections.abc import Awaitable, Callable
    from types import EllipsisType

    from penstock.protocols.lrose.datamapper_registrar import Registrar
    from penstock.protocols.lrose.fmq_shared import Shared
    from penstock.protocols.lrose.fmq_wire import Init
    from penstock.protocols.lrose.sessions import Answer, Encoded

__all__ = ["FmqSession"]

log = logging.getLogger(__name__)

T = TypeVar("T")

#: A call of a queue that took so long (seconds) makes the next ones of its client go to a thread,
#: for so many times as long: others wait for its queue a small part of the time at most, and one
#: call that was long because the machine was busy is soon forgotten.
_SLOW: Final = 0.05
_STAYS_SLOW: Final = 20
#: Compressed messages above so many bytes are checked in a thread.
_LARGE: Final = 1 << 16
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

    def __init__(self, shared: Shared, name: str) -> None:
        self._shared = shared
        self._name = name
        self._queue: ServedQueue | None = None
        #: Hears of every write, if the client wants that.
        self._registrar: Registrar | None = None
        self._is_ours = False
        self._slow_until = 0.0
        self._written = 0
        self._method = Method.GZIP
        self.is_over = False

    # --- requests ---------------------------------------------------------------------------

    def handle_payload(self, payload: bytes) -> Answer | Awaitable[Answer] | EllipsisType:
        """Carry out a WRITE without taking it apart twice; `...` for everything else."""
        return self._write(payload) if is_write(payload) else ...

    def handle_frame(self, buffer: bytearray, size: int, seq: int, now: float) -> bytes | None:
        """Carry out a WRITE of one plain message if that is done at once."""
        queue = self._queue
        if queue is None or (append := queue.append_plain) is None or now < self._slow_until:
            return None
        found = find_write(buffer, size)
        if found is None:
            return None
        type, subtype, end = found
        try:
            number = append(buffer, type, subtype, PAYLOAD_AT, end)
        except (PenstockError, RuntimeError):
            return None  # the long way says what it is
        if time.monotonic() - now > _SLOW:
            self._note_slowness(now)
        if number is None:
            return None
        if self._shared.waiting or self._registrar is not None:
            self._note_write(queue)
        return encode_written(seq, number % ID_COUNT if self._is_ours else -1)

    def handle(self, request: DsMessage) -> Answer | Awaitable[Answer]:
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

    async def _open(self, request: DsMessage) -> DsMessage:
        init = decode_init(request)
        self._is_ours = init.is_ours
        path = self._shared.root.path(init.url)
        self.close()
        self._queue = await self._open_queue(path, init)
        log.info("%s: %s opens %s", self._name, init.proc_name, path)
        return self._done(request)._replace(flags=OURS if init.is_ours else 0)

    async def _open_queue(self, path: str, init: Init) -> ServedQueue:
        while True:
            try:
                return await self._try_to_open(path, init)
            except NotFound:
                if not _waits(init):
                    raise
            # Somebody is just making it: one of its files is there already.
            await asyncio.sleep(_LOOK_FOR_QUEUE)

    async def _try_to_open(self, path: str, init: Init) -> ServedQueue:
        shared = self._shared
        creation = creation_of(init, shared.options)
        layout = layout_of(path)
        if layout is None and creation in {None, Creation.NEVER}:
            layout = await self._wait_for_queue(path, init)
        start = Position.START if init.open_position == SeekTo.START else Position.END
        if layout is None or creation is Creation.ALWAYS:
            check_geometry(init, shared.options)
            start = Position.START
            await shared.in_thread(check_replaceable, path, layout or shared.options.layout)
        if (layout or shared.options.layout) == "wide":
            async with shared.opening:
                return await shared.in_thread(
                    lambda: ServedWide(
                        path,
                        start=start,
                        creation=creation,
                        slots=init.num_slots,
                        size=max(init.buf_size, 4096),
                        writers=shared.wide_writers,
                    )
                )
        method = self._method if init.compress else None
        return await shared.in_thread(
            lambda: ServedClassic(
                path,
                start=start,
                creation=creation,
                slots=init.num_slots,
                size=init.buf_size,
                compression=method,
            )
        )

    async def _wait_for_queue(self, path: str, init: Init) -> str:
        """Wait for a queue as long as the client does; ours rather hear that there is none."""
        pause = _FIRST_PAUSE
        while (layout := layout_of(path)) is None:
            if not _waits(init):
                raise NotFound(f"there is no queue {path}", hint="create it first")
            await asyncio.sleep(pause)
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

    def _call(self, call: Callable[..., T], *arguments: Any) -> T | Awaitable[T]:
        """Call a queue: here, if its calls have been quick, or in a thread."""
        began = time.monotonic()
        if began < self._slow_until:
            return self._shared.in_thread(call, *arguments)
        try:
            return call(*arguments)
        finally:
            self._note_slowness(began)

    def _note_slowness(self, began: float) -> None:
        now = time.monotonic()
        if now - began > _SLOW:
            self._slow_until = now + _STAYS_SLOW * (now - began)

    def _read(self, request: DsMessage) -> Answer | Awaitable[Answer]:
        queue = self._opened()
        most = MOST_MESSAGES
        if self._is_ours and request.flags > 0:
            most = min(request.flags, _MOST_FOR_OURS) - 1
        found = self._call(queue.take, request.sub_type, most)
        if isinstance(found, bytes | bytearray):
            if found == NOTHING_THERE and self._is_ours and request.mode > 0:
                return self._wait_and_read(queue, request, most)
            return self._marked(queue, found)
        return self._read_slowly(found, queue, request, most)

    def _marked(self, queue: ServedQueue, reply: Encoded) -> Encoded:
        """Tell a client of ours how often its queue was created anew: ids alone may not show it."""
        if not self._is_ours or not queue.restarts or reply == NOTHING_THERE:
            return reply
        return marked_reply(reply, queue.restarts)

    async def _read_slowly(
        self, found: Awaitable[Encoded], queue: ServedQueue, request: DsMessage, most: int
    ) -> Answer:
        reply = await found
        if reply == NOTHING_THERE and self._is_ours and request.mode > 0:
            return await self._wait_and_read(queue, request, most)
        return self._marked(queue, reply)

    async def _wait_and_read(self, queue: ServedQueue, request: DsMessage, most: int) -> Answer:
        """Answer when there is something, or the time is over."""
        deadline = time.monotonic() + min(request.mode / 1000, _LONGEST_WAIT)
        pause = _FIRST_PAUSE
        event = asyncio.Event()
        waiting = self._shared.waiting[queue.path]
        waiting.add(event)
        try:
            while (left := deadline - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), min(pause, left))
                event.clear()
                pause = min(pause * 2, _LONGEST_PAUSE)
                found = self._call(queue.take, request.sub_type, most)
                reply = found if isinstance(found, bytes | bytearray) else await found
                if reply != NOTHING_THERE:
                    return self._marked(queue, reply)
        finally:
            waiting.discard(event)
            if not waiting:
                self._shared.waiting.pop(queue.path, None)
        return NOTHING_THERE

    def _seek(self, request: DsMessage) -> Answer | Awaitable[Answer]:
        try:
            place = SeekTo(request.sub_type)
        except ValueError:
            raise InvalidOption("seek", request.sub_type, "must be from 0 to 3") from None
        return self._move(request, self._opened().seek, place)

    def _seek_to_id(self, request: DsMessage) -> Answer | Awaitable[Answer]:
        return self._move(request, self._opened().seek_after_id, request.sub_type)

    def _move(
        self, request: DsMessage, call: Callable[[Any], None], place: int
    ) -> Answer | Awaitable[Answer]:
        result = self._call(call, place)
        return self._done(request) if result is None else self._moved(request, result)

    async def _moved(self, request: DsMessage, moving: Awaitable[None]) -> Answer:
        await moving
        return self._done(request)

    # --- writing ----------------------------------------------------------------------------

    def _write(self, payload: bytes) -> Answer | Awaitable[Answer]:
        queue = self._opened()
        _, messages = decode_messages(payload)
        self._written = 0
        if not messages.ids:
            return _WRITTEN
        if not self._is_ours:
            messages = messages._replace(times=[0] * len(messages.ids))
        if any(messages.pre_compressed):
            # An empty one is LROSE's NULL message, which is not compressed.
            flags = [
                int(bool(packed and payload))
                for packed, payload in zip(messages.pre_compressed, messages.payloads, strict=True)
            ]
            messages = messages._replace(pre_compressed=flags)
            if sum(messages.uncompressed_lens) > _LARGE:
                return self._check_and_append(queue, messages)
            plain = unpacked(messages, self._shared.options.max_message)
            return self._append(queue, messages, plain)
        return self._append(queue, messages, messages.payloads)

    async def _check_and_append(self, queue: ServedQueue, messages: Messages) -> Answer:
        limit = self._shared.options.max_message
        plain = await self._shared.in_thread(unpacked, messages, limit)
        answer = self._append(queue, messages, plain)
        is_ready = answer is None or isinstance(answer, (bytes, bytearray, DsMessage))
        return answer if is_ready else await answer  # type: ignore[return-value, misc]

    def _append(
        self, queue: ServedQueue, messages: Messages, plain: list[bytes]
    ) -> Answer | Awaitable[Answer]:
        is_wide = isinstance(queue, ServedWide)
        # What is compressed is stored as it came; a wide queue has its own ways for that.
        stored = plain if is_wide else messages.payloads
        began = time.monotonic()
        if began < self._slow_until and not is_wide:
            return self._append_patiently(queue, messages, stored)
        try:
            last = queue.append(messages, stored, 0)
        except (LockTimeout, WriteTimeout):
            self._written = queue.appended
            return self._append_patiently(queue, messages, stored)
        except BaseException:
            self._written = queue.appended
            raise
        finally:
            self._note_slowness(began)
        return self._appended(queue, last)

    def _appended(self, queue: ServedQueue, last: int) -> Answer:
        self._note_write(queue)
        return written_reply(last) if self._is_ours else _WRITTEN

    def _note_write(self, queue: ServedQueue) -> None:
        """Tell those who want to hear of it."""
        if self._shared.waiting:
            self._shared.wake(queue.path)
        if self._registrar is not None:
            self._registrar.note()

    async def _append_patiently(
        self, queue: ServedQueue, messages: Messages, stored: list[bytes]
    ) -> Answer:
        """Try again and again while another writer, or a reader that is behind, is in the way."""
        deadline = time.monotonic() + self._shared.options.lock_timeout
        pause = _FIRST_PAUSE
        while True:
            try:
                if isinstance(queue, ServedWide):
                    last = queue.append(messages, stored, self._written)
                else:
                    last = await self._shared.in_thread(
                        queue.append, messages, stored, self._written
                    )
            except (LockTimeout, WriteTimeout) as in_the_way:
                self._written += queue.appended
                if isinstance(in_the_way, LockTimeout) and time.monotonic() > deadline:
                    raise
            except BaseException:
                self._written += queue.appended
                raise
            else:
                return self._appended(queue, last)
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

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
