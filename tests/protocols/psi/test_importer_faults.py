"""Between exporter and importer the network breaks: what arrives is still all, in order, once."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.protocols.psi.exporter.server import RemoteExporter
from penstock.protocols.psi.importer.client import REPLAY_ALL, RemoteImporter
from penstock.protocols.psi.store.streams import Store
from penstock.relay.faults import FaultRouter, Faults
from support.mosquitto import free_port

HOST = "127.0.0.1"


class Way(NamedTuple):
    """An exporter, and the routers before its two ports."""

    exporter: RemoteExporter
    meta: FaultRouter
    data: FaultRouter

    @property
    def routers(self) -> tuple[FaultRouter, FaultRouter]:
        return self.meta, self.data


@contextlib.contextmanager
def faulty_way(store: Store, faults: Faults, **options: Any) -> Iterator[Way]:
    data_port = free_port()
    with FaultRouter.tcp((HOST, data_port), faults) as data:
        told = data.address[1]
        exporter = RemoteExporter(store, 0, data_port=data_port, told_data_port=told, **options)
        with exporter, FaultRouter.tcp((HOST, exporter.port), faults) as meta:
            yield Way(exporter, meta, data)


#: What happens to a connection: dropped by a reset, closed in good order, silent for ever, and
#: nobody there for a moment.
TROUBLES = ("rst", "rst", "fin", "half-open", "refuse")


def make_trouble(way: Way, rng: random.Random) -> None:
    """Break one of the two connections, or both."""
    routers = rng.choice([way.routers, way.routers[:1], way.routers[1:]])
    trouble = rng.choice(TROUBLES)
    for router in routers:
        usual = router.faults
        if trouble == "half-open":
            router.set(dataclasses.replace(usual, half_open=True, cut_every=0.001))
            time.sleep(0.02)
        elif trouble == "refuse":
            router.set(dataclasses.replace(usual, refuse=1.0))
            router.cut_all()
            time.sleep(0.05)
        else:
            router.set(dataclasses.replace(usual, cut="rst" if trouble == "rst" else "fin"))
            router.cut_all()
        router.set(usual)


@contextlib.contextmanager
def posting(way: Way, messages: int, cuts: int, seed: int) -> Iterator[None]:
    """Post at a steady pace, and break connections at random points, on another thread."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(post_and_cut, way, messages, cuts, seed)
        try:
            yield
        finally:
            done.result(60)


