"""How fast is a relay over TCP beside others who pass messages by a network?

python benches/relaying.py [--quick]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import penstock
from harness import OwnProcess, Requirement, Result, machine, report, save
from peers.contract import BUFFER, MEMORY, PATIENCE, Case, Receiver, Scratch, Sender, Way, free_port
from peers.nats import NatsWay
from peers.queues import group_of, take_lists
from peers.runs import Pace, throughput_run
from peers.servers import NATS, missing_server, nats_server
from peers.zeromq import ZeromqWay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peers.tally import Taker

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
SIZE = 1024
RING = f"slots=16384&size={BUFFER}"
#: What UDP has to pass, and for how long.
UDP_BYTES = 20_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less time, less certain")
    parser.add_argument("--output", type=Path, help="where to write the figures")
    parser.add_argument("--only", default="", help="ways whose names begin with this")
    arguments = parser.parse_args()
    rounds, seconds, udp = (3, 0.6, 3) if arguments.quick else (7, 1.5, 10)
    where = machine()
    with ExitStack() as stack:
        scratch = Scratch(
            *(Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))) for _ in range(2))
        )
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = 0 if missing_server(NATS) else stack.enter_context(nats_server(home))
        ways: list[Way] = [
            ZeromqWay(storage="tcp"),
            NatsWay(port=port),
            RelayWay("relay to flight://", "tcp"),
            RelayWay("the same, with a server process", "tcp", has_own_server=True),
            PsiWay("psi exporter to importer", "tcp"),
        ]
        ways = [way for way in ways if way.name.startswith(arguments.only)]
        results = measure(ways, scratch, rounds, Pace(0.3, seconds, 0))
    requirements = judge(results)
    if "psi over UDP".startswith(arguments.only):
        requirements.append(udp_holds(udp))
    where["load after"] = machine()["load before"]
    report("A relay over loopback TCP", where, results, requirements, "pyzmq")
    print(save(arguments.output, "relay", where, results, requirements))
    if not all(each.reached for each in requirements):
        sys.exit(1)


def measure(ways: Sequence[Way], scratch: Scratch, rounds: int, pace: Pace) -> list[Result]:
    """Let all run in turn, round after round, so that a slow minute of the machine hits all."""
    rates: dict[str, list[float]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            if way.missing() is not None:
                continue
            outcome = throughput_run(way, Case(SIZE), pace, scratch)
            if outcome.rate is None:
                print(f"{way.label}: {outcome.problem}", file=sys.stderr)
            else:
                rates[way.name].append(outcome.rate)
    results: list[Result] = []
    for way in ways:
        if found := rates[way.name]:
            against = results[0] if results and results[0].name == "pyzmq" else None
            results.append(Result(way.name, way.storage, SIZE, tuple(found), against))
        else:
            print(f"{way.label}: {way.missing() or 'no run was whole'}", file=sys.stderr)
    return results


def judge(results: Sequence[Result]) -> list[Requirement]:
    rates = {result.name: result.rate for result in results}
    relay = rates.get("relay to flight://")
    found = []
    for peer, least in (("pyzmq", 1.5), ("NATS core", 5.0)):
        if relay is not None and peer in rates:
            ratio = relay / rates[peer]
            text = f"the relay against {peer}: at least {least:g}x"
            found.append(Requirement(text, ratio >= least, f"{ratio:.2f}x"))
    return found


# --- the relay: a queue here, `penstock cp`, a Flight server and a queue there ------------------


@dataclass(frozen=True)
class RelayWay(Way):
    """The sender writes to a queue, the relay is a process, the receiver reads another queue.

    The server that appends to it is a part of the receiver, or else a process, too.
    """

    has_own_server: bool = False

    def version(self) -> str:
        return f"penstock {penstock.__version__}"

    def address(self, scratch: Scratch) -> str:
        return str(scratch.directory(MEMORY))

    def open_writer(self, address: str, case: Case) -> Sender:
        del case
        return _QueueSender(f"fmq:{address}/source?{RING}&hold=relay&policy=wait")

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        del number
        return _RelayReceiver(Path(address), case.size, has_own_server=self.has_own_server)

    def clean_up(self, address: str) -> None:
        shutil.rmtree(address, ignore_errors=True)


class _QueueSender(Sender):
    def __init__(self, url: str) -> None:
        self._writer = penstock.open_writer(url)

    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        sent = 0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._writer.write_many(payloads)
            sent += len(payloads)
        return sent

    def send(self, payload: bytes) -> None:
        self._writer.write(payload)

    def close(self) -> None:
        self._writer.close()


class _RelayReceiver(Receiver):
    def __init__(self, folder: Path, size: int, *, has_own_server: bool) -> None:
        root = folder / "root"
        root.mkdir()
        penstock.open_writer(f"fmq:{root}/target?{RING}&hold=reader&policy=wait").close()
        self._closing = ExitStack()
        serve = _server_process if has_own_server else _server_here
        port = self._closing.enter_context(serve(root))
        target = f"flight://127.0.0.1:{port}/target?{RING}&hold=reader&policy=wait"
        source = f"fmq:{folder}/source"
        command = [PENSTOCK, "cp", "--follow", "--progress", "none", f"{source}?hold=relay", target]
        self._closing.enter_context(_running(command))
        self._reader: Any = self._closing.enter_context(
            penstock.open_reader(f"fmq:{root}/target?hold=reader")
        )
        deadline = time.monotonic() + 4 * PATIENCE
        while not _is_held(source) and time.monotonic() < deadline:
            time.sleep(0.01)  # a sender waits only for a relay that is there
        self._group = group_of(size)

    def take_all(self, taker: Taker) -> None:
        take_lists(self._reader, self._group, taker)

    def close(self) -> None:
        self._closing.close()


def _is_held(source: str) -> bool:
    return any(reader["alive"] for reader in penstock.describe(source).details["readers"])


@contextmanager
def _running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=10)


@contextmanager
def _server_process(root: Path) -> Iterator[int]:
    command = [PENSTOCK, "serve", "flight", "--quiet", "--root", str(root), "--port", "0"]
    with _running(command) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline().rstrip("/\n").rpartition(":")[2])


@contextmanager
def _server_here(root: Path) -> Iterator[int]:
    from penstock.protocols.flight import FlightServer, ServerOptions  # noqa: PLC0415 - gRPC

    with FlightServer(ServerOptions(root=root, port=0)) as server:
        yield server.port


# --- psi: an exporter in the sender, an importer in the receiver --------------------------------


@dataclass(frozen=True)
class PsiWay(Way):
    """Messages of a byte[] stream; each end has its store in memory."""

    def version(self) -> str:
        return f"penstock {penstock.__version__}"

    def address(self, scratch: Scratch) -> str:
        del scratch
        return str(free_port())

    def open_writer(self, address: str, case: Case) -> Sender:
        del case
        return _QueueSender(f"psi://127.0.0.1:{address}/Bench?{RING}")

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        del number
        return _QueueReceiver(f"psi://127.0.0.1:{address}/Bench?{RING}&quiet=5", case.size)


class _QueueReceiver(Receiver):
    def __init__(self, url: str, size: int) -> None:
        self._reader: Any = penstock.open_reader(url)
        self._group = group_of(size)

    def take_all(self, taker: Taker) -> None:
        take_lists(self._reader, self._group, taker)

    def close(self) -> None:
        self._reader.close()


# --- UDP: does a steady stream arrive whole? ------------------------------------------------------


def udp_holds(seconds: float) -> Requirement:
    """Send by UDP from one process to another, at a steady rate."""
    from penstock.protocols.psi import REPLAY_ALL, RemoteImporter, Store  # noqa: PLC0415 - as needed

    port, count = free_port(), int(seconds * UDP_BYTES / SIZE)
    send = OwnProcess(_send_datagrams, port)
    began = ended = 0.0
    received = 0
    try:
        with (
            Store.volatile(slots=65536, size=128 << 20) as store,
            RemoteImporter(
                "127.0.0.1", port, REPLAY_ALL, store=store, longest_wait=0.1
            ) as importer,
            ThreadPoolExecutor(1) as pool,
        ):
            sending = pool.submit(send, count)
            with importer.open_stream("Bench", timeout=20) as stream:
                while not stream.is_over or stream.messages < received:
                    found = stream.take(1000, 1.0)
                    now = time.monotonic()
                    began, ended = began or now, now if found else ended
                    received += len(found)
            sending.result()
            lost = importer.statistics().lost
    finally:
        send.close()
    rate = received * SIZE / max(ended - began, 1e-9)
    return Requirement(
        f"psi over UDP, {UDP_BYTES / 1e6:.0f} MB/s for {seconds:g} s: nothing is lost",
        lost == 0 and received == count and rate >= 0.95 * UDP_BYTES,
        f"{count - received:,} of {count:,} lost at {rate / 1e6:.1f} MB/s",
    )


def _send_datagrams(port: int, count: int) -> None:
    from penstock.protocols.psi import RemoteExporter, Store  # noqa: PLC0415 - as needed

    with (
        Store.volatile(slots=65536, size=128 << 20) as store,
        RemoteExporter(store, port, "udp") as exporter,
    ):
        stream = exporter.exporter.write(None, "Bench", "byte[]")
        while not exporter.statistics().clients:
            time.sleep(0.01)
        time.sleep(0.5)
        payload, sent, began = bytes(SIZE), 0, time.monotonic()
        while sent < count:
            due = min(count, int((time.monotonic() - began) * UDP_BYTES / SIZE))
            stream.post_many([(payload, None)] * (due - sent))
            sent = due
            time.sleep(0.002)
        stream.close()
        exporter.drain(10)
        time.sleep(1)


if __name__ == "__main__":
    main()
