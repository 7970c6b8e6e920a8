"""The command that watches a stream: `mon`."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from penstock.cli.console import console
from penstock.cli.messages import Url
from penstock.cli.output import bar, note, standard_output
from penstock.cli.signals import StopSign, stop_on_signal
from penstock.core import endpoints
from penstock.core.errors import InvalidOption, NotFound, PenstockError, Unsupported
from penstock.core.redaction import shown
from penstock.core.units import format_size, format_time, parse_duration
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.interfaces import StreamInfo

__all__ = ["add_to", "shared_by", "writer_waits_for_reader"]

#: Messages per read.
_AT_ONCE = 1000
#: Seconds between two checks whether to stop.
_PATIENCE = 0.2
#: Intervals on the screen.
_SHOWN = 15
#: Lines of a log file between two headings.
_PAGE = 20
_ID_COUNT = 10**9
#: Options by which readers share messages, or keep a place that each read moves.
_SHARED = ("group", "hold", "cursor")


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command(rich_help_panel="Streams")(mon)


class _Sample(NamedTuple):
    """The measurements of one interval."""

    #: When it ended, nanoseconds since 1970.
    time_ns: int
    seconds: float
    messages: int
    #: Bytes in the messages; None where they were not read.
    bytes: int | None
    #: Bytes in the storage, framing included; None: unknown.
    stored_bytes: int | None
    #: Messages lost before this monitor could read them.
    lost: int
    #: Messages that this monitor had not read at the end.
    backlog: int
    #: How far the slowest other reader was behind; None: no other reader is known.
    slowest: int | None


def mon(
    url: Url,
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="TIME", help="Report so often.")
    ] = "5s",
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=1, help="Stop after so many reports.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    look: Annotated[
        bool,
        typer.Option("--look", help="Read no messages, only what the queue says about itself."),
    ] = False,
) -> None:
    """Watch a stream, until Ctrl-C: rate, messages, bytes, backlog and losses per interval.

    It reads what is new, as any reader does. Of a blocking queue, a group or a held place it only
    reads the status: to read messages would release the writer, or take them from their readers.

    Examples:
      penstock mon fmq:/data/beams --interval 1s
    """
    try:
        every = parse_duration(interval)
    except InvalidOption as error:
        raise InvalidOption("interval", interval, error.reason) from None
    if every <= 0:
        raise InvalidOption("interval", interval, "must be above 0")
    with (
        closing(_watcher(url, look=look)) as watcher,
        standard_output(),
        stop_on_signal(held_up=lambda: None) as stop,
    ):
        samples = _samples(watcher, every, count, stop)
        if as_json:
            for sample in samples:
                typer.echo(json.dumps(_fields(sample)))
        elif console.is_terminal:
            _show(url, samples)
        else:
            _list(samples)


def _samples(
    watcher: _Watcher, every: float, count: int | None, stop: StopSign
) -> Iterator[_Sample]:
    due = time.monotonic()
    number = 0
    while not stop() and (count is None or number < count):
        number += 1
        # By the clock, and not by the end of the last one: reports do not drift.
        # Intervals missed while the process was suspended are not caught up.
        due = max(due, time.monotonic() - every / 2) + every
        sample = watcher.watch(due, stop)
        if not stop():
            yield sample


# --- two ways to watch ----------------------------------------------------------------------


class _Watcher(ABC):
    @abstractmethod
    def watch(self, until: float, stop: StopSign) -> _Sample:
        """Watch until a time of the monotonic clock, and return the sample."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


def _watcher(url: str, *, look: bool) -> _Watcher:
    if (name := shared_by(url)) is not None:
        note(f"penstock: what {name}= names is read by others: it is only looked at")
        look = True
    can_look = True
    seen: StreamInfo | None = None
    try:
        seen = endpoints.describe(url)
    except Unsupported:
        if look:
            raise
        can_look = False  # it can be read, and that is all
    except NotFound:
        if look:
            raise  # else the reader may be told to wait for it
    if seen is not None and (look or writer_waits_for_reader(seen)):
        if not look:
            _note_only_looked_at(seen)
        return _Looking(url, seen)
    # A stream on another machine cannot say how its messages are stored.
    can_look = can_look and (seen is None or seen.buffer_size > 0)
    return _Reading(url, seen, can_look=can_look)


