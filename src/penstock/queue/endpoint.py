"""Which queue is behind an `fmq:` URL?"""

from __future__ import annotations

import glob
import hashlib
import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.capabilities import Listable, Removable, Resizable
from penstock.core.endpoints import Endpoint, Identity, endpoint_of
from penstock.core.errors import InvalidOption, InvalidURL, Unsupported
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.queue.append_once import NotedAppends
from penstock.queue.notes import NoteFile
from penstock.queue.wide.creation import create_from_options
from penstock.queue.wide.file import SUFFIX, boot_id, file_of, groups_of
from penstock.queue.wide.options import READER_OPTIONS, WRITER_OPTIONS, WideOptions
from penstock.queue.wide.reader import open_wide_reader
from penstock.queue.wide.writer import open_wide_writer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from penstock.core.interfaces import Reader, StreamInfo, Writer
    from penstock.queue.classic.endpoint import ClassicEndpoint
    from penstock.queue.classic.repair import Repair
    from penstock.queue.wide.reader import WideReader

__all__ = ["FmqEndpoint", "check", "is_queue", "repair", "token_of"]


class FmqEndpoint(NotedAppends, Listable, Removable, Resizable, Endpoint):
    """`fmq:/path/name`: a Fast Message Queue in files or in shared memory."""

    def open_reader(self, url: URL, start: Position) -> Reader:
        if (classic := _classic(url)) is not None:
            return classic.open_reader(url, start)
        options = WideOptions.of(url)
        own = {"sync"} if options.group else set()
        _refuse(url, WRITER_OPTIONS - own, "is for writers, and would do nothing here")
        options.check_group("hold", "type", "resume")
        if options.group is None:
            return open_wide_reader(url.text, url.path, start, options)
        from penstock.queue.groups.reader import GroupReader  # noqa: PLC0415 - few need it

        path = os.path.abspath(url.path)  # noqa: PTH100 - the process may go elsewhere

        def open_stream(*, may_wait: bool) -> WideReader:
            chosen = options if may_wait else replace(options, wait=0.0)
            return open_wide_reader(url.text, path, start, chosen)

        return GroupReader(
            url.text,
            open_stream,
            groups_of(path),
            options,
            lost=DropReason.OVERRUN,
        )

    def open_writer(self, url: URL) -> Writer:
        classic = _classic(url)
        _refuse(
            url,
            READER_OPTIONS,
            "is for readers, and would do nothing here",
            hint="leave it out; the type of a message is given with it: write(…, type=5), --type 5",
        )
        if classic is not None:
            return classic.open_writer(url)
        return open_wide_writer(url.text, url.path, WideOptions.of(url))

    def create(self, url: URL, *, replace: bool = False) -> None:
        if (classic := _classic(url, creating=replace)) is not None:
            classic.create(url, replace=replace)
            return
        create_from_options(url.path, WideOptions.of(url), replace=replace, exclusive=True)

    def describe(self, url: URL) -> StreamInfo:
        if (classic := _classic(url)) is not None:
            return classic.describe(url)
        from penstock.queue.wide.info import describe_wide  # noqa: PLC0415 - for people only

        WideOptions.of(url)
        return describe_wide(url.text, url.path)

    def identity(self, url: URL) -> Identity:
        named = Identity.of(url, path=f"{url.path.removesuffix(SUFFIX)}{SUFFIX}")
        return named._replace(place=named.place.removesuffix(SUFFIX))

    def storage_of(self, url: URL) -> str | None:
        if _classic(url) is None:
            return token_of(file_of(url.path))
        path = url.path.removesuffix(SUFFIX)
        key = _shared_memory_key(path)
        return token_of(f"{path}.stat") if key is None else f"{_machine()}:shm:{key}"

    def cannot_carry(self, url: URL) -> Mapping[str, str]:
        if _classic(url) is None:
            return {}
        from penstock.queue.classic.options import CANNOT_CARRY  # noqa: PLC0415 - seldom asked

        return CANNOT_CARRY

    def notes(self, url: URL) -> NoteFile:
        # Named like a wide queue for both layouts: a log may have the name without suffix.
        return NoteFile.beside(f"{url.path.removesuffix(SUFFIX)}{SUFFIX}")

    def reread(self, url: URL) -> Reader:
        plain = replace(url, options={"trace": "false"})
        return self.open_reader(plain, Position.START)

    def remove(self, url: URL, *, force: bool = False) -> None:
        from penstock.queue.inventory import (  # noqa: PLC0415 - few need it
            check_removable,
            remove_classic,
            remove_wide,
        )

        check_removable(lambda: self.describe(url), force=force)
        if _classic(url) is None:
            remove_wide(url.path, force=force)
        else:
            remove_classic(url.path.removesuffix(SUFFIX))

    def resize(self, url: URL) -> None:
        from penstock.queue.wide.resize import resize_wide  # noqa: PLC0415 - few need it

        if _classic(url) is not None:
            raise Unsupported(
                f"{url.path} has the classic layout: LROSE's programs would not find the new one",
                hint="create it anew: penstock create --replace",
            )
        self.describe(url)
        resize_wide(url.path, WideOptions.of(url))

    def find(self, pattern: URL) -> set[str]:
        path = pattern.path.removesuffix(SUFFIX)
        return {
            pattern.with_path(name.removesuffix(suffix))
            for suffix in (SUFFIX, ".stat")
            for name in glob.glob(path + suffix)  # noqa: PTH207 - a Path has none from the root
        }


