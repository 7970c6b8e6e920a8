"""How do messages get into a ring without overwriting, and out of it at least once?

A ring is acknowledged up to the first message that no listener took. Before that blocks the ring,
the untaken messages are written to a file beside it, and wait there for the next process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import threading
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from urllib.parse import quote

from penstock.core.endpoints import create, describe, open_reader, open_writer
from penstock.core.errors import (
    AlreadyExists,
    InvalidURL,
    LockTimeout,
    MessageTooLarge,
    NotFound,
    PenstockError,
    WriteTimeout,
)
from penstock.core.overflow import QueueFull
from penstock.core.position import Position
from penstock.core.retry import Backoff
from penstock.core.url import URL
from penstock.core.whole_files import write_whole
from penstock.core.worker import Worker
from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.transports.interface import BATCH, hand_over
from penstock.queue.endpoint import is_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from penstock.core.interfaces import Reader, Writer
    from penstock.core.message import Message
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["HOLDER", "RingReceiver", "RingSender", "UntakenMessages", "place_of"]

log = logging.getLogger(__name__)

_MAGIC: Final = b"PNUNHERD"
#: Magic, crc32 of the body.
_HEADER: Final = struct.Struct("<8sI")
_SIZE: Final = struct.Struct("<I")
#: Pauses between attempts to read a failing ring.
_BACKOFF: Final = Backoff(initial=0.1, maximum=10.0)
#: The reader that writers wait for, unless the URL names another.
HOLDER: Final = "uprotocol"
#: Rings kept open for writing, at most.
_MOST_OPEN: Final = 256
#: Interval at which an idle receiving thread checks whether to stop (seconds).
_LOOK: Final = 0.1
_FIELDS: Final = ("{authority}", "{ue_id}", "{ue_version}")
#: Options of a writer: it never overtakes the reader, even while that is absent.
_WRITING: Final = {
    "create": "never",
    "hold": HOLDER,
    "keep": "true",
    "policy": "fail",
    "lock_timeout": "1s",
}


class _InRing(NamedTuple):
    seq: int
    payload: bytes
    #: Bytes read before it.
    before: int


class UntakenMessages:
    """Messages that no listener took yet, by token. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._tokens = 0
        #: By their tokens, in order.
        self._in_ring: dict[int, _InRing] = {}
        self._in_file: dict[int, bytes] = {}
        self._is_stale = False
        self._read = 0
        self._last = -1

    def load(self) -> list[tuple[int, bytes]]:
        """Return the messages in the file, with tokens; set aside a damaged file."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        payloads = _unpack(data)
        if payloads is None:
            aside = self._path.with_suffix(".damaged")
            log.error("%s is damaged; it is kept as %s", self._path, aside)
            self._path.replace(aside)
            return []
        for payload in payloads:
            self._tokens += 1
            self._in_file[self._tokens] = payload
        return list(self._in_file.items())

    def begin(self) -> None:
        """Forget the messages in the ring: it is read again from the acknowledged position."""
        with self._lock:
            self._in_ring.clear()

    def add(self, message: Message) -> int:
        """Add a message that was read; return its token."""
        with self._lock:
            self._tokens += 1
            self._in_ring[self._tokens] = _InRing(message.seq, message.payload, self._read)
            self._read += len(message.payload)
            self._last = message.seq
            return self._tokens

    def forget(self, token: int) -> None:
        """Remove a message that was taken."""
        with self._lock:
            if self._in_ring.pop(token, None) is None:
                self._is_stale |= self._in_file.pop(token, None) is not None

    def __contains__(self, token: object) -> bool:
        return token in self._in_ring or token in self._in_file

    @property
    def oldest(self) -> int | None:
        """The number of the oldest of them in the ring, or None."""
        with self._lock:
            first = next(iter(self._in_ring.values()), None)
            return None if first is None else first.seq

    def spill_to_file(self, messages: int, size: int) -> None:
        """Move them to the file if `messages`, or `size` bytes, were read since the oldest.

        :raises OSError: the file cannot be written; they stay in the ring.
        """
        with self._lock:
            first = next(iter(self._in_ring.values()), None)
            is_held_back = first is not None and (
                self._last - first.seq >= messages or self._read - first.before >= size
            )
            if not is_held_back and not self._is_stale:
                return
            moved = {token: it.payload for token, it in self._in_ring.items() if is_held_back}
            wanted = {**self._in_file, **moved}
            if wanted:
                write_whole(self._path, _pack(wanted.values()), sync=True)
            else:
                self._path.unlink(missing_ok=True)
            self._in_file = wanted
            self._is_stale = False
            if is_held_back:
                self._in_ring.clear()


def _pack(payloads: Iterable[bytes]) -> bytes:
    body = b"".join(part for it in payloads for part in (_SIZE.pack(len(it)), it))
    return _HEADER.pack(_MAGIC, zlib.crc32(body)) + body


def _unpack(data: bytes) -> list[bytes] | None:
    body = data[_HEADER.size :]
    if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (_MAGIC, zlib.crc32(body)):
        return None
    found = []
    at = 0
    while at < len(body):
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size
        found.append(body[at : at + size])
        at += size
    return found


def _defaults(url: str, wanted: dict[str, str]) -> dict[str, Any]:
    """Return the wanted options that the URL does not set.

    :raises InvalidURL: it is not the URL of a ring.
    """
    if not is_queue(url):
        raise InvalidURL(url, "it is not a ring", hint="write fmq:/path/name")
    said = URL.parse(url).options
    return {name: value for name, value in wanted.items() if name not in said}


def place_of(template: str, address: UUri) -> str:
    """Replace {authority}, {ue_id} and {ue_version} in a URL, in the text form of a UUri.

    :raises ValueError: the authority is not a valid file name.
    """
    name = address.authority_name
    if "{authority}" in template and (not name or not name.strip(".")):
        raise ValueError(f"the authority {name!r} names no ring")
    return (
        template.replace("{authority}", quote(name, safe=""))
        .replace("{ue_id}", f"{address.ue_id:X}")
        .replace("{ue_version}", f"{address.ue_version_major:X}")
    )


class _Place:
    """A ring to write to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.writer: Writer | None = None

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class RingSender:
    """Appends to the rings of receivers. Thread-safe."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.is_shared = not any(field in template for field in _FIELDS)
        self._options = _defaults(template, _WRITING)
        self._lock = threading.Lock()
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._is_closed = False

    def send(self, address: UUri, payloads: Sequence[bytes]) -> tuple[int, UStatus | None]:
        """Append messages in order; return how many were appended, and the first error."""
        try:
            url = place_of(self._template, address)
        except ValueError as error:
            return 0, UStatus(UCode.INVALID_ARGUMENT, str(error))
        place = self._place(url)
        with place.lock:
            if self._is_closed:
                return 0, UStatus(UCode.UNAVAILABLE, "the transport is closed")
            return self._append(place, url, payloads)

    def _append(
        self, place: _Place, url: str, payloads: Sequence[bytes]
    ) -> tuple[int, UStatus | None]:
        before = 0
        try:
            if place.writer is None:
                place.writer = open_writer(url, **self._options)
            before = place.writer.statistics().messages
            place.writer.write_many(payloads)
        except PenstockError as error:
            done = 0
            if place.writer is not None:
                done = place.writer.statistics().messages - before
            if not isinstance(error, (QueueFull, WriteTimeout, MessageTooLarge, LockTimeout)):
                place.close()  # it may be another one when it is tried again
            return done, _status(error)
        return len(payloads), None

    def _place(self, url: str) -> _Place:
        with self._lock:
            place = self._places.get(url)
            if place is None:
                place = self._places[url] = _Place()
                while len(self._places) > _MOST_OPEN and self._close_oldest():
                    pass
            else:
                self._places.move_to_end(url)
            return place

    def _close_oldest(self) -> bool:
        for url, place in self._places.items():
            if place.lock.acquire(blocking=False):
                try:
                    place.close()
                finally:
                    place.lock.release()
                del self._places[url]
                return True
        return False

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            places, self._places = list(self._places.values()), OrderedDict()
        for place in places:
            with place.lock:
                place.close()


def _status(error: PenstockError) -> UStatus:
    if isinstance(error, MessageTooLarge):
        return UStatus(UCode.RESOURCE_EXHAUSTED, str(error))
    if isinstance(error, NotFound):
        return UStatus(UCode.UNAVAILABLE, f"the receiver has made no ring yet: {error}")
    return UStatus(UCode.UNAVAILABLE, str(error))


class RingReceiver:
    """A thread that reads a ring in batches, and acknowledges them when they are taken.

    :param take: gets messages in order; returns when they are taken, or are in `left`.
    :param first: called by the same thread before it reads.
    """

    def __init__(
        self,
        name: str,
        url: str,
        take: Callable[[Sequence[Message]], None],
        left: UntakenMessages | None = None,
        first: Callable[[], None] = lambda: None,
    ) -> None:
        self._take = take
        self._left = left
        self._first = first
        self._url = url
        self._stopping = threading.Event()
        self.failures = 0
        followed = _Followed(url)
        self._worker = Worker(
            name, lambda worker: self._run(followed, worker), log=log, backoff=_BACKOFF
        ).start()

    def _run(self, first: _Followed, worker: Worker) -> None:
        ring: _Followed | None = first
        has_begun = False
        while not self._stopping.is_set():
            try:
                if not has_begun:
                    self._first()
                    has_begun = True
                followed, ring = ring or _Followed(self._url), None
                self._follow(followed)
            except _Stopped:
                return
            except (PenstockError, OSError):
                # Senders would continue to write into a ring without a reader.
                log.exception("%s cannot be read; it is tried again", self._url)
                self._failed()
                worker.back_off()
        if ring is not None:  # it was stopped before it began
            ring.__exit__(None, None, None)

    def _follow(self, ring: _Followed) -> None:
        # After an error the ring drops the current batch, which is redelivered.
        with ring:
            if self._left is not None:
                self._left.begin()
            while not self._stopping.is_set():
                messages = ring.read(BATCH, _LOOK)
                if ring.is_another:
                    return
                if messages and not hand_over(self._take, messages, self._stopping, self._failed):
                    raise _Stopped
                self._acknowledge(ring)
            self._acknowledge(ring)

    def _acknowledge(self, ring: _Followed) -> None:
        if self._left is None:
            ring.acknowledge()
            return
        try:
            self._left.spill_to_file(ring.slots // 2, ring.size // 2)
        except OSError as error:  # they stay in the ring, which is held up by them
            log.warning("%s: what nobody takes cannot be put aside: %s", self._url, error)
        ring.acknowledge(self._left.oldest)

    def _failed(self) -> None:
        self.failures += 1

    def stop(self) -> None:
        self._stopping.set()
        self._worker.stop()


class _Stopped(Exception):
    """The current batch was not taken."""


class _Followed:
    """A ring that is read ahead of what is acknowledged.

    One reader reads. The other has the name that writers wait for, and stands at the first message
    that is not taken.
    """

    def __init__(self, url: str) -> None:
        self._held = _open(url)
        try:
            at = self._held.statistics().next_seq or 0
            more = {name: it for name, it in URL.parse(url).options.items() if name != "hold"}
            self._ahead = open_reader(url.partition("?")[0], Position.sequence(at), **more)
        except BaseException:
            self._held.__exit__(*sys.exc_info())
            raise
        self._acknowledged = self._next = at
        info = describe(url)
        self.slots, self.size = info.slots or 0, info.buffer_size or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._ahead:
            self._held.__exit__(kind, error, trace)

    def read(self, limit: int, timeout: float) -> list[Message]:
        messages = self._ahead.read_many(limit, timeout)
        if messages:
            self._next = messages[-1].seq + 1
        return messages

    @property
    def is_another(self) -> bool:
        """Whether the ring was recreated, and must be reopened."""
        return self._ahead.statistics().restarts > 0

    def acknowledge(self, oldest_left: int | None = None) -> None:
        """Free the room of messages before a number, or of all that were read."""
        at = self._next if oldest_left is None else oldest_left
        if at > self._acknowledged:
            self._held.seek(at)
            self._acknowledged = at


def _open(url: str) -> Reader:
    """Open a ring for reading; create it if missing."""
    options = _defaults(url, {"hold": HOLDER})
    with contextlib.suppress(AlreadyExists):
        directory = os.path.dirname(URL.parse(url).path)  # noqa: PTH120 - any bytes
        if directory:
            os.makedirs(directory, exist_ok=True)  # noqa: PTH103
        create(url, **_defaults(url, {"writers": "many"}), replace=False)
    return open_reader(url, Position.START, **options)
