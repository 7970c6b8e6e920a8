"""What do a psi importer and exporter tell each other before anything flows? (spec psi 2)"""

from __future__ import annotations

import os
import re
import struct
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Self
from uuid import UUID

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.decoding import StepDecoder
from penstock.protocols.psi.errors import WrongVersion
from penstock.protocols.psi.ticks import MAX_NS, MAX_TICKS, MIN_NS, ns_to_ticks, ticks_to_ns
from penstock.protocols.psi.wire import INT32, Cursor, pack_text

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from penstock.core.interfaces import BytesLike

__all__ = [
    "DEFAULT_PORT",
    "LARGEST_SERVER_HELLO",
    "PIPE_PIECE",
    "PROTOCOL_VERSION",
    "SESSION_ID_SIZE",
    "ClientHello",
    "ClientHelloDecoder",
    "ServerHello",
    "SessionIdDecoder",
    "Transport",
    "decode_session_id",
    "encode_session_id",
    "pipe_path",
    "pipe_pieces",
]

DEFAULT_PORT: Final = 11411
PROTOCOL_VERSION: Final = 0
SESSION_ID_SIZE: Final = 16
#: psi writes to a pipe in pieces of so many bytes; the framing is that of TCP.
PIPE_PIECE: Final = 65536
#: psi's own are below 100 bytes.
LARGEST_SERVER_HELLO: Final = 4096

_CLIENT: Final = "psi client handshake"
_SERVER: Final = "psi server handshake"
_SESSION: Final = "psi session id"
_VERSION: Final = struct.Struct("<h")
_INTERVAL: Final = struct.Struct("<qq")
#: The start that means the exporter's own now.
_LATEST: Final = -1
_PORTS: Final = range(1, 65536)
# A name comes from the peer and becomes part of a path.
_PIPE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


class Transport(Enum):
    """How messages travel; the names are psi's, as they are on the wire."""

    TCP = "Tcp"
    UDP = "Udp"
    NAMED_PIPES = "NamedPipes"


class ClientHello(NamedTuple):
    """What an importer wants replayed: messages created from `start_ticks` to `end_ticks`.

    Both ends are included. It is asked of the creation time, never of the originating time.
    """

    #: None: from the exporter's own now on.
    start_ticks: int | None = None
    end_ticks: int = MAX_TICKS

    @classmethod
    def of(cls, start_ns: int | None = None, end_ns: int = MAX_NS) -> Self:
        """Return the interval that nanoseconds mean; `MIN_NS` and `MAX_NS` are without end."""
        return cls(None if start_ns is None else ns_to_ticks(start_ns), ns_to_ticks(end_ns))

    @classmethod
    def everything(cls) -> Self:
        """Return the interval of all there was and will be."""
        return cls.of(MIN_NS)

    def by_creation(self) -> Self:
        """Return the same, so that an exporter of ours knows what its start means.

        psi's importer comes again with the originating time of what it got last. An end that is a
        tick before the last of all times, which no message has, says that this is a creation time.
        """
        if self.start_ticks and self.end_ticks == MAX_TICKS:
            return self._replace(end_ticks=MAX_TICKS - 1)
        return self

    @property
    def resumed_ns(self) -> int | None:
        """The originating time of what psi's importer got last, if it is one that comes again."""
        if not self.start_ticks or self.end_ticks == MAX_TICKS - 1:
            return None
        return ticks_to_ns(self.start_ticks - 1)

    @property
    def start_ns(self) -> int | None:
        """The first nanosecond that is wanted, or None."""
        return None if self.start_ticks is None else ticks_to_ns(self.start_ticks)

    @property
    def end_ns(self) -> int:
        """The first nanosecond of the last tick that is wanted."""
        return ticks_to_ns(self.end_ticks)

    def starting(self, now_ns: int) -> Self:
        """Return the same with the exporter's now in place of none."""
        return (
            self if self.start_ticks is not None else self._replace(start_ticks=ns_to_ticks(now_ns))
        )

    def covers(self, creation_ns: int) -> bool:
        """Tell whether a message created then is wanted, to the tick."""
        ticks = ns_to_ticks(creation_ns)
        return (self.start_ticks is None or self.start_ticks <= ticks) and ticks <= self.end_ticks

    def to_bytes(self) -> bytes:
        """Return the 18 bytes. Send them at once: psi waits for them on its only thread.

        :raises InvalidOption: an end is outside of what psi takes.
        """
        for name, ticks in (("start_ticks", self.start_ticks), ("end_ticks", self.end_ticks)):
            if ticks is not None and not 0 <= ticks <= MAX_TICKS:
                raise InvalidOption(name, ticks, f"must be from 0 to {MAX_TICKS}")
        start = _LATEST if self.start_ticks is None else self.start_ticks
        return _VERSION.pack(PROTOCOL_VERSION) + _INTERVAL.pack(start, self.end_ticks)


