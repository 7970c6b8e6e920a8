"""How does a test look at a table of named positions from outside, and stop its user?"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.queue import cursor_file, cursors
from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import CursorTable
from support.roles import Role

__all__ = [
    "HEADER",
    "Start",
    "at_every_line",
    "descriptors",
    "in_child",
    "killed_at",
    "memory_of",
    "names",
]

#: Starts another process of `support.cursor_roles`: its role, and its arguments by name.
Start = Callable[..., Role]
HEADER = 4096
MODULES = {module.__file__ for module in (cursors, cursor_file)}


@contextlib.contextmanager
def memory_of(path: str) -> Iterator[memoryview]:
    """The table's bytes, as native code would have them."""
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        view = memoryview(mapped)
        table = view[HEADER:]
        try:
            yield table
        finally:
            table.release()
            view.release()


def names(file: CursorFile | CursorTable) -> list[str]:
    return [entry.name for entry in file.entries()]


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(str(link.readlink()))
    return found


def in_child(work: Callable[[], object]) -> int:
    """Do it in a forked process; return how that ended, as of `os.waitstatus_to_exitcode`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_every_line(look: Callable[[], object], work: Callable[[], object]) -> None:
    """Do the work, and look before each line of the modules that it comes to."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in MODULES:
            return None
        if event == "line":
            look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do it in a process that is killed at the `step`th line of the modules, if it comes so far."""

    def doomed() -> None:
        lines = itertools.count(1)

        def look() -> None:
            if next(lines) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        at_every_line(look, work)

    code = in_child(doomed)
    assert code in (0, -signal.SIGKILL)
    return code != 0
