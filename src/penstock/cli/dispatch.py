"""The commands of the uProtocol dispatcher: `dispatch run`, `status`, `stop` and `start`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.cli.console import console
from penstock.cli.display import LOOK, Display
from penstock.cli.output import note
from penstock.cli.signals import stop_on_signal
from penstock.core.config import line_of
from penstock.core.errors import ConfigError
from penstock.core.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.dispatch.bus import Running
    from penstock.dispatch.config import BusConfig

__all__ = ["add_to", "status_view"]

_MOST_ROWS = 40

Status = dict[str, Any]

_PLACE_HELP = "The bus.yaml, or the folder of its state."


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(
        no_args_is_help=True,
        help="""Dispatch uProtocol messages: a message that was taken is delivered, or is a dead
        letter that says why.

        A [bold]bus.yaml[/bold] says what the dispatcher is connected to:

          dispatcher: vehicle-bus
          authority: vehicle1
          state: ./state
          legs:
            local: {ring: {receive: "fmq:/run/bus/in", send: "fmq:/run/bus/{ue_id}"},
                    authorities: \\[vehicle1]}

        [bold]penstock dispatch run bus.yaml --check[/bold] says what is wrong with it;
        [bold]penstock dead ls bus.yaml[/bold] lists what could not be delivered.
        """,
    )
    sub.command("run")(run)
    sub.command("status")(status)
    sub.command("stop")(stop)
    sub.command("start")(start)
    app.add_typer(sub, name="dispatch", rich_help_panel="Servers")


def run(
    file: Annotated[Path, typer.Argument(metavar="BUS.YAML", help="What it is connected to.")],
    check: Annotated[bool, typer.Option("--check", help="Check the file only.")] = False,
    progress: Annotated[
        Literal["auto", "json", "none"],
        typer.Option(help="What to show while it runs: a table, JSON lines, or nothing."),
    ] = "auto",
) -> None:
    """Run a dispatcher until Ctrl-C or SIGTERM.

    What it was given and has not delivered yet is in its state, and goes on with the next run.
    Without a terminal it says a line every few seconds on standard error.
    """
    from penstock.dispatch.bus import Running, devote  # noqa: PLC0415 - loads protobuf
    from penstock.dispatch.bus import check as check_bus  # noqa: PLC0415
    from penstock.dispatch.config import load_bus  # noqa: PLC0415

    config = load_bus(file)
    _check_files(file, config)
    if check:
        check_bus(config)
        legs = ", ".join(f"{name} ({leg.kind})" for name, leg in config.legs.items())
        typer.echo(f"{config.dispatcher}: authority {config.authority}, legs {legs}")
        return
    # Signals are handled before the start: a SIGTERM while a leg connects ends it, too.
    with stop_on_signal(config.grace + 15) as is_stopping, Running(config) as running:
        running.start()
        devote()
        typer.echo(f"{config.dispatcher} runs as {config.authority}, state {config.state}")
        sys.stdout.flush()
        with _Display(progress, running.status) as shown:
            while not is_stopping():
                shown.look()
                time.sleep(LOOK)
        running.stop()
        _finish(progress, running)


def _check_files(file: Path, config: BusConfig) -> None:
    """Check that the files that a bus.yaml names can be read.

    :raises ConfigError: one cannot; the error says in which line and field it is.
    """
    for name, leg in config.legs.items():
        for key in ("ca", "certificate", "key"):
            path: Path | None = None if leg.mqtt is None else getattr(leg.mqtt, key)
            if path is None:
                continue
            try:
                path.open("rb").close()
            except OSError as error:
                place = ("legs", name, "mqtt", key)
                reason = f"{path} cannot be read: {error.strerror}"
                line = line_of(file, place)
                raise ConfigError(str(file), line, ".".join(place), reason) from None


def _finish(progress: str, running: Running) -> None:
    last = running.status()
    if progress == "json":
        typer.echo(json.dumps({"event": "end", **last}))
    else:
        typer.echo(f"stopped: {_books_line(last)}")
    sys.stdout.flush()
    for problem in last["books"]["problems"]:
        note(f"penstock: the books do not balance: {problem}")


class _Display(Display):
    """Shows a dispatcher while it runs."""

    def __init__(self, kind: str, ask: Callable[[], Status]) -> None:
        super().__init__(kind, refresh=2)
        self._ask = ask

    def _view(self) -> Group:
        return status_view(self._ask())

    def _news(self) -> Iterator[tuple[Status, str]]:
        if self._is_due():
            found = self._ask()
            yield found, _books_line(found)


def status(
    place: Annotated[Path, typer.Argument(metavar="DIR|BUS.YAML", help=_PLACE_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the legs, what waits for whom, what is stopped, and the books.

    A dispatcher that runs is asked; of one that does not, the files are read.
    """
    from penstock.dispatch.control import find_place  # noqa: PLC0415 - loads protobuf

    found = find_place(place).status()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        runs = f"runs, process {found['pid']}" if found["is_running"] else "does not run"
        console.print(f"{found['dispatcher']} ({found['authority']}) {runs}")
        console.print(status_view(found))


