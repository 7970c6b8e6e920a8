"""Samples in five encodings, pulses as columns, metadata and events as the radar's state."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import InvalidOption, Malformed
from penstock.radar import _pulses
from penstock.radar.iwrf.packets import Encoding, Event, Kind, make, read
from penstock.radar.iwrf.pulses import PULSE_SCHEMA, PulseDecoder, bytes_of, make_pulse
from penstock.radar.iwrf.samples import PackedValues, decode, encode, value_type
from support.pulses import VECTORS, metadata, scan, vector


def decoded(encoding: int, data: bytes, scale: float, offset: float) -> Any:
    width = np.dtype(value_type(encoding)).itemsize
    packed = PackedValues(np.frombuffer(data, np.uint8), np.zeros(1, np.int64), len(data) // width)
    out = np.empty((1, packed.values), np.float32)
    decode(encoding, packed, np.array([scale], "f4"), np.array([offset], "f4"), out)
    return out[0]


# --- samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fl32", "si16"])
def test_samples_are_those_of_lrose_bit_by_bit(name: str) -> None:
    pulses = PulseDecoder().feed(vector(name))
    expected = json.loads((VECTORS / f"{name}.file_read.json").read_text())
    assert len(pulses) == len(expected) == 20
    for i, real in enumerate(expected):
        iq = pulses.iq[pulses.starts[i] : pulses.starts[i + 1]]
        assert hashlib.sha256(iq.tobytes()).hexdigest() == real["iq_fl32_sha256"]
        for field in ("pulse_seq_num", "n_gates", "n_channels", "hv_flag", "n_data", "volume_num"):
            assert pulses.headers[field][i] == real[field]
        for field in ("elevation", "azimuth", "prt", "scale", "start_range_m", "fixed_el"):
            assert pulses.headers[field][i] == np.float32(real[field])
        assert pulses.times[i] == real["time_secs_utc"] * 10**9 + real["time_nano_secs"]
        assert pulses.headers["event_flags"][i] == real["event_flags"]


#: Of the largest value: what an encoding may be wrong by.
STEPS = {1: 0, 2: 0.51 / 32767, 3: 1.1e-3, 4: 2.5e-4, 5: 1e-7}

#: Below it lies the weakest power that has a logarithm in LROSE: what is weaker comes back as that.
SILENCE = 1e-19


@given(
    st.sampled_from(sorted(STEPS)),
    st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=40).map(lambda v: v[: len(v) & ~1]),
)
@example(Encoding.DBM_PHASE_SI16, [0.0, 5.405327771295753e-30])
def test_samples_come_back_in_every_encoding(encoding: int, values: list[float]) -> None:
    iq = np.array(values, np.float32)
    data, scale, offset = encode(encoding, iq)
    found = decoded(encoding, data, scale, offset)
    largest = float(np.abs(iq).max())
    if encoding == Encoding.DBM_PHASE_SI16:  # whose steps are those of a logarithm
        power = iq[0::2].astype(np.float64) ** 2 + iq[1::2].astype(np.float64) ** 2
        strong = np.repeat(power > largest**2 * 1e-6, 2)
        span = np.log10(max(power.max(), 1e-40) / max(power.min(), 1e-40)) * 10 / 65535
        error = np.abs(found - iq)[strong].max(initial=0)
        assert error <= largest * (1e-4 + span / 8) + SILENCE
        return
    allowed = largest * STEPS[encoding] + (2**-23 if encoding == Encoding.SIGMET_FL16 else 0)
    np.testing.assert_allclose(found, iq, atol=allowed + SILENCE, rtol=0)


def test_encoding_again_changes_nothing() -> None:
    """The 16-bit codes of an RVP8 are all their own."""
    codes = np.arange(65536, dtype="<u2")
    values = decoded(Encoding.SIGMET_FL16, codes.tobytes(), 1, 0)
    data, _, _ = encode(Encoding.SIGMET_FL16, values)
    again = decoded(Encoding.SIGMET_FL16, data, 1, 0)
    np.testing.assert_array_equal(again, values)


def test_silence_and_equal_powers_divide_by_nothing() -> None:
    for encoding in Encoding:
        for values in (np.zeros(8, np.float32), np.ones(8, np.float32)):
            data, scale, offset = encode(encoding, values)
            found = decoded(encoding, data, scale, offset)
            np.testing.assert_allclose(found, values, atol=2e-4)


def test_what_a_16_bit_float_cannot_hold_is_the_largest_of_its_sign() -> None:
    iq = np.array([[9 + 1e20j, -9 - 3e38j]], np.complex64)
    top, bottom = 4095 / 1024 * 10**0.3, -4096 / 1024 * 10**0.3
    found = PulseDecoder().feed(make_pulse(iq, encoding=4)).iq
    np.testing.assert_allclose(found, [top, top, bottom, bottom], rtol=1e-6)


def test_what_only_float_has_is_refused_elsewhere() -> None:
    bad = np.array([1, np.nan], np.float32)
    encode(Encoding.FL32, bad)
    with pytest.raises(InvalidOption, match="finite"):
        encode(Encoding.SCALED_SI16, bad)
    with pytest.raises(InvalidOption, match="1 to 5"):
        encode(9, bad)


def test_an_offset_is_added_in_double_precision() -> None:
    data = np.array([3, -7], "<i2").tobytes()
    found = decoded(Encoding.SCALED_SI16, data, 0.1, 0.2)
    scale, offset = np.float64(np.float32(0.1)), np.float64(np.float32(0.2))
    assert found.tolist() == [np.float32(3 * scale + offset), np.float32(-7 * scale + offset)]


def test_gates_of_the_burst_are_left_out() -> None:
    values = np.arange(1, 2 * 2 * (2 + 3) + 1, dtype="<f4")
    header: dict[str, Any] = {
        "n_gates": 3,
        "n_gates_burst": 2,
        "n_channels": 2,
        "n_data": 20,
        "iq_encoding": 1,
    }
    packet = make(Kind.PULSE, data=values.tobytes(), **header)
    pulses = PulseDecoder().feed(packet)
    assert pulses.iq.tolist() == [*range(5, 11), *range(15, 21)]


# --- pulses ---------------------------------------------------------------------------------------


def test_pulses_become_columns_with_one_buffer_of_samples() -> None:
    packets = scan(50, gates=10) + scan(7, gates=4, channels=1, encoding=2, first=60)
    pulses = PulseDecoder().feed(b"".join(packets))
    batch = pulses.to_arrow()
    assert batch.schema == PULSE_SCHEMA
    assert batch.num_rows == 57
    assert batch.column("n_gates").to_pylist() == [10] * 50 + [4] * 7
    lists = batch.column("iq")
    assert lists.values.buffers()[1].address == pulses.iq.ctypes.data  # not a copy
    assert [len(row) for row in lists.to_pylist()] == [40] * 50 + [8] * 7
    assert np.isfinite(lists.values.to_numpy()).all()


def test_memory_of_samples_is_used_again_when_nobody_has_them() -> None:
    iq = np.full((2, 1000), 1 + 1j, np.complex64)
    data = b"".join(make_pulse((k + 1) * iq, pulse_seq_num=k) for k in range(100))
    decoder = PulseDecoder()
    first = decoder.feed(data)
    kept = first.to_arrow().column("iq")  # the table alone keeps the samples
    place = first.iq.ctypes.data
    del first
    second = decoder.feed(data)
    assert second.iq.ctypes.data != place
    assert kept[99].values.to_numpy().tolist() == [100.0] * 4000
    del kept
    part = second.iq[-10:]
    del second
    third = decoder.feed(data)  # where the first was; a part of the second is still held
    assert third.iq.ctypes.data == place
    assert part.tolist() == [100.0] * 10


def test_angles_are_brought_into_their_range() -> None:
    iq = np.ones((1, 1), np.complex64)
    packets = [
        make_pulse(iq, azimuth=-10, elevation=359, scan_mode=8),
        make_pulse(iq, azimuth=20, elevation=90, scan_mode=8),
    ]
    headers = PulseDecoder().feed(b"".join(packets)).headers
    assert headers["azimuth"].tolist() == [350, 20]
    assert headers["elevation"].tolist() == [-1, 90]
    assert headers["scan_mode"].tolist() == [8, 4]


def test_the_state_changes_when_something_else_is_said() -> None:
    first = b"".join(metadata())
    pulse = make_pulse(np.ones((1, 2), np.complex64))
    again = make(Kind.XMIT_POWER, power_dbm_h=85, seq_num=9)
    decoder = PulseDecoder()
    pulses = decoder.feed(first + pulse + first + pulse + again + pulse)
    states = [pulses.states[i] for i in pulses.state_of]
    assert states[0] is states[1]
    assert Kind.XMIT_POWER in states[2].packets
    assert decoder.state.number(Kind.XMIT_POWER, "power_dbm_h") == 85
    assert decoder.state.number(Kind.XMIT_POWER, "power_dbm_v") is None
    assert decoder.state.text(Kind.RADAR_INFO, "radar_name") == "TEST"


def notice(**fields: Any) -> bytes:
    return make(Kind.EVENT_NOTICE, **fields)


def pulse(volume: int = -1, sweep: int = -1, flags: int = 0) -> bytes:
    iq = np.ones((1, 2), np.complex64)
    return make_pulse(iq, volume_num=volume, sweep_num=sweep, event_flags=flags)


END, START = int(Event.END_OF_VOLUME), int(Event.START_OF_VOLUME)


@pytest.mark.parametrize(
    ("packets", "expected"),
    [
        # LROSE adds any notice to the next pulse: an end would be in the next volume.
        ([pulse(), pulse(), notice(end_of_volume=1), pulse()], [0, END, 0]),
        ([pulse(), notice(start_of_volume=1), pulse()], [0, START]),
        ([pulse(1), notice(end_of_volume=1, start_of_volume=1), pulse(2)], [END, START]),
        # A notice before the last pulse of its volume, as LROSE's reader needs it.
        ([pulse(1, 0), notice(end_of_volume=1), pulse(1, 0), pulse(2, 0)], [0, END, 0]),
        # What a header says is not said again elsewhere.
        ([pulse(1, 0, END), notice(end_of_volume=1), pulse(1, 0)], [END, 0]),
        ([pulse(1, 0), notice(end_of_volume=1), pulse(1, 0, END)], [0, END]),
    ],
)
def test_notices_tell_of_the_pulse_that_they_mean(
    packets: list[bytes], expected: list[int]
) -> None:
    pulses = PulseDecoder().feed(b"".join(packets))
    assert pulses.headers["event_flags"].tolist() == expected


def test_a_notice_is_kept_until_the_next_pulse_or_the_end() -> None:
    decoder = PulseDecoder()
    decoder.feed(pulse(1) + notice(start_of_volume=1))
    assert decoder.feed(pulse(2)).headers["event_flags"].tolist() == [START]
    decoder.feed(notice(end_of_volume=1))
    assert decoder.finish() == END


def test_lrose_and_we_agree_where_notices_alone_tell_of_a_start() -> None:
    data = vector("fl32").copy()
    records = PulseDecoder().feed(data)
    for start, _ in records.places:
        data[start + 224 : start + 228] = 0
    flags = PulseDecoder().feed(data).headers["event_flags"]
    assert flags[0] == 12
    decoder = PulseDecoder()
    decoder.feed(data)
    assert decoder.finish() == 3  # which LROSE loses


def test_payloads_of_a_batch_are_one_stretch_of_bytes() -> None:
    import pyarrow as pa

    rows = [
        {"seq": i, "time_ns": 0, "created_ns": 0, "type": 0, "subtype": 0, "payload": data}
        for i, data in enumerate([b"ab", b"", b"cde"])
    ]
    batch = pa.RecordBatch.from_pylist(rows, BATCH_SCHEMA)
    assert bytes_of(batch).tobytes() == b"abcde"
    assert bytes_of(batch.slice(2)).tobytes() == b"cde"
    assert not len(bytes_of(batch.slice(0, 0)))
    with pytest.raises(Malformed, match="payload"):
        bytes_of(batch.select(["seq"]))


def test_a_hostile_length_costs_no_memory() -> None:
    lying = bytearray(make_pulse(np.ones((2, 500), np.complex64)))
    for field, value in ((108, 2**31 - 1), (136, 2**31 - 1), (4, 2**31 - 1), (112, -1), (212, -5)):
        packet = bytearray(lying)
        packet[field : field + 4] = value.to_bytes(4, "little", signed=True)
        tracemalloc.start()
        pulses = PulseDecoder().feed(bytes(packet) * 3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not len(pulses)
        assert peak < 2 << 20
    assert len(PulseDecoder().feed(bytes(lying))) == 1
    assert read(bytes(lying))["n_gates"][0] == 500


def test_what_lies_outside_of_a_buffer_is_refused() -> None:
    data, table = np.zeros(64, np.uint8), np.zeros(1001, np.int32)
    for place in (-1, 63, 2**62):
        places, out = np.array([place]), np.zeros(2, np.float32)
        with pytest.raises(ValueError, match="outside"):
            _pulses.fl32(data, places, 2, out)
        with pytest.raises(ValueError, match="outside"):
            _pulses.si16(data, places, 2, np.ones(1, np.float32), out)
        with pytest.raises(ValueError, match="outside"):
            _pulses.gather(data, np.array([place]), 8, np.zeros(8, np.uint8))
    with pytest.raises(ValueError, match="outside"):  # too little room
        _pulses.fl32(data, np.zeros(3, np.int64), 2, np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="outside"):
        _pulses.head(data, 65, False, table, table)
    with pytest.raises(ValueError, match="kinds"):
        _pulses.in_line(data, 0, table[:10], table, np.zeros((5, 5), np.int64))


def test_metadata_between_pulses_changes_nothing_but_what_it_says() -> None:
    """Pulses of one shape are decoded at once; the states are those of each."""
    packets = [
        packet for k in range(50) for packet in (*metadata(prt_usec=1000 + k // 10), *one(k))
    ]
    pulses = PulseDecoder().feed(b"".join(packets))
    alone = [PulseDecoder().feed(one(k)[0]) for k in range(50)]
    assert (pulses.iq == np.concatenate([each.iq for each in alone])).all()
    prts = [pulses.states[i].number(Kind.TS_PROCESSING, "prt_usec") for i in pulses.state_of]
    assert prts == [1000 + k // 10 for k in range(50)]


def one(k: int) -> list[bytes]:
    """Return a pulse whose shape and encoding are others every few pulses."""
    return scan(1, first=k, every=1000, gates=5 + k // 7, encoding=1 + k // 13)[-1:]
