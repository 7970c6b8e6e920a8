"""Datagrams through a router: real sockets on loopback."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable

import pytest

from penstock.relay.faults import Counters, Direction, FaultRouter, Faults
from penstock.relay.faults.decisions import Dice, datagram_fate, garbled
from relay.faults.targets import UdpTarget, udp_client, udp_socket
from support.until import until

SEED = 7


def numbered(count: int) -> list[bytes]:
    return [b"datagram %06d" % n for n in range(count)]


def send_all(
    router: FaultRouter, target: UdpTarget, client: socket.socket, sent: list[bytes]
) -> None:
    """Send without a loss by anybody's buffer: in small runs, each waited for."""
    before = router.counters().up.arrived
    for begin in range(0, len(sent), 100):
        run = sent[begin : begin + 100]
        for data in run:
            client.send(data)
        wait_for_arrivals(router, before + begin + len(run))
        until(lambda: len(target.received) == expected_at_target(router.counters()))


def wait_for_arrivals(router: FaultRouter, count: int) -> None:
    until(lambda: router.counters().up.arrived == count)


def expected_at_target(books: Counters) -> int:
    return books.up.passed + books.up.duplicated


def test_without_faults_a_megabyte_passes_both_ways_byte_for_byte() -> None:
    rng = random.Random(1)
    sizes = [0, 1, 65_507, *(rng.randrange(1, 20_000) for _ in range(100))]
    sent = [rng.randbytes(size) for size in sizes]
    assert sum(map(len, sent)) > 1 << 20
    with (
        UdpTarget(echo=True) as target,
        FaultRouter.udp(target.address) as router,
        udp_client(router.address) as client,
    ):
        for data in sent:
            client.send(data)
            assert client.recv(65535) == data
        books = router.counters()
    assert target.received == sent
    for one in (books.up, books.down):
        assert (one.arrived, one.passed) == (len(sent), len(sent))
        assert one.arrived_bytes == one.passed_bytes == sum(sizes)
    assert books.adds_up


@pytest.mark.parametrize(
    ("faults", "model"),
    [
        (Faults(drop=0.1), lambda fate, data: [] if fate.is_dropped else [data]),
        (Faults(duplicate=0.1), lambda fate, data: [data] * (1 + fate.is_duplicated)),
        (
            Faults(garble=0.1),
            lambda fate, data: [garbled(data, fate.garble) if fate.garble else data],
        ),
    ],
    ids=["drop", "duplicate", "garble"],
)
def test_a_fault_hits_exactly_those_that_the_seed_says(
    faults: Faults, model: Callable[..., list[bytes]]
) -> None:
    sent = numbered(1500)
    dice = Dice(SEED, 0, "up")
    fates = [datagram_fate(dice, n, faults) for n in range(len(sent))]
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, faults, seed=SEED) as router,
        udp_client(router.address) as client,
    ):
        send_all(router, target, client, sent)
        books = router.counters()
    assert target.received == [
        one for fate, data in zip(fates, sent, strict=True) for one in model(fate, data)
    ]
    assert books.up.dropped == sum(fate.is_dropped for fate in fates)
    assert books.up.duplicated == sum(fate.is_duplicated for fate in fates)
    assert books.up.garbled == sum(fate.garble is not None for fate in fates)
    assert books.up.dropped + books.up.duplicated + books.up.garbled > 100  # of 150 in the mean
    assert books.up.arrived == len(sent)
    assert books.adds_up


def reordered(sent: list[bytes], faults: Faults) -> list[bytes]:
    """Say in which order they come."""
    dice = Dice(SEED, 0, "up")
    waiting: list[tuple[int, bytes]] = []
    come: list[bytes] = []
    for n, data in enumerate(sent):
        if overtaken_by := datagram_fate(dice, n, faults).overtaken_by:
            waiting.append((n + overtaken_by, data))
        else:
            come.append(data)
        come += [held for at, held in waiting if at <= n]
        waiting = [(at, held) for at, held in waiting if at > n]
    return come + [held for _, held in waiting]


def test_datagrams_are_overtaken_as_the_seed_says_and_none_stays_behind() -> None:
    faults = Faults(reorder=0.2)
    sent = numbered(200)  # at once, so that nobody runs out of patience in between
    expected = reordered(sent, faults)
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, faults, seed=SEED) as router,
        udp_client(router.address) as client,
    ):
        for data in sent:
            client.send(data)
        until(lambda: len(target.received) == len(sent))
        books = router.counters()
    assert target.received == expected
    assert expected != sent
    assert 20 <= books.up.reordered <= 60
    assert books.up.passed == len(sent)
    assert books.adds_up


