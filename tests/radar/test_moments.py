"""Moments by the real code's numbers, and dwells that no border of a batch cuts."""

from __future__ import annotations

import itertools
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.batch import batch_from_messages
from penstock.core.errors import InvalidOption, Unsupported
from penstock.core.message import Message
from penstock.radar import BeamMaker, DwellOptions, moments
from penstock.radar.beams import BEAM_SCHEMA, FIELDS
from penstock.radar.dwells import cut
from penstock.radar.iwrf.messages import packets_of
from penstock.radar.iwrf.packets import Kind, make
from penstock.radar.iwrf.pulses import PulseDecoder, make_pulse
from penstock.radar.moments_stage import _join, _parts
from penstock.radar.pulse_pair import Receiver, moments_of
from support.pulses import T0, VECTORS, metadata, samples, scan, vector

if TYPE_CHECKING:
    from collections.abc import Sequence

REAL = json.loads((VECTORS / "fl32.moments.json").read_text())
GATES = REAL["gates"]


def batch_of(packets: Sequence[bytes]) -> pa.RecordBatch:
    return batch_from_messages(
        [Message(i, 0, 0, 0, 0, None, None, packet) for i, packet in enumerate(packets)]
    )


def beams_of(packets: Sequence[bytes], **options: Any) -> pa.Table:
    return moments(batch_of(packets), **options)


def rows(table: pa.Table) -> list[str]:
    """Return beams in a form in which NaN is NaN."""
    return [repr(row) for row in table.to_pylist()]


# --- the formulas ---------------------------------------------------------------------------------


def test_beams_of_two_polarisations_are_those_of_lrose() -> None:
    beams = moments(batch_of([vector("fl32").tobytes()]), pulses=20)
    assert beams.schema.equals(BEAM_SCHEMA)
    assert beams.num_rows == 1
    row = beams.to_pylist()[0]
    names = {"SNR": "snrhc", "DBZ": "dbzhc", "VEL": "vel", "ZDR": "zdr"}
    for name, real in {**names, "PHIDP": "phidp", "RHOHV": "rhohv"}.items():
        expected = [gate["sim"][real] for gate in GATES]
        np.testing.assert_allclose(row[name], expected, atol=1e-4, err_msg=name)
    assert row["nyquist"] == pytest.approx(REAL["nyquist"], abs=1e-5)
    assert row["unambiguous_range"] == pytest.approx(REAL["unambig_range_km"] * 1000, abs=0.1)
    assert row["start_of_volume"]
    assert row["end_of_volume"]
    assert (row["volume_number"], row["sweep_number"], row["samples"]) == (17, 2, 20)
    assert row["time_ns"] == 1750000000_509_500_000
    assert row["radar"] == "GOLDEN"
    assert dict(row["calibration"])["noise_hc"] == -77


def test_moments_of_one_polarisation_are_those_of_lrose() -> None:
    decoder = PulseDecoder()
    pulses = decoder.feed(vector("fl32"))
    iq = np.ascontiguousarray(pulses.iq.reshape(20, 2, 64, 2)[:, 0])
    receiver = Receiver.of(decoder.state, float(pulses.headers["prt"][0]))
    ranges = 75.0 + 150.0 * np.arange(64, dtype=np.float64)
    found = moments_of(iq, (1, 20, 1, 64), receiver, ranges, dual=False)
    names = {"SNR": "snr", "DBZ": "dbz", "VEL": "vel", "WIDTH": "width", "NCP": "ncp", "DBM": "dbm"}
    for name, real in names.items():
        expected = [gate[real] for gate in GATES]
        np.testing.assert_allclose(found[name][0], expected, atol=1e-4, err_msg=name)


def test_a_gate_without_a_signal_has_no_reflectivity() -> None:
    quiet = [
        make_pulse((1e-6 * samples(1, seed=i)[0]).astype(np.complex64), time_ns=T0 + i, prt=0.001)
        for i in range(4)
    ]
    row = beams_of([*metadata(), *quiet]).to_pylist()[0]
    assert np.isnan(row["SNR"]).all()
    assert np.isnan(row["DBZ"]).all()
    assert np.isnan(row["ZDR"]).all()
    assert np.isfinite(row["VEL"]).all()
    assert np.isfinite(row["WIDTH"]).all()  # by the lags that noise is not in
    assert np.isfinite(row["DBM"]).all()


