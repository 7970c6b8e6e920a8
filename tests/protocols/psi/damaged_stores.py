"""Ways to damage a psi store, for tests."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["DAMAGES", "files"]


def files(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"*.{kind}_000000.psi")
    return found


def overwrite(path: Path, first: float, last: float, fill: Callable[[int], bytes] = bytes) -> None:
    """Overwrite a part of what was written, both ends given as shares of it."""
    data = path.read_bytes()
    size = len(data.rstrip(b"\0"))
    start, end = int(size * first) // 4 * 4, int(size * last) // 4 * 4
    path.write_bytes(data[:start] + fill(end - start) + data[end:])


#: Each takes the folder of a store.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "tail zeroed": lambda folder: overwrite(files(folder, "Data"), 0.45, 1.0),
    "middle zeroed": lambda folder: overwrite(files(folder, "Data"), 0.3, 0.6),
    "middle garbled": lambda folder: overwrite(
        files(folder, "Data"), 0.3, 0.6, random.Random(1).randbytes
    ),
    "data missing": lambda folder: files(folder, "Data").unlink(),
    "data cut": lambda folder: os.truncate(
        files(folder, "Data"), len(files(folder, "Data").read_bytes().rstrip(b"\0")) // 2
    ),
    "data empty": lambda folder: os.truncate(files(folder, "Data"), 0),
    "catalog zeroed": lambda folder: overwrite(files(folder, "Catalog"), 0.0, 1.0),
    "catalog empty": lambda folder: os.truncate(files(folder, "Catalog"), 0),
}
