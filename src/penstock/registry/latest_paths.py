"""Where is the file that an entry of latest_data_info tells of?

LROSE's order of places to look at (spec lrose 3.5).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.protocols.lrose.ldata_info import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.protocols.lrose.ldata_info import LatestInfo

__all__ = ["data_path", "expected_path", "relative_path"]


def data_path(info: LatestInfo, directory: str) -> str | None:
    """Return the path of the data file, or None if there is none at any of the places."""
    root = info.displaced_dir_path or directory
    for candidate in _candidates(info):
        path = os.path.join(root, candidate)  # noqa: PTH118 - a Path would change its spelling
        if _is_below(candidate) and os.path.isfile(path):  # noqa: PTH113
            return path
    return None


def expected_path(info: LatestInfo, directory: str) -> str:
    """Return where the file should be, whether it is there or not."""
    root = info.displaced_dir_path or directory
    candidates = (name for name in _candidates(info) if _is_below(name) and name != UNKNOWN)
    return os.path.join(root, next(candidates))  # noqa: PTH118


def relative_path(info: LatestInfo, directory: str) -> str:
    """Return the path below the directory; `unknown` where nobody said so and none is found."""
    if info.rel_data_path != UNKNOWN:
        return info.rel_data_path
    path = data_path(info, directory)
    root = info.displaced_dir_path or directory
    return UNKNOWN if path is None else os.path.relpath(path, root)


def _candidates(info: LatestInfo) -> Iterator[str]:
    at, ext = info.calendar, info.file_ext
    day, moment = f"{at.year:04d}{at:%m%d}", f"{at:%H%M%S}"
    yield info.rel_data_path
    yield f"{day}/{moment}.{ext}"
    yield info.user_info2
    yield f"{info.user_info1}.{ext}"
    yield info.user_info1
    yield f"{info.user_info2}.{ext}"
    if info.is_forecast:
        yield f"{day}/g_{moment}/f_{info.forecast_lead_secs:08d}.{ext}"


def _is_below(name: str) -> bool:
    """Tell whether a name stays below its directory: whoever writes entries may write anything."""
    return not name.startswith("/") and ".." not in name.split("/")
