"""The command that serves queues as LROSE's DsFmqServer does: `serve fmqp`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.server_options import (
    AllowShutdown,
    Host,
    MaxClients,
    MaxQueue,
    Quiet,
    checked_options,
)
from penstock.cli.serving_lrose import serve_until_stopped

__all__ = ["serve_fmqp"]


def serve_fmqp(
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Serve the queues below this directory.")
    ],
    host: Host = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="The port; 0 takes any that is free.", show_default="5443"),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="The layout of queues that clients create: classic or wide.")
    ] = "classic",
    max_clients: MaxClients = 256,
    max_message: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest request that a client may send.")
    ] = "64M",
    max_queue: MaxQueue = "1G",
    idle: Annotated[
        str, typer.Option(metavar="TIME", help="Cut off clients that are silent for so long.")
    ] = "1h",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Nobody may write or create.")
    ] = False,
    shared_memory: Annotated[
        bool,
        typer.Option("--shared-memory", help="Serve queues in shared memory, by any key, too."),
    ] = False,
    allow_shutdown: AllowShutdown = False,
    quiet: Quiet = False,
) -> None:
    """Serve queues to LROSE's programs and ours, as DsFmqServer does, until Ctrl-C or SIGTERM.

    DIR/radar/beams is then fmqp://HOST:PORT/radar/beams. The protocol knows no passwords: whoever
    can reach the port can read, and write.
    """
    from penstock.protocols.lrose.addresses import default_port  # noqa: PLC0415 - as needed
    from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions  # noqa: PLC0415

    if not quiet:
        logging.getLogger("penstock.protocols.lrose").setLevel(logging.INFO)
    given = {
        "root": root,
        "host": host,
        "port": default_port("fmqp") if port is None else port,
        "layout": layout,
        "max_clients": max_clients,
        "max_message": max_message,
        "max_queue": max_queue,
        "idle": idle,
        "read_only": read_only,
        "shared_memory": shared_memory,
        "allow_shutdown": allow_shutdown,
    }
    options = checked_options("fmqp", given, FmqServerOptions)
    books = serve_until_stopped(
        lambda: FmqServer(options),
        lambda server: f"serving {options.root} at fmqp://{server.address}",
    ).statistics()
    typer.echo(
        f"stopped: {books.clients_seen:,} connections, {books.requests:,} requests, "
        f"{books.errors:,} of them refused"
    )
