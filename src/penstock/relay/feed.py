"""Which messages of the source are wanted, and when is that all?"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.capabilities import Replayable
from penstock.core.errors import PenstockError
from penstock.core.position import Position
from penstock.relay.patience import patiently
from penstock.relay.pieces import payload_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Reader
    from penstock.core.retry import OnRetry, RetryPolicy
    from penstock.core.statistics import ReaderStatistics
    from penstock.relay.patience import Patience
    from penstock.relay.relay_options import RelayOptions

__all__ = ["Feed"]

log = logging.getLogger(__name__)

#: While following, look this often (seconds) whether to stop.
_PATIENCE: Final = 0.5
#: Payload bytes that are moved at a time, more or less, so that large messages do not fill memory.
_BYTES_AT_ONCE: Final = 8 << 20
#: Messages of the first read, when nobody knows how large they are.
_FIRST_READ: Final = 16
#: With each read, so much of the size of the largest messages is remembered.
_FORGET: Final = 0.9
#: A time is over when it is so long (nanoseconds) ago: what was appended then can be read by now.
_OVER_NS: Final = 1_000_000_000


class Feed:
    """Reads the source, through outages, up to where it shall end. For one thread at a time."""

    def __init__(
        self,
        reader: Reader,
        options: RelayOptions,
        patience: Patience,
        policy: RetryPolicy,
        on_outage: OnRetry,
        on_return: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._options = options
        self._patience = patience
        self._policy = policy
        self._on_outage = on_outage
        self._on_return = on_return
        self._end = options.end
        self._newest: int | None = None
        if self._end in {Position.END, Position.LAST}:
            newest = reader.newest_seq()
            self._end = None if newest is None else Position.sequence(newest)
        if not options.follow and self._end is None:
            self._newest = reader.newest_seq()
        self._is_over = options.end is not None and self._end is None
        self._limit = min(options.batch, _FIRST_READ)
        self._largest = 1.0
        self._restarts = reader.statistics().restarts
        #: The life of the source that numbers count in; None: it cannot be read again.
        self.epoch = self._epoch_now()
        #: The reader's books after the last call.
        self.books: ReaderStatistics = reader.statistics()

    def next(self) -> Batch | None:
        """Return the next messages; None: there are no more, or the relay shall stop.

        :raises StopAsked: it shall stop while the source is away.
        """
        while not self._is_over and not self._patience.should_stop():
            batch = self._read()
            if batch.num_rows:
                batch = self._cut(batch)
                if batch.num_rows:
                    return batch
            elif not self._options.follow or self._is_past():
                self._is_over = True
        return None

    def go_back(self, seq: int) -> None:
        """Stand at this message again: it was taken, and is not done."""
        with suppress(PenstockError):  # then it comes again, or was not kept anyway
            self._reader.seek(seq)

    def _read(self) -> Batch:
        timeout = _PATIENCE if self._options.follow else 0
        batch = patiently(
            lambda: self._reader.read_batch(self._limit, timeout),
            self._policy,
            self._patience,
            self._on_outage,
        )
        self._on_return()
        self.books = self._reader.statistics()  # a loss may be all that there is to tell
        if batch.num_rows:
            self._adapt(batch)
            if isinstance(self._reader, Replayable) and (known := self._reader.epoch) is not None:
                self.epoch = known
            elif self.books.restarts != self._restarts:
                self._restarts = self.books.restarts
                self.epoch = self._epoch_now()
        return batch

    def _adapt(self, batch: Batch) -> None:
        """Choose how many to read next, by how large they are."""
        self._largest = max(payload_bytes(batch) / batch.num_rows, self._largest * _FORGET, 1.0)
        self._limit = max(1, min(self._options.batch, int(_BYTES_AT_ONCE / self._largest)))

    def _cut(self, batch: Batch) -> Batch:
        """Leave out what comes behind the end."""
        if self._end is None:
            # All of what was read, although some of it came later: it would be read in vain.
            if self._newest is not None and batch.column("seq")[-1].as_py() >= self._newest:
                self._is_over = True
            return batch
        name = "seq" if self._end.anchor == "seq" else "created_ns"
        column = batch.column(name).to_numpy()
        beyond = np.flatnonzero(column > self._end.value)
        if len(beyond):
            self._is_over = True
            first = int(beyond[0])
            # A reader whose place is kept shall not count these as read.
            self.go_back(batch.column("seq")[first].as_py())
            return batch.slice(0, first)
        self._is_over = name == "seq" and int(column[-1]) == self._end.value
        return batch

    def _is_past(self) -> bool:
        """Tell whether what is waited for cannot come any more."""
        if self._end is None or self._end.anchor != "time":
            return False
        return self._patience.now_ns() > self._end.value + _OVER_NS

    def _epoch_now(self) -> int | None:
        reader = self._reader
        if not isinstance(reader, Replayable):
            return None
        known = reader.epoch
        return reader.bounds().epoch if known is None else known