def test_what_goes_away_is_positive_unless_the_receiver_is_the_other_way_around() -> None:
    """The echo turns back by half a radian a pulse: 25 m/s are a half turn."""
    packets = [p for p in scan(16, every=16) if p]
    away = beams_of(packets).to_pylist()[0]["VEL"]
    back = beams_of(packets, velocity_sign=-1).to_pylist()[0]["VEL"]
    np.testing.assert_allclose(away, 25 * 0.5 / np.pi, atol=0.3)
    np.testing.assert_allclose(back, -25 * 0.5 / np.pi, atol=0.3)


def test_without_a_calibration_there_is_still_a_velocity() -> None:
    said = [p for p in metadata() if p[:1] != make(Kind.CALIBRATION)[:1]]
    row = beams_of([*said, *scan(16, every=1000)[4:]]).to_pylist()[0]
    assert np.isnan(row["DBZ"]).all()
    assert np.isfinite(row["VEL"]).all()
    assert row["calibration"] is None


def test_one_pulse_is_a_beam_without_pairs() -> None:
    row = beams_of([*metadata(), scan(1, every=1000, first=1)[0]]).to_pylist()[0]
    assert row["samples"] == 1
    assert np.isnan(row["VEL"]).all()
    assert np.isfinite(row["DBM"]).all()


def test_staggered_pulses_have_a_power_and_no_velocity() -> None:
    row = beams_of(scan(16, every=16, prf_mode=2)).to_pylist()[0]
    assert np.isnan(row["VEL"]).all()
    assert row["prt_mode"] == "staggered"
    assert np.isfinite(row["DBZ"]).all()


def test_polarisations_in_turns_are_refused() -> None:
    with pytest.raises(Unsupported, match="in turns"):
        beams_of(scan(16, every=16, xmit_rcv_mode=2))


def test_one_channel_has_no_field_of_two() -> None:
    row = beams_of(scan(16, every=16, channels=1, xmit_rcv_mode=1, pol_mode=1)).to_pylist()[0]
    assert row["ZDR"] is row["PHIDP"] is row["RHOHV"] is None
    assert row["polarization_mode"] == "horizontal"
    assert len(row["DBZ"]) == 8


# --- dwells ---------------------------------------------------------------------------------------


def test_a_dwell_is_so_many_pulses_by_their_numbers() -> None:
    beams = beams_of([*metadata(), *scan(100, first=5, sweep=1000)], pulses=32)
    assert beams.column("samples").to_pylist() == [27, 32, 32, 9]


def test_a_dwell_is_a_sector_of_angle() -> None:
    """Four pulses a degree; the first sector is half before north."""
    beams = beams_of(scan(40, sweep=1000), degrees=2)
    assert beams.column("samples").to_pylist() == [4, 8, 8, 8, 8, 4]
    azimuth = beams.column("azimuth").to_pylist()
    assert azimuth[1:5] == pytest.approx([1.875, 3.875, 5.875, 7.875])
    indexed = beams_of(scan(40, sweep=1000, beams_are_indexed=1, indexed_beam_spacing_deg=2))
    assert rows(indexed.drop_columns(["samples"])) == rows(beams.drop_columns(["samples"]))


def test_a_sector_across_north_is_one() -> None:
    packets = scan(40, first=1430, sweep=100_000)  # from 357.5° to 7.25°
    beams = beams_of([*metadata(), *packets], degrees=2)
    assert beams.column("samples").to_pylist() == [6, 8, 8, 8, 8, 2]
    assert beams.column("azimuth").to_pylist()[1] == pytest.approx(359.875)


