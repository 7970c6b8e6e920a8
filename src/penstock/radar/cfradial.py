"""How is a volume of beams written as CfRadial-1.4, and under which name?

The rules are those of LROSE's Radx, which is the strictest of the readers: NetCDF-4 in the classic
model, text as arrays of characters, fields as 32-bit floats, so that a value is what it was.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import itertools
import os
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.errors import Malformed, Unsupported
from penstock.radar.beams import FIELDS, Field, field_names, first_of, gates_of, values_of
from penstock.radar.pulse_pair import SPEED_OF_LIGHT

try:
    import netCDF4
except ModuleNotFoundError as error:
    raise Unsupported(
        f"files of volumes and grids need {error.name}", hint="pip install 'penstock[radar]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "FILL",
    "POSITION",
    "RADAR_VARIABLES",
    "RAY_VARIABLES",
    "SWEEP_WORDS",
    "file_name",
    "free_name",
    "new_netcdf",
    "text_of",
    "volume_order",
    "write_cfradial",
]

_SECOND: Final = 1_000_000_000
_MILLI: Final = 1_000_000
#: What stands for a number that is missing.
FILL: Final = -9999
#: Where a radar is: columns, and variables.
POSITION: Final = ("latitude", "longitude", "altitude")
_FILL_BYTE: Final = -128
#: The platform of a radar that does not move, and CfRadial's words for those that do.
_FIXED: Final = "fixed"
_CARRIERS: Final = frozenset(
    {
        *("vehicle", "ship", "aircraft", "aircraft_fore", "aircraft_aft", "aircraft_tail"),
        *("aircraft_belly", "aircraft_roof", "aircraft_nose"),
        *("satellite_orbit", "satellite_geostat"),
    }
)
_TEXT: Final = 32
#: Bytes on a disk that is as good as full.
_LITTLE: Final = 1 << 20
#: Bytes of a radar's name in that of a file, and letters of a field's.
_LONGEST: Final = 120
#: NetCDF's message for any error of HDF5 or the operating system.
_REFUSED_BY_SYSTEM: Final = "HDF error"
_NAME: Final = re.compile(r"[^A-Za-z0-9_]")

#: What a name says of how a volume was scanned.
_SCAN_TYPES: Final[Mapping[str, str]] = {
    "sector": "PPI",
    "coplane": "COP",
    "rhi": "RHI",
    "vertical_pointing": "VER",
    "idle": "IDL",
    "azimuth_surveillance": "SUR",
    "elevation_surveillance": "AIR",
    "sunscan": "SUN",
    "sunscan_rhi": "SRH",
    "calibration": "CAL",
    "pointing": "MAN",
    "manual_ppi": "MAN",
    "manual_rhi": "MAN",
}


class _Variable(NamedTuple):
    """A variable of one number a ray."""

    name: str
    column: str
    kind: str
    long_name: str
    units: str
    group: str = "instrument_parameters"
    standard_name: str | None = None


RAY_VARIABLES: Final = (
    _Variable("azimuth", "azimuth", "f4", "ray_azimuth_angle", "degrees", "", "ray_azimuth_angle"),
    _Variable(
        "elevation", "elevation", "f4", "ray_elevation_angle", "degrees", "", "ray_elevation_angle"
    ),
    _Variable("pulse_width", "pulse_width", "f4", "transmitter_pulse_width", "seconds"),
    _Variable("prt", "prt", "f4", "pulse_repetition_time", "seconds"),
    _Variable("nyquist_velocity", "nyquist", "f4", "unambiguous_doppler_velocity", "m/s"),
    _Variable("unambiguous_range", "unambiguous_range", "f4", "unambiguous_range", "meters"),
    _Variable("antenna_transition", "antenna_transition", "i1", "antenna_is_in_transition", ""),
    _Variable("n_samples", "samples", "i4", "number_of_samples_used_to_compute_moments", ""),
    _Variable("scan_rate", "scan_rate", "f4", "antenna_angle_scan_rate", "degrees/s"),
    _Variable(
        "measured_transmit_power_h",
        "transmit_power_h",
        "f4",
        "measured_radar_transmit_power_h_channel",
        "dBm",
        "radar_parameters",
    ),
    _Variable(
        "measured_transmit_power_v",
        "transmit_power_v",
        "f4",
        "measured_radar_transmit_power_v_channel",
        "dBm",
        "radar_parameters",
    ),
)

#: Numbers of the radar, which are the same for all rays.
RADAR_VARIABLES: Final = (
    _Variable("radar_antenna_gain_h", "gain_h", "f4", "nominal_radar_antenna_gain_h_channel", "dB"),
    _Variable("radar_antenna_gain_v", "gain_v", "f4", "nominal_radar_antenna_gain_v_channel", "dB"),
    _Variable(
        "radar_beam_width_h",
        "beam_width_h",
        "f4",
        "half_power_radar_beam_width_h_channel",
        "degrees",
    ),
    _Variable(
        "radar_beam_width_v",
        "beam_width_v",
        "f4",
        "half_power_radar_beam_width_v_channel",
        "degrees",
    ),
)

#: Words of a sweep: the variable, the column, and what is written if nobody said.
SWEEP_WORDS: Final = (
    ("sweep_mode", "sweep_mode", "azimuth_surveillance"),
    ("polarization_mode", "polarization_mode", "horizontal"),
    ("prt_mode", "prt_mode", "fixed"),
    ("follow_mode", "follow_mode", "none"),
)


class Sweep(NamedTuple):
    """A run of rays of one sweep."""

    number: int
    first: int
    last: int


def volume_order(beams: pa.Table) -> tuple[pa.Table, list[Sweep]]:
    """Return the rays of a volume by sweep and time, and the range of each sweep.

    :raises Malformed: there are no rays, or the gates of rays differ.
    """
    if not beams.num_rows:
        raise Malformed("a volume", "rays", "at least one", 0)
    numbers = pc.fill_null(beams.column("sweep_number"), 0).to_numpy()
    times = beams.column("time_ns").to_numpy()
    began = {number: times[numbers == number].min() for number in np.unique(numbers)}
    order = np.lexsort((times, numbers, np.array([began[number] for number in numbers])))
    beams, numbers = beams.take(pa.array(order)), numbers[order]
    for name in ("start_range", "gate_spacing", "radar"):
        found = beams.column(name).unique().to_pylist()
        if len(found) > 1:
            raise Malformed("a volume", name, "the same of all rays", found[:5])
    borders = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
    sweeps = [
        Sweep(int(numbers[first]), first, end - 1) for first, end in itertools.pairwise(borders)
    ]
    return beams, sweeps


def file_name(beams: pa.Table) -> str:
    """Return the path of a volume's file below its directory, as LROSE would call it."""
    times = beams.column("time_ns").to_numpy()
    start, end = (_to_millis(int(time)) for time in (times.min(), times.max()))
    words = [f"cfrad.{_stamp(start)}_to_{_stamp(end)}"]
    radar = re.sub(r"[\s/\x00-\x1f]", "_", first_of(beams, "radar") or "")
    # What no file system takes in a name.
    radar = radar.encode(errors="replace")[:_LONGEST].decode(errors="ignore")
    if radar:
        words.append(radar)
    words.append(_SCAN_TYPES.get(first_of(beams, "sweep_mode") or "azimuth_surveillance", "MAN"))
    return f"{start:%Y%m%d}/{'_'.join(words)}.nc"


