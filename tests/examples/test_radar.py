"""The synthetic radar: what it sends says what it looked at."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from storms import STORMY_DAY, Cell, Day, Wind
from synthetic_radar import RadarSettings, SyntheticRadar, main

import penstock
from penstock.radar import BeamMaker
from penstock.radar.beams import values_of
from penstock.radar.iwrf.packets import Event
from penstock.radar.iwrf.pulses import PulseDecoder, Pulses
from support.lrose_radar import iwrf_read, needs_lrose_radar, pulses_of

RADAR = Path(__file__).parents[2] / "examples" / "radar" / "synthetic_radar.py"
SMALL = RadarSettings(pulses=8, gates=12, elevations=(0.5, 1.5), beams=40)
LOOKING_NORTH = RadarSettings(pulses=64, gates=100, beams=1, elevations=(0.0,))


def even_rain(speed: float, width: float, peak: float = 35.0) -> Day:
    """The same rain everywhere that counts, with a wind from south to north."""
    rain = Cell(0.0, 0.0, peak, radius=1e6, width=width)
    return Day(Wind(0.0, speed), (rain,), unevenness=0, raggedness=0, hills=None)


def pulses(radar: SyntheticRadar, beams: int) -> Pulses:
    return PulseDecoder().feed(b"".join(radar.next_beams(beams)))


def moments(radar: SyntheticRadar, beams: int) -> pa.Table:
    maker = BeamMaker()
    made = [maker.feed(b"".join(radar.next_beams(beams))), maker.finish()]
    assert maker.statistics().used == beams * radar.settings.pulses
    return pa.concat_tables(made)


def test_the_same_seed_gives_the_same_packets_however_many_at_once() -> None:
    whole = SyntheticRadar(SMALL, seed=7).next_beams(100)
    radar = SyntheticRadar(SMALL, seed=7)
    parts = [radar.next_beams(count) for count in (1, 39, 60)]
    assert [packet for part in parts for packet in part] == whole
    assert SyntheticRadar(SMALL, seed=8).next_beams(100) != whole


def test_it_turns_around_at_each_elevation_and_begins_again() -> None:
    seen = pulses(SyntheticRadar(SMALL, began_ns=5_000_000_000), 200)
    headers = seen.headers
    assert headers["pulse_seq_num"].tolist() == list(range(1600))
    assert np.diff(seen.times).tolist() == [1_000_000] * 1599
    assert seen.times[0] == 5_000_000_000
    assert headers["azimuth"][[0, 7, 8]] == pytest.approx([356.0625, 3.9375, 5.0625])
    assert headers["sweep_num"][[0, 319, 320, 639, 640]].tolist() == [0, 0, 1, 1, 0]
    assert headers["elevation"][[0, 320, 640]].tolist() == [0.5, 1.5, 0.5]
    assert headers["volume_num"][[0, 639, 640, 1599]].tolist() == [0, 0, 1, 2]
    flags = headers["event_flags"]
    first, last = Event.START_OF_SWEEP, Event.END_OF_SWEEP
    assert flags[[0, 320, 640]].tolist() == [
        first | Event.START_OF_VOLUME,
        first,
        first | Event.START_OF_VOLUME,
    ]
    assert flags[[319, 639]].tolist() == [last, last | Event.END_OF_VOLUME]
    assert np.count_nonzero(flags) == 10


def test_beams_are_those_of_the_radar_and_say_where_it_stands() -> None:
    rays = moments(SyntheticRadar(SMALL), 80)
    assert rays.num_rows == 80
    assert rays.column("azimuth").to_numpy()[:40] == pytest.approx(np.arange(40) * 9.0, abs=1)
    assert set(rays.column("samples").to_pylist()) == {8}
    assert rays.column("radar")[0].as_py() == "SYNTH"
    assert rays.column("nyquist")[0].as_py() == pytest.approx(25.0)


@pytest.mark.parametrize(
    ("speed", "width"), [(-20.0, 1.0), (-3.0, 0.5), (0.0, 2.0), (12.0, 4.0), (24.0, 0.5)]
)
def test_moments_are_those_of_the_rain(speed: float, width: float) -> None:
    radar = SyntheticRadar(LOOKING_NORTH, even_rain(speed, width), seed=1)
    truth = radar.weather(np.arange(1))
    rays = moments(radar, 40)

    def values(name: str) -> NDArray[Any]:
        return values_of(rays, name, 100)[:, 4:]

    strong = 10 * np.log10(np.mean(10 ** (values("DBZ") / 10)))
    assert strong == pytest.approx(35.0, abs=0.3)
    turned = np.exp(1j * np.pi * values("VEL") / 25.0).mean()
    assert np.angle(turned) * 25 / np.pi == pytest.approx(speed, abs=0.15)
    assert np.nanmean(values("WIDTH")) == pytest.approx(width, abs=0.15 * width + 0.05)
    assert np.nanmean(values("ZDR")) == pytest.approx(truth.zdr[0, 50], abs=0.05)
    assert np.nanmean(values("RHOHV")) == pytest.approx(truth.rhohv[0, 50], abs=0.005)
    beyond = np.nanmean(values("PHIDP"), axis=0) - truth.phidp[0, 4:]
    assert np.abs(beyond).max() < 3
    assert abs(beyond.mean()) < 0.3


def test_an_empty_sky_is_noise_of_the_power_that_is_announced() -> None:
    clear = Day(Wind(0, 0), (), hills=None)
    rays = moments(SyntheticRadar(LOOKING_NORTH, clear), 40)
    power = 10 ** (values_of(rays, "DBM", 100) / 10)
    expected = LOOKING_NORTH.noise_dbm - LOOKING_NORTH.receiver_gain
    assert 10 * math.log10(power.mean()) == pytest.approx(expected, abs=0.05)


def test_an_echo_beyond_the_receiver_is_clipped() -> None:
    seen = pulses(SyntheticRadar(LOOKING_NORTH, even_rain(0.0, 1.0, peak=110.0)), 2)
    counts = seen.iq / seen.headers["scale"][0]
    assert np.abs(counts).max() == pytest.approx(32767)


def test_settings_that_no_radar_can_have_are_refused() -> None:
    with pytest.raises(penstock.InvalidOption, match="must be 2 or more"):
        SyntheticRadar(RadarSettings(pulses=1))
    with pytest.raises(penstock.InvalidOption, match="1 to 2,048"):
        SyntheticRadar(RadarSettings(gates=5_000))


def test_a_storm_that_turns_comes_on_one_side_and_goes_on_the_other() -> None:
    storm = Cell(east=0, north=20, peak=50, radius=2, width=1.0, rotation=12.0)
    day = Day(Wind(0, 0), (storm,), unevenness=0, raggedness=0, hills=None)
    beside = math.degrees(2 / 20)
    seen = day.look(np.array([beside, -beside]), np.zeros(2), np.zeros(2), np.array([20.0, 20.1]))
    # Counter-clockwise: away on its eastern side, towards the radar on its western side.
    assert seen.velocity[:, 0] == pytest.approx([12, -12], abs=0.5)


def test_storms_drift_with_the_wind() -> None:
    storm = Cell(0, 20, 50, 1, 1.0)
    day = Day(Wind(10.0, 0.0), (storm,), unevenness=0, raggedness=0, hills=None)
    east = np.array([45.0])
    there = np.array([math.hypot(20, 20)])
    for seconds, dbz in ((2_000.0, 50.0), (0.0, -90.0)):
        seen = day.look(east, np.zeros(1), np.array([seconds]), there)
        assert 10 * math.log10(max(seen.z[0, 0], 1e-9)) == pytest.approx(dbz, abs=0.1)


def test_the_storms_of_the_demo_stay_below_the_nyquist_velocity() -> None:
    radar = SyntheticRadar(day=STORMY_DAY)
    seen = radar.weather(np.arange(0, 4320, 7))
    assert np.abs(seen.velocity).max() < radar.settings.nyquist
    assert 55 < 10 * math.log10(seen.z.max()) < 75
    assert seen.rhohv.min() > 0.5
    assert seen.rhohv.max() < 1


# --- in a queue -----------------------------------------------------------------------------------


def test_the_program_writes_whole_volumes(
    queue_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"iwrf+fmq:{queue_path}"
    assert main([url, "--speed", "0", "--pulses", "2", "--gates", "5"]) == 0
    assert capsys.readouterr().out.startswith("wrote 1,440 beams of 2 pulses (")
    with penstock.open_reader(url) as reader:
        decoder = PulseDecoder()
        found = decoder.feed(b"".join(message.payload for message in reader.available()))
    assert found.headers["pulse_seq_num"].tolist() == list(range(2880))
    assert decoder.state.is_ready


@needs_lrose_radar
def test_lrose_reads_every_pulse_of_its_queue(tmp_path: Path) -> None:
    url = f"iwrf+fmq:{tmp_path}/ts"
    assert main([url, "--speed", "0", "--pulses", "2", "--gates", "5"]) == 0
    seen = pulses_of(iwrf_read("fmq", tmp_path / "ts"))
    assert [pulse["pulse_seq_num"] for pulse in seen] == list(range(2880))


def test_the_program_says_what_is_wrong_with_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["iwrf+fnq:/tmp/radar/ts"]) == 1
    assert "no endpoint answers to iwrf+fnq:" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_program_between_two_beams(queue_path: str, how: signal.Signals) -> None:
    url = f"iwrf+fmq:{queue_path}"
    size = ["--pulses", "8", "--gates", "20", "--volumes", "20"]
    command = [sys.executable, str(RADAR), url, *size]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with penstock.open_reader(url, wait="30s") as reader:
            first = reader.read(timeout=30)
            assert first is not None
            process.send_signal(how)
            said, complaint = process.communicate(timeout=30)
            payloads = [first.payload, *(message.payload for message in reader.available())]
            assert reader.statistics().lost == 0
    finally:
        process.kill()
    assert process.returncode == 0, complaint
    assert complaint == "stopped\n"
    beams = len(PulseDecoder().feed(b"".join(payloads))) // 8
    assert said.startswith(f"wrote {beams:,} beams of 8 pulses")
