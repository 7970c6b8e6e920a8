"""Which streams are behind the URLs of a source, and what of them can be read?"""

from __future__ import annotations

import fnmatch
import glob
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from penstock.core.endpoints import open_reader
from penstock.core.errors import Closed, NotFound, PenstockError, Unsupported
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.pipeline.links import place
from penstock.pipeline.through_log import LiveCopy, log_for
from penstock.queue.log.segments import numbers_of
from penstock.queue.log.settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.interfaces import Bounds, Reader

__all__ = ["Streams", "expand", "is_named"]

#: A question mark begins the options of a URL.
_WILD: Final = frozenset("*[")
#: Seconds between two looks whether a silent stream is still there.
_BETWEEN_CHECKS: Final = 1.0
_BETWEEN_REMOTE_CHECKS: Final = 10.0


def expand(urls: Sequence[str]) -> list[str]:
    """Return the URLs that a list of URLs and patterns (`fmq:/data/*`) stands for now, in order."""
    found: dict[str, str] = {}  # by what they name: a stream is read once, whatever it is called
    for url in urls:
        scheme, _, rest = url.partition(":")
        path, mark, options = rest.partition("?")
        if not is_pattern(url):
            found.setdefault(_stream(url), url)
            continue
        pattern = unquote(path, errors="surrogateescape")
        names = _logs(pattern) if scheme == "log" else _queues(pattern)
        for name in sorted(names):
            escaped = name.replace("%", "%25").replace("?", "%3F")
            named = f"{scheme}:{escaped}{mark}{options}"
            found.setdefault(_stream(named), named)
    return list(found.values())


def _stream(url: str) -> str:
    same = place(url)
    return same.removesuffix(".fmq") if same.startswith("fmq:") else same


def is_pattern(url: str) -> bool:
    """Tell whether a URL stands for any number of streams."""
    scheme, _, rest = url.partition(":")
    return scheme in {"fmq", "log"} and bool(_WILD & set(rest.partition("?")[0]))


def is_named(url: str, patterns: Sequence[str]) -> bool:
    """Tell whether a URL is one of these, or one that a pattern among them may find."""
    return url in patterns or any(
        is_pattern(pattern) and fnmatch.fnmatchcase(_plain(url), _plain(pattern))
        for pattern in patterns
    )


def _plain(url: str) -> str:
    return unquote(url.partition("?")[0], errors="surrogateescape").removesuffix(".fmq")


def _queues(pattern: str) -> set[str]:
    pattern = pattern.removesuffix(".fmq")
    return {
        name.removesuffix(suffix)
        for suffix in (".fmq", ".stat")
        for name in glob.glob(pattern + suffix)  # noqa: PTH207 - a Path has none from the root
    }


def _logs(pattern: str) -> set[str]:
    found = map(Path, glob.glob(pattern))  # noqa: PTH207
    return {str(path) for path in found if (path / SETTINGS).exists() or _has_segments(path)}


def _has_segments(path: Path) -> bool:
    return path.is_dir() and bool(numbers_of(path))


