"""The quota of an exporter holds for all of its clients and streams together."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from penstock.protocols.psi.exporter.server import RemoteExporter
from protocols.psi.raw_client import client

RATE = 1_000_000
OFFERED = 10 * RATE
SIZE = 1000


def measured_rate(clients: int, streams: int, seconds: float) -> float:
    """Offer ten times the quota; return the bytes a second that all clients get together."""
    with (
        RemoteExporter(port=0, max_bytes_per_second=RATE) as exporter,
        contextlib.ExitStack() as stack,
    ):
        peers = [stack.enter_context(client(exporter.port)) for _ in range(clients)]
        received = [0] * clients
        stop = threading.Event()

        def post(number: int) -> None:
            stream = exporter.exporter.write(None, f"S{number}", "byte[]")
            began, sent = time.monotonic(), 0
            while not stop.is_set():
                due = int((time.monotonic() - began) * OFFERED / streams / SIZE)
                while sent < due and not stop.is_set():
                    stream.post(bytes(SIZE))
                    sent += 1
                time.sleep(0.001)

        def receive(number: int) -> None:
            while not stop.is_set() and (data := peers[number].data.recv(1 << 16)):
                received[number] += len(data)

        for peer in peers:
            peer.burst()
            peer.open_data()
        threads = [threading.Thread(target=post, args=(i,)) for i in range(streams)]
        threads += [threading.Thread(target=receive, args=(i,)) for i in range(clients)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        before, began = sum(received), time.monotonic()
        time.sleep(seconds)
        rate = (sum(received) - before) / (time.monotonic() - began)
        stop.set()
        for thread in threads:
            thread.join(10)
        assert all(received)
        return rate


@pytest.mark.parametrize(("clients", "streams"), [(1, 1), (4, 3)])
def test_a_quota_holds_within_10_percent_over_2_seconds(clients: int, streams: int) -> None:
    assert measured_rate(clients, streams, 2) == pytest.approx(RATE, rel=0.10)


@pytest.mark.full
@pytest.mark.parametrize("clients", [1, 4])
@pytest.mark.parametrize("streams", [1, 3])
def test_a_quota_holds_within_5_percent_over_10_seconds(clients: int, streams: int) -> None:
    assert measured_rate(clients, streams, 10) == pytest.approx(RATE, rel=0.05)
