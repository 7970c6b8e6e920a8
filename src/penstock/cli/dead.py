"""The commands of dead letters: `dead ls`, `show`, `retry` and `drop`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import note
from penstock.core.errors import InvalidOption, NotFound
from penstock.core.options import nearest
from penstock.core.units import format_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.dispatch.control import Place
    from penstock.dispatch.dead_letters import Letter, Stray

__all__ = ["add_to"]

_PlaceArgument = Annotated[
    Path,
    typer.Argument(metavar="DIR|BUS.YAML", help="The bus.yaml, or the folder of its state."),
]
_IdsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID …", help="The numbers or the ids that `penstock dead ls` shows."),
]
_CodeOption = Annotated[
    str | None, typer.Option(help="Only those with this code, such as UNAVAILABLE.")
]
_ReceiverOption = Annotated[
    str | None, typer.Option(help="Only those to receivers that match, as //vehicle1/20/1/0.")
]
_JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
_StrayOption = Annotated[
    bool, typer.Option("--undecodable", help="What came, and was no message of uProtocol.")
]
_AllOption = Annotated[bool, typer.Option("--all", help="All that match, not only those named.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(
        no_args_is_help=True,
        help="""Look at uProtocol messages that could not be delivered, and try them again.

        Each says whom it was for, why it is dead as a google.rpc.Code, how often it was tried, and
        holds the message. Any entity can subscribe to them, too: to //AUTHORITY/4/1/8001.

        Examples:
          penstock dead ls bus.yaml --code UNAVAILABLE
          penstock dead show bus.yaml 17
          penstock dead retry bus.yaml --all --receiver //vehicle1/20/1/0
        """,
    )
    sub.command("ls")(ls)
    sub.command("show")(show)
    sub.command("retry")(retry)
    sub.command("drop")(drop)
    app.add_typer(sub, name="dead", rich_help_panel="Servers")


def ls(
    place: _PlaceArgument,
    limit: Annotated[int, typer.Option(help="Show so many at most.", min=1)] = 1000,
    start: Annotated[int, typer.Option("--from", help="Begin with this number.")] = 0,
    code: _CodeOption = None,
    receiver: _ReceiverOption = None,
    undecodable: _StrayOption = False,
    as_json: _JsonOption = False,
) -> None:
    """List dead letters, the oldest first."""
    from penstock.dispatch.control import (  # noqa: PLC0415 - loads protobuf
        described_letter,
        described_stray,
        find_place,
    )
    from penstock.dispatch.dead_letters import Stray  # noqa: PLC0415

    if undecodable and (code or receiver):
        raise InvalidOption("--undecodable", True, "these have neither code nor receiver")
    shown = 0
    found = find_place(place)
    for one in found.strays() if undecodable else _matching(found, code, receiver):
        if one.number < start:
            continue
        if shown == limit:
            note(f"penstock: there are more: --from {one.number}")
            break
        shown += 1
        if isinstance(one, Stray):
            typer.echo(json.dumps(described_stray(one)) if as_json else _stray_line(one))
        else:
            typer.echo(json.dumps(described_letter(one)) if as_json else _line(one))


def show(
    place: _PlaceArgument,
    id: Annotated[
        str,
        typer.Argument(metavar="ID", help="The number or the id that `penstock dead ls` shows."),
    ],
    undecodable: _StrayOption = False,
) -> None:
    """Show all of a dead letter, the payload as hexadecimal digits, as JSON."""
    from penstock.dispatch.control import (  # noqa: PLC0415 - loads protobuf
        described_letter,
        described_stray,
        find_place,
    )

    if undecodable:
        for stray in find_place(place).strays():
            if str(stray.number) == id:
                typer.echo(json.dumps(described_stray(stray, data=True), indent=1))
                return
        raise NotFound(f"there is no {id}", hint="penstock dead ls --undecodable lists them")
    letter = _named(find_place(place), [id])[0]
    typer.echo(json.dumps(described_letter(letter, payload=True), indent=1))


def retry(
    place: _PlaceArgument,
    ids: _IdsArgument = None,
    every: _AllOption = False,
    code: _CodeOption = None,
    receiver: _ReceiverOption = None,
    as_json: _JsonOption = False,
) -> None:
    """Deliver the messages of dead letters again: to the receiver that did not get them.

    They go through the dispatcher like any others, with a time to live that may be over; then they
    are dead letters again. While it does not run they wait for its next start.
    """
    found, letters = _chosen(place, ids, code, receiver, every=every)
    runs = found.retry(letters) if letters else False
    at_start = bool(letters) and not runs
    _tell("to be retried at the next start" if at_start else "retried", letters, as_json=as_json)


def drop(
    place: _PlaceArgument,
    ids: _IdsArgument = None,
    every: _AllOption = False,
    code: _CodeOption = None,
    receiver: _ReceiverOption = None,
    as_json: _JsonOption = False,
) -> None:
    """Delete dead letters for good."""
    found, letters = _chosen(place, ids, code, receiver, every=every)
    if letters:
        found.drop(letters)
    _tell("dropped", letters, as_json=as_json)


def _chosen(
    place: Path, ids: list[str] | None, code: str | None, receiver: str | None, *, every: bool
) -> tuple[Place, list[Letter]]:
    from penstock.dispatch.control import find_place  # noqa: PLC0415 - loads protobuf

    found = find_place(place)
    if ids and every:
        raise InvalidOption("--all", True, "give ids or --all, not both")
    if ids and (code or receiver):
        option = "--code" if code else "--receiver"
        raise InvalidOption(option, code or receiver, "give ids, or --all and what it is about")
    if ids:
        return found, _named(found, ids)
    if not every:
        raise InvalidOption("ID", None, "none is named", hint="give ids, or --all")
    return found, list(_matching(found, code, receiver))


def _matching(place: Place, code: str | None, receiver: str | None) -> Iterator[Letter]:
    from penstock.protocols.uprotocol import UCode, UUri  # noqa: PLC0415 - loads protobuf

    names = [each.name for each in UCode]
    if code is not None and code.upper() not in names:
        hint = nearest(code.upper(), names, "there are")
        raise InvalidOption("--code", code, f"there is no code {code.upper()}", hint=hint)
    pattern = None if receiver is None else UUri.parse(receiver).resolved(place.authority)
    for letter in place.letters():
        if code is not None and letter.code.name != code.upper():
            continue
        if pattern is None or (letter.receiver is not None and pattern.matches(letter.receiver)):
            yield letter


def _named(place: Place, ids: list[str]) -> list[Letter]:
    wanted = set(ids)
    found: list[Letter] = []
    for letter in place.letters():
        names = {str(letter.number), str(letter.id)} & wanted
        if names:
            wanted -= names
            found.append(letter)
    if wanted:
        raise NotFound(
            f"there is no dead letter {', '.join(sorted(wanted))}",
            hint="penstock dead ls lists those that there are",
        )
    return found


def _line(letter: Letter) -> str:
    header = letter.header
    when = format_time(letter.dead_ms * 1_000_000)
    receiver = "-" if letter.receiver is None else letter.receiver.without_scheme
    source = "-" if header.source is None else header.source.without_scheme
    tries = "" if not letter.attempts else f", {letter.attempts} attempts"
    return (
        f"{letter.number:>6}  {when:<24}  {letter.code.name}  {header.type.name.lower()} of "
        f"{source} to {receiver}{tries}: {letter.message}"
    )


def _stray_line(stray: Stray) -> str:
    when = format_time(stray.came_ms * 1_000_000)
    begin = stray.data[:16].hex(" ")
    return f"{stray.number:>6}  {when:<24}  {stray.size:,} bytes by {stray.leg}: {begin}"


def _tell(what: str, letters: list[Letter], *, as_json: bool) -> None:
    if as_json:
        for letter in letters:
            typer.echo(json.dumps({"what": what, "id": str(letter.id), "number": letter.number}))
    else:
        typer.echo(f"{len(letters):,} {what}")
