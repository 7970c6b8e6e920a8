"""What does a volume or a grid look like? PPI, RHI and slices of grids, painted by matplotlib."""

from __future__ import annotations

import datetime as dt
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow.compute as pc

from penstock.core.endpoints import endpoint_of, open_reader
from penstock.core.errors import InvalidOption, NotFound, Unsupported
from penstock.core.position import Position
from penstock.core.url import URL
from penstock.radar.beams import FIELDS, Field, field_names, first_of, gates_of, values_of
from penstock.radar.cfradial import volume_order
from penstock.radar.file_endpoints import FilesEndpoint, files_below
from penstock.radar.geometry import above_ground
from penstock.radar.grids import Grid, read_grid
from penstock.radar.volume_files import is_grid, read_volume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

__all__ = ["file_of", "plot"]

_ACROSS: Final = 3
_INCHES: Final = 6.0
#: A gap between two rays that is wider than so many of the usual ones is not painted over.
_GAP: Final = 2.5
_RHI: Final = frozenset({"rhi", "manual_rhi", "sunscan_rhi", "elevation_surveillance"})

#: dBZ in the colours that weather services have had for it since the 1980s, every 5 from -10 on.
_RAIN: Final = (
    *("#5e6a71", "#86939b", "#b3bdc3"),  # drizzle, insects
    *("#04e9e7", "#019ff4", "#0300f4"),  # 5: light rain
    *("#02fd02", "#01c501", "#008e00"),  # 20: rain
    *("#fdf802", "#e5bc00", "#fd9500"),  # 35: heavy rain
    *("#fd0000", "#d40000", "#bc0000"),  # 50: thunderstorms
    "#f800fd",  # 65: hail
)
#: From towards the radar (green) to away from it (red).
_TO_AND_FRO: Final = (
    *("#00ffe1", "#00e04b", "#009a1c", "#0a5c14", "#5d7a5d"),
    "#d9d9d9",
    *("#806060", "#6e0a0a", "#b30000", "#ff2a1a", "#ffb199"),
)
_BACKGROUND, _INK = "#10151c", "#c9d1d9"
_RINGS: Final = (1, 2, 5, 10, 20, 25, 50, 100, 200)
_MOST_RINGS: Final = 6


class _Colours(NamedTuple):
    """How the values of a field are painted."""

    #: A name of matplotlib's, or the colours themselves.
    plain: str | tuple[str, ...]
    #: The same for those who see fewer colours.
    safe: str
    #: The range; None: that of the values.
    limits: tuple[float, float] | None = None
    #: Whether each colour stands for a step of values.
    in_steps: bool = False


_COLOURS: Final = {
    "DBZ": _Colours(_RAIN, "viridis", (-10.0, 70.0), in_steps=True),
    "VEL": _Colours(_TO_AND_FRO, "PuOr"),
    "WIDTH": _Colours("plasma", "cividis", (0.0, 8.0)),
    "ZDR": _Colours("turbo", "cividis", (-2.0, 6.0)),
    "RHOHV": _Colours("Spectral", "cividis", (0.8, 1.0)),
    "NCP": _Colours("turbo", "cividis", (0.0, 1.0)),
}
_OTHERS: Final = _Colours("turbo", "viridis")


class _Panel(NamedTuple):
    """One picture of several: corners of cells, and their values."""

    field: str
    title: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    values: NDArray[np.float32]
    labels: tuple[str, str]
    is_even: bool
    #: Kilometres from the radar in the middle to the edge; None: there is none in the middle.
    radius: float | None = None
    #: Kilometres up to which an RHI is painted.
    top: float | None = None


class _Picture(NamedTuple):
    """What is painted on one sheet."""

    title: str
    panels: list[_Panel]
    #: What is known of each field.
    words: Mapping[str, Field]
    #: m/s beyond which velocities fold, if known.
    nyquist: float | None = None
    #: What of the file is not on it, in words.
    left_out: str = ""


def file_of(place: str) -> Path:
    """Return the file that a path names, or the newest one of a directory or `latest:` URL.

    :raises NotFound: there is no file.
    """
    path = Path(place)
    if not path.exists() and ":" in place:
        endpoint = endpoint_of(place)
        if not isinstance(endpoint, FilesEndpoint):
            return _announced(place)
        path = endpoint.path_of(URL.parse(place))
    files = list(files_below(path)) if path.exists() else []
    if not files:
        raise NotFound(f"there is no file at {place}", hint="look at the path")
    return files[-1]


