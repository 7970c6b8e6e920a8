"""How fast are psi's messages passed on, by psi itself and by ours, in every direction?

PENSTOCK_PSI names the folder that holds `run`, which runs psi's own programs. Without it only ours
is measured. Both ends are processes of their own; the receiver counts from its first message to its
last.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

HOST = "127.0.0.1"
SIZE = 1024
#: Seconds that psi's importer, which has no other end, runs.
_PATIENCE = 12

_SENDER = """
import sys, time
from penstock.protocols.psi import RemoteExporter, Store
port, count, size = map(int, sys.argv[1:])
store = Store.volatile("bench", slots=65536, size=128 << 20)
with RemoteExporter(store, port) as exporter:
    stream = exporter.exporter.write(None, "B", "byte[]")
    print("READY", flush=True)
    sys.stdin.readline()
    payload = bytes(size)
    for _ in range(0, count, 100):
        stream.post_many([(payload, None)] * 100)
    print("POSTED", flush=True)
    sys.stdin.readline()
    exporter.close(0)
"""

_RECEIVER = """
import sys, time
from penstock.protocols.psi import REPLAY_ALL, RemoteImporter
port, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
with RemoteImporter("127.0.0.1", port, REPLAY_ALL, store=folder) as importer:
    importer.wait_connected(30)
    importer.open_stream("B").close()
    print("CONNECTED", flush=True)
    first = None
    deadline = time.monotonic() + 120
    while (got := importer.statistics().messages) < count and time.monotonic() < deadline:
        if got and first is None:
            first, before = time.perf_counter(), got
        time.sleep(0.001)
    print("RATE", (got - before) / (time.perf_counter() - first), got, flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the rates as JSON")
    arguments = parser.parse_args()
    folder = os.environ.get("PENSTOCK_PSI")
    sides = ["ours"] if folder is None else ["psi", "ours"]
    rates: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for sender in sides:
            for receiver in sides:
                rate = pass_on(sender, receiver, arguments.messages, folder)
                rates.setdefault((sender, receiver), []).append(rate)
    found = {way: median(each) for way, each in rates.items()}
    if arguments.json:
        print(json.dumps({f"{a} to {b}": rate for (a, b), rate in found.items()}))
        return
    table = Table(title=f"psi's messages of {SIZE:,} bytes by TCP", box=None)
    for name in ("from", "to", "messages/s", "against psi to psi"):
        table.add_column(name, justify="left" if name in {"from", "to"} else "right")
    yardstick = found.get(("psi", "psi"))
    for (sender, receiver), rate in found.items():
        ratio = "" if yardstick is None else f"{rate / yardstick:.2f}x"
        table.add_row(sender, receiver, f"{rate:,.0f}", ratio)
    Console().print(table)


def pass_on(sender: str, receiver: str, count: int, folder: str | None) -> float:
    """Return the messages a second of one direction."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port = sock.getsockname()[1]
    run = "" if folder is None else str(Path(folder) / "run")
    with tempfile.TemporaryDirectory() as target:
        send = {
            "psi": [run, "Gen", port, "Tcp", "burst", "-", count, SIZE],
            "ours": [sys.executable, "-c", _SENDER, port, count, SIZE],
        }[sender]
        receive = {
            "psi": [run, "Imp", HOST, port, _PATIENCE, "all", "q", "B:bytes"],
            "ours": [sys.executable, "-c", _RECEIVER, port, count, f"{target}/in"],
        }[receiver]
        # psi keeps the mark of a store in memory, by its name, among the temporary files.
        os.environ["TMPDIR"] = target
        with _started(send) as source, _started_after(source, receive) as sink:
            try:
                _line(sink, "CONNECTED")
                time.sleep(1)
                _say(source)
                words = _line(sink, "RATE" if receiver == "ours" else "TOTAL")
            finally:
                source.kill()
                sink.kill()
    if receiver == "ours":
        rate, got = float(words[1]), int(words[2])
    else:
        rate, got = float(words[3].removeprefix("rate=").removesuffix("/s")), int(words[2])
    if got != count:
        raise SystemExit(f"{sender} to {receiver}: {got:,} of {count:,} messages came")
    return rate


def _started(command: list[object]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _started_after(source: subprocess.Popen[str], command: list[object]) -> subprocess.Popen[str]:
    _line(source, "READY")
    return _started(command)


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line.split()
    raise SystemExit(f"{process.args!r} ended without {word}")


if __name__ == "__main__":
    main()
