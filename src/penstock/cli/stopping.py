"""How does a long command end when it is told to?"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

from penstock.cli.output import note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Ending", "StopSign", "progress_told", "stop_on_signal"]

#: How often (seconds) a server's main thread looks whether a signal came: the system may give it to
#: another thread, and that wakes nobody.
_LOOK = 0.2
#: Seconds that a loop has to see the sign: it may be held up, by a full queue or a full pipe.
_GRACE = 1.0


class StopSign:
    """Whether somebody asked us to stop."""

    def __init__(self) -> None:
        self.is_up = False

    def __call__(self) -> bool:
        return self.is_up


class Ending:
    """The end of a server, which Ctrl-C or SIGTERM brings."""

    def __init__(self) -> None:
        self._is_near = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._is_near.set())

    def wait(self) -> None:
        """Return when the signal has come."""
        while not self._is_near.wait(_LOOK):
            pass


@contextlib.contextmanager
def stop_on_signal(grace: float = _GRACE) -> Iterator[StopSign]:
    """Let Ctrl-C and SIGTERM end a loop between two messages.

    A loop that does not end within the seconds of `grace`, or a second signal, is ended at once.

    :raises KeyboardInterrupt: it was ended at once.
    """
    sign = StopSign()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        sign.is_up = True
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, before[one])
        signal.setitimer(signal.ITIMER_REAL, grace)

    handlers = {
        signal.SIGINT: stop,
        signal.SIGTERM: stop,
        signal.SIGALRM: signal.default_int_handler,
    }
    before = {one: signal.getsignal(one) for one in handlers}
    for one, handler in handlers.items():
        signal.signal(one, handler)
    try:
        yield sign
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one, earlier in before.items():
            signal.signal(one, earlier)


@contextlib.contextmanager
def progress_told(progress: Callable[[], str]) -> Iterator[None]:
    """When the block ends early, say how far it came: with the error, or alone after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"penstock: interrupted; {progress()}")
        raise
    except Exception as error:
        error.add_note(progress())
        raise
