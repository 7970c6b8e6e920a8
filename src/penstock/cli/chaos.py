"""The commands that stand between two programs and do harm: `chaos udp` and `chaos tcp`."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from penstock.cli.console import console, error_console
from penstock.cli.output import note
from penstock.core.errors import InvalidOption
from penstock.core.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from types import FrameType

    from penstock.relay.faults import Counters, FaultRouter

__all__ = ["add_to"]

#: How often (seconds) the table is drawn.
_LOOK = 0.25
#: Counters that are shown even if they are 0.
_ALWAYS = ("arrived", "passed")

_Value = TypeVar("_Value")

To = Annotated[
    str, typer.Option("--to", metavar="HOST:PORT", help="Where the other program listens.")
]
Listen = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes any that is free."),
]
Seed = Annotated[int, typer.Option(help="Another seed, other faults; the same, the same.")]
Delay = Annotated[
    str, typer.Option(metavar="TIME±TIME", help="Hold everything up, such as 10ms±5ms (or +-).")
]
Rate = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Bytes a second for each client and direction."),
]
OneWay = Annotated[
    Literal["up", "down"] | None,
    typer.Option(help="Faults in one direction only: up is to the target, down is from it."),
]
MaxClients = Annotated[int, typer.Option(help="Clients at the same time.")]
For = Annotated[
    str | None, typer.Option("--for", metavar="TIME", help="End by itself after this time.")
]
Json = Annotated[
    bool, typer.Option("--json", help="At the end, print the counters as JSON on stdout.")
]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this file to the application."""
    sub = typer.Typer(
        no_args_is_help=True,
        help="Stand between two programs and lose, delay, garble and cut what passes.",
    )
    sub.command("udp")(chaos_udp)
    sub.command("tcp")(chaos_tcp)
    app.add_typer(sub, name="chaos", rich_help_panel="Servers")


def chaos_udp(
    to: To,
    listen: Listen = "127.0.0.1:0",
    drop: Annotated[
        str, typer.Option(metavar="SHARE", help="Datagrams not passed on, such as 5%.")
    ] = "0%",
    duplicate: Annotated[
        str, typer.Option(metavar="SHARE", help="Datagrams passed on twice.")
    ] = "0%",
    delay: Delay = "0s",
    reorder: Annotated[
        str, typer.Option(metavar="SHARE", help="Datagrams overtaken by later ones.")
    ] = "0%",
    garble: Annotated[
        str, typer.Option(metavar="SHARE", help="Datagrams with one byte changed.")
    ] = "0%",
    rate: Rate = None,
    cut_every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Give each client another port at the target so often."),
    ] = None,
    one_way: OneWay = None,
    seed: Seed = 0,
    max_clients: MaxClients = 256,
    idle: Annotated[
        str, typer.Option(metavar="TIME", help="Forget clients not heard of for so long.")
    ] = "60s",
    run_for: For = None,
    as_json: Json = False,
) -> None:
    """Pass datagrams on to HOST:PORT and the answers back, with faults, until Ctrl-C.

    Each client has a socket of its own at the target, as behind a NAT.
    """
    from penstock.relay import faults as kit  # noqa: PLC0415 - loads asyncio

    mean, jitter = _parsed("delay", kit.parse_delay, delay)
    faults = kit.Faults(
        drop=_parsed("drop", kit.parse_share, drop),
        duplicate=_parsed("duplicate", kit.parse_share, duplicate),
        reorder=_parsed("reorder", kit.parse_share, reorder),
        garble=_parsed("garble", kit.parse_share, garble),
        delay=mean,
        jitter=jitter,
        rate=_parsed_if_given("rate", parse_size, rate),
        cut_every=_parsed_if_given("cut-every", parse_duration, cut_every),
        one_way=one_way,
    )
    ends = _parsed_if_given("for", parse_duration, run_for)
    with kit.FaultRouter.udp(
        kit.parse_address(to, "to"),
        faults,
        seed=seed,
        listen=kit.parse_address(listen, "listen"),
        max_clients=max_clients,
        idle=_parsed("idle", parse_duration, idle),
    ) as router:
        _run(router, ends, as_json=as_json)