@pytest.mark.parametrize(
    ("field", "value"),
    [("volume_num", 4), ("sweep_num", 7), ("scan_mode", 1), ("prt", 0.002), ("gate_spacing_m", 75)],
)
def test_a_dwell_ends_where_the_radar_changes(field: str, value: float) -> None:
    iq = samples(16)
    header: dict[str, Any] = {"volume_num": 1, "sweep_num": 1, "scan_mode": 8}
    header |= {"prt": 0.001, "gate_spacing_m": 150}
    pulses = [
        make_pulse(
            iq[i],
            time_ns=T0 + i,
            pulse_seq_num=i,
            **{**header, **({field: value} if i > 9 else {})},
        )
        for i in range(16)
    ]
    assert beams_of([*metadata(), *pulses]).column("samples").to_pylist() == [10, 6]


@pytest.mark.parametrize(("said", "used"), [(-112.5, -112.5), (0.0, 300.0), (-9999.0, 300.0)])
def test_only_a_first_gate_of_0_is_that_of_the_settings(said: float, used: float) -> None:
    pulse = make_pulse(samples(1)[0], start_range_m=said, gate_spacing_m=150, prt=0.001)
    beams = beams_of([*metadata(start_range_m=300.0, gate_spacing_m=75.0), pulse])
    assert beams.column("start_range").to_pylist() == [used]
    assert beams.column("gate_spacing").to_pylist() == [150]


def test_a_radar_that_moves_is_where_it_was_in_the_middle_of_a_dwell() -> None:
    packets = metadata()
    for i, pulse in enumerate(scan(32, every=1000, flags=False)[len(packets) :]):
        if i >= 16:  # it is not told before
            where: dict[str, Any] = {"latitude": 50 + i / 100, "altitude_msl_km": 2.5}
            packets.append(make(Kind.PLATFORM_GEOREF, time_ns=T0 + i * 1_000_000, **where))
        packets.append(pulse)
    beams = beams_of(packets, pulses=16)
    assert beams.column("samples").to_pylist() == [16, 16]
    assert beams.column("latitude").to_pylist() == [40.125, 50.24]
    assert beams.column("altitude").to_pylist() == [1742.5, 2500]
    assert beams.column("longitude").to_pylist() == [-104.625, -104.625]


@pytest.mark.parametrize(
    ("number", "word"), [(0, None), (1, "fixed"), (2, "vehicle"), (3, "ship"), (4, "aircraft")]
)
def test_beams_say_what_carries_their_radar(number: int, word: str | None) -> None:
    packets = [make(Kind.RADAR_INFO, platform_type=number), *metadata()[1:], *scan(16)[4:]]
    assert set(beams_of(packets).column("platform_type").to_pylist()) == {word}


def test_of_two_units_that_say_where_a_radar_is_the_first_one_holds() -> None:
    packets = metadata()
    for i, pulse in enumerate(scan(32, every=1000, flags=False)[len(packets) :]):
        unit = (i + 1) % 2
        where: dict[str, Any] = {"latitude": 50 + unit, "longitude": 8 + unit}
        packets += [make(Kind.PLATFORM_GEOREF, unit_num=unit, **where), pulse]
    beams = beams_of(packets, pulses=16)
    assert set(beams.column("latitude").to_pylist()) == {50.0}
    assert set(beams.column("longitude").to_pylist()) == {8.0}


def test_a_part_of_a_stream_waits_for_the_position_of_a_radar_that_moves() -> None:
    packets = scan(64, every=1000, flags=False)
    packets.insert(4 + 20, make(Kind.PLATFORM_GEOREF, latitude=50.0, longitude=8.0))
    data = np.frombuffer(b"".join(packets), np.uint8)
    found = cut(data, DwellOptions(pulses=16), is_start=False, is_end=False)
    assert found.beams.column("latitude").to_pylist() == [50.0]
    assert len(packets_of(found.head)) == 4 + 32 + 1


def test_changing_gates_end_a_dwell_and_all_beams_are_there() -> None:
    packets = scan(8, gates=8, every=8) + scan(8, gates=5, every=1000, first=8)
    beams = beams_of(packets).to_pylist()
    assert [(beam["samples"], len(beam["DBZ"])) for beam in beams] == [(8, 8), (8, 5)]


def test_a_gap_in_the_numbers_ends_a_dwell_and_is_counted() -> None:
    packets = scan(16, every=16)
    del packets[9:12]
    maker = BeamMaker()
    beams = pa.concat_tables([maker.feed(b"".join(packets)), maker.finish()])
    assert beams.column("samples").to_pylist() == [5, 8]
    assert maker.statistics().missing == 3


