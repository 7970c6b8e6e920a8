"""The processes that write to and read from a log until they are killed.

`python -m support.log_lives` serves them (`support.lives`). Records of their reports are as in
`support.wide_lives`; and

    c   0, 0, seq       everything before this message is confirmed
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from penstock import create, open_reader, open_writer
from penstock.queue.log.endpoint import trim_log
from penstock.queue.log.retention import Limits
from support import self_describing
from support.lives import Reporter, serve
from support.peer import LAST_TYPE
from support.wide_lives import consume, follow, produce

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["LAST_TYPE"]


def work(url: str, report: str, *, at_once: int = 5, pause: float = 0.0) -> None:
    """Work on messages as a consumer with a cursor does: report them, then read on."""
    books = Reporter(report)
    with open_reader(url) as log:
        start = log.statistics().next_seq
        books.add(b"r", 0, 0, start or 0)
        while True:
            messages = log.read_many(at_once, timeout=60)
            if messages[0].seq != start:  # what was returned before is confirmed now
                books.add(b"c", 0, 0, messages[0].seq)
            ended = messages[-1].type == LAST_TYPE
            for message in messages:
                if message.type != LAST_TYPE:
                    content = self_describing.check(message.payload)
                    books.add(b"m", content.writer, content.number, message.seq)
            if pause:
                time.sleep(pause)
            if ended:
                break


def open_again_and_again(url: str, report: str) -> None:
    """Open the log, write one message and close it, until killed."""
    books = Reporter(report)
    number = 0
    while True:
        with open_writer(url) as log:
            seq = log.write(b"%d" % number)
        books.add(b"w", 0, number, seq)
        number += 1


def die_at_line(url: str, report: str, *, doing: str, at: int) -> None:
    """Do something with a log, and be killed at the n-th line of Python that it takes."""
    books = Reporter(report)
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal lines
        del argument
        if "/queue/log/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def traced(call: Callable[[], object]) -> None:
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            call()
        finally:
            sys.settrace(None)

    if doing == "roll":
        with open_writer(url) as log:
            books.add(b"r", 0, 0, 0)
            traced(lambda: log.write_many([b"x" * 1000] * 12))
            books.add(b"w", 0, 0, 0)
    elif doing == "open":
        traced(lambda: open_writer(url).close())
    elif doing == "trim":
        traced(lambda: trim_log(url, Limits(retain=0)))
    else:
        traced(lambda: create(url, replace=True))
    books.add(b"e", 0, 0, 0)


if __name__ == "__main__":
    operations = (consume, follow, produce, work, open_again_and_again, die_at_line)
    serve(
        {operation.__name__: operation for operation in operations},
        ["penstock.queue.log.endpoint", "penstock.queue.endpoint"],
    )
