"""Packets are found in any bytes, and each byte is in one, skipped, or left for later."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.radar.iwrf.framing import Framing, frame
from penstock.radar.iwrf.packets import LARGEST, Kind, layout_of, make
from penstock.radar.iwrf.pulses import PulseDecoder
from support.pulses import VECTORS, scan, vector

DATA = vector("fl32")
WHOLE = DATA.tobytes()
PULSES = [place for run in frame(DATA).runs if run.kind == Kind.PULSE for place in run.packets()]
REAL = json.loads((VECTORS / "resync_results.json").read_text())


def framed(data: bytes, *, is_end: bool = True) -> Framing:
    found = frame(np.frombuffer(data, np.uint8), is_end=is_end)
    assert_whole(found, data, is_end=is_end)
    return found


def assert_whole(found: Framing, data: bytes, *, is_end: bool = True) -> None:
    """Each byte has one place, in order, and no run is anything but packets."""
    places = sorted([(run.start, run.end) for run in found.runs] + found.skipped)
    at = 0
    for start, end in places:
        assert start == at < end
        at = end
    assert at == found.end
    assert found.end == len(data) or not is_end
    for run in found.runs:
        ids = run.records(np.frombuffer(data, np.uint8))
        assert (ids["len_bytes"] == run.length).all()
        assert (ids["id"] == 0x77770000 + run.kind).all()


def pulses_in(data: bytes) -> list[int]:
    numbers = PulseDecoder().feed(data).headers["pulse_seq_num"] - 900_000
    return [int(number) for number in numbers]


@pytest.mark.parametrize("name", ["fl32", "si16"])
def test_a_file_of_lrose_is_its_packets(name: str) -> None:
    expected = json.loads((VECTORS / f"{name}.packets.json").read_text())
    found = framed(vector(name).tobytes())
    sizes = [run.length for run in found.runs for _ in range(run.number)]
    kinds = [run.kind for run in found.runs for _ in range(run.number)]
    assert sizes == [packet["len"] for packet in expected]
    assert [f"{0x77770000 + kind:#x}" for kind in kinds] == [p["id"] for p in expected]
    assert not found.skipped


def test_packets_with_garbage_around_each_are_found_in_whatever_pieces_they_come() -> None:
    packets = scan(6)
    stream = b"".join(packet + b"xyz" for packet in packets)
    for cut in range(0, len(stream), 7):
        first = framed(stream[:cut], is_end=False)
        rest = stream[first.end :]
        last = framed(rest)
        found = [stream[a:b] for run in first.runs for a, b in run.packets()]
        found += [rest[a:b] for run in last.runs for a, b in run.packets()]
        assert found == packets
        assert first.skipped_bytes + last.skipped_bytes == 3 * len(packets)


def test_garbage_between_pulses_costs_no_pulse() -> None:
    """LROSE's reader loses the rest of the file here."""
    damaged = WHOLE[: PULSES[4][1]] + bytes(range(35)) + WHOLE[PULSES[4][1] :]
    assert len(REAL["35 garbage bytes after pulse 4, no later sync or info packet"]["pulses"]) == 5
    found = framed(damaged)
    assert found.skipped == [(PULSES[4][1], PULSES[4][1] + 35)]
    assert pulses_in(damaged) == list(range(20))


def test_a_pulse_that_was_cut_off_costs_itself_alone() -> None:
    damaged = WHOLE[: PULSES[4][1] - 100] + WHOLE[PULSES[4][1] :]
    found = framed(damaged)
    assert found.skipped_bytes == 1180
    assert pulses_in(damaged) == [*range(4), *range(5, 20)]


def test_two_bytes_into_a_pulse_there_is_no_other_packet() -> None:
    """There stands the swapped id of a ts_processing packet, which LROSE takes for one."""
    inside = WHOLE[PULSES[3][0] + 2 :]
    assert inside[:4] == b"\x77\x77\x00\x05"
    found = framed(inside)
    assert found.skipped == [(0, 1278)]
    assert pulses_in(inside) == list(range(4, 20))


def test_a_lying_length_costs_the_packet_that_lies() -> None:
    for length in (57, 1281, LARGEST, LARGEST + 1, 2**31 - 1, -1):
        lying = bytearray(WHOLE)
        at = PULSES[7][0] + 4
        lying[at : at + 4] = length.to_bytes(4, "little", signed=True)
        framed(bytes(lying))
        assert pulses_in(bytes(lying)) == [*range(7), *range(8, 20)], length


