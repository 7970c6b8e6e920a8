"""How are messages of a wide queue used in place, without a copy?"""

# ruff: noqa: SLF001 - both are parts of the reader

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.queue.wide.columns import EMPTY_BATCH, Run, lent_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.batch import Batch
    from penstock.core.message import Message
    from penstock.queue.wide.reader import WideReader

__all__ = ["View", "lent_batch"]


class View:
    """A message on loan. Not a generator: that would cost more than all the rest of it."""

    __slots__ = ("_message", "_reader", "_timeout")

    def __init__(self, reader: WideReader, timeout: float | None) -> None:
        self._reader = reader
        self._timeout = timeout
        self._message: Message | None = None

    def __enter__(self) -> Message | None:
        self._message = message = self._reader._peek(self._timeout)
        return message

    def __exit__(self, kind: object, *_: object) -> None:
        message, reader = self._message, self._reader
        if message is not None and reader._oldest > message.seq and kind is None:
            reader._take_back(message.seq, message.seq, 1, len(message.payload))


@contextmanager
def lent_batch(reader: WideReader, n: int, timeout: float | None) -> Iterator[Batch]:
    """Lend up to `n` messages; see `WideReader.view_batch`."""
    run: Run | int = 0
    deadline = None if timeout is None else time.monotonic() + timeout
    while limit := reader._wait_for_run(n, deadline):
        first = reader._next
        run = lent_run(reader, reader._file, first, limit, reader._options.type)
        if isinstance(run, int):
            n = reader._meet_bad(run) or n
            continue
        reader._pass(first, run)
        if len(run.batch):
            break
        run = 0  # all of these are filtered out: go on to those that are wanted
    if isinstance(run, int):
        yield EMPTY_BATCH
        return
    yield run.batch
    if reader._oldest > first:
        # As a whole: nobody knows which of them the caller was at when it happened.
        reader._filtered -= run.count - len(run.batch)
        reader._take_back(first, first + run.count - 1, len(run.batch), run.size)
