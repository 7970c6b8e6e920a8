"""`penstock radar`: pictures of files, and volumes that stayed open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from penstock import open_writer
from penstock.cli.main import app
from penstock.core.errors import InvalidOption, NotFound
from penstock.radar.beams import batch_from_beams
from penstock.radar.cfradial import write_cfradial
from penstock.radar.grids import GridOptions, grid_beams, write_grid
from support.radar_volumes import volume

PNG = b"\x89PNG"


def plot(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["radar", "plot", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_volumes_and_grids_become_pictures(tmp_path: Path) -> None:
    out = str(tmp_path / "x.png")
    for mode, name in (("azimuth_surveillance", "ppi.nc"), ("rhi", "rhi.nc")):
        write_cfradial(tmp_path / name, volume(mode=mode, rays=12, gates=8))
    assert "DBZ, 2 panels: GOLDEN" in plot(str(tmp_path / "ppi.nc"), "-o", out)
    assert Path(out).read_bytes().startswith(PNG)
    said = plot(str(tmp_path / "rhi.nc"), "-o", out, "--field", "VEL", "--sweep", "1")
    assert "VEL, 1 panel" in said
    options = GridOptions.model_validate({"x": "-5:5:1", "y": "-5:5:1", "z": "2:3:1"})
    write_grid(tmp_path / "grid.nc", grid_beams(volume(rays=12, gates=30), options))
    assert "1 panel" in plot(str(tmp_path / "grid.nc"), "-o", out, "--level", "2", "--colorblind")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_empty_sky_above_an_rhi_is_not_painted(tmp_path: Path) -> None:
    beams = volume(mode="rhi", sweeps=1, rays=90, gates=100)
    low = np.where(np.arange(90)[:, None] < 9, 20.0, np.nan).astype(np.float32)
    values = pa.array(list(np.broadcast_to(low, (90, 100))), pa.list_(pa.float32()))
    at = beams.schema.get_field_index("DBZ")
    write_cfradial(tmp_path / "v.nc", beams.set_column(at, beams.schema.field(at), values))
    plot(str(tmp_path / "v.nc"), "-o", str(tmp_path / "x.svg"))
    drawn = (tmp_path / "x.svg").read_text()
    heights = drawn.partition("distance (km)")[2].partition("height above")[0]
    assert "<!-- 2.0 -->" in heights  # up to 8 degrees, 15 km away
    assert "<!-- 10 -->" not in heights


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_several_fields_are_painted_and_faint_gates_are_not(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    beams = volume(rays=36, gates=20)
    at = beams.schema.get_field_index("SNR")
    snr = np.where(np.arange(20) < 10, 20.0, 0.0).astype(np.float32)
    beams = beams.set_column(at, beams.schema.field(at), pa.array([snr] * beams.num_rows))
    write_cfradial(tmp_path / "v.nc", beams)
    fields = ("--field", "DBZ", "--field", "VEL", "--sweep", "0")
    whole, near = (str(tmp_path / name) for name in ("whole.png", "near.png"))
    said = plot(str(tmp_path / "v.nc"), "-o", whole, *fields)
    assert "DBZ VEL, 2 panels: GOLDEN" in said
    said = plot(str(tmp_path / "v.nc"), "-o", near, *fields, "--min-snr", "3")
    assert "SNR at least 3 dB" in said
    differs = np.abs(image.imread(whole) - image.imread(near)).max(axis=2) > 0.2
    # Three quarters of discs that fill half of the picture, or so.
    assert 0.2 < np.mean(differs) < 0.5
    write_cfradial(tmp_path / "v.nc", beams.drop_columns(["SNR"]))
    with pytest.raises(InvalidOption, match="no field SNR"):
        plot(str(tmp_path / "v.nc"), "-o", near, "--min-snr", "3")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_newest_file_of_a_directory_is_painted(tmp_path: Path) -> None:
    data, out = tmp_path / "data", str(tmp_path / "x.png")
    with open_writer(f"cfradial:{data}", datamapper=False) as writer:
        for number in (1, 2):
            writer.write_batch(batch_from_beams(volume(number, rays=6, gates=4)))
    for place in (f"cfradial:{data}", f"latest:{data}"):
        assert "15:06:41" in plot(place, "-o", out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_picture_says_what_of_the_file_is_not_on_it(tmp_path: Path) -> None:
    write_cfradial(tmp_path / "v.nc", volume(sweeps=12, rays=3, gates=2))
    said = plot(str(tmp_path / "v.nc"), "-o", str(tmp_path / "x.png"))
    assert "DBZ, 9 panels" in said
    assert "the first 9 of 12 sweeps" in said
    said = plot(str(tmp_path / "v.nc"), "-o", str(tmp_path / "x.png"), "--sweep", "11")
    assert "the first" not in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_field_without_values_says_so_and_one_without_a_unit_shows_none(tmp_path: Path) -> None:
    beams = volume(sweeps=1, rays=3, gates=2)
    at = beams.schema.get_field_index("RHOHV")
    nothing = pa.array([[float("nan")] * 2] * 3, pa.list_(pa.float32()))
    write_cfradial(tmp_path / "v.nc", beams.set_column(at, beams.schema.field(at), nothing))
    out = tmp_path / "x.svg"
    plot(str(tmp_path / "v.nc"), "-o", str(out), "--field", "RHOHV", "--field", "DBZ")
    drawn = out.read_text()  # matplotlib notes every text beside its outlines
    assert "<!-- no values -->" in drawn
    assert "<!-- RHOHV -->" in drawn
    assert "<!-- DBZ (dBZ) -->" in drawn


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    write_cfradial(tmp_path / "v.nc", volume(rays=3, gates=2))
    with pytest.raises(InvalidOption, match="is not in the file"):
        plot(str(tmp_path / "v.nc"), "--field", "XYZ")
    with pytest.raises(InvalidOption, match="sweep=9"):
        plot(str(tmp_path / "v.nc"), "--sweep", "9")
    with pytest.raises(NotFound, match="no file"):
        plot(f"cfradial:{tmp_path}/none")
    with pytest.raises(InvalidOption, match="xyz"):
        plot(str(tmp_path / "v.nc"), "-o", str(tmp_path / "x.xyz"))


def test_a_volume_that_stayed_open_is_finished(tmp_path: Path) -> None:
    url = f"cfradial:{tmp_path}?datamapper=false"
    with open_writer(url, close="keep") as writer:
        writer.write_batch(batch_from_beams(volume(1, rays=3, gates=2, ends=False)))
    assert list(tmp_path.glob("2*/*.nc")) == []
    result = CliRunner().invoke(app, ["radar", "finish", url], catch_exceptions=False)
    assert result.exit_code == 0
    assert len(list(tmp_path.glob("2*/*.nc"))) == 1
