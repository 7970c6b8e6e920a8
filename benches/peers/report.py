"""How are the results shown: in a terminal, and in the documentation?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from peers.contract import MEMORY
from peers.lineup import ICEORYX, REDIS_XREAD
from peers.results import CASES, FAN_OUT, LATENCY, REPLAY, SIZES, arrow_case
from peers.wording import measured, microseconds, rate, times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from peers.results import Figure, Results
    from peers.targets import Target

__all__ = ["BEGIN", "END", "grids", "markdown", "show", "write_docs"]

BEGIN = "<!-- peers: written by make bench, with --write-docs -->"
END = "<!-- peers: end -->"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table, however it will be drawn. The first columns are words, the others figures."""

    title: str
    headings: tuple[str, ...]
    words: int
    rows: list[list[str]]


def grids(results: Results) -> list[Grid]:
    """Lay out everything that was measured."""
    every = [_throughput(results), _latency(results), _replay(results), _arrow(results)]
    return [grid for grid in every if grid.rows]


def _throughput(results: Results) -> Grid:
    cases = [case for case in CASES if results.of(case)]
    rows = []
    for (name, storage), figures in results.by_way(*cases).items():
        row = [name, storage]
        for case in cases:
            row += _rate_and_ratio(figures.get(case), results.value(case, ICEORYX, MEMORY))
        rows.append(row)
    headings = [part for case in cases for part in (_heading(case), "")]
    title = "Messages a second for each reader, and as a multiple of iceoryx2"
    return Grid(title, ("", "over", *headings), 2, rows)


def _heading(case: str) -> str:
    return "1 KiB, 4 readers" if case == FAN_OUT else case


def _rate_and_ratio(figure: Figure | None, yardstick: float | None) -> list[str]:
    if figure is None:
        return ["", ""]
    if figure.value is None:
        return [figure.short or "", ""]
    ratio = times(figure.value / yardstick) if yardstick else ""
    return [rate(figure.value), ratio]


def _latency(results: Results) -> Grid:
    yardstick = results.value(LATENCY, ICEORYX, MEMORY)
    rows = []
    for figure in results.of(LATENCY):
        cells = [figure.short or "", "", ""]
        if figure.value is not None and figure.high_value is not None:
            ratio = times(figure.value / yardstick) if yardstick else ""
            cells = [microseconds(figure.value), microseconds(figure.high_value), ratio]
        rows.append([figure.name, figure.storage, *cells])
    title = "One-way latency of 64 B, one message a millisecond"
    return Grid(title, ("", "over", "p50", "p99", "p50 against iceoryx2"), 2, rows)


def _replay(results: Results) -> Grid:
    storage = next((each.storage for each in results.of(REPLAY) if each.name == REDIS_XREAD), "")
    yardstick = results.value(REPLAY, REDIS_XREAD, storage)
    rows = [
        [figure.name, figure.storage, *_rate_and_ratio(figure, yardstick)]
        for figure in results.of(REPLAY)
    ]
    title = "Replay of 1 KiB messages from a point in time, messages a second"
    return Grid(title, ("", "from", "messages/s", "against Redis"), 2, rows)


def _arrow(results: Results) -> Grid:
    rows = []
    for size in SIZES:
        case = arrow_case(size)
        if results.of(case):
            pair = [results.figure(case, name, MEMORY) for name in ("read_batch", "memcpy")]
            ours, copied = (figure.value for figure in pair)
            ratio = times(ours / copied) if ours and copied else ""
            rows.append([SIZES[size], *(measured(figure) for figure in pair), ratio])
    title = "From the wide ring into Arrow, and a copy of the same memory"
    return Grid(title, ("", "read_batch", "memcpy", "ratio"), 1, rows)


def show(results: Results, targets: Sequence[Target], where: Mapping[str, str]) -> None:
    """Print all tables, the machine, what went wrong, and each target."""
    console = Console(width=132)
    for grid in grids(results):
        console.print(f"\n[bold]{grid.title}")
        table = Table()
        for number, heading in enumerate(grid.headings):
            table.add_column(heading, justify="left" if number < grid.words else "right")
        kind = None
        for row in grid.rows:
            if kind not in {None, _kind(row)}:
                table.add_section()
            kind = _kind(row)
            table.add_row(*row)
        console.print(table)
    print("; ".join(f"{what}: {value}" for what, value in where.items()))
    for remark in results.remarks():
        print(remark)
    _show_targets(console, targets)


def _kind(row: Sequence[str]) -> str:
    """Rows of one product stay together."""
    return row[0].split(",")[0].split(":")[0].split(" ")[0]


def _show_targets(console: Console, targets: Sequence[Target]) -> None:
    console.print("\n[bold]Targets")
    table = Table()
    for heading in ("", "against", "wanted", "found", "", "figures"):
        table.add_column(heading, justify="right" if heading in {"wanted", "found"} else "left")
    for target in targets:
        found = "" if target.ratio is None else times(target.ratio)
        cells = (target.limit, found, target.verdict, target.figures)
        table.add_row(target.what, target.against, *cells)
    console.print(table)


# --- for the documentation ----------------------------------------------------------------------


def markdown(results: Results, targets: Sequence[Target], where: Mapping[str, str]) -> str:
    """Write the section "Against peers"."""
    kernel = where["kernel"].partition("-")[0]
    place = f"{where['processor']}, {where['cores']} cores, {kernel}"
    setting = (
        f"`make bench`, {where['date']}. {place}, files on {where['file system']}, "
        f"Python {where['python']}. Median of {where['rounds']}, of those that lost nothing. "
        f"{where['versions']}."
    )
    parts = ["## Against peers", setting]
    for grid in grids(results):
        marks = ["---"] * grid.words + ["---:"] * (len(grid.headings) - grid.words)
        rows = [grid.headings, marks, *grid.rows]
        parts += [f"**{grid.title}**", "\n".join(_line(row) for row in rows)]
    rows = [["target", "against", "wanted", "found", ""], ["---", "---", "---:", "---:", "---"]]
    for target in targets:
        found = "" if target.ratio is None else times(target.ratio)
        rows.append([target.what, target.against, target.limit, found, target.verdict])
    parts += ["**Targets**", "\n".join(_line(row) for row in rows)]
    if remarks := results.remarks():
        parts.append("\n".join(f"- {remark}" for remark in remarks))
    return "\n\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_docs(path: Path, section: str) -> None:
    """Put the section between its two markers, or at the end of a page that has none."""
    page = path.read_text(encoding="utf-8")
    block = f"{BEGIN}\n\n{section}\n{END}\n"
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        path.write_text(before + block + after.removeprefix("\n"), encoding="utf-8")
    else:
        path.write_text(f"{page.rstrip()}\n\n{block}", encoding="utf-8")
