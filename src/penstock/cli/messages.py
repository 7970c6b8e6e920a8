"""The command that writes messages, `put`; and what commands about messages have in common."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from penstock.cli.message_text import unescaped
from penstock.cli.output import is_terminal, note, output_refused
from penstock.core.capabilities import AllOrNone
from penstock.core.endpoints import describe, open_writer, storage_of
from penstock.core.errors import NotFound, PenstockError, StorageError, Unsupported
from penstock.core.json_lines import chunks_of, message_from_json, read_lines
from penstock.core.statistics import WriterStatistics
from penstock.core.units import format_size, format_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.core.interfaces import Writer

__all__ = [
    "LOST",
    "Follow",
    "From",
    "Register",
    "Url",
    "add_to",
    "fits_32_bits",
    "is_finite",
    "is_there",
    "lacks_messages",
    "progress_told",
    "tell_interrupted",
    "tell_range",
    "writer_to",
]

#: Exit code when messages were lost before they could be read.
LOST: Final = 3

#: Layouts in which a new message overwrites the oldest; "remote" is a queue of an LROSE server,
#: which does not tell its size.
_RINGS: Final = frozenset({"wide", "classic", "remote"})

#: Seconds between two updates on a terminal.
_SHOWN_EVERY: Final = 0.25
#: With a rate, messages due within this time (seconds) are written together.
_SLICE: Final = 0.02


def fits_32_bits(number: int | None) -> int | None:
    """Check a type or subtype. A range would take half of the width of the help.

    :raises typer.BadParameter: the number is too large, or too small.
    """
    if number is not None and not -(2**31) <= number < 2**31:
        raise typer.BadParameter(f"{number} does not fit: types are -2147483648 to 2147483647")
    return number


def is_finite(rate: float | None) -> float | None:
    """Check a rate.

    :raises typer.BadParameter: it is infinite.
    """
    if rate is not None and not math.isfinite(rate):
        raise typer.BadParameter(f"{rate} is no rate: leave it out for as fast as it goes")
    return rate


Url = Annotated[str, typer.Argument(metavar="URL", help="The stream, such as fmq:/path/name.")]
From = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="POSITION",
        help="Where to start: start, end, last, a sequence number, -10 (from the end), or a time: "
        "2026-05-01T12:00Z, 12:00, yesterday, -10m (in UTC).",
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")]
Register = Annotated[
    bool,
    typer.Option(
        "--register", help="Put the stream on this machine's data map (see map) as it is written."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the application."""
    app.command(rich_help_panel="Messages")(put)


def put(
    url: Url,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            "-t",
            metavar="TEXT",
            help="A message of this text; repeatable. -: a message for each line of stdin.",
        ),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="A message of this file's bytes, -: of stdin; repeatable.",
        ),
    ] = None,
    jsonl: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|-",
            help='Messages as JSON lines: {"payload": …, "type": 0, "subtype": 0, "time_ns": '
            "optional}; a payload is text or any JSON value, payload_b64 any bytes. What cat "
            "--json prints will do; repeatable.",
        ),
    ] = None,
    type: Annotated[
        int, typer.Option(metavar="N", callback=fits_32_bits, help="Type of the messages.")
    ] = 0,
    subtype: Annotated[
        int, typer.Option(metavar="N", callback=fits_32_bits, help="Subtype of the messages.")
    ] = 0,
    delimiter: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What ends a message of stdin, if not a newline."),
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", "-0", help="A zero byte ends a message of stdin.")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="N", callback=is_finite, help="Messages per second, at most.", min=0.001
        ),
    ] = None,
    register: Register = False,
) -> None:
    """Write messages to a stream, and create it if it is missing.

    Without --text, --file and --jsonl, a line of standard input is a message. Order: all --text,
    all --file, then --jsonl. Exit code 3: messages were overwritten, as the queue that it created
    is too small, or no client of a server such as psi: came to take them.

    Examples:
      seq 1 100 | penstock put fmq:/tmp/demo/numbers
      penstock put fmq:/tmp/demo/pictures --file photo.jpg --type 7
      penstock cat log:/data/beams --json | penstock put log:/tmp/copy --jsonl -
    """
    is_piped = not (text or file or jsonl) and _has_input()
    if not (text or file or jsonl or is_piped):
        raise typer.BadParameter("give --text, --file or --jsonl, or lines by a pipe")
    if [*(text or []), *map(str, file or []), *(jsonl or [])].count("-") > 1:
        raise typer.BadParameter("- is given twice: standard input can be read once")
    ending = _ending(delimiter, null)
    _check_inputs([*(file or []), *map(Path, jsonl or [])])
    is_new = not is_there(url)
    writer = writer_to(url, register)
    _tell_left_out(writer, {"type": type, "subtype": subtype})
    # What is there if it ends early: nothing of a file.
    kept = WriterStatistics(0, 0, 0, 0, 0.0, None) if isinstance(writer, AllOrNone) else None
    with progress_told(lambda: _written(kept or writer.statistics())):
        with writer, contextlib.closing(_Pace(writer, rate)) as paced:
            for each in text or []:
                if each == "-":
                    _put_lines(paced, ending, type, subtype)
                else:
                    _put_pieces(paced, [os.fsencode(each)], type, subtype)
            for path in file or []:
                _put_pieces(paced, [_read_file(path)], type, subtype)
            if is_piped:
                _put_lines(paced, ending, type, subtype)
            for each in jsonl or []:
                _put_json_lines(paced, each, type, subtype)
            writer.flush()
        kept = written = writer.statistics()
        _report(_written(written))
    if writer.statistics().untaken or (is_new and lacks_messages(url, written.messages)):
        raise typer.Exit(LOST)


