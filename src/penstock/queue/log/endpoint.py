"""Which log is behind a `log:` URL?"""

from __future__ import annotations

import glob
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.capabilities import Listable, Removable
from penstock.core.endpoints import Endpoint, Identity, endpoint_of
from penstock.core.errors import InvalidOption, InvalidURL
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.queue.append_once import NotedAppends
from penstock.queue.endpoint import token_of
from penstock.queue.log.consumer import open_log_member, open_log_reader
from penstock.queue.log.creation import create_log
from penstock.queue.log.info import describe_log, list_segments
from penstock.queue.log.options import READER_OPTIONS, WRITER_OPTIONS, LogOptions
from penstock.queue.log.recovery import check_log
from penstock.queue.log.retention import Limits, Trimmed, trim
from penstock.queue.log.segments import is_log
from penstock.queue.log.settings import load_settings
from penstock.queue.log.writer import open_log_writer
from penstock.queue.notes import NoteFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from penstock.core.interfaces import Reader, StreamInfo, Writer
    from penstock.queue.log.info import Listed
    from penstock.queue.log.recovery import Checked

__all__ = ["LogEndpoint", "check", "names_log", "segments", "trim_log"]


class LogEndpoint(NotedAppends, Listable, Removable, Endpoint):
    """`log:/path/name`: a durable log in that directory."""

    oldest_go_by = DropReason.RETENTION

    def open_reader(self, url: URL, start: Position) -> Reader:
        folder, options = _parse(url)
        _refuse(
            url,
            WRITER_OPTIONS - ({"sync"} if options.group else set()),
            "is for writers, and would do nothing here",
        )
        options.check_group("cursor", "hold", "type", "resume")
        open_kind = open_log_reader if options.group is None else open_log_member
        return open_kind(url.text, folder, start, options)

    def open_writer(self, url: URL) -> Writer:
        folder, options = _parse(url)
        _refuse(
            url,
            READER_OPTIONS,
            "is for readers, and would do nothing here",
            hint="leave it out; the type of a message is given with it: write(…, type=5), --type 5",
        )
        return open_log_writer(url.text, folder, options)

    def create(self, url: URL, *, replace: bool = False) -> None:
        folder, options = _parse(url)
        create_log(folder, options, replace=replace)

    def describe(self, url: URL) -> StreamInfo:
        folder, _ = _parse(url)
        return describe_log(url.text, folder)

    def identity(self, url: URL) -> Identity:
        return Identity.of(url, path=url.path.rstrip("/"))

    def storage_of(self, url: URL) -> str | None:
        return token_of(str(_parse(url)[0]))

    def notes(self, url: URL) -> NoteFile:
        return NoteFile.beside(url.path.rstrip("/"))

    def reread(self, url: URL) -> Reader:
        plain = replace(url, options={"trace": "false"})
        return self.open_reader(plain, Position.START)

    def remove(self, url: URL, *, force: bool = False) -> None:
        from penstock.queue.inventory import (  # noqa: PLC0415 - few need it
            check_removable,
            remove_log,
        )

        check_removable(lambda: self.describe(url), force=force)
        remove_log(_parse(url)[0], force=force)

    def find(self, pattern: URL) -> set[str]:
        found = glob.glob(pattern.path.rstrip("/"))  # noqa: PTH207 - a Path has none from the root
        return {pattern.with_path(path) for path in found if is_log(Path(path))}


def names_log(url: str) -> bool:
    """Tell whether a URL names a local log, which need not exist."""
    return isinstance(endpoint_of(url), LogEndpoint)


def segments(url: str) -> list[Listed]:
    """List the segments of a log, the oldest first.

    :raises NotFound: there is no log at this path.
    """
    return list_segments(_folder(url))


def check(url: str) -> Iterator[Checked]:
    """Check every message of a log, segment by segment.

    :raises NotFound: there is no log at this path.
    """
    return check_log(_folder(url))


def trim_log(url: str, limits: Limits | None = None) -> Trimmed:
    """Remove the oldest segments, by the given limits or else the log's own.

    Safe while the log is written and read.

    :raises NotFound: there is no log at this path.
    :raises StorageError: the operating system reports an error.
    """
    folder = _folder(url)
    list_segments(folder)
    settings = load_settings(folder)
    if limits is None:
        limits = Limits() if settings is None else Limits(settings.retain, settings.retain_age)
    return trim(folder, limits, settings)


def _folder(text: str) -> Path:
    url = URL.parse(text)
    if url.scheme != "log":
        raise InvalidURL(text, "it is no log", hint="write log:/path/name")
    return _parse(url)[0]


def _parse(url: URL) -> tuple[Path, LogOptions]:
    if url.host is not None:
        raise InvalidURL(
            url.text, "log: is a log on this machine and has no host", hint="write log:/path/name"
        )
    folder = url.path.rstrip("/")
    if not folder:
        raise InvalidURL(url.text, "it names no log", hint="write log:/path/name")
    return Path(folder), LogOptions.of(url)


def _refuse(url: URL, options: AbstractSet[str], reason: str, *, hint: str | None = None) -> None:
    for option in sorted(options & url.options.keys()):
        raise InvalidOption(option, url.options[option], reason, hint=hint)
