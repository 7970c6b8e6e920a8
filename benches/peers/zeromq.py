"""How does ZeroMQ pass messages?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from peers.contract import (
    FILE,
    PATIENCE,
    Case,
    Receiver,
    Scratch,
    Sender,
    Way,
    free_port,
    library,
    not_installed,
    send_each,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peers.tally import Payload, Taker

__all__ = ["ZeromqWay"]

#: From here on messages are not copied between Python and ZeroMQ: its own COPY_THRESHOLD.
_NO_COPY_FROM = 64 << 10


@dataclass(frozen=True)
class ZeromqWay(Way):
    """PUSH and PULL for one reader, XPUB and SUB for more; both wait instead of dropping."""

    name: str = "pyzmq"
    storage: str = "ipc"

    def missing(self) -> str | None:
        return not_installed("zmq", "pyzmq")

    def version(self) -> str:
        return version_of("pyzmq")

    def address(self, scratch: Scratch) -> str:
        if self.storage == "ipc":
            return f"ipc://{scratch.directory(FILE)}/socket"
        return f"tcp://127.0.0.1:{free_port()}"

    def open_writer(self, address: str, case: Case) -> Sender:
        return _ZeromqSender(address, case)

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        del number
        return _ZeromqReceiver(address, case)


class _ZeromqSender(Sender):
    def __init__(self, address: str, case: Case) -> None:
        zmq = library("zmq")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH if case.readers == 1 else zmq.XPUB)
        if case.readers > 1:
            self._socket.setsockopt(zmq.XPUB_NODROP, 1)
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tells of every subscription, to count
            self._socket.setsockopt(zmq.RCVTIMEO, round(PATIENCE * 1000))
        self._socket.set_hwm(case.depth)
        self._socket.bind(address)
        self._send = partial(self._socket.send, copy=case.size < _NO_COPY_FROM)

    def wait_for_readers(self, readers: int) -> None:
        if readers > 1:
            for _ in range(readers):
                self._socket.recv()  # a subscription

    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        return send_each(self._send, payloads, seconds)

    def send(self, payload: bytes) -> None:
        self._send(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)


class _ZeromqReceiver(Receiver):
    def __init__(self, address: str, case: Case) -> None:
        self._zmq: Any = library("zmq")
        self._copy = case.size < _NO_COPY_FROM
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.PULL if case.readers == 1 else self._zmq.SUB)
        self._socket.set_hwm(case.depth)
        self._socket.setsockopt(self._zmq.RCVTIMEO, round(PATIENCE * 1000))
        if case.readers > 1:
            self._socket.setsockopt(self._zmq.SUBSCRIBE, b"")
        self._socket.connect(address)

    def take_all(self, taker: Taker) -> None:
        try:
            taker.each(iter(self._socket.recv, None) if self._copy else self._views())
        except self._zmq.Again:
            return

    def _views(self) -> Iterator[Payload]:
        recv = self._socket.recv
        while True:
            yield recv(copy=False).buffer

    def close(self) -> None:
        self._context.destroy(linger=0)
