"""Every server of the project, in a process of its own, with a good client and what is bad for it.

`python servers.py NAME FOLDER` is one: it says where it is, and serves until SIGTERM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from penstock import open_writer
from penstock.dispatch.control import ControlServer, ask
from penstock.protocols.datagrams import Datagrams, DatagramServer, DatagramSocket
from penstock.protocols.lhhttt.server import LhhtttServer, ServerOptions
from penstock.protocols.lrose.ds_client import ping
from penstock.protocols.lrose.ds_message import Category, DsMessage
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions
from penstock.protocols.lrose.sku import encode_header
from penstock.protocols.psi import ClientHello, RemoteExporter
from penstock.protocols.psi.clock import RemoteClockServer, ask_clock, encode_clock_request
from penstock.protocols.psi.rendezvous import RendezvousServer
from penstock.protocols.psi.rendezvous_wire import encode_client_hello
from penstock.registry import DataMapServer, LdataServer, LdataServerOptions, MapServerOptions

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
#: Seconds after which a good client gives up.
PATIENCE = 10.0


class Subject(ABC):
    """One kind of server."""

    name: ClassVar[str]
    #: What a good client says first.
    request: ClassVar[bytes]
    #: The beginning of a message that says that it is larger than any, or never ends.
    huge: ClassVar[bytes]
    #: Whether another part of the process needs descriptors, too, which does not wait for them.
    has_others: ClassVar[bool] = False

    @abstractmethod
    def make(self, folder: Path) -> tuple[Any, str]:
        """Start it; return what is to be closed, and where clients find it."""

    @abstractmethod
    def ask(self, where: str) -> None:
        """Be a good client, from connecting to an answer."""

    def connect(self, where: str) -> socket.socket:
        return socket.create_connection((HOST, int(where)), PATIENCE)

    def _answer(self, where: str) -> bytes:
        with self.connect(where) as client:
            client.sendall(self.request)
            answer = client.recv(1 << 16)
        assert answer, "it was turned away"
        return answer


_PING = DsMessage(0, category=Category.SERVER_STATUS).to_bytes()


class _Lrose(Subject):
    request = encode_header(0, 1, len(_PING)) + _PING
    huge = b"\xf0" * 8 + struct.pack(">3i", 1, 2**31 - 1, 1)

    def ask(self, where: str) -> None:
        ping(HOST, int(where))


class Fmqp(_Lrose):
    name = "fmqp"

    def make(self, folder: Path) -> tuple[Any, str]:
        server = FmqServer(FmqServerOptions(root=folder, port=0))
        return server, str(server.port)


class Ldata(_Lrose):
    name = "ldata"

    def make(self, folder: Path) -> tuple[Any, str]:
        server = LdataServer(LdataServerOptions(root=folder, port=0, datamapper=False))
        return server, str(server.port)


class DataMap(_Lrose):
    name = "datamapper"

    def make(self, folder: Path) -> tuple[Any, str]:
        server = DataMapServer(MapServerOptions(port=0, state=folder / "map.xml"))
        return server, str(server.port)


class Lhhttt(Subject):
    """The connections of a UDP queue, which it serves beside its datagrams."""

    name = "lhhttt"
    request = b"14SIZE"
    huge = b"9fffffffff"

    def make(self, folder: Path) -> tuple[Any, str]:
        server = LhhtttServer(ServerOptions(port=0, tcp=True, journal=f"log:{folder}/queue"))
        return server, str(server.port)

    def ask(self, where: str) -> None:
        assert self._answer(where) == b"110"


class Psi(Subject):
    """The meta connection of an exporter."""

    name = "psi"
    request = ClientHello.everything().to_bytes()
    huge = struct.pack("<i", 2**31 - 1)

    def make(self, folder: Path) -> tuple[Any, str]:
        del folder
        exporter = RemoteExporter(None, 0, first_message=5.0)
        return exporter, str(exporter.port)

    def ask(self, where: str) -> None:
        self._answer(where)


class PsiData(Psi):
    """The data connections of an exporter; a good client comes by the other."""

    name = "psi-data"

    def make(self, folder: Path) -> tuple[Any, str]:
        del folder
        exporter = RemoteExporter(None, 0, first_message=5.0)
        return exporter, f"{exporter.data_port}/{exporter.port}"

    def connect(self, where: str) -> socket.socket:
        return super().connect(where.partition("/")[0])

    def ask(self, where: str) -> None:
        with socket.create_connection((HOST, int(where.partition("/")[2])), PATIENCE) as client:
            client.sendall(self.request)
            assert client.recv(1 << 16)


class Rendezvous(Subject):
    name = "rendezvous"
    request = encode_client_hello()
    huge = encode_client_hello() + struct.pack("<Bi", 0, 2**31 - 1)

    def make(self, folder: Path) -> tuple[Any, str]:
        del folder
        server = RendezvousServer(HOST, 0)
        return server, str(server.port)

    def ask(self, where: str) -> None:
        self._answer(where)


class Clock(Subject):
    name = "clock"
    request = encode_clock_request()
    huge = b"\xff" * 64

    def make(self, folder: Path) -> tuple[Any, str]:
        del folder
        server = RemoteClockServer(HOST, 0)
        return server, str(server.port)

    def ask(self, where: str) -> None:
        ask_clock(HOST, int(where), PATIENCE)


class Bulk(Subject):
    """Flight's other port; a good client comes by Flight, and goes on by it."""

    name = "bulk"
    has_others = True
    request = b"PNBULK"
    huge = b"\xff" * 64

    def make(self, folder: Path) -> tuple[Any, str]:
        from penstock.protocols.flight.server import FlightServer, ServerOptions

        server = FlightServer(ServerOptions(root=folder, host=HOST, port=0))
        return server, f"{server.bulk_port}/{server.port}"

    def connect(self, where: str) -> socket.socket:
        return super().connect(where.partition("/")[0])

    def ask(self, where: str) -> None:
        with open_writer(
            f"flight://{HOST}:{where.partition('/')[2]}/q?slots=100&retry=1s"
        ) as writer:
            writer.write(b"x")


