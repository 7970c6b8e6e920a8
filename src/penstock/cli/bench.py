"""The command that measures a stream: `bench`."""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.messages import LOST, Url, is_finite
from penstock.cli.output import note
from penstock.core import endpoints
from penstock.core.errors import AlreadyExists, NotFound, PenstockError, StorageError, Unsupported
from penstock.core.units import format_duration, format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from penstock.core.interfaces import Writer

__all__ = ["Measured", "add_to", "measure"]

#: The smallest payload: see `bench_reader.HEAD`.
_LEAST: Final = 24
#: Messages per write, without a rate.
_BATCH: Final = 256
#: With a rate, messages due within this many seconds are written together.
_SLICE: Final = 0.001
#: Seconds for a reader to get ready.
_READY: Final = 60.0


def add_to(app: typer.Typer) -> None:
    """Add the command of this file to the application."""
    app.command(rich_help_panel="Streams")(bench)


@dataclass(frozen=True)
class Measured:
    """Result of a benchmark of a stream."""

    url: str
    count: int
    size: int
    #: The requested messages per second; None: unlimited.
    rate: float | None
    #: Seconds that the writer took.
    seconds: float
    #: The result of each reader; see `bench_reader`.
    readers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return sum(reader["lost"] for reader in self.readers)


def bench(
    url: Url,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Messages to write.")
    ] = 100_000,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of each, such as 1k.")] = "128",
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            callback=is_finite,
            min=0.01,
            help="Messages per second; without it, all it takes.",
        ),
    ] = None,
    readers: Annotated[int, typer.Option(min=0, max=1000, help="Processes that read.")] = 1,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help=f"Messages at a time: {_BATCH}; with --rate, those of 1 ms."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also into a stream that is there already.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the latencies into this PNG or SVG file."),
    ] = None,
) -> None:
    """Measure a stream: how many messages a second, how late they come, and how many are lost.

    A stream that it makes is removed at the end. Latency is from the call that writes a message to
    the call that returns it, in another process. Exit code 3 if messages were lost: a queue keeps
    its newest ones, so give a rate, or measure a log.

    Examples:
      penstock bench fmq:/dev/shm/test --rate 10000 --readers 2 --plot late.png
      penstock bench log:/tmp/test -n 1000000
    """
    length = parse_size(size)
    if length < _LEAST:
        raise typer.BadParameter(f"--size is at least {_LEAST}")
    if plot is not None:
        _check_pictures(plot)
    # Loaded before there is anything to remove: after a Ctrl-C in it, numpy cannot be loaded again.
    import numpy  # noqa: F401, ICN001, PLC0415

    is_new = not _is_there(url)
    if not is_new and not force:
        raise AlreadyExists(
            f"{url} is there already, and {count:,} messages would be written to it",
            hint="choose another, or add --force",
        )
    try:
        found = measure(url, count, length, rate, readers, batch, note)
    finally:
        if is_new:
            _remove(url)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        from penstock.cli.console import console  # noqa: PLC0415 - JSON needs none

        asked = "" if rate is None else f" at {rate:g}/s"
        typer.echo(f"{found.url}: {count:,} messages of {format_size(length)}{asked}")
        console.print(*_tables(found), sep="\n\n")
    if plot is not None:
        _draw(found, plot)
    if found.lost:
        raise typer.Exit(LOST)


def measure(
    url: str,
    count: int,
    size: int,
    rate: float | None,
    readers: int,
    batch: int | None,
    say: Callable[[str], None],
) -> Measured:
    """Write messages to a stream while processes read them; return the measurements.

    :raises PenstockError: a reader cannot read, or the writer cannot write.
    """
    run = secrets.randbits(63)
    with ExitStack() as stack:
        writer = stack.enter_context(endpoints.open_writer(url))
        started = [_start(stack, url, run, count) for _ in range(readers)]
        for process in started:
            _expect(process, "ready", within=_READY)
        say(f"penstock: writing {count:,} messages of {format_size(size)}")
        seconds = _write(writer, run, count, size, rate, batch)
        results = []
        for process in started:
            assert process.stdin is not None
            process.stdin.close()  # no more will come
        for process in started:
            results.append(json.loads(_expect(process, '{"messages"')))
            process.wait()
    return Measured(url, count, size, rate, seconds, results)


def _start(stack: ExitStack, url: str, run: int, count: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "penstock.cli.bench_reader", url, str(run), str(count)]
    process = stack.enter_context(
        subprocess.Popen(  # noqa: S603 - it is this program
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for the command, which ends them
        )
    )
    stack.callback(process.kill)
    return process


