"""How does a server read and write a wide queue for its clients?"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Closed, PositionError, Unsupported
from penstock.protocols.lrose.fmq_messages import Messages
from penstock.protocols.lrose.fmq_queues import MOST_BYTES, PLACES, ServedQueue
from penstock.protocols.lrose.fmq_replies import reply_with
from penstock.protocols.lrose.fmq_wire import SeekTo
from penstock.queue.classic.layout import ID_COUNT, id_distance
from penstock.queue.options import Creation
from penstock.queue.wide.creation import create_from_options
from penstock.queue.wide.opening import open_wide_reader, open_wide_writer
from penstock.queue.wide.options import WideOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.position import Position
    from penstock.queue.wide.writer import WideWriter

__all__ = ["ServedWide", "WideWriters"]

_SECOND: Final = 1_000_000_000
#: Seconds to wait for another process that writes; clients of the queue wait meanwhile.
_LOCK: Final = 1.0
_EXISTING: Final = WideOptions(create=Creation.NEVER, lock_timeout=_LOCK)


@dataclass(slots=True)
class _SharedWriter:
    """One writer, and who uses it."""

    writer: WideWriter
    users: int = 1
    #: Whoever appends has it.
    lock: threading.Lock = field(default_factory=threading.Lock)


class WideWriters:
    """The writers of wide queues, one each for all clients: a wide queue has one at a time.

    One thread at a time may open; any may append and give back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: dict[str, _SharedWriter] = {}

    @contextlib.contextmanager
    def current(self, path: str) -> Iterator[WideWriter]:
        """Give the writer of a queue that was asked for by `get`, to nobody else meanwhile."""
        shared = self._writers[path]
        with shared.lock:
            yield shared.writer

    def renew(self, path: str) -> WideWriter:
        """Return another writer to who has the current one: the queue was created anew."""
        shared = self._writers[path]
        stale = shared.writer
        shared.writer = open_wide_writer(f"fmq:{path}", path, _EXISTING)
        stale.close()
        return shared.writer

    def get(self, path: str, options: WideOptions) -> None:
        """Have a writer for a queue; `put_back` has to follow."""
        if options.create is Creation.ALWAYS:
            # Who writes to the old one goes over to the new one: see `renew`.
            create_from_options(path, options, replace=True)
            options = options.model_copy(update={"create": Creation.MISSING})
        with self._lock:
            if path in self._writers:
                self._writers[path].users += 1
                return
        # It may take a while, and those who only give back must not wait for it.
        writer = open_wide_writer(f"fmq:{path}", path, options)
        with self._lock:
            self._writers[path] = _SharedWriter(writer)

    def put_back(self, path: str) -> None:
        with self._lock:
            shared = self._writers[path]
            shared.users -= 1
            if shared.users:
                return
            del self._writers[path]
        shared.writer.close()


class ServedWide(ServedQueue):
    """A queue of the wide layout: ids are its sequence numbers, modulo a thousand million."""

    def __init__(
        self,
        path: str,
        *,
        start: Position,
        creation: Creation | None,
        slots: int,
        size: int,
        writers: WideWriters,
    ) -> None:
        super().__init__(path)
        self._writers = writers
        self._may_write = False
        if creation is not None:
            options = WideOptions(
                slots=max(slots, 2),
                size=size,
                create=creation,
                writers="many",
                lock_timeout=_LOCK,
            )
            writers.get(path, options)
            self._may_write = True
        try:
            self._reader = open_wide_reader(f"fmq:{path}", path, start, WideOptions())
        except BaseException:
            self._give_back_writer()
            raise

    def take(self, wanted: int, most: int) -> bytes:
        reader = self._reader
        found: Messages = Messages([], [], [], [], [], [], [])
        size = 0
        end = reader.newest_seq()
        while len(found.ids) <= most and size <= MOST_BYTES:
            message = reader.read(0)
            if message is None:
                break
            if wanted < 0 or message.type == wanted:
                found.types.append(message.type)
                found.subtypes.append(message.subtype)
                found.payloads.append(message.payload)
                found.ids.append(message.seq % ID_COUNT)
                found.times.append(min(message.created_ns // _SECOND, 2**31 - 1))
                size += len(message.payload)
            if end is not None and message.seq >= end:
                break
        found.pre_compressed.extend([0] * len(found.ids))
        found.uncompressed_lens.extend(map(len, found.payloads))
        return reply_with(found)

    def seek(self, place: SeekTo) -> None:
        if place is not SeekTo.BACK:
            self._reader.seek(PLACES[place])
            return
        here = self._reader.statistics().next_seq or 0
        self._reader.seek(max(min(here, self._reader.bounds().oldest), here - 1))

    def seek_after_id(self, id: int) -> None:
        bounds = self._reader.bounds()
        newest = bounds.end - 1
        seq = newest - id_distance(newest % ID_COUNT, id) if newest >= 0 else -1
        if not bounds.oldest <= seq <= newest:
            raise PositionError(f"{self.path} holds no message with id {id}")
        self._reader.seek(seq + 1)

    def append(self, messages: Messages, payloads: Sequence[bytes], first: int) -> int:
        if not self._may_write:
            raise Unsupported(f"{self.path} was opened for reading only")
        with self._writers.current(self.path) as writer:
            try:
                return self._append(writer, messages, payloads, first)
            except Closed:
                # Created anew. What went to the old one is gone with it, as all that was there.
                other = self._writers.renew(self.path)
                return self._append(other, messages, payloads, first + self.appended)

    def _append(
        self, writer: WideWriter, messages: Messages, payloads: Sequence[bytes], first: int
    ) -> int:
        kinds = set(zip(messages.types, messages.subtypes, strict=True))
        last: int | None = None
        before = writer.statistics().messages
        try:
            if len(kinds) == 1 and not any(messages.times):
                last = writer.write_many(payloads[first:], *kinds.pop())
            else:
                for row in range(first, len(payloads)):
                    moment = messages.times[row] * _SECOND or None
                    last = writer.write(
                        payloads[row], messages.types[row], messages.subtypes[row], moment
                    )
        finally:
            self.appended = writer.statistics().messages - before
        return (last or 0) % ID_COUNT

    def set_blocking(self) -> None:
        raise Unsupported(
            f"{self.path} is a wide queue: its writer waits for held readers",
            hint="name the readers that it is to wait for with hold=",
        )

    def _give_back_writer(self) -> None:
        if self._may_write:
            self._may_write = False
            self._writers.put_back(self.path)

    def close(self) -> None:
        self._give_back_writer()
        self._reader.close()
