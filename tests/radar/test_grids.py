"""Grids: a gate is where it should be, and files that CF's checker takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock import open_writer
from penstock.core.errors import InvalidOption, Malformed
from penstock.radar.beams import batch_from_beams, make_beams
from penstock.radar.geometry import to_degrees
from penstock.radar.grids import (
    GridOptions,
    grid_beams,
    grid_from_row,
    grid_name,
    grid_row,
    read_grid,
    write_grid,
)
from penstock.radar.volume_files import is_grid
from support.radar_volumes import volume

SMALL = GridOptions.model_validate({"x": "-9:9:1", "y": "-9:9:1", "z": "1.5:3:0.5"})


def beam(azimuth: float, values: list[float]) -> pa.Table:
    return make_beams(
        {
            "time_ns": [1_750_000_000_000_000_000],
            "azimuth": [azimuth],
            "elevation": [0.0],
            "start_range": [1000.0],
            "gate_spacing": [1000.0],
            "latitude": [40.0],
            "longitude": [-105.0],
            "altitude": [0.0],
            "DBZ": np.array([values], np.float32),
        }
    )


def test_the_nearest_gate_is_where_the_beam_looked() -> None:
    options = GridOptions.model_validate({"x": "0:4:1", "y": "-1:1:1", "z": "0", "radius": 0.4})
    grid = grid_beams(beam(90.0, [1, 2, 3, 4]), options)
    assert np.nan_to_num(grid.fields["DBZ"][0, 1], nan=-1).tolist() == [-1, 1, 2, 3, 4]
    assert np.isnan(grid.fields["DBZ"][0, (0, 2)]).all()


def test_a_weighted_cell_lies_between_its_gates_and_passes_over_missing_ones() -> None:
    options = GridOptions.model_validate(
        {"x": "1.5:2.5:1", "y": "0", "z": "0", "method": "weighted", "radius": 0.9}
    )
    found = grid_beams(beam(90.0, [10, 20, np.nan, 40]), options).fields["DBZ"][0, 0]
    assert found.tolist() == pytest.approx([15, 20], abs=0.01)


def test_places_are_those_of_the_azimuthal_equidistant_projection() -> None:
    pyproj = pytest.importorskip("pyproj")
    projection = pyproj.Proj(proj="aeqd", lat_0=40, lon_0=-105, R=6_371_000)
    x, y = np.array([0.0, 80.0, -150.0]), np.array([0.0, 30.0, -120.0])
    latitude, longitude = to_degrees(x, y, 40, -105)
    theirs = projection(x * 1000, y * 1000, inverse=True)
    np.testing.assert_allclose([longitude, latitude], theirs, atol=1e-9)


def test_a_grid_around_another_point_has_the_radar_where_it_is() -> None:
    latitude, longitude = (float(v) for v in to_degrees(np.array(10.0), np.array(0.0), 40, -105))
    options = GridOptions.model_validate(
        {"x": "-9:-5:1", "y": "0", "z": "0", "latitude": latitude, "longitude": longitude}
    )
    row = grid_beams(beam(90.0, [1, 2, 3, 4]), options).fields["DBZ"][0, 0]
    assert row.tolist()[:4] == [1, 2, 3, 4]


def test_the_rays_of_a_radar_that_moves_are_where_it_was() -> None:
    there = beam(90.0, [1, 2, 3, 4])
    latitude, longitude = (float(v) for v in to_degrees(np.array(5.0), np.array(2.0), 40, -105))
    for name, value in (("latitude", latitude), ("longitude", longitude), ("altitude", 2000.0)):
        at = there.schema.get_field_index(name)
        there = there.set_column(at, there.schema.field(at), pa.array([value]))
    options = GridOptions.model_validate({"x": "0:9:1", "y": "0:2:2", "z": "0:2:2", "radius": 0.4})
    both = pa.concat_tables([beam(90.0, [5, 6, 7, 8]), there])
    grid = grid_beams(both, options)
    assert (grid.latitude, grid.longitude) == (40.0, -105.0)
    values = np.nan_to_num(grid.fields["DBZ"], nan=0)
    assert values[0, 0].tolist() == [0, 5, 6, 7, 8, 0, 0, 0, 0, 0]
    assert values[1, 1].tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]


def test_a_grid_comes_back_from_its_file_and_from_its_row(tmp_path: Path) -> None:
    grid = grid_beams(volume(rays=36, gates=60), SMALL)
    write_grid(tmp_path / "g.nc", grid)
    assert is_grid(tmp_path / "g.nc")
    for again in (read_grid(tmp_path / "g.nc"), grid_from_row(grid_row(grid))):
        assert abs(again.time_ns - grid.time_ns) < 1000
        assert (again.latitude, again.longitude) == (grid.latitude, grid.longitude)
        for name in grid.fields:
            np.testing.assert_array_equal(again.fields[name], grid.fields[name])
            assert again.words[name].units == grid.words[name].units
    assert grid_name(grid) == "20250615/ncf_20250615_150644.nc"


@pytest.mark.filterwarnings("ignore")
def test_the_checker_of_cf_finds_no_error(tmp_path: Path) -> None:
    runner = pytest.importorskip("compliance_checker.runner")
    runner.CheckSuite.load_all_available_checkers()
    path, out = tmp_path / "g.nc", tmp_path / "report.txt"
    write_grid(path, grid_beams(volume(rays=36, gates=60), SMALL))
    passed, errors = runner.ComplianceChecker.run_checker(
        str(path), ["cf:1.8"], 0, "normal", output_filename=str(out), output_format="text"
    )
    assert passed, out.read_text()
    assert not errors


def test_volumes_become_grids_that_are_announced(tmp_path: Path) -> None:
    url = f"cfgrid:{tmp_path}?x=-5:5:1&y=-5:5:1&z=2:3:1&fields=DBZ,VEL&datamapper=false"
    with open_writer(url) as writer:
        writer.write_batch(batch_from_beams(volume(1, rays=12, gates=30)))
        writer.write_batch(batch_from_beams(volume(2, rays=12, gates=30)))
    files = sorted(tmp_path.glob("2*/*.nc"))
    assert [list(read_grid(path).fields) for path in files] == [["DBZ", "VEL"]] * 2
    assert (tmp_path / "_latest_data_info.xml").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("x=1:2", "start:stop:step"),
        ("x=5:1:1", "go up"),
        ("x=-9e9:9e9:1", "at most"),
        ("latitude=4", "given together"),
        ("colour=red", "no such option"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(tmp_path: Path, options: str, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        open_writer(f"cfgrid:{tmp_path}?{options}")


def test_beams_without_a_place_make_no_grid() -> None:
    lost = beam(0.0, [1.0]).drop_columns(["latitude"])
    from penstock.radar.beams import check_beams

    with pytest.raises(Malformed, match="latitude"):
        grid_beams(check_beams(lost))


def test_damaged_grids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "g.nc").write_bytes(b"\x89HDF\r\n\x1a\n nothing")
    with pytest.raises(Malformed, match="a grid"):
        read_grid(tmp_path / "g.nc")
