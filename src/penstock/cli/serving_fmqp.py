"""The command that serves queues as LROSE's DsFmqServer does: `serve fmqp`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.core.options import parse_options
from penstock.core.url import URL

if TYPE_CHECKING:
    from penstock.protocols.lrose.fmq_server import FmqServerOptions
    from penstock.protocols.lrose.sessions import ServerStatistics

__all__ = ["serve_fmqp"]


def serve_fmqp(
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Serve the queues below this directory.")
    ],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="The port; 0 takes any that is free.", show_default="5443"),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="The layout of queues that clients create: classic or wide.")
    ] = "classic",
    max_clients: Annotated[int, typer.Option(help="Clients served at the same time.")] = 256,
    max_message: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest request that a client may send.")
    ] = "64M",
    max_queue: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest queue that a client may create.")
    ] = "1G",
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
    allow_shutdown: Annotated[
        bool, typer.Option("--allow-shutdown", help="Let any client stop the server, as LROSE's.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log problems only.")] = False,
) -> None:
    """Serve queues to LROSE's programs and ours, as DsFmqServer does, until Ctrl-C or SIGTERM.

    DIR/radar/beams is then fmqp://HOST:PORT/radar/beams. The protocol knows no passwords: whoever
    can reach the port can read, and write.
    """
    from penstock.protocols.lrose.addresses import default_port  # noqa: PLC0415 - as needed
    from penstock.protocols.lrose.fmq_server import FmqServerOptions  # noqa: PLC0415

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
    said = {name: str(value) for name, value in given.items()}
    options = parse_options(
        URL("fmqp server", "serve fmqp", None, None, "", said), FmqServerOptions
    )
    books = asyncio.run(_serve(options))
    typer.echo(
        f"stopped: {books.clients_seen:,} connections, {books.requests:,} requests, "
        f"{books.errors:,} of them refused"
    )


async def _serve(options: FmqServerOptions) -> ServerStatistics:
    from penstock.protocols.lrose.fmq_server import fmq_server  # noqa: PLC0415 - as needed

    server = fmq_server(options)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop_requested.set)
    await server.start()
    typer.echo(f"serving {options.root} at fmqp://{server.address}")
    sys.stdout.flush()
    try:
        await server.stop_requested.wait()
    finally:
        await server.close()
    return server.statistics()