def test_the_last_datagram_goes_also_when_nothing_overtakes_it() -> None:
    with (
        UdpTarget(echo=True) as target,
        FaultRouter.udp(target.address, Faults(reorder=1.0)) as router,
        udp_client(router.address) as client,
    ):
        client.send(b"alone")
        assert client.recv(100) == b"alone"
        assert router.counters().up.reordered == 0


def test_delayed_datagrams_do_not_wait_for_each_other() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, Faults(delay=0.5)) as router,
        udp_client(router.address) as client,
    ):
        began = time.monotonic()
        for data in numbered(50):
            client.send(data)
        wait_for_arrivals(router, 50)
        books = router.counters()
        assert books.up.held + books.up.passed == 50
        assert books.adds_up
        until(lambda: len(target.received) == 50)
        assert target.times[0] - began >= 0.5
        assert target.times[-1] - began < 5  # one after the other would be 25 s
        assert router.counters().up.delayed == 50
    assert target.received == numbered(50)


def test_by_jitter_datagrams_overtake_each_other() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, Faults(delay=0.2, jitter=0.2)) as router,
        udp_client(router.address) as client,
    ):
        for data in numbered(100):
            client.send(data)
        until(lambda: len(target.received) == 100)
    assert target.received != numbered(100)
    assert sorted(target.received) == numbered(100)


def test_a_rate_spreads_datagrams_over_time() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, Faults(rate=100_000)) as router,
        udp_client(router.address) as client,
    ):
        began = time.monotonic()
        for _ in range(50):
            client.send(bytes(1000))
        until(lambda: len(target.received) == 50)
        assert target.times[-1] - began >= 0.45


@pytest.mark.parametrize(("way", "up", "down"), [("up", 0, 0), ("down", 20, 0), (None, 0, 0)])
def test_faults_may_be_in_one_direction_only(way: Direction | None, up: int, down: int) -> None:
    with (
        UdpTarget(echo=True) as target,
        FaultRouter.udp(target.address, Faults(drop=1.0, one_way=way)) as router,
        udp_client(router.address) as client,
    ):
        for data in numbered(20):
            client.send(data)
        wait_for_arrivals(router, 20)
        until(lambda: router.counters().down.arrived == up)
        books = router.counters()
    assert (books.up.passed, books.down.passed) == (up, down)
    assert (books.up.dropped, books.down.dropped) == (20 - up, up)


def test_each_client_has_its_own_faults_and_gets_its_own_answers() -> None:
    clients, count = 40, 50
    faults = Faults(drop=0.2)
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(UdpTarget(echo=True))
        router = stack.enter_context(FaultRouter.udp(target.address, faults, seed=SEED))
        sockets = [stack.enter_context(udp_client(router.address)) for _ in range(clients)]
        for n in range(count):
            for number, sock in enumerate(sockets):
                sock.send(b"%d/%d" % (number, n))
            wait_for_arrivals(router, clients * (n + 1))
        books = router.counters()
        until(lambda: router.counters().down.arrived == books.up.passed)
        assert len(set(target.senders)) == clients
        for number, sock in enumerate(sockets):
            up, down = Dice(SEED, number, "up"), Dice(SEED, number, "down")
            reached = [n for n in range(count) if not datagram_fate(up, n, faults).is_dropped]
            expected = [
                b"%d/%d" % (number, n)
                for answer, n in enumerate(reached)
                if not datagram_fate(down, answer, faults).is_dropped
            ]
            assert [sock.recv(100) for _ in expected] == expected
        books = router.counters()
    assert books.clients.seen == books.clients.active == clients
    assert books.adds_up


def test_a_client_for_whom_there_is_no_room_is_counted() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, max_clients=2) as router,
        udp_client(router.address) as one,
        udp_client(router.address) as two,
        udp_client(router.address) as three,
    ):
        for sock in (one, two, three, one):
            sock.send(b"x")
        wait_for_arrivals(router, 4)
        books = router.counters()
    assert (books.up.passed, books.up.refused, books.clients.active) == (3, 1, 2)
    assert books.adds_up


def test_a_client_that_is_quiet_is_forgotten() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, max_clients=1, idle=0.2) as router,
    ):
        with udp_client(router.address) as client:
            client.send(b"x")
            until(lambda: router.counters().clients.expired == 1)
        with udp_client(router.address) as client:
            client.send(b"y")
            until(lambda: target.received == [b"x", b"y"])
        books = router.counters()
    assert books.clients.seen == 2
    assert books.adds_up


def test_a_cut_gives_a_client_another_port_at_the_target() -> None:
    with (
        UdpTarget(echo=True) as target,
        FaultRouter.udp(target.address) as router,
        udp_client(router.address) as client,
    ):
        for _ in range(2):
            client.send(b"x")
            assert client.recv(10) == b"x"
            assert router.cut_all() == 1
        assert router.cut_all() == 0
        router.set(Faults(cut_every=0.1))
        client.send(b"x")
        until(lambda: router.counters().clients.cut == 3)
        books = router.counters()
    assert len(set(target.senders)) >= 2
    assert books.adds_up


