"""The demo, shorter: every pulse of the radar is in a volume once, and the picture is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.radar.grids import read_grid
from penstock.radar.volume_files import read_volume

RADAR = Path(__file__).parents[2] / "examples" / "radar"


@pytest.mark.timeout(300)  # it starts Spark
def test_the_demo_accounts_for_every_pulse_and_paints_the_storms(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, RADAR / "storm_watch.py", "--volumes", "1", "--folder", tmp_path],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "COLUMNS": "120", "SPARK_LOCAL_IP": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    for counted in (
        "in: pulses of the radar 46,080",
        "out: pulses in the rays of the volumes 46,080",
        "lost 0",
        "rays that are there twice 0",
        "volumes announced 1",
        "grids announced 1",
    ):
        assert counted in said
    assert (tmp_path / "ppi.png").read_bytes().startswith(b"\x89PNG")
    (volume,) = tmp_path.glob("run/volumes/*/cfrad.*_SYNTH_SUR.nc")
    assert read_volume(volume).num_rows == 1440
    (grid,) = tmp_path.glob("run/grids/*/ncf_*.nc")
    assert list(read_grid(grid).fields) == ["DBZ", "VEL", "ZDR", "RHOHV"]
    with penstock.open_reader(f"iwrf+fmq:{tmp_path}/run/ts") as reader:
        assert reader.read(timeout=0) is not None


def test_a_radar_that_fails_ends_the_demo(tmp_path: Path) -> None:
    from storm_watch import Demo

    demo = Demo(tmp_path, volumes=1, speed=-1)
    demo.prepare()
    demo._radar = demo._start_radar()
    demo._radar.wait()
    with pytest.raises(penstock.PenstockError, match=r"(?s)the radar failed: .*negative"):
        demo._is_through()
    demo._radar.communicate()