def test_swapped_packets_are_read_as_well() -> None:
    """Headers of the other byte order, with samples of this one, are what LROSE reads."""
    swapped = bytearray()
    for run in frame(DATA).runs:
        for start, end in run.packets():
            size = layout_of(run.kind).itemsize
            head = np.frombuffer(WHOLE, layout_of(run.kind), 1, start)
            swapped += head.astype(layout_of(run.kind, ">")).tobytes() + WHOLE[start + size : end]
    found = frame(np.frombuffer(bytes(swapped), np.uint8))
    assert (found.packets, found.skipped) == (28, [])
    decoder = PulseDecoder()
    pulses = decoder.feed(bytes(swapped))
    plain = PulseDecoder().feed(DATA)
    assert (pulses.headers == plain.headers).all()
    assert (pulses.iq == plain.iq).all()
    # With swapped samples, too, it has to be told.
    for start, end in PULSES:
        samples = np.frombuffer(bytes(swapped[start + 256 : end]), "<f4").astype(">f4")
        swapped[start + 256 : end] = samples.tobytes()
    pulses = PulseDecoder(iq_order=">").feed(bytes(swapped))
    assert (pulses.iq == plain.iq).all()


@pytest.mark.parametrize("step", [1, 7, 1000, 4096])
def test_pieces_of_any_size_give_the_same_packets(step: int) -> None:
    data = WHOLE[:12_000] if step == 1 else WHOLE
    damaged = data[:7000] + b"\x77" * 9 + data[7000:]
    decoder, rest, found = PulseDecoder(), b"", []
    for at in range(0, len(damaged), step):
        rest += damaged[at : at + step]
        some = framed(rest, is_end=False)
        found += [rest[s:e] for run in some.runs for s, e in run.packets()]
        rest = rest[some.end :]
        decoder.feed(damaged[at : at + step], is_end=False)
    some = framed(rest)
    found += [rest[s:e] for run in some.runs for s, e in run.packets()]
    decoder.feed(b"")
    expected = framed(damaged)
    assert found == [damaged[s:e] for run in expected.runs for s, e in run.packets()]
    books = decoder.statistics()
    assert books.bytes == len(damaged) == books.packet_bytes + books.skipped_bytes
    assert books.packets == expected.packets


@given(st.binary(max_size=200))
def test_bytes_of_nothing_hold_no_packet(data: bytes) -> None:
    framed(data)
    framed(data, is_end=False)


SEEDS = [make(Kind(kind)) for kind in (1, 2, 3, 5, 8, 9, 0x0D, 0x12, 0x111)]
SEEDS += scan(3, gates=4, every=1000) + scan(2, gates=5, encoding=2, channels=1, every=1000)
MARKS = [
    b"\x77\x77",
    b"\x0c\x00\x77\x77",
    b"\x00\x05\x00\x00",
    b"\xff\xff\xff\x7f",
    b"\x05\x77\x77",
]


def mutated(rng: random.Random, packets: int) -> tuple[bytes, list[bytes]]:
    """Return packets back to back of which some are changed, and those that are not."""
    whole: list[bytes] = []
    data = bytearray()
    for _ in range(packets):
        packet = rng.choice(SEEDS)
        if rng.random() < 0.5:
            data += packet
            whole.append(packet)
            continue
        changed = bytearray(packet)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(changed) + 1)
            match rng.randrange(5):
                case 0:
                    changed[at : at + 1] = bytes([rng.randrange(256)])
                case 1:
                    changed[at:at] = rng.randbytes(rng.randrange(1, 9))
                case 2:
                    del changed[at : at + rng.randrange(1, 300)]
                case 3:
                    changed[at : at + 4] = rng.choice(MARKS)
                case _:
                    changed[4:8] = rng.randrange(-(2**31), 2**31).to_bytes(4, "little", signed=True)
        data += changed
    return bytes(data), whole


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(1_000_000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])]
)
def test_fuzz_changed_packets_are_read_or_skipped_and_no_byte_is_swallowed(count: int) -> None:
    rng = random.Random(count)
    done = found_whole = all_whole = 0
    while done < count:
        some = rng.randrange(1, 400)
        data, whole = mutated(rng, some)
        done += some
        found = framed(data)
        decoder = PulseDecoder()
        cut = rng.randrange(len(data) + 1)
        decoder.feed(data[:cut], is_end=False)
        decoder.feed(data[cut:], is_end=True)
        books = decoder.statistics()
        assert books.packet_bytes + books.skipped_bytes == len(data)
        there = {data[s:e] for run in found.runs for s, e in run.packets()}
        found_whole += sum(packet in there for packet in whole)
        all_whole += len(whole)
    # A change may hide the packet behind it, and nothing else.
    assert found_whole > 0.98 * all_whole
