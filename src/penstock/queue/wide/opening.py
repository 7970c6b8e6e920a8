"""Which reader or writer does a wide queue need, and is it there yet?"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, NotFound
from penstock.core.overflow import DropReason
from penstock.queue.groups.reader import GroupReader
from penstock.queue.options import Creation
from penstock.queue.wide.compressed import CompressedReader, CompressingWriter
from penstock.queue.wide.compression import Compression
from penstock.queue.wide.creation import create_from_options
from penstock.queue.wide.layout import State
from penstock.queue.wide.queue_file import QueueFile, groups_of
from penstock.queue.wide.reader import WideReader
from penstock.queue.wide.writer import WideWriter

if TYPE_CHECKING:
    from penstock.core.position import Position
    from penstock.queue.wide.options import WideOptions

__all__ = ["open_wide_member", "open_wide_reader", "open_wide_writer"]

#: While the queue is not there yet, look this often (seconds).
_LOOK_FOR_QUEUE: Final = 0.02


def open_wide_member(url: str, path: str, start: Position, options: WideOptions) -> GroupReader:
    """Open a reader of the group that the options name; a new group begins at `start`.

    :raises NotFound: there is no such queue.
    :raises DamagedQueue: it is not readable.
    """
    path = os.path.abspath(path)  # noqa: PTH100 - the process may go elsewhere
    return GroupReader(
        url,
        lambda: open_wide_reader(url, path, start, options),
        groups_of(path),
        options,
        lost=DropReason.OVERRUN,
    )


def open_wide_reader(url: str, path: str, start: Position, options: WideOptions) -> WideReader:
    """Open a reader, of the kind that the queue needs.

    :raises NotFound: there is no such queue.
    :raises DamagedQueue: it is not readable.
    """
    if len(options.hold) > 1:
        raise InvalidOption("hold", ",".join(options.hold), "a reader has one name")
    path = os.path.abspath(path)  # noqa: PTH100 - the process may go elsewhere
    file = _open_when_there(path, options.wait)
    kind = WideReader if file.compression is Compression.NONE else CompressedReader
    return kind(url, path, start, options, file)


def _open_when_there(path: str, patience: float) -> QueueFile:
    deadline = time.monotonic() + patience
    while True:
        try:
            return QueueFile.open_to_read(path)
        except NotFound:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_FOR_QUEUE)


def open_wide_writer(url: str, path: str, options: WideOptions) -> WideWriter:
    """Open a writer, of the kind that the queue needs; make the queue if that is asked for.

    :raises NotFound: there is no such queue.
    :raises LockTimeout: another process writes to it.
    """
    path = os.path.abspath(path)  # noqa: PTH100 - the process may go elsewhere
    file = _open_or_make(path, options)
    kind = WideWriter if file.compression is Compression.NONE else CompressingWriter
    return kind(url, path, options, file)


def _open_or_make(path: str, options: WideOptions) -> QueueFile:
    if options.create is Creation.ALWAYS:
        create_from_options(path, options, replace=True)
    deadline = time.monotonic() + options.wait
    while True:
        try:
            file = QueueFile.open(path, writable=True)
        except NotFound:
            if options.create is Creation.MISSING:
                create_from_options(path, options, replace=False)
            elif time.monotonic() >= deadline:
                raise
            else:
                time.sleep(_LOOK_FOR_QUEUE)
            continue
        if file.field("state") != State.REPLACED or file.is_current():
            return file
        file.close()  # it was replaced this moment
