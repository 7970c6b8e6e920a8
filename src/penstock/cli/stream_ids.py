"""How do I make a stream id, and what does one mean? (`penstock id`)."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.core.errors import InvalidOption
from penstock.core.stream_id import (
    ANY_DEVICE,
    ANY_FILTER,
    ForwardDestination,
    StreamId,
    codelet_path,
    id_for_app,
    id_for_codelet,
)
from penstock.core.stream_names import StreamNames, advice, default_names_file

__all__ = ["add_to"]

_ids = typer.Typer(help="Make, explain and compare stream ids.", no_args_is_help=True)

Destination = Annotated[str, typer.Option("--dest", help="none, udp, any or a number (0-127).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NoRegister = Annotated[
    bool, typer.Option("--no-register", help="Do not remember the path and name.")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    app.add_typer(_ids, name="id", rich_help_panel="Streams")


@_ids.command()
def generate(
    path: Annotated[str | None, typer.Option(help="Creator of the stream; any if omitted.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the stream; any if omitted.")] = None,
    device: Annotated[int, typer.Option(help="Device: 0 is the controller, 127 any.")] = ANY_DEVICE,
    dest: Destination = "any",
    ver: Annotated[int, typer.Option(help="Version of the id.")] = 0,
    as_json: AsJson = False,
    no_register: NoRegister = False,
) -> None:
    """Make an id from its parts; what is omitted is left open, which makes it a request."""
    stream = StreamId.generate(_destination(dest), device, path, name, ver)
    _issue(stream, path, name, register=not no_register, as_json=as_json)


@_ids.command()
def codelet(
    deployment: str,
    codeletset: str,
    codelet: str,
    channel: str,
    device: Annotated[int, typer.Option(help="Device that the codelet runs on.")],
    dest: Destination = "none",
    as_json: AsJson = False,
    no_register: NoRegister = False,
) -> None:
    """Make the id of a codelet's channel."""
    stream = id_for_codelet(deployment, codeletset, codelet, channel, device, _destination(dest))
    path = codelet_path(deployment, codeletset, codelet)
    _issue(stream, path, channel, register=not no_register, as_json=as_json)


@_ids.command("app")
def for_app(
    app_name: Annotated[str, typer.Argument(metavar="APP")],
    stream_name: Annotated[str, typer.Argument(metavar="STREAM")],
    dest: Destination = "none",
    as_json: AsJson = False,
    no_register: NoRegister = False,
) -> None:
    """Make the id of a stream that an app of the controller makes."""
    stream = id_for_app(app_name, stream_name, fwd_dst=_destination(dest))
    _issue(stream, app_name, stream_name, register=not no_register, as_json=as_json)


@_ids.command()
def explain(
    text: Annotated[str, typer.Argument(metavar="ID", help="32 hex digits, dashed or not.")],
    as_json: AsJson = False,
) -> None:
    """Say what an id stands for, field by field."""
    stream = StreamId.parse(text)
    meaning = StreamNames.load(default_names_file()).explain(stream)
    if as_json:
        _print_json(
            stream,
            destination=meaning.destination,
            device=meaning.device,
            path_text=meaning.path,
            name_text=meaning.name,
        )
        return
    path = "any" if stream.path == ANY_FILTER else meaning.path
    name = "any" if stream.name == ANY_FILTER else meaning.name
    table = Table("field", "value", "meaning", title=str(stream))
    table.columns[2].overflow = "fold"
    for field, value, words in (
        ("ver", str(stream.ver), "version of the id"),
        ("fwd_dst", str(stream.fwd_dst), meaning.destination),
        ("device_id", str(stream.device_id), meaning.device),
        ("path", f"{stream.path:014x}", path or "not known"),
        ("name", f"{stream.name:014x}", name or "not known"),
    ):
        table.add_row(field, value, Text(words))
    Console().print(table)
    if path is None or name is None:
        typer.echo("A path or a name cannot be read back from its 54-bit filter.")
        typer.echo("'penstock id generate' remembers those of the ids that it makes.")


@_ids.command()
def match(
    stream: Annotated[str, typer.Argument(metavar="ID", help="The stream.")],
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="What is subscribed to.")],
) -> None:
    """Say whether a subscriber of REQUEST gets the stream ID; exit status 1 if it does not."""
    offered, wanted = StreamId.parse(stream), StreamId.parse(request)
    delivers = offered.matches(wanted)
    typer.echo(f"router's rule: {_verdict(delivers)} (decides delivery)")
    typer.echo(f"mask rule:     {_verdict(offered.mask_matches(wanted))} (used by app wrappers)")
    if not delivers:
        raise typer.Exit(1)


@_ids.command()
def names() -> None:
    """List the paths and names that are known."""
    file = default_names_file()
    known = StreamNames.load(file)
    if not known:
        typer.echo(f"No names are known yet: {file} has none.")
        return
    table = Table("path", "name")
    for column in table.columns:
        column.overflow = "fold"
    for path, name in known:
        table.add_row(Text(path), Text(name))
    Console().print(table)


def _destination(text: str) -> int:
    named = ForwardDestination.__members__.get(text.upper())
    if named is not None:
        return named
    try:
        return int(text)
    except ValueError:
        raise InvalidOption("dest", text, "should be none, udp, any or a number") from None


def _issue(
    stream: StreamId, path: str | None, name: str | None, *, register: bool, as_json: bool
) -> None:
    # Only streams are registered: a misspelt request must not replace a stream.
    if register and stream.is_concrete and path is not None and name is not None:
        with StreamNames.updating(default_names_file()) as known:
            known.register(stream.fwd_dst, stream.device_id, path, name, ver=stream.ver)
        for text in (path, name):
            if warning := advice(text):
                typer.echo(warning, err=True)
    if as_json:
        _print_json(stream)
    else:
        typer.echo(stream.dashed())
        typer.echo(stream.hex())


def _print_json(stream: StreamId, **words: str | None) -> None:
    fields = {
        "id": stream.dashed(),
        "hex": stream.hex(),
        "ver": stream.ver,
        "fwd_dst": stream.fwd_dst,
        "device_id": stream.device_id,
        "path": f"{stream.path:014x}",
        "name": f"{stream.name:014x}",
    }
    typer.echo(json.dumps(fields | words, ensure_ascii=False))


def _verdict(matched: bool) -> str:
    return "matches" if matched else "does not match"