def _tell_left_out(writer: Writer, given: Mapping[str, int]) -> None:
    """Report the fields that were given, and that the stream does not store."""
    for field, fate in writer.cannot_carry.items():
        if given.get(field):
            note(f"penstock: {writer.url}: {field} is {fate}")


def _report(text: str) -> None:
    try:
        typer.echo(text)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise output_refused(error) from error  # it is not the stream that is full


def _ending(delimiter: str | None, null: bool) -> bytes:
    """Return what ends a message of standard input.

    :raises typer.BadParameter: both options are given, or the delimiter is empty.
    """
    if delimiter == "":
        raise typer.BadParameter("--delimiter is empty")
    if null and delimiter is not None:
        raise typer.BadParameter("give --null or --delimiter")
    return b"\0" if null else b"\n" if delimiter is None else unescaped(delimiter).encode()


def _has_input() -> bool:
    """Tell whether standard input is a pipe, a socket or a file."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def _put_pieces(paced: _Pace, payloads: list[bytes], type: int, subtype: int) -> None:
    for part in paced.parts(payloads):
        paced.writer.write_many(part, type, subtype)


def _put_lines(paced: _Pace, ending: bytes, type: int, subtype: int) -> None:
    """Write standard input, split at `ending`, as it arrives."""
    for chunk in chunks_of("-", ending):
        if paced.is_limited:
            _put_pieces(paced, chunk.split(ending), type, subtype)
        else:
            paced.writer.write_split(chunk, ending, type, subtype)
            paced.show()


def _put_json_lines(paced: _Pace, path: str, type: int, subtype: int) -> None:
    from penstock.core.batch import batch_from_messages  # noqa: PLC0415 - loads Arrow

    for lines in read_lines(path):
        messages = [message_from_json(line, path, number, type, subtype) for number, line in lines]
        for part in paced.parts(messages):
            paced.writer.write_batch(batch_from_messages(part))


def writer_to(url: str, register: bool, **options: object) -> Writer:
    """Open a stream for writing; with `register`, put it on the data map."""
    writer = open_writer(url, **options)
    if not register:
        return writer
    from penstock.registry.registration import registered  # noqa: PLC0415 - most need none

    return registered(writer)


def tell_range(url: str, asked: str) -> None:
    """Print the range of a stream that has none of the requested messages."""
    try:
        found = describe(url)
    except Unsupported:  # its range is unknown
        return
    held = "it has none"
    if found.youngest_seq is not None and found.oldest_seq is not None:
        held = f"it has {found.oldest_seq} to {found.youngest_seq}"
        times = [found.oldest_time_ns, found.youngest_time_ns]
        known = [format_time(moment) for moment in times if moment is not None]
        if len(known) == len(times):
            held += f", appended from {known[0]} to {known[1]}"
    note(f"penstock: {url} has no message {asked}: {held}")


@contextlib.contextmanager
def progress_told(progress: Callable[[], str]) -> Iterator[None]:
    """Report the progress if the block ends early: as a note of the error, or after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        tell_interrupted(progress())
        raise
    except Exception as error:
        error.add_note(progress())
        raise


