"""Packets in queues behind a server of LROSE's protocol: ours, one with its ways, and its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.command import run
from penstock.core.endpoints import describe, open_reader, open_writer
from penstock.core.worker import Worker
from penstock.radar.iwrf.pulses import PulseDecoder, Pulses
from protocols.lrose.serving import served, served_as_lrose
from support.lrose_programs import dsfmq_server, needs_lrose
from support.lrose_radar import iwrf_read, needs_lrose_radar, pulses_of
from support.pulses import scan


@pytest.fixture(params=["ours", "emulated", pytest.param("real", marks=needs_lrose)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "ours":
        with served(tmp_path) as ours:
            yield ours.url
    else:
        with (dsfmq_server if request.param == "real" else served_as_lrose)(tmp_path) as url:
            yield url


def decoded(url: str) -> Pulses:
    decoder = PulseDecoder()
    with open_reader(url, "start") as reader:
        pulses = decoder.feed(b"".join(message.payload for message in reader.available()))
        assert reader.statistics().lost == 0
    assert decoder.state.is_ready
    return pulses


def test_packets_go_into_a_remote_queue_and_come_back(server: str, tmp_path: Path) -> None:
    packets = scan(500, every=10_000, gates=20, encoding=2)
    expected = PulseDecoder().feed(b"".join(packets))
    url = f"iwrf+{server}/q"
    with open_writer(f"{url}?parts=50") as writer:
        writer.write_many(packets[:200])
        writer.write_many(packets[200:])
        assert writer.statistics().messages == len(packets)
    for place in (url, f"iwrf+fmq:{tmp_path}/q"):  # the same by its files
        found = decoded(place)
        assert found.headers["pulse_seq_num"].tolist() == list(range(500))
        assert (found.iq == expected.iq).all()
    details = describe(url).details
    assert (details["radar"], details["gates"], details["channels"]) == ("TEST", 20, 2)


def test_a_remote_queue_is_followed_while_a_radar_writes(server: str, tmp_path: Path) -> None:
    local = f"iwrf+fmq:{tmp_path}/q?parts=20"
    with open_writer(local) as writer:
        writer.write_many(scan(100, every=50))

        def write_on(_: Worker) -> None:
            for first in range(100, 1000, 50):
                writer.write_many(scan(50, first=first, every=50))

        with open_reader(f"iwrf+{server}/q", "end") as reader:
            worker = Worker("radar", write_on, log=logging.getLogger("test")).start()
            decoder = PulseDecoder()
            numbers: list[int] = []
            while len(numbers) < 900:
                some = reader.read_many(10, 10.0)
                assert some, numbers[-1:]
                got = decoder.feed(b"".join(message.payload for message in some))
                numbers += got.headers["pulse_seq_num"].tolist()
            assert worker.join(10)
    assert numbers == list(range(100, 1000))


@pytest.mark.parametrize("server", ["ours"], indirect=True)
def test_commands_archive_a_remote_queue(server: str, tmp_path: Path) -> None:
    with open_writer(f"iwrf+{server}/q") as writer:
        writer.write_many(scan(60))
    shown = run("cat", f"iwrf+{server}/q", "--from", "start", "-n", "1")
    assert b"60 pulses 0 to 59" in shown.stdout, shown.stderr
    copied = run("cp", f"iwrf+{server}/q", f"iwrf:{tmp_path}/out")
    assert copied.returncode == 0, copied.stderr
    assert decoded(f"iwrf:{tmp_path}/out").headers["pulse_seq_num"].tolist() == list(range(60))


@needs_lrose_radar
def test_lrose_reads_what_came_through_a_server(server: str, tmp_path: Path) -> None:
    with open_writer(f"iwrf+{server}/q") as writer:
        writer.write_many(scan(300, gates=5))
    seen = pulses_of(iwrf_read("fmq", tmp_path / "q"))
    assert [pulse["pulse_seq_num"] for pulse in seen] == list(range(300))