def is_queue(url: str) -> bool:
    """Tell whether a URL names a local queue, which need not exist."""
    return isinstance(endpoint_of(url), FmqEndpoint)


def token_of(path: str) -> str | None:
    """Return a token that identifies a file or directory; None: it does not exist.

    It does not depend on the path, nor reveal it: servers send it to their clients.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path raises for a name that no file can have
    except (OSError, ValueError):
        return None
    place = f"{_machine()}:{found.st_dev}:{found.st_ino}"
    return hashlib.sha256(place.encode()).hexdigest()[:32]


def _machine() -> str:
    """Return an id of this machine, unique until the next boot."""
    return boot_id().hex() or socket.gethostname()


def check(url: str) -> int:
    """Check all messages of a queue, and return their count.

    :raises DamagedQueue: names the first fault.
    """
    parsed = _queue_url(url)
    if (classic := _classic(parsed)) is not None:
        return classic.check(parsed)
    from penstock.queue.wide.recovery import check_wide  # noqa: PLC0415 - loads numpy

    WideOptions.of(parsed)
    return check_wide(parsed.path)


def repair(url: str) -> Repair:
    """Repair a damaged queue: keep its readable messages.

    :raises DamagedQueue: the queue is beyond repair; nothing was changed.
    """
    parsed = _queue_url(url)
    classic = _classic(parsed)
    if classic is None:
        place = f"fmq:{parsed.path}"
        raise InvalidURL(
            url,
            "it is a wide queue, whose next writer repairs what can be repaired",
            hint=f"copy what can be read: penstock cp '{place}?damaged=skip' fmq:/a/new/one; "
            f"if its header is damaged, empty it: penstock create --replace {place}",
        )
    return classic.repair(parsed)


def _queue_url(text: str) -> URL:
    url = URL.parse(text)
    if url.scheme != "fmq":
        raise InvalidURL(text, "it is no queue", hint="write fmq:/path/name")
    return url


def _classic(url: URL, *, creating: bool = False) -> ClassicEndpoint | None:
    """Return the classic endpoint if the queue has, or is to get, the classic layout.

    :raises InvalidURL: the URL names no local queue.
    :raises InvalidOption: the queue has another layout than `layout=`.
    """
    if url.host is not None:
        raise InvalidURL(
            url.text, "fmq: is a queue on this machine and has no host", hint="write fmq:/path/name"
        )
    if not url.path or url.path.endswith("/"):
        raise InvalidURL(url.text, "it names no queue", hint="write fmq:/path/name")
    asked, there = url.options.get("layout"), _layout_there(url.path)
    if asked and there and asked != there and not creating:
        raise InvalidOption("layout", asked, f"the queue at {url.path} has the {there} layout")
    if (asked or there or "wide") != "classic":
        return None
    from penstock.queue.classic.endpoint import ClassicEndpoint  # noqa: PLC0415 - loads numpy

    return ClassicEndpoint()


def _layout_there(path: str) -> str | None:
    """Return the layout of an existing queue, or None."""
    # os.path, because a Path raises for a name that no file can have.
    if os.path.exists(file_of(path)):  # noqa: PTH110
        return "wide"
    if _shared_memory_key(path) is not None or os.path.exists(f"{path}.stat"):  # noqa: PTH110
        return "classic"
    return None


def _shared_memory_key(path: str) -> int | None:
    if "shmem" not in path:
        return None
    from penstock.queue.classic.device import shared_memory_key  # noqa: PLC0415 - loads numpy

    return shared_memory_key(path)


def _refuse(url: URL, options: AbstractSet[str], reason: str, *, hint: str | None = None) -> None:
    for option in sorted(options & url.options.keys()):
        raise InvalidOption(option, url.options[option], reason, hint=hint)