class Control(Subject):
    """The socket of a dispatcher, in its state folder."""

    name = "control"
    request = b'{"command": "echo"}\n'
    huge = b"[" * 70_000

    def make(self, folder: Path) -> tuple[Any, str]:
        return ControlServer(folder, lambda question: question), str(folder)

    def connect(self, where: str) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE)
        folder = os.open(where, os.O_RDONLY)
        try:
            client.connect(f"/proc/self/fd/{folder}/control")
        finally:
            os.close(folder)
        return client

    def ask(self, where: str) -> None:
        ask(Path(where), {"command": "echo"}, PATIENCE)


class MetricsPage(Subject):
    """What a run of pipelines tells a monitoring system."""

    name = "metrics"
    request = b"GET /metrics HTTP/1.1\r\n\r\n"
    huge = b"GET /" + b"x" * 70_000

    def make(self, folder: Path) -> tuple[Any, str]:
        from penstock.pipeline.run.metrics import Metrics, MetricsServer

        del folder
        server = MetricsServer(Metrics())
        return server, str(server.port)

    def ask(self, where: str) -> None:
        assert self._answer(where).startswith(b"HTTP/1.1 200 OK\r\n")


class Echo(Subject):
    """A server of datagrams; to connect is to have somewhere to send to."""

    name = "datagrams"
    request = b"hello"
    huge = bytes(60_000)

    def make(self, folder: Path) -> tuple[Any, str]:
        del folder
        sock = DatagramSocket.bind(HOST, 0, largest=1500)

        def answer(found: Datagrams) -> None:
            if any(payload == b"fail" for payload, _ in found.whole):
                raise RuntimeError("a fault")
            sock.send(found.whole, 1.0)

        server = DatagramServer("echo", sock, answer, log=log).start()
        return server, str(server.port)

    def connect(self, where: str) -> socket.socket:
        client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        client.connect((HOST, int(where)))
        return client

    def ask(self, where: str) -> None:
        with DatagramSocket.connect(HOST, int(where)) as client:
            for _ in range(20):  # one may be lost in a flood, and is asked again
                client.send([(b"hello", None)])
                if client.receive(timeout=0.5):
                    return
        raise AssertionError("it does not answer")


SUBJECTS: dict[str, Subject] = {
    subject.name: subject
    for subject in (
        Fmqp(),
        Ldata(),
        DataMap(),
        Lhhttt(),
        Psi(),
        PsiData(),
        Rendezvous(),
        Clock(),
        Bulk(),
        Control(),
        MetricsPage(),
        Echo(),
    )
}


class Running:
    """A server in a process of its own."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject = subject
        self._log = folder.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, subject.name, str(folder)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        self.where = self.process.stdout.readline().strip()
        assert self.where, self.said()

    def ask(self) -> None:
        self.subject.ask(self.where)

    def connect(self) -> socket.socket:
        return self.subject.connect(self.where)

    def megabytes(self) -> float:
        """Return the memory that it has, without what it maps: a log is as large as it may be."""
        _, resident, mapped, *_ = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return (int(resident) - int(mapped)) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def threads(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/task").iterdir())

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def said(self) -> str:
        """Return what is in its log."""
        return self._log.read_text()

    def terminate(self, seconds: float) -> None:
        """Tell it to stop, which it has done in time."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(seconds) == 0, self.said()


@contextlib.contextmanager
def running(subject: Subject, folder: Path) -> Iterator[Running]:
    server = Running(subject, folder)
    try:
        server.ask()
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def main(name: str, folder: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    server, where = SUBJECTS[name].make(Path(folder))
    sys.stdout.write(f"{where}\n")
    sys.stdout.flush()
    while not is_over.wait(0.1):
        pass
    server.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
