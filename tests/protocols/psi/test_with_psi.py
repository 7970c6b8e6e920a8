"""The real psi at the other end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from cli.command import PENSTOCK
from penstock.protocols.psi import REPLAY_ALL, DateTime, DateTimeKind, RemoteExporter
from penstock.protocols.psi.importer import RemoteImporter
from penstock.protocols.psi.store_set import Store
from protocols.psi.judge import Driver, driver, free_port, needs_psi
from support.until import until

pytestmark = needs_psi

HOST = "127.0.0.1"
LAG_NS = 500_000_000


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PENSTOCK, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


def values(imp: Driver, stream: str) -> list[int]:
    """Return the numbers that psi's importer printed of a stream."""
    lines = [line for line in imp.lines if line.startswith(f"MSG {stream} ")]
    return [int(line.rpartition("value=")[2]) for line in lines]


@pytest.mark.parametrize("is_restarted", [True, False], ids=["exporter restarted", "client cut"])
def test_after_an_outage_psi_gets_each_message_once_although_creation_lags(
    tmp_path: Path, is_restarted: bool
) -> None:
    port = free_port()
    with Store.create(tmp_path, "rig") as store:
        exporter = RemoteExporter(store, port)
        frames = exporter.exporter.write(None, "Frames", "int")
        results = exporter.exporter.write(None, "Results", "int")

        def post(first: int, count: int) -> None:
            for number in range(first, first + count):
                moment = time.time_ns() - LAG_NS
                # A result has the originating time of its frame, and comes when it is ready.
                frames.post(number, moment)
                results.post(number, moment)
                time.sleep(0.002)

        with driver("Imp", HOST, port, 30, "all", "v", "Frames:int", "Results:int") as imp:
            imp.wait_for("STREAM", count=2)
            post(0, 100)
            imp.wait_for("MSG Results", count=100)
            for cut in range(1, 4):
                if is_restarted:
                    exporter.close()
                    exporter = RemoteExporter(store, port)
                    frames = exporter.exporter.write(None, "Frames", "int")
                    results = exporter.exporter.write(None, "Results", "int")
                else:
                    for session in list(exporter._sessions.values()):
                        session.end()
                post(100 * cut, 100)
                imp.wait_for("MSG Results", count=100 * (cut + 1))
            time.sleep(0.3)
            imp.wait_for("MSG Frames", count=400)
            assert values(imp, "Frames") == list(range(400))
            assert values(imp, "Results") == list(range(400))
        exporter.close()
