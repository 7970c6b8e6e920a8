"""How far is another machine's clock from ours? (docs/specs/psi.md 9)

psi takes one sample, which is off by whatever delayed it. `RemoteClock` samples again and again,
keeps the half with the shortest round trips, and uses their median.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.errors import ConnectionLost, InvalidOption, Malformed, PenstockError
from penstock.core.interfaces import Closable
from penstock.core.worker import Worker
from penstock.protocols.connection import Connection
from penstock.protocols.host_port import why_unreachable
from penstock.protocols.psi.errors import WrongVersion
from penstock.protocols.psi.ticks import MAX_TICKS, ns_to_ticks, ticks_to_ns
from penstock.protocols.psi.wire import StepDecoder, hear_one, pack_short_text, utf8
from penstock.protocols.server import Conversation, Limits, Server, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

__all__ = [
    "CLOCK_PORT",
    "CLOCK_VERSION",
    "ClockReply",
    "ClockReplyDecoder",
    "ClockRequestDecoder",
    "ClockSample",
    "RemoteClock",
    "RemoteClockServer",
    "ask_clock",
    "clock_offset_ns",
    "encode_clock_request",
    "filtered_offset_ns",
]

log = logging.getLogger(__name__)

CLOCK_PORT: Final = 11511
CLOCK_VERSION: Final = 0
_REQUEST: Final = "psi clock request"
_REPLY: Final = "psi clock reply"
_VERSION: Final = struct.Struct("<h")
_TICKS: Final = struct.Struct("<q")
#: Of a machine's name. Its length is one byte, or two.
_LONGEST_NAME: Final = 1024
_MORE: Final = 0x80
_PATIENCE: Final = 5.0
_NO_CLOCK: Final = "is a psi remote clock served there? see host and port"


def encode_clock_request() -> bytes:
    """Return a client's request."""
    return _VERSION.pack(CLOCK_VERSION)


class ClockReply(NamedTuple):
    """A server's answer, after which it closes the connection."""

    time_ns: int
    machine: str

    def to_bytes(self) -> bytes:
        """Return the bytes of the answer."""
        return _TICKS.pack(ns_to_ticks(self.time_ns)) + pack_short_text(self.machine)


class ClockRequestDecoder(StepDecoder[int]):
    """Decodes a request: the version."""

    what = _REQUEST

    def _read(self) -> Generator[int, bytes, None]:
        (version,) = _VERSION.unpack((yield _VERSION.size))
        if version != CLOCK_VERSION:
            raise WrongVersion(_REQUEST, CLOCK_VERSION, version)
        self._give(version)


class ClockReplyDecoder(StepDecoder[ClockReply]):
    """Decodes one reply."""

    what = _REPLY

    def _read(self) -> Generator[int, bytes, None]:
        (ticks,) = _TICKS.unpack((yield _TICKS.size))
        if not 0 <= ticks <= MAX_TICKS:
            raise Malformed(_REPLY, "ticks", f"0 to {MAX_TICKS}", ticks)
        (size,) = yield 1
        if size & _MORE:
            (high,) = yield 1
            size = size & ~_MORE | high << 7
        if size > _LONGEST_NAME:
            raise Malformed(_REPLY, "machine name", f"at most {_LONGEST_NAME} bytes", size)
        self._give(ClockReply(ticks_to_ns(ticks), utf8((yield size), _REPLY, "machine name")))