@pytest.mark.parametrize("at", [0, 99, 100, 101, 150])
def test_pulses_are_missing_wherever_a_batch_ends(at: int) -> None:
    packets = [*scan(100, sweep=100), *scan(100, first=110, sweep=100)]  # ten behind a sweep's end
    pulses = [place for place, each in enumerate(packets) if packets_of(each)[0][0] == Kind.PULSE]
    border = pulses[at]
    maker = BeamMaker(DwellOptions(pulses=20))
    maker.feed(b"".join(packets[:border]))
    maker.finish(b"".join(packets[border:]))
    assert maker.statistics().missing == 10


def test_a_clock_that_jumps_back_ends_a_dwell_and_is_counted_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    iq = samples(16)
    times = [T0 + i * 10**6 - (10**9 if i > 6 else 0) for i in range(16)]
    pulses = [make_pulse(iq[i], time_ns=times[i], pulse_seq_num=i, prt=0.001) for i in range(16)]
    maker = BeamMaker()
    beams = pa.concat_tables([maker.feed(b"".join([*metadata(), *pulses])), maker.finish()])
    assert beams.column("samples").to_pylist() == [7, 9]
    assert maker.statistics().jumps == 1
    assert caplog.text.count("the radar's clock jumped back 1 times") == 1


def test_pulses_without_numbers_are_counted() -> None:
    iq = samples(20)
    pulses = [make_pulse(iq[i], time_ns=T0 + i, prt=0.001) for i in range(20)]
    maker = BeamMaker(DwellOptions(pulses=8))
    found = [maker.feed(packet) for packet in [*metadata(), *pulses]]
    beams = pa.concat_tables([*found, maker.finish()])
    assert beams.column("samples").to_pylist() == [8, 8, 4]


def test_pulses_before_the_metadata_are_counted_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    without = scan(20, every=1000, first=1, sweep=1000)
    maker = BeamMaker(DwellOptions(pulses=16))
    with caplog.at_level(logging.WARNING):
        made = [maker.feed(b"".join(without)), maker.feed(b"".join(metadata()))]
        more = scan(20, every=1000, first=21, sweep=1000)
        made += [maker.feed(b"".join(more)), maker.finish()]
    books = maker.statistics()
    assert "15 pulses came before radar_info and ts_processing" in caplog.text
    assert books.pulses == 40 == books.used + books.unready
    assert sum(table.num_rows for table in made) == books.beams
    assert books.unready == 20


def test_an_empty_sweep_is_no_beam() -> None:
    packets = [*metadata(), make(Kind.EVENT_NOTICE, start_of_sweep=1, end_of_sweep=1)]
    beams = beams_of([*packets, *packets])
    assert beams.num_rows == 0
    assert beams.schema.equals(BEAM_SCHEMA)
    assert beams_of([]).num_rows == 0


@pytest.mark.parametrize(
    "options",
    [{"pulses": 0}, {"degrees": 0}, {"pulses": 8, "degrees": 1}, {"velocity_sign": 2}],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        beams_of([], **options)


PACKETS = [
    *scan(150, sweep=70, every=25),
    make(Kind.EVENT_NOTICE, end_of_volume=1),
    *scan(60, first=150, every=33, gates=5, flags=False),
]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, len(PACKETS)), max_size=12), st.sampled_from([8, 16, 50]))
def test_borders_of_batches_cut_no_beam(borders: list[int], pulses: int) -> None:
    options = DwellOptions(pulses=pulses)
    whole = BeamMaker(options)
    expected = pa.concat_tables([whole.feed(b"".join(PACKETS)), whole.finish()])
    maker = BeamMaker(options)
    edges = [0, *sorted(borders), len(PACKETS)]
    made = []
    for start, end in itertools.pairwise(edges):
        maker = BeamMaker(options, maker.state)  # as after a restart
        made.append(maker.feed(b"".join(PACKETS[start:end])))
    made.append(maker.finish())
    assert rows(pa.concat_tables(made)) == rows(expected)
    assert sum(expected.column("samples").to_pylist()) == 210


