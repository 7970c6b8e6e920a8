"""What weather does the synthetic radar look at?

A line of storms with rain behind it and showers before it, in three dimensions: wind that turns
with height, a layer where snow melts, hail in the strongest core, one storm that rotates, and hills
near the radar. None of it is physics; all of it looks to a radar as such weather does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.radar.geometry import above_ground

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["STORMY_DAY", "Cell", "Day", "Weather", "Wind"]

#: Pixels of the random fields that make edges ragged, and km that a field repeats after.
_PIXELS, _PERIOD = 512, 128.0
#: km above the radar: where snow melts, and how thick that layer is.
_MELTING, _THICKNESS = 3.1, 0.25


class Wind(NamedTuple):
    """Where the air goes, m/s, and by how much more for each km of height."""

    east: float
    north: float
    east_per_km: float = 0.0
    north_per_km: float = 0.0


@dataclass(frozen=True, slots=True)
class Cell:
    """Rain that is strongest in the middle and falls off as a Gaussian."""

    #: km from the radar, at time 0.
    east: float
    north: float
    #: dBZ in the middle.
    peak: float
    #: km from the middle to where it has fallen by 2.2 dB (one standard deviation).
    radius: float
    #: m/s, the spectrum width: how turbulent it is.
    width: float
    #: km, up to where it is as strong as at the ground.
    top: float = 6.0
    #: m/s around the middle, counter-clockwise, at one radius from it, where it is fastest.
    rotation: float = 0.0


class Weather(NamedTuple):
    """What there is to see at each gate: beams x gates."""

    #: Reflectivity, mm⁶/m³ (dBZ is ten times its logarithm).
    z: NDArray[Any]
    #: m/s along the beam, positive away from the radar.
    velocity: NDArray[Any]
    #: m/s.
    width: NDArray[Any]
    #: Differential reflectivity, dB: how flat the drops are.
    zdr: NDArray[Any]
    #: How alike both polarisations are.
    rhohv: NDArray[Any]
    #: Differential phase of the way there and back, degrees.
    phidp: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Day:
    """Some cells that drift with the wind at the ground."""

    wind: Wind
    cells: tuple[Cell, ...]
    #: dB by which a random field makes rain uneven, and km by which it displaces edges.
    unevenness: float = 4.0
    raggedness: float = 2.2
    #: dBZ of the highest hills; None: the country is flat.
    hills: float | None = 48.0

    def look(
        self,
        azimuth: NDArray[Any],
        elevation: NDArray[Any],
        seconds: NDArray[Any],
        ranges: NDArray[Any],
    ) -> Weather:
        """Return the weather along beams (degrees, seconds since the start) at ranges (km)."""
        tilt, turn = np.radians(elevation)[:, None], np.radians(azimuth)[:, None]
        height, ground = above_ground(ranges, tilt)
        east, north = ground * np.sin(turn), ground * np.cos(turn)
        # What moves with the wind is looked at where it was at time 0.
        x = east - self.wind.east * seconds[:, None] / 1000
        y = north - self.wind.north * seconds[:, None] / 1000
        z, wind_east, wind_north, width = self._air(x, y, height)
        z *= _melting_brightens(height)
        z *= 10 ** (self.unevenness / 10 * _field(2, x, y))
        along = wind_east * np.sin(turn) + wind_north * np.cos(turn)
        zdr, rhohv, kdp = _drops(10 * np.log10(np.maximum(z, 1e-9)), height)
        step = float(ranges[1] - ranges[0]) if len(ranges) > 1 else 0.0
        phidp = 2 * step * np.cumsum(kdp, axis=1)
        seen = Weather(z, along * np.cos(tilt), width, zdr, rhohv, phidp)
        return seen if self.hills is None else self._with_hills(seen, east, north, height)

    def _air(
        self, x: NDArray[Any], y: NDArray[Any], height: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return reflectivity, wind to the east and north, and turbulence."""
        ragged_x = x + self.raggedness * _field(0, x, y)
        ragged_y = y + self.raggedness * _field(1, x, y)
        z, width = np.zeros(x.shape), np.zeros(x.shape)
        wind_east = self.wind.east + self.wind.east_per_km * height
        wind_north = self.wind.north + self.wind.north_per_km * height
        for cell in self.cells:
            near = ((ragged_x - cell.east) ** 2 + (ragged_y - cell.north) ** 2) / cell.radius**2 / 2
            above = np.maximum(height - cell.top, 0) / 1.5
            of_cell = 10 ** (cell.peak / 10) * np.exp(-near - above**2)
            z += of_cell
            width += of_cell * cell.width
            if cell.rotation:  # a vortex, of the speed that is given at one radius
                dx, dy = x - cell.east, y - cell.north
                far = (dx**2 + dy**2) / cell.radius**2 / 2
                turn = cell.rotation / cell.radius * np.exp(0.5 - far - above**2)
                wind_east = wind_east - turn * dy
                wind_north = wind_north + turn * dx
        return z, wind_east, wind_north, width / np.maximum(z, 1e-9)

    def _with_hills(
        self, seen: Weather, east: NDArray[Any], north: NDArray[Any], height: NDArray[Any]
    ) -> Weather:
        """Put hills where the lower edge of the beam meets them: they stand still."""
        assert self.hills is not None
        # A radar sees what sticks out: a tenth of the country within some 15 km.
        dbz = self.hills + 16 * (_field(3, 4 * east, 4 * north) - 2.2)
        dbz -= (east**2 + north**2) / 12 + (height / 0.12) ** 2
        z = 10 ** (np.minimum(dbz, self.hills) / 10)
        is_hill = z > seen.z
        return Weather(
            np.maximum(z, seen.z),
            np.where(is_hill, 0.0, seen.velocity),
            np.where(is_hill, 0.5, seen.width),
            np.where(is_hill, 2 * _field(4, 8 * east, 8 * north), seen.zdr),
            np.where(is_hill, 0.75, seen.rhohv),
            seen.phidp,
        )


