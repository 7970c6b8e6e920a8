"""Our reader behind LROSE's server, the real one where there is one: exact, whatever that does."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.endpoints import create, open_reader, open_writer
from penstock.core.interfaces import Reader
from penstock.core.overflow import DropReason
from penstock.queue.classic.creation import open_device
from penstock.queue.classic.layout import STATUS_SIZE
from protocols.lrose.serving import served, served_as_lrose
from support.lrose_programs import dsfmq_server, needs_lrose, program

#: Writes numbered messages with a checksum, as LROSE's driver `fmq_live` does, at full speed.
WRITER = """
import hashlib, struct, sys
from penstock.core.endpoints import open_writer
with open_writer(sys.argv[1]) as writer:
    for number in range(int(sys.argv[2])):
        body = struct.pack("<IQ", 1, number) + bytes(number % 50)
        writer.write(body + hashlib.sha256(body).digest(), 1, number)
"""


@pytest.fixture(params=["emulated", pytest.param("real", marks=needs_lrose)])
def lrose(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of LROSE's server, or of one that reads as it does."""
    with (dsfmq_server if request.param == "real" else served_as_lrose)(tmp_path) as url:
        yield url


@pytest.fixture(params=["ours", "emulated", pytest.param("real", marks=needs_lrose)])
def any_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "ours":
        with served(tmp_path) as server:
            yield server.url
    else:
        with (dsfmq_server if request.param == "real" else served_as_lrose)(tmp_path) as url:
            yield url


def numbers(reader: Reader) -> list[int]:
    return [message.seq for message in reader.available()]


def write(path: Path, *payloads: bytes) -> None:
    with open_writer(f"fmq:{path}/q?layout=classic") as writer:
        for payload in payloads:
            writer.write(payload)


def test_places_are_those_of_now_on_a_connection_that_was_not_read_for_long(
    tmp_path: Path, lrose: str
) -> None:
    create(f"fmq:{tmp_path}/q?layout=classic&slots=10&size=10K")
    write(tmp_path, *[b"%d" % n for n in range(5)])
    with open_reader(f"{lrose}/q", "start") as reader:
        assert numbers(reader) == [0, 1, 2, 3, 4]
        assert reader.bounds()[1:3] == (0, 5)
        end = 5
        for more in (3, 1, 10, 27):  # less than a round, a whole one, and more
            write(tmp_path, *[b"%d" % n for n in range(end, end + more)])
            end += more
            oldest = max(0, end - 10)
            assert reader.newest_seq() == end - 1
            assert reader.bounds()[1:3] == (oldest, end)
            reader.seek("start")
            assert numbers(reader) == list(range(oldest, end))
            reader.seek(end - 4)
            assert numbers(reader) == list(range(end - 4, end))
            reader.seek("last")
            assert numbers(reader) == [end - 1]
            write(tmp_path, b"%d" % end)
            end += 1
            assert numbers(reader) == [end - 1]
            reader.seek("end")
            write(tmp_path, b"%d" % end)
            end += 1
            assert numbers(reader) == [end - 1]
        assert reader.statistics().lost == 0


def test_what_is_left_after_an_overrun_is_read_from_the_oldest_on(
    tmp_path: Path, lrose: str
) -> None:
    create(f"fmq:{tmp_path}/q?layout=classic&slots=10&size=10K")
    write(tmp_path, b"0", b"1")
    with open_reader(f"{lrose}/q", "start") as reader:
        assert numbers(reader) == [0, 1]
        write(tmp_path, *[b"%d" % n for n in range(2, 40)])
        assert [message.payload for message in reader.available()] == [
            b"%d" % n for n in range(30, 40)
        ]
        losses = reader.statistics().losses
        assert [(loss.first, loss.last, loss.reason) for loss in losses] == [
            (2, 29, DropReason.OVERRUN)
        ]


def test_a_writer_that_died_before_the_status_is_neither_a_loss_nor_a_new_queue(
    tmp_path: Path, lrose: str
) -> None:
    create(f"fmq:{tmp_path}/q?layout=classic&slots=10&size=10K")
    write(tmp_path, *[b"%d" % n for n in range(25)])
    device = open_device(f"{tmp_path}/q", writable=True)
    with open_reader(f"{lrose}/q", "start") as reader:
        assert numbers(reader) == list(range(15, 25))
        status = device.read_stat(0, STATUS_SIZE)
        write(tmp_path, b"25")
        device.write_stat(0, status)  # 25 is in the slot of 15, and not in the status
        reader.seek("start")
        assert numbers(reader) == list(range(16, 25))
        assert reader.bounds()[1:3] == (16, 25)
        write(tmp_path, b"25, written again", b"26")
        assert [message.payload for message in reader.available()][-2:] == [
            b"25, written again",
            b"26",
        ]
        books = reader.statistics()
        assert (books.lost, books.restarts) == (0, 0)
    device.close()


