"""The commands about the map of a site's data: `map` and `serve datamapper`."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from penstock.cli.console import console
from penstock.cli.options import AllowShutdown, Host, MaxClients, Quiet, checked_options
from penstock.cli.output import note, one_line
from penstock.cli.signals import StopSign, serve_until_stopped, stop_on_signal
from penstock.core.errors import PenstockError
from penstock.queue.storage import storage_errors
from penstock.registry import data_map_listing as listing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.protocols.lrose.datamapper_wire import DataSetInfo

__all__ = ["add_to", "serve_datamapper"]

#: Default seconds between two updates.
_LOOK_EVERY = 1.0
#: Ages in seconds up to which data are shown as fresh, and as fairly fresh.
_FRESH, _RECENT = 120, 3600


class _LroseSpelling(TyperCommand):
    """Also accepts options in the style of LROSE: `-all` for `--all`, `-later_than N`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {
            name.lstrip("-").replace("-", "_"): name
            for parameter in self.get_params(ctx)
            for name in parameter.opts
            if name.startswith("--")
        }
        spelled: list[str] = []
        for number, argument in enumerate(args):
            if argument == "-debug":  # LROSE's way to see its requests; nothing to see here
                continue
            name, equals, value = argument.lstrip("-").partition("=")
            is_option = argument.startswith("-") and name.replace("-", "_") in known
            if is_option:
                argument = known[name.replace("-", "_")] + equals + value  # noqa: PLW2901
            spelled.append(argument)
            # Its number is optional at the end of the line.
            if argument in {"--cont", "-c"} and number == len(args) - 1:
                spelled.append(str(_LOOK_EVERY))
        return super().parse_args(ctx, spelled)


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.command("map", cls=_LroseSpelling, rich_help_panel="Streams")(show_map)


# --- map ------------------------------------------------------------------------------------


