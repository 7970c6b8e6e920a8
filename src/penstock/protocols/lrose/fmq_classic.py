"""How does a server read and write a classic queue for its clients?

Messages travel as they are stored: what is compressed stays so on its way.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.core.errors import Unsupported
from penstock.core.position import Position
from penstock.protocols.lrose.fmq_messages import Messages
from penstock.protocols.lrose.fmq_queues import MOST_BYTES, OPENING, PLACES, ServedQueue
from penstock.protocols.lrose.fmq_replies import reply_header, reply_with
from penstock.protocols.lrose.fmq_uniform import encode_rows
from penstock.protocols.lrose.fmq_wire import SeekTo
from penstock.queue.classic.compression import Method, compress
from penstock.queue.classic.layout import FRAME_HEAD, ID_COUNT, Slot
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.writer import ClassicWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from penstock.protocols.lrose.sessions import Encoded
    from penstock.queue.classic.copying import Run
    from penstock.queue.options import Creation

__all__ = ["ServedClassic"]

#: Columns of a table of slots.
_ID, _TIME, _MSG_LEN, _STORED_LEN, _TYPE, _SUBTYPE, _COMPRESS = map(
    Slot._fields.index, ("id", "time", "msg_len", "stored_len", "type", "subtype", "compress")
)

#: Those that are in an INFO, in its order: `len` is that of the payload on the wire.
_INFO_COLUMNS: Final = [_TYPE, _SUBTYPE, _STORED_LEN, _COMPRESS, _MSG_LEN, _ID, _TIME]
_LEN_OF_INFO: Final = 2

_NOTHING: Final = Messages([], [], [], [], [], [], [])


class _StoredReader(ClassicReader):
    """Takes messages as they are stored."""

    #: How often the queue was created anew before those that were taken last.
    taken_restarts = 0

    def take_reply(self, wanted: int, most: int) -> Encoded:
        found: list[Messages] = []
        count = size = 0
        end = None
        while count <= most and size <= MOST_BYTES:
            restarts = self._restarts
            run = self._fetch_run(most + 1 - count)
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


def _joined(columns: Sequence[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(columns))


def _wire_lens(run: Run) -> npt.NDArray[np.int64]:
    """Return the lengths on the wire: behind what is compressed there are 4 to 7 bytes more."""
    slots = run.slots
    lens: npt.NDArray[np.int64] = np.where(
        slots[:, _COMPRESS] != 0, slots[:, _STORED_LEN] - FRAME_HEAD, slots[:, _MSG_LEN]
    ).astype(np.int64)
    return lens


def _reply_at_once(run: Run, rows: int, lens: npt.NDArray[np.int64]) -> bytearray | None:
    """Return the reply with messages of one length, in one copy; None if they are of several."""
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
    """Appends messages that may be compressed already, and never waits."""

    def __init__(self, path: str, options: ClassicOptions) -> None:
        super().__init__(f"fmq:{path}", path, options)
        self._options = options.model_copy(update={"lock_timeout": 0.0, "timeout": 0.0})

    def set_blocking(self) -> None:
        self._options = self._options.model_copy(update={"blocking": True})

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
        """Return where a reader that is opened later has to stand."""
        if start == Position.START:
            return start
        with ClassicReader(f"fmq:{self.path}", self.path, start, ClassicOptions()) as reader:
            return Position.sequence(reader.bounds().end)

    def _open_reader(self, start: Position) -> _StoredReader:
        self._reader = _StoredReader(f"fmq:{self.path}", self.path, start, ClassicOptions())
        return self._reader

    @property
    def _reading(self) -> _StoredReader:
        return self._reader or self._open_reader(self._start)

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
        """Compress what the client did not, as LROSE's server does. An empty message stays so."""
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
