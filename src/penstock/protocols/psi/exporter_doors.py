"""By which door do an exporter's clients come for their messages: TCP, a named pipe or UDP?"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from penstock.core.errors import Malformed
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.psi.chunks import decode_chunk
from penstock.protocols.psi.handshake import decode_session_id, pipe_path
from penstock.protocols.server import (
    Conversation,
    DatagramServer,
    End,
    Limits,
    Server,
    listen_tcp,
    listen_unix,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from penstock.protocols.connection import Connection
    from penstock.protocols.datagrams import Address, Datagrams
    from penstock.protocols.psi.options import ExporterOptions

__all__ = ["Door", "StreamDoor", "open_door"]

log = logging.getLogger(__name__)

#: Clients that are being sent to when it closes have so long (seconds) to take it.
_GRACE: Final = 1.0


class Door(ABC):
    """Where clients come."""

    #: What clients are told: a port, or the name of a pipe.
    port: int | None = None
    pipe: str | None = None

    @property
    @abstractmethod
    def denied(self) -> int:
        """Connections turned away because there were too many."""

    @property
    @abstractmethod
    def malformed(self) -> int:
        """Those turned away for what they sent."""

    @abstractmethod
    def close(self) -> None:
        """Let nobody in any more, and cut off who is there."""


class StreamDoor(Door):
    """A TCP port, or a named pipe."""

    def __init__(
        self,
        name: str,
        sockets: Sequence[socket.socket],
        options: ExporterOptions,
        serve: Callable[[Connection], None],
    ) -> None:
        """Have each client served, from its first word on until `serve` returns."""
        limits = Limits(
            max_clients=options.max_clients,
            first_message=options.first_message,
            stalled=options.stalled,
        )
        self.server = Server(
            name,
            sockets,
            lambda connection: Conversation(connection, serve),
            limits,
            log=log,
            reset=options.reset,
        ).start()

    @property
    def denied(self) -> int:
        return sum(self.server.statistics().refused.values())

    @property
    def malformed(self) -> int:
        return self.server.statistics().ended[End.MALFORMED]

    def close(self) -> None:
        self.server.stop(_GRACE)
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                _pipe_file(self.pipe).unlink()


class _DatagramDoor(Door):
    """A UDP port."""

    def __init__(
        self,
        options: ExporterOptions,
        serve: Callable[[UUID, DatagramSocket, Address], bool],
    ) -> None:
        """`serve` is called for each id that comes, and tells whether there is such a session."""
        self._serve = serve
        self._refused = 0
        sock = DatagramSocket.bind(options.host, options.data_port)
        self._server = DatagramServer("psi-datagrams", sock, self._handle, log=log).start()
        self.port = self._server.port

    def _handle(self, datagrams: Datagrams) -> None:
        self._refused += len(datagrams.cut)
        for payload, address in datagrams.whole:
            try:
                id = decode_session_id(decode_chunk(payload).payload)
            except Malformed:
                self._refused += 1
                continue
            self._refused += not self._serve(id, self._server.socket, address)

    @property
    def denied(self) -> int:
        return 0

    @property
    def malformed(self) -> int:
        return self._refused

    def close(self) -> None:
        self._server.close()


def open_door(
    options: ExporterOptions,
    serve_connection: Callable[[Connection], None],
    serve_datagram: Callable[[UUID, DatagramSocket, Address], bool],
) -> Door:
    """Open the door that the options ask for.

    :raises StorageError: the address cannot be had.
    """
    if options.transport == "udp":
        return _DatagramDoor(options, serve_datagram)
    if options.transport == "pipe":
        pipe = str(uuid4())
        door = StreamDoor("psi-data", listen_unix(_pipe_file(pipe)), options, serve_connection)
        door.pipe = pipe
        return door
    door = StreamDoor(
        "psi-data", listen_tcp(options.host, options.data_port), options, serve_connection
    )
    door.port = door.server.port
    return door


def _pipe_file(pipe: str) -> Path:
    return Path(pipe_path(pipe, tempfile.gettempdir()))
