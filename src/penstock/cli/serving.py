"""The commands that serve streams to other machines: `serve flight`, and where others are."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.latest import serve_ldata
from penstock.cli.lhhttt import serve_lhhttt
from penstock.cli.map import serve_datamapper
from penstock.cli.output import note
from penstock.cli.psi import serve_psi
from penstock.cli.server_options import Host, MaxClients, MaxQueue, Quiet, checked_options
from penstock.cli.serving_fmqp import serve_fmqp
from penstock.cli.stopping import Ending

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(no_args_is_help=True, help="Serve streams of this machine to others.")
    sub.command("flight")(serve_flight)
    sub.command("fmqp")(serve_fmqp)
    sub.command("datamapper")(serve_datamapper)
    sub.command("ldata")(serve_ldata)
    sub.command("lhhttt")(serve_lhhttt)
    sub.command("psi")(serve_psi)
    # A group of its own, also while there is one command.
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
            help="Where writers of much may come past gRPC: a port, 0 for any, or off. "
            "Without it: any on loopback, otherwise nowhere.",
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
    from penstock.protocols.flight.options import ServerOptions  # noqa: PLC0415 - loads gRPC
    from penstock.protocols.flight.server import FlightServer  # noqa: PLC0415

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
        "read_only": read_only,
        "insecure": insecure,
    }
    options = checked_options("flight", given, ServerOptions)
    ending = Ending()
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
        # gRPC would wait for it for ever. Every stream is closed by now.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
