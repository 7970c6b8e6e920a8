"""A router as a part of a program: its start, its end, and what it refuses."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import Closed, InvalidOption, StorageError
from penstock.relay.faults import ClientCounters, DirectionCounters, FaultRouter, Faults
from relay.faults.targets import (
    TcpTarget,
    UdpTarget,
    receive_exactly,
    sending,
    tcp_client,
    udp_client,
)
from support.threads import own_threads
from support.until import until
from support.waiting import background

NOWHERE = ("127.0.0.1", 9)
BOTH = pytest.mark.parametrize("make", [FaultRouter.udp, FaultRouter.tcp], ids=["udp", "tcp"])


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@BOTH
def test_it_leaves_nothing_behind(make: Callable[..., FaultRouter]) -> None:
    threads, files = len(own_threads()), open_files()
    for _ in range(3):
        with make(NOWHERE) as router:
            assert router.address[0] == "127.0.0.1"
            assert len(own_threads()) == threads + 1
    assert len(own_threads()) == threads
    assert open_files() == files


@pytest.mark.parametrize("faults", [Faults(), Faults(delay=60), Faults(half_open=True)])
def test_it_closes_in_the_middle_of_traffic(faults: Faults) -> None:
    with TcpTarget() as target:
        files = open_files()
        router = FaultRouter.tcp(target.address, faults)
        with tcp_client(router.address) as client, sending(client, bytes(64 << 20)):
            until(lambda: len(target.sockets) == 1)
            if not faults.half_open:
                until(lambda: router.counters().up.arrived > 0)
            router.close()
            with contextlib.suppress(OSError):  # the sender may have noticed already
                client.shutdown(socket.SHUT_RDWR)
        books = router.counters()
        assert (books.clients.ended, books.clients.active) == (1, 0)
        assert books.up.held == books.down.held == 0
        assert books.adds_up
        until(lambda: open_files() == files + 1)  # the target's own end of the connection


def test_what_is_under_way_at_the_end_is_counted() -> None:
    with UdpTarget() as target:
        faults = Faults(delay=60, reorder=0.5)
        with FaultRouter.udp(target.address, faults) as router:
            with udp_client(router.address) as client:
                for _ in range(20):
                    client.send(b"x")
            until(lambda: router.counters().up.held == 20)
        books = router.counters()
    assert (books.up.held, books.up.discarded) == (0, 20)
    assert books.adds_up


@BOTH
def test_after_the_end_only_the_counters_are_left(make: Callable[..., FaultRouter]) -> None:
    router = make(NOWHERE)
    router.close()
    router.close()
    assert router.counters().adds_up
    for call in (router.pause, router.resume, router.cut_all, lambda: router.set(Faults())):
        with pytest.raises(Closed):
            call()


@BOTH
def test_its_port_is_free_again(make: Callable[..., FaultRouter]) -> None:
    with make(NOWHERE) as router:
        address = router.address
        with pytest.raises(StorageError) as error:
            make(NOWHERE, listen=address).close()
    assert error.value.errno == errno.EADDRINUSE
    assert "port 0" in str(error.value.hint)
    with make(NOWHERE, listen=address) as router:
        assert router.address == address


def test_it_can_be_steered_from_many_threads() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address) as router,
        tcp_client(router.address) as client,
    ):

        def steer() -> None:
            for n in range(50):
                router.set(Faults(delay=n / 100_000))
                router.pause()
                router.resume()
                assert router.counters().adds_up

        threads = [threading.Thread(target=steer) for _ in range(4)]
        for thread in threads:
            thread.start()
        with sending(client, bytes(1 << 20)):
            assert receive_exactly(client, 1 << 20) == bytes(1 << 20)
        for thread in threads:
            thread.join(30)
        assert router.counters().adds_up


def a_whim(rng: random.Random, transport: str) -> Faults:
    """Return faults of any kind."""
    both: dict[str, Any] = {
        "drop": rng.choice([0, 0.3]),
        "garble": rng.choice([0, 0.3]),
        "delay": rng.choice([0, 0.01]),
        "rate": rng.choice([None, 1_000_000]),
        "cut_every": rng.choice([None, 0.05]),
        "one_way": rng.choice([None, "up", "down"]),
    }
    own: dict[str, Any] = (
        {"duplicate": rng.choice([0, 0.3]), "reorder": rng.choice([0, 0.3])}
        if transport == "udp"
        else {
            "half_open": rng.choice([False, False, True]),
            "cut_after": rng.choice([None, 100_000]),
            "cut": rng.choice(["rst", "fin"]),
            "refuse": rng.choice([0, 0.3, 1]),
        }
    )
    return Faults(**both, **own)


def steer_at_random(router: FaultRouter, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        step = rng.randrange(6)
        if step == 0:
            router.pause()
        elif step == 1:
            router.resume()
        elif step == 2:
            router.cut_all()
        else:
            router.set(a_whim(rng, router.transport))
        time.sleep(0.01)
        assert router.counters().adds_up, (seed, router.counters())
    router.resume()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_to_it_every_datagram_is_accounted_for(seed: int) -> None:
    with (
        UdpTarget(echo=True) as target,
        FaultRouter.udp(target.address, seed=seed, max_clients=3, idle=0.1) as router,
        contextlib.ExitStack() as stack,
    ):
        clients = [stack.enter_context(udp_client(router.address)) for _ in range(5)]
        sent = 0
        with background(steer_at_random, router, seed, 40) as steering:
            while not steering.done():
                for client in clients:
                    client.send(b"x" * (sent % 2000))
                    sent += 1
                time.sleep(0.0005)
            steering.result()
        router.close()
    books = router.counters()
    assert books.up.arrived == sent
    assert books.adds_up
    assert books.up.held == books.down.held == 0


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_to_it_every_byte_is_accounted_for(seed: int) -> None:
    with TcpTarget() as target:
        files = open_files()
        with (
            FaultRouter.tcp(target.address, seed=seed, max_clients=3) as router,
            background(steer_at_random, router, seed, 40) as steering,
        ):
            while not steering.done():
                with contextlib.suppress(OSError), tcp_client(router.address) as client:
                    client.settimeout(0.03)
                    client.sendall(bytes(200_000))
                    client.recv(65536)
            steering.result()
        books = router.counters()
        assert books.adds_up
        assert books.clients.seen > 0
        assert books.up.held == books.down.held == 0
        until(lambda: open_files() == files + len(target.sockets))


@BOTH
@pytest.mark.parametrize(
    "given",
    [
        {"to": ("127.0.0.1", 0)},
        {"to": ("127.0.0.1", 70_000)},
        {"listen": ("127.0.0.1", -1)},
        {"max_clients": 0},
        {"max_clients": 10**9},
    ],
)
def test_limits_that_make_no_sense_are_refused(
    make: Callable[..., FaultRouter], given: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption):
        make(**{"to": NOWHERE, **given}).close()


@BOTH
def test_a_name_that_nobody_knows_is_told(make: Callable[..., FaultRouter]) -> None:
    with pytest.raises(StorageError, match="no-such-host"):
        make(("no-such-host.invalid", 1)).close()


def test_faults_of_the_other_transport_are_refused() -> None:
    with pytest.raises(InvalidOption, match="TCP"):
        FaultRouter.tcp(NOWHERE, Faults(reorder=0.1)).close()
    with FaultRouter.udp(NOWHERE) as router:
        with pytest.raises(InvalidOption, match="UDP"):
            router.set(Faults(half_open=True))
        assert router.faults == Faults()
    with pytest.raises(InvalidOption, match="idle"):
        FaultRouter.udp(NOWHERE, idle=0).close()


@BOTH
def test_listening_to_other_machines_is_warned_of(
    make: Callable[..., FaultRouter], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make(NOWHERE).close()
        assert not caplog.records
        make(NOWHERE, listen=("0.0.0.0", 0)).close()
    assert "other machines" in caplog.text


def test_it_tells_what_it_does() -> None:
    with FaultRouter.udp(NOWHERE, Faults(drop=0.05), seed=7) as router:
        port = router.address[1]
        assert str(router) == f"udp 127.0.0.1:{port} -> 127.0.0.1:9, seed 7: drop 5%"


def test_the_counters_are_plain_data() -> None:
    with FaultRouter.udp(NOWHERE) as router:
        told = json.loads(json.dumps(router.counters().as_dict()))
    assert set(told) == {"unit", "up", "down", "clients"}
    assert set(told["up"]) == {field.name for field in fields(DirectionCounters)}
    assert set(told["clients"]) == {field.name for field in fields(ClientCounters)}