def writer_waits_for_reader(seen: StreamInfo) -> bool:
    """Tell whether reading would unblock the writer, which waits for its one reader."""
    return seen.layout == "classic" and bool(seen.blocking)


def _note_only_looked_at(seen: StreamInfo) -> None:
    note(f"penstock: the writer of {seen.url} waits for its reader: it is only looked at")


def shared_by(url: str) -> str | None:
    """Return the option by whose name others read the stream; None: there is none.

    Reading would take messages away from them.
    """
    return next((name for name in _SHARED if URL.parse(url).options.get(name)), None)


class _Stored:
    """Counts stored bytes, from the status of the stream."""

    def __init__(self, url: str, first: StreamInfo | None) -> None:
        self.url = url
        self.last = first

    def since_last(self, seen: StreamInfo | None) -> tuple[int | None, int | None]:
        """Return the messages and bytes added since the last call."""
        before, self.last = self.last, seen
        if before is None or seen is None:
            return None, None
        first = -1 if before.youngest_seq is None else before.youngest_seq
        last = -1 if seen.youngest_seq is None else seen.youngest_seq
        is_another = before.details.get("epoch") != seen.details.get("epoch")
        is_same = last >= first and not (is_another and not seen.oldest_seq)
        added = last - first if is_same else last + 1  # else it was recreated
        if is_same and before.oldest_seq in {None, seen.oldest_seq} and seen.count >= added:
            return added, max(0, seen.bytes - before.bytes)
        # Some are gone by now: estimate their size from the stored ones.
        return added, round(seen.bytes / seen.count * added) if seen.count else 0


class _Reading(_Watcher):
    """Reads the messages."""

    def __init__(self, url: str, seen: StreamInfo | None, *, can_look: bool) -> None:
        self._reader = endpoints.open_reader(url, "end")
        self._stored = _Stored(url, seen)
        self._can_look = can_look
        self._began = time.monotonic()
        #: Takes over when the writer starts to wait for its reader.
        self._instead: _Looking | None = None

    def watch(self, until: float, stop: StopSign) -> _Sample:
        if self._instead is not None:
            return self._instead.watch(until, stop)
        reader = self._reader
        before = reader.statistics()
        while not stop() and (left := until - time.monotonic()) > 0:
            reader.read_batch(_AT_ONCE, timeout=min(left, _PATIENCE))
        after = reader.statistics()
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        seen = self._look()
        _, stored = self._stored.since_last(seen)
        if seen is not None and writer_waits_for_reader(seen):
            _note_only_looked_at(seen)
            self.close()
            self._instead = _Looking(self._stored.url, seen)
        return _Sample(
            time_ns=time.time_ns(),
            seconds=seconds,
            messages=after.messages - before.messages,
            bytes=after.bytes - before.bytes,
            stored_bytes=stored,
            lost=after.lost - before.lost,
            backlog=after.backlog,
            slowest=_slowest(seen),
        )

    def _look(self) -> StreamInfo | None:
        if not self._can_look:
            return None
        try:
            return endpoints.describe(self._stored.url)
        except PenstockError:
            return None  # the reader will raise the error

    def close(self) -> None:
        self._reader.close()


