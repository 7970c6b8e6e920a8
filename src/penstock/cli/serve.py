"""The commands that serve streams: `serve flight`, `serve fmqp`, and where others are."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.jrtc_forward import serve_collector
from penstock.cli.latest import serve_ldata
from penstock.cli.lhhttt import serve_lhhttt
from penstock.cli.map import serve_datamapper
from penstock.cli.options import AllowShutdown, Host, MaxClients, MaxQueue, Quiet, checked_options
from penstock.cli.output import note
from penstock.cli.psi import serve_psi
from penstock.cli.signals import Ending, serve_until_stopped

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(no_args_is_help=True, help="Serve streams of this machine to others.")
    sub.command("collector")(serve_collector)
    sub.command("flight")(serve_flight)
    sub.command("fmqp")(_serve_fmqp)
    sub.command("datamapper")(serve_datamapper)
    sub.command("ldata")(serve_ldata)
    sub.command("lhhttt")(serve_lhhttt)
    sub.command("psi")(serve_psi)
    # A group of its own, also with a single command.
    sub.callback()(lambda: None)
    app.add_typer(sub, name="serve", rich_help_panel="Servers")


def serve_flight(
    root: Annotated[
        Path, typer.Option(metavar="DIR", help="Serve the queues and logs below this directory.")
    ],
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any that is free.")] = 8815,
    bulk_port: Annotated[
        str | None,
        typer.Option(
            metavar="PORT",
            help="The port for bulk writes, which bypass gRPC; 0 takes any that is free, off has "
            "none. Default: 0 on loopback, otherwise off.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Encrypt, with this certificate (PEM).")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's key (PEM).")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Let in who knows the token in this file.")
    ] = None,
    max_clients: MaxClients = 64,
    max_message: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest batch that a client may send.")
    ] = "64M",
    max_queue: MaxQueue = "1G",
    idle: Annotated[
        str,
        typer.Option(metavar="TIME", help="Forget readers and writers not heard of for so long."),
    ] = "10m",
    max_staged: Annotated[
        str, typer.Option(metavar="SIZE", help="What Spark's tasks may have staged at once.")
    ] = "16G",
    keep_staged: Annotated[
        str, typer.Option(metavar="TIME", help="Remove what was staged and never committed.")
    ] = "1d",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Nobody may write, create or hold.")
    ] = False,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Serve other machines without asking for a token."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Serve queues and logs over Arrow Flight, until Ctrl-C or SIGTERM.

    DIR/radar/beams is then flight://HOST:PORT/radar/beams, for reading and for writing.
    """
    from penstock.protocols.flight.server import (  # noqa: PLC0415 - loads gRPC
        FlightServer,
        ServerOptions,
    )

    if not quiet:
        logging.getLogger("penstock.protocols.flight").setLevel(logging.INFO)
    given = {
        "root": root,
        "host": host,
        "port": port,
        "bulk_port": bulk_port,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "token_file": token_file,
        "max_clients": max_clients,
        "max_message": max_message,
        "max_queue": max_queue,
        "idle": idle,
        "max_staged": max_staged,
        "keep_staged": keep_staged,
        "read_only": read_only,
        "insecure": insecure,
    }
    options = checked_options("flight", given, ServerOptions)
    with Ending() as ending:
        server = FlightServer(options)
        typer.echo(f"serving {options.root} at {server.url}")
        sys.stdout.flush()
        ending.wait()
        is_whole = server.stop()
    books = server.statistics()
    typer.echo(
        f"stopped: {books.clients_seen:,} connections, {books.messages_out:,} messages sent, "
        f"{books.messages_in:,} appended"
    )
    if not is_whole:
        note("penstock: a client did not take what it had asked for; its connection is cut")
        # gRPC would wait for it for ever. All streams are closed by now.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)


def _serve_fmqp(
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
    ] = "30d",
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
