"""Which messages of a ring were read, and wait because nobody took them yet?

A ring is acknowledged up to the first of them. Where that would hold back all that came since,
they are written to a file beside the ring, and wait there for whoever opens the ring next.
"""

from __future__ import annotations

import logging
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.whole_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from penstock.core.message import Message

__all__ = ["Left"]

log = logging.getLogger(__name__)

_MAGIC: Final = b"PNUNHERD"
#: Magic, crc32 of what follows.
_HEADER: Final = struct.Struct("<8sI")
_SIZE: Final = struct.Struct("<I")


class _InRing(NamedTuple):
    seq: int
    payload: bytes
    #: Bytes that were read before it.
    before: int


class Left:
    """Messages that nobody took yet, each known by a token. Safe to share between threads."""

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
        """Return what is in the file, with tokens; a file that is damaged is set aside."""
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
        """Hear that the ring is read from what was acknowledged on: all in it comes again."""
        with self._lock:
            self._in_ring.clear()

    def add(self, message: Message) -> int:
        """Enter a message that was read; return its token."""
        with self._lock:
            self._tokens += 1
            self._in_ring[self._tokens] = _InRing(message.seq, message.payload, self._read)
            self._read += len(message.payload)
            self._last = message.seq
            return self._tokens

    def forget(self, token: int) -> None:
        """Hear that a message was taken."""
        with self._lock:
            if self._in_ring.pop(token, None) is None:
                self._is_stale |= self._in_file.pop(token, None) is not None

    def __contains__(self, token: object) -> bool:
        return token in self._in_ring or token in self._in_file

    @property
    def oldest(self) -> int | None:
        """The number of the first of them in the ring; None: there is none."""
        with self._lock:
            first = next(iter(self._in_ring.values()), None)
            return None if first is None else first.seq

    def look_after(self, messages: int, size: int) -> None:
        """Write them to the file if so many messages, or bytes, were read since the first.

        :raises OSError: the file cannot be written; then they stay where they are.
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
