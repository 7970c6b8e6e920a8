"""Which queue is behind an `fmq:` URL?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.endpoints import Endpoint
from penstock.core.errors import InvalidOption, InvalidURL
from penstock.core.options import parse_options
from penstock.queue.classic.creation import create_queue
from penstock.queue.classic.info import describe_queue
from penstock.queue.classic.options import ClassicOptions
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.writer import ClassicWriter

if TYPE_CHECKING:
    from penstock.core.info import StreamInfo
    from penstock.core.interfaces import Reader, Writer
    from penstock.core.position import Position
    from penstock.core.url import URL

__all__ = ["FmqEndpoint"]


class FmqEndpoint(Endpoint):
    """`fmq:/path/name`: a Fast Message Queue in files or in shared memory."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        path, options = _parse(url)
        return ClassicReader(url.text, path, start, options)

    def open_writer(self, url: URL) -> Writer:
        path, options = _parse(url)
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
