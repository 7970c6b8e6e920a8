"""How does a server read and write a local queue for its clients, classic or wide?

Messages of a classic queue are sent as they are stored: compressed ones stay compressed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.core.errors import Closed, Malformed, PenstockError, PositionError, Unsupported
from penstock.core.position import Position
from penstock.protocols.lrose.fmq_messages import Messages, encode_rows, reply_header, reply_with
from penstock.protocols.lrose.fmq_wire import SeekTo
from penstock.queue.classic.compression import Method, compress, decompress
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.classic.layout import FRAME_HEAD, ID_COUNT, Slot, id_distance
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.writer import ClassicWriter
from penstock.queue.options import Creation
from penstock.queue.wide.creation import create_from_options
from penstock.queue.wide.file import file_of
from penstock.queue.wide.options import WideOptions
from penstock.queue.wide.reader import open_wide_reader
from penstock.queue.wide.writer import open_wide_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from penstock.protocols.lrose.ds_server import Encoded
    from penstock.queue.classic.runs import Run
    from penstock.queue.wide.writer import WideWriter

__all__ = [
    "MOST_BYTES",
    "MOST_MESSAGES",
    "OPENING",
    "PLACES",
    "ServedClassic",
    "ServedQueue",
    "ServedWide",
    "WideWriters",
    "layout_of",
    "unpacked",
]

#: A reply ends with the message that goes beyond one of these (docs/specs/lrose.md 2.5).
MOST_MESSAGES: Final = 100
MOST_BYTES: Final = 1_000_000
#: Most seconds that opening a queue waits for a lock.
OPENING: Final = 5.0

#: Positions of SEEK, except BACK.
PLACES: Final = {
    SeekTo.START: Position.START,
    SeekTo.END: Position.END,
    SeekTo.LAST: Position.LAST,
}


def layout_of(path: str) -> str | None:
    """Return the layout of a queue, or None if there is no queue."""
    if os.path.exists(file_of(path)):  # noqa: PTH110 - a Path refuses some names
        return "wide"
    has_stat = os.path.exists(f"{path}.stat")  # noqa: PTH110
    return "classic" if has_stat or shared_memory_key(path) is not None else None


def unpacked(messages: Messages, limit: int) -> list[bytes]:
    """Return the payloads of messages, decompressed.

    :raises Malformed: one of them is damaged, or larger than the limit.
    """
    payloads = list(messages.payloads)
    for row, is_compressed in enumerate(messages.pre_compressed):
        if is_compressed and payloads[row]:
            said = messages.uncompressed_lens[row]
            payloads[row] = decompress(payloads[row], limit)
            if len(payloads[row]) != said:
                raise Malformed("DsFmq message", "uncompressedLen", len(payloads[row]), said)
    return payloads


class ServedQueue(ABC):
    """One client's view of a queue: a read position, and a way to append."""

    def __init__(self, path: str) -> None:
        self.path = path
        #: Messages appended by the last call of `append`, also if it failed.
        self.appended = 0
        #: Recreations of the queue before the messages that `take` returned last.
        self.restarts = 0
        #: Fast path: appends an uncompressed payload of a type and a subtype, given as a range of a
        #: buffer; returns its number, or None if it has done nothing. None where no fast path
        #: exists.
        self.append_plain: Callable[[bytearray, int, int, int, int], int | None] | None = None

    @abstractmethod
    def take(self, wanted: int, most: int) -> Encoded:
        """Return the next messages, up to the limits; only of one type if that is >= 0.

        They are the reply to a READ; `NOTHING_THERE` if there are none.
        """

    @abstractmethod
    def seek(self, place: SeekTo) -> None:
        """Move to a position."""

    @abstractmethod
    def seek_after_id(self, id: int) -> None:
        """Move after a message.

        :raises PositionError: the message does not exist.
        """

    @abstractmethod
    def append(self, messages: Messages, payloads: Sequence[bytes], first: int) -> int:
        """Append the messages from number `first` on, and return the id of the last.

        :raises LockTimeout: another writer holds the lock.
        :raises WriteTimeout: the reader that the writer waits for is behind.
        """

    @abstractmethod
    def set_blocking(self) -> None:
        """Wait for the reader from now on instead of overwriting."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


# --- classic queues -----------------------------------------------------------------------------

#: Columns of a table of slots.
_ID, _TIME, _MSG_LEN, _STORED_LEN, _TYPE, _SUBTYPE, _COMPRESS = map(
    Slot._fields.index, ("id", "time", "msg_len", "stored_len", "type", "subtype", "compress")
)

#: Those that are in an INFO, in its order: `len` is that of the payload on the wire.
_INFO_COLUMNS: Final = [_TYPE, _SUBTYPE, _STORED_LEN, _COMPRESS, _MSG_LEN, _ID, _TIME]
_LEN_OF_INFO: Final = 2

_NOTHING: Final = Messages([], [], [], [], [], [], [])


class _StoredReader(ClassicReader):
    """Reads messages as they are stored."""

    #: Recreations of the queue before the messages taken last.
    taken_restarts = 0

    def take_reply(self, wanted: int, most: int) -> Encoded:
        found: list[Messages] = []
        count = size = 0
        end = None
        while count <= most and size <= MOST_BYTES:
            restarts = self._restarts
            run = self._run_behind(found, most + 1 - count)
            if not run or (found and self._restarts != restarts):
                break  # those of another queue are for the next reply
            self.taken_restarts = self._restarts
            if end is None:
                end = self._youngest  # a filter must not follow a busy writer for ever
            lens = _wire_lens(run)
            total = size + np.cumsum(lens)
            rows = min(len(lens), int(np.searchsorted(total, MOST_BYTES, side="right")) + 1)
            self._next += rows
            self._delivered(rows, int(run.slots[:rows, _MSG_LEN].sum()))
            is_all = self._next > end or count + rows > most or total[rows - 1] > MOST_BYTES
            if is_all and not found and wanted < 0:
                reply = _reply_at_once(run, rows, lens)
                if reply is not None:
                    return reply
            part = _stored_messages(run, rows, lens, wanted)
            if part.ids:
                found.append(part)
                count += len(part.ids)
                size += sum(map(len, part.payloads))
            if self._next > end:
                break
        if len(found) == 1:
            return reply_with(found[0])
        return reply_with(Messages(*map(_joined, zip(*found, strict=True))) if found else _NOTHING)

    def _run_behind(self, found: Sequence[Messages], limit: int) -> Run | None:
        """Return the next run; None: there is none, or an error, which the next request gets."""
        try:
            return self._fetch_run(limit)
        except PenstockError:
            if not found:
                raise
            return None


def _joined(columns: Sequence[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(columns))


def _wire_lens(run: Run) -> npt.NDArray[np.int64]:
    """Return the lengths on the wire: a compressed payload has 4 to 7 bytes more."""
    slots = run.slots
    lens: npt.NDArray[np.int64] = np.where(
        slots[:, _COMPRESS] != 0, slots[:, _STORED_LEN] - FRAME_HEAD, slots[:, _MSG_LEN]
    ).astype(np.int64)
    return lens


def _reply_at_once(run: Run, rows: int, lens: npt.NDArray[np.int64]) -> bytearray | None:
    """Return the reply for messages of one length, in one copy; None: several lengths."""
    slots, lens = run.slots[:rows], lens[:rows]
    stored, size = int(slots[0, _STORED_LEN]), int(lens[0])
    if (slots[:, _STORED_LEN] != stored).any() or (lens != size).any():
        return None
    infos = slots[:, _INFO_COLUMNS]
    infos[:, _LEN_OF_INFO] = lens
    frames = np.frombuffer(run.frames, np.uint8, rows * stored).reshape(rows, stored)
    header = reply_header(2 * rows)
    return encode_rows(header, infos, frames[:, FRAME_HEAD : FRAME_HEAD + size])


def _stored_messages(run: Run, rows: int, lens: npt.NDArray[np.int64], wanted: int) -> Messages:
    slots, lens, begins = run.slots[:rows], lens[:rows], run.starts[:rows] + FRAME_HEAD
    if wanted >= 0:
        chosen = slots[:, _TYPE] == wanted
        slots, lens, begins = slots[chosen], lens[chosen], begins[chosen]
    frames = run.frames
    ends = (begins + lens).tolist()
    return Messages(
        slots[:, _TYPE].tolist(),
        slots[:, _SUBTYPE].tolist(),
        slots[:, _COMPRESS].tolist(),
        slots[:, _MSG_LEN].tolist(),
        slots[:, _ID].tolist(),
        slots[:, _TIME].tolist(),
        [frames[a:b] for a, b in zip(begins.tolist(), ends, strict=True)],
    )


class _StoredWriter(ClassicWriter):
    """Appends messages that may be compressed already; never waits."""

    def __init__(self, path: str, options: ClassicOptions) -> None:
        super().__init__(f"fmq:{path}", path, options)
        self._options = replace(options, lock_timeout=0.0, timeout=0.0)

    def set_blocking(self) -> None:
        self._options = replace(self._options, blocking=True)

    def append_stored(self, messages: Messages, payloads: Sequence[bytes], first: int) -> int:
        if len(payloads) == 1 and not messages.pre_compressed[0] and not messages.times[0]:
            seq = self._write_plain(payloads[0], messages.types[0], messages.subtypes[0])
            if seq is not None:
                return seq % ID_COUNT
        now = self._now()
        lens: Iterable[int] = map(len, payloads)
        if any(messages.pre_compressed):
            lens = [
                length if packed else len(payload)
                for payload, length, packed in zip(
                    payloads, messages.uncompressed_lens, messages.pre_compressed, strict=True
                )
            ]
        times: Iterable[int] = repeat(now, len(payloads))
        if any(messages.times):
            times = [moment or now for moment in messages.times]
        entries = list(
            zip(
                payloads,
                lens,
                messages.types,
                messages.subtypes,
                times,
                messages.pre_compressed,
                strict=True,
            )
        )
        last = self._append(entries[first:] if first else entries, now)
        return (last or 0) % ID_COUNT

    @property
    def append_plain(self) -> Callable[[bytearray, int, int, int, int], int | None]:
        return self._write_plain

    @property
    def count(self) -> int:
        """Messages appended so far."""
        return self._messages


class ServedClassic(ServedQueue):
    """A queue of LROSE's own layout."""

    def __init__(
        self,
        path: str,
        *,
        start: Position,
        creation: Creation | None,
        slots: int,
        size: int,
        compression: Method | None,
    ) -> None:
        super().__init__(path)
        self._compression = compression
        self._reader: _StoredReader | None = None
        self._writer: _StoredWriter | None = None
        if creation is not None:
            options = ClassicOptions(slots=slots, size=size, create=creation, lock_timeout=OPENING)
            self._writer = _StoredWriter(path, options)
            if compression is None:  # and stays so
                self.append_plain = self._writer.append_plain
        try:
            if creation is None:
                self._open_reader(start)
            else:
                self._start = self._fixed(start)
        except BaseException:
            self.close()
            raise

    def _fixed(self, start: Position) -> Position:
        """Return the absolute position for a reader that is opened later."""
        if start == Position.START:
            return start
        with ClassicReader(f"fmq:{self.path}", self.path, start, ClassicOptions()) as reader:
            return Position.sequence(reader.bounds().end)

    def _open_reader(self, start: Position) -> _StoredReader:
        self._reader = _StoredReader(f"fmq:{self.path}", self.path, start, ClassicOptions())
        return self._reader

    @property
    def _reading(self) -> _StoredReader:
        if self._reader is not None:
            return self._reader
        try:
            return self._open_reader(self._start)
        except PositionError:  # it was made anew, and is shorter
            return self._open_reader(Position.START)

    def take(self, wanted: int, most: int) -> Encoded:
        reply = self._reading.take_reply(wanted, most)
        self.restarts = self._reading.taken_restarts
        return reply

    def seek(self, place: SeekTo) -> None:
        if place is SeekTo.BACK:
            self._reading.seek_back()
        else:
            self._reading.seek(PLACES[place])

    def seek_after_id(self, id: int) -> None:
        self._reading.seek_after_id(id)

    def append(self, messages: Messages, payloads: Sequence[bytes], first: int) -> int:
        if self._writer is None:
            raise Unsupported(f"{self.path} was opened for reading only")
        if self._compression is not None:
            messages, payloads = self._compressed(messages, payloads)
        before = self._writer.count
        try:
            return self._writer.append_stored(messages, payloads, first)
        finally:
            self.appended = self._writer.count - before

    def _compressed(
        self, messages: Messages, payloads: Sequence[bytes]
    ) -> tuple[Messages, Sequence[bytes]]:
        """Compress uncompressed payloads, as LROSE's server does; except an empty one."""
        assert self._compression is not None
        packed, flags = list(payloads), list(messages.pre_compressed)
        for row, is_compressed in enumerate(flags):
            if not is_compressed and packed[row]:
                packed[row] = compress(packed[row], self._compression)
                flags[row] = 1
        return messages._replace(pre_compressed=flags), packed

    def set_compression(self, method: Method) -> None:
        if self._compression is not None:
            self._compression = method

    def set_blocking(self) -> None:
        if self._writer is None:
            raise Unsupported(f"{self.path} was opened for reading only")
        self._writer.set_blocking()

    def close(self) -> None:
        for each in (self._reader, self._writer):
            if each is not None:
                each.close()


