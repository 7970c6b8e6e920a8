from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from penstock.protocols.datagrams import Address, DatagramSocket
from penstock.protocols.psi import (
    REPLAY_ALL,
    ClientHello,
    PsiMessage,
    RemoteExporter,
    RemoteImporter,
)
from penstock.protocols.psi.exporter import server as exporters
from penstock.protocols.psi.exporter import session as sessions
from penstock.protocols.psi.exporter import transports
from penstock.protocols.psi.store.streams import Store
from protocols.psi.raw_client import client
from support.until import until


def test_a_client_that_cannot_be_told_of_a_stream_has_to_come_again_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_ANNOUNCEMENT", 0.2)
    sent: list[PsiMessage] = []

    def send(messages: list[PsiMessage]) -> int:
        sent.extend(messages)
        return 0

    with Store.volatile("x") as store:
        stream = store.add_stream("Number", "System.Int32")
        for number in range(10):
            store.append(stream.id, number.to_bytes(4, "little"))
        session = sessions.Session(ClientHello.everything(), "somebody", 0)
        sender = sessions.Sender(
            session, store, send, sessions.Taken(), None, lambda: None, lambda: False
        )
        sender.run(threading.Event())
        assert session.is_over.is_set()
        assert (sent, sender.messages, sender.next_seq) == ([], 0, 0)


def test_a_client_that_datagrams_cannot_be_sent_to_comes_again_and_gets_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = iter([OSError(101, "the network is unreachable")])

    def faulty(sock: DatagramSocket, address: Address) -> Callable[[list[PsiMessage]], int]:
        send = transports.datagram_sender(sock, address)

        def send_or_fail(messages: list[PsiMessage]) -> int:
            for failure in failures:
                raise failure
            return send(messages)

        return send_or_fail

    monkeypatch.setattr(exporters, "datagram_sender", faulty)
    with (
        RemoteExporter(None, 0, "udp") as exporter,
        RemoteImporter("127.0.0.1", exporter.port, REPLAY_ALL, longest_wait=0.2) as importer,
    ):
        stream = exporter.exporter.write(None, "Number", "int")
        for number in range(100):
            stream.post(number)
        with importer.open_stream("Number") as imported:
            found = [imported.read(10) for _ in range(100)]
        assert [it.value for it in found if it is not None] == list(range(100))
        assert importer.statistics().connections == 2


class HaltingQuota:
    """Lets some messages pass, and has the next one wait."""

    at_once = 1

    def __init__(self, passing: int, wait: Callable[[], float]) -> None:
        self.passing = passing
        self._wait = wait

    def delay(self, size: int, time_ns: int) -> float:
        del size, time_ns
        self.passing -= 1
        return 0.0 if self.passing >= 0 else self._wait()


@pytest.mark.parametrize("received", [1, 2, 7, 61])
def test_a_psi_importer_that_leaves_while_messages_wait_gets_them_when_it_comes_again(
    received: int,
) -> None:
    # With an odd number, a message that was not sent has the time of the last one received.
    quota = HaltingQuota(received, lambda: 3600.0)
    with RemoteExporter(port=0, quota=quota) as exporter:
        posted = _post(exporter)
        with client(exporter.port) as peer:
            peer.burst()
            peer.open_data()
            got = peer.messages(received)
        until(lambda: not exporter.statistics().clients)
        quota.passing = len(posted)
        got += _come_again(exporter, got[-1], len(posted) - received)
        assert [(message.source_id, message.sequence_id) for message in got] == posted


@pytest.mark.parametrize("received", [2, 4, 60])
def test_a_psi_importer_whose_connection_breaks_gets_nothing_twice_when_it_comes_again(
    received: int,
) -> None:
    has_broken = threading.Event()
    quota = HaltingQuota(received, lambda: 0.0 if has_broken.wait(20) else 3600.0)
    with RemoteExporter(port=0, quota=quota) as exporter:
        posted = _post(exporter)
        with client(exporter.port) as peer:
            peer.burst()
            peer.open_data()
            got = peer.messages(received)
            peer.data.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.data.close()
            has_broken.set()
        until(lambda: not exporter.statistics().clients)
        quota.passing = len(posted)
        got += _come_again(exporter, got[-1], len(posted) - received)
        assert [(message.source_id, message.sequence_id) for message in got] == posted


def _post(exporter: RemoteExporter) -> list[tuple[int, int]]:
    """Post pairs of messages with the same time; return their stream ids and numbers."""
    pair = [exporter.exporter.write(None, name, "byte[]") for name in ("Frames", "Results")]
    began_ns = time.time_ns() // 100 * 100 - 3600 * 1_000_000_000
    for number in range(100):
        for stream in pair:
            stream.post(b"x", began_ns + number * 1_000_000_000)
    return [(stream.id, number) for number in range(1, 101) for stream in pair]


def _come_again(exporter: RemoteExporter, last: PsiMessage, count: int) -> list[PsiMessage]:
    """Connect as psi's importer does that has received `last`; return so many messages."""
    hello = ClientHello.of(last.originating_ns + 100)
    with client(exporter.port, hello.to_bytes()) as peer:
        peer.burst()
        peer.open_data()
        return peer.messages(count)
