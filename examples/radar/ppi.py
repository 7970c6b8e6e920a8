"""How do the moments of one sweep look from above?

    python examples/radar/ppi.py fmq:/tmp/radar/iq --output demo/ppi.png

Draws a plan position indicator (PPI): reflectivity and velocity side by side, the radar in the
middle, north up. From a queue of beams, it is the newest whole sweep.
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from moments import MOMENTS_SCHEMA, moments_of_batch

import penstock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Sweep", "draw_ppi", "main", "newest_sweep", "sweep_of"]

#: dBZ and the colours that weather services have used for it since the 1980s, every 5 dB.
_DBZ_TICKS: Final = range(-10, 71, 10)
_DBZ_COLOURS: Final = (
    *("#5e6a71", "#86939b", "#b3bdc3"),  # -10: drizzle, insects
    *("#04e9e7", "#019ff4", "#0300f4"),  # 5: light rain
    *("#02fd02", "#01c501", "#008e00"),  # 20: rain
    *("#fdf802", "#e5bc00", "#fd9500"),  # 35: heavy rain
    *("#fd0000", "#d40000", "#bc0000"),  # 50: thunderstorms
    "#f800fd",  # 65: hail
)
#: From towards the radar (green) to away from it (red).
_VELOCITY_COLOURS: Final = (
    *("#00ffe1", "#00e04b", "#009a1c", "#0a5c14", "#5d7a5d"),
    "#d9d9d9",
    *("#806060", "#6e0a0a", "#b30000", "#ff2a1a", "#ffb199"),
)
_BACKGROUND: Final = "#10151c"
_INK: Final = "#c9d1d9"
_RING_KM: Final = 10


class Sweep(NamedTuple):
    """One sweep, sorted by azimuth."""

    time_ns: int
    elevation: float
    nyquist_velocity: float
    #: Degrees, of each beam.
    azimuth: NDArray[np.float32]
    #: km, of the middle of each gate.
    ranges: NDArray[np.float32]
    #: Beams x gates; NaN where there is no echo.
    dbz: NDArray[np.float32]
    velocity: NDArray[np.float32]


def newest_sweep(moments: pa.Table | pa.RecordBatch, sweep: int = 0) -> Sweep:
    """Return the newest sweep of that number with as many beams as any; see `sweep_of`.

    :raises penstock.NotFound: there is no beam of that sweep.
    """
    table = _table(moments)
    table = table.filter(pc.equal(table["sweep"], sweep))
    if not table.num_rows:
        raise penstock.NotFound(
            f"there is no beam of sweep {sweep} in these {moments.num_rows:,} rows",
            hint="let the radar turn for longer, or choose another sweep",
        )
    counts = table.group_by("volume").aggregate([("beam", "count")]).to_pylist()
    most = max(row["beam_count"] for row in counts)
    volume = max(row["volume"] for row in counts if row["beam_count"] == most)
    return sweep_of(table.filter(pc.equal(table["volume"], volume)))


def sweep_of(moments: pa.Table | pa.RecordBatch) -> Sweep:
    """Return rows of `MOMENTS_SCHEMA`, all of one sweep, as arrays.

    :raises penstock.Malformed: there is none, or the beams do not have the same gates.
    """
    table = _table(moments).sort_by("azimuth").combine_chunks()
    gates = {len(beam) for beam in table["dbz"]}
    if len(gates) != 1:
        raise penstock.Malformed("a sweep", "gates of its beams", "one number", sorted(gates))
    shape = (table.num_rows, gates.pop())

    def plane(name: str) -> NDArray[np.float32]:
        values = pc.list_flatten(table[name]).to_numpy()
        return np.asarray(values, np.float32).reshape(shape)

    first, spacing = table["first_gate"][0].as_py(), table["gate_spacing"][0].as_py()
    return Sweep(
        time_ns=pc.max(table["time_ns"]).as_py(),
        elevation=table["elevation"][0].as_py(),
        nyquist_velocity=table["nyquist_velocity"][0].as_py(),
        azimuth=table["azimuth"].to_numpy(),
        ranges=np.asarray((first + spacing * np.arange(shape[1])) / 1000, np.float32),
        dbz=plane("dbz"),
        velocity=plane("velocity"),
    )


def _table(moments: pa.Table | pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([moments]) if isinstance(moments, pa.RecordBatch) else moments


# --- drawing --------------------------------------------------------------------------------------


def draw_ppi(sweep: Sweep, path: Path) -> None:
    """Draw reflectivity and velocity of a sweep into a picture file.

    :raises penstock.Unsupported: matplotlib is not installed.
    """
    colors, figures = _matplotlib("colors"), _matplotlib("figure")
    figure = figures.Figure(figsize=(15.2, 7.5), layout="constrained", facecolor=_BACKGROUND)
    figure.get_layout_engine().set(h_pad=0.1)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    nyquist = sweep.nyquist_velocity
    velocity_ticks = np.linspace(-nyquist, nyquist, 11)
    dbz_colours = colors.ListedColormap(_DBZ_COLOURS)
    velocity_colours = colors.LinearSegmentedColormap.from_list("velocity", _VELOCITY_COLOURS)
    _panel(left, sweep, sweep.dbz, "Reflectivity", "dBZ", dbz_colours, _DBZ_TICKS)
    _panel(
        right,
        sweep,
        sweep.velocity,
        "Radial velocity",
        "m/s, positive away from the radar",
        velocity_colours,
        velocity_ticks.tolist(),
    )
    moment = dt.datetime.fromtimestamp(sweep.time_ns / 1e9, dt.UTC)
    figure.suptitle(
        f"PPI at {sweep.elevation:.1f}°, {moment:%Y-%m-%d %H:%M:%S} UTC",
        color="white",
        fontsize=16,
        fontweight="bold",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, facecolor=_BACKGROUND)


def _panel(
    axes: Any,
    sweep: Sweep,
    values: NDArray[np.float32],
    title: str,
    unit: str,
    colours: Any,
    ticks: Sequence[float],
) -> None:
    spaced, values = _without_gaps(sweep.azimuth, values)
    azimuth = np.radians(_edges(spaced))[:, None]
    ranges = np.maximum(_edges(sweep.ranges), 0)
    mesh = axes.pcolormesh(
        ranges * np.sin(azimuth),
        ranges * np.cos(azimuth),
        np.ma.masked_invalid(values),
        cmap=colours,
        vmin=ticks[0],
        vmax=ticks[-1],
        rasterized=True,
    )
    farthest = float(ranges[-1])
    _rings(axes, farthest)
    axes.set_aspect("equal")
    axes.set_xlim(-1.02 * farthest, 1.02 * farthest)
    axes.set_ylim(-1.02 * farthest, 1.02 * farthest)
    axes.set_facecolor(_BACKGROUND)
    axes.set_title(title, color="white", fontsize=14, loc="left")
    axes.set_xlabel("km east", color=_INK)
    if axes.get_subplotspec().is_first_col():
        axes.set_ylabel("km north", color=_INK)
    axes.tick_params(colors=_INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = axes.figure.colorbar(mesh, ax=axes, shrink=0.86, pad=0.015, aspect=32)
    bar.set_label(unit, color=_INK, fontsize=11)
    bar.ax.tick_params(colors=_INK)
    bar.outline.set_visible(False)
    bar.set_ticks(ticks)


def _rings(axes: Any, farthest: float) -> None:
    around = np.radians(np.arange(361))
    for radius in range(_RING_KM, int(farthest) + 1, _RING_KM):
        axes.plot(
            radius * np.sin(around), radius * np.cos(around), color=_INK, linewidth=0.6, alpha=0.45
        )
        axes.annotate(
            f"{radius} km",
            (radius * np.sin(np.pi / 4), radius * np.cos(np.pi / 4)),
            color="white",
            fontsize=8,
            ha="center",
            va="center",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": _BACKGROUND, "alpha": 0.6, "lw": 0},
        )
    for spoke in np.radians(np.arange(0, 360, 30)):
        axes.plot(
            [0, farthest * np.sin(spoke)],
            [0, farthest * np.cos(spoke)],
            color=_INK,
            linewidth=0.4,
            alpha=0.3,
        )
    axes.plot(0, 0, marker="^", color="white", markersize=5)


def _without_gaps(
    azimuth: NDArray[np.float32], values: NDArray[np.float32]
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return beams at even distances, empty ones in place of those that are missing."""
    step = _step(azimuth)
    places = np.rint((azimuth - azimuth[0]) / step).astype(np.int64)
    filled = np.full((places[-1] + 1, values.shape[1]), np.nan, np.float32)
    filled[places] = values
    return azimuth[0] + step * np.arange(len(filled)), filled


