"""How do beams become a grid, and a grid a CF-1.8 NetCDF file?

The grid is azimuthal equidistant around any point. A cell takes the nearest gate, or the mean of
the gates around it, weighted by their distance.
"""

from __future__ import annotations

import datetime as dt
import math
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BeforeValidator, model_validator
from scipy.spatial import KDTree

from penstock.core.errors import Malformed
from penstock.core.options import Options
from penstock.radar.beams import (
    FIELD_TYPE,
    FIELDS,
    Field,
    field_names,
    first_of,
    gates_of,
    values_of,
)
from penstock.radar.cfradial import free_name, new_netcdf
from penstock.radar.geometry import EARTH, above_ground, around, to_degrees

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

    from numpy.typing import NDArray

__all__ = [
    "GRID_SCHEMA",
    "Axis",
    "Grid",
    "GridOptions",
    "check_griddable",
    "grid_beams",
    "grid_from_row",
    "grid_name",
    "grid_row",
    "is_grid_row",
    "read_grid",
    "write_grid",
]

_WORDS: Final = ("long_name", "standard_name", "units")
_SECOND: Final = 1_000_000_000
_FILL: Final = np.float32(-9999)
_MOST_CELLS: Final = 50_000_000
_NEIGHBOURS: Final = 8


class Axis(NamedTuple):
    """The cells of a grid along one axis, in kilometres: `-100:100:1`."""

    start: float
    stop: float
    step: float

    @classmethod
    def parse(cls, text: object) -> Axis:
        """Read `start:stop:step`, or one place.

        :raises ValueError: the text is invalid, or the axis has no cells.
        """
        if isinstance(text, Axis):
            return text
        try:
            parts = [float(part) for part in str(text).split(":")]
        except ValueError:
            parts = []
        if len(parts) == 1:
            parts = [parts[0], parts[0], 1.0]
        if len(parts) != len(cls._fields) or not all(map(math.isfinite, parts)):
            raise ValueError("must be start:stop:step in kilometres, as in -100:100:1")
        axis = cls(*parts)
        if axis.step <= 0 or axis.stop < axis.start:
            raise ValueError("must go up, by a step above 0")
        return axis

    @property
    def cells(self) -> int:
        return int((self.stop - self.start) / self.step + 1e-6) + 1

    def places(self) -> NDArray[np.float64]:
        """Return the centres of the cells."""
        return self.start + self.step * np.arange(self.cells, dtype=np.float64)


_Axis = Annotated[Axis, BeforeValidator(Axis.parse)]


