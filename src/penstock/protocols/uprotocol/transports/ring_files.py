"""How do messages get into a ring without overwriting, and out of it at least once?"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from penstock.core.endpoints import create, open_reader, open_writer
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
from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.transports.pumping import BATCH, hand_over

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.core.interfaces import Reader, Writer
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = ["HOLDER", "RingReceiver", "RingSender", "place_of"]

log = logging.getLogger(__name__)

#: Between attempts to read a ring that cannot be read.
_BACKOFF: Final = Backoff(initial=0.1, maximum=10.0)

#: The reader that writers wait for, unless the URL names another.
HOLDER: Final = "uprotocol"

#: Rings that are kept open for writing.
_MOST_OPEN: Final = 256
#: While nothing comes, the receiving thread looks this often (seconds) whether it is to stop.
_LOOK: Final = 0.1

_FIELDS: Final = ("{authority}", "{ue_id}", "{ue_version}")
#: How a writer opens a ring: never ahead of the reader, also of one that is not there now.
_WRITING: Final = {
    "create": "never",
    "hold": HOLDER,
    "keep": "true",
    "policy": "fail",
    "lock_timeout": "1s",
}


def _defaults(url: str, wanted: dict[str, str]) -> dict[str, Any]:
    """Return the options that the URL leaves open.

    :raises InvalidURL: it is not the URL of a ring.
    """
    parsed = URL.parse(url)
    if parsed.scheme != "fmq":
        raise InvalidURL(url, "it is not a ring", hint="write fmq:/path/name")
    return {name: value for name, value in wanted.items() if name not in parsed.options}


def place_of(template: str, address: UUri) -> str:
    """Fill {authority}, {ue_id} and {ue_version} of a URL in, as a UUri writes them.

    :raises ValueError: the authority is not a file's name.
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
    """One ring that is written to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.writer: Writer | None = None

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class RingSender:
    """Appends to the rings of receivers. Safe to share between threads."""

    def __init__(self, template: str) -> None:
        self._template = template
        self.is_shared = not any(field in template for field in _FIELDS)
        self._options = _defaults(template, _WRITING)
        self._lock = threading.Lock()
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._is_closed = False

    def send(self, address: UUri, payloads: Sequence[bytes]) -> tuple[int, UStatus | None]:
        """Append all or the first of them; return how many, and why not the next one."""
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
    """A thread that reads a ring and hands batches over; acknowledged when they are taken."""

    def __init__(self, name: str, url: str, take: Callable[[Sequence[bytes]], None]) -> None:
        self._take = take
        self._url = url
        self._stopping = threading.Event()
        self.failures = 0
        self._thread = threading.Thread(
            target=self._run, args=(_open(url),), name=name, daemon=True
        )
        self._thread.start()

    def _run(self, first: Reader) -> None:
        delays = _BACKOFF.delays(random.Random())  # noqa: S311 - spreads load, keeps no secret
        reader: Reader | None = first
        while not self._stopping.is_set():
            try:
                self._follow(reader or _open(self._url))
            except _Stopped:
                return
            except (PenstockError, OSError):
                # Whoever sends would go on into a ring that nobody reads.
                delay = next(delays)
                log.exception("%s cannot be read; again in %.2g s", self._url, delay)
                self._failed()
                self._stopping.wait(delay)
            reader = None

    def _follow(self, reader: Reader) -> None:
        # Left by an error, the reader forgets what it was working on: that comes again.
        with reader:
            while not self._stopping.is_set():
                messages = reader.read_many(BATCH, _LOOK)
                if not messages:
                    continue
                payloads = [message.payload for message in messages]
                if not hand_over(self._take, payloads, self._stopping, self._failed):
                    raise _Stopped
                reader.acknowledge()

    def _failed(self) -> None:
        self.failures += 1

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


class _Stopped(Exception):
    """The batch at hand was not taken."""


def _open(url: str) -> Reader:
    """Open a ring to read from, and make it if there is none."""
    options = _defaults(url, {"hold": HOLDER})
    with contextlib.suppress(AlreadyExists):
        directory = os.path.dirname(URL.parse(url).path)  # noqa: PTH120 - any bytes
        if directory:
            os.makedirs(directory, exist_ok=True)  # noqa: PTH103
        create(url, **_defaults(url, {"writers": "many"}), replace=False)
    return open_reader(url, Position.START, **options)
