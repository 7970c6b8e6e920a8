"""How does a file of a volume become beams again? CfRadial-1, and whatever xradar reads."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import netCDF4
import numpy as np
import pyarrow as pa

from penstock.core.errors import Malformed, NotFound, StorageError
from penstock.radar.beams import field_names, make_beams, together
from penstock.radar.cfradial import FILL, POSITION, RADAR_VARIABLES, RAY_VARIABLES, SWEEP_WORDS
from penstock.radar.pulse_pair import SPEED_OF_LIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["is_grid", "read_volume"]

log = logging.getLogger(__name__)

_SECOND: Final = 1_000_000_000
#: Values that one file may have: 2 GB as floats. Its header is looked at before they are read.
_MOST_VALUES: Final = 500_000_000
_MATRIX: Final = 2
_CALIBRATION: Final = "r_calib_"
#: Parts of the distance between two gates by which a gate may be elsewhere.
_UNEVEN: Final = 0.25
#: The seconds of times from 1678 to 2262, which fit 64 bits of nanoseconds.
_LATEST: Final = 9_223_372_036

_HDF5, _CLASSIC, _NEXRAD = b"\x89HDF\r\n\x1a\n", b"CDF", (b"AR2V", b"ARCH")


def read_volume(path: str | Path) -> pa.Table:
    """Read the beams of a file: CfRadial, ODIM's HDF5, NEXRAD's level 2.

    :raises NotFound: the file does not exist.
    :raises Malformed: the file has another format, or is damaged.
    :raises StorageError: the operating system refuses.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except OSError as error:
        raise StorageError("reading", str(path), error) from error
    try:
        return _reader_of(path, start)(path)
    except Malformed:
        raise
    except Exception as error:  # of whatever a library stumbles over in a damaged file
        raise Malformed(str(path), "content", "a volume of a radar", f"{error}") from error


def _reader_of(path: Path, start: bytes) -> Callable[[Path], pa.Table]:
    if start.startswith(_NEXRAD):
        return _read_nexrad
    if start != _HDF5 and not start.startswith(_CLASSIC):
        raise Malformed(
            str(path),
            "its first bytes",
            "those of NetCDF, HDF5 or NEXRAD",
            start.hex(" ") or "nothing",
        )
    with netCDF4.Dataset(str(path)) as file:
        if "ODIM" in str(getattr(file, "Conventions", "")):
            return _read_odim
        if "sweep_number" not in file.variables or "time" not in file.dimensions:
            raise Malformed(str(path), "content", "a volume", "no sweeps", hint=_HINT)
    return _read_cfradial


_HINT: Final = "CfRadial-1, ODIM and NEXRAD level 2 are read; is it a grid?"


def is_grid(path: str | Path) -> bool:
    """Tell whether a NetCDF file is a grid and not a volume.

    :raises Malformed: this is no NetCDF file.
    """
    try:
        with netCDF4.Dataset(str(path)) as file:
            return "x0" in file.variables and "sweep_number" not in file.variables
    except OSError as error:
        raise Malformed(str(path), "content", "NetCDF", str(error)) from error


# --- CfRadial-1 -----------------------------------------------------------------------------------


def _read_cfradial(path: Path) -> pa.Table:
    with netCDF4.Dataset(str(path)) as file:
        _check_size(path, file)
        return _CfRadial(path, file).read()


def _check_size(path: Path, file: netCDF4.Dataset) -> None:
    values = sum(int(variable.size) for variable in file.variables.values())
    if values > _MOST_VALUES:
        raise Malformed(str(path), "values", f"at most {_MOST_VALUES:,}", f"{values:,}")


