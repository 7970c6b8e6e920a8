"""Whatever a peer says in a session, it harms neither this process nor its other peers."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import time
import tracemalloc
from pathlib import Path

import pytest

from penstock.core.errors import (
    CursorInUse,
    DamagedQueue,
    InvalidOption,
    Malformed,
    Unsupported,
)
from penstock.core.interfaces import Bounds
from penstock.protocols.psi import (
    Intermission,
    MessageDecoder,
    MetaDecoder,
    ServerHello,
    Store,
)
from penstock.protocols.psi.clock import RemoteClockServer, ask_clock
from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.importer.arrivals import Arrivals, Intake
from penstock.protocols.psi.importer.client import REPLAY_ALL, RemoteImporter
from penstock.protocols.psi.metadata import Record
from penstock.protocols.psi.rendezvous import RendezvousServer
from penstock.protocols.psi.store.streams import KeptCounts, keep_counts, load_counts
from penstock.relay.journal import Journal, Note
from protocols.psi.mutations import mutated
from protocols.psi.recordings import recording
from support.mutation import sizes
from support.threads import own_threads

HOST = "127.0.0.1"


class _Session:
    """The part of an importer that has no sockets, fed with what a session sends."""

    def __init__(self) -> None:
        self.store = Store.volatile(slots=256, size=1 << 20)
        self.intake = Intake(self.store, Arrivals(from_first=True), patience=0.0)

    def take(self, meta: bytes, data: bytes) -> None:
        self.intake.begin()
        decoder = MetaDecoder()
        burst: list[Record] = []
        for event in decoder.feed(meta):
            if isinstance(event, Intermission):
                self.intake.take_records(burst)
                burst = []
            elif not isinstance(event, ServerHello):
                burst.append(event)
        self.intake.take_messages(MessageDecoder(1 << 20).feed(data))
        self.intake.end_streams(REPLAY_ALL, may_lose=True)


@pytest.mark.parametrize("count", sizes(300, 10_000))
def test_fuzz_changed_sessions_are_taken_or_refused(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest keeps what is logged, and memory is looked at here.
    caplog.set_level(logging.ERROR, "penstock.protocols.psi")
    chance = random.Random(11)
    hello = recording("basic.s2c.handshake.bin")
    seeds = [
        (hello + recording(f"{name}.s2c.meta.bin"), recording(f"{name}.s2c.data.bin")[:20_000])
        for name in ("basic", "types")
    ]
    session, refused, taken = _Session(), 0, 0
    tracemalloc.start()
    try:
        for number in range(count):
            if number % 200 == 199:
                taken += session.intake.arrivals.taken
                session.store.close()
                session = _Session()
            meta, data = chance.choice(seeds)
            broken_meta = chance.random() < 0.5
            try:
                session.take(
                    mutated(meta, chance) if broken_meta else meta,
                    data if broken_meta else mutated(data, chance),
                )
            except Malformed:
                refused += 1
            # What a session tells that does not fit is left out, and counted.
            assert session.intake.refused >= 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        taken += session.intake.arrivals.taken
        session.store.close()
    assert 0 < refused < count
    assert taken > 0
    assert peak < 64 << 20


@pytest.mark.parametrize("count", sizes(60, 2_000))
def test_fuzz_changed_clients_leave_an_exporter_that_serves_others(count: int) -> None:
    chance = random.Random(12)
    before = len(own_threads())
    with RemoteExporter(port=0, first_message=0.5, max_clients=200) as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        assert exporter.data_port is not None
        for _ in range(count):
            to_meta = chance.random() < 0.7
            seed = recording("basic.c2s.handshake.bin") if to_meta else chance.randbytes(16)
            port = exporter.port if to_meta else exporter.data_port
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 5) as peer:
                peer.sendall(mutated(seed, chance))
                if chance.random() < 0.3:  # as psi must never be ended: without a word
                    peer.shutdown(socket.SHUT_WR)
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer:
            stream.post(7)
            with importer.open_stream("Numbers", "int") as numbers:
                received = numbers.read(20)
        assert received is not None
        assert received.value == 7
        deadline = time.monotonic() + 20
        while exporter.statistics().clients and time.monotonic() < deadline:
            time.sleep(0.02)
        assert exporter.statistics().clients == 0
    assert len(own_threads()) <= before + 2


@pytest.mark.parametrize("count", sizes(40, 1_000))
def test_fuzz_changed_clients_leave_rendezvous_and_clock_at_work(count: int) -> None:
    chance = random.Random(13)
    seed = recording("rendezvous.c2s.add.bin")
    with (
        RendezvousServer(port=0) as rendezvous,
        RemoteClockServer(port=0) as clock,
    ):
        for _ in range(count):
            port = chance.choice([rendezvous.port, clock.port])
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 5) as peer:
                peer.sendall(b"\2\0" + mutated(seed, chance))
        sample = ask_clock(HOST, clock.port)
        assert abs(sample.offset_ns) < 60_000_000_000
        with socket.create_connection((HOST, rendezvous.port), 5) as peer:
            peer.sendall(b"\2\0")
            assert peer.recv(2) == b"\2\0"


def test_fuzz_noise_on_the_udp_ports_harms_nobody() -> None:
    chance = random.Random(14)
    session = recording("udp_session_datagram.bin")
    with RemoteExporter(port=0, transport="udp") as exporter:
        stream = exporter.exporter.write(None, "Numbers", "int")
        assert exporter.data_port is not None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _ in range(500):
                noise = mutated(session, chance) if chance.random() < 0.5 else chance.randbytes(70)
                sock.sendto(noise, (HOST, exporter.data_port))
        with RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer:
            stream.post(7)
            with importer.open_stream("Numbers", "int") as numbers:
                received = numbers.read(20)
        assert received is not None
        assert exporter.statistics().malformed > 20  # as many as the kernel had room for


@pytest.mark.parametrize("count", sizes(300, 20_000))
def test_fuzz_changed_files_of_a_relay_and_of_a_store_are_read_or_refused(
    tmp_path: Path, count: int
) -> None:
    chance = random.Random(15)
    path = tmp_path / "state"
    with Journal(path, "log:a", "log:b") as journal:
        journal.put(Note(1, 5, (2, 3), ((1, 4),)))
    state = path.read_bytes()
    bounds = Bounds(epoch=3, oldest=0, end=1000)
    keep_counts(tmp_path, KeptCounts(3, 500, 7, {1: tuple(range(8))}))
    counts = (tmp_path / "counts.json").read_bytes()
    refused = 0
    for _ in range(count):
        path.write_bytes(mutated(state[:9000], chance) + state[9000:])
        try:
            with Journal(path, "log:a", "log:b") as journal:
                assert journal.note is None or journal.note.messages >= 0
        except (DamagedQueue, InvalidOption, Unsupported, CursorInUse):
            refused += 1
        (tmp_path / "counts.json").write_bytes(mutated(counts, chance))
        kept = load_counts(tmp_path, bounds)
        assert kept is None or kept == KeptCounts(3, 500, 7, {1: tuple(range(8))})
    assert refused > 0
