"""Which queue is behind an `fmq:` URL?"""

from __future__ import annotations

import hashlib
import os
import socket
from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.endpoints import Endpoint
from penstock.core.errors import InvalidOption, InvalidURL
from penstock.core.options import parse_options
from penstock.core.url import URL
from penstock.queue.classic.creation import create_queue, open_device
from penstock.queue.classic.device import shared_memory_key
from penstock.queue.classic.info import describe_queue
from penstock.queue.classic.options import READER_OPTIONS as CLASSIC_READER_OPTIONS
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.repair import Repair, check_queue, repair_queue
from penstock.queue.classic.writer import ClassicWriter
from penstock.queue.notes import NoteFile
from penstock.queue.storage import storage_errors
from penstock.queue.wide.creation import boot_id, create_from_options
from penstock.queue.wide.info import describe_wide
from penstock.queue.wide.opening import open_wide_member, open_wide_reader, open_wide_writer
from penstock.queue.wide.options import READER_OPTIONS, WRITER_OPTIONS, WideOptions
from penstock.queue.wide.queue_file import SUFFIX, file_of
from penstock.queue.wide.verification import check_wide

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer
    from penstock.core.position import Position

__all__ = ["FmqEndpoint", "check", "repair", "token_of"]


class FmqEndpoint(Endpoint):
    """`fmq:/path/name`: a Fast Message Queue in files or in shared memory."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        path, options = _parse(url)
        if isinstance(options, ClassicOptions):
            return ClassicReader(url.text, path, start, options)
        own = {"sync"} if options.group else set()
        _refuse(url, WRITER_OPTIONS - own, "is for writers, and would do nothing here")
        options.check_group("hold", "type", "resume")
        open_kind = open_wide_reader if options.group is None else open_wide_member
        return open_kind(url.text, path, start, options)

    def open_writer(self, url: URL) -> Writer:
        path, options = _parse(url)
        _refuse(
            url,
            CLASSIC_READER_OPTIONS | READER_OPTIONS,
            "is for readers, and would do nothing here",
            hint="a message's type is given with it: write(…, type=5), put --type 5",
        )
        if isinstance(options, ClassicOptions):
            return ClassicWriter(url.text, path, options)
        return open_wide_writer(url.text, path, options)

    def create(self, url: URL, *, replace: bool = False) -> None:
        path, options = _parse(url, creating=replace)
        if isinstance(options, WideOptions):
            create_from_options(path, options, replace=replace, exclusive=True)
            return
        create_queue(
            path,
            options.slots,
            options.size,
            SYSTEM_CLOCK.now_ns() // 1_000_000_000,
            replace=replace,
            lock_timeout=options.lock_timeout,
        ).close()

    def describe(self, url: URL) -> StreamInfo:
        path, options = _parse(url)
        if isinstance(options, WideOptions):
            return describe_wide(url.text, path)
        return describe_queue(url.text, path)

    def storage_of(self, url: URL) -> str | None:
        path, options = _parse(url)
        if isinstance(options, WideOptions):
            return token_of(file_of(path))
        key = shared_memory_key(path)
        return token_of(f"{path}.stat") if key is None else f"{_machine()}:shm:{key}"

    def notes(self, url: URL) -> NoteFile:
        # By the name of a wide queue, of either layout: a log of the same name may stand beside it.
        return NoteFile.beside(f"{url.path.removesuffix(SUFFIX)}{SUFFIX}")


def token_of(path: str) -> str | None:
    """Return a token of a file or folder, whatever path led there; None: there is none.

    It tells nobody where that is: servers say it to their clients.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path raises for a name that no file can have
    except (OSError, ValueError):
        return None
    place = f"{_machine()}:{found.st_dev}:{found.st_ino}"
    return hashlib.sha256(place.encode()).hexdigest()[:32]


def _machine() -> str:
    """Return what tells this machine from others, until it is started again."""
    return boot_id().hex() or socket.gethostname()


def check(url: str) -> int:
    """Check every byte of a queue that matters, and return how many messages it holds.

    :raises DamagedQueue: names the first thing that is wrong.
    """
    path, options = _parse(URL.parse(url))
    if isinstance(options, WideOptions):
        return check_wide(path)
    device = open_device(path, writable=True)
    try:
        with storage_errors("checking", path), device.locked(options.lock_timeout):
            return check_queue(device)
    finally:
        device.close()


def repair(url: str) -> Repair:
    """Keep what can be read of a damaged queue, and make it usable again.

    :raises DamagedQueue: nothing can be told of it; nothing was changed.
    """
    path, options = _parse(URL.parse(url))
    if isinstance(options, WideOptions):
        raise InvalidURL(
            url,
            "it is a wide queue, which needs no repair: a new writer goes on where it can",
            hint="copy what can be read: penstock cp 'fmq:…?damaged=skip' fmq:/a/new/one",
        )
    device = open_device(path, writable=True)
    try:
        with storage_errors("repairing", path), device.locked(options.lock_timeout):
            return repair_queue(device, SYSTEM_CLOCK.now_ns() // 1_000_000_000)
    finally:
        device.close()


def _parse(url: URL, *, creating: bool = False) -> tuple[str, ClassicOptions | WideOptions]:
    """Return the path and the options, of the layout that is there or is asked for."""
    if url.host is not None:
        raise InvalidURL(
            url.text, "fmq: is a queue on this machine and has no host", hint="write fmq:/path/name"
        )
    if not url.path or url.path.endswith("/"):
        raise InvalidURL(url.text, "it names no queue", hint="write fmq:/path/name")
    asked, there = url.options.get("layout"), _layout_there(url.path)
    if asked and there and asked != there and not creating:
        raise InvalidOption("layout", asked, f"the queue at {url.path} has the {there} layout")
    if (asked or there or "wide") == "classic":
        return url.path.removesuffix(SUFFIX), parse_options(url, ClassicOptions)
    return url.path, parse_options(url, WideOptions)


def _layout_there(path: str) -> str | None:
    """Tell the layout of the queue that a path names, or None if there is no queue yet."""
    # os.path, because a Path raises for a name that no file can have.
    if os.path.exists(file_of(path)):  # noqa: PTH110
        return "wide"
    if shared_memory_key(path) is not None or os.path.exists(f"{path}.stat"):  # noqa: PTH110
        return "classic"
    return None


def _refuse(url: URL, options: AbstractSet[str], reason: str, *, hint: str | None = None) -> None:
    for option in sorted(options & url.options.keys()):
        raise InvalidOption(option, url.options[option], reason, hint=hint)
