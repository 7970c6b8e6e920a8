"""What do psi processes and their rendezvous server send? (docs/specs/psi.md 10)

After the versions, both sides send updates at any time. The server relays each to all clients, its
sender included.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi.errors import WrongVersion
from penstock.protocols.psi.handshake import Transport
from penstock.protocols.psi.wire import INT32, StepDecoder, check_int32, pack_short_text, utf8

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.core.interfaces import BytesLike

__all__ = [
    "RENDEZVOUS_PORT",
    "RENDEZVOUS_VERSION",
    "TEXT_OVERHEAD",
    "AddProcess",
    "Disconnect",
    "Endpoint",
    "EndpointKind",
    "Process",
    "RemoveProcess",
    "RendezvousClientDecoder",
    "RendezvousHello",
    "RendezvousLimits",
    "RendezvousServerDecoder",
    "StreamOffer",
    "Update",
    "decode_updates",
    "encode_client_hello",
    "encode_hello",
    "encode_update",
]

RENDEZVOUS_PORT: Final = 13331
RENDEZVOUS_VERSION: Final = 2

_WHAT: Final = "psi rendezvous"
_VERSION: Final = struct.Struct("<h")
_TRANSPORTS: Final = tuple(Transport)
_DISCONNECT: Final = 0
_ADD: Final = 1
_REMOVE: Final = 2
_MORE: Final = 0x80

#: Bytes that a text takes in memory beside its characters, roughly.
TEXT_OVERHEAD: Final = 64


class RendezvousLimits(NamedTuple):
    """Limits of what a peer may send."""

    text_bytes: int = 65_536
    processes: int = 10_000
    endpoints: int = 1_000
    streams: int = 10_000
    #: Of one update, in memory.
    update_bytes: int = 1 << 22


class EndpointKind(IntEnum):
    """The kind of an endpoint."""

    TCP_SOURCE = 0
    NETMQ_SOURCE = 1
    REMOTE_EXPORTER = 2
    REMOTE_CLOCK_EXPORTER = 3


#: Streams of an endpoint in psi, at most; kinds that are not here have no limit.
_MOST_STREAMS: Final = {EndpointKind.TCP_SOURCE: 1, EndpointKind.REMOTE_CLOCK_EXPORTER: 0}


class StreamOffer(NamedTuple):
    """A stream of an endpoint."""

    name: str
    type_name: str


class Endpoint(NamedTuple):
    """A part of a process that others connect to."""

    kind: EndpointKind
    #: A host; for NETMQ_SOURCE an address such as `tcp://host:port`.
    host: str
    #: 0 for NETMQ_SOURCE.
    port: int = 0
    #: For REMOTE_EXPORTER.
    transport: Transport | None = None
    streams: tuple[StreamOffer, ...] = ()


class Process(NamedTuple):
    """A process and its endpoints. Its name is unique at a server."""

    name: str
    version: str
    endpoints: tuple[Endpoint, ...] = ()

    @property
    def memory(self) -> int:
        """The bytes that it takes in memory, roughly."""
        texts = [self.name, self.version]
        for endpoint in self.endpoints:
            texts.append(endpoint.host)
            for stream in endpoint.streams:
                texts += stream
        return sum(map(len, texts)) + TEXT_OVERHEAD * len(texts)


class AddProcess(NamedTuple):
    """Adds a process."""

    process: Process


class RemoveProcess(NamedTuple):
    """Removes a process."""

    name: str


class Disconnect(NamedTuple):
    """Ends the connection."""


Update: TypeAlias = AddProcess | RemoveProcess | Disconnect


class RendezvousHello(NamedTuple):
    """A server's answer, followed by one `AddProcess` per process."""

    #: The client's address as the server sees it; None in a client's hello.
    address: str | None
    process_count: int = 0


def encode_client_hello() -> bytes:
    """Return a client's hello."""
    return _VERSION.pack(RENDEZVOUS_VERSION)


def encode_hello(address: str, processes: tuple[Process, ...] | list[Process] = ()) -> bytes:
    """Return a server's hello, with its list of processes."""
    parts = [
        _VERSION.pack(RENDEZVOUS_VERSION),
        pack_short_text(address),
        INT32.pack(len(processes)),
    ]
    return b"".join(parts + [encode_update(AddProcess(process)) for process in processes])


def encode_update(update: Update) -> bytes:
    """Return the bytes of an update.

    :raises InvalidOption: an endpoint has a field that does not fit, or lacks its transport.
    """
    match update:
        case AddProcess(process):
            parts = [
                bytes([_ADD]),
                pack_short_text(process.name),
                pack_short_text(process.version),
                INT32.pack(len(process.endpoints)),
            ]
            return b"".join(parts + [_encode_endpoint(endpoint) for endpoint in process.endpoints])
        case RemoveProcess(name):
            return bytes([_REMOVE]) + pack_short_text(name)
        case Disconnect():
            return bytes([_DISCONNECT])


