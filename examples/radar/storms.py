"""What weather does the synthetic radar look at?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["STORMY_DAY", "Cell", "Day", "Weather", "Wind"]


class Wind(NamedTuple):
    """Where the air goes, m/s."""

    east: float
    north: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A storm cell: rain that is strongest in the middle and falls off as a Gaussian."""

    #: m from the radar, at time 0.
    east: float
    north: float
    #: dBZ in the middle.
    peak: float
    #: m from the middle to where it has fallen by 2.2 dB (one standard deviation).
    radius: float
    #: m/s, the spectrum width: how turbulent it is.
    width: float
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


@dataclass(frozen=True, slots=True)
class Day:
    """Some cells that drift with one wind. What leaves on one side comes in again on the other."""

    wind: Wind
    cells: tuple[Cell, ...]
    #: m from the radar to where cells turn up again.
    extent: float = 60_000.0

    def look(
        self,
        azimuth: NDArray[Any],
        elevation: NDArray[Any],
        seconds: NDArray[Any],
        ranges: NDArray[Any],
    ) -> Weather:
        """Return the weather along beams (degrees, seconds since the start) at ranges (m)."""
        angle = np.radians(azimuth)[:, None]
        level = np.cos(np.radians(elevation))[:, None]
        to_east, to_north = np.sin(angle), np.cos(angle)
        ground = ranges * level
        z = np.zeros(ground.shape)
        velocity = np.zeros(ground.shape)
        width = np.zeros(ground.shape)
        for cell in self.cells:
            # From the middle of the cell to the gate.
            middle_east = self._drifted(cell.east, self.wind.east, seconds)[:, None]
            middle_north = self._drifted(cell.north, self.wind.north, seconds)[:, None]
            east = ground * to_east - middle_east
            north = ground * to_north - middle_north
            near = (east**2 + north**2) / (2 * cell.radius**2)
            of_cell = 10 ** (cell.peak / 10) * np.exp(-near)
            # A vortex whose speed is highest, and as given, at one radius from its middle.
            turn = cell.rotation / cell.radius * np.exp(0.5 - near)
            along = to_east * (self.wind.east - turn * north)
            along += to_north * (self.wind.north + turn * east)
            z += of_cell
            velocity += of_cell * along
            width += of_cell * cell.width
        total = np.maximum(z, np.finfo(z.dtype).tiny)
        return Weather(z, velocity / total * level, width / total)

    def _drifted(self, start: float, speed: float, seconds: NDArray[Any]) -> NDArray[Any]:
        return (start + speed * seconds + self.extent) % (2 * self.extent) - self.extent


#: A line of storms with rain behind it and a few showers before it. The strongest storm turns.
STORMY_DAY = Day(
    wind=Wind(east=12.0, north=7.0),
    cells=(
        Cell(east=-17_000, north=6_000, peak=26, radius=7_500, width=1.25),
        Cell(east=-12_000, north=-9_000, peak=24, radius=6_500, width=1.25),
        Cell(east=-13_500, north=25_500, peak=50, radius=1_900, width=2.5),
        Cell(east=-10_000, north=19_500, peak=54, radius=1_700, width=3.0),
        Cell(east=-8_500, north=13_500, peak=47, radius=2_100, width=2.5),
        Cell(east=-5_500, north=8_000, peak=56, radius=1_600, width=3.25),
        Cell(east=-4_500, north=-7_500, peak=52, radius=1_800, width=3.0),
        Cell(east=-6_500, north=-14_000, peak=48, radius=2_000, width=2.5),
        Cell(east=-7_500, north=-23_500, peak=62, radius=2_300, width=4.0, rotation=10.0),
        Cell(east=17_000, north=21_000, peak=43, radius=1_500, width=1.75),
        Cell(east=26_500, north=4_500, peak=49, radius=1_400, width=2.25),
        Cell(east=21_000, north=-16_000, peak=39, radius=2_600, width=1.5),
    ),
)
