"""The commands that read messages: `cat` and `tail`."""

from __future__ import annotations

import itertools
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

import typer

from penstock.cli.message_text import (
    MessageFields,
    Template,
    message_line,
    payload_text,
    unescaped,
)
from penstock.cli.messages import LOST, Follow, From, Url, fits_32_bits, tell_range
from penstock.cli.output import (
    is_coloured,
    is_terminal,
    losses_named,
    name_losses,
    note,
    standard_output,
)
from penstock.cli.signals import StopSign, stop_on_signal
from penstock.core.capabilities import (
    Grouped,
    Held,
    OriginTimed,
    Replayable,
    SourceTimed,
    Worded,
)
from penstock.core.endpoints import open_reader
from penstock.core.errors import InvalidOption, PositionError
from penstock.core.json_lines import json_line
from penstock.core.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import BinaryIO

    from penstock.cli.decoded_lines import DecodedPayloads
    from penstock.cli.where import Condition
    from penstock.core.interfaces import Reader
    from penstock.core.message import Message
    from penstock.core.statistics import ReaderStatistics

__all__ = ["By", "add_to", "open_at", "position_of"]

_AT_ONCE: Final = 4096
#: Later than every time.
_FOREVER: Final = 2**63 - 1
#: Fewer with `follow`: messages are shown as they come.
_AT_ONCE_LIVE: Final = 256
#: With `follow`, seconds between two checks whether to stop.
_PATIENCE: Final = 0.5
#: Width of a line before its payload.
_BEFORE_PAYLOAD: Final = 70
_SHORTEST: Final = 48

To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="POSITION", help="Where to end, the message there not included: as --from."
    ),
]
By = Annotated[
    Literal["append", "origin", "source"],
    typer.Option(
        help="Which time --from and --to mean: of appending here, of appending to the stream that "
        "it was first copied from, or when it happened."
    ),
]
Type = Annotated[
    int | None,
    typer.Option(metavar="N", callback=fits_32_bits, help="Only messages of this type."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Raw = Annotated[bool, typer.Option("--raw", help="The payloads, with nothing between them.")]
Hex = Annotated[bool, typer.Option("--hex", help="A payload a line, in hex.")]
Delimiter = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help=r"The payloads, each with this behind it, such as '\n'."),
]
Null = Annotated[bool, typer.Option("--null", "-0", help="The payloads, a zero byte behind each.")]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help=r"Lines such as '%{time} %{seq} %{type} %{payload}\n'; of JSON, %{payload.name}.",
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="The columns of payloads as JSON: 'struct:<dHH', 'json:id BIGINT', "
        "'protobuf:FILE:package.Message', csv, arrow, or all options as '{format: …}'.",
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION",
        help="Only messages for which it is true: 'type == 3 and payload.name == \"x\"'. With "
        "--decode, the columns are fields, too.",
    ),
]
Grep = Annotated[
    str | None,
    typer.Option(
        metavar="PATTERN", help="Only payloads in which this regular expression is found."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    for command in (cat, tail):
        app.command(rich_help_panel="Messages")(command)


def cat(
    url: Url,
    start: From = "start",
    end: To = None,
    by: By = "append",
    count: Annotated[
        int | None, typer.Option("--count", "-n", min=0, help="Stop after so many messages.")
    ] = None,
    follow: Follow = False,
    type: Type = None,
    where: Where = None,
    grep: Grep = None,
    as_json: Json = False,
    raw: Raw = False,
    hex: Hex = False,
    delimiter: Delimiter = None,
    null: Null = False,
    format: Format = None,
    decode: Decode = None,
) -> None:
    r"""Read messages from a stream and print them.

    On a terminal, lines are cut to its width; in a pipe, payloads are whole. Messages that
    were lost are named on stderr, and the exit code is then 3. With --decode it is 1 if a payload
    does not decode; its line says why.

    Examples:
      penstock cat log:/data/beams --from -10m --grep storm
      penstock cat log:/data/beams --where 'payload.v > 5' --delimiter '\n'
      penstock cat log:/data/beams --decode 'struct:<dHH' --where 'f0 > 20'
    """
    shown = _Lines(
        as_json=as_json,
        raw=raw,
        hex=hex,
        delimiter="\\0" if null else delimiter,
        template=format,
        decode=decode,
        where=where,
        grep=grep,
    )
    left = sys.maxsize if count is None else count
    _show(url, _Range(start, end, by), left, shown, type=type, follow=follow)


def tail(
    url: Url,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="The last so many.")] = 10,
    follow: Follow = False,
    type: Type = None,
    where: Where = None,
    grep: Grep = None,
    as_json: Json = False,
    raw: Raw = False,
    hex: Hex = False,
    delimiter: Delimiter = None,
    null: Null = False,
    format: Format = None,
    decode: Decode = None,
) -> None:
    """Print the last messages of a stream, as cat --from -10 does.

    --where, --grep and --type choose among these.

    Examples:
      penstock tail fmq:/data/beams -n 3 --follow
    """
    shown = _Lines(
        as_json=as_json,
        raw=raw,
        hex=hex,
        delimiter="\\0" if null else delimiter,
        template=format,
        decode=decode,
        where=where,
        grep=grep,
    )
    start = f"-{count}" if count else "end"
    _show(url, _Range(start), sys.maxsize, shown, type=type, follow=follow)