def _melting_brightens(height: NDArray[Any]) -> NDArray[Any]:
    """Return by how much rain is brighter where it melts, and snow fainter above."""
    brighter = 6.0 * np.exp(-(((height - _MELTING) / _THICKNESS) ** 2))
    fainter = 3.0 * np.maximum(height - _MELTING, 0)
    factor: NDArray[Any] = 10 ** ((brighter - np.minimum(fainter, 12.0)) / 10)
    return factor


def _drops(
    dbz: NDArray[Any], height: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return ZDR, RHOHV and KDP (degrees/km) of what falls, as they are at 10 cm.

    The more it rains, the flatter are the drops; hail tumbles, and is round again.
    """
    hail = 1 / (1 + np.exp(-(dbz - 57) / 1.5))
    melting = np.exp(-(((height - _MELTING) / _THICKNESS) ** 2)) * (dbz < 40)
    snow = np.where((height > _MELTING) & (dbz < 45), 1.0, 0.0)
    rain = np.interp(dbz, (5, 20, 30, 40, 50, 55), (0.05, 0.3, 0.8, 1.6, 2.7, 3.2))
    zdr = rain * (1 - hail) * (1 - 0.8 * snow) + 1.2 * melting
    rhohv = 0.993 - 0.06 * hail - 0.055 * melting - 0.006 * snow
    kdp = (10 ** (np.minimum(dbz, 53) / 10) / 5e4) ** (1 / 1.2) * (1 - snow) * (1 - 0.5 * hail)
    return zdr, rhohv, kdp


# --- what is random -------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _pixels(number: int) -> NDArray[np.float32]:
    """Return a random field of mean 0 and deviation 1 that is rough at every scale."""
    white = np.random.default_rng(1000 + number).standard_normal((_PIXELS, _PIXELS))
    waves = np.hypot(*np.meshgrid(*[np.fft.fftfreq(_PIXELS, 1 / _PIXELS)] * 2))
    slope = np.maximum(waves, 1) ** -1.5 * (waves >= 4)
    field = np.fft.ifft2(np.fft.fft2(white) * slope).real
    pixels: NDArray[np.float32] = ((field - field.mean()) / field.std()).astype(np.float32)
    return pixels


def _field(number: int, x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Return a random field at places (km), interpolated between its pixels."""
    pixels = _pixels(number)
    column, row = x * (_PIXELS / _PERIOD), y * (_PIXELS / _PERIOD)
    left, low = np.floor(column).astype(np.int64), np.floor(row).astype(np.int64)
    u, v = (column - left).astype(np.float32), (row - low).astype(np.float32)
    left, low = left % _PIXELS, low % _PIXELS
    right, high = (left + 1) % _PIXELS, (low + 1) % _PIXELS
    below = pixels[low, left] * (1 - u) + pixels[low, right] * u
    above = pixels[high, left] * (1 - u) + pixels[high, right] * u
    found: NDArray[Any] = below * (1 - v) + above * v
    return found


def _line(*cells: tuple[float, float, float, float]) -> tuple[Cell, ...]:
    return tuple(
        Cell(east, north, peak, radius, width=1.5 + max(0.0, peak - 35) / 12, top=peak / 8)
        for east, north, peak, radius in cells
    )


#: A squall line with rain behind it and showers before it. Its southern storm rotates.
STORMY_DAY: Final = Day(
    wind=Wind(east=11.0, north=5.0, east_per_km=0.8, north_per_km=-0.6),
    cells=(
        Cell(east=-26, north=12, peak=30, radius=11.0, width=1.2, top=4.5),
        Cell(east=-24, north=-10, peak=28, radius=10.0, width=1.2, top=4.5),
        Cell(east=-14, north=2, peak=24, radius=13.0, width=1.4, top=5.0),
        *_line(
            *((-8.0, 42.0, 47, 2.2), (-6.0, 35.5, 51, 2.4), (-3.5, 29.0, 49, 2.0)),
            *((-2.0, 23.5, 54, 2.2), (0.5, 17.5, 50, 2.1), (3.0, 12.0, 53, 2.0)),
            *((4.0, 5.5, 46, 2.2), (4.0, -7.0, 50, 2.0), (2.0, -13.5, 52, 2.3)),
            *((30.0, 27.0, 44, 2.0), (38.0, 9.0, 48, 1.8), (27.0, -30.0, 41, 2.6)),
        ),
        Cell(east=-1.5, north=-24.0, peak=62, radius=2.6, width=4.0, top=9.0, rotation=11.0),
        Cell(east=-5.0, north=-27.5, peak=45, radius=2.2, width=3.0, top=5.0),
    ),
)
