"""Datagrams pass by batches; none is cut, dropped or sent in part without a count."""

from __future__ import annotations

import gc
import logging
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.core.errors import StorageError
from penstock.protocols.datagrams import Address, Datagrams, DatagramServer, DatagramSocket
from support.until import until

log = logging.getLogger(__name__)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        pytest.param(
            "::1", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
        ),
    ],
)
def test_a_batch_comes_in_order_with_its_senders_and_is_answered(host: str) -> None:
    with DatagramSocket.bind(host, 0) as server:
        clients = [DatagramSocket.connect(host, server.port) for _ in range(3)]
        for number, client in enumerate(clients):
            assert client.send([(b"%d.%d" % (number, each), None) for each in range(100)]) == 100
        found: list[tuple[bytes, Address]] = []
        while len(found) < 300:
            batch = server.receive(64, 5)
            assert 0 < len(batch.whole) <= 64
            found += batch.whole
        for number, client in enumerate(clients):
            own = client.socket.getsockname()
            mine = [payload for payload, address in found if address == own]
            assert mine == [b"%d.%d" % (number, each) for each in range(100)]
        assert server.send([(payload[::-1], address) for payload, address in found]) == 300
        for number, client in enumerate(clients):
            answers: list[tuple[bytes, Address]] = []
            while len(answers) < 100:
                answers += client.receive(timeout=5).whole
            assert [each for each, _ in answers] == [
                (b"%d.%d" % (number, each))[::-1] for each in range(100)
            ]
            client.close()
        books = server.statistics()
        assert (books.received, books.sent, books.cut, books.dropped) == (300, 300, 0, 0)
        assert books.bytes_in == books.bytes_out == sum(len(each) for each, _ in found)


def test_nothing_is_waited_for_as_long_as_was_said() -> None:
    with DatagramSocket.bind("127.0.0.1", 0) as server:
        assert not server.receive(timeout=0)
        began = time.monotonic()
        assert not server.receive(timeout=0.05)
        assert 0.04 < time.monotonic() - began < 5
        threading.Timer(0.05, lambda: client.send([(b"x", None)])).start()
        with DatagramSocket.connect("127.0.0.1", server.port) as client:
            assert [each for each, _ in server.receive(timeout=None).whole] == [b"x"]


def test_what_is_larger_than_the_limit_is_never_taken_for_whole() -> None:
    with (
        DatagramSocket.bind("127.0.0.1", 0, largest=100) as server,
        DatagramSocket.connect("127.0.0.1", server.port) as client,
    ):
        sizes = [100, 101, 0, 60_000]
        assert client.send([(bytes(size), None) for size in sizes]) == 4
        batch = server.receive(timeout=5)
        assert [len(payload) for payload, _ in batch.whole] == [100, 0]
        assert [(len(payload), size) for payload, _, size in batch.cut] == [
            (100, 101),
            (100, 60_000),
        ]
        assert server.statistics().cut == 2


def test_what_the_kernel_drops_is_counted() -> None:
    with (
        DatagramSocket.bind("127.0.0.1", 0) as server,
        DatagramSocket.connect("127.0.0.1", server.port) as client,
    ):
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sent = 0
        for _ in range(20):
            sent += client.send([(bytes(1000), None)] * 50, 1)
        before = server.statistics().dropped
        assert before > 0
        received = 0
        while batch := server.receive(timeout=0.05):
            received += len(batch.whole)
        assert sent == received + before == received + server.statistics().dropped
        client.send([(b"the last", None)])  # with which the kernel tells it once more
        received += len(server.receive(timeout=5).whole)
        assert sent + 1 == received + server.statistics().dropped
    assert server.statistics().dropped == before


def test_what_the_kernel_drops_last_is_counted_when_the_socket_is_closed() -> None:
    with (
        DatagramSocket.bind("127.0.0.1", 0) as server,
        DatagramSocket.connect("127.0.0.1", server.port) as client,
    ):
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.send([(bytes(1000), None)] * 50, 1)
        received = len(server.receive(timeout=5).whole)
    assert server.statistics().dropped == 50 - received > 0


def test_what_cannot_be_sent_is_told_of_when_it_is_the_first() -> None:
    with (
        DatagramSocket.bind("127.0.0.1", 0) as server,
        DatagramSocket.bind("127.0.0.1", 0) as client,
    ):
        there = ("127.0.0.1", server.port)
        datagrams = [(b"a", there), (bytes(70_000), there), (b"b", there)]
        assert client.send(datagrams) == 1
        with pytest.raises(OSError, match="too long"):
            client.send(datagrams[1:])
        assert client.send(datagrams[2:]) == 1
        assert client.statistics().sent == 2
        with pytest.raises(ValueError, match="no numeric address"):
            client.send([(b"a", ("localhost", server.port))])
        with pytest.raises(TypeError, match="an address is"):
            client.send([(b"a", 7)])  # type: ignore[list-item]
        with pytest.raises(TypeError, match="a datagram is"):
            client.send([b"a"])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            client.send([("text", there)])  # type: ignore[list-item]