def _show(
    url: str, within: _Range, left: int, shown: _Lines, *, type: int | None, follow: bool
) -> None:
    """Print up to `left` messages of a range; with `follow`, wait for more."""
    options = {} if type is None else {"type": type}
    with (
        open_at(url, within.start, **options) as reader,
        losses_named(lambda: within.books(reader), live=follow),
        _output(paged=shown.is_for_people and not follow) as out,
        stop_on_signal(held_up=lambda: name_losses(within.books(reader))) as stop,
    ):
        if isinstance(reader, Grouped):
            what = "shown, or passed over by --where and --grep," if shown.selects else "shown"
            note(f"{url}: what is {what} is taken away from the readers that share the queue")
        within.resolve(reader)
        if within.is_nothing:
            within.explain(url)
            return
        shown.know(reader, within.time_of)
        beyond = _print(reader, within, left, shown, out, stop, follow=follow)
        out.flush()
        lost = within.books(reader).lost
        if beyond is not None and isinstance(reader, Replayable):
            reader.seek(beyond)  # a named cursor stays at the first message not shown
            reader.acknowledge()
        if stop() and not follow:
            raise KeyboardInterrupt
        if not follow:
            within.explain(url)
    if lost:
        raise typer.Exit(LOST)
    if shown.failed:
        are = "payload does" if shown.failed == 1 else "payloads do"
        note(f"penstock: {shown.failed:,} {are} not decode; decode_error of --json says why")
        raise typer.Exit(1)


def _print(
    reader: Reader,
    within: _Range,
    left: int,
    shown: _Lines,
    out: BinaryIO,
    stop: StopSign,
    *,
    follow: bool,
) -> int | None:
    """Print up to `left` messages; return the number of the first one read but not shown."""
    newest = None if follow else reader.newest_seq()
    at_once, patience = (_AT_ONCE_LIVE, _PATIENCE) if follow else (_AT_ONCE, 0.0)
    is_cut = within.has_end or (shown.selects and left < sys.maxsize)
    if is_cut and not isinstance(reader, Replayable):
        at_once = 1  # a message read in excess could not be returned
    while left > 0 and not stop():
        if not within.find(reader) and not follow:
            break
        # With a selection, more messages are read than shown.
        found = reader.read_many(at_once if shown.selects else min(left, at_once), patience)
        messages, beyond = within.of(found)
        for part in [[message] for message in messages] if is_cut else [messages]:
            if left <= 0:
                beyond = part[0].seq
                break
            left -= shown.write(part, left, out)
        if beyond is not None:
            return beyond
        out.flush()
        reader.acknowledge()
        if not follow and (not found or (newest is not None and found[-1].seq >= newest)):
            break
    return None


