"""LROSE's own radar programs, where `PENSTOCK_LROSE_RADAR` says that they are."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FOLDER", "iwrf_read", "iwrf_write", "needs_lrose_radar", "program", "pulses_of"]

FOLDER = os.environ.get("PENSTOCK_LROSE_RADAR")

needs_lrose_radar = pytest.mark.skipif(
    FOLDER is None, reason="PENSTOCK_LROSE_RADAR names no folder"
)


def program(name: str) -> str:
    assert FOLDER is not None
    return str(Path(FOLDER) / "bin" / name)


def iwrf_read(*arguments: object) -> list[dict[str, Any]]:
    """Return what LROSE's own reader sees."""
    done = subprocess.run(
        [program("iwrf_read"), *map(str, arguments)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]


def iwrf_write(*arguments: object) -> dict[str, Any]:
    """Have LROSE's own classes write a stream; return their counts."""
    done = subprocess.run(
        [program("iwrf_write"), *map(str, arguments)], capture_output=True, timeout=60, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def pulses_of(seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in seen if each["kind"] == "pulse"]
