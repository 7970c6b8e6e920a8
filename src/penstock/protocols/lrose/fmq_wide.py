"""How does a server read and write a wide queue for its clients?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.core.errors import PositionError, Unsupported
from penstock.protocols.lrose.fmq_queues import MOST_BYTES, OPENING, PLACES, ServedQueue
from penstock.protocols.lrose.fmq_wire import Messages, SeekTo
from penstock.queue.classic.layout import ID_COUNT, id_distance
from penstock.queue.wide.opening import open_wide_reader, open_wide_writer
from penstock.queue.wide.options import WideOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.position import Position
    from penstock.queue.options import Creation
    from penstock.queue.wide.writer import WideWriter

__all__ = ["ServedWide", "WideWriters"]

_SECOND: Final = 1_000_000_000


class WideWriters:
    """The writers of wide queues, one each for all clients: a wide queue has one at a time."""

    def __init__(self) -> None:
        self._writers: dict[str, tuple[WideWriter, int]] = {}

    def get(self, path: str, options: WideOptions) -> WideWriter:
        writer, users = self._writers.get(path, (None, 0))
        if writer is None:
            writer = open_wide_writer(f"fmq:{path}", path, options)
        self._writers[path] = (writer, users + 1)
        return writer

    def put_back(self, path: str) -> None:
        writer, users = self._writers[path]
        if users > 1:
            self._writers[path] = (writer, users - 1)
        else:
            del self._writers[path]
            writer.close()


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
        self._writer: WideWriter | None = None
        if creation is not None:
            options = WideOptions(
                slots=max(slots, 2),
                size=size,
                create=creation,
                writers="many",
                lock_timeout=OPENING,
            )
            self._writer = writers.get(path, options)
        try:
            self._reader = open_wide_reader(f"fmq:{path}", path, start, WideOptions())
        except BaseException:
            self._give_back_writer()
            raise

    def take(self, wanted: int, most: int) -> Messages:
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
        return found

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
        writer = self._writer
        if writer is None:
            raise Unsupported(f"{self.path} was opened for reading only")
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
        if self._writer is not None:
            self._writer = None
            self._writers.put_back(self.path)

    def close(self) -> None:
        self._give_back_writer()
        self._reader.close()