# --- wide queues --------------------------------------------------------------------------------

_SECOND: Final = 1_000_000_000
#: Seconds to wait for a writer in another process; clients of the queue wait meanwhile.
_LOCK: Final = 1.0
_EXISTING: Final = WideOptions(create=Creation.NEVER, lock_timeout=_LOCK)


@dataclass(slots=True)
class _SharedWriter:
    """A writer, and the number of its users."""

    writer: WideWriter
    users: int = 1
    #: Held during an append.
    lock: threading.Lock = field(default_factory=threading.Lock)


class WideWriters:
    """The writers of wide queues, each shared by all clients: a wide queue allows only one.

    One thread at a time may call `get`; any may append and call `put_back`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: dict[str, _SharedWriter] = {}

    @contextlib.contextmanager
    def current(self, path: str) -> Iterator[WideWriter]:
        """Lend the writer of a queue, after `get`, for exclusive use."""
        shared = self._writers[path]
        with shared.lock:
            yield shared.writer

    def renew(self, path: str) -> WideWriter:
        """Replace the lent writer, since the queue was recreated; return the new one."""
        shared = self._writers[path]
        stale = shared.writer
        shared.writer = open_wide_writer(f"fmq:{path}", path, _EXISTING)
        stale.close()
        return shared.writer

    def get(self, path: str, options: WideOptions) -> None:
        """Open or share the writer of a queue; `put_back` must follow."""
        if options.create is Creation.ALWAYS:
            # Writers of the old queue switch to the new one: see `renew`.
            create_from_options(path, options, replace=True, writers_follow=True)
            options = replace(options, create=Creation.MISSING)
        with self._lock:
            if path in self._writers:
                self._writers[path].users += 1
                return
        # Not under the lock: it may take a while, and `put_back` must not wait for it.
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
        following = None
        while len(found.ids) <= most and size <= MOST_BYTES:
            try:
                message = reader.read(0)
            except PenstockError:
                if not found.ids:
                    raise
                break  # as for a classic queue
            if message is None:
                break
            if message.seq != following:
                restarts = reader.statistics().restarts
                if found.ids and restarts != self.restarts:
                    reader.seek(message.seq)
                    break  # those of another queue are for the next reply
                self.restarts = restarts
            following = message.seq + 1
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
                # Recreated. Messages appended to the old queue are gone with it.
                done = self.appended
                other = self._writers.renew(self.path)
                try:
                    return self._append(other, messages, payloads, first + done)
                finally:
                    self.appended += done

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
