"""How does a long command end when it is told to?"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Final

from penstock.cli.output import note
from penstock.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = [
    "INTERRUPTED",
    "Ending",
    "StopSign",
    "progress_told",
    "stop_on_signal",
    "tell_interrupted",
]

log = logging.getLogger(__name__)

#: Exit code after Ctrl-C: what a shell says of a program that SIGINT ended.
INTERRUPTED: Final = 130

#: How often (seconds) a server's main thread looks whether a signal came: the system may give it to
#: another thread, and that wakes nobody.
_LOOK = 0.2
#: Seconds that a loop has to see the sign: it may be held up, by a full queue or a full pipe.
_GRACE = 1.0
#: Seconds more, before a call of a library that does not hear of signals is cut off.
_LAST: Final = 1.0


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

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Return when the signal has come, or it is over otherwise."""
        while not self._is_near.wait(_LOOK) and not is_over():
            pass


@contextlib.contextmanager
def stop_on_signal(
    grace: float = _GRACE, held_up: Callable[[], None] | None = None
) -> Iterator[StopSign]:
    """Let Ctrl-C and SIGTERM end a loop between two messages.

    A loop that does not end within the seconds of `grace`, or a second signal, is ended at once.
    Where a library holds it up that does not hear of signals, as gRPC on a silent network does,
    `held_up` is called a second later, and the process ends as by a kill.

    :raises KeyboardInterrupt: it was ended at once.
    """
    with contextlib.ExitStack() as stack:
        if held_up is not None:
            stack.enter_context(_cut_off(grace + _LAST, held_up))
        yield stack.enter_context(_sign_on_signal(grace))


@contextlib.contextmanager
def _cut_off(patience: float, held_up: Callable[[], None]) -> Iterator[None]:
    """End the process, with the exit code of Ctrl-C, if the block goes on so long after a signal.

    Python's own handlers run on the main thread, when it comes back to Python. What wakes this one
    is written by the system's handler.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    is_left = threading.Event()

    def watch(_: Worker) -> None:
        while (number := ours.recv(1)) and number[0] not in {signal.SIGINT, signal.SIGTERM}:
            pass
        if number and not is_left.wait(patience):
            with contextlib.suppress(Exception):
                held_up()
            os._exit(INTERRUPTED)

    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    worker = Worker("penstock-cut-off", watch, log=log).start()
    try:
        yield
    finally:
        is_left.set()
        signal.set_wakeup_fd(before)
        theirs.close()
        worker.join()
        ours.close()


@contextlib.contextmanager
def _sign_on_signal(grace: float) -> Iterator[StopSign]:
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
        tell_interrupted(progress())
        raise
    except Exception as error:
        error.add_note(progress())
        raise


def tell_interrupted(progress: str) -> None:
    """Say that a command was ended, and how far it came."""
    note(f"penstock: interrupted; {progress}")
