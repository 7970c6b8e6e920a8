"""What stands behind a router in these tests: echoes and collectors with real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

#: Bounds a wait on a busy machine; what is tested is that it ends.
SOON = 20.0


class TcpTarget:
    """Takes connections: echoes what comes, and keeps it."""

    def __init__(self, *, echo: bool = True) -> None:
        self._echo = echo
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.address: tuple[str, int] = self._listener.getsockname()
        #: What came, by connection.
        self.received: list[bytearray] = []
        self.sockets: list[socket.socket] = []
        #: How each connection ended: `eof` or the name of an error.
        self.ends: dict[int, str] = {}
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                number = len(self.sockets)
                self.received.append(bytearray())
                self.sockets.append(sock)
                thread = threading.Thread(target=self._serve, args=(number, sock))
                self._threads.append(thread)
                thread.start()

    def _serve(self, number: int, sock: socket.socket) -> None:
        try:
            while data := sock.recv(65536):
                self.received[number] += data
                if self._echo:
                    sock.sendall(data)
            self.ends[number] = "eof"
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self.ends.setdefault(number, type(error).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for sock in (self._listener, *self.sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(SOON)
        for sock in (self._listener, *self.sockets):
            sock.close()


class UdpTarget:
    """Takes datagrams: keeps them with their senders, and echoes them if told to."""

    def __init__(self, *, echo: bool = False) -> None:
        self._echo = echo
        self.socket = udp_socket()
        self.socket.bind(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.socket.getsockname()
        self.received: list[bytes] = []
        self.senders: list[tuple[str, int]] = []
        self.times: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.socket.settimeout(0.1)
        while not self._is_over.is_set():
            with contextlib.suppress(TimeoutError, ConnectionRefusedError):
                data, sender = self.socket.recvfrom(65535)
                if self._is_over.is_set():
                    return
                self.times.append(time.monotonic())
                self.senders.append(sender)
                self.received.append(data)
                if self._echo:
                    self.socket.sendto(data, sender)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self.socket.sendto(b"the end", self.address)  # so that the thread looks
        self._thread.join(SOON)
        self.socket.close()


def udp_socket() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    sock.settimeout(SOON)
    return sock


@contextlib.contextmanager
def udp_client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with udp_socket() as sock:
        sock.connect(address)
        yield sock


@contextlib.contextmanager
def tcp_client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=SOON) as sock:
        yield sock


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(65536)
        assert piece, f"the connection ended after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)


def receive_all(sock: socket.socket) -> bytes:
    data = bytearray()
    while piece := sock.recv(65536):
        data += piece
    return bytes(data)


@contextlib.contextmanager
def sending(sock: socket.socket, data: bytes, *, then_end: bool = False) -> Iterator[None]:
    """Send in the background, as much as the other side takes."""

    def send() -> None:
        with contextlib.suppress(OSError):
            sock.sendall(data)
            if then_end:
                sock.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join(SOON)