def _encode_endpoint(endpoint: Endpoint) -> bytes:
    parts = [bytes([endpoint.kind]), pack_short_text(endpoint.host)]
    if endpoint.kind is not EndpointKind.NETMQ_SOURCE:
        parts.append(INT32.pack(check_int32("port", endpoint.port)))
    if endpoint.kind is EndpointKind.REMOTE_EXPORTER:
        if endpoint.transport is None:
            raise InvalidOption("transport", None, "a remote exporter has one")
        parts.append(INT32.pack(_TRANSPORTS.index(endpoint.transport)))
    most = _MOST_STREAMS.get(endpoint.kind)
    if most is not None and len(endpoint.streams) > most:
        raise InvalidOption("streams", len(endpoint.streams), f"must be at most {most}")
    parts.append(INT32.pack(len(endpoint.streams)))
    for stream in endpoint.streams:
        parts += (pack_short_text(stream.name), pack_short_text(stream.type_name))
    return b"".join(parts)


class _UpdateDecoder(StepDecoder[RendezvousHello | Update]):
    """Decodes updates of either direction, up to a `Disconnect`."""

    what = _WHAT

    def __init__(self, limits: RendezvousLimits | None = None) -> None:
        self.limits = limits or RendezvousLimits()
        #: Bytes left for the current update.
        self._allowance = self.limits.update_bytes
        super().__init__()

    def _version(self) -> Generator[int, bytes, None]:
        (version,) = _VERSION.unpack((yield _VERSION.size))
        if version != RENDEZVOUS_VERSION:
            raise WrongVersion(_WHAT, RENDEZVOUS_VERSION, version)

    def _updates(self) -> Generator[int, bytes, None]:
        while True:
            self._allowance = self.limits.update_bytes
            (kind,) = yield 1
            match kind:
                case 0:
                    self._give(Disconnect())
                    return
                case 1:
                    self._give(AddProcess((yield from self._process())))
                case 2:
                    self._give(RemoveProcess((yield from self._text("process name"))))
                case _:
                    raise Malformed(_WHAT, "update", "0, 1 or 2", kind)

    def _process(self) -> Generator[int, bytes, Process]:
        name = yield from self._text("process name")
        version = yield from self._text("process version")
        count = yield from self._number("endpoints", 0, self.limits.endpoints)
        endpoints: list[Endpoint] = []
        for _ in range(count):
            endpoints.append((yield from self._endpoint()))  # noqa: PERF401 - it yields
        return Process(name, version, tuple(endpoints))

    def _endpoint(self) -> Generator[int, bytes, Endpoint]:
        (number,) = yield 1
        try:
            kind = EndpointKind(number)
        except ValueError:
            raise Malformed(_WHAT, "endpoint", "0 to 3", number) from None
        host = yield from self._text("host")
        port, transport = 0, None
        if kind is not EndpointKind.NETMQ_SOURCE:
            port = yield from self._number("port", 0, 65535)
        if kind is EndpointKind.REMOTE_EXPORTER:
            transport = _TRANSPORTS[(yield from self._number("transport", 0, len(_TRANSPORTS) - 1))]
        most = _MOST_STREAMS.get(kind, self.limits.streams)
        count = yield from self._number("streams", 0, most)
        streams: list[StreamOffer] = []
        for _ in range(count):
            name = yield from self._text("stream name")
            streams.append(StreamOffer(name, (yield from self._text("stream type"))))
        return Endpoint(kind, host, port, transport, tuple(streams))

    def _number(self, where: str, least: int, most: int) -> Generator[int, bytes, int]:
        number: int = INT32.unpack((yield INT32.size))[0]
        if not least <= number <= most:
            raise Malformed(_WHAT, where, f"{least} to {most}", number)
        return number

    def _text(self, where: str) -> Generator[int, bytes, str]:
        size = shift = 0
        most = min(self.limits.text_bytes, self._allowance)
        while True:
            (byte,) = yield 1
            size |= (byte & ~_MORE) << shift
            shift += 7
            if size > most or (byte & _MORE and shift > 28):  # noqa: PLR2004 - 5 groups
                raise Malformed(_WHAT, f"length of {where}", f"at most {most} bytes", size)
            if not byte & _MORE:
                break
        self._allowance -= size + TEXT_OVERHEAD
        return utf8((yield size), _WHAT, where)


class RendezvousClientDecoder(_UpdateDecoder):
    """Decodes what a server sends: its hello, then updates."""

    def _read(self) -> Generator[int, bytes, None]:
        yield from self._version()
        address = yield from self._text("address")
        count = yield from self._number("processes", 0, self.limits.processes)
        self._give(RendezvousHello(address, count))
        yield from self._updates()


class RendezvousServerDecoder(_UpdateDecoder):
    """Decodes what a client sends: its version, as a hello without an address, then updates."""

    def _read(self) -> Generator[int, bytes, None]:
        yield from self._version()
        self._give(RendezvousHello(None))
        yield from self._updates()


def decode_updates(data: BytesLike) -> list[Update]:
    """Return the updates in complete bytes that have no hello before them.

    :raises Malformed: they are no updates.
    :raises Truncated: they end within one.
    """
    decoder = RendezvousServerDecoder()
    decoder.feed(encode_client_hello())
    found = [update for update in decoder.feed(data) if not isinstance(update, RendezvousHello)]
    decoder.finish()
    return found
