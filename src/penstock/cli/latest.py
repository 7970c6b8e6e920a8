"""The commands about new files: `latest write`, `latest read`, `latest watch` and `serve ldata`."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time as clock_time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import triggers
from penstock.cli.options import AllowShutdown, Host, MaxClients, Quiet, checked_options
from penstock.cli.output import note, one_line
from penstock.cli.signals import serve_until_stopped, stop_on_signal
from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import ConnectionLost, InvalidOption, NotFound
from penstock.core.units import format_duration, format_time, parse_duration, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.protocols.lrose.ldata_client import LdataClient
    from penstock.protocols.lrose.ldata_format import LatestInfo
    from penstock.registry.latest import LatestDataInfo

__all__ = ["add_to", "serve_ldata"]

_SECOND = 1_000_000_000
#: Seconds between two checks whether to stop, and between two requests to a server.
_PATIENCE = 0.2
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Place = Annotated[
    str, typer.Argument(metavar="DIR", help="A directory, or ldatap://host:port/dir on another.")
]
Name = Annotated[str, typer.Option(help="What the files are called, behind an underscore.")]
MaxAge = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Pass over what is there at first and older than this."),
]
FromStart = Annotated[
    bool, typer.Option("--from-start", help="Begin with the oldest entry that the queue has.")
]
Label = Annotated[
    str | None,
    typer.Option(help="Keep the place under this name, and go on from there the next time."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(
        no_args_is_help=True,
        help="Announce new files, and wait for announced ones: latest_data_info.",
    )
    sub.command()(write)
    sub.command()(read)
    sub.command()(watch)
    app.add_typer(sub, name="latest", rich_help_panel="Files")
    triggers.add_to(app)


# --- one way or the other ---------------------------------------------------------------------


def _open_here(place: str, name: str, label: str | None = None, **options: Any) -> LatestDataInfo:
    from penstock.registry.latest import LatestDataInfo  # noqa: PLC0415 - for these commands only
    from penstock.registry.latest_files import LatestSettings  # noqa: PLC0415

    return LatestDataInfo(place, settings=LatestSettings(name=name), label=label, **options)


def _open_there(
    place: str, name: str, label: str | None = None, *, from_start: bool = False
) -> LdataClient | None:
    """Return the directory of a server, if the place is a server's URL."""
    if not place.startswith("ldatap:"):
        return None
    from penstock.protocols.lrose.ldata_client import LdataClient  # noqa: PLC0415

    return LdataClient(
        place,
        ldataFileName=name,
        readFmqFromStart=from_start,
        saveLatestReadInfo=label is not None,
        latestReadInfoLabel=label or "",
    )


def write(
    place: Place,
    path: Annotated[
        str | None,
        typer.Argument(
            help="The new file: in full, or as it is seen from the directory.", show_default=False
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="When its data is valid, or a forecast was made: ISO 8601, or seconds since 1970.",
            show_default="now",
        ),
    ] = None,
    ext: Annotated[str | None, typer.Option(help="The ending of its name.")] = None,
    data_type: Annotated[
        str | None, typer.Option("--type", help="The kind of data: mdv, spdb, …")
    ] = None,
    writer: Annotated[str | None, typer.Option(help="The program that wrote it.")] = None,
    lead: Annotated[
        str | None, typer.Option(metavar="TIME", help="It is a forecast for so much later.")
    ] = None,
    user1: Annotated[str | None, typer.Option(help="user_info1.")] = None,
    user2: Annotated[str | None, typer.Option(help="user_info2.")] = None,
    name: Name = "latest_data_info",
    queue_only: Annotated[
        bool, typer.Option("--queue-only", help="Leave the ASCII and XML files as they are.")
    ] = False,
    register: Annotated[
        bool, typer.Option("--register/--no-register", help="Tell the DataMapper of this machine.")
    ] = True,
) -> None:
    """Say that there is a new file, as LROSE's programs do."""
    from penstock.registry.latest import info_about  # noqa: PLC0415

    given: dict[str, Any] = {
        "file_ext": ext,
        "data_type": data_type,
        "writer": writer,
        "user_info1": user1,
        "user_info2": user2,
        "forecast_lead_secs": None if lead is None else int(parse_duration(lead, "lead")),
    }
    fields = {field: value for field, value in given.items() if value is not None}
    seconds = _seconds(time)
    there = _open_there(place, name)
    if there is not None:
        if path is not None and path.startswith("/"):
            raise InvalidOption("path", path, "is written as it is seen from the directory there")
        info = info_about("", path, latest_time=seconds, **fields)
        with there:
            there.write(replace(info, max_time=info.latest_time), fmq_only=queue_only)
        return
    with _open_here(place, name, register="map" if register else None) as latest:
        written = latest.write(path, time=seconds, fmq_only=queue_only, **fields)
        if path is not None and latest.data_path(written) is None:
            where = "a relative path is below the directory, not where you are"
            note(f"penstock: there is no file {path} yet in {place} ({where})")