def test_unix_sockets_are_answered_by_their_path(tmp_path: Path) -> None:
    def bound(name: str) -> DatagramSocket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.bind(str(tmp_path / name))
        return DatagramSocket(sock)

    with bound("a") as one, bound("b") as other:
        assert one.send([(b"x", str(tmp_path / "b"))]) == 1
        ((payload, address),) = other.receive(timeout=5).whole
        assert (payload, address) == (b"x", str(tmp_path / "a"))
        assert other.send([(b"y", address)]) == 1
        assert one.receive(timeout=5).whole == [(b"y", str(tmp_path / "b"))]
        with pytest.raises(ValueError, match="107 bytes"):
            one.send([(b"x", "n" * 108)])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as nameless:
            nameless.connect(str(tmp_path / "b"))
            nameless.send(b"z")
            assert other.receive(timeout=5).whole == [(b"z", None)]


def test_a_closed_socket_does_not_receive_from_another_that_has_its_number() -> None:
    server = DatagramSocket.bind("127.0.0.1", 0)
    server.close()
    with DatagramSocket.bind("127.0.0.1", 0), pytest.raises(OSError, match="Bad file"):
        server.receive(timeout=0)


def test_an_address_that_is_taken_is_told_of() -> None:
    with DatagramSocket.bind("127.0.0.1", 0) as server, pytest.raises(StorageError, match="in use"):
        DatagramSocket.bind("127.0.0.1", server.port)


def test_it_keeps_no_references_to_payloads_and_addresses() -> None:
    with (
        DatagramSocket.bind("127.0.0.1", 0) as server,
        DatagramSocket.connect("127.0.0.1", server.port) as client,
    ):
        payload = b"payload" * 10
        before = sys.getrefcount(payload)
        for _ in range(50):
            client.send([(payload, None)] * 20)
            server.receive(timeout=5)
        gc.collect()
        assert sys.getrefcount(payload) == before
        address = ("127.0.0.1", server.port)
        before = sys.getrefcount(address)
        with DatagramSocket.bind("127.0.0.1", 0) as other:
            for _ in range(50):
                other.send([(b"x", address)] * 20)
        del other
        assert sys.getrefcount(address) == before


