"""The moments of beams: of samples, and in Arrow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from beams import decode_beam
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
from storms import Cell, Day, Wind
from synthetic_radar import RadarSettings, SyntheticRadar

import penstock
from support.radar_scenes import LOOKING_NORTH, NYQUIST, SMALL, batch_of, even_rain, payloads


def northward(settings: RadarSettings, day: Day, beams: int, seed: int = 1) -> Moments:
    """What a radar that looks north all the time measures."""
    radar = SyntheticRadar(settings, day, seed)
    seen = radar.next_beams(beams)
    return moments_of_beams(seen["header"], seen["iq"])


def pulse_pair_scatter(width: float) -> float:
    """The standard deviation of strong echoes' velocity (Doviak and Zrnic, 1993, section 6.4)."""
    part = width / (2 * NYQUIST)
    return 2 * NYQUIST * math.sqrt(part / (4 * math.sqrt(math.pi) * LOOKING_NORTH.pulses))


@pytest.mark.parametrize(
    ("speed", "width"), [(-20.0, 1.0), (-3.0, 0.5), (0.0, 2.0), (12.0, 4.0), (24.0, 0.5)]
)
def test_velocity_width_and_reflectivity_are_those_of_the_rain(speed: float, width: float) -> None:
    found = northward(LOOKING_NORTH, even_rain(speed, width), 60)
    assert not np.isnan(found.dbz).any()
    assert np.mean(found.velocity) == pytest.approx(speed, abs=0.08)
    assert np.mean(found.width) == pytest.approx(width, abs=0.03 + 0.03 * width)
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


def test_the_velocity_follows_the_wind_by_azimuth() -> None:
    day = Day(Wind(east=10.0, north=4.0), (Cell(0, 0, 35, 1e9, 1.0),), extent=1e9)
    seen = SyntheticRadar(day=day).next_beams(360)
    found = moments_of_beams(seen["header"], seen["iq"])
    angle = np.radians(np.arange(360))
    expected = (10.0 * np.sin(angle) + 4.0 * np.cos(angle)) * math.cos(math.radians(0.5))
    np.testing.assert_allclose(np.mean(found.velocity, axis=1), expected, atol=0.25)


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