def read(
    place: Place,
    max_age: MaxAge = None,
    from_start: FromStart = False,
    forced: Annotated[
        bool, typer.Option("--forced", help="Also what was read before under this label.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="All that is new, and not only the first of it.")
    ] = False,
    label: Label = None,
    name: Name = "latest_data_info",
    as_json: AsJson = False,
) -> None:
    """Show what is new: one line an entry; exit code 1 if there is nothing.

    Without --from-start or --label that is the newest entry.
    """
    count = 0
    with _reading(place, name, label, max_age, from_start) as next_one:
        while (info := next_one(0, forced)) is not None:
            count += 1
            _show(info, place, as_json=as_json)
            if not everything or forced:
                break
    if not count:
        if not place.startswith("ldatap:") and not Path(place).is_dir():
            raise NotFound(f"there is no directory {place}", hint="look at the path")
        note("penstock: nothing new")
        raise typer.Exit(1)


def watch(
    place: Place,
    max_age: MaxAge = None,
    from_start: FromStart = False,
    label: Label = None,
    name: Name = "latest_data_info",
    count: Annotated[int | None, typer.Option("--count", "-n", help="End after so many.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show new files as they come, until Ctrl-C."""
    left = -1 if count is None else count
    if not place.startswith("ldatap:") and not Path(place).is_dir():
        note(f"penstock: there is no directory {place} yet; it is waited for")
    with (
        _reading(place, name, label, max_age, from_start) as next_one,
        stop_on_signal() as stop,
    ):
        while left and not stop():
            info = next_one(_PATIENCE, False)
            if info is not None:
                left -= 1
                _show(info, place, as_json=as_json)


@contextlib.contextmanager
def _reading(
    place: str, name: str, label: str | None, max_age: str | None, from_start: bool
) -> Iterator[Callable[[float, bool], LatestInfo | None]]:
    """Yield a function that returns the next entry within a timeout or, forced, the last one."""
    age = None if max_age is None else parse_duration(max_age, "max_age")
    there = _open_there(place, name, label, from_start=from_start)
    if there is not None:
        with there:
            yield _Asking(there, age)
        return
    with _open_here(place, name, label) as latest:
        yield (
            lambda wait, forced: (
                latest.read(age, from_start=from_start, forced=True)
                if forced
                else latest.wait(age, from_start=from_start, timeout=wait)
            )
        )


class _Asking:
    """Polls a server, which does not notify clients."""

    def __init__(self, there: LdataClient, age: float | None) -> None:
        self._there = there
        self._age = age
        self._has_answered = False
        self._is_away = False

    def __call__(self, wait: float, forced: bool) -> LatestInfo | None:
        info = self._answer(forced, may_be_away=bool(wait) and self._has_answered)
        if info is None and wait:
            clock_time.sleep(wait)
        return info

    def _answer(self, forced: bool, *, may_be_away: bool) -> LatestInfo | None:
        """Return the answer of a server; while waiting, tolerate a server that restarts."""
        try:
            info = self._there.read(self._age, forced=forced)
        except ConnectionLost as error:
            if not may_be_away:
                raise
            if not self._is_away:
                note(f"penstock: {one_line(error)}; it is tried again")
            self._is_away = True
            return None
        self._has_answered, self._is_away = True, False
        return info


def _seconds(text: str | None) -> int:
    if text is None:
        return SYSTEM_CLOCK.now_ns() // _SECOND
    plain = text.strip()
    return int(plain) if plain.isascii() and plain.isdigit() else parse_time(plain) // _SECOND


def _show(info: LatestInfo, place: str, *, as_json: bool) -> None:
    """Print an entry on one line."""
    from penstock.registry.latest_files import data_path, relative_path  # noqa: PLC0415 - as needed

    directory = "" if place.startswith("ldatap:") else place
    found = data_path(info, directory) if directory else None
    if as_json:
        line = json.dumps({**info.to_fields(), "valid_time": info.valid_time, "path": found})
    else:
        lead = f"+{format_duration(info.forecast_lead_secs)}" if info.is_forecast else ""
        words = [
            format_time(info.latest_time * _SECOND) + lead,
            info.data_type or "-",
            info.writer_name,
            found or relative_path(info, directory),
        ]
        # LROSE's programs write anything; a terminal obeys some of it.
        line = _CONTROL.sub("?", "  ".join(words))
    typer.echo(line)
    sys.stdout.flush()


# --- serving ----------------------------------------------------------------------------------


def serve_ldata(
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Serve the directories below this one.")
    ],
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="The port; 0 takes any that is free.", show_default="5447"),
    ] = None,
    max_clients: MaxClients = 256,
    idle: Annotated[
        str, typer.Option(metavar="TIME", help="Cut off clients not heard of for so long.")
    ] = "30d",
    read_only: Annotated[bool, typer.Option("--read-only", help="Nobody may write.")] = False,
    register: Annotated[
        bool, typer.Option("--register/--no-register", help="Tell the DataMapper of this machine.")
    ] = True,
    allow_shutdown: AllowShutdown = False,
    quiet: Quiet = False,
) -> None:
    """Serve latest_data_info, as LROSE's DsLdataServer does, until Ctrl-C or SIGTERM."""
    from penstock.registry.latest_server import LdataServer, LdataServerOptions  # noqa: PLC0415 - for this only

    if not quiet:
        logging.getLogger("penstock.protocols.lrose").setLevel(logging.INFO)
    given = {
        "root": root,
        "host": host,
        "port": port,
        "max_clients": max_clients,
        "idle": idle,
        "read_only": str(read_only).lower(),
        "datamapper": str(register).lower(),
        "allow_shutdown": str(allow_shutdown).lower(),
    }
    options = checked_options("ldata", given, LdataServerOptions)
    books = serve_until_stopped(
        lambda: LdataServer(options),
        lambda it: f"serving the latest_data_info below {options.root} at {it.address}",
    ).statistics()
    typer.echo(
        f"stopped: {books.clients_seen:,} clients, {books.requests:,} requests, "
        f"{books.replies:,} answered"
    )