# --- from where to where --------------------------------------------------------------------------


def open_at(url: str, start: Position | int, **options: object) -> Reader:
    """Open a stream at a position, or `start` messages before its end.

    A reader with a named position goes on there instead.

    :raises PositionError: there is no message of that number yet.
    :raises Unsupported: the stream cannot seek, and so not count from its end.
    """
    if isinstance(start, Position):
        try:
            reader = open_reader(url, start, **options)
        except PositionError as error:
            if error.end is not None:  # its hint is for programs
                error.hint = "--from end --follow waits for the next one"
            raise
        asked = start.value if start.anchor == "seq" else None
    else:
        with ExitStack() as stack:
            reader = stack.enter_context(open_reader(url, Position.END, **options))
            bounds, next_seq = reader.bounds(), reader.statistics().next_seq
            asked = max(bounds.oldest, bounds.end - start)
            if not _hold(reader) or next_seq is None or next_seq >= asked:  # passes over nothing
                reader.seek(asked)
            stack.pop_all()
    if _hold(reader) and asked not in {None, reader.statistics().next_seq}:
        begins = reader.statistics().next_seq
        note(f"penstock: {_hold(reader)} has read all before {begins}, and goes on there")
    return reader


def _hold(reader: Reader) -> str | None:
    """Return the name of a reader's position, if it has one."""
    return reader.hold if isinstance(reader, Held) else None


_APPENDED: Final = operator.attrgetter("created_ns")
_ORIGINATED: Final = operator.attrgetter("origin_ns")
_HAPPENED: Final = operator.attrgetter("time_ns")