class _CfRadial:
    """Reads one file, by the tables that it is written by."""

    def __init__(self, path: Path, file: netCDF4.Dataset) -> None:
        self._path = path
        self._file = file
        self._rays = len(file.dimensions["time"])

    def read(self) -> pa.Table:
        if not self._rays:
            raise Malformed(str(self._path), "rays", "at least one", 0)
        sweep_of, columns = self._sweeps()
        columns["time_ns"] = self._times()
        columns["volume_number"] = self._all(_whole(self._one("volume_number")))
        start, spacing = _gates_of(
            str(self._path),
            self._numbers("range"),
            getattr(self._file["range"], "meters_between_gates", None),
        )
        columns["start_range"], columns["gate_spacing"] = self._all(start), self._all(spacing)
        for each in RAY_VARIABLES:
            if each.name in self._file.variables:
                columns[each.column] = _nullable(self._file[each.name][:], each.kind)
        for each in RADAR_VARIABLES:
            columns[each.column] = self._all(self._one(each.name))
        for name in POSITION:
            columns[name] = self._position(name)
        platforms = self._texts("platform_type") or [""]
        columns["platform_type"] = self._all(platforms[0] or None)
        for column, attribute in (
            ("radar", "instrument_name"),
            ("site", "site_name"),
            ("scan_name", "scan_name"),
        ):
            columns[column] = self._all(str(getattr(self._file, attribute, "")) or None)
        frequency = self._one("frequency")
        columns["wavelength"] = self._all(SPEED_OF_LIGHT / frequency if frequency else None)
        columns["calibration"] = self._all(self._calibration() or None)
        fields = {name: self._field(name) for name in self._field_names()}
        if not fields:
            raise Malformed(str(self._path), "fields", "at least one", "none")
        # Rays that no sweep has, as between two of them, are in no volume.
        kept = np.flatnonzero(sweep_of >= 0)
        if not len(kept):
            raise Malformed(str(self._path), "sweeps", "one with rays", "empty sweeps")
        if left := self._rays - len(kept):
            log.warning(
                "%s: %d of %d rays are in no sweep, and left out", self._path, left, self._rays
            )
        beams = make_beams({**columns, **fields}).take(pa.array(kept))
        beams = _with_ends(beams)
        return _with_words(beams, {name: self._words(name) for name in fields})

    def _times(self) -> NDArray[np.int64]:
        variable = self._file["time"]
        base, base_ns = _base_time(str(self._path), str(getattr(variable, "units", "")))
        seconds = np.ma.filled(variable[:].astype(np.float64), np.nan)
        if not np.isfinite(seconds).all() or np.abs(seconds + base).max() > _LATEST:
            raise Malformed(str(self._path), "time", "seconds that can be a date", "others")
        # The whole part apart: nanoseconds since 1970 do not fit a float.
        whole = np.floor(seconds)
        nanos = np.round((seconds - whole) * _SECOND)
        return (whole.astype(np.int64) + base) * _SECOND + (nanos.astype(np.int64) + base_ns)

    def _sweeps(self) -> tuple[NDArray[np.int64], dict[str, Any]]:
        starts = self._numbers("sweep_start_ray_index")
        ends = self._numbers("sweep_end_ray_index")
        sweep_of = np.full(self._rays, -1)
        for sweep, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start < 0 or end >= self._rays:
                raise Malformed(
                    str(self._path), f"rays of sweep {sweep}", f"below {self._rays}", f"{end}"
                )
            sweep_of[int(start) : int(end) + 1] = sweep
        numbers = _nullable(self._file["sweep_number"][:], "i4")
        angles = _nullable(self._file["fixed_angle"][:], "f4")
        words = {column: self._texts(name) for name, column, _ in SWEEP_WORDS}
        columns: dict[str, Any] = {
            "sweep_number": [numbers[i] for i in sweep_of],
            "fixed_angle": [angles[i] for i in sweep_of],
        }
        for column, texts in words.items():
            if texts is not None:
                columns[column] = [texts[i] for i in sweep_of]
        return sweep_of, columns

    def _field_names(self) -> list[str]:
        shapes = {("time", "range"), ("n_points",)}
        return [
            name
            for name, variable in self._file.variables.items()
            if variable.dimensions in shapes and np.dtype(variable.dtype).kind in "fiu"
        ]

    def _field(self, name: str) -> NDArray[np.float32]:
        values = self._file[name][:]
        matrix = np.ma.filled(values.astype(np.float32), np.float32(np.nan))
        return matrix if matrix.ndim == _MATRIX else self._unfolded(matrix)

    def _unfolded(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a field that is stored with a different number of gates per ray."""
        gates, starts = self._numbers("ray_n_gates"), self._numbers("ray_start_index")
        matrix = np.full((self._rays, len(self._file.dimensions["range"])), np.nan, np.float32)
        for ray, (start, count) in enumerate(zip(starts, gates, strict=True)):
            matrix[ray, : int(count)] = points[int(start) : int(start) + int(count)]
        return matrix

    def _words(self, name: str) -> dict[str, str]:
        variable = self._file[name]
        words = ("long_name", "standard_name", "units")
        return {word: str(getattr(variable, word)) for word in words if hasattr(variable, word)}

    def _calibration(self) -> list[tuple[str, float]]:
        names = [name for name in self._file.variables if name.startswith(_CALIBRATION)]
        found = [
            (name.removeprefix(_CALIBRATION), self._one(name))
            for name in names
            if self._file[name].dimensions == ("r_calib",)
        ]
        return [(name, value) for name, value in found if value is not None]

    # --- parts -------------------------------------------------------------------------------

    def _all(self, value: Any) -> list[Any]:
        return [value] * self._rays

    def _position(self, name: str) -> Any:
        """Return a coordinate of the radar for each ray; one that moves has many."""
        if name in self._file.variables and self._file[name].dimensions == ("time",):
            return _nullable(np.ma.masked_invalid(self._file[name][:]), "f8")
        return self._all(self._one(name))

    def _one(self, name: str) -> float | None:
        """Return a number, or the first of several; None if it is missing."""
        if name not in self._file.variables:
            return None
        values = np.ma.atleast_1d(self._file[name][...]).reshape(-1)
        if not len(values) or np.ma.is_masked(values[0]) or not np.isfinite(values[0]):
            return None
        return float(values[0])

    def _numbers(self, name: str) -> NDArray[Any]:
        return np.asarray(np.ma.filled(self._file[name][:], -1))

    def _texts(self, name: str) -> list[str] | None:
        kind = self._file[name].dtype if name in self._file.variables else float
        if kind is not str and np.dtype(kind).kind not in "SU":
            return None  # xradar writes NaN for words that it does not know
        raw = np.ma.filled(self._file[name][:], "" if kind is str else b"\0")
        if raw.dtype == "S1":  # characters
            rows = [row.tobytes().decode(errors="replace") for row in np.atleast_2d(raw)]
        else:  # texts already, or one without a dimension
            texts = np.atleast_1d(raw)
            rows = [t.decode(errors="replace") if isinstance(t, bytes) else str(t) for t in texts]
        return [row.partition("\0")[0].strip() for row in rows]


def _gates_of(path: str, spans: NDArray[Any], said: Any = None) -> tuple[float, float]:
    """Return the metres to the first gate and from gate to gate.

    :raises Malformed: there are no gates, or beams cannot say where they are.
    """
    if not len(spans):
        raise Malformed(path, "gates", "at least one", 0)
    places = spans.astype(np.float64)
    start = float(places[0])
    told = float(said) if isinstance(said, (int, float, np.number)) else 1.0
    if len(places) == 1:
        return start, told
    steps = np.arange(len(places))
    spacing = (float(places[-1]) - start) / steps[-1]
    if not np.abs(places - start - spacing * steps).max() <= _UNEVEN * abs(spacing):
        raise Malformed(path, "range", "gates at equal distances", "others")
    # What the file says of it is rounded once, and its gates each for itself.
    is_right = np.abs(places - start - told * steps).max() <= _UNEVEN * abs(spacing)
    return start, told if is_right else spacing


def _base_time(path: str, units: str) -> tuple[int, int]:
    """Return the time from which seconds count: seconds since 1970, and nanoseconds."""
    text = units.removeprefix("seconds since ").strip()
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise Malformed(path, "units of time", "seconds since a date", units) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    since = moment - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return since.days * 86_400 + since.seconds, since.microseconds * 1000


def _whole(value: float | None) -> int | None:
    # Radx, and so we, write the number of an unknown volume without saying that it means so.
    return None if value is None or value == FILL else int(value)


def _nullable(values: NDArray[Any], kind: str) -> pa.Array:
    """Return numbers, with null where the file has none."""
    mask = np.ma.getmaskarray(values)
    plain = np.ma.getdata(values)
    if kind == "i1":
        return pa.array(plain != 0, pa.bool_(), mask=mask)
    return pa.array(plain.astype(kind), mask=mask)


def _with_ends(beams: pa.Table) -> pa.Table:
    """Mark where sweeps and the volume begin and end: a file is whole."""
    sweeps = beams.column("sweep_number").to_pylist()
    changes = [a != b for a, b in itertools.pairwise(sweeps)]
    marks = {
        "start_of_sweep": [True, *changes],
        "end_of_sweep": [*changes, True],
        "start_of_volume": [True] + [False] * len(changes),
        "end_of_volume": [False] * len(changes) + [True],
    }
    for name, values in marks.items():
        at = beams.schema.get_field_index(name)
        beams = beams.set_column(at, beams.schema.field(at), pa.array(values))
    return beams


def _with_words(beams: pa.Table, words: dict[str, dict[str, str]]) -> pa.Table:
    """Keep the file's attributes of fields."""
    fields = [
        field.with_metadata(words[field.name]) if words.get(field.name) else field
        for field in beams.schema
    ]
    return pa.Table.from_arrays(beams.columns, schema=pa.schema(fields))


# --- by xradar ------------------------------------------------------------------------------------


def _read_odim(path: Path) -> pa.Table:
    import xradar  # noqa: PLC0415 - it takes a second, and most files are CfRadial

    return _from_tree(path, xradar.io.open_odim_datatree(str(path), first_dim="time"))


def _read_nexrad(path: Path) -> pa.Table:
    import xradar  # noqa: PLC0415

    tree = xradar.io.open_nexradlevel2_datatree(str(path), first_dim="time")
    return _from_tree(path, tree, _NEXRAD_EMPTY)


#: What NEXRAD has where an echo is too weak, and where it is not known how far away it is.
_NEXRAD_EMPTY: Final = (0, 1)


def _from_tree(path: Path, tree: Any, empty: Sequence[float] = ()) -> pa.Table:
    """Make beams of xradar's tree, which has a dataset a sweep.

    :param empty: codes that stand for no value in all of its fields
    """
    try:
        root = tree.to_dataset()
        names = [name for name in tree.children if name.startswith("sweep_")]
        if not names:
            raise Malformed(str(path), "sweeps", "at least one", "none")
        common = {
            "radar": str(root.attrs.get("instrument_name", "")) or None,
            "site": str(root.attrs.get("site_name", "")) or None,
            **{name: _scalar(root, name) for name in POSITION},
        }
        parts = [
            _sweep_beams(number, tree[name].to_dataset(), common, empty)
            for number, name in enumerate(sorted(names, key=lambda n: int(n.rpartition("_")[2])))
        ]
    finally:
        tree.close()
    beams = _with_ends(together(parts))
    words = {name: parts[0].schema.field(name).metadata for name in field_names(parts[0].schema)}
    return _with_words(beams, {name: found for name, found in words.items() if found})


def _sweep_beams(
    number: int, sweep: Any, common: dict[str, Any], empty: Sequence[float]
) -> pa.Table:
    fields = {
        name: variable
        for name, variable in sweep.data_vars.items()
        if variable.dims == ("time", "range") and variable.dtype.kind in "fiu"
    }
    rays = sweep.sizes["time"]
    values = rays * sweep.sizes["range"] * len(fields)
    if values > _MOST_VALUES:
        raise Malformed("a sweep", "values", f"at most {_MOST_VALUES:,}", f"{values:,}")
    start, spacing = _gates_of(f"sweep {number}", sweep["range"].values)
    mode = sweep["sweep_mode"].item() if "sweep_mode" in sweep else None
    columns: dict[str, Any] = {name: [value] * rays for name, value in common.items()}
    columns |= {
        "time_ns": sweep["time"].values.astype("datetime64[ns]").astype(np.int64),
        "azimuth": sweep["azimuth"].values,
        "elevation": sweep["elevation"].values,
        "fixed_angle": [_scalar(sweep, "sweep_fixed_angle")] * rays,
        "sweep_number": [number] * rays,
        "sweep_mode": [mode.decode() if isinstance(mode, bytes) else mode] * rays,
        "start_range": [start] * rays,
        "gate_spacing": [spacing] * rays,
        "nyquist": [_scalar(sweep, "nyquist_velocity")] * rays,
    }
    matrices = {name: _known_values(variable, empty) for name, variable in fields.items()}
    words = {
        name: {
            word: str(variable.attrs[word])
            for word in ("long_name", "standard_name", "units")
            if word in variable.attrs
        }
        for name, variable in fields.items()
    }
    return _with_words(make_beams({**columns, **matrices}), words)


def _known_values(variable: Any, empty: Sequence[float]) -> NDArray[np.float32]:
    """Return the values of a field, NaN where a code says that nothing was found.

    xradar makes numbers of such codes, too: a velocity of -64.5 m/s in an empty sky.
    """
    values: NDArray[Any] = variable.values
    found = values.astype(np.float32)
    codes = {
        *empty,
        *({float(variable.attrs["_Undetect"])} if "_Undetect" in variable.attrs else ()),
    }
    scale = float(variable.encoding.get("scale_factor", 1.0))
    offset = float(variable.encoding.get("add_offset", 0.0))
    for code in codes:
        is_code = np.isclose(values, code * scale + offset, rtol=1e-6, atol=abs(scale) / 1000)
        found[is_code] = np.nan
    return found


def _scalar(dataset: Any, name: str) -> float | None:
    if name not in dataset:
        return None
    values = np.atleast_1d(dataset[name].values)
    return float(values[0]) if values.size and np.isfinite(values[0]) else None
