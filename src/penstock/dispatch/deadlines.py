"""Until when does a request wait for its response? (spec uprotocol 3.2, 10.2)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.protocols.uprotocol import UUID7, UAttributes

__all__ = ["Deadlines", "id_key", "too_late_ms"]

#: Requests, at least, whose deadlines are known.
_REMEMBERED: Final = 50_000
#: Of a request that is not known: what SDKs give a call that says nothing else (milliseconds).
_USUAL_MS: Final = 10_000
#: Whoever calls has to hear that nobody was there before he gives up: a tenth of the ttl before its
#: end, and not more than this (milliseconds).
_LONGEST_NOTICE_MS: Final = 100


def id_key(id: UUID7) -> bytes:
    """Write an id as it is in a message: little-endian, with the tag of the second half between."""
    return id.msb.to_bytes(8, "little") + b"\x11" + id.lsb.to_bytes(8, "little")


def too_late_ms(now_ms: int, expires_ms: int, ttl: int) -> int:
    """Return when a request that was not delivered is answered instead."""
    notice = expires_ms - min(ttl // 10, _LONGEST_NOTICE_MS)
    return notice if notice > now_ms else expires_ms


class Deadlines:
    """When the ttl of the latest requests is over. Safe to share between threads."""

    def __init__(self, size: int = _REMEMBERED) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def add(self, key: bytes, expires_ms: int) -> None:
        """Remember a request by its id."""
        with self._lock:
            if len(self._new) >= self._size:
                self._old, self._new = self._new, {}
            self._new[key] = expires_ms

    def left_for(self, response: UAttributes) -> int:
        """Return the ttl of a response that has none: what its request has left, if anything."""
        id, reqid = response.id, response.reqid
        if id is None or reqid is None:
            return _USUAL_MS
        key = id_key(reqid)
        expires = self._new.get(key) or self._old.get(key) or reqid.time_ms + _USUAL_MS
        return expires - id.time_ms
