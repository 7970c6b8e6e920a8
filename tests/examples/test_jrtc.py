"""The example of routed streams, from a codelet in C to a collector's JSON, and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "jrtc" / "load_example.py"


def test_a_codelet_an_app_a_forwarder_and_a_collector_work_together() -> None:
    for library in ("fastapi", "grpc_health", "uvicorn"):
        pytest.importorskip(library)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "gets a command" in done.stderr
    assert "'intervalUs': 2000," in done.stdout
    assert "none is missing: True" in done.stdout