class _Range:
    """Messages between two positions, by append, source or origin time."""

    def __init__(self, start: str, end: str | None = None, by: str = "append") -> None:
        """Parse the positions.

        :raises PositionError: one is not valid.
        """
        self._text = f"from {start}" + (f" to {end}" if end else "")
        self._is_asked = start != "start" or end is not None
        self._is_empty = True
        #: The range ends before it begins: what is missing there is no loss.
        self.is_nothing = False
        first, self._end = position_of(start), None if end is None else position_of(end)
        self._by = by
        asked = [each for each in (first, self._end) if isinstance(each, Position)]
        is_by_time = any(each.anchor == "time" for each in asked)
        if len(asked) == 2 and all(each.anchor == "time" for each in asked):  # noqa: PLR2004
            self.is_nothing = asked[0].value >= asked[1].value
        #: The time to show of a message: the one that the range refers to.
        self.time_of: Callable[[Message], int] = _HAPPENED
        if by == "origin":
            self.time_of = _ORIGINATED
        elif by == "append" and is_by_time:
            self.time_of = _APPENDED
        #: The earliest time, in nanoseconds; earlier messages are skipped.
        self._after: int | None = None
        if by != "append" and isinstance(first, Position) and first.anchor == "time":
            # Messages are stored in append order: for other times each one is checked.
            self._after, first = first.value, Position.START
        self.start = first

    def resolve(self, reader: Reader) -> None:
        """Resolve an end that counts from the stream's end.

        :raises PositionError: the end of the stream is not known.
        """
        if isinstance(self._end, int):
            from penstock.relay.feed import newest_in  # noqa: PLC0415 - loads Arrow

            newest = newest_in(reader)
            self._end = Position.sequence(0 if newest is None else max(0, newest + 1 - self._end))
        elif self._end is not None and self._end.anchor in {"start", "last"}:
            raise PositionError(f"--to {self._end} ends nothing", hint="give a number or a time")
        end, next_seq = self._end, reader.statistics().next_seq
        if end is not None and end.anchor == "seq" and next_seq is not None:
            self.is_nothing = self.is_nothing or next_seq >= end.value

    def books(self, reader: Reader) -> ReaderStatistics:
        """Return the counters of a reader, without losses beyond the range."""
        books, end = reader.statistics(), self._end
        if isinstance(end, Position) and end.anchor == "seq":
            return books.before(end.value)
        return books

    def find(self, reader: Reader) -> bool:
        """Skip messages of other times, if the stream has an index; False: no more match."""
        end = self._end if isinstance(self._end, Position) else None
        has_end = self._by != "append" and end is not None and end.anchor == "time"
        next_seq = reader.statistics().next_seq
        if (self._after is None and not has_end) or next_seq is None:
            return True
        first = -_FOREVER if self._after is None else self._after
        last = end.value if has_end and end else _FOREVER
        if self._by == "source" and isinstance(reader, SourceTimed):
            found = reader.next_happened(next_seq, first, last)
        elif self._by == "origin" and isinstance(reader, OriginTimed):
            found = reader.next_originated(next_seq, first, last)
        else:
            return True
        if found is not None and found > next_seq:
            reader.seek(found)
        return found is not None

    @property
    def has_end(self) -> bool:
        return self._end is not None

    def of(self, messages: Sequence[Message]) -> tuple[Sequence[Message], int | None]:
        """Return the messages in the range, and the number of the first one beyond it."""
        end, time_of = self._end, self.time_of
        beyond: int | None = None
        if self._after is not None:
            messages = [message for message in messages if time_of(message) >= self._after]
        if isinstance(end, Position) and end.anchor == "seq":
            messages, beyond = _before([each.seq < end.value for each in messages], messages)
        elif isinstance(end, Position) and end.anchor == "time":
            is_in = [time_of(message) < end.value for message in messages]
            if self._by == "append":
                messages, beyond = _before(is_in, messages)
            else:
                messages = list(itertools.compress(messages, is_in))
        self._is_empty = self._is_empty and not messages
        return messages, beyond

    def explain(self, url: str) -> None:
        """Print what the stream has if it had no message in the requested range."""
        if self._is_empty and self._is_asked:
            tell_range(url, self._text)


def _before(is_in: list[bool], messages: Sequence[Message]) -> tuple[Sequence[Message], int | None]:
    """Return the messages before the first one outside, and the number of that one."""
    if all(is_in):
        return messages, None
    first = is_in.index(False)
    return messages[:first], messages[first].seq


def position_of(text: str) -> Position | int:
    """Parse a position, or a number of messages before the end: `-10`."""
    word = text.strip()
    if re.fullmatch(r"-[0-9]+", word):
        return int(word[1:])
    return Position.of(word)


# --- lines ----------------------------------------------------------------------------------------


