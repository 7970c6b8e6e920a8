"""UDP from one process to another loses nothing on the loopback interface, at 20 MB/s."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from penstock.protocols.psi import REPLAY_ALL, RemoteImporter, Store

RATE = 20_000_000
SIZE = 1024

SENDER = """
import sys, time
from penstock.protocols.psi import RemoteExporter, Store
count, size, rate = map(int, sys.argv[1:])
with Store.volatile(slots=65536, size=128 << 20) as store, RemoteExporter(store, 0, "udp") as out:
    stream = out.exporter.write(None, "Bytes", "byte[]")
    print(out.port, flush=True)
    while not out.statistics().clients:
        time.sleep(0.01)
    time.sleep(0.3)
    sent, began = 0, time.monotonic()
    while sent < count:
        due = min(count, int((time.monotonic() - began) * rate / size))
        stream.post_many([(bytes(size), None)] * (due - sent))
        sent = due
        time.sleep(0.002)
    took = time.monotonic() - began
    stream.close()
    out.drain(20)
    print(took, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.full)])
def test_a_steady_stream_of_20_mb_a_second_arrives_whole(seconds: int) -> None:
    count = seconds * RATE // SIZE
    arguments = [sys.executable, "-c", SENDER, *map(str, (count, SIZE, RATE))]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        try:
            with (
                Store.volatile(slots=65536, size=128 << 20) as store,
                RemoteImporter("127.0.0.1", port, REPLAY_ALL, store=store) as importer,
                importer.open_stream("Bytes") as stream,
            ):
                received = 0
                deadline = time.monotonic() + 3 * seconds + 30
                while time.monotonic() < deadline:
                    found = stream.take(1000, 1.0)
                    received += len(found)
                    if not found and stream.is_over:
                        break
                books = importer.statistics()
                assert (received, books.lost, books.datagrams_lost) == (count, 0, 0)
                assert (books.datagrams_refused, books.repeated) == (0, 0)
            took = float(sender.stdout.readline())
            assert sender.stdin is not None
            sender.stdin.close()  # it may end, and remove its store
            sender.wait(20)
            assert took < 2 * seconds + 5
        finally:
            sender.kill()
