"""How does a test interrupt a call, by a signal or as one would?"""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

    from penstock.core.capabilities import InPlaceReader
    from penstock.core.interfaces import Reader

__all__ = ["Interrupted", "interrupted_after", "interrupted_at_call", "interrupted_at_line", "take"]


class Interrupted(BaseException):
    """As `KeyboardInterrupt`: not an error of what it interrupts."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise `Interrupted` in the body that long after it began, unless it is done before."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise Interrupted

    gc.disable()  # what is raised within a finalizer gets to nobody
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.enable()


@contextmanager
def interrupted_at_line(
    number: int, folder: str, meanwhile: Callable[[], object] | None = None
) -> Iterator[itertools.count[int]]:
    """Raise `Interrupted` before a line of the modules in `folder` is run, counted from now on.

    :param meanwhile: what a signal handler does before it raises
    :return: counts the lines
    """
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if f"/{folder}/" not in frame.f_code.co_filename:
            return None
        if event in {"call", "line"} and next(lines) == number:
            sys.settrace(None)
            if meanwhile is not None:
                meanwhile()
            raise Interrupted(f"line {frame.f_lineno} of {frame.f_code.co_filename}")
        return trace

    gc.disable()  # as above
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)
        gc.enable()


@contextmanager
def interrupted_at_call(number: int, folder: str) -> Iterator[None]:
    """Raise `Interrupted` where CPython handles signals, in the modules in `folder`.

    That is where a function of theirs begins, or one in C has returned to them.
    """
    calls = itertools.count(1)

    def profile(frame: FrameType, event: str, _: object) -> None:
        if f"/{folder}/" not in frame.f_code.co_filename or event not in {"call", "c_return"}:
            return
        if next(calls) == number:
            sys.setprofile(None)
            raise Interrupted(f"line {frame.f_lineno} of {frame.f_code.co_filename}")

    gc.disable()  # as above
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def take(reader: Reader, by: str, found: list[int]) -> None:
    """Add the numbers of all messages to `found`, as the calls return them."""
    while True:
        match by:
            case "one":
                message = reader.read(0)
                taken = [] if message is None else [message.seq]
            case "many":
                taken = [each.seq for each in reader.read_many(100)]
            case "batch":
                taken = reader.read_batch(100).column("seq").to_pylist()
            case "view":
                with cast("InPlaceReader", reader).view_batch(100) as batch:
                    numbers = batch.column("seq").to_pylist()
                    found += numbers  # its end may be interrupted, too
                if numbers:
                    continue
                taken = []
            case _:
                taken = []
                found.extend(each.seq for each in reader.available())
        found += taken
        if not taken:
            return