def stop(
    place: Annotated[Path, typer.Argument(metavar="DIR|BUS.YAML", help=_PLACE_HELP)],
    topic: Annotated[
        str, typer.Argument(help="The topic, or a pattern, such as //*/10/1/FFFF; or a method.")
    ],
    receiver: Annotated[
        str, typer.Option(help="Only for receivers that match, such as //vehicle1/20/1/0.")
    ] = "//*/FFFFFFFF/FF/FFFF",
    no_queue: Annotated[
        bool, typer.Option("--no-queue", help="Do not keep the messages: they are dead letters.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Deliver a topic no more, until it is started again; also after a restart.

    Its messages wait meanwhile, as long as their time to live and the queue allow. When the
    command returns none is delivered any more.
    """
    from penstock.dispatch.control import find_place  # noqa: PLC0415 - loads protobuf
    from penstock.protocols.uprotocol import UUri  # noqa: PLC0415

    found = find_place(place)
    what, whom = _pattern(topic, found.authority), UUri.parse(receiver).resolved(found.authority)
    ended, runs = found.stop_topic(what, whom, queue=not no_queue)
    if not ended:
        note("stopped; but a delivery that had begun takes longer than 5 s, and goes on")
    _tell({"stopped": str(what), "receiver": str(whom), "is_running": runs}, as_json=as_json)


def start(
    place: Annotated[Path, typer.Argument(metavar="DIR|BUS.YAML", help=_PLACE_HELP)],
    topic: Annotated[str, typer.Argument(help="The topic, exactly as it was stopped.")],
    receiver: Annotated[
        str, typer.Option(help="The receivers, exactly as they were given.")
    ] = "//*/FFFFFFFF/FF/FFFF",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Deliver again what was stopped, in order. `status` lists what is.

    The exit code is 1 if it was not stopped.
    """
    from penstock.dispatch.control import find_place  # noqa: PLC0415 - loads protobuf
    from penstock.protocols.uprotocol import UUri  # noqa: PLC0415

    found = find_place(place)
    what, whom = _pattern(topic, found.authority), UUri.parse(receiver).resolved(found.authority)
    was_stopped, runs = found.start_topic(what, whom)
    if not was_stopped:
        note(f"penstock: {what} was not stopped for {whom}")
        raise typer.Exit(1)
    _tell({"started": str(what), "receiver": str(whom), "is_running": runs}, as_json=as_json)


def _pattern(text: str, authority: str) -> Any:
    from penstock.protocols.uprotocol import UUri  # noqa: PLC0415 - loads protobuf

    return UUri.parse(text).resolved(authority)


def _tell(what: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(what))
        return
    (done, topic), (_, receiver), (_, runs) = what.items()
    when = "" if runs else "; the dispatcher does not run, so from its next start on"
    typer.echo(f"{done} {topic} for {receiver}{when}")


# --- for people -------------------------------------------------------------------------------


def status_view(found: Status) -> Group:
    """Draw the status of a dispatcher."""
    parts: list[Any] = []
    if found["legs"]:
        parts.append(_legs_table(found["legs"]))
    if found["receivers"]:
        parts.append(_receivers_table(found["receivers"]))
    for one in found["stopped"]:
        how = "" if one["queue"] else ", and its messages are dead letters"
        parts.append(Text(f"stopped: {one['topic']} for {one['receiver']}{how}", style="yellow"))
    parts.append(Text(_books_line(found)))
    parts += [Text(problem, style="red") for problem in found["books"]["problems"]]
    return Group(*parts)


def _legs_table(legs: dict[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("leg", "kind", "state", "authorities"):
        table.add_column(heading)
    for heading in ("received", "delivered", "failed"):
        table.add_column(heading, justify="right")
    for name, leg in legs.items():
        state = {True: "up", False: "[red]down[/]", None: "open"}[leg["is_up"]]
        counts = [f"{leg['counts'].get(key, 0):,}" for key in ("received", "delivered", "failed")]
        authorities = Text(", ".join(leg["authorities"]))  # brackets are data, not markup
        table.add_row(Text(name), leg["kind"], state, authorities, *counts)
    return table


def _receivers_table(receivers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("receiver", overflow="fold")
    table.add_column("leg")
    for heading in ("queued", "size", "acked", "dead", "attempts"):
        table.add_column(heading, justify="right")
    has_trouble = any(one["trouble"] for one in receivers)
    if has_trouble:
        table.add_column("trouble", max_width=40, no_wrap=True)
    ordered = sorted(receivers, key=lambda one: (-one["queued"], one["leg"], one["address"]))
    for one in ordered[:_MOST_ROWS]:
        dead = f"{one['dead']:,}"
        table.add_row(
            Text(one["address"].removeprefix("up:")),
            Text(one["leg"]),
            f"[yellow]{one['queued']:,}[/]" if one["due_in"] else f"{one['queued']:,}",
            format_size(one["bytes"]),
            f"{one['acked']:,}",
            f"[red]{dead}[/]" if one["dead"] else dead,
            f"{one['attempts']:,}",
            *([Text(one["trouble"])] if has_trouble else []),
        )
    if len(ordered) > _MOST_ROWS:
        table.add_row(f"… and {len(ordered) - _MOST_ROWS:,} more")
    return table


#: What else became of messages that are stored for nobody.
_UNROUTED: Final = {
    "no_subscriber": "without subscriber",
    "duplicates": "duplicates",
    "loops": "loops",
    "conflicts": "conflicts",
    "undecodable": "undecodable",
}


def _books_line(found: Status) -> str:
    messages, copies = found["books"]["messages"], found["books"]["copies"]
    other = copies["gone"] + copies["superseded"] + copies["admin"] + copies.get("damaged", 0)
    received = [
        f"{messages['received']:,} received, {found['books']['refused']:,} refused",
        *(f"{count:,} {words}" for name, words in _UNROUTED.items() if (count := messages[name])),
    ]
    parts = [
        *(received if found["is_running"] else []),  # which is counted from its start on
        f"{copies['stored']:,} stored",
        f"{copies['acked']:,} acknowledged",
        f"{found['books']['dead']:,} dead",
        f"{other:,} gone or superseded",
        f"{copies['queued']:,} queued",
    ]
    return ", ".join(parts)
