"""The demo, shorter: every beam of the radar comes out of Spark once, and the picture is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

RADAR = Path(__file__).parents[2] / "examples" / "radar"


@pytest.mark.timeout(240)  # it starts Spark
def test_the_demo_accounts_for_every_beam_and_draws_the_storms(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, RADAR / "storm_watch.py", "--seconds", "2", "--folder", tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "COLUMNS": "120", "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    for counted in (
        "in: beams of the radar 2,000",
        "out: moments stream 2,000",
        "out: parquet rows 2,000",
        "lost 0",
        "twice 0",
    ):
        assert counted in said
    assert (tmp_path / "ppi.png").read_bytes().startswith(b"\x89PNG")


def test_a_radar_that_fails_while_spark_warms_up_ends_the_demo(tmp_path: Path) -> None:
    from storm_watch import Demo

    demo = Demo(tmp_path, rate=1000, seconds=1)
    demo._radar = demo._start_radar("--beams", "many")
    demo._radar.wait()
    with pytest.raises(penstock.PenstockError, match=r"(?s)the radar failed: .*many"):
        demo._is_through()
    demo._radar.communicate()
