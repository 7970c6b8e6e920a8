"""LROSE's own readers see every pulse of ours, and we see every pulse of its writers."""

from __future__ import annotations

import hashlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.core.batch import batch_from_messages
from penstock.core.endpoints import open_reader, open_writer
from penstock.core.worker import Worker
from penstock.radar import moments
from penstock.radar.beams import values_of
from penstock.radar.iwrf.packets import Encoding
from penstock.radar.iwrf.pulses import PulseDecoder, Pulses
from penstock.radar.iwrf.tcp import IwrfTcpWriter
from support.lrose_radar import (
    FOLDER,
    iwrf_read,
    iwrf_write,
    needs_lrose_radar,
    program,
    pulses_of,
)
from support.pulses import scan

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_lrose_radar

ENCODINGS = {"fl32": 1, "si16": 2, "dbm": 3, "sigmet": 4, "si32": 5}
#: These two go by tables of single precision there.
NEARLY = {Encoding.DBM_PHASE_SI16, Encoding.SIGMET_FL16}
SAME = (
    *("pulse_seq_num", "n_gates", "n_channels", "iq_encoding", "hv_flag", "volume_num", "status"),
    *("sweep_num", "event_flags", "scan_mode", "follow_mode", "n_data", "antenna_transition"),
)
NUMBERS = (
    *("azimuth", "elevation", "prt", "prt_next", "fixed_el", "scale", "offset"),
    *("pulse_width_us", "start_range_m", "gate_spacing_m"),
)


def assert_same(pulses: Pulses, seen: list[dict[str, Any]]) -> None:
    """Compare each pulse, bit by bit where both decode by the same rule."""
    assert len(pulses) == len(seen)
    for i, real in enumerate(seen):
        header = pulses.headers[i]
        for name in SAME:
            assert header[name] == real[name], name
        for name in NUMBERS:
            assert header[name] == np.float32(real[name]), name
        assert pulses.times[i] == real["time_secs_utc"] * 10**9 + real["time_nano_secs"]
        iq = pulses.iq[pulses.starts[i] : pulses.starts[i + 1]]
        if header["iq_encoding"] in NEARLY:
            theirs = np.array(real["iq"], np.float32)
            np.testing.assert_allclose(iq, theirs, atol=3e-7 * np.abs(theirs).max())
        else:
            assert hashlib.sha256(iq.tobytes()).hexdigest() == real["iq_fl32_sha256"]


def decoded(url: str) -> Pulses:
    with open_reader(url) as reader:
        return PulseDecoder().feed(b"".join(message.payload for message in reader.available()))


@pytest.mark.parametrize("name", ENCODINGS)
def test_we_see_every_pulse_of_a_file_of_lrose(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.iwrf_ts"
    iwrf_write("file", path, name, 40, 64, 2, "--burst", "--more")
    assert_same(decoded(f"iwrf:{path}"), pulses_of(iwrf_read("file", path, "--full")))


@pytest.mark.parametrize("name", ["all", "si16"])
def test_we_see_every_pulse_of_a_queue_of_lrose(tmp_path: Path, name: str) -> None:
    counts = iwrf_write("fmq", tmp_path / "q", name, 100, 64, 2)
    with open_reader(f"iwrf+fmq:{tmp_path}/q") as reader:
        messages = list(reader.available())
    assert len(messages) == counts["messages"]
    pulses = PulseDecoder().feed(b"".join(message.payload for message in messages))
    assert_same(pulses, pulses_of(iwrf_read("fmq", tmp_path / "q", "--full")))


@pytest.mark.parametrize("name", ENCODINGS)
def test_lrose_sees_every_pulse_of_our_files_queues_and_servers(tmp_path: Path, name: str) -> None:
    packets = scan(60, gates=20, encoding=ENCODINGS[name])
    expected = PulseDecoder().feed(b"".join(packets))
    with open_writer(f"iwrf:{tmp_path}/ts?seconds=0.02") as writer:
        writer.write_many(packets)
    files = sorted((tmp_path / "ts").rglob("*.iwrf_ts"))
    assert len(files) == 3
    assert_same(expected, pulses_of(iwrf_read("file", *files, "--full")))
    with open_writer(f"iwrf+fmq:{tmp_path}/q?parts=25") as writer:
        writer.write_many(packets)
    assert_same(expected, pulses_of(iwrf_read("fmq", tmp_path / "q", "--full")))
    with open_writer("iwrf+tcp://127.0.0.1:0?wait=20s") as writer:
        assert isinstance(writer, IwrfTcpWriter)
        port = writer.port
        seen: list[dict[str, Any]] = []
        reading = Worker(
            "judge",
            lambda _: seen.extend(iwrf_read("tcp", "127.0.0.1", port, "--full", "--max", 60)),
            log=__import__("logging").getLogger("judge"),
        ).start()
        writer.write_many(packets)
        writer.flush()
        assert reading.join(30)
    assert_same(expected, pulses_of(seen))


def test_lrose_that_joins_late_gets_the_metadata(tmp_path: Path) -> None:
    """Its reader drops pulses until it knows the radar."""
    with open_writer(f"iwrf+fmq:{tmp_path}/q?parts=10&slots=200") as writer:
        writer.write_many(scan(3000, every=100_000, gates=2))  # the beginning is overwritten
    seen = pulses_of(iwrf_read("fmq", tmp_path / "q"))
    assert seen[-1]["pulse_seq_num"] == 2999


def test_we_see_every_pulse_that_lrose_copies_into_a_queue(tmp_path: Path) -> None:
    path = tmp_path / "x.iwrf_ts"
    iwrf_write("file", path, "si16", 200, 16, 2)
    parameters = tmp_path / "params"
    parameters.write_text(
        f'output_fmq_path = "{tmp_path}/q"; output_fmq_size = 10000000; output_fmq_nslots = 500;\n'
        "n_pulses_per_message = 8; mode = ARCHIVE;\n"
    )
    subprocess.run(
        [program("TsFile2Fmq"), "-params", parameters, "-f", path],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "HOME": str(tmp_path), "DATA_DIR": str(tmp_path)},
    )
    seen = pulses_of(iwrf_read("fmq", tmp_path / "q", "--full"))
    assert len(seen) >= 190  # it keeps what does not fill a message
    assert_same(decoded(f"iwrf+fmq:{tmp_path}/q"), seen)