def _announced(url: str) -> Path:
    """Return the file that a stream of latest_data_info tells of last."""
    with open_reader(url, Position.LAST, format="json") as reader:
        found = reader.read(timeout=0)
    path = None if found is None else json.loads(found.payload).get("path")
    if path is None:
        raise NotFound(f"{url} tells of no file that is there")
    return Path(path)


def plot(
    path: str | Path,
    out: str | Path,
    *,
    field: str | Sequence[str] = (),
    sweeps: Sequence[int] = (),
    level: float | None = None,
    min_snr: float | None = None,
    colourblind: bool = False,
) -> str:
    """Paint a file of a volume or a grid; return a description of the picture.

    :param field: one or several; by default DBZ, or else the first
    :param sweeps: their numbers; by default all, up to nine panels
    :param level: of a grid, the height in kilometres; by default the largest value of each column
    :param min_snr: dB; gates of a volume that are weaker are not painted
    :raises InvalidOption: the field or sweep does not exist, or there is no such kind of picture.
    :raises Malformed: the file is no volume or grid, or is damaged.
    :raises Unsupported: matplotlib is not installed.
    """
    path = Path(path)
    wanted = (field,) if isinstance(field, str) else tuple(field)
    if _is_netcdf(path) and is_grid(path):
        picture = _of_grid(read_grid(path), wanted, level)
    else:
        picture = _of_volume(read_volume(path), wanted, sweeps, min_snr)
    _paint(picture, Path(out), colourblind=colourblind)
    count = len(picture.panels)
    names = " ".join(dict.fromkeys(panel.field for panel in picture.panels))
    said = f"{names}, {count} panel{'s' if count > 1 else ''}: {picture.title}"
    return f"{said}; {picture.left_out}" if picture.left_out else said


def _is_netcdf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) in {b"\x89HDF", b"CDF\x01", b"CDF\x02", b"CDF\x05"}
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None


def _chosen(names: Sequence[str], wanted: Sequence[str]) -> Sequence[str]:
    for name in wanted:
        if name not in names:
            hint = f"it has {', '.join(names)}"
            raise InvalidOption("field", name, "is not in the file", hint=hint)
    return wanted or (["DBZ"] if "DBZ" in names else names[:1])


def _when(time_ns: int) -> str:
    return f"{dt.datetime.fromtimestamp(time_ns // 1_000_000_000, dt.UTC):%Y-%m-%d %H:%M:%S} UTC"


# --- volumes --------------------------------------------------------------------------------------

_MOST_PANELS: Final = 9


