"""How does a server read a stream for a client, a run at a time, and tell all that happened?"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.batch import batch_from_messages
from penstock.core.capabilities import Replayable
from penstock.core.endpoints import open_reader
from penstock.core.errors import DamagedQueue, NotFound, Unsupported
from penstock.core.overflow import DropReason
from penstock.core.position import Position, check_seek
from penstock.core.statistics import ReaderStatistics
from penstock.protocols.flight.pieces import OVERHEAD, pieces_of
from penstock.protocols.flight.wire import Located, Lost, Mark, Told
from penstock.queue.log.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Bounds
    from penstock.protocols.flight.places import Place

__all__ = ["EMPTY", "Source", "losses_since"]

EMPTY: Final = batch_from_messages([])

#: A wait looks this often (seconds) whether the client is still there.
_SLICE: Final = 0.25
#: Messages in a batch before their size is known, and at most.
_FIRST_ROWS: Final = 256
_MOST_ROWS: Final = 8192

_NOTHING: Final = ReaderStatistics(0, 0, 0, 0, 0, None, 0, ())


class Source:
    """One reader of a stream on this machine, which goes where its client says."""

    def __init__(self, place: Place, options: Mapping[str, str], start: Position) -> None:
        self.place = place
        self.options = dict(options)
        reader = open_reader(place.url, start, **self.options)
        assert isinstance(reader, Replayable)  # as all that a server has
        self._reader = reader
        self._row_bytes = 0.0
        #: Told with the next batch, beside what the reader's own books say.
        self._extra_restarts = 0
        self._extra_losses: list[Lost] = []
        try:
            self._bounds = self._reader.bounds()
            if start.anchor == "seq":
                self._check(self.mark.seq)
        except BaseException:
            self._reader.close()
            raise
        self._books = _NOTHING  # a named reader may have something to tell from the beginning

    @property
    def epoch(self) -> int:
        """Which life of the stream it is in."""
        return self._bounds.epoch

    @property
    def mark(self) -> Mark:
        """Where it stands."""
        epoch, seq = self._bounds.epoch, self._reader.statistics().next_seq or 0
        known = self._reader.epoch
        if known is not None and known != epoch:
            # It reads a part of before a power failure; or there was one since it was looked at.
            place = self._bounds.successor(known, seq)
            return Mark(epoch=known, seq=seq) if place is None else Mark(epoch=epoch, seq=place)
        return Mark(epoch=epoch, seq=seq)

    def close(self) -> None:
        self._reader.close()

    def successor(self, mark: Mark) -> int | None:
        """Return where a mark of an earlier life is now; see `Bounds.successor`."""
        return self._bounds.successor(mark.epoch, mark.seq)

    def seek(self, position: Position) -> None:
        """Stand at a position.

        :raises PositionError: it is beyond the end.
        """
        if position.anchor == "seq":
            self._renew_bounds()
            self._check(position.value)
        self._reader.seek(position)
        self._renew_bounds()
        self._books = self._reader.statistics()

    def _check(self, seq: int) -> None:
        """Make sure that a number from outside is one that the stream has had, or the next."""
        check_seek(self.place.url, seq, self._bounds.oldest, self._bounds.end)

    def stand_at(self, mark: Mark | None) -> None:
        """Go on where a client was, in this life of the stream or in an earlier one.

        :raises PositionError: the mark is beyond the end of this life.
        """
        self._renew_bounds()
        if mark is None:
            self.seek(Position.START)
        elif mark.epoch != self._bounds.epoch:
            cut = self.successor(mark)
            if cut is None:
                self._extra_restarts += 1
                self._extra_losses += self._lost_in_earlier_life(mark)
            self.seek(Position.START if cut is None else Position.sequence(cut))
        elif mark != self.mark:
            self.seek(Position.sequence(mark.seq))

    def _lost_in_earlier_life(self, mark: Mark) -> list[Lost]:
        """Return what a log still had behind a mark when it was created anew, if that is known."""
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
        """Yield what is there now; wait some seconds for the first, if need be.

        Ends with what was there when it began, so that a client gets to say where it is.
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
            # Each is a whole only with what the books say, so only the last one moves the mark.
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
        """Return how many messages will about fill a chunk, going by the latest."""
        if not self._row_bytes:
            return _FIRST_ROWS
        return max(1, min(_MOST_ROWS, int(chunk / self._row_bytes)))

    def _learn(self, batch: Batch) -> None:
        self._row_bytes = max(OVERHEAD, batch.nbytes / batch.num_rows)

    def told(self) -> Told:
        """Say what happened since it was said last."""
        before, books = self._books, self._reader.statistics()
        is_known = self._reader.epoch in {None, self._bounds.epoch}
        if books.restarts != before.restarts or not is_known:
            self._renew_bounds()
            books = self._reader.statistics()
        self._books = books
        extra, self._extra_losses = self._extra_losses, []
        restarts, self._extra_restarts = self._extra_restarts, 0
        return Told(
            mark=self.mark,
            end=max(self._bounds.end, books.next_seq or 0),
            filtered=books.filtered - before.filtered,
            restarts=books.restarts - before.restarts + restarts,
            lost=books.lost - before.lost + sum(each.last - each.first + 1 for each in extra),
            losses=(*extra, *losses_since(before, books))[-1000:],
        )


def losses_since(before: ReaderStatistics, now: ReaderStatistics) -> tuple[Lost, ...]:
    """Return the ranges that were lost between two looks at a reader's books.

    Ranges that touch are one in the books, so they are counted back from the newest.
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