class Streams:
    """Readers of many URLs, kept open to look at what is there."""

    def __init__(self, urls: Sequence[str], stage: str | None = None) -> None:
        self._patterns = urls
        self._stage = stage
        self._readers: dict[str, Reader] = {}
        self._copies: dict[str, LiveCopy] = {}
        self._epochs: dict[str, int] = {}
        #: Where each life of a stream was seen to end.
        self._ends: dict[tuple[str, int], int] = {}
        #: When a stream was last seen to be where its URL says.
        self._there: dict[str, float] = {}

    def look(self, *, may_be_removed: bool = False) -> dict[str, Bounds]:
        """Return what can be read of every stream that is there now.

        :param may_be_removed: whether one that a plain URL names may be gone, once it was seen
        :raises NotFound: there is none that a plain URL names.
        :raises Unsupported: one cannot be read again, and is not staged.
        """
        found = {}
        for url in expand(self._patterns):
            try:
                found[url] = self._look_at(url)
            except NotFound:
                if url in self._patterns and not (may_be_removed and url in self._epochs):
                    raise
                # A pattern found it, and it was removed this moment.
        return found

    def _look_at(self, url: str) -> Bounds:
        reader = self._reader(url)
        if url in self._copies:
            self._copies[url].check()
        # While the old one is still open: the next question may find a new one in its place.
        newest, before = reader.newest_seq(), self._epochs.get(url)
        before_end = None if before is None else self._ends.get((url, before))
        if newest is not None and before is not None:
            self._ends[url, before] = newest + 1
        try:
            reader.seek(Position.END)  # it reads nothing, and so never stays with an old queue
            bounds = reader.bounds()
        except (Unsupported, Closed):  # created anew, in a way that needs another reader
            self._readers.pop(url).close()
            bounds = self._reader(url).bounds()
        is_silent = self._epochs.get(url) == bounds.epoch and before_end == bounds.end
        self._ends[url, bounds.epoch] = bounds.end
        self._epochs[url] = bounds.epoch
        if is_silent and url in self._patterns and url not in self._copies:
            self._check_there(url)  # what a pattern finds is there
        return bounds

    def _check_there(self, url: str) -> None:
        """Make sure now and then that a stream in which nothing comes was not removed.

        Whoever has it open still sees it then, and would wait for ever.

        :raises NotFound: it was.
        """
        now = time.monotonic()
        pause = _BETWEEN_CHECKS if URL.parse(url).host is None else _BETWEEN_REMOTE_CHECKS
        if now - self._there.get(url, now - pause) < pause:
            return
        try:
            open_reader(url, start=Position.END).close()
        except NotFound:
            raise
        except PenstockError:
            return  # there is something, and whoever reads it will say what is wrong
        self._there[url] = now

    def end_seen(self, url: str, epoch: int) -> int | None:
        """Return where a life of a stream ended, as far as that was seen."""
        return self._ends.get((url, epoch))

    def end_of_removed(self, url: str, epoch: int) -> int | None:
        """Return where a stream ended that is not there any more, and let go of it."""
        reader = self._readers.pop(url, None)
        if reader is not None:
            # It has the files open still, and so sees all that was written to them.
            with suppress(PenstockError, OSError):
                newest = reader.newest_seq()
                if newest is not None and self._epochs.get(url) == epoch:
                    self._ends[url, epoch] = max(newest + 1, self._ends.get((url, epoch), 0))
            reader.close()
        self._there.pop(url, None)
        return self._ends.get((url, epoch))

    def place(self, url: str) -> str:
        """Return the URL that tasks read a stream by: its own, or that of the log it is in.

        :raises Unsupported: it cannot be read again, and is not staged.
        """
        with suppress(NotFound):  # by now: whoever reads it will say so
            self._reader(url)
        copy = self._copies.get(url)
        return url if copy is None else copy.place

    def lost_before_staging(self) -> dict[str, int]:
        """Return how many messages live streams lost since the last call, before they were ours."""
        return {url: lost for url, copy in self._copies.items() if (lost := copy.take_lost())}

    def first_at(self, url: str, time_ns: int) -> int:
        """Return the number of the first message appended at that time or later."""
        with open_reader(self.place(url), start=Position.time(time_ns)) as reader:
            number = reader.statistics().next_seq
        if number is None:
            raise NotFound(f"{url}: there is no message at that time")
        return number

    def _reader(self, url: str) -> Reader:
        reader = self._readers.get(url)
        if reader is None:
            reader = self._readers[url] = self._open(url)
        return reader

    def _open(self, url: str) -> Reader:
        reader = open_reader(url, start=Position.END)
        try:
            reader.bounds()
        except Unsupported:
            if self._stage is None:
                reader.close()
                raise Unsupported(
                    f"{url} cannot be read again, as Spark does after a failure",
                    hint='keep it in a log: .option("stage", "log:/path/name")',
                ) from None
            many = len(self._patterns) > 1
            copy = self._copies[url] = LiveCopy(reader, log_for(url, self._stage, many=many))
            return open_reader(copy.place, start=Position.END)
        except BaseException:
            reader.close()
            raise
        return reader

    def close(self) -> None:
        for copy in self._copies.values():
            copy.stop()
        for reader in self._readers.values():
            reader.close()
        self._copies.clear()
        self._readers.clear()