def _to_millis(time_ns: int) -> dt.datetime:
    millis = (time_ns + _MILLI // 2) // _MILLI
    return dt.datetime.fromtimestamp(millis // 1000, dt.UTC) + dt.timedelta(
        milliseconds=millis % 1000
    )


def _stamp(time: dt.datetime) -> str:
    return f"{time:%Y%m%d_%H%M%S}.{time.microsecond // 1000:03d}"


def write_cfradial(path: Path, beams: pa.Table, comment: str = "") -> None:
    """Write the file of one volume. The same beams always give the same bytes.

    :raises Malformed: there is nothing to write, or the rays do not form one volume.
    :raises OSError: the operating system refuses.
    """
    beams, sweeps = volume_order(beams)
    # Of rays without a gate there is one, without a value: NetCDF has no range of no length.
    gates = max(1, int(gates_of(beams).max()))
    with new_netcdf(path) as file:
        _File(file, beams, sweeps, gates, comment).write()


@contextlib.contextmanager
def new_netcdf(path: Path) -> Iterator[netCDF4.Dataset]:
    """Yield a new NetCDF file; an existing one is replaced.

    :raises OSError: the operating system refuses. NetCDF does not say what: a full disk is told
        from the space that is left.
    :raises Malformed: NetCDF refuses what is to be written.
    """
    path.unlink(missing_ok=True)  # it may be a link to elsewhere
    try:
        with netCDF4.Dataset(str(path), "w", format="NETCDF4_CLASSIC") as file:
            file.set_auto_mask(False)
            yield file
    except (RuntimeError, OSError) as error:
        path.unlink(missing_ok=True)
        disk = os.statvfs(path.parent)
        if disk.f_bavail * disk.f_frsize < _LITTLE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        if isinstance(error, OSError):
            raise OSError(error.errno or errno.EIO, str(error), str(path)) from error
        if _REFUSED_BY_SYSTEM in str(error):
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise Malformed(str(path), "content", "what NetCDF can hold", str(error)) from error


def free_name(file: netCDF4.Dataset, field: str) -> str:
    """Return a name for a variable that the file has not, such as its coordinates'."""
    plain = _NAME.sub("_", field)[:_LONGEST]
    taken = file.variables.keys() | file.dimensions.keys()
    if not plain[:1].isalpha() or plain in taken:
        plain = f"nc_{plain}"
    names = itertools.chain([plain], (f"{plain}_{n}" for n in itertools.count(2)))
    return next(name for name in names if name not in taken)


class _File:
    """Writes the variables of one file."""

    def __init__(
        self,
        file: netCDF4.Dataset,
        beams: pa.Table,
        sweeps: list[Sweep],
        gates: int,
        comment: str,
    ) -> None:
        self._file = file
        self._beams = beams
        self._sweeps = sweeps
        self._gates = gates
        self._comment = comment
        self._times = beams.column("time_ns").to_numpy()
        platform = self._first("platform_type")
        self._platform_type = platform if platform in _CARRIERS else _FIXED
        #: Then each ray has a position. Radx tells it from the dimension of the latitude.
        self._moves = self._platform_type != _FIXED or any(
            pc.count_distinct(beams.column(name)).as_py() > 1 for name in POSITION
        )

    def write(self) -> None:
        self._globals()
        for name, size in (
            ("time", self._beams.num_rows),
            ("range", self._gates),
            ("sweep", len(self._sweeps)),
            ("string_length_8", 8),
            ("string_length_32", _TEXT),
        ):
            self._file.createDimension(name, size)
        self._coordinates()
        self._platform()
        self._per_sweep()
        self._per_ray()
        self._calibration()
        for name in field_names(self._beams.schema):
            self._field(name)

    def _globals(self) -> None:
        start, end = int(self._times.min()), int(self._times.max())
        groups = "CF-Radial instrument_parameters radar_parameters"
        calibrated = self._first("calibration")
        attributes = {
            "Conventions": "CF-1.7",
            "Sub_conventions": f"{groups} radar_calibration" if calibrated else groups,
            "version": "CF-Radial-1.4",
            "title": "",
            "institution": "",
            "references": "",
            "source": "",
            "history": "",
            "comment": self._comment,
            "original_format": "CFRADIAL",
            "driver": "penstock",
            "created": "",
            "start_datetime": _iso(start),
            "time_coverage_start": _iso(start),
            "start_time": _spoken(start),
            "end_datetime": _iso(end),
            "time_coverage_end": _iso(end),
            "end_time": _spoken(end),
            "instrument_name": self._first("radar") or "unknown",
            "site_name": self._first("site") or "",
            "scan_name": self._first("scan_name") or "",
            "scan_id": np.int32(0),
            "platform_is_mobile": "true" if self._moves else "false",
            "n_gates_vary": "false",
            "ray_times_increase": "true" if (np.diff(self._times) >= 0).all() else "false",
        }
        self._file.setncatts(attributes)

    def _coordinates(self) -> None:
        base = int(self._times.min()) // _SECOND
        time = self._variable("time", "f8", ("time",))
        time.setncatts(
            {
                "standard_name": "time",
                "long_name": "time in seconds since volume start",
                "calendar": "gregorian",
                "units": f"seconds since {_iso(base * _SECOND)}",
            }
        )
        # Radx cuts off what others round: a tenth of a nanosecond more is right for both.
        time[:] = (self._times - base * _SECOND + 0.1) / _SECOND
        start, spacing = (self._first(name) for name in ("start_range", "gate_spacing"))
        span = self._variable("range", "f4", ("range",))
        span.setncatts(
            {
                "standard_name": "projection_range_coordinate",
                "long_name": "range_to_measurement_volume",
                "units": "meters",
                "axis": "radial_range_coordinate",
                "spacing_is_constant": "true",
                "meters_to_center_of_first_gate": np.float32(start),
                "meters_between_gates": np.float32(spacing),
            }
        )
        span[:] = start + spacing * np.arange(self._gates)

    def _platform(self) -> None:
        for name, units, standard in (
            ("latitude", "degrees_north", "latitude"),
            ("longitude", "degrees_east", "longitude"),
            ("altitude", "meters", "altitude"),
        ):
            of_each = ("time",) if self._moves else ()
            variable = self._variable(name, "f8", of_each, fill=FILL)
            variable.setncatts({"long_name": name, "units": units, "standard_name": standard})
            if self._moves:
                column = self._beams.column(name)
                variable[:] = pc.fill_null(column, float(FILL)).to_numpy()
            else:
                variable[...] = _known(self._first(name))
        self._file["altitude"].positive = "up"
        number = self._variable("volume_number", "i4", ())
        number.long_name = "data_volume_index_number"
        number[...] = _known(self._first("volume_number"))
        if self._platform_type != _FIXED or not self._moves:  # else nobody knows what carries it
            self._text("platform_type", self._platform_type)
        for name, text in (
            ("primary_axis", "axis_z"),
            ("instrument_type", "radar"),
            ("time_coverage_start", _iso(int(self._times.min()))),
            ("time_coverage_end", _iso(int(self._times.max()))),
        ):
            self._text(name, text)
        mapping = self._variable("grid_mapping", "i4", ())
        mapping.setncatts(
            {
                "grid_mapping_name": "radar_lidar_radial_scan",
                "longitude_of_projection_origin": _known(self._first("longitude")),
                "latitude_of_projection_origin": _known(self._first("latitude")),
                "altitude_of_projection_origin": _known(self._first("altitude")),
                "false_easting": 0.0,
                "false_northing": 0.0,
            }
        )
        wavelength = self._first("wavelength")
        if wavelength:
            self._file.createDimension("frequency", 1)
            frequency = self._variable("frequency", "f4", ("frequency",))
            frequency.setncatts({"long_name": "transmission_frequency", "units": "s-1"})
            frequency.meta_group = "instrument_parameters"
            frequency[:] = SPEED_OF_LIGHT / wavelength
        for each in RADAR_VARIABLES:
            variable = self._variable(each.name, "f4", (), fill=FILL)
            variable.setncatts({"long_name": each.long_name, "units": each.units})
            variable.meta_group = "radar_parameters"
            variable[...] = _known(self._first(each.column))

    def _per_sweep(self) -> None:
        numbers = {
            "sweep_number": [sweep.number for sweep in self._sweeps],
            "sweep_start_ray_index": [sweep.first for sweep in self._sweeps],
            "sweep_end_ray_index": [sweep.last for sweep in self._sweeps],
        }
        for name, values in numbers.items():
            # Without a fill value: xarray would make floats of them.
            variable = self._variable(name, "i4", ("sweep",))
            variable.long_name = name
            variable[:] = values
        parts = [self._beams.slice(s.first, s.last - s.first + 1) for s in self._sweeps]
        angle = self._variable("fixed_angle", "f4", ("sweep",), fill=FILL)
        angle.setncatts({"long_name": "ray_target_fixed_angle", "units": "degrees"})
        angle[:] = [_known(first_of(part, "fixed_angle")) for part in parts]
        for name, column, otherwise in SWEEP_WORDS:
            words = [first_of(part, column) or otherwise for part in parts]
            variable = self._variable(name, "S1", ("sweep", "string_length_32"))
            variable.long_name = name
            variable[:] = np.stack([text_of(word, _TEXT) for word in words])
        # What beams do not say is there and empty, as Radx has it.
        for name, long_name, units in (
            ("target_scan_rate", "target_scan_rate_for_sweep", "degrees/s"),
            ("ray_angle_res", "angular_resolution_between_rays", "degrees"),
        ):
            unknown = self._variable(name, "f4", ("sweep",), fill=FILL)
            unknown.setncatts({"long_name": long_name, "units": units})
            unknown.meta_group = "instrument_parameters"
            unknown[:] = FILL
        indexed = self._variable("rays_are_indexed", "S1", ("sweep", "string_length_8"))
        indexed.meta_group = "instrument_parameters"
        indexed[:] = np.stack([text_of("false", 8) for _ in parts])

    def _per_ray(self) -> None:
        for each in RAY_VARIABLES:
            fill = _FILL_BYTE if each.kind == "i1" else FILL
            variable = self._variable(each.name, each.kind, ("time",), fill=fill)
            variable.setncatts({"long_name": each.long_name, "units": each.units})
            if each.standard_name:
                variable.standard_name = each.standard_name
            if each.group:
                variable.meta_group = each.group
            column = self._beams.column(each.column)
            if each.kind == "i1":
                column = column.cast(pa.int8())
            variable[:] = pc.fill_null(column, pa.scalar(fill, column.type)).to_numpy()
        ratio = self._variable("prt_ratio", "f4", ("time",), fill=FILL)
        ratio.setncatts({"long_name": "pulse_repetition_frequency_ratio", "units": "1"})
        ratio.meta_group = "instrument_parameters"
        is_fixed = pc.equal(pc.fill_null(self._beams.column("prt_mode"), "fixed"), "fixed")
        ratio[:] = np.where(is_fixed.to_numpy(), 1.0, float(FILL))

    def _calibration(self) -> None:
        known = dict(self._first("calibration") or ())
        if not known:
            return
        self._file.createDimension("r_calib", 1)
        index = self._variable("r_calib_index", "i4", ("time",), fill=FILL)
        index.setncatts(
            {"long_name": "calibration_data_array_index_per_ray", "meta_group": "radar_calibration"}
        )
        index[:] = 0
        stamp = self._variable("r_calib_time", "S1", ("r_calib", "string_length_32"))
        stamp.setncatts({"long_name": "radar_calibration_time_utc"})
        stamp.meta_group = "radar_calibration"
        stamp[:] = text_of(_iso(int(self._times.min())), _TEXT)[None]
        # Radx reads no calibration without these.
        needed = dict.fromkeys(("noise_hc", "receiver_gain_hc", "base_dbz_1km_hc"))
        for name, value in {**needed, **known}.items():
            variable = self._variable(
                free_name(self._file, f"r_calib_{name}"), "f4", ("r_calib",), fill=FILL
            )
            variable.setncatts({"long_name": name, "meta_group": "radar_calibration"})
            variable[:] = _known(value)

    def _field(self, name: str) -> None:
        stored = self._beams.schema.field(name).metadata or {}
        told = {key.decode(): text.decode(errors="replace") for key, text in stored.items()}
        known = FIELDS.get(name, Field(name, "", ""))
        variable = self._file.createVariable(
            free_name(self._file, name),
            "f4",
            ("time", "range"),
            fill_value=np.float32(FILL),
            compression="zlib",
            complevel=4,
            chunksizes=(min(self._beams.num_rows, 256), self._gates),
        )
        attributes = {
            "long_name": told.get("long_name", known.long_name),
            "standard_name": told.get("standard_name", known.standard_name),
            "units": told.get("units", known.units),
            "sampling_ratio": np.float32(1),
            "grid_mapping": "grid_mapping",
            "coordinates": "elevation azimuth range",
        }
        nyquist = self._first("nyquist")
        if known.folds and nyquist is not None:
            attributes["field_folds"] = "true"
            attributes["fold_limit_lower"] = np.float32(-nyquist)
            attributes["fold_limit_upper"] = np.float32(nyquist)
        variable.setncatts({key: value for key, value in attributes.items() if value != ""})
        values = values_of(self._beams, name, self._gates)
        variable[:] = np.where(np.isfinite(values), values, np.float32(FILL))

    # --- parts -------------------------------------------------------------------------------

    def _first(self, column: str) -> Any:
        return first_of(self._beams, column)

    def _variable(
        self, name: str, kind: str, dimensions: tuple[str, ...], fill: int | None = None
    ) -> netCDF4.Variable[Any]:
        return self._file.createVariable(name, kind, dimensions, fill_value=fill)

    def _text(self, name: str, text: str) -> None:
        variable = self._variable(name, "S1", ("string_length_32",))
        variable.long_name = name
        variable[:] = text_of(text, _TEXT)


def text_of(text: str, size: int) -> NDArray[np.bytes_]:
    """Return a text as `size` characters, truncated or padded with NUL."""
    return np.frombuffer(text.encode()[:size].ljust(size, b"\0"), "S1")


def _known(value: float | None) -> float:
    return FILL if value is None else value


def _iso(time_ns: int) -> str:
    return f"{dt.datetime.fromtimestamp(time_ns // _SECOND, dt.UTC):%Y-%m-%dT%H:%M:%SZ}"


def _spoken(time_ns: int) -> str:
    time = dt.datetime.fromtimestamp(time_ns // _SECOND, dt.UTC)
    return f"{time:%Y-%m-%d %H:%M:%S}.{time_ns // _MILLI % 1000:03d}"
