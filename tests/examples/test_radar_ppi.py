"""The picture of a sweep."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from moments import moments_of_batch
from numpy.typing import NDArray
from ppi import draw_ppi, newest_sweep
from ppi import main as draw
from synthetic_radar import RadarSettings, SyntheticRadar, main

import penstock
from support.radar_scenes import SMALL, batch_of, even_rain, payloads


def pixels(path: Path) -> NDArray[np.float32]:
    image = pytest.importorskip("matplotlib.image")
    return np.asarray(image.imread(path), np.float32)[..., :3]


def test_the_picture_shows_the_newest_whole_sweep(
    queue_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    url = f"fmq:{queue_path}?size=64M"
    assert main([url, "--rate", "0", "--beams", "1200"]) == 0  # the second volume is not whole
    capsys.readouterr()
    path = tmp_path / "demo" / "ppi.png"
    assert draw([f"fmq:{queue_path}", "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"drew {path}\n"
    picture = pixels(path)
    height, breadth, _ = picture.shape
    assert breadth > 1500
    halves = picture[:, : breadth // 2], picture[:, breadth // 2 :]
    for half in halves:  # it is colourful, and not only background
        colour = half.max(axis=2) - half.min(axis=2)
        assert np.mean(colour > 0.3) > 0.1
    # Red is strong rain on the left, and wind away from the radar (north-east) on the right.
    right = halves[1][:, : int(breadth * 0.42)]
    is_red = (right[..., 0] > 0.5) & (right[..., 1] < 0.2)
    rows, places = np.nonzero(is_red)
    assert np.mean(places) > right.shape[1] / 2
    assert np.mean(rows) < height * 0.55


def test_the_newest_sweep_with_all_its_beams_is_chosen() -> None:
    radar = SyntheticRadar(SMALL)
    table = moments_of_batch(batch_of(payloads(radar, 210)))  # two volumes and a half
    assert newest_sweep(table, 1).elevation == 1.5
    chosen = newest_sweep(table)
    assert len(chosen.azimuth) == 40
    assert chosen.time_ns == table["time_ns"][199].as_py()
    with pytest.raises(penstock.NotFound, match="no beam of sweep 5"):
        newest_sweep(table, 5)


def test_a_missing_beam_is_a_gap_in_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    beams = payloads(SyntheticRadar(LOUD, even_rain(0.0, 1.0)), 40)
    draw_ppi(newest_sweep(moments_of_batch(batch_of(beams))), tmp_path / "whole.png")
    draw_ppi(newest_sweep(moments_of_batch(batch_of(beams[:9] + beams[11:]))), tmp_path / "gap.png")
    whole, gap = pixels(tmp_path / "whole.png"), pixels(tmp_path / "gap.png")
    differs = np.abs(whole - gap).max(axis=2) > 0.2
    # Two of forty beams, of discs that fill about half of the picture.
    assert 0.005 < np.mean(differs) < 0.05


LOUD = RadarSettings(pulses=8, gates=40, elevations=(0.5,), beams_per_sweep=40)


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = newest_sweep(moments_of_batch(batch_of(payloads(SyntheticRadar(SMALL), 40))))
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    with pytest.raises(penstock.Unsupported, match="matplotlib") as refusal:
        draw_ppi(sweep, tmp_path / "ppi.png")
    assert "pip install" in str(refusal.value.hint)
