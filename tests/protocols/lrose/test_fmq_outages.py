"""The server dies, or the line to it: clients go on, and nothing is missing without a word."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.endpoints import create, open_reader, open_writer
from penstock.core.errors import ConnectionLost, Unacknowledged
from penstock.protocols.lrose.fmq_reader import FmqReader
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions
from penstock.protocols.lrose.fmq_writer import FmqWriter
from penstock.relay.faults import FaultRouter, Faults
from protocols.lrose.serving import served
from support.mosquitto import free_port

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


class ServerProcess:
    """The command, in a process that can be killed, always on the same port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.url = f"fmqp://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [PENSTOCK, "serve", "fmqp", "--root", str(self.root), "--port", str(self.port)]
        self.process = subprocess.Popen([*command, "--quiet"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0]
        assert self.process.stdout.readline().startswith("serving")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Restartable:
    """A server in this process that comes back on the same port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self.server = FmqServer(FmqServerOptions(root=root, port=self.port))
        self.url = self.server.url

    def stop(self) -> None:
        self.server.close()

    def start(self) -> None:
        self.server = FmqServer(FmqServerOptions(root=self.root, port=self.port))


@contextlib.contextmanager
def restartable(root: Path) -> Iterator[Restartable]:
    server = Restartable(root)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def server_process(root: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(root)
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("kills", "pause"), [(3, 0.4), pytest.param(25, 1.0, marks=[pytest.mark.full])]
)
@pytest.mark.timeout(300)
def test_clients_go_on_after_kill_9_and_every_message_is_delivered_or_its_loss_reported(
    tmp_path: Path, kills: int, pause: float
) -> None:
    with server_process(tmp_path) as server:
        url = f"{server.url}/q"
        create(url, slots=20_000, size="20M")
        is_over = threading.Event()
        written: list[list[int]] = [[], []]
        repeated = [0, 0]
        found: list[list[bytes]] = [[], []]
        lost = [0, 0]

        def write(name: int) -> None:
            writer = open_writer(url, doubt="again", retry="60s")
            assert isinstance(writer, FmqWriter)
            number = 0
            with writer:
                while not is_over.is_set():
                    if number % 3:
                        writer.write(b"%d:%d" % (name, number))
                        number += 1
                    else:
                        writer.write_many([b"%d:%d" % (name, number + n) for n in range(5)])
                        number += 5
                    time.sleep(0.001)
                written[name] = list(range(number))
                repeated[name] = writer.repeated

        def read(place: int) -> None:
            reader = open_reader(url, retry="60s")
            assert isinstance(reader, FmqReader)
            with reader:
                while True:
                    was_over = done.is_set()
                    messages = reader.read_many(1000, timeout=0.5)
                    found[place] += [m.payload for m in messages]
                    if was_over and not messages:
                        break
                lost[place] = reader.statistics().lost
                assert reader.reconnects >= 1
                assert reader.statistics().restarts == 0

        done = threading.Event()
        writers = [threading.Thread(target=write, args=(n,)) for n in range(2)]
        readers = [threading.Thread(target=read, args=(n,)) for n in range(2)]
        for thread in writers + readers:
            thread.start()
        for _ in range(kills):
            time.sleep(pause)
            server.kill()
            server.start()
        time.sleep(0.2)
        is_over.set()
        for thread in writers:
            thread.join(100)
        done.set()
        for thread in readers:
            thread.join(100)
    assert lost == [0, 0]
    assert found[0] == found[1]
    for name in range(2):
        own = [int(p.partition(b":")[2]) for p in found[0] if p.startswith(b"%d:" % name)]
        assert sorted(set(own)) == written[name]
        # What was written again may be there twice, and nothing else.
        assert len(own) - len(set(own)) <= repeated[name]


def test_a_reader_that_was_away_too_long_says_what_it_lost(tmp_path: Path) -> None:
    with restartable(tmp_path) as server:
        url = f"{server.url}/q"
        create(url, slots=10)
        with open_reader(url) as reader, open_writer(f"fmq:{tmp_path}/q") as local:
            local.write_many([b"%d" % n for n in range(5)])
            assert len(reader.read_many(3)) == 3
            server.stop()
            local.write_many([b"%d" % n for n in range(5, 50)])
            server.start()
            found = [m.seq for m in reader.available()]
            assert found == [3, 4, *range(40, 50)]
            assert reader.statistics().lost == 35
            assert reader.statistics().messages + reader.statistics().lost == 50


def test_a_queue_that_was_made_anew_during_the_outage_is_noticed(tmp_path: Path) -> None:
    with restartable(tmp_path) as server:
        url = f"{server.url}/q"
        create(url, slots=100)
        with open_writer(url) as writer:
            writer.write_many([b"old %d" % n for n in range(10)])
        for count in (20, 5, 10):
            with open_reader(url) as reader:
                first = list(reader.available())
                assert len(first) == len(reader.read_many(1000)) + len(first)
                server.stop()
                create(f"fmq:{tmp_path}/q?layout=classic&slots=100", replace=True)
                with open_writer(f"fmq:{tmp_path}/q") as local:
                    local.write_many([b"new %d %d" % (count, n) for n in range(count)])
                server.start()
                found = reader.read_many(1000, timeout=20)
                assert [m.payload for m in found] == [
                    b"new %d %d" % (count, n) for n in range(count)
                ]
                assert reader.statistics().restarts == 1


def test_a_write_whose_answer_is_lost_is_in_doubt_and_said_to_be(tmp_path: Path) -> None:
    with served(tmp_path) as server, _dropping_replies(server.port) as port:
        create(f"{server.url}/q")
        with open_writer(f"fmqp://127.0.0.1:{port}/q") as writer:
            writer.write_many([b"a", b"b"])
            _dropping_replies.drop.set()  # type: ignore[attr-defined]
            with pytest.raises(Unacknowledged) as caught:
                writer.write_many([b"c", b"d", b"e"])
            assert (caught.value.acknowledged, caught.value.in_doubt) == (0, 3)
            _dropping_replies.drop.clear()  # type: ignore[attr-defined]
            writer.write(b"f")
            books = writer.statistics()
            assert (books.messages, books.refused) == (3, 3)
        with open_reader(f"{server.url}/q") as reader:
            assert b"".join(m.payload for m in reader.available()) == b"abcdef"


@contextlib.contextmanager
def _dropping_replies(port: int) -> Iterator[int]:
    """Stand between, and hang up instead of passing on a reply while `drop` is set."""
    drop = threading.Event()
    _dropping_replies.drop = drop  # type: ignore[attr-defined]
    listener = socket.create_server(("127.0.0.1", 0))
    pumps: list[threading.Thread] = []
    sockets = [listener]

    def pass_on(source: socket.socket, target: socket.socket, *, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_reply and drop.is_set():
                    break
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                sockets.extend((client, server))
                for pair, is_reply in (((client, server), False), ((server, client), True)):
                    pump = threading.Thread(
                        target=pass_on, args=pair, kwargs={"is_reply": is_reply}, daemon=True
                    )
                    pumps.append(pump)
                    pump.start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for runner in (thread, *pumps):
            runner.join(5)
        for end in sockets:
            end.close()


def test_a_writer_notices_that_the_server_was_started_anew_before_it_sends(
    tmp_path: Path,
) -> None:
    with restartable(tmp_path) as server, open_writer(f"{server.url}/q") as writer:
        writer.write(b"one")
        server.stop()
        server.start()
        time.sleep(0.1)
        writer.write(b"two")  # not in doubt: nothing was sent to the one that died
        with open_reader(f"{server.url}/q") as reader:
            assert [m.payload for m in reader.available()] == [b"one", b"two"]


def test_a_reader_gives_up_when_the_server_stays_away(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        url = f"{server.url}/q"
        create(url)
        reader = open_reader(url, retry="1s")
        server.close()
        began = time.monotonic()
        assert reader.read(0.2) is None
        assert time.monotonic() - began < 0.9
        time.sleep(1)
        with pytest.raises(ConnectionLost):
            reader.read(0.2)
        reader.close()


def test_a_line_that_is_cut_again_and_again_loses_nothing(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        create(f"{server.url}/q", slots=5000, size="5M")
        with open_writer(f"{server.url}/q") as writer:
            writer.write_many([b"%d" % n + bytes(500) for n in range(3000)])
        faults = Faults(cut_after=500_000)  # of one reply and a half
        with FaultRouter.tcp(("127.0.0.1", server.port), faults, seed=3) as router:
            url = f"fmqp://127.0.0.1:{router.address[1]}/q"
            with open_reader(url, retry="20s") as reader:
                found: list[int] = []
                deadline = time.monotonic() + 60
                while len(found) < 3000 and time.monotonic() < deadline:
                    found += [m.seq for m in reader.read_many(100, timeout=1)]
                assert found == list(range(3000))
                assert reader.statistics().lost == 0
                assert isinstance(reader, FmqReader)
                assert reader.reconnects > 0
