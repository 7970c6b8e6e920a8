"""How does something work beside its caller, end when it is told to, and never die unnoticed?"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Self

from penstock.core.retry import Backoff

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ["Worker"]


class Worker:
    """One background thread with a name, a job and a way to end.

    The job is called with the worker, in its thread. It has one of three forms:

    * a loop, which waits and checks `is_stopping`. A `wait` ends at once when the worker is told
      to stop; a loop that waits for something else, as a socket, needs `rouse`.
    * a round: it is called every `every` seconds, and at each `wake`.
    * a single task, after which the worker ends.

    An exception is logged under the worker's name, kept as `error` and passed to `on_failure`.
    Rounds, and a loop with `restart`, continue after growing delays (`backoff`); others end.
    """

    def __init__(
        self,
        name: str,
        job: Callable[[Worker], object],
        *,
        log: logging.Logger,
        every: float | None = None,
        restart: bool = False,
        backoff: Backoff | None = None,
        rouse: Callable[[], None] | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self.name = name
        #: The last exception of the job.
        self.error: Exception | None = None
        self._job = job
        self._log = log
        self._every = every
        self._goes_on = restart or every is not None
        self._backoff = backoff or Backoff()
        self._rouse = rouse
        self._on_failure = on_failure
        self._rng = random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._failures = 0
        self._is_stopping = False
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None

    # --- for its owner ------------------------------------------------------------------------

    def start(self) -> Self:
        """Start, or restart after the end; a no-op while it runs.

        :raises RuntimeError: the system has no thread left.
        """
        if not self.is_alive:
            self._is_stopping = False
            # A daemon: a process that ends without `stop` must not wait for it.
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
            self._thread = thread
        return self

    @property
    def is_alive(self) -> bool:
        """Whether its thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def wake(self) -> None:
        """End its wait: the next round starts now."""
        self._woken.set()

    def ask_to_stop(self) -> None:
        """Tell it to stop, without waiting for the end."""
        self._is_stopping = True
        self._woken.set()
        if self._rouse is not None:
            self._rouse()

    def stop(self, timeout: float | None = None) -> bool:
        """Tell it to stop and wait for its end; False: it still runs after `timeout` seconds."""
        self.ask_to_stop()
        return self.join(timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for its end; False: it still runs. In its own thread, returns True at once."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout)
        return not thread.is_alive()

    # --- for its job --------------------------------------------------------------------------

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._is_stopping

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep for `seconds` or until woken; True: the worker is told to stop."""
        if not self._is_stopping:
            self._woken.wait(seconds)
            self._woken.clear()
        return self._is_stopping

    def back_off(self) -> bool:
        """Sleep after a failure, longer after each; True: the worker is told to stop."""
        self._failures += 1
        return self.wait(self._backoff.delay(self._failures, self._rng))

    def note_success(self) -> None:
        """Reset the back-off after a success."""
        self._failures = 0

    # --- its thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        if self._every is not None and self.wait(self._every):
            return
        while True:
            try:
                self._job(self)
            except Exception as error:  # noqa: BLE001 - passed to `on_failure`
                self._fail(error)
                if not self._goes_on or self.back_off():
                    return
            else:
                self._recover()
                if self._every is None or self.wait(self._every):
                    return

    def _fail(self, error: Exception) -> None:
        self.error = error
        if self._is_stopping:
            self._log.info("%s, told to stop: %s", self.name, error)
        elif self._failures:
            self._log.warning("%s fails again: %s", self.name, error)
        else:
            what = "fails, and tries again" if self._goes_on else "has failed, and ends"
            self._log.error("%s %s", self.name, what, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _recover(self) -> None:
        if self._failures:
            self._log.info("%s works again, after %d failures", self.name, self._failures)
            self._failures = 0