def _edges(middles: NDArray[Any]) -> NDArray[np.float64]:
    """Return where beams or gates at even distances begin, and where the last ends."""
    half = _step(middles) / 2
    return np.append(middles - half, middles[-1] + half).astype(np.float64)


def _step(middles: NDArray[Any]) -> float:
    return float(np.median(np.diff(middles))) if len(middles) > 1 else 1.0


def _matplotlib(part: str) -> Any:
    try:
        return import_module(f"matplotlib.{part}")
    except ImportError as error:
        raise penstock.Unsupported(
            "drawing needs matplotlib, which is not installed",
            hint="pip install 'penstock[pictures]'",
        ) from error


# --- from a queue ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the newest whole sweep of a queue of beams."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="the queue of beams, such as fmq:/tmp/radar/iq")
    parser.add_argument("--sweep", type=int, default=0, help="which elevation (0)")
    parser.add_argument("--output", type=Path, default=Path("demo/ppi.png"))
    given = parser.parse_args(arguments)
    try:
        draw_ppi(newest_sweep(_moments_in(given.url, given.sweep), given.sweep), given.output)
    except penstock.PenstockError as error:
        print(f"ppi: {error}", f"  {error.hint or ''}", sep="\n", file=sys.stderr)
        return 1
    print(f"drew {given.output}")
    return 0


def _moments_in(url: str, sweep: int) -> pa.Table:
    """Return the moments of what is in a queue now of one sweep."""
    parts = []
    with penstock.open_reader(url, type=sweep) as reader:
        newest = reader.newest_seq()
        while (batch := reader.read_batch(256)).num_rows:
            parts.append(moments_of_batch(batch))
            if newest is not None and batch["seq"][-1].as_py() >= newest:
                break  # a radar that goes on writing would keep us here
    return pa.Table.from_batches(parts, MOMENTS_SCHEMA)


if __name__ == "__main__":
    sys.exit(main())
