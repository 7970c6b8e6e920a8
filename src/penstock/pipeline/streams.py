"""Which streams are behind the URLs of a source, and what of them can be read?"""

from __future__ import annotations

import glob
from typing import TYPE_CHECKING, Final

from penstock.core.endpoints import open_reader
from penstock.core.errors import NotFound
from penstock.core.position import Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.interfaces import Bounds, Reader

__all__ = ["Streams", "expand"]

_WILD: Final = frozenset("*?[")


def expand(urls: Sequence[str]) -> list[str]:
    """Return the URLs that a list of URLs and patterns (`fmq:/data/*`) stands for now, in order."""
    found: dict[str, None] = {}
    for url in urls:
        scheme, _, rest = url.partition(":")
        path, mark, options = rest.partition("?")
        if scheme not in {"fmq", "log"} or not _WILD & set(path):
            found[url] = None
            continue
        names = _names(path if scheme == "log" else f"{path}.fmq")
        if scheme == "fmq":
            names += [name.removesuffix(".stat") for name in _names(f"{path}.stat")]
        for name in sorted(names):
            found[f"{scheme}:{name.removesuffix('.fmq')}{mark}{options}"] = None
    return list(found)


def _names(pattern: str) -> list[str]:
    return glob.glob(pattern)  # noqa: PTH207 - a Path has no pattern from the root


class Streams:
    """Readers of many URLs, kept open to look at what is there."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._patterns = urls
        self._readers: dict[str, Reader] = {}

    def look(self) -> dict[str, Bounds]:
        """Return what can be read of every stream that is there now.

        :raises NotFound: there is none that a plain URL names.
        :raises Unsupported: one cannot be read again.
        """
        found = {}
        for url in expand(self._patterns):
            reader = self.reader(url)
            reader.seek(Position.END)  # it reads nothing, and so never stays with an old queue
            found[url] = reader.bounds()
        return found

    def reader(self, url: str) -> Reader:
        reader = self._readers.get(url)
        if reader is None:
            reader = self._readers[url] = open_reader(url, start=Position.END)
        return reader

    def first_at(self, url: str, time_ns: int) -> int:
        """Return the number of the first message appended at that time or later."""
        with open_reader(url, start=Position.time(time_ns)) as reader:
            number = reader.statistics().next_seq
        if number is None:
            raise NotFound(f"{url}: there is no message at that time")
        return number

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
