"""What do a psi importer and exporter send on the meta connection? (docs/specs/psi.md 2)

The importer sends its hello. The exporter answers with its own, and then sends records of metadata
in bursts, each ended by an intermission.
"""

from __future__ import annotations

import os
import re
import struct
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeAlias
from uuid import UUID

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.errors import WrongVersion
from penstock.protocols.psi.metadata import INTERMISSION, Record, decode_record, frame_record
from penstock.protocols.psi.ticks import MAX_NS, MAX_TICKS, MIN_NS, ns_to_ticks, ticks_to_ns
from penstock.protocols.psi.wire import INT32, Cursor, StepDecoder, pack_text

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from penstock.core.interfaces import BytesLike

__all__ = [
    "DEFAULT_PORT",
    "LARGEST_SERVER_HELLO",
    "MAX_RECORD_BYTES",
    "PROTOCOL_VERSION",
    "SESSION_ID_SIZE",
    "ClientHello",
    "ClientHelloDecoder",
    "Intermission",
    "MetaDecoder",
    "MetaEvent",
    "ServerHello",
    "SessionIdDecoder",
    "Transport",
    "decode_session_id",
    "encode_burst",
    "encode_session_id",
    "pipe_path",
]

DEFAULT_PORT: Final = 11411
PROTOCOL_VERSION: Final = 0
SESSION_ID_SIZE: Final = 16
#: psi's hellos are below 100 bytes.
LARGEST_SERVER_HELLO: Final = 4096
_CLIENT: Final = "psi client handshake"
_SERVER: Final = "psi server handshake"
_SESSION: Final = "psi session id"
_VERSION: Final = struct.Struct("<h")
_INTERVAL: Final = struct.Struct("<qq")
#: The start that means the exporter's current time.
_LATEST: Final = -1
_PORTS: Final = range(1, 65536)
# The peer's name becomes part of a path.
_PIPE_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
#: A record of metadata that is larger is refused.
MAX_RECORD_BYTES: Final = 1 << 20
_META: Final = "psi meta connection"


class Transport(Enum):
    """How messages travel; the values are psi's names on the wire."""

    TCP = "Tcp"
    UDP = "Udp"
    NAMED_PIPES = "NamedPipes"


class ClientHello(NamedTuple):
    """The replay interval of an importer: creation times `start_ticks` to `end_ticks`.

    Both ends are included.
    """

    #: None: from the exporter's current time on.
    start_ticks: int | None = None
    end_ticks: int = MAX_TICKS

    @classmethod
    def of(cls, start_ns: int | None = None, end_ns: int = MAX_NS) -> Self:
        """Return the interval of nanoseconds; `MIN_NS` and `MAX_NS` are unbounded."""
        return cls(None if start_ns is None else ns_to_ticks(start_ns), ns_to_ticks(end_ns))

    @classmethod
    def everything(cls) -> Self:
        """Return the unbounded interval."""
        return cls.of(MIN_NS)

    def by_creation(self) -> Self:
        """Return the interval marked as one of creation times, for an exporter of ours.

        A reconnecting importer of psi sends the originating time of its last message as the start.
        An end one tick before MaxValue marks a start that is a creation time; no message has either
        time.
        """
        if self.start_ticks and self.end_ticks == MAX_TICKS:
            return self._replace(end_ticks=MAX_TICKS - 1)
        return self

    @property
    def resumed_ns(self) -> int | None:
        """The originating time of the last message, if this is a reconnecting importer of psi."""
        if not self.start_ticks or self.end_ticks == MAX_TICKS - 1:
            return None
        return ticks_to_ns(self.start_ticks - 1)

    @property
    def start_ns(self) -> int | None:
        """The start in nanoseconds, or None."""
        return None if self.start_ticks is None else ticks_to_ns(self.start_ticks)

    @property
    def end_ns(self) -> int:
        """The end in nanoseconds: the first one of the last tick."""
        return ticks_to_ns(self.end_ticks)

    def starting(self, now_ns: int) -> Self:
        """Return the interval with `now_ns` as its start, if it has none."""
        return (
            self if self.start_ticks is not None else self._replace(start_ticks=ns_to_ticks(now_ns))
        )

    def covers(self, creation_ns: int) -> bool:
        """Tell whether a creation time is in the interval, to the tick."""
        ticks = ns_to_ticks(creation_ns)
        return (self.start_ticks is None or self.start_ticks <= ticks) and ticks <= self.end_ticks

    def to_bytes(self) -> bytes:
        """Return the 18 bytes, to be sent at once: psi waits for them on its only thread.

        :raises InvalidOption: a time is before MinValue or after MaxValue.
        """
        for name, ticks in (("start_ticks", self.start_ticks), ("end_ticks", self.end_ticks)):
            if ticks is not None and not 0 <= ticks <= MAX_TICKS:
                raise InvalidOption(name, ticks, f"must be from 0 to {MAX_TICKS}")
        start = _LATEST if self.start_ticks is None else self.start_ticks
        return _VERSION.pack(PROTOCOL_VERSION) + _INTERVAL.pack(start, self.end_ticks)


