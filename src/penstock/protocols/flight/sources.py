"""How does a server read a stream for its clients, and keep their positions?"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Replayable
from penstock.core.endpoints import open_reader
from penstock.core.errors import (
    CursorInUse,
    DamagedQueue,
    NotFound,
    Unsupported,
)
from penstock.core.overflow import DropReason
from penstock.core.position import Position, check_seek
from penstock.core.statistics import ReaderStatistics
from penstock.protocols.flight.errors import HoldLost
from penstock.protocols.flight.wire import (
    EMPTY,
    OVERHEAD,
    Located,
    Lost,
    Mark,
    Told,
    pieces_of,
)
from penstock.queue.log.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds
    from penstock.protocols.flight.access import Place
    from penstock.protocols.flight.wire import Hold

__all__ = ["Holds", "Readers", "Source", "losses_since"]

log = logging.getLogger(__name__)

#: Seconds between two checks during a wait that the client is still connected.
_SLICE: Final = 0.25
#: Messages in a batch while their size is unknown, and at most.
_FIRST_ROWS: Final = 256
_MOST_ROWS: Final = 8192

_NOTHING: Final = ReaderStatistics(0, 0, 0, 0, 0, None, 0, ())


class Source:
    """A reader of a local stream, positioned by its client."""

    def __init__(self, place: Place, options: Mapping[str, str], start: Position) -> None:
        self.place = place
        self.options = dict(options)
        reader = open_reader(place.url, start, **self.options)
        if not isinstance(reader, Replayable):  # a group
            reader.close()
            raise Unsupported(
                f"{place.name} is not shared with group= through a server",
                hint="read it so on its own machine, or alone with hold=NAME",
            )
        self._reader = reader
        self._row_bytes = 0.0
        #: Losses to report with the next batch, besides those in the reader's statistics.
        self._extra_restarts = 0
        self._extra_losses: list[Lost] = []
        try:
            self._bounds = self._reader.bounds()
            if start.anchor == "seq":
                self._check(self.mark.seq)
        except BaseException:
            self._reader.close()
            raise
        self._books = _NOTHING  # a named reader may have losses to report at the start
        #: The mark last told to the client; the reader may have moved on to a recreated queue
        #: since.
        self._told_at = self.mark

    @property
    def epoch(self) -> int:
        """The epoch of the stream that it reads."""
        return self._bounds.epoch

    @property
    def mark(self) -> Mark:
        """The mark of its position."""
        epoch, seq = self._bounds.epoch, self._reader.statistics().next_seq or 0
        known = self._reader.epoch
        if known is not None and known != epoch:
            # It reads a part from before a power failure, or one happened since the last look.
            place = self._bounds.successor(known, seq)
            return Mark(epoch=known, seq=seq) if place is None else Mark(epoch=epoch, seq=place)
        return Mark(epoch=epoch, seq=seq)

    def close(self) -> None:
        self._reader.close()

    def successor(self, mark: Mark) -> int | None:
        """Return the current mark for one of an earlier epoch; see `Bounds.successor`."""
        return self._bounds.successor(mark.epoch, mark.seq)

    def seek(self, position: Position) -> None:
        """Move to a position.

        :raises PositionError: it is beyond the end.
        """
        if position.anchor == "seq":
            self._renew_bounds()
            self._check(position.value)
        self._reader.seek(position)
        self._renew_bounds()
        self._books = self._reader.statistics()
        self._told_at = self.mark

    def _check(self, seq: int) -> None:
        """Check that a number from a client is not beyond the next message."""
        check_seek(self.place.url, seq, self._bounds.oldest, self._bounds.end)

    def stand_at(self, mark: Mark | None) -> None:
        """Resume at the mark of a client, of this epoch of the stream or of an earlier one.

        :raises PositionError: the mark is beyond the end of this epoch.
        """
        self._renew_bounds()
        if mark is None:
            self.seek(Position.START)
        elif mark.epoch != self._bounds.epoch:
            cut = self.successor(mark)
            if cut is None:
                self._extra_restarts += 1
                self._extra_losses += self._lost_in_earlier_life(mark)
            # From its first message on: what it has overwritten already is counted as lost.
            self.seek(Position.sequence(0 if cut is None else cut))
        elif mark != self._told_at:
            self.seek(Position.sequence(mark.seq))

    def _lost_in_earlier_life(self, mark: Mark) -> list[Lost]:
        """Return what a log still had after a mark when it was recreated, if that is known."""
        with suppress(DamagedQueue, Unsupported):
            settings = load_settings(self.place.path)  # a queue has none
            before = None if settings is None else settings.previous
            if before is not None and before.epoch == mark.epoch and before.head > mark.seq:
                return [Lost(first=mark.seq, last=before.head - 1, reason=DropReason.RECREATED)]
        return []

    def located(self) -> Located:
        bounds = self._renew_bounds()
        newest = self._reader.newest_seq()
        lineage = tuple(Mark(epoch=epoch, seq=end) for epoch, end in bounds.lineage)
        return Located(
            mark=self.mark, oldest=bounds.oldest, end=bounds.end, newest=newest, lineage=lineage
        )

    def _renew_bounds(self) -> Bounds:
        try:
            self._bounds = self._reader.bounds()
        except NotFound:  # it was removed; its reader still has some of it
            books = self._reader.statistics()
            end = max(self._bounds.end, (books.next_seq or 0) + books.backlog)
            self._bounds = self._bounds._replace(end=end)
        return self._bounds

    # --- reading --------------------------------------------------------------------------------

    def chunks(
        self, wait: float, chunk: int, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[Batch, Told]]:
        """Yield the existing messages in chunks; wait up to `wait` seconds for the first.

        Ends with the last message that existed at the start, so that the client can report its
        position.
        """
        end = self._renew_bounds().end
        batch = self._first(wait, chunk, should_stop)
        if not batch.num_rows:
            yield EMPTY, self.told()
            return
        end = max(end, self._bounds.end)
        while batch.num_rows:
            self._learn(batch)
            told, waiting = self.told(), None
            # The report belongs to all pieces together, so only the last one moves the mark.
            for piece in pieces_of(batch, chunk):
                if waiting is not None:
                    yield waiting, Told(mark=told.mark, end=told.end, more=True)
                waiting = piece
            yield waiting, told
            if should_stop() or told.restarts or told.mark.seq >= end:
                return
            batch = self._reader.read_batch(self._rows(chunk), 0)
        yield EMPTY, self.told()

    def _first(self, wait: float, chunk: int, should_stop: Callable[[], bool]) -> Batch:
        deadline = time.monotonic() + wait
        batch = self._reader.read_batch(self._rows(chunk), 0)
        while not batch.num_rows and not should_stop():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            batch = self._reader.read_batch(self._rows(chunk), min(left, _SLICE))
        return batch

    def _rows(self, chunk: int) -> int:
        """Estimate how many messages fill a chunk, from the size of the latest."""
        if not self._row_bytes:
            return _FIRST_ROWS
        return max(1, min(_MOST_ROWS, int(chunk / self._row_bytes)))

    def _learn(self, batch: Batch) -> None:
        self._row_bytes = max(OVERHEAD, batch.nbytes / batch.num_rows)

    def told(self) -> Told:
        """Return what happened since the last report."""
        before, books = self._books, self._reader.statistics()
        is_known = self._reader.epoch in {None, self._bounds.epoch}
        if books.restarts != before.restarts or not is_known:
            self._renew_bounds()
            books = self._reader.statistics()
        self._books = books
        extra, self._extra_losses = self._extra_losses, []
        restarts, self._extra_restarts = self._extra_restarts, 0
        self._told_at = self.mark
        return Told(
            mark=self._told_at,
            end=max(self._bounds.end, books.next_seq or 0),
            filtered=books.filtered - before.filtered,
            restarts=books.restarts - before.restarts + restarts,
            lost=books.lost - before.lost + sum(each.last - each.first + 1 for each in extra),
            losses=(*extra, *losses_since(before, books))[-1000:],
        )


def losses_since(before: ReaderStatistics, now: ReaderStatistics) -> tuple[Lost, ...]:
    """Return the ranges that were lost between two readings of a reader's statistics.

    The statistics merge adjacent ranges, so the loss is counted back from the newest.
    """
    missing = now.lost - before.lost
    found: list[Lost] = []
    for loss in reversed(now.losses):
        if missing <= 0:
            break
        first = max(loss.first, loss.last - missing + 1)
        found.append(Lost(first=first, last=loss.last, reason=loss.reason))
        missing -= loss.last - first + 1
    return tuple(reversed(found))


# --- readers between two calls --------------------------------------------------------------------


class Readers:
    """Readers kept open between the calls of their clients. Safe to share between threads.

    They are only a cache: a client sends its position with each call.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, tuple[float, Source]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, id: str, place: Place, options: dict[str, str]) -> Source | None:
        """Remove and return the reader of a client, if one for this stream and options is kept."""
        with self._lock:
            _, source = self._idle.pop(id, (0.0, None))
        if source is not None and (source.place.path, source.options) != (place.path, options):
            source.close()
            return None
        return source

    def place_of(self, id: str) -> Place | None:
        """Return the place that the reader of a client reads, if it is kept."""
        with self._lock:
            _, source = self._idle.get(id, (0.0, None))
        return None if source is None else source.place

    def keep(self, id: str, source: Source) -> None:
        with self._lock:
            before = self._idle.pop(id, None)
            self._idle[id] = (time.monotonic(), source)
            late = [] if before is None else [before]
            while len(self._idle) > self._limit:
                late.append(self._idle.popitem(last=False)[1])
        for _, each in late:
            each.close()

    def forget(self, id: str) -> None:
        with self._lock:
            kept = self._idle.pop(id, None)
        if kept is not None:
            kept[1].close()

    def expire(self, idle: float) -> None:
        before = time.monotonic() - idle
        with self._lock:
            late = [id for id, (since, _) in self._idle.items() if since < before]
        for id in late:
            self.forget(id)

    def close(self) -> None:
        with self._lock:
            kept, self._idle = list(self._idle.values()), OrderedDict()
        for _, each in kept:
            each.close()


