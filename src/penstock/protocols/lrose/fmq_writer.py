"""How are messages appended to a remote queue, one a request or many?"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.core.batch import check_batch
from penstock.core.errors import (
    ConnectionLost,
    InvalidOption,
    MessageTooLarge,
    PenstockError,
    Unacknowledged,
)
from penstock.core.interfaces import BookedWriter
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_client import CANNOT_CARRY, QueueLink, Target, open_to_write
from penstock.protocols.lrose.fmq_messages import LARGEST_INFO, encode_message, encode_messages
from penstock.protocols.lrose.fmq_wire import Op
from penstock.queue.classic.compression import compress
from penstock.queue.classic.layout import unwrap
from penstock.queue.options import Creation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import BytesLike
    from penstock.core.stream_id import StreamId

__all__ = ["UNKNOWN", "FmqWriter"]

log = logging.getLogger(__name__)

#: `write` returns this when the server does not send the number: LROSE's never does.
UNKNOWN: Final = -1

_HEAD: Final = DsMessage(Op.WRITE)
_SECOND: Final = 1_000_000_000
_INT32: Final = range(-(2**31), 2**31)
#: A request is sent once it has this many bytes: a few hundred messages, for which the overhead of
#: a request is negligible.
_REQUEST_BYTES: Final = 1_000_000
#: A connection idle for this long (seconds) is checked before it is used.
_SILENT: Final = 0.05
#: Most parts of a request besides its messages.
_HEADER_ROOM: Final = 64


class FmqWriter(BookedWriter):
    """Appends to a queue behind a DsFmqServer, LROSE's or ours.

    A request that was not sent completely is sent again; one whose answer is lost may have been
    executed: `Unacknowledged`, unless `doubt=again` prefers duplicates to losses.
    """

    cannot_carry = CANNOT_CARRY

    def __init__(self, target: Target) -> None:
        super().__init__(target.url)
        self._target = target
        self._options = target.options
        self._method = target.options.compress.method
        self._limit = target.options.max_message - _HEADER_ROOM - LARGEST_INFO
        #: Whether a message can be sent unchanged.
        self._is_plain = self._method is None
        self._has_warned = False
        #: Messages written again after a lost answer: possible duplicates.
        self.repeated = 0
        self._link: QueueLink | None = None
        self._connect(target.options.create, 0.0)

    # --- the connection ---------------------------------------------------------------------

    def _connect(self, creation: Creation, patience: float) -> QueueLink:
        link = open_to_write(self._target, creation, patience)
        try:
            if self._method is not None:
                link.ask(Op.SET_COMPRESSION_METHOD, self._method)
            if self._options.blocking:
                link.ask(Op.SET_BLOCKING_WRITE)
        except BaseException:
            link.abandon()
            raise
        self._link = link
        self._used = time.monotonic()
        return link

    def _linked(self) -> QueueLink:
        """Return a connection that is not known to be broken."""
        link = self._link
        now = time.monotonic()
        if link is not None and (now - self._used < _SILENT or link.is_alive):
            self._used = now
            return link
        self._give_up_link()
        never = self._options.create is Creation.NEVER
        link = self._connect(Creation.NEVER if never else Creation.MISSING, self._options.retry)
        self._waited += time.monotonic() - now
        return link

    def _give_up_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.abandon()

    def _send(
        self,
        send: Callable[..., int | None],
        arguments: tuple[Any, ...],
        count: int,
        done: int,
    ) -> None:
        """Send a request; `done` messages of the same call are appended already."""
        while True:
            link = self._linked()
            try:
                id = send(link, *arguments)
            except PenstockError as error:
                self._cope(link, error, count, done)
            else:
                self._note(id, count)
                return

    def _note(self, id: int | None, count: int) -> None:
        """Count appended messages; the last one has this id."""
        self._messages += count
        near = self._last_seq
        if id is not None and near is not None and id != near + 1:
            id = unwrap(id, near)
        self._last_seq = near if id is None else id

    def _cope(self, link: QueueLink, error: PenstockError, count: int, done: int) -> None:
        """Prepare to repeat a failed request, or raise if that is not allowed.

        :raises PenstockError: it was refused, or may have been executed.
        """
        if not isinstance(error, ConnectionLost):
            self._messages += link.written or 0
            raise error
        is_sent = link.is_sent
        self._give_up_link()
        if is_sent and self._options.doubt == "raise":
            raise Unacknowledged(
                error.server,
                error.reason,
                acknowledged=done,
                in_doubt=count,
                hint="look at the end of the queue before you write them again, or open "
                "the writer with doubt=again, which may append them twice",
            ) from error
        log.warning("%s: %s; writing again", self.url, error)
        self.repeated += count if is_sent else 0

    # --- writing ----------------------------------------------------------------------------

    def write(
        self,
        payload: BytesLike | None,
        type: int = 0,
        subtype: int = 0,
        time_ns: int | None = None,
        created_ns: int | None = None,
        stream: StreamId | None = None,
        attributes: bytes | None = None,
    ) -> int:
        """Append one message; see `Writer.write`. A payload of None is LROSE's NULL message.

        Returns `UNKNOWN` (-1) if the server does not send the number: LROSE's never does.

        :raises Unacknowledged: the answer is lost; the message may be appended or not.
        """
        if (
            payload.__class__ is bytes
            and self._is_plain
            and time_ns is None
            and created_ns is None
            and stream is None
            and attributes is None
            and len(payload) <= self._limit
        ):
            return self._write_plain(payload, type, subtype)
        self._check_open()
        if stream is not None or attributes is not None:
            self._drop_header(stream, attributes)
        before = self._messages
        try:
            self._check_kind(type, subtype)
            body, length, packed = self._packed(payload)
            moment = time_ns if created_ns is None else created_ns
            request = encode_message(
                _HEAD,
                body,
                type,
                subtype,
                pre_compressed=packed,
                uncompressed_len=length,
                time=0 if moment is None else self._second(moment),
            )
            self._send(QueueLink.write, (request,), 1, 0)
        except BaseException:
            self._refused += 1 - (self._messages - before)
            raise
        self._bytes += length
        return self._last()

    def _write_plain(self, payload: bytes, type: int, subtype: int) -> int:
        """Append one message unchanged, by the fast path."""
        before = self._messages
        try:
            link, now = self._link, time.monotonic()
            if link is not None and now - self._used < _SILENT:
                self._used = now
            else:
                link = self._linked()
            try:
                id = link.write_one(payload, type, subtype)
            except PenstockError as error:
                self._cope(link, error, 1, 0)
                self._send(QueueLink.write_one, (payload, type, subtype), 1, 0)
            else:
                self._note(id, 1)
        except BaseException as error:
            self._refused += 1 - (self._messages - before)
            if isinstance(error, (OverflowError, TypeError)):
                self._check_kind(type, subtype)
            raise
        self._bytes += len(payload)
        return UNKNOWN if self._last_seq is None else self._last_seq

    def write_many(
        self, payloads: Iterable[BytesLike], type: int = 0, subtype: int = 0
    ) -> int | None:
        self._check_open()
        self._check_kind(type, subtype)
        source = iter(payloads)
        done = 0
        while chunk := list(islice(source, self._options.batch)):
            self._write_chunk(chunk, type, subtype, 0, done)
            done += len(chunk)
        return self._last() if done else None

    def write_batch(self, batch: Batch) -> int | None:
        self._check_open()
        check_batch(batch)
        for name in ("stream", "attributes"):
            dropped = len(batch) - batch.column(name).null_count
            if dropped:
                self._headers_dropped += dropped
                self._warn_of_headers()
        step = self._options.batch
        for first in range(0, len(batch), step):
            rows = batch.slice(first, step)
            times = [self._second(moment) for moment in rows.column("time_ns").to_pylist()]
            self._write_chunk(
                rows.column("payload").to_pylist(),
                rows.column("type").to_pylist(),
                rows.column("subtype").to_pylist(),
                times,
                first,
            )
        return self._last() if len(batch) else None

    def _write_chunk(
        self,
        payloads: Sequence[BytesLike],
        types: Sequence[int] | int,
        subtypes: Sequence[int] | int,
        times: Sequence[int] | int,
        done: int,
    ) -> None:
        """Write messages in one request, or in several if they are large."""
        before = self._messages
        try:
            bodies, lengths, flags = self._all_packed(payloads)
            for rows in _requests(lengths if not flags else list(map(len, bodies))):
                request = encode_messages(
                    _HEAD,
                    bodies[rows],
                    types=types if isinstance(types, int) else types[rows],
                    subtypes=subtypes if isinstance(subtypes, int) else subtypes[rows],
                    pre_compressed=flags,
                    uncompressed_lens=lengths[rows] if flags else None,
                    times=times if isinstance(times, int) else times[rows],
                )
                self._send(QueueLink.write, (request,), len(bodies[rows]), done + rows.start)
                self._bytes += sum(lengths[rows])
        except BaseException:
            self._refused += len(payloads) - (self._messages - before)
            raise

    def _all_packed(self, payloads: Sequence[BytesLike]) -> tuple[list[bytes], list[int], int]:
        """Return payloads for the wire, their plain lengths, and 1 if they are compressed."""
        if self._method is None and set(map(type, payloads)) == {bytes}:
            lengths = list(map(len, payloads))
            if max(lengths) <= self._limit:
                return list(payloads), lengths, 0  # type: ignore[arg-type]
        packed = [self._packed(payload) for payload in payloads]
        bodies, plain, flags = zip(*packed, strict=True)
        return list(bodies), list(plain), flags[0]

    def _packed(self, payload: BytesLike | None) -> tuple[bytes, int, int]:
        """Return a payload for the wire, its plain length, and 1 if it is compressed."""
        if payload is None:
            return b"", 0, 0
        if isinstance(payload, bytes):
            body = payload
        else:
            view = memoryview(payload)
            body = view.tobytes()
        length = len(body)
        if length > self._limit:
            raise MessageTooLarge(length, self._limit, hint="allow more with max_message=")
        if self._method is None:
            return body, length, 0
        return compress(body, self._method), length, 1

    def _second(self, time_ns: int) -> int:
        """Return the time for a server of ours to store; LROSE's uses its own."""
        if self._link is None or not self._link.is_ours:
            return 0
        return min(max(time_ns // _SECOND, -(2**31)), 2**31 - 1)

    def _check_kind(self, type: int, subtype: int) -> None:
        for name, value in (("type", type), ("subtype", subtype)):
            if value not in _INT32:
                raise InvalidOption(name, value, "does not fit in 32 bits")

    def _last(self) -> int:
        return UNKNOWN if self._last_seq is None else self._last_seq

    def _drop_header(self, stream: StreamId | None, attributes: bytes | None) -> None:
        self._headers_dropped += (stream is not None) + (attributes is not None)
        self._warn_of_headers()

    def _warn_of_headers(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s has no place for stream and attributes; they are dropped", self.url)

    # --- the rest ---------------------------------------------------------------------------

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._is_plain = False
            link, self._link = self._link, None
            if link is not None:
                link.close()


def _requests(lengths: list[int]) -> Iterator[slice]:
    """Divide messages into requests of similar size, within the limit unless a message is not."""
    count = len(lengths)
    total = sum(lengths) + count * LARGEST_INFO
    number = -(-total // _REQUEST_BYTES)
    if number == 1 or count == 1:
        yield slice(0, count)
        return
    ends = np.cumsum(np.array(lengths) + LARGEST_INFO)
    share = min(total / number + total / count, _REQUEST_BYTES)
    first = 0
    while first < count:
        before = int(ends[first - 1]) if first else 0
        end = max(int(np.searchsorted(ends, before + share, side="right")), first + 1)
        yield slice(first, end)
        first = end
