"""How do messages that come one by one get to a taker in batches, also when it fails?"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.core.errors import Closed, WriteTimeout
from penstock.core.overflow import BoundedBuffer, OverflowPolicy
from penstock.core.retry import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BATCH", "Pump", "hand_over"]

log = logging.getLogger(__name__)

T = TypeVar("T")

#: The most messages that are handed over at once.
BATCH: Final = 1024

#: Messages that follow so soon (seconds) after a batch are a stream, of which some are awaited.
_IN_STREAM: Final = 0.002
_LINGER: Final = 0.001

#: Between attempts to hand over what was refused.
_BACKOFF: Final = Backoff(initial=0.05, maximum=2.0)


def hand_over(
    take: Callable[[Sequence[T]], None],
    batch: Sequence[T],
    stopping: threading.Event,
    on_failure: Callable[[], None] = lambda: None,
) -> bool:
    """Call `take` until it returns; False if it never will: it is closed, or `stopping` was set.

    A failed disk is no reason to forget what nobody else has: the transport is told nothing, and
    is slowed down by that.
    """
    delays = _BACKOFF.delays(random.Random())  # noqa: S311 - spreads load, keeps no secret
    while True:
        try:
            take(batch)
        except Closed:
            return False  # there is nobody any more who could take them
        except Exception:
            delay = next(delays)
            log.exception("%s messages were not taken; again in %.2g s", f"{len(batch):,}", delay)
            on_failure()
            if stopping.wait(delay):
                return False
        else:
            return True


class Pump(Generic[T]):
    """A bounded queue, and a thread that hands over what is in it."""

    def __init__(
        self,
        name: str,
        take: Callable[[Sequence[T]], None],
        *,
        capacity: int = 4 * BATCH,
        batch: int = BATCH,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._take = take
        self._batch = batch
        self._on_failure = on_failure
        self._is_failing = False
        self._stopping = threading.Event()
        self._buffer: BoundedBuffer[T] = BoundedBuffer(capacity, OverflowPolicy.BLOCK)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T, timeout: float | None = None) -> bool:
        """Add one, and wait for room; False when it was stopped, or there was none in time."""
        try:
            return self._buffer.put(item, timeout)
        except (Closed, WriteTimeout):
            return False

    def _run(self) -> None:
        ended = 0.0
        while not self._stopping.is_set():
            batch: list[T] = []
            try:
                batch = self._buffer.get_many(self._batch)
                # Waking for each message of a stream would cost more than the messages do.
                if time.monotonic() - ended < _IN_STREAM and len(batch) < self._batch:
                    time.sleep(_LINGER)
                    batch += self._buffer.get_many(self._batch - len(batch), 0)
            except Closed:
                if not batch:
                    return
            if not hand_over(self._take, batch, self._stopping, self._failed):
                return
            self._is_failing = False
            ended = time.monotonic()

    def _failed(self) -> None:
        self._is_failing = True
        self._on_failure()

    def stop(self, patience: float = 5.0) -> None:
        """Take no more, and hand over what is left; drop what is not taken in that time."""
        self._buffer.close()
        is_own = self._thread is threading.current_thread()
        if not is_own and not self._is_failing:
            self._thread.join(patience)
        self._stopping.set()
        if not is_own:
            self._thread.join()
