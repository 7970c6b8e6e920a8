"""How does a long command, or a server, end when it is told to?"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, Self, TypeVar

import typer

from penstock.core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from penstock.protocols.lrose.ds_server import DsServer

__all__ = [
    "GRACE",
    "INTERRUPTED",
    "Ending",
    "StopSign",
    "cut_off",
    "heard",
    "serve_until_stopped",
    "stop_on_signal",
]

log = logging.getLogger(__name__)

#: Exit code after Ctrl-C: the shell's code for SIGINT.
INTERRUPTED: Final = 130

#: Seconds between two checks of a server's main thread for a signal: the system may deliver it to
#: another thread, which does not wake the main thread.
_LOOK = 0.2
#: Seconds for a loop to notice the signal: a full queue or pipe may block it.
GRACE = 1.0
#: Further seconds before the process exits in spite of a blocking library call.
_LAST: Final = 1.0


class Heard:
    """When a handler of Python last dealt with a signal (monotonic seconds)."""

    def __init__(self) -> None:
        self.at = -math.inf

    def note(self) -> None:
        self.at = time.monotonic()


heard = Heard()


class StopSign:
    """Whether a signal asked the command to stop."""

    def __init__(self) -> None:
        self.is_up = False

    def __call__(self) -> bool:
        return self.is_up


class Ending:
    """Waits for Ctrl-C or SIGTERM, to end a server; in its block they do nothing else."""

    def __init__(self) -> None:
        self._is_near = threading.Event()

    def __enter__(self) -> Self:
        self._before = {
            number: signal.signal(number, self._come) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def _come(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        heard.note()
        self._is_near.set()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait for the signal, or until `is_over` returns true."""
        while not self._is_near.wait(_LOOK) and not is_over():
            pass


@contextlib.contextmanager
def stop_on_signal(
    grace: float = GRACE, held_up: Callable[[], None] | None = None
) -> Iterator[StopSign]:
    """Let Ctrl-C and SIGTERM end a loop between two messages.

    After `grace` seconds, or at a second signal, the loop is interrupted. If a library call blocks
    that too, as gRPC on a silent network does, `held_up` is called a second later, and the process
    exits at once.

    :raises KeyboardInterrupt: the loop was interrupted.
    """
    with contextlib.ExitStack() as stack:
        if held_up is not None:
            stack.enter_context(cut_off(grace, held_up))
        yield stack.enter_context(_sign_on_signal(grace))


@contextlib.contextmanager
def cut_off(
    grace: float,
    held_up: Callable[[], None],
    is_heard: Callable[[int, float], bool] = lambda *_: False,
) -> Iterator[None]:
    """Exit with the code of Ctrl-C if the block still runs after a signal, `grace` and a second.

    Python's handlers run only when the main thread returns to Python. This thread is woken by the
    wakeup file descriptor, which the C-level handler writes to.

    :param is_heard: whether a signal that came at a time (monotonic) is dealt with after all.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    is_left = threading.Event()

    def watch(_: Worker) -> None:
        while number := ours.recv(1):
            came_at = time.monotonic()
            if number[0] not in {signal.SIGINT, signal.SIGTERM} or is_left.wait(grace + _LAST):
                continue
            if not is_heard(number[0], came_at):
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
        heard.note()
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


def _forget_wakeup() -> None:
    """Let a forked process not tell its parent of its own signals."""
    with contextlib.suppress(ValueError):  # not the main thread's: there is none to forget
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)


_Server = TypeVar("_Server", bound="DsServer")


def serve_until_stopped(make: Callable[[], _Server], hello: Callable[[_Server], str]) -> _Server:
    """Serve until Ctrl-C, SIGTERM, or a client's permitted shutdown; return the closed server.

    :param hello: returns the text to print once it serves
    :raises StorageError: the address cannot be bound.
    """
    with Ending() as ending, make() as server:
        typer.echo(hello(server))
        sys.stdout.flush()
        ending.wait(server.stop_requested.is_set)
    return server
