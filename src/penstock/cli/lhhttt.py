"""The command that serves a queue to stream-py's programs and ours: `serve lhhttt`."""

from __future__ import annotations

import enum
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.messages import LOST
from penstock.cli.options import Host, MaxClients, Quiet, checked_options
from penstock.cli.signals import Ending
from penstock.core.overflow import OverflowPolicy
from penstock.protocols.lhhttt.frames import DEFAULT_PORT

__all__ = ["serve_lhhttt"]


class _Policy(enum.StrEnum):
    """What a full queue does: datagrams cannot wait."""

    FAIL = OverflowPolicy.FAIL.value
    DROP_OLDEST = OverflowPolicy.DROP_OLDEST.value
    DROP_NEWEST = OverflowPolicy.DROP_NEWEST.value


def serve_lhhttt(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any that is free.")] = DEFAULT_PORT,
    tcp: Annotated[bool, typer.Option("--tcp", help="Serve TCP at that port, too.")] = False,
    unix: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Serve a Unix socket there, too.")
    ] = None,
    capacity: Annotated[int, typer.Option(help="Messages that the queue holds.")] = 1_000_000,
    capacity_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes that the queue holds.")
    ] = "128M",
    policy: Annotated[
        _Policy, typer.Option(help="What a full queue does with one more.")
    ] = _Policy.FAIL,
    journal: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The log that keeps messages: log:/path/name."),
    ] = None,
    lease: Annotated[
        str, typer.Option(metavar="TIME", help="How long a client may keep a message.")
    ] = "30s",
    deliveries: Annotated[
        int | None, typer.Option(help="After so many deliveries a message goes to --dead.")
    ] = None,
    dead: Annotated[
        str | None, typer.Option(metavar="URL", help="The stream of dead letters.")
    ] = None,
    max_message: Annotated[
        str, typer.Option(metavar="SIZE", help="The largest frame by TCP and Unix sockets.")
    ] = "16M",
    max_clients: MaxClients = 256,
    quiet: Quiet = False,
) -> None:
    """Serve a queue that answers GET, PUT: and SIZE over UDP, until Ctrl-C or SIGTERM.

    The protocol has no passwords. Without --journal the messages end with the server; if there are
    any then, the exit code is 3.
    """
    from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions  # noqa: PLC0415

    if not quiet:
        logging.getLogger("penstock.protocols.lhhttt").setLevel(logging.INFO)
    given = {
        "host": host,
        "port": port,
        "tcp": tcp,
        "unix": unix,
        "capacity": capacity,
        "capacity_bytes": capacity_bytes,
        "policy": OverflowPolicy(policy.value),
        "journal": journal,
        "lease": lease,
        "deliveries": deliveries,
        "dead": dead,
        "max_message": max_message,
        "max_clients": max_clients,
    }
    options = checked_options("lhhttt", given, ServerOptions)
    with Ending() as ending, LhhtttServer(options) as server:
        urls = [f"lhhttt://{server.address}"]
        urls += [f"lhhttt+tcp://{server.address}"] if tcp else []
        urls += [f"lhhttt+unix:{unix}"] if unix is not None else []
        typer.echo(f"serving a queue at {' and '.join(urls)}")
        sys.stdout.flush()
        ending.wait()
    books = server.statistics()
    queue = books.queue
    refused = sum(queue.refused.values())
    dropped = sum(queue.dropped.values())
    unhandled = f", {books.unhandled:,} not looked at" if books.unhandled else ""
    typer.echo(
        f"stopped: {queue.queued:,} messages queued, {queue.taken + queue.acked:,} delivered, "
        f"{queue.dead:,} dead, {refused:,} refused, {dropped:,} dropped, {queue.held:,} held; "
        f"{books.datagrams.dropped:,} datagrams dropped by the kernel, "
        f"{books.malformed:,} malformed{unhandled}"
    )
    if queue.lost or (queue.held and journal is None):
        raise typer.Exit(LOST)