def test_a_queue_that_is_removed_and_made_anew_is_read_on_with_short_timeouts(
    tmp_path: Path, any_server: str
) -> None:
    write(tmp_path, *[b"old %d" % n for n in range(20)])
    found: list[bytes] = []
    with open_reader(f"{any_server}/q", "start") as reader:
        found += [message.payload for message in reader.read_many(10)]
        for part in ("stat", "buf"):
            (tmp_path / f"q.{part}").unlink()
        write(tmp_path, *[b"new %d" % n for n in range(30)])  # beyond where the reader is
        deadline = time.monotonic() + 20
        while len(found) < 50 and time.monotonic() < deadline:
            found += [message.payload for message in reader.read_many(100, timeout=0.01)]
        books = reader.statistics()
    assert found == [b"old %d" % n for n in range(20)] + [b"new %d" % n for n in range(30)]
    assert (books.lost, books.restarts) == (0, 1)


@pytest.mark.parametrize("count", [5, 20, 21, 60])
def test_a_queue_that_is_emptied_in_place_and_filled_again_is_noticed(
    tmp_path: Path, lrose: str, count: int
) -> None:
    write(tmp_path, *[b"old %d" % n for n in range(20)])
    with open_reader(f"{lrose}/q", "start") as reader:
        assert len(list(reader.available())) == 20
        create(f"fmq:{tmp_path}/q?layout=classic", replace=True)
        write(tmp_path, *[b"new %d" % n for n in range(count)])
        time.sleep(0.1)
        found = [message.payload for message in reader.read_many(count, timeout=5)]
        assert found == [b"new %d" % n for n in range(count)]
        assert reader.statistics().restarts == 1


@pytest.mark.parametrize(
    ("count", "slots", "pause"),
    [
        (4_000, 100, 0.002),
        pytest.param(100_000, 1000, 0.0, marks=pytest.mark.full),
        pytest.param(100_000, 100, 0.005, marks=pytest.mark.full),
        pytest.param(100_000, 20_000, 0.05, marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(600)
def test_beside_a_busy_writer_bounds_seeks_and_losses_are_exact(
    tmp_path: Path, lrose: str, count: int, slots: int, pause: float
) -> None:
    size = slots * 120
    create(f"fmq:{tmp_path}/q?layout=classic&slots={slots}&size={size}")
    command = [sys.executable, "-c", WRITER, f"fmq:{tmp_path}/q", str(count)]
    if "PENSTOCK_LROSE_BIN" in os.environ:
        live = [program("fmq_live"), "w", f"{tmp_path}/q", "300", "44", "100", str(slots)]
        command = [*live, str(size), "bwr", "0", "0", "0", "1", str(count)]
    found: list[int] = []
    looks = 0
    with (
        open_reader(f"fmq:{tmp_path}/q", "start") as here,
        open_reader(f"{lrose}/q", "start") as reader,
        open_reader(f"{lrose}/q", "start") as seeker,
        subprocess.Popen(command, stdout=subprocess.DEVNULL) as writer,
    ):
        while True:
            is_over = writer.poll() is not None
            messages = reader.read_many(1000, timeout=0.05)
            for message in messages:
                _, number = struct.unpack_from("<IQ", message.payload)
                assert number == message.seq == message.subtype
                assert hashlib.sha256(message.payload[:-32]).digest() == message.payload[-32:]
            found += [message.seq for message in messages]
            if is_over and not messages:
                break
            time.sleep(pause)
            looks += 1
            if looks % 5 == 0 and messages:
                before, told, after = here.bounds(), reader.bounds(), here.bounds()
                assert before.oldest <= told.oldest <= after.oldest
                assert before.end <= told.end <= after.end
                check_seeks(here, seeker)
        lost = reader.statistics()
    assert found == sorted(set(found))
    gaps = sorted(set(range(count)) - set(found))
    assert lost.restarts == 0
    assert lost.lost == len(gaps)
    assert [n for loss in lost.losses for n in range(loss.first, loss.last + 1)] == gaps


def check_seeks(here: Reader, seeker: Reader) -> None:
    """Seek to the start, to a number and to the end: what comes first is as it was asked for."""
    before = here.bounds()
    seeker.seek("start")
    first = seeker.read(0)
    after = here.bounds()
    assert first is None or before.oldest <= first.seq <= after.end
    if first is not None:
        # Later than the oldest only by what is counted as lost, or was overwritten meanwhile.
        assert first.seq <= after.oldest
    middle = (after.oldest + after.end) // 2
    lost = seeker.statistics().lost
    if middle < after.end:
        seeker.seek(middle)
        message = seeker.read(0)
        assert message is not None
        assert message.seq - middle == seeker.statistics().lost - lost
    before = here.bounds()
    seeker.seek("end")
    assert before.end <= (seeker.statistics().next_seq or 0) <= here.bounds().end