def test_bytes_that_are_no_packet_are_counted_once_however_many_batches_follow() -> None:
    maker = BeamMaker(DwellOptions(pulses=64))
    packets = scan(20, every=1000, flags=False)
    maker.feed(b"".join([*packets[:6], bytes(10), *packets[6:9]]))
    for packet in packets[9:]:
        maker.feed(packet)
    assert maker.statistics().skipped_bytes == 10
    assert maker.statistics().open == 20
    assert maker.finish().column("samples").to_pylist() == [20]


def test_what_is_remembered_does_not_grow_by_what_is_said_again() -> None:
    maker = BeamMaker(DwellOptions(pulses=64))
    sizes = set()
    for i in range(5):
        again = metadata(T0 + i)
        sync = make(Kind.SYNC, time_ns=T0 + i)
        place = make(Kind.PLATFORM_GEOREF, time_ns=T0 + i, latitude=40 + i)
        maker.feed(b"".join([sync, *again, place]))
        sizes.add(len(maker.state))
    assert sizes == {len(b"".join([*metadata(), place]))}
    for pulse in scan(3, every=1000, flags=False)[4:]:
        maker.feed(b"".join([*metadata(T0 + 9), pulse]))
        sizes.add(len(maker.state))
    assert sorted(sizes) == [min(sizes) + count * len(pulse) for count in range(4)]


def test_a_notice_of_a_start_is_remembered_until_its_pulse_comes() -> None:
    maker = BeamMaker(DwellOptions(pulses=64))
    maker.feed(b"".join([*metadata(), make(Kind.EVENT_NOTICE, start_of_volume=1)]))
    maker.feed(b"".join(metadata()))
    maker = BeamMaker(DwellOptions(pulses=64), maker.state)
    maker.feed(b"".join(scan(8, every=1000, flags=False)[4:]))
    assert maker.finish().column("start_of_volume").to_pylist() == [True]


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.integers(0, len(PACKETS)), max_size=6),
    st.lists(st.integers(0, len(PACKETS)), max_size=3),
)
def test_parts_worked_on_apart_give_the_same_beams(cuts: list[int], batches: list[int]) -> None:
    """As Spark does it: parts of micro-batches, each in a task, then one that joins them."""
    options = DwellOptions(pulses=16)
    expected = beams_of(PACKETS, pulses=16)
    edges = sorted({0, *cuts, *batches, len(PACKETS)})
    state, made = b"", []
    parts: list[Any] = []
    whole = batch_of(PACKETS).append_column("url", pa.array(["u"] * len(PACKETS)))
    for start, end in itertools.pairwise(edges):
        for part in _parts([whole.slice(start, end - start)], options):
            columns = (part.column(name).to_pylist() for name in ("seq", "part", "kind", "payload"))
            parts += zip(*columns, strict=True)
        if end in batches or end == len(PACKETS):
            maker = BeamMaker(options, state)
            streams = [stream for stream in _join(reversed(parts), maker) if stream]
            made += [pa.ipc.open_stream(stream).read_all() for stream in streams]
            state, parts = maker.state, []
    made.append(BeamMaker(options, state).finish())
    assert rows(pa.concat_tables(made)) == rows(expected)


def test_a_part_that_knows_its_radar_makes_its_own_beams() -> None:
    data = np.frombuffer(b"".join(scan(100, sweep=1000)), np.uint8)
    found = cut(data, DwellOptions(pulses=16), is_start=False, is_end=False)
    assert found.beams.column("samples").to_pylist() == [16] * 5
    assert found.books.open == 4
    nothing = np.frombuffer(b"".join(scan(100, sweep=1000, first=1, every=1000)), np.uint8)
    unknown = cut(nothing, DwellOptions(pulses=16), is_start=False, is_end=False)
    assert (unknown.beams.num_rows, unknown.tail, unknown.head) == (0, None, nothing.tobytes())


def test_every_field_is_a_float_a_gate() -> None:
    beams = beams_of(scan(32, every=16))
    for name in FIELDS:
        assert beams.schema.field(name).type == pa.list_(pa.float32())
    assert beams.column("DBZ").to_pylist()[0][0] == pytest.approx(-40, abs=30)
