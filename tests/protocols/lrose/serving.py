"""A server of queues for tests, ours or one with LROSE's ways, and small clients."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from penstock.core.errors import Unsupported
from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.fmq_replies import NOTHING_THERE
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions
from penstock.protocols.lrose.fmq_session import FmqSession
from penstock.protocols.lrose.fmq_shared import Shared
from penstock.protocols.lrose.fmq_wire import Op
from penstock.protocols.lrose.serving import DsServer, ServerThread
from penstock.protocols.lrose.sku import Decoder, Frame, encode


@contextmanager
def served(root: Path, **options: object) -> Iterator[FmqServer]:
    settings = {"root": root, "port": 0} | options
    with FmqServer(FmqServerOptions(**settings)) as server:  # type: ignore[arg-type]
        yield server


class LroseSession(FmqSession):
    """Does what LROSE's server does: cannot seek to an id, does not wait, jumps when overrun."""

    def handle(self, request: DsMessage):  # type: ignore[no-untyped-def]
        if request.type == Op.SEEK_TO_ID:
            raise Unsupported("there is no request 43011")
        return super().handle(request._replace(flags=0))

    def _opened(self):  # type: ignore[no-untyped-def]
        queue = super()._opened()
        if not hasattr(queue, "plain_take"):
            queue.plain_take = queue.take  # type: ignore[attr-defined]

            def take(wanted: int, most: int) -> bytes:
                reader = queue._reading  # type: ignore[attr-defined]
                lost = reader.statistics().lost
                found: bytes = queue.plain_take(wanted, most)  # type: ignore[attr-defined]
                if reader.statistics().lost > lost and found != NOTHING_THERE:
                    reader.seek("last")  # spec lrose 6.1, 4
                    found = queue.plain_take(wanted, most)  # type: ignore[attr-defined]
                return found

            queue.take = take  # type: ignore[method-assign]
        return queue


@contextmanager
def served_as_lrose(root: Path) -> Iterator[str]:
    options = FmqServerOptions(root=root, port=0)

    def make() -> DsServer:
        shared = Shared(options)
        return DsServer(options, lambda name: LroseSession(shared, name), on_close=shared.close)

    with ServerThread(make) as server:
        yield f"fmqp://{server.address}"


def eventually(check: Callable[[], object], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Caller:
    """A client that says what it is told to, and nothing else."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 10)
        self._decoder = Decoder(1 << 24, allow_http=True)
        self._frames: list[Frame] = []
        self._seq = 0

    def say(self, message: DsMessage, id: int = 43000) -> None:
        self._seq += 1
        self.socket.sendall(encode(Frame(id, self._seq, message.to_bytes())))

    def hear_frame(self) -> Frame:
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def hear(self) -> DsMessage:
        return DsMessage.from_bytes(self.hear_frame().payload)

    def ask(self, message: DsMessage) -> DsMessage:
        self.say(message)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