class _Lines:
    """Selects messages, and prints them in the chosen form."""

    def __init__(
        self,
        *,
        as_json: bool = False,
        raw: bool = False,
        hex: bool = False,
        delimiter: str | None = None,
        template: str | None = None,
        decode: str | None = None,
        where: str | None = None,
        grep: str | None = None,
    ) -> None:
        chosen = [as_json, raw, hex, delimiter is not None, template is not None]
        if sum(chosen) + (decode is not None and template is None) > 1:
            raise typer.BadParameter(
                "give at most one of --json, --raw, --hex, --delimiter, --null, --format and "
                "--decode; --decode and --format go together"
            )
        self.is_for_people = not any(chosen) and decode is None and is_terminal(sys.stdout)
        self._is_coloured = self.is_for_people and is_coloured()
        self._template = None if template is None else Template(template)
        self._decoded = None if decode is None else _decoded(decode)
        self._where = None if where is None else _condition(where)
        try:
            self._grep = None if grep is None else re.compile(os.fsencode(grep))
        except re.error as error:
            raise InvalidOption("grep", grep, f"is no pattern: {error}") from None
        #: The delimiter after each payload, if only payloads are printed.
        self._behind = unescaped(delimiter or "").encode() if raw or delimiter is not None else None
        self._as_json, self._hex = as_json, hex
        width = shutil.get_terminal_size().columns - _BEFORE_PAYLOAD
        most = max(width, _SHORTEST) if self.is_for_people else None
        self._time_of: Callable[[Message], int] = _HAPPENED
        self._said: Callable[[Message], str] = lambda message: payload_text(message.payload, most)

    @property
    def selects(self) -> bool:
        return self._where is not None or self._grep is not None

    @property
    def failed(self) -> int:
        """Number of payloads that did not decode."""
        return 0 if self._decoded is None else self._decoded.failed

    def know(self, reader: Reader, time_of: Callable[[Message], int]) -> None:
        """Set which time of a message to show, and how the reader describes payloads."""
        self._time_of = time_of
        if isinstance(reader, Worded):
            self._said = reader.in_words

    def write(self, messages: Sequence[Message], most: int, out: BinaryIO) -> int:
        """Print up to `most` of the selected messages; return how many."""
        if self._grep is not None:
            messages = [each for each in messages if self._grep.search(each.payload)]
        if self._decoded is not None:
            return self._write_rows(self._decoded, messages, most, out)
        if self._where is not None:
            messages = [each for each in messages if self._where(MessageFields(each))]
        messages = messages[:most]
        if self._behind is not None:
            payloads = [message.payload for message in messages]
            out.write(self._behind.join([*payloads, b""] if payloads else []))
        elif self._as_json:
            out.writelines([json_line(message) for message in messages])
        elif self._hex:
            out.writelines([message.payload.hex().encode() + b"\n" for message in messages])
        elif self._template is not None:
            fill = self._template.filled
            out.writelines([fill(MessageFields(each), each.payload) for each in messages])
        else:
            lines = [
                message_line(
                    each, self._time_of(each), self._said(each), is_coloured=self._is_coloured
                )
                for each in messages
            ]
            out.writelines([line.encode(errors="replace") + b"\n" for line in lines])
        return len(messages)

    def _write_rows(
        self, decoded: DecodedPayloads, messages: Sequence[Message], most: int, out: BinaryIO
    ) -> int:
        """Print decoded rows. A condition applies to rows, and `most` then counts rows."""
        if self._where is None:
            messages = messages[:most]
        rows = list(decoded.of(messages)) if messages else []
        if self._where is not None:
            rows = [row for row in rows if self._where(row)][:most]
        fill = decoded.line if self._template is None else self._template.filled
        out.writelines([fill(row) for row in rows])
        return len(messages) if self._where is None else len(rows)


def _decoded(text: str) -> DecodedPayloads:
    from penstock.cli.decoded_lines import DecodedPayloads  # noqa: PLC0415 - loads Arrow's parsers

    return DecodedPayloads(text)


def _condition(text: str) -> Condition:
    from penstock.cli.where import Condition  # noqa: PLC0415 - most need none

    return Condition(text)


# --- where it goes --------------------------------------------------------------------------------


@contextmanager
def _output(*, paged: bool) -> Iterator[BinaryIO]:
    """Yield the output: standard output, or a pager that exits if one screen is enough."""
    words = shlex.split(os.environ.get("PAGER", "less")) if paged else []
    pager = shutil.which(words[0]) if words else None
    if pager is None:
        with standard_output() as out:
            yield out
        return
    environment = {"LESS": "FRX", **os.environ}  # not S: it waits where a line is cut
    with (
        subprocess.Popen(  # noqa: S603 - it is the person's own
            [pager, *words[1:]], stdin=subprocess.PIPE, env=environment
        ) as process
    ):
        assert process.stdin is not None
        try:
            yield cast("BinaryIO", process.stdin)
            process.stdin.close()
        except BrokenPipeError:
            raise typer.Exit from None  # who has read enough
        finally:
            with suppress(BrokenPipeError):  # by what is still to be written
                process.stdin.close()