def _names(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


class GridOptions(Options):
    """Options of a grid. Lengths are kilometres; heights are above mean sea level."""

    x: _Axis = Axis(-100, 100, 1)
    y: _Axis = Axis(-100, 100, 1)
    z: _Axis = Axis(0.5, 15, 0.5)
    method: Literal["nearest", "weighted"] = "nearest"
    #: How far a gate may be from the centre of a cell; by default 1.5 of the largest step.
    radius: float | None = None
    #: The point in the middle; by default the radar.
    latitude: float | None = None
    longitude: float | None = None
    #: Which fields; by default all.
    fields: Annotated[tuple[str, ...] | None, BeforeValidator(_names)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        cells = self.x.cells * self.y.cells * self.z.cells
        if cells > _MOST_CELLS:
            raise ValueError(f"a grid has at most {_MOST_CELLS:,} cells, and this one {cells:,}")
        if self.radius is not None and not self.radius > 0:
            raise ValueError("radius must be above 0")
        if (self.latitude is None) != (self.longitude is None):
            raise ValueError("latitude and longitude are given together")
        return self

    @property
    def reach(self) -> float:
        """How far a gate may be from the centre of a cell."""
        return self.radius or 1.5 * max(self.x.step, self.y.step, self.z.step)


class Grid(NamedTuple):
    """Fields on a grid."""

    #: The middle, beginning and end of its rays, nanoseconds since 1970.
    time_ns: int
    start_ns: int
    end_ns: int
    radar: str | None
    #: The point in the middle.
    latitude: float
    longitude: float
    #: Kilometres.
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    z: NDArray[np.float64]
    #: By z, y and x; NaN where there is no value.
    fields: Mapping[str, NDArray[np.float32]]
    words: Mapping[str, Field]


# --- from beams -----------------------------------------------------------------------------------


def grid_beams(beams: pa.Table, options: GridOptions = GridOptions()) -> Grid:  # noqa: B008
    """Put the beams of a volume on a grid.

    :raises Malformed: there are no beams, the radar's position is unknown, or a field is
        missing.
    """
    if not beams.num_rows:
        raise Malformed("a volume", "rays", "at least one", 0)
    check_griddable(beams, options)
    names = list(options.fields or field_names(beams.schema))
    gates = int(gates_of(beams).max())
    places = _places(beams, gates)
    # Of each ray: a radar may move.
    lat, lon = (_of_rays(beams, name) for name in ("latitude", "longitude"))
    latitude = float(lat[0]) if options.latitude is None else options.latitude
    longitude = float(lon[0]) if options.longitude is None else options.longitude
    if (lat != latitude).any() or (lon != longitude).any():
        origins = np.repeat(lat, gates), np.repeat(lon, gates)
        there = to_degrees(places[:, 0], places[:, 1], *origins)
        places[:, 0], places[:, 1] = around(*there, latitude, longitude)
    axes = options.z.places(), options.y.places(), options.x.places()
    values = {name: values_of(beams, name, gates).reshape(-1) for name in names}
    fields = _gridded(places, values, axes, options)
    times = beams.column("time_ns").to_numpy()
    return Grid(
        int(times.min()) + int(times.max() - times.min()) // 2,
        int(times.min()),
        int(times.max()),
        first_of(beams, "radar"),
        latitude,
        longitude,
        axes[2],
        axes[1],
        axes[0],
        fields,
        {name: _words_of(beams.schema.field(name)) for name in names},
    )


def check_griddable(beams: pa.Table, options: GridOptions) -> None:
    """Check that beams have what a grid is made of.

    :raises Malformed: the radar's position is unknown, or a field is missing.
    """
    for name in ("latitude", "longitude"):
        if first_of(beams, name) is None:
            raise Malformed("beams for a grid", name, "that of the radar", "null")
    known = field_names(beams.schema)
    for name in options.fields or ():
        if name not in known:
            raise Malformed("beams for a grid", "field", f"one of {', '.join(known)}", name)


def _words_of(column: pa.Field) -> Field:
    known = FIELDS.get(column.name, Field(column.name, "", ""))
    told = {
        key.decode(): text.decode(errors="replace")
        for key, text in (column.metadata or {}).items()
        if key.decode() in _WORDS
    }
    return known._replace(**told)


def _of_rays(beams: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a number of each ray; one that says none has that of a ray beside it, or 0."""
    column = pc.fill_null_backward(pc.fill_null_forward(beams.column(name)))
    values: NDArray[np.float64] = pc.fill_null(column, 0.0).to_numpy()
    return values


def _places(beams: pa.Table, gates: int) -> NDArray[np.float64]:
    """Return x, y and z of every gate, ray after ray, around the radar."""
    altitude = _of_rays(beams, "altitude")[:, None] / 1000
    azimuth, elevation, start, spacing = (
        beams.column(name).to_numpy().astype(np.float64)[:, None]
        for name in ("azimuth", "elevation", "start_range", "gate_spacing")
    )
    azimuth, elevation = np.radians(azimuth), np.radians(elevation)
    slant = (start + spacing * np.arange(gates)) / 1000
    height, ground = above_ground(slant, elevation)
    x, y = ground * np.sin(azimuth), ground * np.cos(azimuth)
    return np.stack([x.reshape(-1), y.reshape(-1), (height + altitude).reshape(-1)], axis=1)


def _gridded(
    places: NDArray[np.float64],
    values: Mapping[str, NDArray[np.float32]],
    axes: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]],
    options: GridOptions,
) -> dict[str, NDArray[np.float32]]:
    z, y, x = axes
    shape = (len(z), len(y), len(x))
    bounds = np.array([[a[0] - options.reach, a[-1] + options.reach] for a in (x, y, z)])
    near = ((places >= bounds[:, 0]) & (places <= bounds[:, 1])).all(axis=1)
    if not near.any():
        return {name: np.full(shape, np.nan, np.float32) for name in values}
    tree = KDTree(places[near])
    cells = np.stack([c.reshape(-1) for c in np.meshgrid(z, y, x, indexing="ij")][::-1], axis=1)
    count = 1 if options.method == "nearest" else min(_NEIGHBOURS, int(near.sum()))
    away, found = tree.query(cells, k=[*range(1, count + 1)], distance_upper_bound=options.reach)
    is_there = np.isfinite(away)
    found = np.where(is_there, found, 0)
    weights = np.where(is_there, 1 / np.maximum(away, 1e-3) ** 2, 0.0)
    fields = {}
    for name, flat in values.items():
        around = flat[near][found]
        weight = np.where(np.isfinite(around), weights, 0.0)
        total = weight.sum(axis=1)
        mean = (np.nan_to_num(around) * weight).sum(axis=1) / np.where(total > 0, total, 1.0)
        fields[name] = np.where(total > 0, mean, np.nan).astype(np.float32).reshape(shape)
    return fields


# --- as rows --------------------------------------------------------------------------------------

_NUMBERS: Final = pa.list_(pa.float64())

#: A grid as a row; every column behind these is a field, by z, y and x.
GRID_SCHEMA: Final = pa.schema(
    [
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("start_ns", pa.int64(), nullable=False),
        pa.field("end_ns", pa.int64(), nullable=False),
        pa.field("radar", pa.string()),
        pa.field("latitude", pa.float64(), nullable=False),
        pa.field("longitude", pa.float64(), nullable=False),
        *(pa.field(name, _NUMBERS, nullable=False) for name in ("x0", "y0", "z0")),
    ]
)


def is_grid_row(schema: pa.Schema) -> bool:
    """Tell whether rows are grids, and not beams."""
    return "x0" in schema.names


def grid_row(grid: Grid) -> pa.Table:
    """Return a grid as a table of one row."""
    fields = [
        pa.field(
            name,
            FIELD_TYPE,
            metadata={
                key: getattr(grid.words[name], key)
                for key in ("long_name", "standard_name", "units")
            },
        )
        for name in grid.fields
    ]
    values = [*grid[:6], *grid[6:9], *(flat.reshape(-1) for flat in grid.fields.values())]
    schema = pa.schema([*GRID_SCHEMA, *fields])
    arrays = [pa.array([value], each.type) for value, each in zip(values, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def grid_from_row(row: pa.Table) -> Grid:
    """Return the grid of a table of one row.

    :raises Malformed: a column is missing, or does not fit.
    """
    for each in GRID_SCHEMA:
        if each.name not in row.column_names:
            raise Malformed("a grid", f"column {each.name}", each.type, "no column")
        if not each.nullable and row.column(each.name).null_count:
            raise Malformed("a grid", f"column {each.name}", each.type, "null")
    known = {name: row.column(name)[0].as_py() for name in GRID_SCHEMA.names}
    x, y, z = (np.asarray(known.pop(name), np.float64) for name in ("x0", "y0", "z0"))
    shape = len(z), len(y), len(x)
    names = [name for name in row.column_names if name not in GRID_SCHEMA.names]
    for name in names:
        _check_cells(row.column(name), name, math.prod(shape))
    return Grid(
        **known,
        x=x,
        y=y,
        z=z,
        fields={name: values_of(row, name, math.prod(shape)).reshape(shape) for name in names},
        words={name: _words_of(row.schema.field(name)) for name in names},
    )


def _check_cells(column: pa.ChunkedArray, name: str, cells: int) -> None:
    if not pa.types.is_list(column.type):
        raise Malformed("a grid", f"column {name}", FIELD_TYPE, column.type)
    values = pc.list_value_length(column)[0].as_py()  # null: a field that it has not
    if values is not None and values != cells:
        raise Malformed("a grid", f"column {name}", f"{cells:,} values", f"{values:,}")


# --- as files -------------------------------------------------------------------------------------


def grid_name(grid: Grid) -> str:
    """Return the path of a grid's file below its directory, as LROSE would call it."""
    moment = dt.datetime.fromtimestamp(grid.time_ns // _SECOND, dt.UTC)
    return f"{moment:%Y%m%d}/ncf_{moment:%Y%m%d_%H%M%S}.nc"


def write_grid(path: Path, grid: Grid, comment: str = "") -> None:
    """Write the file of a grid. The same grid always gives the same bytes.

    :raises OSError: the operating system refuses.
    """
    with new_netcdf(path) as file:
        _fill(file, grid, comment)


def _fill(file: netCDF4.Dataset, grid: Grid, comment: str) -> None:
    radar = grid.radar or "a radar"
    attributes = {
        "Conventions": "CF-1.8",
        "title": f"Radar fields of {radar} on a Cartesian grid",
        "institution": radar,
        "source": f"weather radar {radar}",
        "history": "gridded by penstock",
        "references": "CF conventions 1.8",
        "comment": comment or "made of one volume",
    }
    file.setncatts(attributes)
    for name, size in (
        ("time", 1),
        ("bounds", 2),
        ("x0", len(grid.x)),
        ("y0", len(grid.y)),
        ("z0", len(grid.z)),
    ):
        file.createDimension(name, size)
    units = "seconds since 1970-01-01T00:00:00Z"
    time = file.createVariable("time", "f8", ("time",))
    time.setncatts({"standard_name": "time", "long_name": "middle of the volume", "units": units})
    time.setncatts({"calendar": "standard", "axis": "T", "bounds": "time_bounds"})
    time[:] = grid.time_ns / _SECOND
    bounds = file.createVariable("time_bounds", "f8", ("time", "bounds"))
    bounds[:] = [[grid.start_ns / _SECOND, grid.end_ns / _SECOND]]
    for name, places, axis in (("x0", grid.x, "X"), ("y0", grid.y, "Y")):
        variable = file.createVariable(name, "f8", (name,))
        word = f"projection_{axis.lower()}_coordinate"
        variable.setncatts({"standard_name": word, "long_name": word, "units": "km", "axis": axis})
        variable[:] = places
    height = file.createVariable("z0", "f8", ("z0",))
    height.setncatts({"standard_name": "altitude", "long_name": "height above mean sea level"})
    height.setncatts({"units": "km", "positive": "up", "axis": "Z"})
    height[:] = grid.z
    _degrees(file, grid)
    mapping = file.createVariable("grid_mapping_0", "i4")
    mapping.setncatts(
        {
            "grid_mapping_name": "azimuthal_equidistant",
            "longitude_of_projection_origin": grid.longitude,
            "latitude_of_projection_origin": grid.latitude,
            "false_easting": 0.0,
            "false_northing": 0.0,
            "earth_radius": EARTH * 1000,
        }
    )
    for name, values in grid.fields.items():
        _write_field(file, name, values, grid.words[name])


def _degrees(file: netCDF4.Dataset, grid: Grid) -> None:
    x, y = np.meshgrid(grid.x, grid.y)
    latitude, longitude = to_degrees(x, y, grid.latitude, grid.longitude)
    for name, values, standard, units in (
        ("lat0", latitude, "latitude", "degrees_north"),
        ("lon0", longitude, "longitude", "degrees_east"),
    ):
        variable = file.createVariable(name, "f8", ("y0", "x0"), compression="zlib")
        variable.setncatts({"standard_name": standard, "long_name": standard, "units": units})
        variable[:] = values


#: CF knows no other names of moments; a name that is not in its table would be an error.
_STANDARD: Final = frozenset(
    {"equivalent_reflectivity_factor", "radial_velocity_of_scatterers_away_from_instrument"}
)
#: What CF's units library calls them.
_UNITS: Final = {"dB": "0.1 lg(re 1)", "": "1"}


def _write_field(
    file: netCDF4.Dataset, name: str, values: NDArray[np.float32], words: Field
) -> None:
    variable = file.createVariable(
        free_name(file, name),
        "f4",
        ("time", "z0", "y0", "x0"),
        fill_value=_FILL,
        compression="zlib",
        complevel=4,
        chunksizes=(1, 1, *values.shape[1:]),
    )
    attributes = {
        "long_name": words.long_name or name,
        "units": _UNITS.get(words.units, words.units),
        "grid_mapping": "grid_mapping_0",
        "coordinates": "lat0 lon0",
    }
    if words.standard_name in _STANDARD:
        attributes["standard_name"] = words.standard_name
    variable.setncatts(attributes)
    variable[:] = np.where(np.isfinite(values), values, _FILL)[None]


def read_grid(path: str | Path) -> Grid:
    """Read a grid that `write_grid` or LROSE's Radx2Grid wrote.

    :raises Malformed: the file is no grid, or it is damaged.
    """
    try:
        with netCDF4.Dataset(str(path)) as file:
            return _read(file, str(path))
    except Malformed:
        raise
    except Exception as error:  # of whatever the library stumbles over in a damaged file
        raise Malformed(str(path), "content", "a grid", f"{error}") from error


def _read(file: netCDF4.Dataset, path: str) -> Grid:
    missing = [name for name in ("x0", "y0", "z0", "time") if name not in file.variables]
    if missing:
        raise Malformed(path, "variables", "those of a grid", f"no {missing[0]}")
    values = sum(int(variable.size) for variable in file.variables.values())
    if values > _MOST_CELLS * len(FIELDS):
        raise Malformed(path, "values", f"at most {_MOST_CELLS * len(FIELDS):,}", f"{values:,}")
    dimensions = ("time", "z0", "y0", "x0")
    names = [name for name, each in file.variables.items() if each.dimensions == dimensions]
    fields, words = {}, {}
    for name in names:
        each = file[name]
        fields[name] = np.ma.filled(each[0].astype(np.float32), np.float32(np.nan))
        units = str(getattr(each, "units", ""))
        words[name] = Field(
            str(getattr(each, "long_name", "")),
            str(getattr(each, "standard_name", "")),
            next((plain for plain, known in _UNITS.items() if plain and known == units), units),
        )
    mapping = _mapping_of(file)
    time = float(file["time"][0])
    bounds = file["time_bounds"][0] if "time_bounds" in file.variables else (time, time)
    x, y, z = (
        np.ma.filled(file[name][:].astype(np.float64), np.nan) for name in ("x0", "y0", "z0")
    )
    return Grid(
        time_ns=_nanos(time),
        start_ns=_nanos(float(bounds[0])),
        end_ns=_nanos(float(bounds[1])),
        radar=str(getattr(file, "institution", "")) or None,
        latitude=float(getattr(mapping, "latitude_of_projection_origin", 0.0)),
        longitude=float(getattr(mapping, "longitude_of_projection_origin", 0.0)),
        x=x,
        y=y,
        z=z,
        fields=fields,
        words=words,
    )


def _mapping_of(file: netCDF4.Dataset) -> Any:
    for variable in file.variables.values():
        if hasattr(variable, "grid_mapping_name"):
            return variable
    return None


def _nanos(seconds: float) -> int:
    whole = math.floor(seconds)
    return whole * _SECOND + round((seconds - whole) * _SECOND)
