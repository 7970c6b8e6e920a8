"""How does a writer wait for the readers that it must not overtake?"""

from __future__ import annotations

import math
import time
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.core.errors import InvalidOption, Unsupported, WriteTimeout
from penstock.core.overflow import QueueFull
from penstock.queue.wide.options import Policy
from penstock.queue.wide.queue_file import reader_table

if TYPE_CHECKING:
    from penstock.queue.cursors import CursorEntry
    from penstock.queue.wide._ring import RingWriter
    from penstock.queue.wide.options import WideOptions
    from penstock.queue.wide.queue_file import QueueFile

__all__ = ["Holding"]

#: A reader that died moves no more and wakes nobody: look this often (seconds).
_LOOK_FOR_DEATH: Final = 0.1
#: Readers that one writer can wait for (PENSTOCK_HELD_MAX).
_MOST_HELD: Final = 128


class Holding:
    """The readers that a writer waits for, and what it does when they are behind."""

    def __init__(self, writer: RingWriter, file: QueueFile, options: WideOptions) -> None:
        if len(options.hold) > _MOST_HELD:
            raise InvalidOption("hold", len(options.hold), f"names {_MOST_HELD} readers at most")
        self._writer: RingWriter = weakref.proxy(writer)  # which has this one
        self._file = file
        self._options = options
        self._call = (-1, -1)
        self._deadline = math.inf
        if not file.geometry.readers:
            raise Unsupported(f"queue {file.path} was created without a reader table")
        self._table = reader_table(file)
        epoch, oldest = file.field("epoch"), file.field("tail")
        for name in options.hold:  # a row for each, so that one that comes later starts here
            self._table.reserve(name, epoch=epoch, seq=oldest)
        self._look_again()

    def make_room(self, *, is_full: bool) -> None:
        """Return when it is worth trying again.

        :raises WriteTimeout: a reader stayed behind for the time allowed.
        :raises QueueFull: a reader is behind, and the policy is to fail.
        """
        if not is_full:
            self._look_again()
            return
        timeout = self._options.timeout
        deadline = self._deadline_of_call()
        while not self._writer._sleep_for_room(  # noqa: SLF001 - a part of the writer
            0.0 if self._is_impatient() else min(_LOOK_FOR_DEATH, deadline - time.monotonic())
        ):
            if self._look_again():
                return
            if self._is_impatient():
                raise QueueFull(self._file.geometry.slots, hint=f"it waits for {self._slowest()}")
            if time.monotonic() >= deadline:
                raise WriteTimeout(
                    f"waited {timeout:g} s for {self._slowest()}",
                    hint="it is slower than the writer, or has stopped; policy=drop overwrites",
                )

    def _deadline_of_call(self) -> float:
        """Return when the patience of this call ends, however often it has to wait."""
        writer = self._writer
        call = writer._messages, writer._refused  # noqa: SLF001 - they change with every call
        if call != self._call:
            self._call = call
            timeout = self._options.timeout
            self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        return self._deadline

    def _is_impatient(self) -> bool:
        return self._options.policy is Policy.FAIL

    def _look_again(self) -> bool:
        """Find out who is to be waited for; tell whether that changed anything."""
        changes = self._file.field("holders")
        held = self._held()
        before = self._writer._limit  # noqa: SLF001
        waits = [] if self._options.policy is Policy.DROP else [entry.index for entry in held]
        self._writer._wait_for(np.array(waits, np.uint32), changes)  # noqa: SLF001
        return self._writer._limit > before  # noqa: SLF001

    def _held(self) -> list[CursorEntry]:
        entries = (self._table.find(name) for name in self._options.hold)
        return [e for e in entries if e is not None and (e.alive or self._options.keep)]

    def _slowest(self) -> str:
        held = self._held()
        if not held:
            return "a reader that has just left"
        slowest = min(held, key=lambda entry: entry.seq)
        who = f"process {slowest.pid}" if slowest.alive else "not there now"
        return f"reader {slowest.name} ({who}), which is at message {slowest.seq}"

    def close(self) -> None:
        self._table.close()
