"""The synthetic radar, its storms, and its beams in a queue."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from moments import moments_of_batch, moments_of_beams
from storms import STORMY_DAY, Cell, Day, Wind
from synthetic_radar import RadarSettings, SyntheticRadar, main, write_beams

import penstock
from support.radar_scenes import LOOKING_NORTH, NYQUIST, SMALL, even_rain, payloads

RADAR = Path(__file__).parents[2] / "examples" / "radar" / "synthetic_radar.py"


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


def test_the_storms_of_the_demo_stay_below_the_nyquist_velocity() -> None:
    radar = SyntheticRadar(day=STORMY_DAY)
    seen = radar.weather(radar.directions(np.arange(0, 100_000, 97)))
    assert np.abs(seen.velocity).max() < NYQUIST


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
        assert isinstance(reader, penstock.InPlaceReader)
        with reader.view_batch(50) as batch:
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
    command = [sys.executable, str(RADAR), url, "--rate", "500", "--pulses", "8", "--gates", "20"]
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
