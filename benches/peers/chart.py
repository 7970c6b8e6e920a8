"""How do the results look at a glance?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from peers.contract import FILE, MEMORY, library
from peers.lineup import CLASSIC, ICEORYX, ICEORYX_EVENT, ICEORYX_IN_PLACE, RING
from peers.queues import Form
from peers.results import FAN_OUT, LATENCY, REPLAY, SIZES
from peers.wording import microseconds, rate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from peers.results import Figure, Results

__all__ = ["draw"]

#: One colour a product; shades tell its forms apart.
_WAYS = {
    (RING[Form.SINGLE], MEMORY): ("wide ring, write/read", "#0b5fa5"),
    (RING[Form.LISTS], MEMORY): ("wide ring, lists", "#3f8fd2"),
    (RING[Form.ARROW], MEMORY): ("wide ring, Arrow", "#7fb8e6"),
    (RING[Form.IN_PLACE], MEMORY): ("wide ring, in place", "#b8d8f2"),
    (CLASSIC[Form.LISTS], FILE): ("classic queue, lists", "#2f8f5b"),
    (ICEORYX, MEMORY): ("iceoryx2", "#d95f02"),
    (ICEORYX_IN_PLACE, MEMORY): ("iceoryx2, in place", "#f5a25d"),
    ("pyzmq", "ipc"): ("pyzmq ipc", "#7b3294"),
    ("pyzmq", "tcp"): ("pyzmq tcp", "#b58bc7"),
    ("zenoh", "tcp"): ("zenoh tcp", "#8c6d31"),
    ("zenoh", "shm"): ("zenoh shm", "#cdb26f"),
    ("Redis streams", "tcp, AOF"): ("Redis streams", "#b2182b"),
    ("NATS core", "tcp"): ("NATS core", "#6b7280"),
}

_COLOURS = {
    "wide ring": "#0b5fa5",
    "durable log": "#3f8fd2",
    "classic": "#2f8f5b",
    "iceoryx2": "#d95f02",
    "pyzmq": "#7b3294",
    "zenoh": "#8c6d31",
    "Redis": "#b2182b",
    "NATS": "#6b7280",
    "JetStream": "#6b7280",
}


def draw(results: Results, where: Mapping[str, str], path: Path) -> None:
    """Draw throughput by size, and beside it fan-out, latency and replay, all logarithmic."""
    matplotlib = library("matplotlib")
    matplotlib.use("Agg")
    pyplot = library("matplotlib.pyplot")
    pyplot.rcParams.update({"font.size": 9, "axes.titlesize": 11, "axes.titleweight": "bold"})
    figure = pyplot.figure(figsize=(15, 10), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1])
    _throughput(top.subplots(), results)
    fan_out, latency, replay = bottom.subplots(1, 3)
    _bars(fan_out, _shown(results, FAN_OUT), "1 writer, 4 readers, 1 KiB", "messages/s per reader")
    _bars(latency, results.of(LATENCY), "One-way latency, 64 B (less is better)", "µs: p50 to p99")
    _bars(replay, results.of(REPLAY), "Replay from a point in time, 1 KiB", "messages/s")
    figure.suptitle(
        "Passing messages between Python processes on one machine, without a loss\n"
        f"{where['processor']}, {where['cores']} cores, median of {where['rounds']}, "
        f"{where['date']}",
        fontsize=13,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _throughput(axes: Any, results: Results) -> None:
    ways = [way for way in _WAYS if any(results.value(case, *way) for case in SIZES.values())]
    width = 0.86 / max(1, len(ways))
    for number, way in enumerate(ways):
        label, colour = _WAYS[way]
        values = [results.value(case, *way) or 0.0 for case in SIZES.values()]
        places = [group + (number - (len(ways) - 1) / 2) * width for group in range(len(values))]
        axes.bar(places, values, width * 0.92, label=label, color=colour)
        for place, value in zip(places, values, strict=True):
            if value:
                axes.annotate(
                    rate(value),
                    (place, value),
                    (0, 3),
                    textcoords="offset points",
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=7.5,
                )
    axes.set_yscale("log")
    axes.set_xticks(range(len(SIZES)), SIZES.values())
    axes.set_ylabel("messages/s")
    low, high = axes.get_ylim()
    # A whole power of ten below, and room for what stands above the highest bar.
    axes.set_ylim(10.0 ** math.floor(math.log10(low)), high * 4)
    axes.set_title("1 writer, 1 reader, by message size", loc="left")
    axes.legend(ncols=1, loc="center left", bbox_to_anchor=(1.005, 0.5), frameon=False)
    _tidy(axes, "y")


def _shown(results: Results, case: str) -> list[Figure]:
    return [figure for figure in results.of(case) if (figure.name, figure.storage) in _WAYS]


def _bars(axes: Any, figures: Sequence[Figure], title: str, unit: str) -> None:
    there = [figure for figure in figures if figure.value is not None]
    axes.set_title(title, loc="left")
    axes.set_xlabel(unit)
    if not there:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    there.reverse()  # the first at the top
    values = [figure.value or 0.0 for figure in there]
    axes.barh(range(len(there)), values, 0.7, color=[_colour(figure) for figure in there])
    for place, figure in enumerate(there):
        value, end = figure.value or 0.0, figure.value or 0.0
        text = rate(value)
        if figure.high_value is not None:
            end = max(end, figure.high_value)
            axes.plot([value, end], [place, place], color="#333333", linewidth=1.2)
            text = f"{microseconds(value)}, {microseconds(end)}"
        axes.annotate(
            text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(there)), [_label(figure) for figure in there])
    axes.set_xscale("log")
    low = 10.0 ** math.floor(math.log10(min(values)) - 0.2)
    high = max([*values, *(figure.high_value or 0.0 for figure in there)])
    # Room for what stands behind the longest bar.
    axes.set_xlim(low, high * (high / low) ** 0.4)
    _tidy(axes, "x")


def _label(figure: Figure) -> str:
    if figure.case == FAN_OUT:
        return _WAYS[figure.name, figure.storage][0]
    if figure.case == REPLAY or figure.name == ICEORYX_EVENT:
        return figure.name
    if figure.name == ICEORYX:
        return "iceoryx2, polled"
    return f"{figure.name}, {figure.storage}".replace(", tcp, AOF", "")


def _colour(figure: Figure) -> str:
    if figure.case == FAN_OUT:
        return _WAYS[figure.name, figure.storage][1]
    return next(
        (colour for start, colour in _COLOURS.items() if figure.name.startswith(start)), "#999999"
    )


def _tidy(axes: Any, axis: str) -> None:
    axes.grid(axis=axis, which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
