"""Where is a gate: how far away over the ground, how high, and above which point of the earth?

Lengths are kilometres. The beam is bent as over an earth of 4/3 of its radius; places around a
point are those of the azimuthal equidistant projection.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["EARTH", "above_ground", "around", "to_degrees"]

EARTH: Final = 6371.0
_BENT: Final = 4 / 3 * EARTH


def above_ground(
    slant: NDArray[Any], elevation: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the height above the radar, and the distance over the ground.

    :param slant: distance along the beam
    :param elevation: radians
    """
    height = np.sqrt(slant**2 + _BENT**2 + 2 * slant * _BENT * np.sin(elevation)) - _BENT
    return height, _BENT * np.arcsin(slant * np.cos(elevation) / (_BENT + height))


def to_degrees(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    latitude: float | NDArray[np.float64],
    longitude: float | NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return latitude and longitude of places east (x) and north (y) of a point, or of one each."""
    away = np.hypot(x, y)
    angle, lat0 = away / EARTH, np.radians(latitude)
    along = np.where(away > 0, y / np.maximum(away, 1e-12), 0.0)
    lat = np.arcsin(
        np.clip(np.cos(angle) * np.sin(lat0) + along * np.sin(angle) * np.cos(lat0), -1, 1)
    )
    lon = np.arctan2(
        x * np.sin(angle),
        away * np.cos(lat0) * np.cos(angle) - y * np.sin(lat0) * np.sin(angle),
    )
    return np.degrees(lat), longitude + np.degrees(lon)


def around(
    lat: NDArray[np.float64], lon: NDArray[np.float64], latitude: float, longitude: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how far east and north of a point places in degrees are."""
    lat0, lat = math.radians(latitude), np.radians(lat)
    east = np.radians(lon - longitude)
    cosine = np.sin(lat0) * np.sin(lat) + np.cos(lat0) * np.cos(lat) * np.cos(east)
    scale = EARTH / np.sinc(np.arccos(np.clip(cosine, -1, 1)) / np.pi)
    x = scale * np.cos(lat) * np.sin(east)
    y = scale * (np.cos(lat0) * np.sin(lat) - np.sin(lat0) * np.cos(lat) * np.cos(east))
    return x, y
