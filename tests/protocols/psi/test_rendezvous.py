"""Processes meet at a rendezvous, and stay known through broken connections."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from penstock.core.errors import ConnectionLost, NotFound
from penstock.protocols.psi import Transport
from penstock.protocols.psi.rendezvous import RendezvousClient, RendezvousServer
from penstock.protocols.psi.rendezvous_wire import (
    AddProcess,
    Disconnect,
    Endpoint,
    EndpointKind,
    Process,
    RendezvousClientDecoder,
    RendezvousHello,
    StreamOffer,
    decode_updates,
    encode_client_hello,
    encode_update,
)
from penstock.relay.faults import FaultRouter
from protocols.psi.recordings import recording
from support.until import until

HOST = "127.0.0.1"
RIG = Process(
    "rig",
    "1.0",
    (
        Endpoint(
            EndpointKind.REMOTE_EXPORTER,
            "rig.local",
            11411,
            Transport.TCP,
            (StreamOffer("Floats", "System.Single"),),
        ),
    ),
)


def test_what_is_removed_while_the_server_is_away_is_removed_when_it_is_back() -> None:
    with (
        RendezvousServer(HOST, 0) as server,
        FaultRouter.tcp((HOST, server.port)) as router,
        RendezvousClient(HOST, router.address[1], longest_wait=0.2) as client,
    ):
        client.add(RIG)
        client.add(RIG._replace(name="other"))
        until(lambda: len(server.processes) == 2)
        until(lambda: len(client.processes) == 2)
        router.cut_all()
        client.remove("rig")
        until(lambda: list(server.processes) == ["other"])
        client.add(RIG)
        assert client.wait_for("rig") == RIG


def test_everybody_hears_of_every_process_also_who_added_it() -> None:
    with (
        RendezvousServer(HOST, 0) as server,
        RendezvousClient(HOST, server.port) as one,
        RendezvousClient(HOST, server.port) as two,
    ):
        assert one.wait_connected(10)
        one.add(RIG)
        assert two.wait_for("rig") == RIG == one.wait_for("rig")
        assert one.address == HOST
        one.add(RIG._replace(version="2"))  # a second one of that name is ignored
        with RendezvousClient(HOST, server.port) as late:
            assert late.wait_for("rig").version == "1.0"
        two.remove("rig")
        until(lambda: not one.processes and not server.processes)


def test_a_recorded_client_is_understood() -> None:
    (update,) = decode_updates(recording("rendezvous.c2s.add.bin"))
    assert isinstance(update, AddProcess)
    with (
        RendezvousServer(HOST, 0) as server,
        socket.create_connection((HOST, server.port)) as peer,
    ):
        peer.sendall(encode_client_hello() + recording("rendezvous.c2s.add.bin"))
        decoder = RendezvousClientDecoder()
        heard: list[object] = []
        while len(heard) < 2:
            heard += decoder.feed(peer.recv(65536))
        assert heard == [RendezvousHello(HOST, 0), update]
        server.close()
        assert peer.recv(10) == encode_update(Disconnect())


def test_a_client_comes_again_with_its_processes_when_the_server_was_gone() -> None:
    server = RendezvousServer(HOST, 0)
    with RendezvousClient(HOST, server.port, longest_wait=0.2) as client:
        client.add(RIG)
        until(lambda: "rig" in server.processes)
        server.close()
        with RendezvousServer(HOST, server.port) as again:
            until(lambda: "rig" in again.processes)


def test_a_cut_connection_is_made_again() -> None:
    with (
        RendezvousServer(HOST, 0) as server,
        FaultRouter.tcp((HOST, server.port)) as router,
        RendezvousClient(HOST, router.address[1], longest_wait=0.2) as client,
    ):
        assert client.wait_connected(10)
        router.cut_all()
        server.add(RIG)
        assert client.wait_for("rig") == RIG


def test_who_left_is_kept_as_psi_does_or_forgotten_by_choice() -> None:
    for forget in (False, True):
        with RendezvousServer(HOST, 0, forget_who_left=forget) as server:
            with RendezvousClient(HOST, server.port) as client:
                client.add(RIG)
                until(lambda: "rig" in server.processes)
            if forget:
                until(lambda: not server.processes)
            else:
                time.sleep(0.2)
                assert server.processes == {"rig": RIG}


@pytest.mark.parametrize("garbage", [b"\7\7", b"\2\0\xff", b"\2\0\1\xff\xff\xff\xff\x7f", b""])
def test_garbage_harms_nobody(garbage: bytes) -> None:
    with RendezvousServer(HOST, 0) as server, socket.create_connection((HOST, server.port)) as bad:
        bad.sendall(garbage)
        with RendezvousClient(HOST, server.port) as client:
            client.add(RIG)
            assert client.wait_for("rig") == RIG


def test_a_process_that_does_not_come_is_a_clear_error() -> None:
    with RendezvousServer(HOST, 0) as server, RendezvousClient(HOST, server.port) as client:
        assert client.wait_connected(10)
        with pytest.raises(NotFound, match="'nobody'"):
            client.wait_for("nobody", timeout=0.1)
    with (
        RendezvousClient(HOST, server.port) as client,
        pytest.raises(ConnectionLost, match="nobody listens"),
    ):
        client.wait_for("nobody", timeout=0.5)


def large(name: str, streams: int, text: str = "") -> Process:
    offers = (StreamOffer(text, text),) * streams
    endpoints = (Endpoint(EndpointKind.NETMQ_SOURCE, "tcp://rig:1", 0, None, offers),)
    return Process(name, "1", endpoints)


def test_all_processes_together_take_no_more_memory_than_is_allowed() -> None:
    with (
        RendezvousServer(HOST, 0, max_bytes=1 << 20) as server,
        RendezvousClient(HOST, server.port) as client,
    ):
        assert client.wait_connected(10)
        for number in range(20):
            client.add(large(f"P{number}", 100, "x" * 500))
        until(lambda: len(server.processes) + server.refused == 20)
        assert 5 <= len(server.processes) <= 10
        assert sum(process.memory for process in server.processes.values()) <= 1 << 20
        for name in list(server.processes):
            server.remove(name)
        assert server.add(large("again", 100, "x" * 500))  # what is removed makes room


def test_streams_without_names_are_counted_as_memory_too() -> None:
    with (
        RendezvousServer(HOST, 0) as server,
        socket.create_connection((HOST, server.port), 10) as client,
    ):
        client.sendall(encode_client_hello())
        update = large("P", 10_000)
        endpoints = update.endpoints * 100
        with contextlib.suppress(OSError):
            client.sendall(encode_update(AddProcess(update._replace(endpoints=endpoints))))
            client.settimeout(10)
            while client.recv(65536):
                pass
        assert not server.processes