def _of_volume(
    beams: pa.Table, wanted: Sequence[str], sweeps: Sequence[int], min_snr: float | None
) -> _Picture:
    available = field_names(beams.schema)
    names = _chosen(available, wanted)
    if min_snr is not None and "SNR" not in available:
        raise InvalidOption("min_snr", min_snr, "the file has no field SNR")
    numbers = sorted(set(pc.fill_null(beams.column("sweep_number"), 0).to_pylist()))
    for number in sweeps:
        if number not in numbers:
            raise InvalidOption("sweep", number, "is not in the file", hint=f"it has {numbers}")
    panels, words = [], {}
    chosen = list(sweeps or numbers[: max(1, _MOST_PANELS // len(names))])
    left_out = ""
    if len(chosen) < len(numbers) and not sweeps:
        left_out = f"the first {len(chosen)} of {len(numbers)} sweeps, --sweep chooses others"
    for number in chosen:
        is_of = pc.equal(pc.fill_null(beams.column("sweep_number"), 0), number)
        part, _ = volume_order(beams.filter(is_of))
        panels += [_panel(part, name, number, min_snr) for name in names]
    for name in names:
        stored = beams.schema.field(name).metadata or {}
        known = FIELDS.get(name, Field(name, "", ""))
        words[name] = known._replace(units=stored.get(b"units", known.units.encode()).decode())
    radar = first_of(beams, "radar") or "radar"
    start = int(pc.min(beams.column("time_ns")).as_py())
    limit = "" if min_snr is None else f", SNR at least {min_snr:g} dB"
    title = f"{radar}, {_when(start)}{limit}"
    return _Picture(title, panels, words, first_of(beams, "nyquist"), left_out)


def _panel(sweep: pa.Table, name: str, number: int, min_snr: float | None) -> _Panel:
    gates = int(gates_of(sweep).max())
    start, spacing = (float(first_of(sweep, n)) for n in ("start_range", "gate_spacing"))
    slant = np.maximum(start + spacing * (np.arange(gates + 1) - 0.5), 0) / 1000
    is_rhi = first_of(sweep, "sweep_mode") in _RHI
    moving = sweep.column("elevation" if is_rhi else "azimuth").to_numpy().astype(np.float64)
    values = values_of(sweep, name, gates)
    if min_snr is not None:
        with np.errstate(invalid="ignore"):  # no number is not above it
            values = np.where(values_of(sweep, "SNR", gates) >= min_snr, values, np.float32(np.nan))
    edges, values = _edges(moving, values, wraps=not is_rhi)
    fixed = first_of(sweep, "fixed_angle")
    angle = "" if fixed is None else f" at {fixed:.1f}°"
    if is_rhi:
        height, ground = above_ground(slant[None, :], np.radians(edges)[:, None])
        labels = ("distance (km)", "height above the radar (km)")
        return _Panel(
            name,
            f"RHI{angle} azimuth",
            ground,
            height,
            values,
            labels,
            is_even=False,
            top=_top_of(height, values),
        )
    elevation = float(np.median(sweep.column("elevation").to_numpy()))
    _, ground = above_ground(slant[None, :], np.full((len(edges), 1), math.radians(elevation)))
    turned = np.radians(edges)[:, None]
    east, north = ground * np.sin(turned), ground * np.cos(turned)
    labels = ("east of the radar (km)", "north of the radar (km)")
    title = f"PPI {number}{angle} elevation"
    return _Panel(name, title, east, north, values, labels, is_even=True, radius=ground.max())


def _top_of(height: NDArray[np.float64], values: NDArray[np.float32]) -> float:
    """Return up to which height there is something to see; the sky above it stays out."""
    is_there = np.isfinite(values)
    highest = height[1:, 1:][is_there].max(initial=0.0)
    return 1.1 * float(highest) or float(height.max())


def _edges(
    angles: NDArray[np.float64], values: NDArray[np.float32], *, wraps: bool
) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return the angles between rays, and the rays in that order; a gap is a ray without values."""
    order = np.argsort(angles % 360 if wraps else angles, kind="stable")
    angles = (angles % 360 if wraps else angles)[order]
    values = values[order]
    steps = np.diff(angles)
    usual = float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0
    edges, rows = [angles[0] - usual / 2], []
    for at, angle in enumerate(angles):
        rows.append(values[at])
        if at + 1 == len(angles):
            edges.append(angle + usual / 2)
        elif angles[at + 1] - angle > _GAP * usual:
            edges += [angle + usual / 2, angles[at + 1] - usual / 2]
            rows.append(np.full(values.shape[1], np.nan, np.float32))
        else:
            edges.append((angle + angles[at + 1]) / 2)
    return np.array(edges), np.stack(rows)


# --- grids ----------------------------------------------------------------------------------------


def _of_grid(grid: Grid, wanted: Sequence[str], level: float | None) -> _Picture:
    x, y = np.meshgrid(_borders(grid.x), _borders(grid.y))
    labels = ("east (km)", "north (km)")
    panels = []
    for name in _chosen(list(grid.fields), wanted):
        values = grid.fields[name]
        if level is None:
            largest = np.where(np.isfinite(values), values, -np.inf).max(axis=0)
            flat = np.where(np.isfinite(largest), largest, np.nan).astype(np.float32)
            title = "largest value of each column"
        else:
            at = int(np.abs(grid.z - level).argmin())
            flat, title = values[at], f"height {grid.z[at]:.2f} km"
        panels.append(_Panel(name, title, x, y, flat, labels, is_even=True))
    return _Picture(f"{grid.radar or 'grid'}, {_when(grid.time_ns)}", panels, grid.words)


def _borders(centres: NDArray[np.float64]) -> NDArray[np.float64]:
    step = float(centres[1] - centres[0]) if len(centres) > 1 else 1.0
    return np.append(centres - step / 2, centres[-1] + step / 2)


# --- painting -------------------------------------------------------------------------------------


def _paint(picture: _Picture, out: Path, *, colourblind: bool) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise Unsupported(
            "pictures are painted by matplotlib, which is not installed",
            hint="pip install 'penstock[pictures]'",
        ) from error
    panels = picture.panels
    across = min(_ACROSS, math.ceil(math.sqrt(len(panels))))
    down = math.ceil(len(panels) / across)
    figure = Figure(
        figsize=((_INCHES + 0.8) * across, _INCHES * down + 0.4),
        layout="constrained",
        facecolor=_BACKGROUND,
    )
    FigureCanvasAgg(figure)
    engine: Any = figure.get_layout_engine()
    engine.set(h_pad=0.12, w_pad=0.08)
    figure.suptitle(picture.title, color="white", fontsize=14, fontweight="bold")
    all_axes: Any = figure.subplots(down, across, squeeze=False)
    for axes, panel in zip(all_axes.flat, panels, strict=False):
        _paint_panel(axes, panel, picture, colourblind=colourblind)
    for axes in all_axes.flat[len(panels) :]:
        axes.set_visible(False)
    try:
        figure.savefig(out, dpi=110, facecolor=_BACKGROUND)
    except ValueError as error:  # of matplotlib, which says what it can
        raise InvalidOption("out", str(out), f"cannot be painted: {error}") from None


def _paint_panel(axes: Any, panel: _Panel, picture: _Picture, *, colourblind: bool) -> None:
    colours = _COLOURS.get(panel.field, _OTHERS)
    low, high = colours.limits or _range(panel.field, picture)
    mesh = axes.pcolormesh(
        panel.x,
        panel.y,
        np.ma.masked_invalid(panel.values),
        cmap=colours.safe if colourblind else _map_of(colours),
        vmin=low,
        vmax=high,
        shading="flat",
        rasterized=True,
    )
    words = picture.words[panel.field]
    axes.set_title(f"{words.long_name or panel.field}, {panel.title}", color="white", loc="left")
    axes.set_xlabel(panel.labels[0], color=_INK)
    axes.set_ylabel(panel.labels[1], color=_INK)
    axes.set_facecolor(_BACKGROUND)
    axes.tick_params(colors=_INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if panel.is_even:
        axes.set_aspect("equal")
    if panel.top is not None:
        axes.set_ylim(0, panel.top)
    if panel.radius is None:
        axes.grid(color=_INK, alpha=0.2, linewidth=0.5)
    else:
        # All sweeps to the same scale, so that they can be compared.
        _rings(axes, max(each.radius or 0.0 for each in picture.panels))
    if not np.isfinite(panel.values).any():
        middle = {"ha": "center", "va": "center", "transform": axes.transAxes}
        axes.text(0.5, 0.6, "no values", color="white", fontsize=14, **middle)
    units = f" ({words.units})" if words.units not in {"", "1"} else ""
    bar = axes.figure.colorbar(mesh, ax=axes, shrink=0.85, pad=0.015, aspect=32)
    bar.set_label(f"{panel.field}{units}", color=_INK)
    bar.ax.tick_params(colors=_INK)
    bar.outline.set_visible(False)


def _map_of(colours: _Colours) -> Any:
    if isinstance(colours.plain, str):
        return colours.plain
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap  # noqa: PLC0415

    if colours.in_steps:
        # What is below the first step would look as if it were in it.
        return ListedColormap(list(colours.plain)).with_extremes(under="none")
    return LinearSegmentedColormap.from_list("between", list(colours.plain))


def _rings(axes: Any, farthest: float) -> None:
    """Draw circles around the radar, and lines to the points of the compass."""
    step = next((each for each in _RINGS if farthest / each <= _MOST_RINGS), _RINGS[-1])
    around, corner = np.radians(np.arange(361)), math.sqrt(0.5)
    thin: dict[str, Any] = {"color": _INK, "linewidth": 0.5, "alpha": 0.35}
    for radius in range(step, int(farthest) + 1, step):
        axes.plot(radius * np.sin(around), radius * np.cos(around), **thin)
        place = (radius * corner, radius * corner)
        behind = {"boxstyle": "round,pad=0.15", "facecolor": _BACKGROUND, "alpha": 0.6, "lw": 0}
        said = axes.annotate(f"{radius} km", place, color="white", fontsize=7, bbox=behind)
        said.set(ha="center", va="center")
    for spoke in np.radians(np.arange(0, 360, 30)):
        axes.plot([0, farthest * np.sin(spoke)], [0, farthest * np.cos(spoke)], **thin)
    axes.plot(0, 0, marker="^", color="white", markersize=4)


def _range(field: str, picture: _Picture) -> tuple[float, float]:
    """Return the range of colours: most values, or as much to both sides of 0."""
    if field == "VEL" and picture.nyquist:
        return -picture.nyquist, picture.nyquist
    parts = [panel.values for panel in picture.panels if panel.field == field]
    values = np.concatenate([part[np.isfinite(part)] for part in parts])
    if not len(values):
        return 0.0, 1.0
    low, high = (float(value) for value in np.percentile(values, (1, 99)))
    if field == "VEL":
        high = max(abs(low), abs(high))
        low = -high
    return low, high if high > low else low + 1