# --- named places ---------------------------------------------------------------------------------


#: Seconds until the name of a dead client is free for another.
_TIME_TO_LEAVE: Final = 0.5
_LOOK_FOR_LEAVING: Final = 0.05


class _Held:
    """A held name. It reads nothing: it stands at the last acknowledgement of its client."""

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
        """Return its position, and whether the stream was recreated."""
        with self._lock:
            return self._source.told()

    def move(self, done: Mark) -> None:
        with self._lock:
            self.last_used = time.monotonic()
            if self._is_closed:
                raise HoldLost(self._name)
            if self._source.epoch != done.epoch:
                # The stream was recreated, or continues after a power failure: reopen it.
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
    """The held names of all clients. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[Path, str], _Held] = {}
        #: Each is used once: the end of a reader that has left releases no name of the next one.
        self._leases = itertools.count(1)

    def __len__(self) -> int:
        return len(self._held)

    def take(self, place: Place, asked: Hold) -> tuple[int, Told]:
        """Hold a name for a reader; return the lease, and where the reader starts.

        :raises CursorInUse: the name is held for another reader.
        """
        deadline = time.monotonic() + _TIME_TO_LEAVE
        while (taken := self._take(place, asked)) is None:
            if time.monotonic() >= deadline:
                raise CursorInUse(asked.name, 0, hint="another client reads by this name")
            time.sleep(_LOOK_FOR_LEAVING)
        lease, held = taken
        try:
            if asked.done is not None:
                held.move(asked.done)
            return lease, held.told()
        except BaseException:
            self.release(place, asked.name, lease)  # its client does not know of it
            raise

    def _take(self, place: Place, asked: Hold) -> tuple[int, _Held] | None:
        with self._lock:
            held = self._held.get((place.path, asked.name))
            if held is not None and held.reader != asked.reader:
                return None
            if held is None:
                held = self._held[place.path, asked.name] = _Held(place, asked)
            # A client that reconnects takes over its own lease.
            held.lease = next(self._leases)
            return held.lease, held

    def move(self, place: Place, name: str, reader: str, done: Mark | None) -> None:
        """Acknowledge everything before a mark.

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
        """Release a name, unless another lease took over."""
        with self._lock:
            held = self._held.get((place.path, name))
            if held is None or held.lease != lease:
                return
            del self._held[place.path, name]
        held.close()

    def forget(self, reader: str) -> None:
        """Release the names of a reader that has left."""
        with self._lock:
            left = {key: held for key, held in self._held.items() if held.reader == reader}
            for key in left:
                del self._held[key]
        for held in left.values():
            held.close()

    def expire(self, idle: float) -> None:
        """Release the names of readers without a call for `idle` seconds."""
        before = time.monotonic() - idle
        with self._lock:
            late = {key: held for key, held in self._held.items() if held.last_used < before}
            for key in late:
                del self._held[key]
        for (_, name), held in late.items():
            log.warning("%s: nothing heard of reader %s, not held any more", held.place.name, name)
            held.close()

    def close(self) -> None:
        """Release all names; each keeps its position for the return of its reader."""
        with self._lock:
            held, self._held = list(self._held.values()), {}
        for each in held:
            each.close()
