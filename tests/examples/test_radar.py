"""The synthetic radar, the moments of its beams and their picture."""

from __future__ import annotations

import ctypes
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from beams import BEAM_HEADER, BeamHeader, decode_beam, encode_beam
from hypothesis import given
from hypothesis import strategies as st
from moments import (
    MOMENTS_DDL,
    MOMENTS_SCHEMA,
    Moments,
    autocovariance,
    moments_of_batch,
    moments_of_batches,
    moments_of_beam,
    moments_of_beams,
    to_complex,
)
from numpy.typing import NDArray
from ppi import draw_ppi, newest_sweep
from ppi import main as draw
from storms import STORMY_DAY, Cell, Day, Wind
from synthetic_radar import RadarSettings, SyntheticRadar, main, write_beams

import penstock

RADAR = Path(__file__).parents[2] / "examples" / "radar" / "synthetic_radar.py"
SMALL = RadarSettings(pulses=8, gates=12, elevations=(0.5, 1.5), beams_per_sweep=40)
NYQUIST = 25.0


def payloads(radar: SyntheticRadar, count: int) -> list[bytes]:
    return [beam.tobytes() for beam in radar.next_beams(count)]


def batch_of(beams: list[bytes], type: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.record_batch([pa.array(beams, type or pa.binary())], names=["payload"])


# --- the payload ----------------------------------------------------------------------------------


class CHeader(ctypes.LittleEndianStructure):
    _fields_ = [
        ("magic", ctypes.c_char * 4),
        ("version", ctypes.c_uint16),
        ("header_size", ctypes.c_uint16),
        ("beam", ctypes.c_int64),
        ("time_ns", ctypes.c_int64),
        ("volume", ctypes.c_int32),
        ("sweep", ctypes.c_int32),
        ("azimuth", ctypes.c_float),
        ("elevation", ctypes.c_float),
        ("pulses", ctypes.c_uint32),
        ("gates", ctypes.c_uint32),
        ("first_gate", ctypes.c_float),
        ("gate_spacing", ctypes.c_float),
        ("prf", ctypes.c_float),
        ("wavelength", ctypes.c_float),
        ("noise_power", ctypes.c_float),
        ("radar_constant", ctypes.c_float),
        ("count_power", ctypes.c_float),
        ("reserved", ctypes.c_uint32),
    ]


def test_a_c_compiler_lays_the_header_out_as_we_do() -> None:
    assert ctypes.sizeof(CHeader) == BEAM_HEADER.itemsize == 80
    assert BEAM_HEADER.fields is not None
    for name, *_ in CHeader._fields_:
        assert getattr(CHeader, name).offset == BEAM_HEADER.fields[name][1], name


finite = st.floats(-1e6, 1e6, width=32)
positive = st.floats(0.0009765625, 1e6, width=32)
HEADERS = st.builds(
    BeamHeader,
    beam=st.integers(0, 2**63 - 1),
    time_ns=st.integers(-(2**63), 2**63 - 1),
    volume=st.integers(0, 2**31 - 1),
    sweep=st.integers(0, 2**31 - 1),
    azimuth=finite,
    elevation=finite,
    pulses=st.integers(2, 6),
    gates=st.integers(1, 9),
    first_gate=positive,
    gate_spacing=positive,
    prf=positive,
    wavelength=positive,
    noise_power=finite,
    radar_constant=finite,
    count_power=finite,
)


@given(HEADERS, st.integers(0, 2**32 - 1))
def test_a_beam_comes_out_of_its_payload_as_it_went_in(header: BeamHeader, seed: int) -> None:
    shape = (header.pulses, header.gates, 2)
    iq = np.random.default_rng(seed).integers(-(2**15), 2**15, shape, np.int16)
    payload = encode_beam(header, iq)
    assert len(payload) == 80 + 4 * header.pulses * header.gates
    again, samples = decode_beam(payload)
    assert again == header
    assert np.array_equal(samples, iq)
    assert not samples.flags.writeable
    assert encode_beam(again, samples) == payload


def changed(field: str, value: object) -> Callable[[bytes], bytes]:
    def change(payload: bytes) -> bytes:
        header = np.frombuffer(payload[:80], BEAM_HEADER).copy()
        header[field] = value
        return header.tobytes() + payload[80:]

    return change


DAMAGE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("empty", lambda _: b"", "size in bytes should be >= 80, found 0"),
    ("half a header", lambda p: p[:40], "size in bytes should be >= 80, found 40"),
    ("cut", lambda p: p[:-1], "size in bytes should be 464, found 463"),
    ("too long", lambda p: p + b"x", "size in bytes should be 464, found 465"),
    ("text", lambda p: b"hello, world! " * (len(p) // 14), "magic should be b'BEAM', found b'hell"),
    ("newer", changed("version", 2), "version should be 1, found 2"),
    ("longer header", changed("header_size", 96), "header_size should be 80, found 96"),
    ("one pulse", changed("pulses", 1), "pulses should be 2 to 65,536, found 1"),
    ("huge", changed("gates", 2**32 - 1), "gates should be 1 to 65,536, found 4294967295"),
    ("other gates", changed("gates", 13), "size in bytes should be 496, found 464"),
    ("no PRF", changed("prf", 0), "prf should be a number above 0, found 0.0"),
    ("no wavelength", changed("wavelength", np.inf), "wavelength should be a number above 0"),
    ("nowhere", changed("azimuth", np.nan), "azimuth should be a number, found nan"),
]


@pytest.mark.parametrize(("damage", "message"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE])
def test_a_damaged_payload_is_refused_and_says_where(
    damage: Callable[[bytes], bytes], message: str
) -> None:
    good = payloads(SyntheticRadar(SMALL), 3)
    with pytest.raises(penstock.Malformed, match="a beam: ") as single:
        decode_beam(damage(good[1]))
    assert message in str(single.value)
    assert single.value.hint
    with pytest.raises(penstock.Malformed, match="the beam in row 1: ") as many:
        moments_of_batch(batch_of([good[0], damage(good[1]), good[2]]))
    assert message in str(many.value)


@given(st.binary(max_size=200), st.integers(0, 400), st.booleans())
def test_fuzz_bytes_are_a_beam_or_are_refused(junk: bytes, place: int, keep_size: bool) -> None:
    beam = bytearray(ONE_BEAM)
    beam[place : place + (len(junk) if keep_size else 0)] = junk
    try:
        header, iq = decode_beam(bytes(beam))
    except penstock.Malformed as error:
        assert error.where  # noqa: PT017  refused is fine, and anything else is not
    else:
        assert iq.shape == (header.pulses, header.gates, 2)


ONE_BEAM = payloads(SyntheticRadar(SMALL), 1)[0]


def test_samples_that_do_not_fit_their_header_are_refused() -> None:
    header, iq = decode_beam(ONE_BEAM)
    with pytest.raises(penstock.Malformed, match=r"shape should be \(8, 12, 2\)"):
        encode_beam(header, iq[1:])
    with pytest.raises(penstock.Malformed, match="type should be int16"):
        encode_beam(header, iq.astype(np.int32))


# --- the moments ----------------------------------------------------------------------------------


def even_rain(speed: float, width: float, peak: float = 35.0) -> Day:
    """The same rain everywhere that counts, with a wind from south to north."""
    return Day(Wind(0.0, speed), (Cell(0.0, 0.0, peak, 1e9, width),), extent=1e9)


def northward(settings: RadarSettings, day: Day, beams: int, seed: int = 1) -> Moments:
    """What a radar that looks north all the time measures."""
    radar = SyntheticRadar(settings, day, seed)
    seen = radar.next_beams(beams)
    return moments_of_beams(seen["header"], seen["iq"])


LOOKING_NORTH = RadarSettings(beams_per_sweep=1, elevations=(0.0,))


def pulse_pair_scatter(width: float) -> float:
    """The standard deviation of strong echoes' velocity (Doviak and Zrnic, 1993, section 6.4)."""
    part = width / (2 * NYQUIST)
    return 2 * NYQUIST * math.sqrt(part / (4 * math.sqrt(math.pi) * LOOKING_NORTH.pulses))


@pytest.mark.parametrize("width", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("speed", [-20.0, -3.0, 0.0, 12.0])
def test_velocity_width_and_reflectivity_are_those_of_the_rain(speed: float, width: float) -> None:
    found = northward(LOOKING_NORTH, even_rain(speed, width), 60)
    assert not np.isnan(found.dbz).any()
    assert np.mean(found.velocity) == pytest.approx(speed, abs=0.08)
    # Around its own mean, which few pulses move about, a spectrum seems a little narrower.
    unseen = pulse_pair_scatter(width) ** 2
    squared = np.mean(found.width.astype(np.float64) ** 2)
    assert math.sqrt(squared + unseen) == pytest.approx(width, rel=0.03)
    z = np.mean(10 ** (found.dbz.astype(np.float64) / 10))
    assert 10 * math.log10(z) == pytest.approx(35.0, abs=0.15)


def test_velocity_is_unbiased_where_the_echo_is_as_weak_as_noise() -> None:
    # 35 dBZ from 1 km is 70 dB over the noise; -1 dBZ from 50 km is about as strong as noise.
    far = RadarSettings(first_gate=50_000, gate_spacing=1, beams_per_sweep=1, elevations=(0.0,))
    radar = SyntheticRadar(far, even_rain(9.0, 2.0, peak=-1.0), seed=3)
    seen = radar.next_beams(60)
    found = moments_of_beams(seen["header"], seen["iq"], least_snr=-10.0)
    assert np.nanmean(found.velocity) == pytest.approx(9.0, abs=0.25)
    power = 10 * np.log10(np.mean(10 ** (found.power.astype(np.float64) / 10)))
    assert power == pytest.approx(-112 + 10 * math.log10(2), abs=0.1)


def test_estimates_scatter_as_theory_says() -> None:
    found = northward(LOOKING_NORTH, even_rain(5.0, 2.0), 60)
    assert np.std(found.velocity) == pytest.approx(pulse_pair_scatter(2.0), rel=0.1)


def test_echoes_remember_the_pulses_before_as_a_gaussian_spectrum_has_it() -> None:
    speed, width = 7.0, 3.0
    radar = SyntheticRadar(LOOKING_NORTH, even_rain(speed, width), seed=2)
    samples = to_complex(radar.next_beams(100)["iq"])
    power = np.mean(autocovariance(samples).real, axis=0)
    for lag in (1, 2, 3, 5):
        found = np.mean(np.mean(autocovariance(samples, lag), axis=0) / power)
        spread, turn = math.pi * width / NYQUIST, math.pi * speed / NYQUIST
        expected = np.exp(-((spread * lag) ** 2) / 2 - 1j * turn * lag)
        assert abs(found - expected) < 0.02


def test_gates_of_noise_have_no_moments_and_the_power_of_noise() -> None:
    found = northward(LOOKING_NORTH, Day(Wind(0, 0), ()), 100)
    power = 10 * np.log10(np.mean(10 ** (found.power.astype(np.float64) / 10)))
    assert power == pytest.approx(-112.0, abs=0.03)
    for name in ("snr", "dbz", "velocity", "width"):
        assert np.mean(~np.isnan(getattr(found, name))) < 0.001


def test_a_velocity_above_nyquist_folds() -> None:
    found = northward(LOOKING_NORTH, even_rain(30.0, 1.0), 20)
    assert np.mean(found.velocity) == pytest.approx(30.0 - 2 * NYQUIST, abs=0.1)


@pytest.mark.parametrize("azimuth", [0, 45, 90, 180, 270])
def test_the_velocity_follows_the_wind_by_azimuth(azimuth: int) -> None:
    day = Day(Wind(east=10.0, north=4.0), (Cell(0, 0, 35, 1e9, 1.0),), extent=1e9)
    seen = SyntheticRadar(day=day).next_beams(360)
    found = moments_of_beams(seen["header"], seen["iq"])
    angle = math.radians(azimuth)
    expected = 10.0 * math.sin(angle) + 4.0 * math.cos(angle)
    assert np.mean(found.velocity[azimuth]) == pytest.approx(expected, abs=0.25)


def test_a_stormy_sweep_is_measured_as_the_model_has_it() -> None:
    radar = SyntheticRadar(seed=5)
    seen = radar.next_beams(360)
    found = moments_of_beams(seen["header"], seen["iq"])
    model = radar.weather(seen["header"])
    true_dbz = 10 * np.log10(np.maximum(model.z, 1e-30))
    is_strong = true_dbz > 25
    assert is_strong.sum() > 5_000
    assert not np.isnan(found.dbz[is_strong]).any()
    assert np.median((found.dbz - true_dbz)[is_strong]) == pytest.approx(0.0, abs=0.4)
    assert np.mean((found.velocity - model.velocity)[is_strong]) == pytest.approx(0.0, abs=0.05)
    assert np.mean((found.width - model.width)[is_strong]) == pytest.approx(0.0, abs=0.15)
    # And nothing is seen where there is nothing.
    assert np.mean(~np.isnan(found.dbz[true_dbz < -30])) < 0.001


def test_a_storm_that_turns_comes_on_one_side_and_goes_on_the_other() -> None:
    storm = Cell(east=0, north=20_000, peak=50, radius=2_000, width=1.0, rotation=12.0)
    radar = SyntheticRadar(day=Day(Wind(0, 0), (storm,)))
    seen = radar.next_beams(360)
    found = moments_of_beams(seen["header"], seen["iq"])
    at_20_km = 79
    beside = round(math.degrees(2_000 / 20_000))
    # Counter-clockwise: away on its eastern side, towards the radar on its western side.
    assert np.mean(found.velocity[beside, at_20_km - 2 : at_20_km + 3]) == pytest.approx(12, abs=1)
    west = found.velocity[360 - beside, at_20_km - 2 : at_20_km + 3]
    assert np.mean(west) == pytest.approx(-12, abs=1)


def test_storms_drift_with_the_wind_and_come_back() -> None:
    day = Day(Wind(east=10.0, north=0.0), (Cell(0, 20_000, 50, 1_000, 1.0),), extent=30_000)
    east = np.array([90.0])
    for seconds, place in ((2_000.0, 20_000.0), (5_000.0, -10_000.0)):
        at = math.hypot(place, 20_000)
        azimuth = np.array([math.degrees(math.atan2(place, 20_000))])
        seen = day.look(azimuth, np.zeros(1), np.array([seconds]), np.array([at]))
        assert 10 * np.log10(seen.z[0, 0]) == pytest.approx(50.0)
    assert day.look(east, np.zeros(1), np.zeros(1), np.array([20_000.0])).z[0, 0] < 1e-9


# --- in Arrow -------------------------------------------------------------------------------------


def columns(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    return {name: batch[name].to_pylist() for name in batch.schema.names}


def test_a_batch_has_the_moments_of_each_of_its_beams() -> None:
    beams = payloads(SyntheticRadar(), 50)
    rows = moments_of_batch(batch_of(beams))
    assert rows.schema.equals(MOMENTS_SCHEMA)
    for number, (payload, row) in enumerate(zip(beams, rows.to_pylist(), strict=True)):
        header, iq = decode_beam(payload)
        alone = moments_of_beam(header, iq)
        assert (row["beam"], row["sweep"], row["azimuth"]) == (number, 0, float(number))
        assert row["nyquist_velocity"] == NYQUIST
        for name, values in alone._asdict().items():
            found = np.array(row[name], np.float32)
            np.testing.assert_allclose(found, values, rtol=1e-4, atol=1e-3, err_msg=name)
        strongest = int(np.nanargmax(alone.dbz))
        assert row["max_dbz"] == pytest.approx(float(alone.dbz[strongest]), abs=1e-3)
        assert row["max_dbz_range"] == 250.0 * (strongest + 1)


@pytest.mark.parametrize("type", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_any_binary_column_and_any_part_of_it_will_do(type: pa.DataType) -> None:
    beams = payloads(SyntheticRadar(SMALL), 20)
    whole = columns(moments_of_batch(batch_of(beams)))
    part = columns(moments_of_batch(batch_of(beams, type).slice(5, 10)))
    assert part == {name: values[5:15] for name, values in whole.items()}


def test_beams_of_other_sizes_may_be_in_one_batch() -> None:
    small, large = payloads(SyntheticRadar(SMALL), 3), payloads(SyntheticRadar(), 2)
    mixed = moments_of_batch(batch_of([small[0], *large, small[1], small[2]]))
    assert mixed["beam"].to_pylist() == [0, 0, 1, 1, 2]
    assert [len(gates) for gates in mixed["dbz"].to_pylist()] == [12, 200, 200, 12, 12]
    alone = moments_of_batch(batch_of(large))
    assert mixed.slice(1, 2).to_pylist() == alone.to_pylist()


def test_a_beam_without_an_echo_has_nulls_and_no_nan() -> None:
    # To Spark, NaN is more than any number: `max_dbz > 45` would be true.
    silent = SyntheticRadar(day=Day(Wind(0, 0), ()))
    rows = moments_of_batch(batch_of(payloads(silent, 30)))
    assert rows["max_dbz"].null_count >= 29
    assert rows["max_dbz_range"].null_count == rows["max_dbz"].null_count
    for name in ("snr", "dbz", "velocity", "width"):
        values = rows[name].flatten()
        assert values.null_count > 0.99 * len(values)
        assert not any(math.isnan(value) for value in values.drop_null().to_pylist())
    assert rows["power"].flatten().null_count == 0


def test_no_beams_have_no_moments() -> None:
    none = moments_of_batch(penstock.batch_from_messages([]))
    assert none.num_rows == 0
    assert none.schema.equals(MOMENTS_SCHEMA)
    assert list(moments_of_batches(iter([]))) == []


def test_a_batch_that_has_no_payloads_is_refused() -> None:
    with pytest.raises(penstock.Malformed, match="column payload should be binary, found no col"):
        moments_of_batch(pa.record_batch({"x": [1]}))
    with pytest.raises(penstock.Malformed, match="column payload should be binary, found int64"):
        moments_of_batch(pa.record_batch({"payload": [1]}))
    with pytest.raises(penstock.Malformed, match="without nulls"):
        moments_of_batch(pa.record_batch({"payload": [b"", None]}))


def test_the_schema_for_spark_names_the_same_columns() -> None:
    assert [column.split()[0] for column in MOMENTS_DDL.split(", ")] == MOMENTS_SCHEMA.names
    assert "max_dbz float" in MOMENTS_DDL
    assert "velocity array<float>" in MOMENTS_DDL


# --- the radar ------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_beams_however_many_at_once() -> None:
    whole = SyntheticRadar(SMALL, seed=7).next_beams(100)
    radar = SyntheticRadar(SMALL, seed=7)
    parts = [radar.next_beams(count) for count in (1, 39, 60)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    other = SyntheticRadar(SMALL, seed=8).next_beams(100)
    assert np.array_equal(other["header"], whole["header"])
    assert not np.array_equal(other["iq"], whole["iq"])


def test_it_turns_around_at_each_elevation_and_begins_again() -> None:
    headers = SyntheticRadar(SMALL).directions(np.arange(200))
    assert headers["beam"].tolist() == list(range(200))
    assert headers["azimuth"][[0, 1, 39, 40]].tolist() == [0.0, 9.0, 351.0, 0.0]
    assert headers["sweep"][[0, 39, 40, 79, 80]].tolist() == [0, 0, 1, 1, 0]
    assert headers["elevation"][[0, 40, 80]].tolist() == [0.5, 1.5, 0.5]
    assert headers["volume"][[0, 79, 80, 199]].tolist() == [0, 0, 1, 2]


def test_an_echo_beyond_the_receiver_is_clipped() -> None:
    radar = SyntheticRadar(LOOKING_NORTH, even_rain(0.0, 1.0, peak=90.0))
    iq = radar.next_beams(2)["iq"]
    assert iq.max() == 32767
    assert iq.min() == -32768


def test_settings_that_no_radar_can_have_are_refused() -> None:
    with pytest.raises(penstock.InvalidOption, match="must be 2 or more"):
        SyntheticRadar(RadarSettings(pulses=1))
    with pytest.raises(penstock.InvalidOption, match="1 to 2,048"):
        SyntheticRadar(RadarSettings(gates=5_000))


# --- in a queue -----------------------------------------------------------------------------------


def test_a_queue_has_every_beam_with_its_sweep_and_time(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with penstock.open_writer(url) as writer:
        progress = list(write_beams(writer, SyntheticRadar(SMALL), rate=2000, beams=100))
    assert progress == [20, 40, 60, 80, 100]
    with penstock.open_reader(url) as reader:
        messages = reader.read_many(200)
        reader.seek("start")
        rows = moments_of_batch(reader.read_batch(200))
    assert [message.payload[80:] for message in messages] == [
        payload[80:] for payload in payloads(SyntheticRadar(SMALL), 100)
    ]
    assert [message.type for message in messages] == [0] * 40 + [1] * 40 + [0] * 20
    assert rows["time_ns"].to_pylist() == [message.time_ns for message in messages]
    gaps = {after.time_ns - before.time_ns for before, after in zip(messages, messages[1:])}  # noqa: B905, RUF007
    assert gaps == {500_000}
    assert all(message.created_ns >= message.time_ns - 50_000_000 for message in messages)


def test_the_moments_of_a_view_of_the_queue_are_those_of_a_copy(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with penstock.open_writer(url) as writer:
        list(write_beams(writer, SyntheticRadar(SMALL), beams=50))
    with penstock.open_reader(url) as reader:
        copied = moments_of_batch(reader.read_batch(50))
        reader.seek("start")
        with reader.view_batch(50) as batch:  # type: ignore[attr-defined]
            seen = moments_of_batch(batch)
    assert seen.to_pylist() == copied.to_pylist()


def test_the_program_writes_as_many_as_it_is_told(
    queue_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"fmq:{queue_path}", "--rate", "0", "--beams", "90", "--pulses", "8"]
    assert main([*arguments, "--gates", "20", "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("wrote 90 beams (0.1 MB) in ")
    with penstock.open_reader(f"fmq:{queue_path}") as reader:
        numbers = moments_of_batch(reader.read_batch(1000))["beam"].to_pylist()
    assert numbers == list(range(90))


def test_the_program_says_what_is_wrong_with_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fnq:/tmp/radar/iq", "--beams", "1"]) == 1
    said = capsys.readouterr().err
    assert "no endpoint answers to fnq:" in said
    assert "did you mean fmq:?" in said


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_program_between_two_beams(queue_path: str, how: signal.Signals) -> None:
    url = f"fmq:{queue_path}"
    command = [sys.executable, str(RADAR), url, "--rate", "500"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with penstock.open_reader(url, wait="30s") as reader:
            assert reader.read(timeout=30) is not None
            process.send_signal(how)
            said, complaint = process.communicate(timeout=30)
            count = 1 + len(reader.read_many(100_000))
            assert reader.statistics().lost == 0
    finally:
        process.kill()
    assert process.returncode == 0, complaint
    assert complaint == "stopped\n"
    assert said.startswith(f"wrote {count:,} beams")


# --- the picture ----------------------------------------------------------------------------------


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


def test_the_storms_of_the_demo_stay_below_the_nyquist_velocity() -> None:
    radar = SyntheticRadar(day=STORMY_DAY)
    seen = radar.weather(radar.directions(np.arange(0, 100_000, 97)))
    assert np.abs(seen.velocity).max() < NYQUIST
