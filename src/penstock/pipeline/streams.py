"""Which streams are behind the URLs of a source, and what of them can be read?"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.core.capabilities import Replayable
from penstock.core.endpoints import Identity, find_streams, identity, open_reader
from penstock.core.errors import Closed, InvalidOption, NotFound, PenstockError, Unsupported
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.pipeline.through_log import LiveCopy, log_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.core.interfaces import Bounds, Reader

__all__ = ["Streams", "expand"]

#: Seconds between two looks whether a silent stream is still there.
_BETWEEN_CHECKS: Final = 1.0
_BETWEEN_REMOTE_CHECKS: Final = 10.0


def expand(urls: Sequence[str], of: Callable[[str], Identity] = identity) -> list[str]:
    """Return the URLs that a list of URLs and patterns (`fmq:/data/*`) stands for now, in order.

    :param of: tells which stream a URL names, from memory if it can
    :raises InvalidOption: one stream is named twice, and not to be read alike.
    """
    found: dict[Identity, str] = {}  # a stream is read once, whatever it is called
    for url in urls:
        for named in find_streams(url):
            first = found.setdefault(of(named), named)
            if named == url and first in urls and _options(first) != _options(url):
                raise InvalidOption(
                    "url",
                    url,
                    f"is the stream {first}, read in another way",
                    hint="read it by a source of its own",
                )
    return list(found.values())


def _options(url: str) -> Mapping[str, str]:
    return URL.parse(url).options


class Streams:
    """Readers of many URLs, kept open to look at what is there.

    A stream is named by a URL: the one that a checkpoint knows it by, or else its own. So another
    option in the URL, such as where a token is, does not make it another stream.
    """

    def __init__(self, urls: Sequence[str], stage: str | None = None) -> None:
        self._patterns = urls
        self._stage = stage
        self._known: dict[str, Identity] = {}
        #: By identity, from here on: what it is called, and the URL by which it is reached.
        self._names: dict[Identity, str] = {}
        self._urls: dict[Identity, str] = {}
        self._readers: dict[Identity, Reader] = {}
        self._copies: dict[Identity, LiveCopy] = {}
        self._epochs: dict[Identity, int] = {}
        #: Where each life of a stream was seen to end.
        self._ends: dict[tuple[Identity, int], int] = {}
        #: When a stream was last seen to be where its URL says.
        self._there: dict[Identity, float] = {}

    def call(self, names: Iterable[str]) -> None:
        """Let streams have the names that a checkpoint has for them."""
        self._names |= {self._of(name): name for name in names}

    def _of(self, name: str) -> Identity:
        """Return which stream it is."""
        stream = self._known.get(name)
        if stream is None:
            stream = self._known[name] = identity(name)
        return stream

    def look(self, *, may_be_removed: bool = False) -> dict[str, Bounds]:
        """Return what can be read of every stream that is there now.

        :param may_be_removed: whether one that a plain URL names may be gone, once it was seen
        :raises NotFound: there is none that a plain URL names.
        :raises Unsupported: one cannot be read again, and is not staged.
        """
        found = {}
        for url in expand(self._patterns, self._of):
            stream = self._of(url)
            self._urls[stream] = url
            try:
                found[self._names.get(stream, url)] = self._look_at(stream)
            except NotFound:
                if url in self._patterns and not (may_be_removed and stream in self._epochs):
                    raise
                # A pattern found it, and it was removed this moment.
        return found

    def _look_at(self, stream: Identity) -> Bounds:
        reader = self._reader(stream)
        if stream in self._copies:
            self._copies[stream].check()
        # While the old one is still open: the next question may find a new one in its place.
        newest, before = reader.newest_seq(), self._epochs.get(stream)
        before_end = None if before is None else self._ends.get((stream, before))
        if newest is not None and before is not None:
            self._ends[stream, before] = newest + 1
        try:
            reader.seek(Position.END)  # it reads nothing, and so never stays with an old queue
            bounds = reader.bounds()
        except (Unsupported, Closed):  # created anew, in a way that needs another reader
            self._readers.pop(stream).close()
            bounds = self._reader(stream).bounds()
        is_silent = self._epochs.get(stream) == bounds.epoch and before_end == bounds.end
        self._ends[stream, bounds.epoch] = bounds.end
        self._epochs[stream] = bounds.epoch
        if is_silent and self._urls[stream] in self._patterns and stream not in self._copies:
            self._check_there(stream)  # what a pattern finds is there
        return bounds

    def _check_there(self, stream: Identity) -> None:
        """Make sure now and then that a stream in which nothing comes was not removed.

        Whoever has it open still sees it then, and would wait for ever.

        :raises NotFound: it was.
        """
        now = time.monotonic()
        pause = _BETWEEN_REMOTE_CHECKS if stream.path is None else _BETWEEN_CHECKS
        if now - self._there.get(stream, now - pause) < pause:
            return
        try:
            open_reader(self._urls[stream], start=Position.END).close()
        except NotFound:
            raise
        except PenstockError:
            return  # there is something, and whoever reads it will say what is wrong
        self._there[stream] = now

    def end_seen(self, name: str, epoch: int) -> int | None:
        """Return where a life of a stream ended, as far as that was seen."""
        return self._ends.get((self._of(name), epoch))

    def end_of_removed(self, name: str, epoch: int) -> int | None:
        """Return where a stream ended that is not there any more, and let go of it."""
        stream = self._of(name)
        reader = self._readers.pop(stream, None)
        if reader is not None:
            # It has the files open still, and so sees all that was written to them.
            with suppress(PenstockError, OSError):
                newest = reader.newest_seq()
                if newest is not None and self._epochs.get(stream) == epoch:
                    self._ends[stream, epoch] = max(newest + 1, self._ends.get((stream, epoch), 0))
            reader.close()
        self._there.pop(stream, None)
        return self._ends.get((stream, epoch))

    def place(self, name: str) -> str:
        """Return the URL that tasks read a stream by: its own, or that of the log it is in.

        :raises Unsupported: it cannot be read again, and is not staged.
        """
        stream = self._of(name)
        if stream not in self._urls:
            self._urls[stream] = self._url_of(stream, name)
        with suppress(NotFound):  # by now: whoever reads it will say so
            self._reader(stream)
        copy = self._copies.get(stream)
        return self._urls[stream] if copy is None else copy.place

    def _url_of(self, stream: Identity, name: str) -> str:
        """Return the URL by which a stream is reached that was not looked at yet."""
        return next(
            (url for url in expand(self._patterns, self._of) if self._of(url) == stream), name
        )

    def lost_before_staging(self) -> dict[str, int]:
        """Return how many messages live streams lost since the last call, before they were ours."""
        return {
            self._names.get(stream, self._urls[stream]): lost
            for stream, copy in self._copies.items()
            if (lost := copy.take_lost())
        }

    def first_at(self, name: str, time_ns: int) -> int:
        """Return the number of the first message appended at that time or later."""
        with open_reader(self.place(name), start=Position.time(time_ns)) as reader:
            number = reader.statistics().next_seq
        if number is None:
            raise NotFound(f"{name}: there is no message at that time")
        return number

    def _reader(self, stream: Identity) -> Reader:
        reader = self._readers.get(stream)
        if reader is None:
            reader = self._readers[stream] = self._open(stream)
        return reader

    def _open(self, stream: Identity) -> Reader:
        url = self._urls[stream]
        reader = open_reader(url, start=Position.END)
        if isinstance(reader, Replayable):
            return reader
        if self._stage is None:
            reader.close()
            raise Unsupported(
                f"{url} cannot be read again, as Spark does after a failure",
                hint='keep it in a log: .option("stage", "log:/path/name")',
            )
        log = self._stage
        if len(self._patterns) > 1:
            log = log_for(str(stream), self._names.get(stream, url), below=self._stage)
        copy = self._copies[stream] = LiveCopy(reader, log)
        return open_reader(copy.place, start=Position.END)

    def close(self) -> None:
        for copy in self._copies.values():
            copy.stop()
        for reader in self._readers.values():
            reader.close()
        self._copies.clear()
        self._readers.clear()
