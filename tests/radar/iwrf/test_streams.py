"""Pulses in files, in queues and over TCP are ordinary streams, with every packet in the books."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cli.command import run
from penstock.core.capabilities import Replayable
from penstock.core.endpoints import (
    create,
    describe,
    identity,
    open_reader,
    open_writer,
    remove,
)
from penstock.core.errors import (
    ConnectionLost,
    InvalidURL,
    Malformed,
    NotFound,
    PositionError,
    StorageError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.overflow import DropReason
from penstock.core.worker import Worker
from penstock.protocols.lrose.ds_message import DsMessage, Part
from penstock.queue.waiting import wait_any
from penstock.radar.iwrf import files
from penstock.radar.iwrf.framing import frame
from penstock.radar.iwrf.messages import Reminder, packets_of, words_of
from penstock.radar.iwrf.packets import ID_BASE, Kind, make
from penstock.radar.iwrf.packets import read as read_packet
from penstock.radar.iwrf.pulses import PulseDecoder
from penstock.radar.iwrf.tcp import IwrfTcpWriter
from penstock.relay import Relay, relay_options
from support import pulses
from support.pulses import VECTORS, metadata, scan, vector
from support.until import until
from support.waiting import SOON, background, waits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.core.interfaces import Reader


def pulse_numbers(payloads: Iterable[bytes]) -> list[int]:
    return [int(n) for n in PulseDecoder().feed(b"".join(payloads)).headers["pulse_seq_num"]]


def payloads_of(reader: Reader) -> list[bytes]:
    return [message.payload for message in reader.available()]


def read(url: str) -> list[bytes]:
    with open_reader(url) as reader:
        return payloads_of(reader)


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_its_packets_numbered_from_0(tmp_path: Path) -> None:
    data = vector("fl32").tobytes()
    (tmp_path / "x.iwrf_ts").write_bytes(data)
    with open_reader(f"iwrf:{tmp_path}/x.iwrf_ts") as reader:
        messages = list(reader.available())
        assert reader.bounds()[1:3] == (0, 28)
    assert b"".join(message.payload for message in messages) == data
    assert [message.seq for message in messages] == list(range(28))
    assert [message.type for message in messages] == [1, 2, 3, 5, 6, 8, 9, *[12] * 20, 9]
    assert messages[7].time_ns == 1750000000_500_000_000
    with open_reader(f"iwrf:{tmp_path}?type=12") as reader:
        assert len(payloads_of(reader)) == 20
        assert reader.statistics().filtered == 8


def test_a_directory_has_files_of_the_names_that_lrose_gives_them(tmp_path: Path) -> None:
    packets = scan(400, every=50, encoding=2)
    with open_writer(f"iwrf:{tmp_path}/ts?seconds=0.1") as writer:
        writer.write_many(packets)
        assert writer.statistics().messages == len(packets)
    names = sorted(str(path.relative_to(tmp_path / "ts")) for path in tmp_path.rglob("*.iwrf_ts"))
    assert names == [
        "20250615/20250615_150640.000_005_000.sim.scaled.iwrf_ts",
        "20250615/20250615_150640.100_005_025.sim.scaled.iwrf_ts",
        "20250615/20250615_150640.200_005_050.sim.scaled.iwrf_ts",
        "20250615/20250615_150640.300_005_075.sim.scaled.iwrf_ts",
    ]
    found = read(f"iwrf:{tmp_path}/ts")
    assert pulse_numbers(found) == list(range(400))
    for path in (tmp_path / "ts").rglob("*.iwrf_ts"):  # each can be read by itself
        decoder = PulseDecoder()
        decoder.feed(path.read_bytes())
        assert decoder.state.is_ready
        assert path.read_bytes()[56:64] == b"\x2a" * 4 + b"\x7e" * 4


def test_what_is_in_files_is_counted_when_the_next_file_cannot_be_made(tmp_path: Path) -> None:
    folder = tmp_path / "ts"
    packets = scan(200, every=50, encoding=2)
    in_the_way = folder / "20250615" / "20250615_150640.100_005_025.sim.scaled.iwrf_ts"
    in_the_way.mkdir(parents=True)
    with open_writer(f"iwrf:{folder}?seconds=0.1&repeat=0") as writer:
        with pytest.raises(StorageError):
            writer.write_many(packets)
        books = writer.statistics()
        written = read(f"iwrf:{in_the_way.parent}/20250615_150640.000_005_000.sim.scaled.iwrf_ts")
        assert pulse_numbers(written) == list(range(100))
        first = packets[: books.messages]  # and what the file begins with: sync words
        assert written[1:] == first
        assert books.bytes == sum(map(len, first))
        in_the_way.rmdir()
        writer.write_many(packets[books.messages :])
        assert writer.statistics().messages == len(packets)
    assert pulse_numbers(read(f"iwrf:{folder}")) == list(range(200))


def test_a_message_of_many_pulses_is_in_one_file(tmp_path: Path) -> None:
    packets = scan(300, every=1000)
    with open_writer(f"iwrf:{tmp_path}/ts?seconds=0.1") as writer:
        writer.write_many(
            [b"".join(packets[:84]), b"".join(packets[84:204]), b"".join(packets[204:])]
        )
    counts = [pulse_numbers(read(f"iwrf:{path}")) for path in sorted(tmp_path.rglob("*.iwrf_ts"))]
    assert [(numbers[0], numbers[-1]) for numbers in counts] == [(0, 199), (200, 299)]


def test_files_are_followed_as_they_grow_and_as_others_come(tmp_path: Path) -> None:
    first, second = tmp_path / "20250615_1.iwrf_ts", tmp_path / "20250615_2.iwrf_ts"
    packets = scan(30)
    data = b"".join(packets)
    first.write_bytes(data[:5000])
    with open_reader(f"iwrf:{tmp_path}") as reader:
        got = payloads_of(reader)
        with first.open("ab") as file:
            file.write(data[5000:-10])
        while message := reader.read(1.0):
            got.append(message.payload)
            if len(got) == len(packets) - 1:
                break
        assert reader.read(0) is None
        with first.open("ab") as file:
            file.write(data[-10:])
        second.write_bytes(b"".join(scan(5, first=30)))
        while (message := reader.read(2.0)) and len(got) < len(packets) + 5:
            got.append(message.payload)
            if len(got) == len(packets) + 5:
                break
        assert pulse_numbers(got) == list(range(35))
        assert reader.statistics().lost == 0


def test_what_is_there_now_is_read_also_if_the_radars_clock_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulses, "T0", time.time_ns() + 3600 * 1_000_000_000)
    first, second = tmp_path / "1.iwrf_ts", tmp_path / "2.iwrf_ts"
    first.write_bytes(b"".join(scan(30)))
    second.write_bytes(b"".join(scan(10, first=30)))
    with open_reader(f"iwrf:{tmp_path}") as reader:
        there = reader.available()
        got = [next(there).payload]
        got += [message.payload for message in there]
        assert pulse_numbers(got) == list(range(40))
        with second.open("ab") as file:
            file.write(b"".join(scan(5, first=40)))
        assert pulse_numbers(payloads_of(reader)) == list(range(40, 45))
        assert payloads_of(reader) == []


def test_a_file_that_comes_too_late_is_said_once_and_its_packets_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packets = scan(40, every=1000)
    (tmp_path / "20250615_2.iwrf_ts").write_bytes(b"".join(packets))
    late = tmp_path / "20250615_1.iwrf_ts"  # as after a clock was set back
    with open_reader(f"iwrf:{tmp_path}") as reader:
        assert len(payloads_of(reader)) == len(packets)
        late.write_bytes(b"".join(packets[:10]))
        until(lambda: not reader.read(0) and reader.statistics().lost == 10)
        late.write_bytes(b"".join(packets[:15]))
        until(lambda: not reader.read(0) and reader.statistics().lost == 15)
        (tmp_path / "20250615_3.iwrf_ts").write_bytes(b"".join(packets))
        found = reader.read_batch(len(packets), timeout=10)
        assert found.column("payload").to_pylist() == packets
        assert {loss.reason for loss in reader.statistics().losses} == {DropReason.EXPIRED}
    assert caplog.text.count("came too late") == 1


def test_numbers_behind_a_file_that_came_late_are_of_another_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packets, folder = scan(20, every=1000), tmp_path / "radar"
    folder.mkdir()
    for name in "13":
        (folder / f"{name}.iwrf_ts").write_bytes(b"".join(packets))
    target, state = f"log:{tmp_path}/copy", tmp_path / "state"

    def copied() -> tuple[int, int]:
        options = relay_options(
            source=f"iwrf:{folder}", target=target, state=state, follow=False, batch=7
        )
        with open_reader(options.source) as reader, open_writer(target) as writer:
            books = Relay(reader, writer, options).run()
        return books.copied, books.in_doubt

    assert copied() == (2 * len(packets), 0)
    (folder / "4.iwrf_ts").write_bytes(b"".join(packets))
    assert copied() == (len(packets), 0), "a file at the end shifts no number"
    with open_reader(f"iwrf:{folder}") as reader:
        before = reader.bounds()
        reader.read_many(len(packets))
        assert isinstance(reader, Replayable)
        first = reader.epoch
    (folder / "2.iwrf_ts").write_bytes(b"".join(packets))
    with open_reader(f"iwrf:{folder}") as reader:
        now = reader.bounds()
    assert now.successor(before.epoch, before.end) is None
    assert first is not None
    assert now.successor(first, len(packets)) == len(packets), "these are as they were"
    assert copied() == (4 * len(packets), 3 * len(packets)), "three files come twice"
    assert "was created anew since it was copied" in caplog.text
    (folder / "1.iwrf_ts").unlink()
    assert copied() == (3 * len(packets), 3 * len(packets)), "all that is left comes twice"


def test_a_reader_stands_anywhere(tmp_path: Path) -> None:
    for part in range(3):
        name = tmp_path / f"{part}.iwrf_ts"
        name.write_bytes(b"".join(scan(20, first=part * 20, every=1000)))
    all_of_it = read(f"iwrf:{tmp_path}")
    assert len(all_of_it) == 64
    with open_reader(f"iwrf:{tmp_path}", start="end") as reader:
        assert reader.read(0) is None
        for seq in (0, 1, 23, 24, 25, 63, 40):
            reader.seek(seq)
            message = reader.read(0)
            assert message is not None
            assert (message.seq, message.payload) == (seq, all_of_it[seq])
        reader.seek("last")
        assert reader.read_batch(10).column("seq").to_pylist() == [63]
        reader.seek("2025-06-15T15:06:40.030Z")
        message = reader.read(0)
        assert message is not None
        assert pulse_numbers([message.payload]) == [30]
        with pytest.raises(PositionError):
            reader.seek(65)


def test_damage_is_counted_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 2000)  # so that it lies across pieces, too
    data = b"".join(scan(50, gates=50))
    at = data.index(b"\x0c\x00\x77\x77", 9000)  # a pulse
    (tmp_path / "1.iwrf_ts").write_bytes(data[:at] + bytes(77) + data[at:-3])
    (tmp_path / "2.iwrf_ts").write_bytes(b"".join(scan(5, first=50)))
    with open_reader(f"iwrf:{tmp_path}") as reader:
        got = payloads_of(reader)
        books = reader.statistics()
        total = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert sum(map(len, got)) + reader.skipped_bytes == total  # type: ignore[attr-defined]
        assert books.lost == len(books.losses) == 2
    numbers = pulse_numbers(got)
    assert len(numbers) == 54  # one was cut off
    assert numbers[-5:] == list(range(50, 55))
    info = describe(f"iwrf:{tmp_path}")
    assert info.details["bytes_that_are_no_packet"] > 77
    assert run("cat", f"iwrf:{tmp_path}").returncode == 3


def test_each_stretch_of_damage_is_lost_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packets = scan(60, every=1000)
    for at, length in ((30, 2**31 - 1), (20, -5), (10, 9_000_000)):
        hostile = bytearray(packets[at])
        hostile[4:8] = (length & 0xFFFFFFFF).to_bytes(4, "little")
        packets.insert(at, bytes(hostile))
    (tmp_path / "1.iwrf_ts").write_bytes(b"".join(packets))
    with open_reader(f"iwrf:{tmp_path}") as reader:
        assert len(payloads_of(reader)) == 64
        books = reader.statistics()
    assert [loss.first for loss in books.losses] == [10, 20, 30]
    assert books.lost == 3
    assert "bytes of 1.iwrf_ts in 3 places are no packet" in caplog.text


def test_packets_of_a_file_that_is_removed_before_it_is_read_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / f"{part}.iwrf_ts" for part in range(3)]
    for part, path in enumerate(paths):
        path.write_bytes(b"".join(scan(10, first=part * 10, every=1000, flags=False)[-10:]))
    with open_reader(f"iwrf:{tmp_path}") as reader:
        assert isinstance(reader, Replayable)
        assert reader.bounds().end == 30
        assert len(reader.read_many(10)) == 10
        paths[0].unlink()  # it was read
        paths[1].unlink()
        messages = list(reader.available())
        assert [message.seq for message in messages] == list(range(20, 30))
        assert pulse_numbers(message.payload for message in messages) == list(range(20, 30))
        books = reader.statistics()
        assert [(loss.first, loss.last, loss.reason) for loss in books.losses] == [
            (10, 19, DropReason.RETENTION)
        ]
        assert reader.bounds().end == 30
        reader.seek(25)
        message = reader.read(0)
        assert message is not None
        assert message.payload == messages[5].payload
        assert reader.statistics().lost == 10
    assert "0.iwrf_ts was removed" not in caplog.text
    assert caplog.text.count("was removed before it was read") == 1


def test_a_removed_file_that_nobody_counted_is_one_loss(tmp_path: Path) -> None:
    paths = [tmp_path / f"{part}.iwrf_ts" for part in range(3)]
    for part, path in enumerate(paths):
        path.write_bytes(b"".join(scan(10, first=part * 10, every=1000, flags=False)[-10:]))
    with open_reader(f"iwrf:{tmp_path}") as reader:
        assert isinstance(reader, Replayable)
        assert len(reader.read_many(10)) == 10
        paths[0].unlink()
        paths[1].unlink()
        assert [message.seq for message in reader.available()] == list(range(11, 21))
        assert [(loss.first, loss.last) for loss in reader.statistics().losses] == [(10, 10)]
        assert reader.bounds().end == 21


def test_a_file_that_grew_since_it_was_counted_and_is_removed_while_it_is_read_is_one_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK", 4000)
    packets = scan(200, every=1000, flags=False)[-200:]
    path = tmp_path / "0.iwrf_ts"
    path.write_bytes(b"".join(packets[:2]))
    with open_reader(f"iwrf:{tmp_path}") as reader:
        assert isinstance(reader, Replayable)
        assert reader.bounds().end == 2
        with path.open("ab") as file:
            file.write(b"".join(packets[2:]))
        read = len(reader.read_many(5))
        path.unlink()
        read += len(list(reader.available()))
        assert 2 < read < 200
        assert [(loss.first, loss.last) for loss in reader.statistics().losses] == [(read, read)]


def test_damage_before_the_place_that_is_sought_is_not_lost(tmp_path: Path) -> None:
    packets = scan(20, every=1000, flags=False)[-20:]
    data = [*packets[:5], bytes(77), *packets[5:15], bytes(77), *packets[15:]]
    (tmp_path / "1.iwrf_ts").write_bytes(b"".join(data))
    with open_reader(f"iwrf:{tmp_path}", start="end") as reader:
        assert reader.statistics().lost == 0
        for place in (12, "2025-06-15T15:06:40.012Z"):
            before = reader.statistics().lost
            reader.seek(place)
            assert payloads_of(reader) == packets[12:]
            assert reader.statistics().lost == before + 1
        assert {loss.first for loss in reader.statistics().losses} == {15}
        assert reader.skipped_bytes == 2 * 77  # type: ignore[attr-defined]


def test_half_a_packet_at_the_end_is_waited_for_and_then_lost(tmp_path: Path) -> None:
    path, data = tmp_path / "x.iwrf_ts", vector("fl32").tobytes()
    path.write_bytes(data[:-100])
    with open_reader(f"iwrf:{path}") as reader:
        assert len(payloads_of(reader)) == 27
        assert reader.statistics().lost == 0  # its writer may be at it
        with path.open("ab") as file:
            file.write(data[-100:])
        assert len(payloads_of(reader)) == 1
    path.write_bytes(data[:-100])
    before = time.time() - 3600
    os.utime(path, (before, before))
    with open_reader(f"iwrf:{path}") as reader:
        got = payloads_of(reader)
        assert sum(map(len, got)) + reader.skipped_bytes == len(data) - 100  # type: ignore[attr-defined]
        assert [(loss.first, loss.reason) for loss in reader.statistics().losses] == [
            (27, DropReason.DAMAGED)
        ]
    assert describe(f"iwrf:{path}").details["bytes_that_are_no_packet"] == 28
    copied = run("cp", f"iwrf:{path}", f"log:{tmp_path}/copied")
    assert copied.returncode == 3
    assert b"28 bytes of x.iwrf_ts are no packet" in copied.stderr


@pytest.mark.parametrize("written", [0, 100])
def test_a_file_without_a_whole_packet_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    monkeypatch.setattr(files, "_LOOK_AROUND", 0.0)
    first, second, third = scan(3, every=1000, flags=False)[-3:]
    paths = [tmp_path / f"{part}.iwrf_ts" for part in range(3)]
    paths[0].write_bytes(first)
    paths[1].write_bytes(second[:written])
    with open_reader(f"iwrf:{tmp_path}") as reader:
        assert len(list(reader.available())) == 1
        assert reader.read(0) is reader.read(0.1) is None
        assert len(wait_any([reader], timeout=0.1)) == 0
        assert describe(f"iwrf:{tmp_path}").count == 1
        with paths[1].open("ab") as file:
            file.write(second[written:])
        assert payloads_of(reader) == [second]
        paths[2].write_bytes(third[:written])
        assert reader.read(0) is None
        paths[2].write_bytes(third)
        assert payloads_of(reader) == [third]
        assert reader.statistics().lost == 0


@pytest.mark.parametrize("written", [0, 100])
def test_a_file_that_never_gets_a_whole_packet_holds_up_nothing_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    monkeypatch.setattr(files, "_LOOK_AROUND", 0.0)
    first, second = scan(2, every=1000, flags=False)[-2:]
    (tmp_path / "0.iwrf_ts").write_bytes(first[:written])
    with open_reader(f"iwrf:{tmp_path}") as reader:
        assert reader.read(0) is None
        (tmp_path / "1.iwrf_ts").write_bytes(second)
        assert payloads_of(reader) == [second]
        assert reader.skipped_bytes == written  # type: ignore[attr-defined]
        assert reader.statistics().lost == (1 if written else 0)


def test_what_is_no_packet_is_not_written(tmp_path: Path) -> None:
    with open_writer(f"iwrf:{tmp_path}/ts") as writer:
        writer.write_many(scan(3))
        with pytest.raises(Malformed, match="byte 0"):
            writer.write(b"hello")
        assert writer.statistics().refused == 1
    assert len(pulse_numbers(read(f"iwrf:{tmp_path}/ts"))) == 3


def test_what_no_pulse_has_followed_is_in_a_file_when_it_is_flushed(tmp_path: Path) -> None:
    said = metadata()
    with open_writer(f"iwrf:{tmp_path}/ts") as writer:
        writer.write_many(said)
        writer.flush()
        assert read(f"iwrf:{tmp_path}/ts")[-len(said) :] == said
        assert writer.statistics().messages == len(said)


def test_a_full_disk_leaves_no_half_packet(tmp_path: Path) -> None:
    folder = tmp_path / "ts"
    with open_writer(f"iwrf:{folder}") as writer:
        writer.write_many(scan(5))
        (path,) = folder.rglob("*.iwrf_ts")
        before = path.read_bytes()
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        try:
            with pytest.raises(StorageError):
                writer.write_many(scan(5, first=5))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert path.read_bytes() == before
        writer.write_many(scan(5, first=5))
    assert pulse_numbers(read(f"iwrf:{folder}")) == list(range(10))


WRITER = """
import sys
from penstock import open_writer
from support.pulses import scan
with open_writer(sys.argv[1]) as writer:
    for k in range(0, 100000, 10):
        writer.write_many(scan(10, first=k, gates=200))
        print(k, flush=True)