def show_map(
    all: Annotated[bool, typer.Option("--all", help="Latest data, dates and size.")] = False,
    norm: Annotated[
        bool, typer.Option("--norm", help="Latest data and registration as ages, dates, size.")
    ] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Time of the latest data.")] = False,
    relt: Annotated[bool, typer.Option("--relt", help="Times as how long ago.")] = False,
    lreg: Annotated[bool, typer.Option("--lreg", help="Time of the last registration.")] = False,
    dates: Annotated[bool, typer.Option("--dates", help="First and last day in store.")] = False,
    size: Annotated[bool, typer.Option("--size", help="Files and bytes.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Status in words.")] = False,
    ip: Annotated[bool, typer.Option("--ip", help="Addresses of the hosts.")] = False,
    dir: Annotated[str, typer.Option("--dir", metavar="DIR", help="Only this directory.")] = "",
    type: Annotated[str, typer.Option("--type", metavar="TYPE", help="Only this type.")] = "",
    later_than: Annotated[
        int | None,
        typer.Option("--later-than", metavar="SECONDS", help="Only what is at least so old."),
    ] = None,
    host: Annotated[
        str,
        typer.Option("--host", help="Where the map is; A:B asks B's through A's."),
    ] = "localhost",
    port: Annotated[
        int | None,
        typer.Option("--port", min=1, max=65535, envvar="DMAP_PORT", help="Its port, if not 5434."),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Numbers, for programs.")] = False,
    xml: Annotated[bool, typer.Option("--xml", help="XML, for programs.")] = False,
    odir: Annotated[
        Path | None,
        typer.Option("--odir", metavar="DIR", help="Into a new file in this directory."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Live, until Ctrl-C.")] = False,
    cont: Annotated[
        float | None,
        typer.Option("--cont", "-c", metavar="SECONDS", min=0.1, help="Repeat at this interval."),
    ] = None,
    instance: Annotated[str, typer.Option("--instance", hidden=True)] = "",
) -> None:
    """Show which data a site has, and how fresh they are.

    It asks a DataMapper, LROSE's or that of `penstock serve datamapper`. Options may be written
    as for PrintDataMap, with one dash: -all, -relt, -later_than 600.
    """
    from penstock.protocols.lrose.datamapper_client import (  # noqa: PLC0415 - as needed
        DataMapClient,
        below_data_dir,
    )

    del instance  # of PrintDataMap itself, for LROSE's process map
    if plain and xml:
        raise typer.BadParameter("give at most one of --plain and --xml")
    is_default = not (all or norm or latest or relt or lreg or dates or size or status or ip)
    wanted = listing.Columns(
        latest=latest or all or norm or relt or is_default,
        relt=relt or norm or is_default,
        lreg=lreg or norm or is_default,
        dates=dates or all or norm,
        size=size or all or norm or is_default,
        status=status,
        ip=ip,
    )
    client = DataMapClient(host, port)
    directory = below_data_dir(dir) if dir.startswith("/") else dir

    def look() -> _Look:
        infos = client.selected(type, directory) if type or dir else client.all()
        return _Look(infos, host, wanted, later_than, is_default=is_default)

    form = "xml" if xml else "plain" if plain else "table"
    if odir is not None:
        show: Callable[[_Look], None] = lambda look: _write_file(look, form, odir)  # noqa: E731
    else:
        show = lambda look: _print(look, form)  # noqa: E731
    if not watch and cont is None:
        show(look())
        return
    every = _LOOK_EVERY if cont is None else cont
    with stop_on_signal() as stop:
        if odir is None and form == "table" and console.is_terminal:
            _live(look, every, stop)
        else:
            _again(look, show, every, stop)


class _Look:
    """An answer of the map, and how to show it."""

    def __init__(
        self,
        infos: Sequence[DataSetInfo],
        hosts: str,
        wanted: listing.Columns,
        later_than: int | None,
        *,
        is_default: bool,
    ) -> None:
        self.infos = infos
        self.hosts = hosts
        self.now = int(time.time())
        self.shown = listing.listed(infos, later_than=later_than, now=self.now)
        if is_default and any(info.status for info in self.shown):
            wanted = replace(wanted, status=True)
        self._wanted = wanted
        self._is_default = is_default
        #: Time of the answer, by the server's clock.
        self.at = infos[0].check_time if infos else self.now

    def text(self, form: str) -> str:
        """Return the text that PrintDataMap prints."""
        if form == "xml":
            return listing.xml(self.infos, self.hosts)
        if form == "plain":
            return listing.plain(self.infos, self.shown)
        wanted = listing.Columns() if self._is_default else self._wanted
        return listing.table(self.infos, self.shown, wanted, self.hosts, self.now)

    def table(self) -> Table:
        """Return a table for a terminal."""
        host = self.hosts.rpartition(":")[2]
        through = f", through {self.hosts.rpartition(':')[0]}" if host != self.hosts else ""
        hidden = len(self.infos) - len(self.shown)
        title = (
            f"{len(self.shown):,} data sets on {host}{through}, "
            f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(self.at))} UTC"
            + (f" ({hidden:,} fresher ones not shown)" if hidden else "")
        )
        table = Table(
            box=box.SIMPLE_HEAD,
            title=escape(title),
            title_justify="left",
            title_style="bold",
            padding=(0, 1, 0, 0),
        )
        columns = listing.columns(self._wanted, self.infos)
        if self._is_default:  # omit columns without values
            columns = [each for each in columns if any(map(each.value, self.shown))]
        for column in columns:
            justify: Literal["right", "left"] = "right" if column.width else "left"
            is_long = column.title in {"Dir", "Status"}
            table.add_column(
                column.title,
                justify=justify,
                no_wrap=not is_long,
                overflow="fold",
                min_width=12 if is_long else None,
            )
        for info in self.shown:
            cells = []
            for column in columns:
                text = escape(column.value(info))
                is_latest = column.title.startswith("Latest") and text
                cells.append(f"[{self._colour(info)}]{text}[/]" if is_latest else text)
            table.add_row(*cells)
        return table

    def _colour(self, info: DataSetInfo) -> str:
        age = self.at - info.latest_time
        return "green" if age <= _FRESH else "yellow" if age <= _RECENT else "red"


def _print(look: _Look, form: str) -> None:
    if form == "table" and console.is_terminal:
        console.print(look.table())
        return
    sys.stdout.write(look.text(form))
    sys.stdout.flush()


def _live(look: Callable[[], _Look], every: float, stop: StopSign) -> None:
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while not stop():
            try:
                shown = look().table()
            except PenstockError as error:
                shown = Table(box=None, title=escape(one_line(error)), title_justify="left")
            live.update(shown, refresh=True)
            _pause(every, stop)


def _again(
    look: Callable[[], _Look], show: Callable[[_Look], None], every: float, stop: StopSign
) -> None:
    is_told = False
    while not stop():
        try:
            found = look()
        except PenstockError as error:
            if not is_told:
                note(f"penstock: {one_line(error)}")
            is_told = True
        else:
            is_told = False
            show(found)
        _pause(every, stop)


def _pause(seconds: float, stop: StopSign) -> None:
    until = time.monotonic() + seconds
    while not stop() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))