class ClientHelloDecoder(StepDecoder[ClientHello]):
    """What an exporter hears on the meta connection: one hello. More is counted as surplus."""

    what = _CLIENT

    def _read(self) -> Generator[int, bytes, None]:
        (version,) = _VERSION.unpack((yield _VERSION.size))
        if version != PROTOCOL_VERSION:
            raise WrongVersion(_CLIENT, PROTOCOL_VERSION, version)
        start, end = _INTERVAL.unpack((yield _INTERVAL.size))
        if not _LATEST <= start <= MAX_TICKS:
            raise Malformed(_CLIENT, "start", f"-1 to {MAX_TICKS} ticks", start)
        if not 0 <= end <= MAX_TICKS:
            raise Malformed(_CLIENT, "end", f"0 to {MAX_TICKS} ticks", end)
        # An end before the start is a wish for nothing: psi takes that, too.
        self._give(ClientHello(None if start == _LATEST else start, end))


class ServerHello(NamedTuple):
    """Which session this is, and where its messages are to be had."""

    session: UUID
    transport: Transport
    #: Of TCP and UDP, on the same host.
    port: int | None = None
    #: Of named pipes.
    pipe: str | None = None

    def to_bytes(self) -> bytes:
        """Return it with its length before it.

        :raises InvalidOption: the port or the pipe's name that the transport needs is not there.
        """
        if self.transport is Transport.NAMED_PIPES:
            if not self.pipe:
                raise InvalidOption("pipe", self.pipe, "named pipes need a name")
            place = pack_text(self.pipe)
        elif self.port not in _PORTS:
            raise InvalidOption("port", self.port, "must be from 1 to 65535")
        else:
            place = INT32.pack(self.port)
        body = self.session.bytes_le + pack_text(self.transport.value) + place
        return INT32.pack(len(body)) + body

    @classmethod
    def from_bytes(cls, body: BytesLike) -> Self:
        """Take apart what follows the length. Bytes behind it are for later versions.

        :raises Malformed: it is cut off, or names no transport, port or pipe.
        """
        cursor = Cursor(body, _SERVER)
        session = UUID(bytes_le=cursor.take(SESSION_ID_SIZE, "session id"))
        name = cursor.text("transport")
        try:
            transport = Transport(name)
        except ValueError:
            known = ", ".join(transport.value for transport in Transport)
            raise Malformed(_SERVER, "transport", f"one of {known}", repr(name)) from None
        if transport is Transport.NAMED_PIPES:
            pipe = cursor.text("pipe name")
            if _PIPE_NAME.fullmatch(pipe) is None:
                raise Malformed(_SERVER, "pipe name", "letters, digits, . _ -", repr(pipe))
            return cls(session, transport, pipe=pipe)
        port = cursor.int32("data port")
        if port not in _PORTS:
            raise Malformed(_SERVER, "data port", "1 to 65535", port)
        return cls(session, transport, port)


def encode_session_id(session: UUID) -> bytes:
    """Return what a client sends first on the data connection."""
    return session.bytes_le


def decode_session_id(data: BytesLike) -> UUID:
    """Return the session that a data connection belongs to.

    :raises Malformed: it is not of 16 bytes.
    """
    if len(data) != SESSION_ID_SIZE:
        raise Malformed(_SESSION, "length", SESSION_ID_SIZE, len(data))
    return UUID(bytes_le=bytes(data))


class SessionIdDecoder(StepDecoder[UUID]):
    """What an exporter hears on a data connection: one session id. More is counted as surplus."""

    what = _SESSION

    def _read(self) -> Generator[int, bytes, None]:
        self._give(decode_session_id((yield SESSION_ID_SIZE)))


def pipe_path(name: str, folder: str = "/tmp") -> str:  # noqa: S108 - where .NET has them
    """Return the path of the Unix socket that .NET makes of a pipe's name outside of Windows.

    :raises InvalidOption: the name could lead out of the folder.
    """
    if _PIPE_NAME.fullmatch(name) is None:
        raise InvalidOption("pipe", name, "may have letters, digits, . _ - only")
    return os.path.join(folder, f"CoreFxPipe_{name}")  # noqa: PTH118 - a path of a socket is text


def pipe_pieces(data: BytesLike) -> Iterator[memoryview]:
    """Yield the pieces that psi writes to a pipe one after the other."""
    view = memoryview(data)
    for at in range(0, len(view), PIPE_PIECE):
        yield view[at : at + PIPE_PIECE]
