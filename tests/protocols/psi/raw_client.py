"""A client of psi that shows every byte."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from penstock.protocols.psi import (
    ClientHello,
    Intermission,
    MessageDecoder,
    MetaDecoder,
    PsiMessage,
    ServerHello,
)
from penstock.protocols.psi.handshake import MetaEvent

__all__ = ["RawClient", "client"]


class RawClient:
    """What a client of psi does, byte by byte."""

    def __init__(self, port: int, hello: bytes | None = None) -> None:
        self.meta = socket.create_connection(("127.0.0.1", port), 10)
        self.meta.sendall(ClientHello.everything().to_bytes() if hello is None else hello)
        self._decoder = MetaDecoder()
        self._events: list[MetaEvent] = []
        self.bytes = b""
        event = self.event()
        assert isinstance(event, ServerHello)
        self.hello = event

    def event(self) -> MetaEvent:
        while not self._events:
            data = self.meta.recv(65536)
            assert data, "the meta connection was closed"
            self.bytes += data
            self._events = self._decoder.feed(data)
        return self._events.pop(0)

    def burst(self) -> list[MetaEvent]:
        events: list[MetaEvent] = []
        while not isinstance(event := self.event(), Intermission):
            events.append(event)
        return events

    def open_data(self) -> None:
        assert self.hello.port is not None
        self.data = socket.create_connection(("127.0.0.1", self.hello.port), 10)
        self.data.sendall(self.hello.session.bytes_le)
        self._messages = MessageDecoder()

    def messages(self, count: int) -> list[PsiMessage]:
        found: list[PsiMessage] = []
        while len(found) < count:
            data = self.data.recv(65536)
            assert data, f"the data connection was closed after {len(found)}"
            found += self._messages.feed(data)
        return found

    def close(self) -> None:
        self.meta.close()
        if hasattr(self, "data"):
            self.data.close()


@contextlib.contextmanager
def client(port: int, hello: bytes | None = None) -> Iterator[RawClient]:
    made = RawClient(port, hello)
    try:
        yield made
    finally:
        made.close()
