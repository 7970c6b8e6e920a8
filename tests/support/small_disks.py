"""How does a test fill a disk?"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["small_disk_at"]


@contextlib.contextmanager
def small_disk_at(place: Path, size: str) -> Iterator[Path]:
    """Make a directory that is a file system of this size, or skip the test."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "penstock-test", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
