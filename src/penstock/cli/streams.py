"""The commands about the streams of a folder: `ls`, `rm` and `resize`."""

from __future__ import annotations

import glob
import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.messages import Url
from penstock.cli.output import is_coloured, note, one_line, standard_output
from penstock.core import endpoints
from penstock.core.errors import DamagedQueue, InvalidURL, NotFound, PenstockError, Unsupported
from penstock.core.units import format_duration, format_size
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.core.interfaces import StreamInfo

__all__ = ["Listed", "add_to", "found_at", "look_at"]

#: A stream silent for this many mean intervals between its messages has no rate any more.
_SILENT: Final = 10
#: The least such silence (nanoseconds).
_SILENT_NS: Final = 10_000_000_000


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    for command in (ls, rm, resize):
        app.command(rich_help_panel="Streams")(command)


# --- ls -------------------------------------------------------------------------------------------


def ls(
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DIR|PATTERN|URL]...",
            help="Folders, patterns such as '/data/radar*', or URLs such as 'fmq:/data/*'. "
            "Without any: this folder.",
        ),
    ] = None,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", "-R", help="Also in the folders below.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line.")] = False,
) -> None:
    """List queues and logs: how much is in them, how fast, who writes and reads.

    The rate is the mean of what is there. A reader with a name whose process has ended is dead; its
    place is kept. A store of psi's, or of ours, is one line: psi-store ls shows its streams. Exit
    code 1 if one cannot be read.

    Examples:
      penstock ls /data -r
      penstock ls 'fmq:/data/radar*' --json
    """
    urls = [url for place in places or ["."] for url in found_at(place, recursive=recursive)]
    listed = [look_at(url) for url in dict.fromkeys(urls)]
    if as_json:
        with standard_output() as out:
            out.writelines(json.dumps(each.as_dict()).encode() + b"\n" for each in listed)
    elif listed:
        with standard_output() as out:
            for line in _lines(listed, is_plain=not is_coloured()):
                out.write(line.encode(errors="backslashreplace") + b"\n")
        for each in listed:
            if each.error:
                note(f"penstock: {each.url}: {each.error}")
    else:
        note(
            f"penstock: no queue and no log in {', '.join(places or ['.'])} (hint: -r looks below)"
        )
    if any(each.error for each in listed):
        raise typer.Exit(1)


def found_at(place: str, *, recursive: bool = False) -> Iterator[str]:
    """Yield URLs of streams and paths of stores at a folder, a pattern of names, or a URL.

    :raises NotFound: the folder does not exist.
    """
    from penstock.protocols.psi.store.lookup import is_store  # noqa: PLC0415 - rm needs neither
    from penstock.queue.inventory import streams_in  # noqa: PLC0415

    try:
        URL.parse(place)
    except InvalidURL:
        pass
    else:
        yield from endpoints.find_streams(place)
        return
    if is_store(Path(place)):
        yield place
        return
    if Path(place).is_dir():
        yield from streams_in(place, recursive=recursive, is_store=is_store)
        return
    folder, pattern = os.path.split(place)
    folders = glob.glob(folder) if folder else ["."]  # noqa: PTH207 - a Path has none from the root
    found = [
        url
        for each in folders
        if Path(each).is_dir()
        for url in streams_in(each, pattern, recursive=recursive, is_store=is_store)
    ]
    if not found and not glob.has_magic(place):
        raise NotFound(f"there is no folder and no stream {place}", hint="penstock ls -r DIR")
    yield from found