def _expect(process: subprocess.Popen[str], beginning: str, within: float | None = None) -> str:
    """Return the next line of a reader, which begins so.

    :raises PenstockError: it reports an error, has ended, or says nothing `within` seconds.
    """
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], within)[0]:
        hint = "the machine is too busy, or the stream does not answer"
        raise PenstockError(f"a reader was not ready within {within:g} s", hint=hint)
    line = process.stdout.readline()
    if line.startswith(beginning):
        return line
    try:
        said = json.loads(line)
    except ValueError:
        raise PenstockError("a reader ended early", hint="it was killed, perhaps") from None
    raise PenstockError(f"a reader cannot read: {said['error']}", hint=said["hint"])


def _write(
    writer: Writer, run: int, count: int, size: int, rate: float | None, batch: int | None
) -> float:
    """Write the messages, and return the elapsed seconds."""
    from penstock.cli.bench_reader import HEAD  # noqa: PLC0415 - loads numpy

    at_once = batch or (_BATCH if rate is None else max(1, int(rate * _SLICE)))
    rest = bytes(size - HEAD.size)
    began = time.perf_counter()
    for first in range(0, count, at_once):
        if rate is not None:
            time.sleep(max(0.0, began + first / rate - time.perf_counter()))
        now = time.time_ns()
        numbers = range(first, min(first + at_once, count))
        writer.write_many([HEAD.pack(run, number, now) + rest for number in numbers])
    writer.flush()
    return time.perf_counter() - began


def _is_there(url: str) -> bool:
    try:
        endpoints.describe(url)
    except (NotFound, Unsupported):
        return False
    return True


def _remove(url: str) -> None:
    with suppress(Unsupported, NotFound):  # else its owner removes it
        endpoints.remove(url, force=True)


# --- what it shows --------------------------------------------------------------------------------


def _tables(found: Measured) -> list[Table]:
    """Return throughput and latency as two tables, which fit a narrow terminal."""
    from rich.table import Table  # noqa: PLC0415 - JSON needs none

    tables = []
    for names in (
        ("messages/s", "bytes/s", "lost", "twice"),
        ("p50", "p90", "p99", "p99.9", "slowest"),
    ):
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        tables.append(table)
    carried, latencies = tables
    carried.add_row("writer", *_rates(found.count, found.count * found.size, found.seconds))
    for number, reader in enumerate(found.readers, 1):
        lost = f"[red]{reader['lost']:,}[/red]" if reader["lost"] else "0"
        who = "reader" if len(found.readers) == 1 else f"reader {number}"
        rates = _rates(reader["messages"], reader["bytes"], reader["seconds"])
        carried.add_row(who, *rates, lost, f"{reader['twice']:,}")
        latencies.add_row(who, *_percentiles(reader))
    return tables if found.readers else [carried]


def _rates(messages: int, size: int, seconds: float) -> tuple[str, str]:
    if seconds <= 0:
        return "-", "-"
    return f"{messages / seconds:,.0f}", f"{format_size(int(size / seconds))}"


def _percentiles(reader: dict[str, Any]) -> list[str]:
    curve = reader["latencies_ns"]
    if not curve:
        return ["-"] * 5
    chosen = [curve[500], curve[900], curve[990], reader["slowest_999_ns"], curve[-1]]
    return [format_duration(value / 1e9) for value in chosen]


def _check_pictures(path: Path) -> None:
    """Check what can be checked before something is measured."""
    if find_spec("matplotlib") is None:
        raise Unsupported("--plot needs matplotlib", hint="pip install 'penstock[pictures]'")
    if path.suffix.lower() not in {".png", ".svg"}:
        raise typer.BadParameter(f"--plot {path}: give a name that ends with .png or .svg")
    if not os.access(path.parent, os.W_OK):
        raise NotFound(f"no file can be written to {path.parent}", hint="look at the path")


def _draw(found: Measured, path: Path) -> None:
    """Draw the distribution of latencies of each reader."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    from matplotlib.ticker import EngFormatter  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, reader in enumerate(found.readers, 1):
        curve = reader["latencies_ns"]
        shares = [100 * i / (len(curve) - 1) for i in range(len(curve))]
        late = [value / 1e9 for value in curve]
        axes.plot(shares, late, label=f"reader {number}, {reader['lost']:,} lost")
    axes.set_yscale("log")
    axes.set_xlabel("messages, %")
    axes.set_ylabel("latency at most")
    axes.yaxis.set_major_formatter(EngFormatter(unit="s"))  # 100 µs, 1 ms, 10 ms
    asked = "" if found.rate is None else f" at {found.rate:g}/s"
    axes.set_title(f"{found.url}: {found.count:,} messages of {format_size(found.size)}{asked}")
    axes.grid(visible=True, alpha=0.3)
    if found.readers:
        axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise StorageError("writing", str(path), error) from error
    note(f"penstock: {path} shows the latencies")
