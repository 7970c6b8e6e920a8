"""The commands at both ends of forwarded streams: `jrtc forward` and `serve collector`."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.messages import LOST
from penstock.cli.options import Host, Quiet
from penstock.cli.signals import Ending
from penstock.core.endpoints import open_writer
from penstock.core.errors import InvalidOption
from penstock.core.stream_id import StreamId

if TYPE_CHECKING:
    from penstock.protocols.jrtc.schemas import Schemas

__all__ = ["forward", "serve_collector"]

_Schemas = Annotated[
    list[Path] | None,
    typer.Option("--schema", metavar="FILE", help="A descriptor set of protoc; several may be."),
]
_Streams = Annotated[
    list[str] | None,
    typer.Option(
        "--stream",
        metavar="ID=PACKAGE:MESSAGE",
        help="What a stream carries; several may be. PACKAGE is the .proto file without .proto.",
    ),
]
_Dead = Annotated[
    str | None, typer.Option(metavar="URL", help="The stream that gets what cannot be sent on.")
]


def forward(
    file: Annotated[
        Path | None, typer.Argument(help="A YAML file with destinations, schemas and control.")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DST=URL",
            help="Where streams of a fwd_dst go; several may be. "
            "Without any: 2=jrtc+udp://127.0.0.1:20788.",
        ),
    ] = None,
    schema: _Schemas = None,
    stream: _Streams = None,
    dead: _Dead = None,
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the streams are.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Forward streams to collectors and other systems, until Ctrl-C or SIGTERM.

    Each stream goes where its fwd_dst says. Payloads are protobuf messages, or C structs that a
    FILE describes. The exit code is 3 if a message was lost: overwritten before it was sent, or
    impossible to send without --dead.
    """
    from penstock.core.config import load_config  # noqa: PLC0415 - as needed
    from penstock.protocols.jrtc.config import ForwarderConfig, ForwarderService  # noqa: PLC0415

    _log_to_people(quiet)
    config = ForwarderConfig() if file is None else load_config(file, ForwarderConfig)
    given: dict[str, object] = {"dead": dead, "directory": directory}
    if to:
        given["destinations"] = dict(_destination(each) for each in to)
    config = config.model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    schemas = config.load_schemas()
    _load(schemas, schema or [], stream or [])
    # Signals are its own only until it is told to end: the second one ends it at once, whatever its
    # destinations do.
    with contextlib.ExitStack() as stack, Ending() as ending:
        service = stack.enter_context(ForwarderService(config, schemas))
        for number, url in config.destinations.items():
            typer.echo(f"forwarding streams of fwd_dst {number} to {url}")
        if service.grpc_port is not None:
            typer.echo(f"taking schemas at 127.0.0.1:{service.grpc_port}")
        if service.control is not None:
            typer.echo(
                f"taking commands at TCP {service.control.tcp_port}, UDP {service.control.udp_port}"
            )
        sys.stdout.flush()
        ending.wait()
    books = service.forwarder.statistics()
    undelivered = sum(each.undelivered for each in books.routes.values())
    typer.echo(
        f"stopped: {books.taken:,} messages taken, {books.forwarded:,} forwarded, "
        f"{books.rejected:,} impossible to send, {undelivered:,} not taken in time, "
        f"{books.dead:,} dead letters, {books.lost:,} lost"
    )
    if service.control is not None:
        said = service.control.statistics()
        refused = sum(said.refused.values())
        unhandled = f", {said.unhandled:,} not looked at" if said.unhandled else ""
        typer.echo(f"commands: {said.delivered:,} delivered, {refused:,} refused{unhandled}")
    if books.lost:
        raise typer.Exit(LOST)


def serve_collector(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where datagrams come; 0 takes any.")] = 20788,
    grpc_port: Annotated[
        int, typer.Option(help="Where schemas come by gRPC; 0 takes any, -1 is nowhere.")
    ] = 20789,
    http_port: Annotated[
        int | None, typer.Option(help="Where schemas come by HTTP, as 20787; 0 takes any.")
    ] = None,
    out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TARGET",
            help="Who gets the messages; several may be: - (JSON lines), json:FILE, "
            "json+udp://HOST:PORT, json+tcp://HOST:PORT, or the URL of a stream. Without any: -.",
        ),
    ] = None,
    schema: _Schemas = None,
    stream: _Streams = None,
    dead: _Dead = None,
    quiet: Quiet = False,
) -> None:
    """Collect what forwarders send, until Ctrl-C or SIGTERM: JSON lines, or any stream.

    Schemas come from files, or from jrt-controller's control program. The protocol has no
    passwords. The exit code is 3 if a message was lost: dropped by the kernel, or impossible to
    read without --dead.
    """
    from penstock.protocols.jrtc.collector import Collector, CollectorOptions  # noqa: PLC0415
    from penstock.protocols.jrtc.collector_outputs import output_for  # noqa: PLC0415
    from penstock.protocols.jrtc.schemas import Schemas  # noqa: PLC0415

    _log_to_people(quiet)
    options = CollectorOptions(
        host=host, port=port, grpc_port=None if grpc_port < 0 else grpc_port, http_port=http_port
    )
    schemas = Schemas()
    _load(schemas, schema or [], stream or [])
    outputs = [output_for(each) for each in out or ["-"]]
    letters = None if dead is None else open_writer(dead)
    with Ending() as ending, Collector(options, schemas, outputs, letters) as collector:
        # Standard output may be taken by lines of JSON.
        said = f"collecting at {host}:{collector.port}"
        if collector.grpc_port is not None:
            said += f", schemas by gRPC at {host}:{collector.grpc_port}"
        if collector.http_port is not None:
            said += f", by HTTP at {host}:{collector.http_port}"
        typer.echo(said, err=True)
        ending.wait()
    books = collector.statistics()
    refused = ", ".join(f"{count:,} {why}" for why, count in books.refused.items())
    typer.echo(
        f"stopped: {books.datagrams.received:,} datagrams, {books.collected:,} collected, "
        f"{refused}, {sum(books.undelivered.values()):,} undelivered, {books.dead:,} dead letters, "
        f"{books.datagrams.dropped:,} dropped by the kernel, {books.unhandled:,} not looked at",
        err=True,
    )
    if books.lost:
        raise typer.Exit(LOST)


def _log_to_people(quiet: bool) -> None:
    if not quiet:
        logging.getLogger("penstock.protocols.jrtc").setLevel(logging.INFO)


def _destination(text: str) -> tuple[int, str]:
    number, _, url = text.partition("=")
    if not number.isdecimal() or not 0 < int(number) < 127 or not url:  # noqa: PLR2004
        hint = "write 2=jrtc+udp://127.0.0.1:20788: a number from 1 to 126, and a URL"
        raise InvalidOption("to", text, "names no destination", hint=hint)
    return int(number), url


def _load(schemas: Schemas, files: list[Path], streams: list[str]) -> None:
    for file in files:
        schemas.load(file, {}, replace=False)
    for text in streams:
        stream, _, carried = text.partition("=")
        package, _, message = carried.partition(":")
        if not message:
            hint = "write ID=PACKAGE:MESSAGE"
            raise InvalidOption("stream", text, "names no message", hint=hint)
        schemas.associate(StreamId.parse(stream), package, message)
