"""The commands about psi: `psi-store ls`, `psi-store export` and `serve psi`."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.console import console
from penstock.cli.messages import LOST
from penstock.cli.options import Host, MaxClients, Quiet
from penstock.cli.output import note
from penstock.cli.signals import Ending
from penstock.core.errors import InvalidOption
from penstock.core.units import format_size, format_time
from penstock.protocols.psi.codecs.type_names import plain_name
from penstock.protocols.psi.errors import DamagedStore
from penstock.protocols.psi.ticks import MIN_NS

if TYPE_CHECKING:
    from penstock.protocols.psi.metadata import StreamMetadata
    from penstock.protocols.psi.store.export import StoreSource
    from penstock.protocols.psi.store.psi_files import StoreCheck

__all__ = ["add_to", "serve_psi"]

#: The most damaged places listed one by one.
_LINES: Final = 20

Salvage = Annotated[
    bool, typer.Option("--salvage", help="Of a damaged store take what can be read.")
]
Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A store, or a directory with stores.")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(no_args_is_help=True, help="Look at and export stores, psi's and ours.")
    for command in (ls, export):
        sub.command()(command)
    app.add_typer(sub, name="psi-store", rich_help_panel="Streams")


def ls(
    folder: Directory,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List stores and their streams: type, messages, size, and from when to when."""
    from penstock.protocols.psi.store.export import open_sources  # noqa: PLC0415 - loads Parquet

    with open_sources(folder) as sources:
        listed = [
            _fields(source.name, source.folder, stream)
            for source in sources
            for stream in source.streams()
        ]
        # A store that was never closed was read completely to count it, so check all of it.
        damaged = [
            _tell_damage(source)
            for source in sources
            if not source.check(whole=not _is_closed(source)).is_whole
        ]
    if as_json:
        typer.echo(json.dumps(listed))
    else:
        _show(listed)
    if damaged:
        raise typer.Exit(LOST)


def _is_closed(source: StoreSource) -> bool:
    return all(stream.is_closed for stream in source.announced())


def _tell_damage(source: StoreSource, salvage: bool = False) -> StoreCheck:
    """Print the damaged places of a store."""
    check = source.check()
    for line in check.lines()[:_LINES]:
        note(f"penstock: {source.name}: {line}")
    if len(check.lines()) > _LINES:
        note(f"penstock: {source.name}: and {len(check.lines()) - _LINES:,} more")
    if not check.is_whole and not salvage:
        note("penstock: copy the files again if they are whole elsewhere; --salvage takes the rest")
    return check


def _show(listed: list[dict[str, Any]]) -> None:
    table = Table(box=None)
    for name, right in (
        ("store", False),
        ("stream", False),
        ("type", False),
        ("messages", True),
        ("size", True),
        ("first created", False),
        ("last created", False),
        ("state", False),
    ):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in listed:
        table.add_row(
            *map(Text, (row["store"], row["stream"], plain_name(row["type"]))),  # no markup
            f"{row['messages']:,}",
            format_size(row["bytes"]),
            row["first_created"] or "-",
            row["last_created"] or "-",
            "closed" if row["closed"] else "open",
        )
    console.print(table)


def _fields(store: str, folder: Path, stream: StreamMetadata) -> dict[str, Any]:
    first, last = (
        None if moment == MIN_NS else format_time(moment)
        for moment in (stream.first_creation_ns, stream.last_creation_ns)
    )
    return {
        "store": store,
        "folder": str(folder),
        "stream": stream.name,
        "id": stream.id,
        "type": stream.type_name,
        "messages": stream.message_count,
        "bytes": stream.size_sum,
        "first_created": first,
        "last_created": last,
        "closed": stream.is_closed,
    }


def export(
    folder: Directory,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The directory to write to, a file a stream.")
    ],
    format: Annotated[str, typer.Option("--format", "-f", help="log, parquet or csv.")] = "parquet",
    store: Annotated[
        str | None, typer.Option(metavar="NAME", help="The store, if there are several.")
    ] = None,
    stream: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this stream; may be repeated.")
    ] = None,
    salvage: Salvage = False,
) -> None:
    """Write the streams of a store as logs, Parquet or CSV files.

    Of a damaged store it is said what is missing, and the exit code is 3.
    """
    from penstock.protocols.psi.store.export import (  # noqa: PLC0415 - loads Parquet
        export_streams,
        open_sources,
    )

    with open_sources(folder, store) as sources:
        if len(sources) > 1:
            names = ", ".join(source.name for source in sources)
            raise InvalidOption("store", None, f"there are several: {names}", hint="give --store")
        check = _tell_damage(sources[0], salvage)
        if not check.is_whole and not salvage:
            raise typer.Exit(LOST)
        for done in export_streams(sources[0], target, format, stream or ()):
            typer.echo(f"{done.stream}: {done.messages:,} messages to {done.target}")
            if done.malformed:
                note(
                    f"penstock: {done.malformed:,} messages of {done.stream} are not of its type; "
                    "their values are left empty"
                )
    if not check.is_whole:
        raise typer.Exit(LOST)


def serve_psi(
    store: Annotated[
        Path, typer.Argument(metavar="STORE", help="The store, psi's or ours, that is served.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The store of that name in STORE.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any that is free.")] = 11411,
    transport: Annotated[str, typer.Option(help="tcp, udp or pipe.")] = "tcp",
    data_port: Annotated[
        int, typer.Option(help="The port of messages; 0 takes any that is free.")
    ] = 0,
    quota: Annotated[
        str | None, typer.Option(metavar="RATE", help="Bytes of all clients, such as 1MB/s.")
    ] = None,
    max_clients: MaxClients = 64,
    quiet: Quiet = False,
    salvage: Salvage = False,
) -> None:
    """Serve a store to psi's importers and ours, until Ctrl-C or SIGTERM.

    Another process, also a psi program, may write to the store meanwhile. The protocol knows no
    passwords: whoever can reach the port can read. A damaged store is refused without --salvage;
    if clients could not get messages that it once had, the exit code is 3.
    """
    from penstock.protocols.psi.exporter import RemoteExporter  # noqa: PLC0415 - as needed
    from penstock.protocols.psi.store import open_store  # noqa: PLC0415

    if not quiet:
        logging.getLogger("penstock.protocols.psi").setLevel(logging.INFO)
    try:
        found = open_store(store, name, salvage=salvage)
    except DamagedStore as error:
        note(f"penstock: {error}")
        note(f"penstock: {error.hint}")
        raise typer.Exit(LOST) from None
    with (
        contextlib.closing(found) as opened,
        Ending() as ending,
        RemoteExporter(
            opened,
            port,
            transport,
            quota=quota,
            host=host,
            data_port=data_port,
            max_clients=max_clients,
        ) as exporter,
    ):
        typer.echo(f"serving {store} at psi://{exporter.address}")
        sys.stdout.flush()
        ending.wait()
        books = exporter.statistics()
    typer.echo(
        f"stopped: {books.clients_seen:,} clients, {books.messages:,} messages sent, "
        f"{books.lost:,} lost"
    )
    if books.lost:
        raise typer.Exit(LOST)
