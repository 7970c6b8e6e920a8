"""Which queues does a server register with the data map of its machine? Spec lrose 1.16, 2.5."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import Unsupported
from penstock.protocols.lrose.datamapper_client import below_data_dir
from penstock.protocols.lrose.datamapper_registrar import Registrar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Registrations"]

#: What a map calls queues.
_DATATYPE: Final = "fmq"
#: Times in a map are whole seconds: to register more often says nothing new.
_SHORTEST: Final = 1
#: Queues that are registered at a time; each takes a thread.
_MOST: Final = 256
#: The thread of a registrar that nobody has used for so long (seconds) waits for nobody's answer.
_AT_REST: Final = 10.0


class Registrations:
    """The registrars of queues, one for all clients that ask for the same.

    Safe to share between threads.

    They outlive their clients, so that one that comes and goes does not start thread after thread
    while a map hangs.
    """

    def __init__(self, most: int = _MOST, now: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._now = now
        self._registrars: dict[tuple[str, int], Registrar] = {}
        self._users: dict[Registrar, int] = {}
        self._left_at: dict[Registrar, float] = {}
        self._lock = threading.Lock()

    def get(self, path: str, interval: int) -> Registrar:
        """Return what registers a queue, at most every so many seconds; `put_back` has to follow.

        :raises Unsupported: too many are registered already.
        """
        interval = max(interval, _SHORTEST)
        key = below_data_dir(path), interval
        with self._lock:
            registrar = self._registrars.get(key)
            if registrar is None:
                if len(self._registrars) >= self._most:
                    self._make_room()
                # Its log is no place for what a client may say as often as it likes.
                registrar = Registrar(key[0], _DATATYPE, interval=interval, level=logging.DEBUG)
                self._registrars[key] = registrar
                self._users[registrar] = 0
            self._users[registrar] += 1
            self._left_at.pop(registrar, None)
            return registrar

    def put_back(self, registrar: Registrar) -> None:
        with self._lock:
            if registrar in self._users:
                self._users[registrar] -= 1
                if not self._users[registrar]:
                    self._left_at[registrar] = self._now()

    def _make_room(self) -> None:
        latest = self._now() - _AT_REST
        rested = [each for each, left_at in self._left_at.items() if left_at <= latest]
        if not rested:
            raise Unsupported(
                f"this server registers {self._most} queues already",
                hint="register this one from the program that writes to it",
            )
        for each in rested:
            self._end(each)

    def _end(self, registrar: Registrar) -> None:
        registrar.close(patience=0)  # others wait for the lock
        del self._registrars[registrar.directory, int(registrar.interval)]
        del self._users[registrar]
        self._left_at.pop(registrar, None)

    def close(self) -> None:
        with self._lock:
            for each in list(self._users):
                self._end(each)
