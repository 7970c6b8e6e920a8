"""Volumes that others write, as sources: ODIM's HDF5, and NEXRAD's level 2."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.core.endpoints import open_reader, open_writer
from penstock.core.errors import Malformed
from penstock.radar.beams import beams_from_batch, values_of
from penstock.radar.volume_files import read_volume
from penstock.relay import copy

if TYPE_CHECKING:
    from numpy.typing import NDArray

h5py = pytest.importorskip("h5py")
pytestmark = pytest.mark.filterwarnings("ignore")

RAYS, GATES = 36, 20
ELEVATIONS = (0.5, 1.5)
#: Of what ODIM keeps as bytes, and codes that mean "not measured" and "nothing there".
QUANTITIES = {"DBZH": (0.5, -32.0), "VRADH": (0.25, -32.0)}
NODATA, UNDETECT = 255, 0


def codes(sweep: int, quantity: str) -> NDArray[np.uint8]:
    rng = np.random.default_rng(sweep + 10 * len(quantity))
    found: NDArray[np.uint8] = rng.integers(1, 255, (RAYS, GATES)).astype(np.uint8)
    found[0, 0], found[1, 1] = NODATA, UNDETECT
    return found


def put(place: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        place.attrs[name] = np.bytes_(value) if isinstance(value, str) else value


def write_odim(path: Path) -> None:
    """Write a polar volume as ODIM_H5 2.2 has it: of two elevations and two quantities."""
    with h5py.File(path, "w") as file:
        put(file, Conventions="ODIM_H5/V2_2")
        put(
            file.create_group("what"),
            object="PVOL",
            version="H5rad 2.2",
            date="20250615",
            time="150640",
            source="WMO:00000,NOD:test",
        )
        put(file.create_group("where"), lat=48.5, lon=9.25, height=512.0)
        put(file.create_group("how"), wavelength=5.3)
        for sweep, elevation in enumerate(ELEVATIONS):
            scan = file.create_group(f"dataset{sweep + 1}")
            first = 40 + 10 * sweep
            put(
                scan.create_group("what"),
                product="SCAN",
                startdate="20250615",
                starttime=f"1506{first}",
                enddate="20250615",
                endtime=f"1506{first + 9}",
            )
            geometry = {"elangle": elevation, "nbins": GATES, "nrays": RAYS, "a1gate": 0}
            put(scan.create_group("where"), rscale=250.0, rstart=0.0, **geometry)
            starts = np.arange(RAYS) * (360 / RAYS)
            how = scan.create_group("how")
            put(how, NI=31.5, startazA=starts, stopazA=(starts + 360 / RAYS) % 360)
            for number, (quantity, (gain, offset)) in enumerate(QUANTITIES.items()):
                data = scan.create_group(f"data{number + 1}")
                data.create_dataset("data", data=codes(sweep, quantity))
                scaling = {"gain": gain, "offset": offset}
                limits = {"nodata": float(NODATA), "undetect": float(UNDETECT)}
                put(data.create_group("what"), quantity=quantity, **scaling, **limits)


@pytest.fixture
def odim(tmp_path: Path) -> Path:
    pytest.importorskip("xradar")
    path = tmp_path / "T_PAGZ.h5"
    write_odim(path)
    return path


def test_an_odim_volume_becomes_beams_with_every_value(odim: Path) -> None:
    beams = read_volume(odim)
    assert beams.num_rows == RAYS * len(ELEVATIONS)
    for name, value in (("latitude", 48.5), ("longitude", 9.25), ("altitude", 512.0)):
        assert set(beams.column(name).to_pylist()) == {value}
    assert set(beams.column("sweep_mode").to_pylist()) == {"azimuth_surveillance"}
    assert set(beams.column("start_range").to_pylist()) == {125.0}
    assert set(beams.column("gate_spacing").to_pylist()) == {250.0}
    assert set(beams.column("nyquist").to_pylist()) == {31.5}
    assert beams.column("end_of_volume").to_pylist() == [False] * 71 + [True]
    for sweep, elevation in enumerate(ELEVATIONS):
        part = beams.slice(sweep * RAYS, RAYS)
        assert set(part.column("sweep_number").to_pylist()) == {sweep}
        assert part.column("elevation").to_numpy() == pytest.approx(elevation)
        assert part.column("azimuth").to_numpy() == pytest.approx(np.arange(RAYS) * 10.0 + 5)
        seconds = part.column("time_ns").to_numpy() / 1e9 - 1_750_000_000 - 10 * sweep
        assert (seconds >= 0).all()
        assert (seconds <= 10).all()
        for quantity, (gain, offset) in QUANTITIES.items():
            found, raw = values_of(part, quantity, GATES), codes(sweep, quantity)
            known = (raw != NODATA) & (raw != UNDETECT)
            np.testing.assert_allclose(found[known], raw[known] * gain + offset, atol=1e-5)
            assert np.isnan(found[~known]).all()


def test_an_odim_volume_is_a_source_and_becomes_cfradial(odim: Path, tmp_path: Path) -> None:
    with open_reader(f"cfradial:{odim}") as reader:
        beams = beams_from_batch(reader.read_batch(1000))
    assert beams.num_rows == 72
    with (
        open_reader(f"cfradial:{odim}") as reader,
        open_writer(f"cfradial:{tmp_path}/out?datamapper=false") as writer,
    ):
        assert copy(reader, writer).copied == 72
    (path,) = tmp_path.glob("out/2*/*.nc")
    again = read_volume(path)
    for quantity in QUANTITIES:
        one, other = (values_of(table, quantity, GATES) for table in (beams, again))
        np.testing.assert_array_equal(one, other)


def test_an_odim_file_that_is_damaged_is_refused(odim: Path) -> None:
    whole = odim.read_bytes()
    odim.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Malformed):
        read_volume(odim)
    write_odim(odim)
    with h5py.File(odim, "a") as file:
        del file["dataset1/where"]
    with pytest.raises(Malformed, match="a volume of a radar"):
        read_volume(odim)


# --- NEXRAD ---------------------------------------------------------------------------------------

#: Days since 1970 as NEXRAD counts them, from 1 on: 15 June 2025.
DAY = 20255
#: 15:06:40, milliseconds.
START = 54_400_000
#: Codes become values by (code - offset) / scale; 0 and 1 say that there is none.
MOMENTS = {b"REF": (2.0, 66.0), b"VEL": (2.0, 129.0)}
#: Records of metadata, all of one size, that come before the rays of a file.
METADATA, RECORD = 134, 2432


def message(kind: int, body: bytes) -> bytes:
    size = (16 + len(body)) // 2
    return bytes(12) + struct.pack(">HBBHHIHH", size, 0, kind, 1, DAY, START, 1, 1) + body


def ray_31(sweep: int, ray: int) -> bytes:
    """Return a ray in the generic format, whose blocks stand behind their pointers."""
    blocks = [
        struct.pack(
            ">4sHBBffhHfffffH2x", b"RVOL", 44, 1, 0, 35.25, -97.5, 350, 20, *[0.0] * 5, 212
        ),
        struct.pack(">4sHhf", b"RELV", 12, 0, 0.0),
        struct.pack(">4sHhffh2x", b"RRAD", 20, 4660, 0.0, 0.0, 2650),
    ]
    for name, (scale, offset) in MOMENTS.items():
        first, spacing = 2125, 250  # metres
        head = struct.pack(
            *(">4sIHhhhhBBff", b"D" + name, 0, GATES, first, spacing, 0, 0, 0, 8, scale, offset)
        )
        blocks.append(head + nexrad_codes(sweep, name)[ray].tobytes())
    status = {0: 3 if not sweep else 0, RAYS - 1: 4 if sweep else 2}.get(ray, 1)
    pointers, at = [], 72
    for block in blocks:
        pointers.append(at)
        at += len(block)
    header = struct.pack(
        ">4sIHHfBxHBBBBfBbH10I",
        *(b"TEST", START + 1000 * (sweep * RAYS + ray), DAY, ray + 1, ray * 10.0 + 5, 0, at, 1),
        *(status, sweep + 1, 1, ELEVATIONS[sweep], 0, 0, len(blocks)),
        *(*pointers, *[0] * (10 - len(pointers))),
    )
    return message(31, header + b"".join(blocks) + bytes(at % 2))


def nexrad_codes(sweep: int, name: bytes) -> NDArray[np.uint8]:
    rng = np.random.default_rng(sweep + 100 * name[0])
    found: NDArray[np.uint8] = rng.integers(2, 256, (RAYS, GATES)).astype(np.uint8)
    found[0, 0], found[1, 1] = 0, 1
    return found


def write_nexrad(path: Path) -> None:
    """Write a volume of two elevations, not compressed, as the archive of level 2 has it."""
    header = struct.pack(">9s3sII4s", b"AR2V0006.", b"001", DAY, START, b"TEST")
    status = message(2, bytes(80)).ljust(RECORD, b"\0")
    rays = [ray_31(sweep, ray) for sweep in range(len(ELEVATIONS)) for ray in range(RAYS)]
    path.write_bytes(header + bytes((METADATA - 1) * RECORD) + status + b"".join(rays))


def test_a_nexrad_volume_becomes_beams_with_every_value(tmp_path: Path) -> None:
    pytest.importorskip("xradar")
    path = tmp_path / "TEST20250615_150640_V06"
    write_nexrad(path)
    beams = read_volume(path)
    assert beams.num_rows == RAYS * len(ELEVATIONS)
    assert set(beams.column("radar").to_pylist()) == {"TEST"}
    for name, value in (("latitude", 35.25), ("longitude", -97.5), ("altitude", 370.0)):
        assert set(beams.column(name).to_pylist()) == {value}
    assert set(beams.column("start_range").to_pylist()) == {2125.0}
    assert beams.column("time_ns").to_pylist() == [
        (1_750_000_000 + second) * 10**9 for second in range(72)
    ]
    for sweep, elevation in enumerate(ELEVATIONS):
        part = beams.slice(sweep * RAYS, RAYS)
        assert part.column("elevation").to_numpy() == pytest.approx(elevation)
        assert part.column("azimuth").to_numpy() == pytest.approx(np.arange(RAYS) * 10.0 + 5)
        for ours, theirs in (("DBZH", b"REF"), ("VRADH", b"VEL")):
            scale, offset = MOMENTS[theirs]
            found, raw = values_of(part, ours, GATES), nexrad_codes(sweep, theirs)
            known = raw > 1
            np.testing.assert_allclose(found[known], (raw[known] - offset) / scale, atol=1e-4)
            assert np.isnan(found[~known]).all()


def test_a_nexrad_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("xradar")
    path = tmp_path / "TEST20250615_150640_V06"
    write_nexrad(path)
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(Malformed):
        read_volume(path)