def chaos_tcp(
    to: To,
    listen: Listen = "127.0.0.1:0",
    drop: Annotated[
        str, typer.Option(metavar="SHARE", help="Kilobytes of the stream left out.")
    ] = "0%",
    delay: Delay = "0s",
    garble: Annotated[
        str, typer.Option(metavar="SHARE", help="Kilobytes of the stream with one byte changed.")
    ] = "0%",
    rate: Rate = None,
    cut_every: Annotated[
        str | None, typer.Option(metavar="TIME", help="Cut each connection when it is so old.")
    ] = None,
    cut_after: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Cut a connection when so much passed in a direction."),
    ] = None,
    cut: Annotated[
        Literal["rst", "fin"], typer.Option(help="Cut with a reset, or close in good order.")
    ] = "rst",
    half_open: Annotated[
        bool,
        typer.Option(
            "--half-open",
            help="Keep connections open and pass nothing; with a cut option, in place of the cut.",
        ),
    ] = False,
    refuse: Annotated[
        str,
        typer.Option(metavar="SHARE", help="Connections reset at once; at 100%, refused."),
    ] = "0%",
    one_way: OneWay = None,
    seed: Seed = 0,
    max_clients: MaxClients = 256,
    run_for: For = None,
    as_json: Json = False,
) -> None:
    """Pass connections on to HOST:PORT, with faults, until Ctrl-C or SIGTERM."""
    from penstock.relay import faults as kit  # noqa: PLC0415 - loads asyncio

    mean, jitter = _parsed("delay", kit.parse_delay, delay)
    faults = kit.Faults(
        drop=_parsed("drop", kit.parse_share, drop),
        garble=_parsed("garble", kit.parse_share, garble),
        delay=mean,
        jitter=jitter,
        rate=_parsed_if_given("rate", parse_size, rate),
        cut_every=_parsed_if_given("cut-every", parse_duration, cut_every),
        cut_after=_parsed_if_given("cut-after", parse_size, cut_after),
        cut=cut,
        half_open=half_open,
        refuse=_parsed("refuse", kit.parse_share, refuse),
        one_way=one_way,
    )
    ends = _parsed_if_given("for", parse_duration, run_for)
    with kit.FaultRouter.tcp(
        kit.parse_address(to, "to"),
        faults,
        seed=seed,
        listen=kit.parse_address(listen, "listen"),
        max_clients=max_clients,
    ) as router:
        _run(router, ends, as_json=as_json)


def _parsed(option: str, parse: Callable[[str], _Value], text: str) -> _Value:
    try:
        return parse(text)
    except InvalidOption as error:  # by a unit's parser, which knows its unit only
        raise InvalidOption(f"--{option}", text, error.reason, hint=error.hint) from None


def _parsed_if_given(
    option: str, parse: Callable[[str], _Value], text: str | None
) -> _Value | None:
    return None if text is None else _parsed(option, parse, text)


def _run(router: FaultRouter, run_for: float | None, *, as_json: bool) -> None:
    """Show the counters until a signal or the time limit, and then the totals."""
    stop = _stop_on_signals()
    said = f"routing {router}"
    if as_json:
        note(said)  # standard output is for the counters
    else:
        typer.echo(said)
        sys.stdout.flush()
    deadline = None if run_for is None else time.monotonic() + run_for
    screen = error_console if as_json else console
    if screen.is_terminal:
        with Live(_table(router.counters()), console=screen, auto_refresh=False) as live:
            while not _is_over(stop, deadline):
                live.update(_table(router.counters()), refresh=True)
            router.close()
            live.update(_table(router.counters()), refresh=True)
    else:
        while not _is_over(stop, deadline):
            pass
        router.close()
        if not as_json:
            console.print(_table(router.counters()))
    if as_json:
        typer.echo(json.dumps(router.counters().as_dict()))


def _stop_on_signals() -> threading.Event:
    """Return an event that Ctrl-C and SIGTERM set. A second Ctrl-C ends the process at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def _is_over(stop: threading.Event, deadline: float | None) -> bool:
    """Wait until the next redraw; tell whether to end."""
    left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
    return left <= 0 or stop.wait(left)


def _table(counters: Counters) -> Group:
    table = Table(box=None)
    table.add_column(counters.unit, style="bold")
    table.add_column("up", justify="right")
    table.add_column("down", justify="right")
    up, down = (counters.as_dict()[direction] for direction in ("up", "down"))
    for name in up:
        if name in {"arrived_bytes", "passed_bytes"}:
            continue
        if up[name] or down[name] or name in _ALWAYS:
            table.add_row(name, f"{up[name]:,}", f"{down[name]:,}")
    if counters.unit == "datagrams":
        sizes = (counters.up.passed_bytes, counters.down.passed_bytes)
        table.add_row("size passed", *(format_size(size) for size in sizes), style="dim")
    clients = ", ".join(
        f"{count:,} {name}" for name, count in counters.as_dict()["clients"].items() if count
    )
    return Group(table, f"clients: {clients or 'none yet'}")