def post_and_cut(way: Way, messages: int, cuts: int, seed: int) -> None:
    rng = random.Random(seed)
    places = set(rng.sample(range(messages // 20, messages), cuts))
    with way.exporter.exporter.write(None, "Numbers", "int") as stream:
        for i in range(messages):
            stream.post(i)
            if i % 100 == 0:
                time.sleep(0.002)
            if i in places:
                make_trouble(way, rng)
                time.sleep(rng.random() * 0.05)


#: Silence is noticed soon.
QUICK: dict[str, Any] = {"silence": 0.6, "longest_wait": 0.2}

SIZES = [
    pytest.param(5_000, 10, id="quick"),
    pytest.param(100_000, 50, id="full", marks=[pytest.mark.full, pytest.mark.timeout(600)]),
]


@pytest.mark.parametrize(("messages", "cuts"), SIZES)
@pytest.mark.parametrize("delay", [0.0, 0.01])
def test_with_a_log_behind_it_everything_arrives_in_order_and_once(
    tmp_path: Path, messages: int, cuts: int, delay: float
) -> None:
    faults = Faults(delay=delay, jitter=delay / 2)
    with (
        Store.create(tmp_path, "out", segment="8M") as out,
        Store.create(tmp_path, "in", segment="8M") as local,
        faulty_way(out, faults, keep_alive=0.1, stalled=5) as way,
        RemoteImporter(HOST, way.meta.address[1], REPLAY_ALL, store=local, **QUICK) as importer,
    ):
        assert importer.wait_connected(10)
        with (
            posting(way, messages, cuts, messages),
            importer.open_stream("Numbers", "int", timeout=20) as stream,
        ):
            assert [received.value for received in stream] == list(range(messages))
            assert stream.lost == 0
        books = importer.statistics()
        assert (books.messages, books.lost, books.refused) == (messages, 0, 0)
        assert books.connections > 1
        # Not all over again: only what may have been missed.
        assert books.repeated < messages


@pytest.mark.parametrize(("messages", "cuts"), SIZES)
def test_with_a_ring_what_is_lost_is_what_is_reported(messages: int, cuts: int) -> None:
    with (
        Store.volatile(slots=256, size=1 << 20) as out,
        Store.volatile(slots=131072, size=16 << 20) as local,
        faulty_way(out, Faults(), patience=0.01, keep_alive=0.1, stalled=5) as way,
        RemoteImporter(HOST, way.meta.address[1], REPLAY_ALL, store=local, **QUICK) as importer,
    ):
        assert importer.wait_connected(10)
        with (
            posting(way, messages, cuts, 7),
            importer.open_stream("Numbers", "int", timeout=20) as stream,
        ):
            values = [received.value for received in stream]
            lost = stream.lost
        books = importer.statistics()
        assert values == sorted(set(values))
        assert len(values) + lost == messages
        assert (books.messages, books.lost) == (len(values), lost)
        missing = set(range(messages)) - set(values)
        reported = {n - 1 for gap in books.gaps for n in range(gap.first, gap.last + 1)}
        assert reported == missing


def test_a_connection_that_is_open_but_silent_is_given_up() -> None:
    """Half open: nothing passes any more, and nobody says so."""
    with (
        Store.volatile() as out,
        faulty_way(out, Faults(), keep_alive=0.2) as way,
        RemoteImporter(
            HOST, way.meta.address[1], REPLAY_ALL, silence=1.0, longest_wait=0.2
        ) as importer,
    ):
        stream = way.exporter.exporter.write(None, "Numbers", "int")
        stream.post(0)
        with importer.open_stream("Numbers", timeout=10) as numbers:
            assert numbers.read(10) is not None
            time.sleep(0.6)  # it has given signs of life
            # The data connection alone, then both.
            for routers in (way.routers[1:], way.routers):
                before = importer.statistics().connections
                for router in routers:
                    router.pause()
                stream.post(1)
                deadline = time.monotonic() + 40
                while importer.connected and time.monotonic() < deadline:
                    time.sleep(0.02)
                for router in routers:
                    router.resume()
                assert numbers.read(15) is not None
                assert importer.statistics().connections > before
                time.sleep(0.6)
            assert numbers.lost == 0


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_udp_that_loses_datagrams_says_how_many_messages_did_not_come(share: float) -> None:
    with (
        Store.volatile(slots=4096) as out,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free,
    ):
        free.bind((HOST, 0))
        data_port = free.getsockname()[1]
        free.close()
        faults = Faults(drop=share, one_way="down") if share else Faults()
        with (
            FaultRouter.udp((HOST, data_port), faults, seed=3) as router,
            RemoteExporter(
                out,
                0,
                "udp",
                data_port=data_port,
                told_data_port=router.address[1],
                max_bytes_per_second=2_000_000,
            ) as exporter,
            RemoteImporter(HOST, exporter.port, REPLAY_ALL) as importer,
        ):
            assert importer.wait_connected(10)
            stream = exporter.exporter.write(None, "Numbers", "int")
            for i in range(2000):
                stream.post(i)
            stream.close()
            with importer.open_stream("Numbers", timeout=10) as numbers:
                values = [received.value for received in numbers]
            books = importer.statistics()
            assert values == sorted(set(values))
            assert len(values) + books.lost == 2000
            assert (books.lost > 0) == (share > 0)
            assert books.messages == len(values)


@pytest.mark.parametrize(("ends", "seconds"), [(True, 1.3), (False, 6.5)])
def test_a_session_id_that_udp_loses_costs_only_time(ends: bool, seconds: float) -> None:
    with Store.volatile() as out, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind((HOST, 0))
        data_port = free.getsockname()[1]
        free.close()
        with (
            FaultRouter.udp((HOST, data_port), Faults(drop=1.0)) as router,
            RemoteExporter(
                out,
                0,
                "udp",
                data_port=data_port,
                told_data_port=router.address[1],
                keep_alive=0.2,
            ) as exporter,
        ):
            stream = exporter.exporter.write(None, "Numbers", "int")
            for i in range(10):
                stream.post(i)
            if ends:
                stream.close()
            with (
                RemoteImporter(HOST, exporter.port, REPLAY_ALL, silence=4) as importer,
                importer.open_stream("Numbers", timeout=10) as numbers,
            ):
                time.sleep(seconds)
                router.set(Faults())
                found = [numbers.read(20) for _ in range(10)]
                assert [each and each.value for each in found] == list(range(10))
                assert importer.statistics().lost == 0
