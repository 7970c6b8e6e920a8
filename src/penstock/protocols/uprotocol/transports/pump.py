"""How are single messages handed over in batches, and again when that fails?"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from penstock.core.errors import Closed, WriteTimeout
from penstock.core.overflow import BoundedBuffer, OverflowPolicy
from penstock.core.retry import Backoff
from penstock.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BATCH", "Pump", "hand_over"]

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Messages per batch, at most.
BATCH: Final = 1024
#: Bytes in the queue, at most; a single message may have more.
_MOST_BYTES: Final = 64 << 20
#: If a message follows a batch within this time (seconds), wait for a fuller batch.
_IN_STREAM: Final = 0.002
_LINGER: Final = 0.001
#: Pauses between attempts after a failure.
_BACKOFF: Final = Backoff(initial=0.05, maximum=2.0)
_random = random.Random()  # noqa: S311 - spreads load, keeps no secret


def hand_over(
    take: Callable[[Sequence[T]], None],
    batch: Sequence[T],
    stopping: threading.Event,
    on_failure: Callable[[], None] = lambda: None,
) -> bool:
    """Call `take` until it succeeds; return False if it is closed, or `stopping` is set.

    After a disk error the messages are kept and not acknowledged, which slows down the transport.
    """
    failures = 0
    while True:
        try:
            take(batch)
        except Closed:
            return False  # there is nobody any more who could take them
        except Exception:
            failures += 1
            delay = _BACKOFF.delay(failures, _random)
            log.exception("%s messages were not taken; again in %.2g s", f"{len(batch):,}", delay)
            on_failure()
            if stopping.wait(delay):
                return False
        else:
            return True


class Pump(Generic[T]):
    """A bounded queue, and a thread that passes its messages on in batches.

    :param size_of: returns the bytes of a message, which are bounded too.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[Sequence[T]], None],
        *,
        capacity: int = 4 * BATCH,
        batch: int = BATCH,
        on_failure: Callable[[], None] = lambda: None,
        size_of: Callable[[T], int] = lambda _: 0,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._take = take
        self._size_of = size_of
        self._most_bytes = most_bytes
        self._bytes = 0
        self._has_room = threading.Condition()
        self._batch = batch
        self._on_failure = on_failure
        self._is_failing = self._is_stopped = False
        self._stopping = threading.Event()
        self._buffer: BoundedBuffer[T] = BoundedBuffer(capacity, OverflowPolicy.BLOCK)
        self._worker = Worker(name, self._run, log=log).start()

    def put(self, item: T, timeout: float | None = None) -> bool:
        """Add a message; wait for room. Return False if stopped, or after the timeout."""
        size = self._size_of(item)
        with self._has_room:
            if (
                self._bytes
                and self._bytes + size > self._most_bytes
                and not self._has_room.wait_for(lambda: self._fits(size), timeout)
            ):
                return False
            self._bytes += size
        try:
            if self._buffer.put(item, timeout):
                return True
        except (Closed, WriteTimeout):
            pass
        self._leave(size)
        return False

    def _fits(self, size: int) -> bool:
        return not self._bytes or self._bytes + size <= self._most_bytes or self._is_stopped

    def _leave(self, size: int) -> None:
        with self._has_room:
            self._bytes -= size
            self._has_room.notify_all()

    def _run(self, _: Worker) -> None:
        ended = 0.0
        while not self._stopping.is_set():
            batch: list[T] = []
            try:
                batch = self._buffer.get_many(self._batch)
                # Waking for each message would cost more than handling it.
                if time.monotonic() - ended < _IN_STREAM and len(batch) < self._batch:
                    time.sleep(_LINGER)
                    batch += self._buffer.get_many(self._batch - len(batch), 0)
            except Closed:
                if not batch:
                    return
            size = sum(map(self._size_of, batch))
            if not hand_over(self._take, batch, self._stopping, self._failed):
                return
            self._leave(size)
            self._is_failing = False
            ended = time.monotonic()

    def _failed(self) -> None:
        self._is_failing = True
        self._on_failure()

    def stop(self, patience: float = 5.0) -> None:
        """Accept no more messages, and pass on the rest; drop those left after the timeout."""
        with self._has_room:
            self._is_stopped = True
            self._has_room.notify_all()
        self._buffer.close()
        if not self._is_failing:
            self._worker.join(patience)
        self._stopping.set()
        self._worker.join()