@dataclass(frozen=True)
class Listed:
    """The status of one stream in a list."""

    url: str
    kind: str = ""
    messages: int = 0
    bytes: int = 0
    #: Messages per second, as they were appended.
    rate: float = 0.0
    newest_ns: int | None = None
    newest_seq: int | None = None
    writer: int | None = None
    readers: tuple[dict[str, Any], ...] = ()
    #: Messages that are gone and that these readers have not passed yet, and those that groups
    #: have lost. A reader passes a message with its next call.
    lost: int = 0
    error: str = ""

    @property
    def lag(self) -> int | None:
        """How far the slowest reader is behind; None: there are no readers."""
        return max((reader["behind"] for reader in self.readers), default=None)

    @property
    def dead(self) -> int:
        """Readers whose process has ended, but whose position is kept."""
        return sum(not reader["alive"] for reader in self.readers)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON."""
        if self.error:
            return {"url": self.url, "error": self.error}
        return {
            **{name: value for name, value in vars(self).items() if name != "error"},
            "rate": round(self.rate, 3),
            "lag": self.lag,
            "dead": self.dead,
        }


def look_at(url: str) -> Listed:
    """Return the status of a stream or a store, or why it cannot be read."""
    try:
        found = _describe(url)
    except PenstockError as error:
        kind = "damaged" if isinstance(error, DamagedQueue) else "unreadable"
        return Listed(url, kind, error=one_line(error))
    details = found.details
    readers = [
        {"name": each["name"], "pid": each["pid"], "alive": each["alive"], "behind": each["behind"]}
        for each in (*details.get("readers", ()), *details.get("cursors", ()))
    ]
    readers += [
        {
            "name": group["name"],
            "pid": None,
            "alive": any(member["alive"] for member in group["members"]),
            "behind": group["lag"],
        }
        for group in details.get("groups", ())
        if "damage" not in group
    ]
    return Listed(
        url,
        found.layout,
        found.count,
        found.bytes,
        _rate(found),
        found.youngest_time_ns,
        found.youngest_seq,
        details.get("writer_pid"),
        tuple(readers),
        _lost(found),
    )


def _describe(url: str) -> StreamInfo:
    try:
        URL.parse(url)
    except InvalidURL:  # the path of a store, as `found_at` yields it
        from penstock.protocols.psi.store.lookup import describe_store  # noqa: PLC0415 - few have one

        return describe_store(Path(url))
    return endpoints.describe(url)


def _lost(found: StreamInfo) -> int:
    details, oldest = found.details, found.oldest_seq or 0
    places = [*details.get("readers", ()), *details.get("cursors", ())]
    gone = sum(max(0, oldest - int(reader["next_seq"])) for reader in places)
    return gone + sum(int(group.get("lost", 0)) for group in details.get("groups", ()))


def _rate(found: StreamInfo) -> float:
    oldest, newest = found.oldest_time_ns, found.youngest_time_ns
    if oldest is None or newest is None or newest <= oldest or found.count < 2:  # noqa: PLR2004
        return 0.0
    between = (newest - oldest) / (found.count - 1)
    is_silent = time.time_ns() - newest > max(_SILENT * between, _SILENT_NS)
    return 0.0 if is_silent else 1e9 / between


_TITLES: Final = (
    "stream",
    "kind",
    "messages",
    "size",
    "rate",
    "newest",
    "writer",
    "readers",
    "lag",
)
_WORDS: Final = {"stream", "kind", "writer", "readers"}


def _lines(listed: list[Listed], *, is_plain: bool) -> Iterator[str]:
    """Yield the lines of a table. Without rich, which takes a millisecond per line."""
    now = time.time_ns()
    rows = [list(_TITLES), *(_cells(each, now) for each in listed)]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    for number, row in enumerate(rows):
        cells = []
        for title, width, cell in zip(_TITLES, widths, row, strict=False):
            padded = f"{cell:{'<' if title in _WORDS else '>'}{width}}"
            cells.append(_coloured(title, cell, padded) if number and not is_plain else padded)
        line = "  ".join(cells).rstrip()
        yield line if number or is_plain else typer.style(line, bold=True)


def _cells(each: Listed, now: int) -> list[str]:
    if each.error:
        return [each.url, each.kind]
    alive = len(each.readers) - each.dead
    readers = [str(alive)] if alive else []
    readers += [f"{each.dead} dead"] if each.dead else []
    return [
        each.url,
        each.kind,
        f"{each.messages:,}",
        format_size(each.bytes),
        f"{each.rate:,.1f}/s" if each.rate else "-",
        "-" if each.newest_ns is None else _ago(now - each.newest_ns),
        str(each.writer) if each.writer else "-",
        ", ".join(readers) or "-",
        "-" if each.lag is None else f"{each.lag:,}",
    ]


def _coloured(title: str, cell: str, padded: str) -> str:
    if (title == "readers" and "dead" in cell) or (
        title == "kind" and cell in {"damaged", "unreadable"}
    ):
        return typer.style(padded, fg="red")
    if title in {"writer", "readers"} and cell != "-":
        return typer.style(padded, fg="green")
    return padded


def _ago(nanoseconds: int) -> str:
    return f"{format_duration(max(0, nanoseconds) / 1e9)} ago"


# --- rm -------------------------------------------------------------------------------------------


def rm(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="The streams, or patterns of them.")
    ],
    force: Annotated[
        bool,
        typer.Option("--force", "-f", help="Also those that somebody writes to or reads."),
    ] = False,
) -> None:
    """Remove streams with all that is in them.

    A stream in use is not removed without --force. With it, its writer reports the loss and creates
    the stream again for its next message, and readers wait for that.

    Examples:
      penstock rm fmq:/data/old 'log:/data/test*'
    """
    found = [url for given in urls for url in _streams(given)]
    kept = [error for url in found if (error := _removal(url, force=force)) is not None]
    for error in kept:
        note(f"penstock: {one_line(error)}")
    if kept:
        raise typer.Exit(1)


def _streams(given: str) -> list[str]:
    found = endpoints.find_streams(given)
    if not found:
        raise NotFound(f"nothing is found by {given}", hint="penstock ls shows what there is")
    return found


def _removal(url: str, *, force: bool) -> PenstockError | None:
    """Remove a stream and report it; return the reason if it is not removed."""
    try:
        try:
            count = endpoints.describe(url).count
            held = f"{count:,} message{'' if count == 1 else 's'}"
        except DamagedQueue:
            held = "damaged"  # and removed only by force
        endpoints.remove(url, force=force)
    except NotFound as error:
        error.hint = "penstock ls shows what there is"  # and not how to create it
        return error
    except PenstockError as error:
        return error
    typer.echo(f"removed {url.partition('?')[0]} ({held})")
    return None


# --- resize ---------------------------------------------------------------------------------------


def resize(
    url: Url,
    slots: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Messages that it holds at most.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes of its buffer, such as 64M.")
    ] = None,
) -> None:
    """Give a queue another size, and keep its messages and its readers.

    Stop its writer first. Readers go on without a gap. All its messages must fit the new size.

    Examples:
      penstock resize fmq:/data/beams --slots 100000 --size 256M
    """
    if slots is None and size is None:
        raise typer.BadParameter("give --slots, --size or both")
    before = endpoints.describe(url)
    try:
        endpoints.resize(url, slots=slots, size=size)
    except Unsupported as error:
        error.hint = error.hint or "copy it to a queue of the size that you want: penstock cp"
        raise
    now = endpoints.describe(url)
    typer.echo(
        f"{url.partition('?')[0]}: {before.slots:,} to {now.slots:,} slots, "
        f"{format_size(before.buffer_size)} to {format_size(now.buffer_size)}; "
        f"{now.count:,} message{'' if now.count == 1 else 's'} kept"
    )
