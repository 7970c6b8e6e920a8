from __future__ import annotations

import threading
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