def test_equal_datagrams_to_one_peer_stay_apart_and_in_order() -> None:
    sizes = [0, 0, 1, 7, 7, 1200, 1201, 30_000]
    with (
        DatagramSocket.bind("127.0.0.1", 0) as server,
        DatagramSocket.bind("127.0.0.1", 0) as one,
        DatagramSocket.bind("127.0.0.1", 0) as other,
    ):
        sent: dict[int, list[bytes]] = {one.port: [], other.port: []}
        batch: list[tuple[bytes, Address]] = []
        for number, size in enumerate(sizes * 3):
            for peer in (one, other):
                for each in range(70 if size < 2000 else 2):  # more than fit a run
                    payload = bytes([number, each]) * (size // 2) + b"x" * (size % 2)
                    sent[peer.port].append(payload)
                    batch.append((payload, ("127.0.0.1", peer.port)))
        assert server.send(batch, 5) == len(batch)
        assert server.statistics().bytes_out == sum(len(payload) for payload, _ in batch)
        for peer in (one, other):
            got: list[bytes] = []
            while len(got) < len(sent[peer.port]):
                found = peer.receive(timeout=5).whole
                assert found
                got += [payload for payload, _ in found]
            assert got == sent[peer.port]


def test_one_peer_that_cannot_be_reached_is_told_of_and_holds_up_no_other() -> None:
    with DatagramSocket.bind("127.0.0.1", 0) as server, DatagramSocket.bind("127.0.0.1", 0) as peer:
        nowhere = [(b"x", ("127.0.0.1", 0))] * 3
        with pytest.raises(OSError, match="Invalid argument"):
            server.send(nowhere, 1)
        batch = [*[(b"y", ("127.0.0.1", peer.port))] * 3, *nowhere]
        assert server.send(batch, 1) == 3
        assert len(peer.receive(timeout=5).whole) == 3


# --- while who handles them is busy -------------------------------------------------------------


class Slow:
    """Handles datagrams when it is let, and keeps them."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.is_busy = threading.Event()
        self.found: list[bytes] = []
        self.cut = 0

    def __call__(self, datagrams: Datagrams) -> None:
        self.is_busy.set()
        assert self.may.wait(20)
        self.found += [payload for payload, _ in datagrams.whole]
        self.cut += len(datagrams.cut)


def test_the_kernel_is_relieved_of_datagrams_while_others_are_handled() -> None:
    slow = Slow()
    sock = DatagramSocket.bind("127.0.0.1", 0, largest=1500)
    sock.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # for about fifty
    with (
        DatagramServer("slow", sock, slow, log=log).start() as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.connect(("127.0.0.1", server.port))
        sender.send(b"first")
        assert slow.is_busy.wait(20)
        sent = [b"%d" % number * 200 for number in range(1000)]
        for at in range(0, len(sent), 10):
            for payload in sent[at : at + 10]:
                sender.send(payload)
            until(lambda end=at + 10: sock.waiting >= end)  # type: ignore[misc]
        sender.send(b"x" * 2000)
        until(lambda: sock.waiting == 1001)
        slow.may.set()
        until(lambda: slow.cut == 1)
        assert slow.found == [b"first", *sent]
        books = server.statistics()
    assert (books.received, books.cut, books.dropped) == (1001, 1, 0)
    assert books.bytes_in == sum(map(len, slow.found))


def test_what_waits_in_the_kernel_at_the_end_is_counted() -> None:
    slow = Slow()
    sock = DatagramSocket.bind("127.0.0.1", 0, batch=16)
    server = DatagramServer("slow", sock, slow, log=log, waiting=20_000).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("127.0.0.1", server.port))
        for _ in range(100):
            sender.send(b"x" * 1000)
        until(lambda: sock.waiting)
        threading.Timer(0.2, slow.may.set).start()
        server.close(grace=0)
    books = server.statistics()
    assert len(slow.found) + server.unhandled == books.received == 100
    assert server.unhandled > 50


def test_what_waits_is_bounded_and_the_rest_is_counted_by_the_kernel() -> None:
    slow = Slow()
    sock = DatagramSocket.bind("127.0.0.1", 0, batch=16)
    sock.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    with (
        DatagramServer("slow", sock, slow, log=log, waiting=100_000).start() as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.connect(("127.0.0.1", server.port))
        for _ in range(2000):
            sender.send(b"x" * 1000)
        time.sleep(0.1)
        assert sock.waiting < 100 + 16
        slow.may.set()
        until(lambda: not sock.waiting)
        sender.send(b"last")
        until(lambda: slow.found and slow.found[-1] == b"last")
        books = server.statistics()
    assert books.dropped > 0
    assert books.received + books.dropped == 2001
    assert len(slow.found) == books.received


def test_what_waits_at_the_end_is_handled() -> None:
    slow = Slow()
    sock = DatagramSocket.bind("127.0.0.1", 0)
    server = DatagramServer("slow", sock, slow, log=log).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for number in range(500):
            sender.sendto(b"%d" % number, ("127.0.0.1", server.port))
    threading.Timer(0.2, slow.may.set).start()
    server.close(grace=20)
    assert slow.found == [b"%d" % number for number in range(500)]
    assert server.unhandled == 0


def test_datagrams_whose_handling_fails_are_counted() -> None:
    handled: list[bytes] = []

    def handle(datagrams: Datagrams) -> None:
        if any(data == b"bad" for data, _ in datagrams.whole):
            raise ValueError("it cannot be handled")
        handled.extend(data for data, _ in datagrams.whole)

    sock = DatagramSocket.bind("127.0.0.1", 0)
    with (
        DatagramServer("fails", sock, handle, log=log).start() as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        sender.connect(("127.0.0.1", server.port))
        for number in range(30):
            sender.send(b"bad" if number % 10 == 5 else b"good")
        until(lambda: len(handled) + server.unhandled == 30)
        assert server.unhandled >= 3
    assert len(handled) + server.unhandled == server.statistics().received == 30


def test_what_waits_behind_a_batch_that_takes_too_long_is_counted_once_at_the_end() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def handle(_: Datagrams) -> None:
        begun.set()
        assert goes_on.wait(30)

    sock = DatagramSocket.bind("127.0.0.1", 0)
    server = DatagramServer("stuck", sock, handle, log=log).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect(("127.0.0.1", server.port))
        sender.send(b"x")
        assert begun.wait(10)
        for _ in range(10):
            sender.send(b"x")
        until(lambda: server.statistics().received == 11)
    server.close(grace=0)
    assert server.unhandled == 10
    goes_on.set()
    for _ in range(2):
        server.close()
        assert server.unhandled == 10
