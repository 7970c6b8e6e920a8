"""The commands of jrt-controller's streams: `jrtc forward`, and those of deployments.

`jrtc load`, `unload`, `show`, `streamid` and `run`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from penstock.cli.console import console
from penstock.cli.jrtc_forward import forward
from penstock.cli.messages import LOST
from penstock.cli.options import Quiet
from penstock.cli.output import note, one_line
from penstock.cli.signals import Ending
from penstock.core.errors import InvalidOption, PenstockError
from penstock.core.stream_id import ForwardDestination, StreamId
from penstock.core.stream_names import StreamNames, default_names_file
from penstock.queue.stream_directory import list_streams
from penstock.workers.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.jrtc.forwarder import Forwarder
    from penstock.workers.deployment import Deployment

__all__ = ["add_to"]

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of one deployment.")]
TokenFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The controller's token is in this file.")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(no_args_is_help=True, help="Route and forward streams as jrt-controller.")
    sub.command("forward")(forward)
    sub.command("run")(run)
    sub.command("load")(load)
    sub.command("unload")(unload)
    sub.command("show")(show)
    sub.command("streamid")(streamid)
    app.add_typer(sub, name="jrtc", rich_help_panel="Servers")


def load(files: Files, token_file: TokenFile = None) -> None:
    """Load a deployment: queues, schemas, apps and codelet sets, each where it belongs.

    Apps are run by a controller, `penstock jrtc run`.
    """
    from penstock.workers.deployment import load_deployment  # noqa: PLC0415 - quick --help
    from penstock.workers.rollout import Rollout  # noqa: PLC0415

    deployment = load_deployment(*files)
    Rollout(deployment, token=_token(token_file)).load()
    typer.echo(
        f"{deployment.name} is loaded: {len(deployment.channels)} channels, "
        f"{len(deployment.apps)} apps, {len(deployment.codelet_sets)} codelet sets"
    )


def unload(files: Files, token_file: TokenFile = None) -> None:
    """Unload a deployment: codelet sets, apps, schemas and queues."""
    from penstock.workers.deployment import load_deployment  # noqa: PLC0415 - quick --help
    from penstock.workers.rollout import Rollout  # noqa: PLC0415

    deployment = load_deployment(*files)
    Rollout(deployment, token=_token(token_file)).unload()
    typer.echo(f"{deployment.name} is unloaded")


def show(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Files of one deployment.")
    ] = None,
) -> None:
    """Show the streams and apps of this machine, and the channels of a deployment."""
    from penstock.workers.deployment import load_deployment  # noqa: PLC0415 - quick --help

    if files:
        channels = Table("channel", "stream id", "forwarded to", "message", title="channels")
        for channel in load_deployment(*files).channels:
            schema = channel.schema
            destination = channel.stream.fwd_dst
            channels.add_row(
                channel.label,
                channel.stream.dashed(),
                "" if destination == ForwardDestination.NONE else str(destination),
                "" if schema is None else schema.msg_name,
            )
        _print(channels)
    names = StreamNames.load(default_names_file())
    streams = Table("stream id", "", "path", "name", "creator", "messages", title="streams")
    for state in list_streams():
        known = names.explain(state.stream)
        creator = f"{state.owner} ({state.pid})" if state.alive else ""
        streams.add_row(
            state.stream.dashed(),
            state.kind,
            known.path,
            known.name,
            creator,
            f"{state.messages:,}",
        )
    _print(streams)
    apps = Table("app", "process", "policy", "subscribed to", title="apps")
    for app in Router().apps():
        requests = (_request_in_words(names, request) for request in app.requests)
        apps.add_row(app.name, str(app.pid), app.policy, "\n".join(requests))
    _print(apps)
    if not (files or streams.row_count or apps.row_count):
        note("penstock: no stream and no app is here (penstock jrtc run FILE makes them)")


def _request_in_words(names: StreamNames, request: StreamId) -> str:
    known = names.explain(request)
    explained = (known.destination, known.device, known.path or "", known.name or "")
    return f"{request.dashed()} {' '.join(filter(None, explained))}"


def _print(table: Table) -> None:
    if table.row_count:
        # Ids are for copying: they are never truncated.
        console.print(table, soft_wrap=not sys.stdout.isatty())


def streamid(
    destination: Annotated[
        str,
        typer.Option(
            "--forward-destination", "-d", help="DestinationNone, DestinationUDP or a number."
        ),
    ] = "DestinationAny",
    device: Annotated[int, typer.Option("--device-id", "-D", help="The device.")] = 127,
    path: Annotated[str | None, typer.Option("--stream-path", "-p", help="The path.")] = None,
    name: Annotated[str | None, typer.Option("--stream-name", "-n", help="The name.")] = None,
) -> None:
    """Print the id of a stream, or of a request: what is omitted is ANY."""
    typer.echo(StreamId.generate(_destination(destination), device, path, name).dashed())


def _destination(text: str) -> int:
    with contextlib.suppress(KeyError):
        # The original's two ways to write them.
        plain = text.removeprefix("JRTC_ROUTER_DEST_").removeprefix("Destination")
        return ForwardDestination[plain.upper()]
    if text.isdigit():
        return int(text)
    known = "use DestinationAny, DestinationNone, DestinationUDP or a number up to 127"
    raise InvalidOption("forward-destination", text, "is no destination", hint=known)


def run(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Files of one deployment.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where apps can be loaded by REST.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port; 0 takes any that is free.")] = 3001,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Apps that are loaded by REST are below it. Without it: below this folder.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Let in who knows the token in this file.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that an app has to end.")] = 5.0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the queues behind.")] = False,
    quiet: Quiet = False,
) -> None:
    """Run a controller with the apps and the forwarder of a deployment, until Ctrl-C or SIGTERM.

    Without a file it waits for apps to be loaded: penstock jrtc load. If the forwarder lost
    messages, the exit code is 3.
    """
    from penstock.workers.controller import AppRequest, Controller  # noqa: PLC0415 - quick --help
    from penstock.workers.deployment import load_deployment  # noqa: PLC0415
    from penstock.workers.rest import serve_controller  # noqa: PLC0415
    from penstock.workers.rollout import Rollout  # noqa: PLC0415

    if not quiet:
        logging.getLogger("penstock.workers").setLevel(logging.INFO)
    deployment = load_deployment(*files) if files else None
    with Ending() as ending, contextlib.ExitStack() as stack:
        controller = stack.enter_context(
            Controller(grace=grace, on_output=lambda name, line: note(f"{name}: {line}"))
        )
        server = stack.enter_context(
            serve_controller(
                controller, root or Path.cwd(), host=host, port=port, token=_token(token_file)
            )
        )
        forwarder = None
        if deployment is not None:
            rollout = Rollout(deployment, directory=controller.directory)
            rollout.create_queues()
            if not keep:
                stack.callback(_report_failure_of, rollout.remove_queues)
            rollout.load_schemas()
            stack.callback(_report_failure_of, rollout.unload_schemas)
            forwarder = stack.enter_context(_forwarder(deployment, controller.directory))
            for app in deployment.apps:
                controller.load(AppRequest.of(app, deployment, controller.directory))
            # Apps end before the resources that they use, and none is loaded any more.
            stack.callback(controller.close)
            stack.callback(server.close)
            # Also if only some are loaded.
            stack.callback(_report_failure_of, rollout.take_back_codelets)
            rollout.load_codelets()
        typer.echo(f"running {_named(deployment)}; apps are loaded at http://{host}:{server.port}")
        sys.stdout.flush()
        ending.wait()
    typer.echo(_books(forwarder))
    if forwarder is not None and forwarder.statistics().lost:
        raise typer.Exit(LOST)


def _report_failure_of(step: Callable[[], None]) -> None:
    """Run a cleanup step; report an error instead of raising it, so that others run."""
    try:
        step()
    except PenstockError as error:
        note(f"penstock: {one_line(error)}")


def _named(deployment: Deployment | None) -> str:
    return "a controller" if deployment is None else deployment.name


def _forwarder(deployment: Deployment, directory: str) -> Forwarder:
    from penstock.protocols.jrtc.destinations import destination_for  # noqa: PLC0415
    from penstock.protocols.jrtc.forwarder import Forwarder  # noqa: PLC0415
    from penstock.workers.rollout import schemas_of  # noqa: PLC0415

    schemas = schemas_of(deployment)
    with contextlib.ExitStack() as stack:
        destinations = {
            number: stack.enter_context(destination_for(url, schemas))
            for number, url in deployment.forward.items()
        }
        forwarder = Forwarder(
            destinations, schemas, name=f"forwarder-{os.getpid()}", directory=directory
        )
        stack.pop_all()  # they are the forwarder's now
    return forwarder.start()


def _books(forwarder: Any) -> str:
    if forwarder is None:
        return "stopped"
    books = forwarder.statistics()
    return (
        f"stopped: {books.taken:,} messages taken to be forwarded, {books.forwarded:,} forwarded, "
        f"{books.rejected:,} rejected, {books.lost:,} lost"
    )


def _token(file: Path | None) -> str | None:
    """Read a token from a file: other users could see an argument."""
    if file is None:
        return None
    text = file.read_text().strip()
    if not text:
        raise InvalidOption("token-file", str(file), "is empty")
    return text