class ClientHelloDecoder(StepDecoder[ClientHello]):
    """Decodes what an importer sends on the meta connection: one hello."""

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
        # An end before the start is an empty interval, which psi accepts.
        self._give(ClientHello(None if start == _LATEST else start, end))


class ServerHello(NamedTuple):
    """The session id, and where the data connection goes."""

    session: UUID
    transport: Transport
    #: For TCP and UDP, on the same host.
    port: int | None = None
    #: For named pipes.
    pipe: str | None = None

    def to_bytes(self) -> bytes:
        """Return the bytes, with the length before them.

        :raises InvalidOption: the transport's port or pipe name is missing.
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
        """Decode what follows the length. More bytes are of later versions.

        :raises Malformed: it is truncated, or names no transport, port or pipe.
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
    """Return the first bytes of a data connection."""
    return session.bytes_le


def decode_session_id(data: BytesLike) -> UUID:
    """Return the session of a data connection.

    :raises Malformed: it is not 16 bytes.
    """
    if len(data) != SESSION_ID_SIZE:
        raise Malformed(_SESSION, "length", SESSION_ID_SIZE, len(data))
    return UUID(bytes_le=bytes(data))


class SessionIdDecoder(StepDecoder[UUID]):
    """Decodes what an importer sends on a data connection: one session id."""

    what = _SESSION

    def _read(self) -> Generator[int, bytes, None]:
        self._give(decode_session_id((yield SESSION_ID_SIZE)))


def pipe_path(name: str, folder: str = "/tmp") -> str:  # noqa: S108 - where .NET has them
    """Return the path of the Unix socket that .NET uses for a named pipe outside of Windows.

    :raises InvalidOption: the name could lead out of the folder.
    """
    if _PIPE_NAME.fullmatch(name) is None:
        raise InvalidOption("pipe", name, "may have letters, digits, . _ - only")
    return os.path.join(folder, f"CoreFxPipe_{name}")  # noqa: PTH118 - a path of a socket is text


class Intermission(NamedTuple):
    """The end of a burst of records; after the first, the data connection may be opened."""

    #: Records in the burst.
    records: int


MetaEvent: TypeAlias = ServerHello | Record | Intermission


class MetaDecoder(StepDecoder[MetaEvent]):
    """Decodes the meta connection: the hello, then records and intermissions.

    `hello=False`: for bytes that begin after the hello.
    """

    what = _META

    def __init__(self, max_bytes: int = MAX_RECORD_BYTES, *, hello: bool = True) -> None:
        if max_bytes < 1:
            raise InvalidOption("max_bytes", max_bytes, "must be at least 1")
        self.max_bytes = max_bytes
        self._with_hello = hello
        super().__init__()

    def _read(self) -> Generator[int, bytes, None]:
        if self._with_hello:
            size = self._length((yield INT32.size), 1, LARGEST_SERVER_HELLO)
            self._give(ServerHello.from_bytes((yield size)))
        records = 0
        while True:
            size = self._length((yield INT32.size), 0, self.max_bytes)
            if size:
                self._give(decode_record((yield size)))
                records += 1
            else:
                self._give(Intermission(records))
                records = 0

    @staticmethod
    def _length(data: bytes, least: int, most: int) -> int:
        size: int = INT32.unpack(data)[0]
        if not least <= size <= most:
            raise Malformed(_META, "length of a record", f"{least} to {most}", size)
        return size


def encode_burst(records: Iterable[Record]) -> bytes:
    """Return the bytes of records, and the intermission after them."""
    return b"".join(map(frame_record, records)) + INTERMISSION