@pytest.mark.timeout(180)
def test_moments_are_those_of_lrose(tmp_path: Path) -> None:
    """Ts2Moments packs to 16 bits, and leaves out some rays at both ends."""
    import netCDF4

    script = os.environ.get("PENSTOCK_LROSE_MOMENTS")
    if script is None:
        pytest.skip("PENSTOCK_LROSE_MOMENTS names no script")
    paths = []
    for volume in range(3):
        paths.append(tmp_path / f"{volume}.iwrf_ts")
        options = ("--first", volume * 640, "--volume", volume)
        iwrf_write("file", paths[-1], "fl32", 640, 64, 2, *options)
    folder = tmp_path / "cf"
    subprocess.run(
        [script, str(FOLDER), "16", folder, *paths], check=True, capture_output=True, timeout=150
    )
    theirs: dict[int, dict[str, Any]] = {}
    for path in folder.rglob("*.nc"):
        with netCDF4.Dataset(path) as file:
            start = file["time"].units.removeprefix("seconds since ").rstrip("Z")
            begin = np.datetime64(start, "ns").astype(np.int64)
            times = begin + np.round(file["time"][:] * 1e9).astype(np.int64)
            for row, when in enumerate(times):
                theirs[int(when)] = {
                    name: np.ma.filled(file[name][row].astype(np.float64), np.nan) for name in STEPS
                }
    assert len(theirs) > 40
    with open_reader(f"iwrf:{tmp_path}") as reader:
        batch = batch_from_messages(list(reader.available()))
    beams = moments(batch, pulses=16, attenuation=True)
    ours = beams.column("time_ns").to_pylist()
    compared = 0
    for name, step in STEPS.items():
        matrix = values_of(beams, name, 64).astype(np.float64)
        if name == "SNR":  # LROSE's is the mean of both polarisations, which have the same noise
            vertical = 10 ** (-values_of(beams, "ZDR", 64) / 10)
            matrix = matrix + 10 * np.log10((1 + vertical) / 2)
        if name == "DBM":  # and so is this, of the decibels
            matrix = matrix - values_of(beams, "ZDR", 64) / 2
        for when, fields in theirs.items():
            near = int(np.argmin(np.abs(np.array(ours) - when)))
            assert abs(ours[near] - when) < 2_000_000
            difference = np.abs(matrix[near] - fields[name])
            if name in {"VEL", "PHIDP"}:
                turn = 50.0 if name == "VEL" else 360.0
                difference = np.minimum(difference, np.abs(turn - difference))
            known = np.isfinite(difference)
            compared += int(known.sum())
            assert (difference[known] <= step + 0.05).all(), (name, when, difference[known].max())
    assert compared > 2_000 * len(STEPS)


#: One step of what Ts2Moments packs.
STEPS = {
    "DBZ": 0.01,
    "VEL": 0.01,
    "WIDTH": 0.01,
    "SNR": 0.01,
    "NCP": 1e-4,
    "DBM": 0.01,
    "ZDR": 1e-3,
    "PHIDP": 0.01,
    "RHOHV": 1e-4,
}
STEPS |= {"ZDR": 1e-3, "PHIDP": 0.01, "RHOHV": 1e-4}