def clock_offset_ns(server_ns: int, sent_ns: int, received_ns: int) -> int:
    """Return the server's time minus ours, from one exchange.

    The server is assumed to answer in the middle between sending and receiving.
    """
    return server_ns - (sent_ns + (received_ns - sent_ns) // 2)


class ClockSample(NamedTuple):
    """The result of one exchange with a server."""

    #: The server's time minus ours.
    offset_ns: int
    #: Its duration: the offset is uncertain by half of it.
    round_trip_ns: int
    machine: str


class RemoteClockServer(Closable):
    """Serves the time of this machine to psi's clients and ours."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = CLOCK_PORT,
        *,
        machine: str | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        max_clients: int = 64,
    ) -> None:
        """Listen.

        :raises StorageError: the address is not available.
        """
        self._machine = machine or socket.gethostname()
        self._now_ns = now_ns
        self._server = Server(
            "psi-clock",
            listen_tcp(host, port),
            lambda connection: Conversation(connection, self._serve),
            Limits(max_clients=max_clients, first_message=_PATIENCE),
            log=log,
        ).start()
        self.port = self._server.port

    def _serve(self, connection: Connection) -> None:
        if hear_one(connection, ClockRequestDecoder()) is not None:
            connection.send(ClockReply(self._now_ns(), self._machine).to_bytes())

    def close(self) -> None:
        """Stop. Idempotent."""
        self._server.close()


def ask_clock(host: str, port: int = CLOCK_PORT, timeout: float = _PATIENCE) -> ClockSample:
    """Ask a server once.

    :raises ConnectionLost: it does not answer.
    :raises Malformed: it is no clock server.
    """
    where = f"{host}:{port}"
    reply: ClockReply | None = None
    try:
        with socket.create_connection((host, port), timeout) as sock:
            connection = Connection(sock)
            connection.expect(timeout)
            sent_ns, began = time.time_ns(), time.perf_counter_ns()
            connection.send(encode_clock_request())
            with contextlib.suppress(TimeoutError):
                reply = hear_one(connection, ClockReplyDecoder())
            # The wall clock may be set meanwhile: the duration is of the monotonic clock.
            passed_ns = time.perf_counter_ns() - began
    except OSError as error:
        raise ConnectionLost(where, why_unreachable(error, host, port), hint=_NO_CLOCK) from error
    if reply is None:
        raise ConnectionLost(where, "it gave no answer", hint=_NO_CLOCK)
    offset_ns = clock_offset_ns(reply.time_ns, sent_ns, sent_ns + passed_ns)
    return ClockSample(offset_ns, passed_ns, reply.machine)


def filtered_offset_ns(samples: Iterable[ClockSample]) -> int:
    """Return the median offset of the half of the samples with the shortest round trips.

    :raises InvalidOption: there is no sample.
    """
    best = sorted(samples, key=lambda sample: sample.round_trip_ns)
    if not best:
        raise InvalidOption("samples", 0, "an offset needs at least one")
    return median_low(sample.offset_ns for sample in best[: (len(best) + 1) // 2])


class RemoteClock(Closable):
    """Follows a server's clock by repeated samples."""

    def __init__(
        self,
        host: str,
        port: int = CLOCK_PORT,
        *,
        samples: int = 9,
        every: float = 10.0,
        between: float = 0.02,
    ) -> None:
        """Take `samples` samples now, and then one every `every` seconds.

        :raises ConnectionLost: the server does not answer.
        """
        if samples < 1:
            raise InvalidOption("samples", samples, "must be at least 1")
        self._place = (host, port)
        self._samples: deque[ClockSample] = deque(maxlen=samples)
        #: Failed attempts since the start; they do not change the offset.
        self.failures = 0
        for number in range(samples):
            if number:
                time.sleep(between)
            self._samples.append(ask_clock(host, port))
        self._worker = Worker("psi-clock-client", self._follow, log=log, every=every).start()

    @property
    def machine(self) -> str:
        """The name of the server's machine."""
        return self._samples[-1].machine

    @property
    def is_this_machine(self) -> bool:
        """Whether the server has this machine's name; psi then takes an offset of 0."""
        return self.machine == socket.gethostname()

    @property
    def offset_ns(self) -> int:
        """The server's time minus ours."""
        return filtered_offset_ns(list(self._samples))

    @property
    def uncertainty_ns(self) -> int:
        """The largest error of the offset: half of the shortest round trip."""
        return min(sample.round_trip_ns for sample in list(self._samples)) // 2

    def now_ns(self) -> int:
        """Return the server's time."""
        return time.time_ns() + self.offset_ns

    def _follow(self, _: Worker) -> None:
        try:
            self._samples.append(ask_clock(*self._place))
        except PenstockError as error:
            self.failures += 1
            log.info("the clock: %s", error)

    def close(self) -> None:
        """Stop to sample. Idempotent."""
        self._worker.stop(2 * _PATIENCE)