class _Looking(_Watcher):
    """Reads nothing, and uses the status of the stream."""

    def __init__(self, url: str, seen: StreamInfo) -> None:
        self._stored = _Stored(url, seen)
        self._began = time.monotonic()

    def watch(self, until: float, stop: StopSign) -> _Sample:
        while not stop() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _PATIENCE))
        seen: StreamInfo | None = None
        with suppress(NotFound):  # removed, and perhaps about to be recreated
            seen = endpoints.describe(self._stored.url)
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        added, stored = (0, 0) if seen is None else self._stored.since_last(seen)
        return _Sample(
            time_ns=time.time_ns(),
            seconds=seconds,
            messages=added or 0,
            bytes=None,
            stored_bytes=stored,
            lost=0,
            backlog=0,
            slowest=_slowest(seen),
        )

    def close(self) -> None:
        """Nothing is open."""


def _slowest(seen: StreamInfo | None) -> int | None:
    """Return how far the slowest other known reader is behind, or None."""
    if seen is None:
        return None
    details = seen.details
    if (last_read := details.get("last_id_read")) is not None:  # the one reader of a blocking queue
        youngest: int = details["youngest_id"]
        return (youngest - last_read) % _ID_COUNT if youngest >= 0 else 0
    readers: list[dict[str, Any]] = details.get("readers") or details.get("cursors") or []
    behind = [
        int(reader["behind"])
        for reader in readers
        if reader["pid"] != os.getpid() and (reader["alive"] or reader["name"])
    ]
    return max(behind, default=None)


# --- showing --------------------------------------------------------------------------------


def _fields(sample: _Sample) -> dict[str, Any]:
    rate = sample.messages / sample.seconds
    byte_rate = None if sample.bytes is None else round(sample.bytes / sample.seconds, 1)
    return {
        "time": format_time(sample.time_ns),
        "seconds": round(sample.seconds, 3),
        "messages": sample.messages,
        "messages_per_second": round(rate, 1),
        "bytes": sample.bytes,
        "bytes_per_second": byte_rate,
        "stored_bytes": sample.stored_bytes,
        "lost": sample.lost,
        "backlog": sample.backlog,
        "slowest_reader_behind": sample.slowest,
    }


_TITLES = ("time", "messages", "per s", "payload", "per s", "stored", "lost", "backlog", "slowest")


def _cells(sample: _Sample) -> list[str]:
    is_read = sample.bytes is not None
    size = sample.bytes or 0
    return [
        format_time(sample.time_ns // 10**9 * 10**9)[11:19],
        f"{sample.messages:,}",
        f"{sample.messages / sample.seconds:,.1f}",
        format_size(size) if is_read else "-",
        format_size(round(size / sample.seconds)) if is_read else "-",
        "-" if sample.stored_bytes is None else format_size(sample.stored_bytes),
        f"{sample.lost:,}" if is_read else "-",
        f"{sample.backlog:,}" if is_read else "-",
        "-" if sample.slowest is None else f"{sample.slowest:,}",
    ]


def _list(samples: Iterator[_Sample]) -> None:
    widths = (8, 11, 11, 10, 10, 10, 8, 8, 8)
    for number, sample in enumerate(samples):
        rows = [_TITLES] if number % _PAGE == 0 else []
        for row in (*rows, _cells(sample)):
            typer.echo(
                "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            )


def _show(url: str, samples: Iterator[_Sample]) -> None:
    latest: deque[_Sample] = deque(maxlen=_SHOWN)
    url = shown(url)
    messages = lost = 0
    with Live(console=console, auto_refresh=False) as live:
        live.update(Table(title=escape(f"{url}: watching …"), box=None), refresh=True)
        for sample in samples:
            latest.append(sample)
            messages += sample.messages
            lost += sample.lost
            title = f"{url}: {messages:,} messages, {lost:,} lost"
            live.update(_table(title, list(latest)), refresh=True)


def _table(title: str, samples: list[_Sample]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=escape(title), title_justify="left")
    for name in _TITLES:
        table.add_column(name, justify="right")
    table.add_column("")
    highest = max(sample.messages / sample.seconds for sample in samples) or 1.0
    for sample in samples:
        rate = sample.messages / sample.seconds
        table.add_row(
            *_cells(sample), bar(rate / highest, 15), style="red" if sample.lost else None
        )
    return table
