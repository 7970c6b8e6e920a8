"""What is on the screen of `top`, and when is it updated?"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, ClassVar, Final

from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Header, Static

from penstock.cli.cat import open_at
from penstock.cli.message_text import message_line, payload_text
from penstock.cli.mon import shared_by, writer_waits_for_reader
from penstock.cli.streams import Listed, found_at, look_at
from penstock.core.capabilities import AppendOnce
from penstock.core.endpoints import describe, endpoint_of
from penstock.core.errors import PenstockError
from penstock.core.units import format_duration, format_size
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from textual.app import ComposeResult

    from penstock.core.interfaces import Reader
    from penstock.core.message import Message

__all__ = ["StreamsApp", "sparkline"]

_BARS: Final = " ▁▂▃▄▅▆▇█"
#: Samples in a line of bars.
_SAMPLES: Final = 20
#: Streams outside the screen that are updated each time.
_AT_ONCE: Final = 200
#: Updates between two searches for new streams.
_BETWEEN_SEARCHES: Final = 10
#: Messages that Enter shows, and bytes of each.
_LAST: Final = 50
_LONGEST: Final = 200

#: The longest name of a stream.
_WIDEST: Final = 40

_COLUMNS: Final = (
    *("stream", "kind", "messages", "size", "rate", f"{'last samples':<{_SAMPLES}}"),
    *("lag", "lost", "newest", "writer", "readers"),
)


def sparkline(values: Sequence[float], width: int = _SAMPLES) -> str:
    """Draw values as bars, the newest at the right."""
    most = max(values, default=0.0)
    drawn = [
        _BARS[0 if value <= 0 else max(1, round(value / most * (len(_BARS) - 1)))]
        for value in list(values)[-width:]
    ]
    return "".join(drawn).rjust(width)


class _Stream:
    """A stream with its samples over time."""

    def __init__(self, found: Listed) -> None:
        self.found = found
        self.rates: deque[float] = deque(maxlen=_SAMPLES)
        self._seen = time.monotonic(), found.newest_seq

    def see(self, found: Listed) -> None:
        now, newest = time.monotonic(), found.newest_seq
        then, before = self._seen
        if newest is not None and now > then:
            self.rates.append(max(0, newest - (-1 if before is None else before)) / (now - then))
        self._seen, self.found = (now, newest), found

    @property
    def rate(self) -> float:
        return self.rates[-1] if self.rates else self.found.rate

    def cells(self) -> list[Text]:
        found = self.found
        if found.error:
            return [
                Text(_short(found.url)),
                Text(found.kind, "red"),
                *[Text("")] * (len(_COLUMNS) - 2),
            ]
        newest = "-"
        if found.newest_ns is not None:
            newest = format_duration(max(0, time.time_ns() - found.newest_ns) / 1e9)
        alive = len(found.readers) - found.dead
        readers = Text(str(alive) if alive else "-", "green" if alive else "")
        if found.dead:
            readers.append(f" {found.dead} dead", "red")
        return [
            Text(_short(found.url)),
            Text(found.kind),
            _number(f"{found.messages:,}"),
            _number(format_size(found.bytes)),
            _number(f"{self.rate:,.1f}/s" if self.rate else "-"),
            Text(sparkline(self.rates), "cyan"),
            _number("-" if found.lag is None else f"{found.lag:,}"),
            _number(f"{found.lost:,}", "red" if found.lost else ""),
            _number(newest),
            Text(str(found.writer or "-"), "green" if found.writer else ""),
            readers,
        ]


def _short(url: str) -> str:
    """Shorten a long URL to the end of its path, which has the name."""
    scheme, _, path = url.partition(":")
    return url if len(url) <= _WIDEST else f"{scheme}:…{path[len(scheme) + 2 - _WIDEST :]}"


def _number(text: str, style: str = "") -> Text:
    return Text(text, style, justify="right")


#: Sort keys of columns: largest first, names ascending.
_ORDERS: Final[tuple[tuple[str, Callable[[_Stream], object]], ...]] = (
    ("name", lambda stream: stream.found.url),
    ("rate", lambda stream: -stream.rate),
    ("lag", lambda stream: -(stream.found.lag or 0)),
    ("loss", lambda stream: -stream.found.lost),
)


class _Table(DataTable[Text]):
    """The table of streams, whose key is in the footer."""

    BINDINGS: ClassVar = [Binding("enter", "select_cursor", "Last messages")]


class StreamsApp(App[None]):
    """The screen of all streams of some places, updated periodically."""

    TITLE = "penstock top"
    CSS = "DataTable { height: 1fr; }"
    BINDINGS: ClassVar = [
        Binding("q", "quit", "End"),
        Binding("s", "sort", "Sort by another column"),
    ]

    def __init__(
        self, places: list[str], *, recursive: bool, every: float, decode: str | None
    ) -> None:
        """Find the streams.

        :raises PenstockError: a folder does not exist or cannot be read, or a URL is wrong.
        :raises typer.BadParameter: `decode` is no format.
        """
        super().__init__()
        self._places, self._recursive = places, recursive
        self._every, self._decode = every, decode
        if decode is not None:
            _decoded([], decode)
        self._streams: dict[str, _Stream] = {}
        self._order = 0
        self._looks = 0
        self._next = 0
        self._search()

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Header()
        yield _Table(cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Show the streams, and start the periodic update."""
        self._table.add_columns(*_COLUMNS)
        self._fill()
        self.set_interval(self._every, self.look)

    @property
    def _table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    def look(self) -> None:
        """Update the visible streams and some of the others, and search for new ones."""
        self._looks += 1
        before = set(self._streams)
        if self._looks % _BETWEEN_SEARCHES == 0:
            try:
                self._search()
            except PenstockError as error:  # a folder that is gone may come back
                self.sub_title = str(error)
        for url in self._due():
            self._streams[url].see(look_at(url))
        if set(self._streams) != before or (self._order and self._in_order() != self._rows()):
            self._fill()
            return
        table = self._table
        columns = list(table.columns)
        for url in self._due_rows():
            for column, cell in zip(columns, self._streams[url].cells(), strict=True):
                # `100 ms` in a column of `5 ms` would be cut to `100 m`.
                is_wider = len(cell) > table.columns[column].content_width
                table.update_cell(url, column, cell, update_width=is_wider)

    def _search(self) -> None:
        urls = [u for place in self._places for u in found_at(place, recursive=self._recursive)]
        known = self._streams
        self._streams = {url: known.get(url) or _Stream(look_at(url)) for url in urls}
        self._say_order()

    def _say_order(self) -> None:
        count = len(self._streams)
        plural = "" if count == 1 else "s"
        self.sub_title = f"{count:,} stream{plural}, by {_ORDERS[self._order][0]}"

    def _rows(self) -> list[str]:
        return [str(row.value) for row in self._table.rows]

    def _in_order(self) -> list[str]:
        key = _ORDERS[self._order][1]
        return sorted(self._streams, key=lambda url: key(self._streams[url]))  # type: ignore[arg-type,return-value]

    def _visible(self) -> list[str]:
        table = self._table
        first = int(table.scroll_offset.y)
        rows = self._rows()[first : first + table.size.height + 1]
        return [url for url in rows if url in self._streams]

    def _due(self) -> list[str]:
        urls = list(self._streams)
        some = [urls[(self._next + i) % len(urls)] for i in range(min(_AT_ONCE, len(urls)))]
        self._next += len(some)
        self._seen_now = list(dict.fromkeys([*self._visible(), *some]))
        return self._seen_now

    def _due_rows(self) -> Iterable[str]:
        return [url for url in self._seen_now if url in self._streams]

    def _fill(self) -> None:
        """Fill the table in order, and keep the cursor on its stream."""
        table, before = self._table, self._rows()
        row = table.cursor_row
        chosen = before[row] if 0 <= row < len(before) else None
        table.clear()
        urls = self._in_order()
        for url in urls:
            table.add_row(*self._streams[url].cells(), key=url)
        if chosen in self._streams:
            row = urls.index(chosen)
        table.move_cursor(row=max(0, min(row, len(urls) - 1)))

    def action_sort(self) -> None:
        """Sort by the next column that matters."""
        self._order = (self._order + 1) % len(_ORDERS)
        self._say_order()
        row = self._table.cursor_row
        self._fill()
        self._table.move_cursor(row=row)  # of another order, one looks at the same place

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the last messages of the selected stream."""
        url = str(event.row_key.value)
        self.push_screen(MessagesScreen(url, last_lines(url, self._decode)))


class MessagesScreen(ModalScreen[None]):
    """The last messages of one stream."""

    CSS = """
    MessagesScreen { align: center middle; }
    MessagesScreen > Static { width: 95%; height: 90%; border: round $accent; overflow: auto; }
    """
    BINDINGS: ClassVar = [Binding("escape,q,enter", "dismiss", "Back")]

    def __init__(self, url: str, lines: Sequence[str]) -> None:
        super().__init__()
        self._url, self._lines = url, lines

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        shown = Static(Text("\n".join(self._lines) or "no messages", no_wrap=True))
        shown.border_title = f"the last messages of {self._url} (Escape: back)"
        yield shown


def last_lines(url: str, decode: str | None) -> list[str]:
    """Return the last messages of a stream as lines, the newest first, decoded on request."""
    try:
        with _open_last(url) as reader:
            messages = reader.read_many(_LAST)
        return _lines(messages, decode)[::-1]
    except PenstockError as error:
        return [str(error)]


def _open_last(url: str) -> Reader:
    """Open a stream before its last messages, if it can be without changing anything in it.

    A blocking queue has one reader, for which its writer waits: this must not become that reader.
    Nor may it take messages from those who share them.
    """
    endpoint = endpoint_of(url)
    if not isinstance(endpoint, AppendOnce) or not (
        shared_by(url) or writer_waits_for_reader(describe(url))
    ):
        return open_at(url, _LAST)
    reader = endpoint.reread(URL.parse(url))
    try:
        bounds = reader.bounds()
        reader.seek(max(bounds.oldest, bounds.end - _LAST))
    except BaseException:
        reader.close()
        raise
    return reader


def _lines(messages: list[Message], decode: str | None) -> list[str]:
    if decode is None:
        return [message_line(m, m.time_ns, payload_text(m.payload, _LONGEST)) for m in messages]
    return _decoded(messages, decode)


def _decoded(messages: list[Message], decode: str) -> list[str]:
    from penstock.cli.decoded_lines import DecodedPayloads  # noqa: PLC0415 - loads Arrow's parsers

    payloads = DecodedPayloads(decode)
    return [payloads.line(row).decode().rstrip() for row in payloads.of(messages)]
