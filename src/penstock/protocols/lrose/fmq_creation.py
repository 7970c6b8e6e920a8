"""May a client of the server make this queue, and in the place of what is there?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from penstock.core.errors import AlreadyExists, InvalidOption, NotFound, Unsupported
from penstock.protocols.lrose.fmq_wire import OpenMode
from penstock.queue.classic.creation import open_device
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.classic.layout import (
    BUFFER_COOKIE,
    FRAME_EXTRA,
    STATUS_MAGIC,
    STATUS_SIZE,
    stat_size,
)
from penstock.queue.options import Creation
from penstock.queue.storage import storage_errors
from penstock.queue.wide.layout import MAGIC, Geometry
from penstock.queue.wide.queue_file import file_of

if TYPE_CHECKING:
    from penstock.protocols.lrose.fmq_server import FmqServerOptions
    from penstock.protocols.lrose.fmq_wire import Init

__all__ = ["check_geometry", "check_replaceable", "creation_of"]

_CREATIONS: Final = {
    OpenMode.CREATE: Creation.ALWAYS,
    OpenMode.READ_WRITE: Creation.MISSING,
    OpenMode.READ_ONLY: None,
    OpenMode.BLOCKING_READ_ONLY: None,
    OpenMode.BLOCKING_READ_WRITE: Creation.NEVER,
}

_STATUS: Final = STATUS_MAGIC.to_bytes(4)
_WIDE: Final = MAGIC.to_bytes(8, "little")
#: Bytes at the start that tell whose they are.
_LOOK_AT: Final = STATUS_SIZE


def creation_of(init: Init, options: FmqServerOptions) -> Creation | None:
    """Return how the queue is opened for writing, or None for reading.

    :raises Unsupported: nobody may write here.
    """
    try:
        mode = OpenMode(init.open_mode)
    except ValueError:
        raise InvalidOption("openMode", init.open_mode, "must be from 0 to 4") from None
    creation = _CREATIONS[mode]
    if creation is not None and options.read_only:
        raise Unsupported("this server serves for reading only")
    return creation


def check_geometry(init: Init, options: FmqServerOptions) -> None:
    """Make sure that a queue is no larger than clients may make them.

    :raises InvalidOption: it is, or it is none.
    """
    if not 1 <= init.num_slots <= options.max_slots:
        raise InvalidOption(
            "numSlots", init.num_slots, f"this server makes 1 to {options.max_slots:,}"
        )
    whole = _bytes_of(init, options.layout)
    if init.buf_size < FRAME_EXTRA or whole > options.max_queue:
        raise InvalidOption(
            "bufSize",
            init.buf_size,
            f"this server makes queues of at most {options.max_queue:,} bytes, slots included",
            hint=None if init.buf_size < FRAME_EXTRA else f"this one would have {whole:,}",
        )


def _bytes_of(init: Init, layout: str) -> int:
    if layout == "wide":
        return Geometry.fitting(init.num_slots, init.buf_size, 0).file_size
    return stat_size(init.num_slots) + init.buf_size


def check_replaceable(path: str, layout: str) -> None:
    """Make sure that a new queue of a layout overwrites a queue, or nothing.

    LROSE's server overwrites whatever is there, for anybody who can reach its port.

    :raises AlreadyExists: there is something else.
    """
    with storage_errors("reading", path):
        if layout == "wide":
            _check(file_of(path), _head(file_of(path)), _WIDE)
        elif shared_memory_key(path) is not None:
            _check_segments(path)
        else:
            stat = _head(f"{path}.stat")
            _check(f"{path}.stat", stat, _STATUS)
            if not stat.startswith(_STATUS):  # else it is a queue, whatever its buffer is like
                _check(f"{path}.buf", _head(f"{path}.buf"), BUFFER_COOKIE)


def _check_segments(path: str) -> None:
    try:
        device = open_device(path, writable=False)
    except NotFound:
        return
    try:
        _check(path, device.read_stat(0, _LOOK_AT), _STATUS)
    finally:
        device.close()


def _head(file: str) -> bytes:
    """Return what a file begins with; nothing if there is none."""
    try:
        # A pipe of that name must not be waited for.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.read(descriptor, _LOOK_AT)
    finally:
        os.close(descriptor)


def _check(what: str, head: bytes, cookie: bytes) -> None:
    # Zeros are left by a maker that died over it.
    if not head.startswith(cookie) and head.strip(b"\0"):
        raise AlreadyExists(
            f"there is {what}, and it is no queue",
            hint="choose another name, or have it removed where the server is",
        )