"""


def test_a_killed_writer_leaves_whole_packets(tmp_path: Path) -> None:
    url = f"iwrf:{tmp_path}/ts"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(20)]
    process.send_signal(signal.SIGKILL)
    said += [int(line) for line in process.communicate()[0].split()]
    numbers = pulse_numbers(read(url))
    assert numbers[: said[-1] + 10] == list(range(said[-1] + 10))


def test_places_that_are_not_there_are_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        open_reader(f"iwrf:{tmp_path}/nothing")
    with pytest.raises(InvalidURL):
        open_reader("iwrf://host/path")
    (tmp_path / "rvp.iwrf_ts").write_bytes(b"rvp8PulseInfo start\n" + bytes(100))
    with pytest.raises(Malformed, match="RVP8"):
        read(f"iwrf:{tmp_path}")
    with pytest.raises(InvalidURL):
        open_reader("iwrf+tcp://127.0.0.1")


# --- queues ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fl32", "si16"])
def test_a_queue_of_lrose_is_read(tmp_path: Path, name: str) -> None:
    folder = VECTORS / "fmq"
    (tmp_path / "q.stat").write_bytes((folder / f"{name}.stat").read_bytes())
    (tmp_path / "q.buf").write_bytes(gzip.decompress((folder / f"{name}.buf.gz").read_bytes()))
    found = read(f"iwrf+fmq:{tmp_path}/q?trace=false")
    assert pulse_numbers(found) == list(range(900_000, 900_020))
    plain = PulseDecoder().feed(vector(name))
    assert (PulseDecoder().feed(b"".join(found)).iq == plain.iq).all()


def test_packets_come_back_from_a_queue_with_the_metadata_said_again(tmp_path: Path) -> None:
    packets = scan(3000, every=10_000, gates=2)
    url = f"iwrf+fmq:{tmp_path}/q"
    with open_writer(f"{url}?parts=100") as writer:
        writer.write_many(packets)
        assert writer.statistics().messages == len(packets)
    with open_reader(url) as reader:
        messages = list(reader.available())
        assert reader.bounds()[1:3] == (0, len(messages))
    assert pulse_numbers(m.payload for m in messages) == list(range(3000))
    assert max(len(packets_of(m.payload)) for m in messages) <= 104
    kinds = [kind for m in messages for kind, _ in packets_of(m.payload)]
    assert kinds.count(Kind.RADAR_INFO) == 3  # three seconds
    late = b"".join(m.payload for m in messages[len(messages) // 3 :])
    decoder = PulseDecoder()
    decoder.feed(late)
    assert decoder.state.is_ready


def test_a_queue_is_waited_for(tmp_path: Path) -> None:
    url = f"iwrf+fmq:{tmp_path}/q"

    def write_late(_: Worker) -> None:
        time.sleep(0.2)
        with open_writer(url) as writer:
            writer.write_many(scan(3))

    worker = Worker("radar", write_late, log=logging.getLogger("test")).start()
    with open_reader(f"{url}?wait=20s") as reader:
        message = reader.read(timeout=20)
    worker.join(5)
    assert message is not None
    assert pulse_numbers([message.payload]) == [0, 1, 2]
    with pytest.raises(NotFound):
        open_reader(f"iwrf+fmq:{tmp_path}/none")


def test_a_message_of_something_else_is_lost_with_a_reason(tmp_path: Path) -> None:
    with open_writer(f"fmq:{tmp_path}/q?layout=classic") as queue:
        pulse = scan(1, every=2, first=1)[0]
        queue.write(b"nonsense")
        queue.write(DsMessage(0, category=0, parts=(Part(99, b"x"),)).to_bytes())
        queue.write(DsMessage(0, category=0).to_bytes())
        part = Part(ID_BASE + Kind.PULSE, pulse)
        queue.write(DsMessage(0, category=0, parts=(part, part)).to_bytes())
    with open_reader(f"iwrf+fmq:{tmp_path}/q") as reader:
        assert payloads_of(reader) == [pulse + pulse]
        books = reader.statistics()
    assert (books.messages, books.lost) == (1, 3)


def test_a_queue_has_the_identity_of_the_queue_that_it_is(tmp_path: Path) -> None:
    assert identity(f"iwrf+fmq:{tmp_path}/q?parts=5") == identity(f"fmq:{tmp_path}/q")


def test_a_queue_of_pulses_is_removed_unless_it_is_on_another_machine(tmp_path: Path) -> None:
    create(f"iwrf+fmq:{tmp_path}/q")
    remove(f"iwrf+fmq:{tmp_path}/q?parts=5")
    assert not list(tmp_path.iterdir())
    with pytest.raises(Unsupported, match="iwrf\\+fmqp: cannot be removed from here"):
        remove("iwrf+fmqp://127.0.0.1:1/q")


# --- TCP ------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterable[IwrfTcpWriter]:
    with open_writer("iwrf+tcp://127.0.0.1:0?wait=20s") as writer:
        assert isinstance(writer, IwrfTcpWriter)
        yield writer


def test_all_who_are_connected_get_every_packet_and_who_comes_late_the_metadata(
    served: IwrfTcpWriter,
) -> None:
    packets = scan(200, every=1000)
    url = f"iwrf+tcp://127.0.0.1:{served.port}"
    got: list[list[bytes]] = [[], []]
    with open_reader(url) as early:
        served.write_many(packets[:100])
        with open_reader(url) as late:
            until(lambda: len(served._hub.outlets) == 2)
            served.write_many(packets[100:])
            served.flush()
            for reader, found in zip((early, late), got, strict=True):
                while message := reader.read(1.0):
                    found.append(message.payload)
                    if message.payload == packets[-1]:
                        break
    assert pulse_numbers(got[0]) == list(range(200))
    decoder = PulseDecoder()
    assert decoder.feed(b"".join(got[1])).headers["pulse_seq_num"].tolist() == list(range(96, 200))
    assert decoder.state.is_ready


def test_a_server_that_ends_is_told_and_tried_again() -> None:
    with open_writer("iwrf+tcp://127.0.0.1:0") as writer:
        assert isinstance(writer, IwrfTcpWriter)
        port = writer.port
        reader = open_reader(f"iwrf+tcp://127.0.0.1:{port}")
        writer.write_many(scan(10))
    with reader:
        assert len(reader.read_many(100, 5.0)) == 14
        with pytest.raises(ConnectionLost, match="ended"):
            reader.read(5.0)
        with pytest.raises(ConnectionLost):
            reader.read(1.0)  # nobody listens there any more
        with open_writer(f"iwrf+tcp://127.0.0.1:{port}") as writer:
            assert reader.read(0) is None
            writer.write_many(scan(1, first=10))
            assert reader.read(5.0) is not None


def test_what_a_radar_sends_ends_the_wait_for_it() -> None:
    with open_writer("iwrf+tcp://127.0.0.1:0") as writer:
        assert isinstance(writer, IwrfTcpWriter)
        reader = open_reader(f"iwrf+tcp://127.0.0.1:{writer.port}")
        with background(wait_any, [reader], SOON) as call:
            assert waits(call)
            writer.write_many(scan(10))
            assert call.result(SOON) == [reader]
        assert reader.read(0) is not None
    with reader:
        while reader.read_many(100):
            assert wait_any([reader], SOON) == [reader]  # last, for the end of the connection
            if reader.statistics().messages == 14:
                break
        assert wait_any([reader], SOON) == [reader]
        with pytest.raises(ConnectionLost, match="ended"):
            reader.read(0)
        assert reader.statistics().messages == 14


def test_a_file_of_pulses_ends_the_wait_when_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "20250615_1.iwrf_ts"
    data = b"".join(scan(30))
    path.write_bytes(data[:5000])
    with open_reader(f"iwrf:{path}") as reader:
        assert wait_any([reader], SOON) == [reader]
        assert len(list(reader.available())) == reader.statistics().messages > 0
        assert wait_any([reader], 0) == []
        with path.open("ab") as file:
            file.write(data[5000:])
        assert wait_any([reader], SOON) == [reader]
        assert reader.read(0) is not None


def test_packets_of_another_kind_do_not_end_the_wait_for_those_that_are_wanted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "20250615_1.iwrf_ts"
    notes, pulse = make(Kind.RADAR_INFO, time_ns=1) * 5, scan(1)[-1]
    path.write_bytes(notes)
    with open_reader(f"iwrf:{path}?type=12") as reader:
        assert wait_any([reader], 0.05) == []
        assert reader.statistics().filtered == 5
        with path.open("ab") as file:
            file.write(notes + pulse + notes)
        assert wait_any([reader], SOON) == [reader]
        assert reader.statistics().filtered == 10
        assert payloads_of(reader) == [pulse]
        assert wait_any([reader], 0) == []
        assert reader.statistics().filtered == 15
        assert reader.statistics().backlog == 0


def test_a_flush_waits_until_the_kernel_has_everything_for_every_client(
    served: IwrfTcpWriter,
) -> None:
    payload = b"".join(scan(40, gates=1000)) * 30  # more than the kernel takes
    assert len(payload) > 12 << 20
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        served.write(payload)
        until(lambda: not any(each.waiting for each in served._hub.outlets))
        with background(served.flush) as call:
            assert waits(call)  # its session has the bytes, and the client has not
            got = 0
            while got < len(payload):
                got += len(client.recv(1 << 20))
            call.result(SOON)
    with socket.create_connection(("127.0.0.1", served.port)):
        until(lambda: len(served._hub.outlets) == 1)
        served.write(payload)
    served.flush()  # it has left, and nobody else is there


def test_what_a_client_left_behind_and_no_other_took_is_counted(served: IwrfTcpWriter) -> None:
    payload = b"".join(scan(40, gates=1000)) * 30  # more than the kernel takes
    address = ("127.0.0.1", served.port)
    with socket.create_connection(address):
        for _ in range(2):
            served.write(payload)
    until(lambda: served.statistics().untaken == 2)
    with socket.create_connection(address) as client, socket.create_connection(address):
        until(lambda: len(served._hub.outlets) == 2)
        served.write(payload)
        got = 0
        while got < len(payload):
            got += len(client.recv(1 << 20))
    until(lambda: not served._hub.outlets)
    books = served.statistics()
    assert (books.messages, books.untaken) == (3, 2)


def test_nobody_there_is_an_error_after_a_while(served: IwrfTcpWriter) -> None:
    with (
        open_writer("iwrf+tcp://127.0.0.1:0?wait=50ms") as writer,
        pytest.raises(WriteTimeout, match="nobody"),
    ):
        writer.write(scan(1)[0])
    with pytest.raises(ConnectionLost):
        open_reader("iwrf+tcp://127.0.0.1:1")
    assert served.port


def test_bytes_between_packets_are_skipped_and_counted() -> None:
    packets = scan(6)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def send(_: Worker) -> None:
            peer, _address = listener.accept()
            with peer:
                for packet in packets:
                    peer.sendall(packet[:50])
                    time.sleep(0.002)
                    peer.sendall(packet[50:] + b"xyz")

        worker = Worker("sender", send, log=logging.getLogger("test")).start()
        with open_reader(f"iwrf+tcp://127.0.0.1:{port}") as reader:
            got: list[bytes] = []
            with contextlib.suppress(ConnectionLost):
                while message := reader.read(5.0):
                    got.append(message.payload)
            assert got == packets
            assert reader.skipped_bytes == 3 * len(packets)  # type: ignore[attr-defined]
            assert reader.statistics().lost
        worker.join(5)


# --- commands -------------------------------------------------------------------------------------


def test_commands_show_copy_and_describe_pulses(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.iwrf_ts").write_bytes(b"".join(scan(40)))
    shown = run("cat", f"iwrf:{tmp_path}/in", "--type", "12", "-n", "1")
    assert (
        "pulse 0, az 0.00° el 0.50°, 8 gates x 2 channels FL32, prt 1 ms" in shown.stdout.decode()
    )
    assert run("cp", f"iwrf:{tmp_path}/in", f"iwrf+fmq:{tmp_path}/q").returncode == 0
    assert run("cp", f"iwrf+fmq:{tmp_path}/q", f"iwrf:{tmp_path}/out").returncode == 0
    assert pulse_numbers(read(f"iwrf:{tmp_path}/out")) == list(range(40))
    told = run("info", f"iwrf+fmq:{tmp_path}/q")
    for words in ("TEST", "Testville", "1 ms", "FL32", "150 m"):
        assert words in told.stdout.decode()


def test_words_say_what_several_packets_are() -> None:
    packets = scan(10)
    said = words_of(b"".join(packets) + b"???")
    assert said.startswith("10 pulses 0 to 9, az 0.00 to 2.25° el 0.50°")
    assert "radar_info" in said
    assert "3 bytes that are no packet" in said
    assert words_of(packets[0]).startswith("radar_info (radar_name 'TEST'")
    assert words_of(b"") == "no packet"


def test_what_two_units_say_of_where_a_radar_is_is_said_again() -> None:
    reminder = Reminder(1.0)
    said = [make(Kind.PLATFORM_GEOREF, unit_num=unit, latitude=50.0 + unit) for unit in (1, 0)]
    for packet in [*said, make(Kind.PLATFORM_GEOREF, unit_num=1, latitude=60.0)]:
        reminder.note(Kind.PLATFORM_GEOREF, packet)
    again = reminder.packets(0, sync=False)
    assert [kind for kind, _ in again] == [Kind.PLATFORM_GEOREF] * 2
    assert sorted(float(read_packet(packet)["latitude"][0]) for _, packet in again) == [50.0, 60.0]


def test_metadata_is_said_again_when_it_was_not_said_for_a_while() -> None:
    reminder = Reminder(1.0)
    assert not reminder.is_due(0)
    for packet in metadata(0):
        reminder.note(packet[0] | packet[1] << 8, packet)
    assert not reminder.is_due(999_999_999)
    assert reminder.is_due(1_000_000_000)
    again = reminder.packets(1_000_000_000, sync=True)
    assert [kind for kind, _ in again] == [1, 2, 3, 5, 8]
    assert not reminder.is_due(1_500_000_000)
    assert frame(np.frombuffer(b"".join(p for _, p in again), np.uint8)).packets == 5
    assert not Reminder(0).is_due(10**18)
    notice = make(Kind.EVENT_NOTICE, end_of_volume=1)
    reminder.note(Kind.EVENT_NOTICE, notice)
    assert Kind.EVENT_NOTICE not in dict(reminder.packets(0, sync=False))
