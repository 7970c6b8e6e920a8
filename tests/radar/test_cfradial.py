"""CfRadial: what goes in comes out, by every reader there is."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pyarrow as pa
import pytest

from penstock.core.errors import Malformed, NotFound
from penstock.radar.beams import FIELDS, make_beams, values_of
from penstock.radar.cfradial import file_name, write_cfradial
from penstock.radar.volume_files import is_grid, read_volume
from support.lrose_radar import needs_lrose_radar, program
from support.radar_volumes import volume

MODES = ("azimuth_surveillance", "rhi", "sector")


def stored(folder: Path, beams: pa.Table) -> Path:
    path = folder / file_name(beams)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_cfradial(path, beams)
    return path


def same(one: pa.Table, other: pa.Table) -> None:
    assert one.column_names == other.column_names
    for name in one.column_names:
        # As text, since NaN is not equal to itself.
        assert str(one.column(name).to_pylist()) == str(other.column(name).to_pylist()), name


@pytest.mark.parametrize("mode", MODES)
def test_a_volume_is_read_as_it_was_written(tmp_path: Path, mode: str) -> None:
    beams = volume(mode=mode, rays=9, gates=7)
    same(read_volume(stored(tmp_path, beams)), beams)


def moving(
    beams: pa.Table, platform: str | None = None, **positions: list[float | None]
) -> pa.Table:
    for name, values in {**positions, "platform_type": [platform] * len(beams)}.items():
        field = beams.schema.field(name)
        beams = beams.set_column(
            beams.schema.get_field_index(name), field, pa.array(values, field.type)
        )
    return beams


def test_a_radar_that_moves_has_a_position_for_each_ray(tmp_path: Path) -> None:
    beams = moving(
        volume(rays=3, gates=2),
        latitude=[50.0, 50.1, None, 50.3, 50.4, 50.5],
        altitude=[3000.0, 3001.0, 3002.0, 3003.0, 3004.0, None],
    )
    path = stored(tmp_path, beams)
    same(read_volume(path), beams)
    with netCDF4.Dataset(path) as file:
        assert file.platform_is_mobile == "true"
        for name in ("latitude", "longitude", "altitude"):
            assert file[name].dimensions == ("time",), name
        assert file["latitude"][:].tolist() == [50.0, 50.1, None, 50.3, 50.4, 50.5]
        assert "platform_type" not in file.variables  # nobody knows which
    with netCDF4.Dataset(stored(tmp_path / "fixed", volume(rays=3, gates=2))) as file:
        assert file.platform_is_mobile == "false"
        assert file["latitude"].dimensions == ()


@pytest.mark.parametrize("platform", ["vehicle", "ship", "aircraft"])
def test_what_carries_a_radar_is_written_also_while_it_stands(
    tmp_path: Path, platform: str
) -> None:
    beams = moving(volume(rays=3, gates=2), platform)
    path = stored(tmp_path, beams)
    same(read_volume(path), beams)
    with netCDF4.Dataset(path) as file:
        assert file.platform_is_mobile == "true"
        assert file["platform_type"][:].tobytes().rstrip(b"\0").decode() == platform
        assert file["latitude"].dimensions == ("time",)


@needs_lrose_radar
def test_radx_reads_the_positions_of_a_radar_that_moves(tmp_path: Path) -> None:
    latitudes = [50 + i / 100 for i in range(6)]
    altitudes = [3000.0 + i for i in range(6)]
    beams = moving(
        volume(rays=3, gates=2), "ship", latitude=list(latitudes), altitude=list(altitudes)
    )
    path, back = stored(tmp_path / "ours", beams), tmp_path / "back"
    said = subprocess.run(
        [program("RadxPrint"), "-rays", "-f", str(path)], capture_output=True, check=True, text=True
    ).stdout
    found = [line.partition(":")[2] for line in said.splitlines() if "  latitude:" in line]
    assert list(map(float, found)) == latitudes
    answer = subprocess.run(
        [program("radx_print"), str(path), "--write", str(back)], capture_output=True, check=True
    )
    assert json.loads(answer.stdout)["platform"]["platform_type"] == "ship"
    theirs = read_volume(json.loads(answer.stdout)["written"])
    assert set(theirs.column("platform_type").to_pylist()) == {"ship"}
    assert theirs.column("latitude").to_pylist() == pytest.approx(latitudes)
    assert theirs.column("altitude").to_pylist() == pytest.approx(altitudes)


def test_the_same_beams_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = (stored(tmp_path / name, volume(rays=4, gates=3)) for name in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_a_file_is_called_as_lrose_calls_it() -> None:
    expected = "20250615/cfrad.20250615_150640.500_to_20250615_150647.600_GOLDEN_SUR.nc"
    assert file_name(volume()) == expected
    assert file_name(volume(mode="rhi")).endswith("_RHI.nc")
    assert file_name(volume(mode="sector", radar="X band/2")).endswith("_X_band_2_PPI.nc")


def test_a_volume_without_what_may_be_unknown_is_written_and_read(tmp_path: Path) -> None:
    beams = make_beams(
        {
            "time_ns": [1_700_000_000_000_000_000],
            "azimuth": [1.0],
            "elevation": [2.0],
            "start_range": [0.0],
            "gate_spacing": [30.0],
            "REF": np.ones((1, 2), np.float32),
        }
    )
    found = read_volume(stored(tmp_path, beams))
    assert found.column("REF").to_pylist() == [[1.0, 1.0]]
    assert found.column("latitude").to_pylist() == [None]
    assert found.column("volume_number").to_pylist() == [None]
    assert found.column("calibration").to_pylist() == [None]


def test_numbers_of_a_calibration_may_have_any_name(tmp_path: Path) -> None:
    beams = volume(rays=2, gates=2)
    names = ("time", "index", "noise hc", "noise_hc", "noise/hc", "x" * 400)
    numbers = [[(name, float(i)) for i, name in enumerate(names)]] * 4
    at = beams.schema.get_field_index("calibration")
    beams = beams.set_column(at, beams.schema.field(at), pa.array(numbers, beams.schema.types[at]))
    with netCDF4.Dataset(stored(tmp_path, beams)) as file:
        found = [variable for variable in file.variables.values() if "r_calib" in variable.name]
        assert {
            variable.long_name: float(variable[0])
            for variable in found
            if variable.dimensions == ("r_calib",) and variable[0] is not np.ma.masked
        } == {name: float(i) for i, name in enumerate(names)}


def test_what_radx_writes_of_rays_and_sweeps_is_there(tmp_path: Path) -> None:
    beams = volume(rays=2, gates=3)
    at = beams.schema.get_field_index("prt_mode")
    modes = pa.array(["fixed", "fixed", "staggered", "staggered"])
    beams = beams.set_column(at, beams.schema.field(at), modes)
    with netCDF4.Dataset(stored(tmp_path, beams)) as file:
        assert file["prt_ratio"][:].tolist() == [1.0, 1.0, None, None]
        for name in ("target_scan_rate", "ray_angle_res"):
            assert file[name].dimensions == ("sweep",)
            assert file[name].meta_group == "instrument_parameters"


def test_rays_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    two = pa.concat_tables([volume(radar="A", rays=2), volume(radar="B", rays=2)])
    with pytest.raises(Malformed, match="the same of all rays"):
        write_cfradial(tmp_path / "x.nc", two)
    with pytest.raises(Malformed, match="at least one"):
        write_cfradial(tmp_path / "x.nc", volume().slice(0, 0))
    assert list(tmp_path.iterdir()) == []


# --- files of others, and none --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf"])
def test_xradar_opens_it_with_every_value_equal(tmp_path: Path, engine: str) -> None:
    xradar = pytest.importorskip("xradar")
    if engine == "h5netcdf":
        pytest.importorskip("h5netcdf")
    beams = volume(rays=12, gates=5)
    tree = xradar.io.open_cfradial1_datatree(
        str(stored(tmp_path, beams)), engine=engine, first_dim="time"
    )
    try:
        for number in range(2):
            sweep, part = tree[f"sweep_{number}"].to_dataset(), beams.slice(12 * number, 12)
            nanos = sweep["time"].values.astype("datetime64[ns]").astype(np.int64)
            assert nanos.tolist() == part.column("time_ns").to_pylist()
            for name in ("azimuth", "elevation"):
                assert sweep[name].values.tolist() == part.column(name).to_pylist()
            for name in FIELDS:
                np.testing.assert_array_equal(sweep[name].values, values_of(part, name, 5))
        root = tree.to_dataset()
        place = [float(root[name]) for name in ("latitude", "longitude", "altitude")]
        assert place == [39.9501, -105.1953, 1742.5]
    finally:
        tree.close()


@pytest.mark.filterwarnings("ignore")
def test_what_xradar_writes_is_read(tmp_path: Path) -> None:
    xradar = pytest.importorskip("xradar")
    beams = volume(rays=12, gates=5)
    tree = xradar.io.open_cfradial1_datatree(str(stored(tmp_path, beams)))
    try:
        xradar.io.to_cfradial1(tree, str(tmp_path / "theirs.nc"))
    finally:
        tree.close()
    found = read_volume(tmp_path / "theirs.nc")
    for name in ("time_ns", "azimuth", "elevation", "sweep_number", "sweep_mode", "radar"):
        assert found.column(name).to_pylist() == beams.column(name).to_pylist(), name
    for name in FIELDS:
        np.testing.assert_array_equal(values_of(found, name, 5), values_of(beams, name, 5))


@pytest.fixture
def pyart(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYART_QUIET", "1")
    return pytest.importorskip("pyart")


@pytest.mark.filterwarnings("ignore")
def test_pyart_opens_it_and_what_it_writes_is_read(tmp_path: Path, pyart: Any) -> None:
    beams = volume(rays=12, gates=5)
    radar = pyart.io.read_cfradial(str(stored(tmp_path, beams)))
    assert radar.azimuth["data"].tolist() == beams.column("azimuth").to_pylist()
    assert radar.elevation["data"].tolist() == beams.column("elevation").to_pylist()
    seconds = (beams.column("time_ns").to_numpy() - 1_750_000_000_000_000_000) / 1e9
    np.testing.assert_allclose(radar.time["data"], seconds, atol=5e-10)
    place = [float(getattr(radar, n)["data"][0]) for n in ("latitude", "longitude", "altitude")]
    assert place == [39.9501, -105.1953, 1742.5]
    for name in FIELDS:
        found = np.ma.filled(radar.fields[name]["data"].astype(np.float32), np.nan)
        np.testing.assert_array_equal(found, values_of(beams, name, 5))
    theirs = tmp_path / "pyart.nc"
    pyart.io.write_cfradial(str(theirs), radar)
    again = read_volume(theirs)
    assert again.num_rows == beams.num_rows
    for name in ("azimuth", "elevation", "time_ns", "latitude", "sweep_number", "sweep_mode"):
        assert again.column(name).to_pylist() == beams.column(name).to_pylist(), name
    for name in FIELDS:
        np.testing.assert_array_equal(values_of(again, name, 5), values_of(beams, name, 5))


@needs_lrose_radar
@pytest.mark.parametrize("mode", MODES)
def test_radx_reads_equal_arrays_and_writes_it_back_under_the_same_path(
    tmp_path: Path, mode: str
) -> None:
    beams = volume(mode=mode)
    path, back = stored(tmp_path / "ours", beams), tmp_path / "back"
    answer = subprocess.run(
        [program("radx_print"), str(path), "--write", str(back)], capture_output=True, check=True
    )
    said = json.loads(answer.stdout)
    for name in FIELDS:
        values = values_of(beams, name, 64)
        plain = np.where(np.isfinite(values), values, np.float32(-9999)).astype("<f4")
        assert said["fields"][name]["sha256"] == sha256(plain.tobytes()).hexdigest(), name
    assert said["rays"]["azimuth"] == pytest.approx(beams.column("azimuth").to_pylist(), abs=1e-6)
    times = [
        s * 10**9 + n for s, n in zip(said["rays"]["secs"], said["rays"]["nanos"], strict=True)
    ]
    assert times == beams.column("time_ns").to_pylist()
    assert said["platform"]["latitude_deg"] == 39.9501
    assert [sweep["mode"] for sweep in said["sweeps"]] == [mode] * 2
    assert said["calibrations"][0]["noise_dbm_hc"] == -75
    assert Path(said["written"]).relative_to(back) == path.relative_to(tmp_path / "ours")
    theirs = read_volume(said["written"])
    for name in FIELDS:
        np.testing.assert_array_equal(values_of(theirs, name, 64), values_of(beams, name, 64))


def edited(path: Path, change: Any) -> Path:
    with netCDF4.Dataset(path, "a") as file:
        change(file)
    return path


def test_packed_fields_and_sweeps_without_rays_are_read(tmp_path: Path) -> None:
    def pack(file: netCDF4.Dataset) -> None:
        packed = file.createVariable("PACKED", "i2", ("time", "range"), fill_value=-32768)
        packed.setncatts({"scale_factor": np.float32(0.5), "add_offset": np.float32(1)})
        packed[:] = np.full((8, 3), 2.0)
        file["sweep_end_ray_index"][1] = 3  # before its start: an empty sweep

    found = read_volume(edited(stored(tmp_path, volume(rays=4, gates=3)), pack))
    assert found.num_rows == 4
    assert set(found.column("PACKED").to_pylist()[0]) == {2.0}


def test_rays_that_no_sweep_has_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(tmp_path, volume(rays=10, gates=3))
    assert read_volume(path).num_rows == 20
    assert not caplog.text
    with netCDF4.Dataset(str(path), "r+") as file:
        file["sweep_end_ray_index"][:] = [6, 19]
    assert read_volume(path).num_rows == 17
    assert "3 of 20 rays are in no sweep, and left out" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda file: file["sweep_end_ray_index"].__setitem__(1, 99), "rays of sweep 1"),
        (lambda file: file["time"].__setattr__("units", "days since never"), "units of time"),
        (lambda file: file["time"].__setitem__(0, 1e30), "date"),
        (lambda file: file["sweep_end_ray_index"].__setitem__(slice(None), -1), "empty sweeps"),
        (lambda file: file["range"].__setitem__(2, 5000.0), "gates at equal distances"),
    ],
)
def test_a_file_that_is_wrong_says_so_in_one_line(tmp_path: Path, change: Any, reason: str) -> None:
    path = edited(stored(tmp_path, volume(rays=4, gates=3)), change)
    with pytest.raises(Malformed, match=reason):
        read_volume(path)


def test_words_that_are_stored_as_strings_are_read(tmp_path: Path) -> None:
    beams = volume(rays=4, gates=3, mode="rhi")
    with (
        netCDF4.Dataset(stored(tmp_path, beams)) as old,
        netCDF4.Dataset(tmp_path / "strings.nc", "w") as new,
    ):
        new.setncatts(old.__dict__)
        for name, dimension in old.dimensions.items():
            new.createDimension(name, len(dimension))
        for name, variable in old.variables.items():
            if name == "sweep_mode":
                new.createVariable(name, str, ("sweep",))[:] = np.array(["rhi"] * 2, object)
                continue
            told = dict(variable.__dict__)
            fill = told.pop("_FillValue", None)
            made = new.createVariable(name, variable.dtype, variable.dimensions, fill_value=fill)
            made.setncatts(told)
            made[...] = variable[...]
    found = read_volume(tmp_path / "strings.nc")
    assert found.column("sweep_mode").to_pylist() == ["rhi"] * 8
    assert found.column("prt_mode").to_pylist() == ["fixed"] * 8


def with_platform(source: Path, path: Path, put: Callable[[netCDF4.Dataset], Any]) -> Path:
    """Copy a file, with another variable `platform_type`."""
    with netCDF4.Dataset(source) as old, netCDF4.Dataset(path, "w") as new:
        new.setncatts(old.__dict__)
        for name, dimension in old.dimensions.items():
            new.createDimension(name, len(dimension))
        for name, variable in old.variables.items():
            if name == "platform_type":
                continue
            told = dict(variable.__dict__)
            fill = told.pop("_FillValue", None)
            made = new.createVariable(name, variable.dtype, variable.dimensions, fill_value=fill)
            made.setncatts(told)
            made[...] = variable[...]
        put(new)
    return path


def put_string(file: netCDF4.Dataset) -> None:
    file.createVariable("platform_type", str, ())[...] = "fixed"


def put_encoded(file: netCDF4.Dataset) -> None:
    file.createDimension("string5", 5)
    variable = file.createVariable("platform_type", "S1", ("string5",))
    variable._Encoding = "utf-8"
    variable[:] = np.array("fixed")


@pytest.mark.parametrize("put", [put_string, put_encoded])
def test_the_platform_may_be_one_text_as_xarray_writes_it(
    tmp_path: Path, put: Callable[[netCDF4.Dataset], Any]
) -> None:
    source = stored(tmp_path, volume(rays=3, gates=2))
    beams = read_volume(with_platform(source, tmp_path / "text.nc", put))
    assert set(beams.column("platform_type").to_pylist()) == {"fixed"}


@pytest.mark.parametrize("platform", ["fixed", "f", "unknown", "not_set", None])
def test_a_platform_that_is_no_word_for_a_carrier_does_not_move(
    tmp_path: Path, platform: str | None
) -> None:
    path = stored(tmp_path, moving(volume(rays=3, gates=2), platform))
    with netCDF4.Dataset(path) as file:
        assert file.platform_is_mobile == "false"
        assert file["latitude"].dimensions == ()
    assert set(read_volume(path).column("platform_type").to_pylist()) == {"fixed"}


def test_times_that_count_from_a_part_of_a_second_are_read(tmp_path: Path) -> None:
    path = stored(tmp_path, volume(rays=4, gates=3))
    before = read_volume(path).column("time_ns").to_numpy()

    def shift(file: netCDF4.Dataset) -> None:
        file["time"].units = "seconds since 2025-06-15T15:06:40.250Z"

    edited(path, shift)
    assert ((read_volume(path).column("time_ns").to_numpy() - before) == 250_000_000).all()


def test_gates_are_where_they_are_whatever_the_file_says_of_their_distance(tmp_path: Path) -> None:
    def lie(file: netCDF4.Dataset) -> None:
        file["range"].meters_between_gates = "0.15 km"

    found = read_volume(edited(stored(tmp_path, volume(rays=4, gates=3)), lie))
    assert found.column("gate_spacing").to_pylist() == [150.0] * 8


def test_hostile_files_are_refused_and_nothing_else(tmp_path: Path) -> None:
    whole = stored(tmp_path, volume(rays=4, gates=3)).read_bytes()
    rng = np.random.default_rng(3)
    path = tmp_path / "hostile.nc"
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), 12):
            data[at] = rng.integers(0, 256)
        path.write_bytes(data[: rng.integers(1, len(data) + 1)])
        with contextlib.suppress(Malformed):  # and nothing else
            assert read_volume(path).num_rows <= 8


def test_what_is_no_file_of_a_radar_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file"):
        read_volume(tmp_path / "none.nc")
    (tmp_path / "text.nc").write_text("hello")
    with pytest.raises(Malformed, match="first bytes"):
        read_volume(tmp_path / "text.nc")
    with netCDF4.Dataset(tmp_path / "other.nc", "w") as file:
        file.createDimension("x", 1)
    with pytest.raises(Malformed, match="no sweeps"):
        read_volume(tmp_path / "other.nc")
    assert not is_grid(tmp_path / "other.nc")
