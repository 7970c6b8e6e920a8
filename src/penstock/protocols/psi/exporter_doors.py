"""By which door do an exporter's clients come for their messages: TCP, a named pipe or UDP?"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from penstock.core.errors import Malformed
from penstock.protocols.psi.chunks import decode_chunk
from penstock.protocols.psi.handshake import decode_session_id, pipe_path
from penstock.protocols.psi.serving import Listener, listen_tcp, listen_unix
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from penstock.protocols.psi.options import ExporterOptions

__all__ = ["DatagramDoor", "Door", "StreamDoor", "open_door"]

_LARGEST_DATAGRAM: Final = 65536
#: How often (seconds) a thread that hears datagrams looks whether to end.
_LOOK: Final = 0.2


class Door(ABC):
    """Where clients come with the id of their session."""

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
        self, options: ExporterOptions, serve: Callable[[socket.socket, str], None]
    ) -> None:
        if options.transport == "pipe":
            self.pipe = str(uuid4())
            listener = listen_unix(pipe_path(self.pipe, tempfile.gettempdir()))
        else:
            listener = listen_tcp(options.host, options.data_port)
        self._listener = Listener(
            listener,
            serve,
            name="psi-data",
            max_clients=options.max_clients,
            reset=options.reset,
        )
        if self.pipe is None:
            self.port = self._listener.port

    @property
    def denied(self) -> int:
        return self._listener.denied

    @property
    def malformed(self) -> int:
        return self._listener.malformed

    def close(self) -> None:
        self._listener.close()
        if self.pipe is not None:
            with contextlib.suppress(OSError):
                os.unlink(pipe_path(self.pipe, tempfile.gettempdir()))  # noqa: PTH108 - a socket


class DatagramDoor(Door):
    """A UDP port."""

    def __init__(
        self,
        options: ExporterOptions,
        serve: Callable[[UUID, socket.socket, tuple[Any, ...]], bool],
    ) -> None:
        """`serve` is called for each id that comes, and tells whether there is such a session."""
        host = options.host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            with storage_errors("listening on", f"{host}:{options.data_port}"):
                self._socket.bind((host, options.data_port))
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(_LOOK)
        self.port = self._socket.getsockname()[1]
        self._serve = serve
        self._refused = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="psi-datagrams", daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        while not self._stop.is_set():
            try:
                datagram, address = self._socket.recvfrom(_LARGEST_DATAGRAM)
                id = decode_session_id(decode_chunk(datagram).payload)
            except TimeoutError:
                continue
            except Malformed:
                self._refused += 1
                continue
            except OSError:
                continue  # what the kernel says of a client that has left
            self._refused += not self._serve(id, self._socket, address)

    @property
    def denied(self) -> int:
        return 0

    @property
    def malformed(self) -> int:
        return self._refused

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._socket.close()


def open_door(
    options: ExporterOptions,
    serve_connection: Callable[[socket.socket, str], None],
    serve_datagram: Callable[[UUID, socket.socket, tuple[Any, ...]], bool],
) -> Door:
    """Open the door that the options ask for.

    :raises StorageError: the address cannot be had.
    """
    if options.transport == "udp":
        return DatagramDoor(options, serve_datagram)
    return StreamDoor(options, serve_connection)
