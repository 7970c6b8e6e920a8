"""Connections through a router: real sockets on loopback."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time

import pytest

from penstock.relay.faults import Cut, Direction, FaultRouter, Faults
from penstock.relay.faults.decisions import Dice, stream_pieces
from relay.faults.targets import (
    TcpTarget,
    receive_all,
    receive_exactly,
    sending,
    tcp_client,
)
from support.mosquitto import free_port
from support.until import until

SEED = 7
MEGABYTE = random.Random(1).randbytes(1 << 20)
#: Nothing has come after this time (seconds), and nothing will.
A_WHILE = 0.3


def is_silent(sock: socket.socket) -> bool:
    """Tell whether neither bytes nor an end come."""
    before = sock.gettimeout()
    sock.settimeout(A_WHILE)
    try:
        sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(before)
    return False


def ended(sock: socket.socket) -> str:
    """Return how a connection ended: `eof`, or the name of the error."""
    try:
        receive_all(sock)
    except OSError as error:
        return type(error).__name__
    return "eof"


def connected_and_ended(address: tuple[str, int]) -> str:
    """Return how a connection ended that is not served: its reset may come with its beginning."""
    try:
        with tcp_client(address) as client:
            return ended(client)
    except ConnectionResetError as error:
        return type(error).__name__


def test_without_faults_a_megabyte_passes_both_ways_byte_for_byte() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address) as router,
        tcp_client(router.address) as client,
    ):
        with sending(client, MEGABYTE, then_end=True):
            assert receive_all(client) == MEGABYTE  # its end passes both ways too
        until(lambda: router.counters().clients.ended == 1)
        books = router.counters()
    assert target.received == [MEGABYTE]
    assert target.ends == {0: "eof"}
    for one in (books.up, books.down):
        assert one.arrived == one.passed == one.passed_bytes == len(MEGABYTE)
    assert books.adds_up


def test_a_connection_may_end_in_one_direction_and_go_on_in_the_other() -> None:
    with (
        TcpTarget(echo=False) as target,
        FaultRouter.tcp(target.address) as router,
        tcp_client(router.address) as client,
    ):
        until(lambda: len(target.sockets) == 1)
        target.sockets[0].shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
        client.sendall(b"still here")
        until(lambda: target.received == [b"still here"])
        assert router.counters().clients.active == 1


def test_a_reset_passes_as_a_reset() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address) as router,
    ):
        with tcp_client(router.address) as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: target.ends == {0: "ConnectionResetError"})
        until(lambda: router.counters().clients.ended == 1)
        assert router.counters().adds_up


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("faults", [{"garble": 0.05}, {"drop": 0.05}, {"garble": 0.5, "drop": 0.5}])
def test_a_fault_hits_exactly_the_bytes_that_the_seed_says(
    way: Direction, faults: dict[str, float]
) -> None:
    asked = Faults(**faults, one_way=way)  # type: ignore[arg-type]
    expected = stream_pieces(Dice(SEED, 0, way), 0, MEGABYTE, asked)
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, asked, seed=SEED) as router,
        tcp_client(router.address) as client,
    ):
        with sending(client, MEGABYTE, then_end=True):
            came = receive_all(client)
        books = router.counters()
    assert came == b"".join(expected.pieces)
    assert target.received[0] == (came if way == "up" else MEGABYTE)
    one = books.of(way)
    assert (one.dropped, one.garbled) == (expected.dropped, expected.garbled)
    assert one.dropped + one.garbled > 0
    assert books.adds_up


def test_many_clients_pass_at_the_same_time() -> None:
    clients, size = 60, 50_000
    payloads = [random.Random(n).randbytes(size) for n in range(clients)]
    came: dict[int, bytes] = {}

    def talk(number: int) -> None:
        with (
            tcp_client(router.address) as sock,
            sending(sock, payloads[number], then_end=True),
        ):
            came[number] = receive_all(sock)

    with TcpTarget() as target, FaultRouter.tcp(target.address, Faults(delay=0.01)) as router:
        threads = [threading.Thread(target=talk, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        until(lambda: router.counters().clients.ended == clients)
        books = router.counters()
    assert came == dict(enumerate(payloads))
    assert books.up.passed == books.down.passed == clients * size
    assert books.adds_up


def test_a_delay_holds_up_every_byte_and_keeps_the_order() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, Faults(delay=0.2, jitter=0.1)) as router,
        tcp_client(router.address) as client,
    ):
        began = time.monotonic()
        with sending(client, MEGABYTE, then_end=True):
            assert receive_all(client) == MEGABYTE
        assert 0.2 <= time.monotonic() - began < 10  # twice at least 0.1 s
        books = router.counters()
    assert books.up.delayed == len(MEGABYTE)
    assert books.adds_up


def test_a_client_that_does_not_read_holds_up_no_other() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address) as router,
        tcp_client(router.address) as slow,
        tcp_client(router.address) as quick,
        sending(slow, MEGABYTE * 32),
    ):
        until(lambda: router.counters().up.arrived > len(MEGABYTE))
        quick.sendall(b"quick")
        assert receive_exactly(quick, 5) == b"quick"
        slow.shutdown(socket.SHUT_RDWR)


def test_a_rate_makes_the_sender_wait() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, Faults(rate=400_000, one_way="up")) as router,
        tcp_client(router.address) as client,
    ):
        began = time.monotonic()
        with sending(client, MEGABYTE[:200_000], then_end=True):
            assert receive_all(client) == MEGABYTE[:200_000]
        assert time.monotonic() - began >= 0.45


@pytest.mark.parametrize(("how", "seen"), [("rst", "ConnectionResetError"), ("fin", "eof")])
def test_a_cut_is_abrupt_or_in_good_order(how: Cut, seen: str) -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, Faults(cut=how)) as router,
        tcp_client(router.address) as one,
        tcp_client(router.address) as two,
    ):
        for client in (one, two):
            client.sendall(b"x")
            assert client.recv(1) == b"x"
        assert router.cut_all() == 2
        assert [ended(one), ended(two)] == [seen, seen]
        until(lambda: target.ends == {0: seen, 1: seen})
        with tcp_client(router.address) as again:
            again.sendall(b"y")
            assert again.recv(1) == b"y"
        books = router.counters()
    assert books.clients.cut == 2
    assert books.adds_up


def test_connections_are_cut_when_they_are_old() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, Faults(cut_every=0.3)) as router,
    ):
        for _ in range(2):
            began = time.monotonic()
            with tcp_client(router.address) as client:
                client.sendall(b"x")
                assert ended(client) == "ConnectionResetError"
            assert time.monotonic() - began >= 0.25
        assert router.counters().clients.cut == 2
        router.set(Faults())
        with tcp_client(router.address) as client:
            assert is_silent(client)
            router.set(Faults(cut_every=0.05))  # it is older already
            assert ended(client) == "ConnectionResetError"


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("after", [1, 1000, 300_000])
def test_a_connection_is_cut_after_so_many_bytes(way: Direction, after: int) -> None:
    faults = Faults(cut_after=after, cut="fin", one_way=way)
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, faults) as router,
        tcp_client(router.address) as client,
        sending(client, MEGABYTE),
    ):
        came = bytearray()
        while piece := client.recv(65536):
            came += piece
        until(lambda: router.counters().clients.cut == 1)
        until(lambda: len(target.ends) == 1)
        books = router.counters()
    assert books.of(way).passed == after
    assert (target.received[0] if way == "up" else came) == MEGABYTE[:after]
    assert books.adds_up


def test_a_half_open_connection_stays_open_and_silent() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, Faults(half_open=True)) as router,
        tcp_client(router.address) as client,
    ):
        client.sendall(b"is anybody there?")
        assert is_silent(client)
        until(lambda: len(target.sockets) == 1)
        target.sockets[0].sendall(b"hello?")
        assert is_silent(client)
        assert target.received == [b""]
        assert router.counters().clients.active == 1
        router.set(Faults())  # nothing was lost by it
        assert receive_exactly(client, 23) == b"hello?is anybody there?"
        assert router.counters().adds_up


def test_a_half_open_connection_does_not_tell_that_the_other_side_is_gone() -> None:
    with TcpTarget() as target, FaultRouter.tcp(target.address) as router:
        with tcp_client(router.address) as client:
            client.sendall(b"x")
            assert client.recv(1) == b"x"
            router.set(Faults(half_open=True))
        time.sleep(A_WHILE)
        assert target.ends == {}
        assert router.counters().clients.active == 1
        assert router.cut_all() == 1
        until(lambda: target.ends == {0: "ConnectionResetError"})


def test_half_open_may_be_in_one_direction_only() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, Faults(half_open=True, one_way="up")) as router,
        tcp_client(router.address) as client,
    ):
        until(lambda: len(target.sockets) == 1)
        client.sendall(b"unheard")
        target.sockets[0].sendall(b"heard")
        assert receive_exactly(client, 5) == b"heard"
        assert is_silent(client)
        assert target.received == [b""]


def test_a_connection_falls_silent_where_it_would_have_been_cut() -> None:
    faults = Faults(half_open=True, cut_after=1000, one_way="up")
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, faults) as router,
        tcp_client(router.address) as client,
    ):
        client.sendall(MEGABYTE[:5000])
        assert receive_exactly(client, 1000) == MEGABYTE[:1000]
        assert is_silent(client)
        books = router.counters()
        assert (books.clients.silenced, books.clients.active) == (1, 1)
        assert books.up.held == books.up.arrived - 1000
        assert books.adds_up
    assert target.received == [MEGABYTE[:1000]]
    books = router.counters()
    assert books.up.discarded == books.up.arrived - 1000
    assert books.adds_up


def test_a_silenced_connection_makes_room_for_a_new_one() -> None:
    faults = Faults(half_open=True, cut_every=0.1)
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, faults, max_clients=1) as router,
        tcp_client(router.address) as one,
    ):
        until(lambda: router.counters().clients.silenced == 1)
        assert is_silent(one)
        with tcp_client(router.address):
            assert ended(one) == "ConnectionResetError"
            until(lambda: len(target.sockets) == 2)
        assert router.counters().adds_up


def test_connections_can_be_refused_and_taken_again() -> None:
    with TcpTarget() as target, FaultRouter.tcp(target.address, Faults(refuse=1.0)) as router:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(router.address, timeout=5)
            router.set(Faults())
            with tcp_client(router.address) as client:
                client.sendall(b"x")
                assert client.recv(1) == b"x"
                router.set(Faults(refuse=1.0))
                client.sendall(b"y")  # who is in stays in
                assert client.recv(1) == b"y"


def test_a_share_of_connections_is_reset_as_the_seed_says() -> None:
    expected = [Dice(SEED, n, "refuse").refuses(0.5) for n in range(30)]
    outcomes = []
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, Faults(refuse=0.5), seed=SEED) as router,
    ):
        for _ in expected:
            try:
                with tcp_client(router.address) as client:
                    client.sendall(b"x")
                    outcomes.append(client.recv(1) != b"x")
            except OSError:
                outcomes.append(True)
        until(lambda: router.counters().clients.active == 0)
        books = router.counters()
    assert outcomes == expected
    assert books.clients.refused == sum(expected)
    assert 5 < sum(expected) < 25
    assert books.adds_up


def test_more_connections_than_allowed_are_turned_away_and_counted() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address, max_clients=2) as router,
        tcp_client(router.address) as one,
        tcp_client(router.address) as two,
    ):
        for client in (one, two):
            client.sendall(b"x")
            assert client.recv(1) == b"x"
        assert connected_and_ended(router.address) == "ConnectionResetError"
        books = router.counters()
    assert (books.clients.active, books.clients.refused) == (2, 1)
    assert books.adds_up


def test_a_target_that_is_not_there_resets_the_client() -> None:
    with FaultRouter.tcp(("127.0.0.1", free_port())) as router:
        assert connected_and_ended(router.address) == "ConnectionResetError"
        assert router.counters().clients.unreachable == 1
        assert router.counters().adds_up


def test_a_pause_holds_everything_and_loses_nothing() -> None:
    with (
        TcpTarget() as target,
        FaultRouter.tcp(target.address) as router,
        tcp_client(router.address) as client,
    ):
        client.sendall(b"before")
        assert receive_exactly(client, 6) == b"before"
        router.pause()
        with sending(client, MEGABYTE, then_end=True):
            assert is_silent(client)
            router.resume()
            assert receive_all(client) == MEGABYTE
        assert router.counters().adds_up


def test_bytes_for_a_receiver_that_is_gone_are_counted() -> None:
    # The way back is silent, so that only the way there can notice it.
    faults = Faults(half_open=True, one_way="down")
    with (
        TcpTarget(echo=False) as target,
        FaultRouter.tcp(target.address, faults) as router,
        tcp_client(router.address) as client,
    ):
        client.sendall(b"first")
        until(lambda: target.received == [b"first"])
        target.sockets[0].shutdown(socket.SHUT_RDWR)
        until(lambda: len(target.ends) == 1)
        target.sockets[0].close()
        with contextlib.suppress(OSError):
            while router.counters().clients.active:
                client.sendall(b"more")
        until(lambda: router.counters().clients.ended == 1)
        books = router.counters()
    assert books.up.failed > 0
    assert books.adds_up


def test_bytes_under_way_when_the_receiver_resets_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        FaultRouter.tcp(listener.getsockname(), Faults(delay=60, one_way="up")) as router,
        tcp_client(router.address) as client,
    ):
        target, _ = listener.accept()
        client.sendall(b"under way")
        until(lambda: router.counters().up.held == 9)
        target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        target.close()
        assert ended(client) == "ConnectionResetError"
        until(lambda: router.counters().clients.ended == 1)
        books = router.counters()
    assert (books.up.arrived, books.up.discarded) == (9, 9)
    assert books.adds_up


@pytest.mark.full
def test_a_gigabyte_passes_with_a_cut_now_and_then() -> None:
    rng = random.Random(3)
    total = 0
    with TcpTarget(echo=False) as target, FaultRouter.tcp(target.address) as router:
        while total < 1 << 30:
            with tcp_client(router.address) as client, contextlib.suppress(OSError):
                for _ in range(rng.randrange(1, 60)):
                    client.sendall(MEGABYTE)
                    total += len(MEGABYTE)
                if rng.random() < 0.5:
                    router.cut_all()
        until(lambda: router.counters().clients.active == 0)
        books = router.counters()
        until(lambda: len(target.ends) == len(target.sockets))
    for data in target.received:
        assert all(
            data[at : at + len(MEGABYTE)] == MEGABYTE[: len(data) - at]
            for at in range(0, len(data), len(MEGABYTE))
        )
    assert books.up.passed >= sum(map(len, target.received))
    assert books.adds_up
