"""How does a server keep a reader's named place for a client, and when does it let go?"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.errors import CursorInUse, NotFound
from penstock.core.position import Position
from penstock.protocols.flight.errors import HoldLost
from penstock.protocols.flight.sources import Source

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.protocols.flight.places import Place
    from penstock.protocols.flight.wire import Hold, Mark, Told

__all__ = ["Holds"]

log = logging.getLogger(__name__)

#: A client that died is noticed within this time (seconds), and the name is free for the next.
_TIME_TO_LEAVE: Final = 0.5
_LOOK_FOR_LEAVING: Final = 0.05


class _Held:
    """A named place. It reads nothing: it stands where its client says that it is done."""

    def __init__(self, place: Place, asked: Hold) -> None:
        self.place = place
        self.reader = asked.reader
        self.lease = 0
        self.last_used = time.monotonic()
        self._name = asked.name
        self._lock = threading.Lock()
        self._is_closed = False
        self._source = self._open(asked.at.position())

    def _open(self, start: Position) -> Source:
        return Source(self.place, {"hold": self._name}, start)

    def told(self) -> Told:
        """Say where it stands, and whether the stream is another one by now."""
        with self._lock:
            return self._source.told()

    def move(self, done: Mark) -> None:
        with self._lock:
            self.last_used = time.monotonic()
            if self._is_closed:
                raise HoldLost(self._name)
            if self._source.epoch != done.epoch:
                # The stream was created anew, or goes on after a power failure: nobody has the one
                # that is held any more.
                self._source.close()
                self._is_closed = True  # until the new one is held
                self._source = self._open(Position.START)
                self._is_closed = False
            place = self._source.successor(done)
            if place is not None:
                with suppress(NotFound):  # removed, and its names with it
                    self._source.seek(Position.sequence(place))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._source.close()


class Holds:
    """The named places of all clients. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[Path, str], _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, place: Place, asked: Hold) -> tuple[int, Told]:
        """Hold a name for a reader; return which lease that is, and where the reader begins.

        :raises CursorInUse: it is held for another reader.
        """
        deadline = time.monotonic() + _TIME_TO_LEAVE
        while (taken := self._take(place, asked)) is None:
            if time.monotonic() >= deadline:
                raise CursorInUse(asked.name, 0, hint="another client reads by this name")
            time.sleep(_LOOK_FOR_LEAVING)
        lease, held = taken
        if asked.done is not None:
            held.move(asked.done)
        return lease, held.told()

    def _take(self, place: Place, asked: Hold) -> tuple[int, _Held] | None:
        with self._lock:
            held = self._held.get((place.path, asked.name))
            if held is not None and held.reader != asked.reader:
                return None
            if held is None:
                held = self._held[place.path, asked.name] = _Held(place, asked)
            # A client that comes again after its connection broke takes over from itself.
            held.lease += 1
            return held.lease, held

    def move(self, place: Place, name: str, reader: str, done: Mark | None) -> None:
        """Note that everything before a mark is done with.

        :raises HoldLost: the name is not held for this reader.
        """
        with self._lock:
            held = self._held.get((place.path, name))
        if held is None or held.reader != reader:
            raise HoldLost(name)
        if done is None:
            held.last_used = time.monotonic()
        else:
            held.move(done)

    def is_current(self, place: Place, name: str, lease: int) -> bool:
        """Tell whether a lease is the latest of its name."""
        held = self._held.get((place.path, name))
        return held is not None and held.lease == lease

    def release(self, place: Place, name: str, lease: int) -> None:
        """Let go of a name, unless another lease took over."""
        with self._lock:
            held = self._held.get((place.path, name))
            if held is None or held.lease != lease:
                return
            del self._held[place.path, name]
        held.close()

    def forget(self, reader: str) -> None:
        """Let go of the names of a reader that has left."""
        with self._lock:
            left = {key: held for key, held in self._held.items() if held.reader == reader}
            for key in left:
                del self._held[key]
        for held in left.values():
            held.close()

    def expire(self, idle: float) -> None:
        """Let go of names whose readers were not heard of for so many seconds."""
        before = time.monotonic() - idle
        with self._lock:
            late = {key: held for key, held in self._held.items() if held.last_used < before}
            for key in late:
                del self._held[key]
        for (_, name), held in late.items():
            log.warning("%s: nothing heard of reader %s, not held any more", held.place.name, name)
            held.close()

    def close(self) -> None:
        """Let go of all of them; each keeps its position, for when its reader comes back."""
        with self._lock:
            held, self._held = list(self._held.values()), {}
        for each in held:
            each.close()
