"""Which queue is behind an `fmq:` URL?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.endpoints import Endpoint
from penstock.core.errors import InvalidOption, InvalidURL
from penstock.core.options import parse_options
from penstock.core.url import URL
from penstock.queue.classic.creation import create_queue, open_device
from penstock.queue.classic.device import storage_errors
from penstock.queue.classic.info import describe_queue
from penstock.queue.classic.options import READER_OPTIONS, ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.repair import Repair, check_queue, repair_queue
from penstock.queue.classic.writer import ClassicWriter

if TYPE_CHECKING:
    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer
    from penstock.core.position import Position

__all__ = ["FmqEndpoint", "check", "repair"]


class FmqEndpoint(Endpoint):
    """`fmq:/path/name`: a Fast Message Queue in files or in shared memory."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        path, options = _parse(url)
        return ClassicReader(url.text, path, start, options)

    def open_writer(self, url: URL) -> Writer:
        path, options = _parse(url)
        for option in READER_OPTIONS & url.options.keys():
            raise InvalidOption(
                option,
                url.options[option],
                "is for readers, and would do nothing here",
                hint="a message's type is given with it: write(…, type=5), put --type 5",
            )
        return ClassicWriter(url.text, path, options)

    def create(self, url: URL, *, replace: bool = False) -> None:
        path, options = _parse(url)
        create_queue(
            path,
            options.slots,
            options.size,
            SYSTEM_CLOCK.now_ns() // 1_000_000_000,
            replace=replace,
            lock_timeout=options.lock_timeout,
        ).close()

    def describe(self, url: URL) -> StreamInfo:
        path, _ = _parse(url)
        return describe_queue(url.text, path)


def check(url: str) -> int:
    """Check every byte of a queue that matters, and return how many messages it holds.

    :raises DamagedQueue: names the first thing that is wrong.
    """
    path, options = _parse(URL.parse(url))
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
    device = open_device(path, writable=True)
    try:
        with storage_errors("repairing", path), device.locked(options.lock_timeout):
            return repair_queue(device, SYSTEM_CLOCK.now_ns() // 1_000_000_000)
    finally:
        device.close()


def _parse(url: URL) -> tuple[str, ClassicOptions]:
    if url.host is not None:
        raise InvalidURL(
            url.text, "fmq: is a queue on this machine and has no host", hint="write fmq:/path/name"
        )
    if not url.path or url.path.endswith("/"):
        raise InvalidURL(url.text, "it names no queue", hint="write fmq:/path/name")
    if url.options.get("layout") == "wide":
        raise InvalidOption(
            "layout", "wide", "this version has the classic layout only", hint="use layout=classic"
        )
    return url.path, parse_options(url, ClassicOptions)