def _write_file(look: _Look, form: str, folder: Path) -> None:
    """Write a file as PrintDataMap does, and announce it in latest_data_info."""
    from penstock.registry.latest import LatestDataInfo  # noqa: PLC0415 - most need none

    if not str(folder).startswith((os.sep, ".")):
        root = os.environ.get("RAP_DATA_DIR") or os.environ.get("DATA_DIR") or "."
        folder = Path(root) / folder
    moment = time.strftime("%Y%m%d_%H%M%S", time.gmtime(look.at))
    path = folder / f"datasets_{look.hosts}_{moment}.{form}"
    with storage_errors("writing", str(path)):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(look.text(form), "utf-8", "surrogateescape")
    with LatestDataInfo(folder) as latest:
        latest.write(
            path,
            time=look.at,
            writer="penstock map",
            data_type="xml" if form == "xml" else "text",
        )


# --- serve datamapper -----------------------------------------------------------------------


def serve_datamapper(
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the map in this file, in LROSE's own form."),
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="The port; 0 takes any that is free.", show_default="5434"),
    ] = None,
    save_every: Annotated[
        str, typer.Option(metavar="TIME", help="Save the map so often, if it has changed.")
    ] = "10s",
    purge_age: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Forget what was not heard of for so long, such as 1d."),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=HOST:PORT]",
            help="Pass questions on to the map of this host, if they ask for it; repeatable.",
        ),
    ] = None,
    max_entries: Annotated[int, typer.Option(help="Data sets in the map, at most.")] = 10_000,
    max_clients: MaxClients = 256,
    allow_shutdown: AllowShutdown = False,
    quiet: Quiet = False,
) -> None:
    """Serve the map of a site's data, as LROSE's DataMapper does, until Ctrl-C or SIGTERM.

    LROSE's programs and Penstock's register here what they write; `penstock map` shows it.
    """
    from penstock.registry.data_map_server import (  # noqa: PLC0415 - as needed
        DataMapServer,
        MapServerOptions,
    )

    if not quiet:
        logging.getLogger("penstock.registry").setLevel(logging.INFO)
    given = {
        "host": host,
        "port": port,
        "state": state,
        "save_every": save_every,
        "purge_age": purge_age,
        "relay": ",".join(relay or []) or None,
        "max_entries": max_entries,
        "max_clients": max_clients,
        "allow_shutdown": allow_shutdown,
    }
    options = checked_options("datamapper", given, MapServerOptions)
    kept = "" if options.state is None else f", kept in {options.state}"
    server = serve_until_stopped(
        lambda: DataMapServer(options),
        lambda it: f"serving a data map at {it.address}: {len(it.map):,} data sets{kept}",
    )
    books = server.map_statistics()
    typer.echo(
        f"stopped: {len(server.map):,} data sets, {books.requests:,} requests "
        f"({books.registered:,} registered, {books.asked + books.relayed:,} asked, "
        f"{books.deleted:,} deleted, {books.refused:,} refused)"
    )
