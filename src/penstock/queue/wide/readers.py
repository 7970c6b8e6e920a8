"""Who reads a wide queue, and how does its writer wait for held readers?"""

from __future__ import annotations

import math
import time
import weakref
from array import array
from typing import TYPE_CHECKING, Final

from penstock.core.errors import CursorTableFull, InvalidOption, Unsupported, WriteTimeout
from penstock.core.overflow import QueueFull
from penstock.queue.cursors import CursorTable
from penstock.queue.wide import _ring
from penstock.queue.wide.layout import HEADER, LIVE_READER, PAGE, READER_SIZE
from penstock.queue.wide.options import Policy

if TYPE_CHECKING:
    from penstock.queue.cursors import Cursor, CursorEntry
    from penstock.queue.wide.file import QueueFile
    from penstock.queue.wide.options import WideOptions

__all__ = ["HeldReaders", "check_held", "claim_row", "reader_table", "tell_writers"]

#: How often (seconds) to check for dead readers, which wake no writer.
_LOOK_FOR_DEATH: Final = 0.1
#: Most readers that a writer can wait for (PENSTOCK_HELD_MAX).
_MOST_HELD: Final = 128


# --- the reader table -----------------------------------------------------------------------------


def reader_table(file: QueueFile) -> CursorTable:
    """Return the reader table of a queue."""
    rows = memoryview(file.mapping)[PAGE : PAGE + file.geometry.readers * READER_SIZE]
    return CursorTable(file.descriptor, rows, live_base=LIVE_READER, offset=PAGE)


def claim_row(
    url: str, file: QueueFile, hold: tuple[str, ...]
) -> tuple[CursorTable | None, Cursor | None]:
    """Claim a row, named if `hold` is; return table and row, each None if not available.

    :raises Unsupported: with `hold`: the queue has no writable reader table.
    :raises CursorInUse: another reader has this name.
    """
    if not file.writable or not file.geometry.readers:
        if hold:
            raise Unsupported(
                f"{url}: a held reader keeps its place in the queue's reader table, "
                "which is not there or may not be written to",
                hint="check the file's permissions, or create it with readers=…",
            )
        return None, None
    table = reader_table(file)
    try:
        return table, table.claim(hold[0] if hold else None, epoch=file.field("epoch"))
    except BaseException as error:
        if isinstance(error, CursorTableFull) and not hold:
            return table, None  # it is only missing in the list of readers
        table.close()
        raise


def tell_writers(file: QueueFile) -> None:
    """Wake writers: a held reader joined, left or moved back."""
    for field in ("holders", "room_wakes"):
        _ring.wake(file.mapping, HEADER.fields[field].offset)


# --- held readers ---------------------------------------------------------------------------------


def check_held(file: QueueFile, options: WideOptions) -> None:
    """Check that a queue can hold these readers, before anything is changed.

    :raises InvalidOption: too many readers.
    :raises Unsupported: the queue has no reader table.
    :raises DamagedQueue: the row of a reader is damaged.
    """
    if len(options.hold) > _MOST_HELD:
        raise InvalidOption("hold", len(options.hold), f"names {_MOST_HELD} readers at most")
    if not file.geometry.readers:
        raise Unsupported(f"queue {file.path} was created without a reader table")
    table = reader_table(file)
    for name in options.hold:
        table.find(name)


class HeldReaders:
    """The readers that a writer waits for, and its policy when they are behind."""

    def __init__(self, writer: _ring.RingWriter, file: QueueFile, options: WideOptions) -> None:
        self._writer: _ring.RingWriter = weakref.proxy(writer)  # it owns this object
        self._file = file
        self._options = options
        self._call = (-1, -1)
        self._deadline = math.inf
        self._table = reader_table(file)
        epoch, oldest = file.field("epoch"), file.field("tail")
        for name in options.hold:  # a row for each, so that a later reader starts here
            self._table.reserve(name, epoch=epoch, seq=oldest)
        self._look_again()

    def make_room(self, *, is_full: bool) -> None:
        """Wait until there may be room for the message.

        :raises WriteTimeout: a reader stayed behind for `timeout` seconds.
        :raises QueueFull: a reader is behind, with `policy=fail`.
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
        """Return the deadline of the current write call, which may wait several times."""
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
        """Update the readers to wait for; tell whether that made room."""
        changes = self._file.field("holders")
        held = self._held()
        before = self._writer._limit  # noqa: SLF001
        waits = [] if self._options.policy is Policy.DROP else [entry.index for entry in held]
        self._writer._wait_for(array("I", waits), changes)  # noqa: SLF001
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