def tell_interrupted(progress: str) -> None:
    """Print that a command was interrupted, and its progress."""
    note(f"penstock: interrupted; {progress}")


_T = TypeVar("_T")


class _Pace:
    """Keeps to a rate, and shows the progress on a terminal."""

    def __init__(self, writer: Writer, rate: float | None) -> None:
        self.writer = writer
        self._rate = rate
        self._began = time.monotonic()
        self._shown = self._began
        self._is_shown = False

    @property
    def is_limited(self) -> bool:
        return self._rate is not None

    def parts(self, items: list[_T]) -> Iterator[list[_T]]:
        """Yield the items in parts, each when it is due."""
        size = len(items) if self._rate is None else max(1, int(self._rate * _SLICE))
        for at in range(0, len(items), max(1, size)):
            if self._rate is not None:
                due = self._began + self.writer.statistics().messages / self._rate
                time.sleep(max(0.0, due - time.monotonic()))
            yield items[at : at + size]
            self.show()

    def show(self) -> None:
        """Show the progress on a terminal, every `_SHOWN_EVERY` seconds."""
        now = time.monotonic()
        if now - self._shown >= _SHOWN_EVERY and is_terminal(sys.stderr):
            done = self.writer.statistics().messages
            self._shown, self._is_shown = now, True
            sys.stderr.write(f"\r\x1b[K{done:,} messages, {done / (now - self._began):,.0f}/s")
            sys.stderr.flush()

    def close(self) -> None:
        """Clear the progress line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
        self._is_shown = False


def _written(so_far: WriterStatistics) -> str:
    plural = "" if so_far.messages == 1 else "s"
    return f"{so_far.messages} message{plural} written ({format_size(so_far.bytes)})"


def _check_inputs(paths: list[Path]) -> None:
    """Check that files can be read, before a stream is created for them.

    They are not opened: one may be a pipe.

    :raises StorageError: one cannot be read.
    """
    for path in paths:
        problem = None
        if str(path) == "-":
            problem = errno.EBADF if sys.stdin is None else None
        elif not path.exists():
            problem = errno.ENOENT
        elif path.is_dir():
            problem = errno.EISDIR
        elif not os.access(path, os.R_OK):
            problem = errno.EACCES
        if problem is not None:
            closed = "standard input is closed" if str(path) == "-" else os.strerror(problem)
            error = StorageError("reading", str(path), OSError(problem, closed))
            error.add_note("0 messages written (0 B)")
            raise error


def _read_file(path: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise StorageError("reading", str(path), error) from error


# --- queues that are too small --------------------------------------------------------------------


def is_there(url: str) -> bool:
    """Tell whether a stream exists, before a command writes to it."""
    try:
        if storage_of(url) is None:  # or it cannot tell
            describe(url)
    except NotFound:
        return False
    except PenstockError:  # it cannot be asked, or is not to be written: opening it will tell
        return True
    return True


def lacks_messages(url: str, written: int = 0) -> bool:
    """Tell, and report, whether a stream that this command created lacks some of its messages.

    No reader can have been waiting for them: the stream did not exist before.

    :param written: how many were written, if each is one message of the stream
    """
    try:
        kept = describe(url)
    except NotFound:
        note(f"penstock: {url} was removed while it was written, with all its messages")
        return True
    is_ring = kept.layout in _RINGS
    if kept.blocking or not (kept.slots or is_ring):
        return False
    total = 0 if kept.youngest_seq is None else kept.youngest_seq + 1
    if is_ring and kept.count < total:
        hint = "a log keeps all; or make the queue larger and put them again"
        if kept.slots:
            size = max(kept.buffer_size, kept.bytes * -(-total // max(1, kept.count)) * 2)
            larger = f"{kept.url.partition('?')[0]}?slots={total}&size={-(-size >> 20)}M"
            larger += "" if kept.layout == "wide" else f"&layout={kept.layout}"
            hint += f": penstock create --replace '{larger}'"
        note(
            f"penstock: the queue holds {kept.count:,} messages: the first {total - kept.count:,} "
            f"are overwritten (hint: {hint})"
        )
        return True
    if kept.count < written:
        note(
            f"penstock: {written - kept.count:,} of {written:,} messages are gone: the stream was "
            "removed while it was written, or its retention removed them"
        )
        return True
    return False