def test_what_is_under_way_to_a_client_that_is_cut_off_is_counted() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, Faults(delay=0.3)) as router,
        udp_client(router.address) as client,
    ):
        for _ in range(5):
            client.send(b"x")
        until(lambda: router.counters().up.held == 5)
        router.cut_all()
        until(lambda: router.counters().up.discarded == 5)
        assert router.counters().adds_up
    assert target.received == []


def test_more_under_way_than_the_router_keeps_is_counted() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, Faults(delay=600)) as router,
        udp_client(router.address) as client,
    ):
        for n in range(1, 1101):
            client.send(bytes(65_000))
            if n % 50 == 0:
                wait_for_arrivals(router, n)
        books = router.counters()
        assert books.up.held + books.up.congested == 1100
        assert books.up.congested > 50
        assert books.adds_up
    books = router.counters()
    assert (books.up.held, books.up.discarded + books.up.congested) == (0, 1100)
    assert books.adds_up


def test_a_pause_holds_everything_and_loses_nothing() -> None:
    with (
        UdpTarget(echo=True) as target,
        FaultRouter.udp(target.address, Faults(delay=0.05)) as router,
        udp_client(router.address) as client,
    ):
        client.send(b"before")
        wait_for_arrivals(router, 1)
        router.pause()
        came = len(target.received)
        client.send(b"meanwhile")
        time.sleep(0.3)
        assert len(target.received) == came
        router.resume()
        assert [client.recv(100), client.recv(100)] == [b"before", b"meanwhile"]
        assert router.counters().adds_up


def test_what_the_kernel_drops_at_the_router_is_counted() -> None:
    with UdpTarget() as target, FaultRouter.udp(target.address) as router:
        with udp_client(router.address) as client:
            client.send(b"first")
            until(lambda: target.received == [b"first"])
            router.pause()
            sent = 1
            while not router.counters().up.overflowed:
                for _ in range(1000):
                    client.send(bytes(1000))
                sent += 1000
                assert sent < 1_000_000
            router.resume()
            wait_for_arrivals(router, sent)
        books = router.counters()
    assert books.up.passed + books.up.overflowed == sent
    assert books.adds_up
    assert router.counters().adds_up


def test_a_target_that_is_not_there_yet_is_no_end() -> None:
    with udp_socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        address = placeholder.getsockname()
    with FaultRouter.udp(address) as router, udp_client(router.address) as client:
        for _ in range(5):
            client.send(b"lost")
            time.sleep(0.02)  # the answer of the kernel: nobody is there
        wait_for_arrivals(router, 5)
        with udp_socket() as target:
            target.bind(address)
            client.send(b"found")
            assert target.recv(100) == b"found"
        books = router.counters()
    assert books.up.passed + books.up.failed == 6
    assert books.adds_up


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_datagram_too_large_for_the_way_is_counted() -> None:
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, listen=("::1", 0)) as router,
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as client,
    ):
        client.sendto(bytes(65_520), router.address)  # IPv6 has room for some bytes more
        client.sendto(b"small", router.address)
        until(lambda: target.received == [b"small"])
        books = router.counters()
    assert (books.up.arrived, books.up.failed, books.up.passed) == (2, 1, 1)
    assert books.adds_up


def test_faults_can_change_while_it_runs() -> None:
    with (
        UdpTarget(echo=True) as target,
        FaultRouter.udp(target.address, Faults(drop=1.0)) as router,
        udp_client(router.address) as client,
    ):
        client.send(b"dropped")
        until(lambda: router.counters().up.dropped == 1)
        router.set(Faults())
        client.send(b"passed")
        assert client.recv(100) == b"passed"
        assert router.faults == Faults()
    assert target.received == [b"passed"]


@pytest.mark.full
def test_all_faults_at_once_add_up_over_many_datagrams() -> None:
    faults = Faults(drop=0.05, duplicate=0.01, delay=0.01, jitter=0.005, reorder=0.02, garble=0.01)
    with (
        UdpTarget() as target,
        FaultRouter.udp(target.address, faults, seed=SEED) as router,
        udp_client(router.address) as client,
    ):
        send_all(router, target, client, numbered(100_000))
        until(lambda: router.counters().up.held == 0)
        books = router.counters()
        until(lambda: len(target.received) == expected_at_target(books))
    dice = Dice(SEED, 0, "up")
    fates = [datagram_fate(dice, n, faults) for n in range(100_000)]
    assert books.up.dropped == sum(fate.is_dropped for fate in fates)
    assert books.up.duplicated == sum(fate.is_duplicated for fate in fates)
    assert books.up.garbled == sum(fate.garble is not None for fate in fates)
    assert books.adds_up
