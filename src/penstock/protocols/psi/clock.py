"""How far is another machine's clock from ours? (spec psi 9)

psi asks once, and takes the answer. A single answer is off by whatever held it up; so ours asks
again and again, keeps the answers that took the least time, and takes the median of those.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.closing import Closable
from penstock.core.errors import ConnectionLost, InvalidOption, PenstockError
from penstock.core.worker import Worker
from penstock.protocols.connection import Connection
from penstock.protocols.psi.clock_wire import (
    CLOCK_PORT,
    ClockReply,
    ClockReplyDecoder,
    ClockRequestDecoder,
    clock_offset_ns,
    encode_clock_request,
)
from penstock.protocols.psi.decoding import hear_one
from penstock.protocols.reaching import why_unreachable
from penstock.protocols.server import Conversation, Limits, Server, listen_tcp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["ClockSample", "RemoteClock", "RemoteClockServer", "ask_clock", "filtered_offset_ns"]

log = logging.getLogger(__name__)

_PATIENCE: Final = 5.0
_NO_CLOCK: Final = "is a psi remote clock served there? see host and port"


class ClockSample(NamedTuple):
    """One exchange with a server."""

    #: What to add to our clock for the server's.
    offset_ns: int
    #: How long it took: the offset is uncertain by half of it.
    round_trip_ns: int
    machine: str


class RemoteClockServer(Closable):
    """Tells psi's and our machines the time of this one."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = CLOCK_PORT,
        *,
        machine: str | None = None,
        now_ns: Callable[[], int] = time.time_ns,
        max_clients: int = 64,
    ) -> None:
        """Listen at once.

        :raises StorageError: the address cannot be had.
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
        """Stop. Closing twice is fine."""
        self._server.close()


def ask_clock(host: str, port: int = CLOCK_PORT, timeout: float = _PATIENCE) -> ClockSample:
    """Ask a server once.

    :raises ConnectionLost: it gives no answer.
    :raises Malformed: it is no clock.
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
            # The wall clock may be set meanwhile; what passed is not asked of it.
            passed_ns = time.perf_counter_ns() - began
    except OSError as error:
        raise ConnectionLost(where, why_unreachable(error, host, port), hint=_NO_CLOCK) from error
    if reply is None:
        raise ConnectionLost(where, "it gave no answer", hint=_NO_CLOCK)
    offset_ns = clock_offset_ns(reply.time_ns, sent_ns, sent_ns + passed_ns)
    return ClockSample(offset_ns, passed_ns, reply.machine)


def filtered_offset_ns(samples: Iterable[ClockSample]) -> int:
    """Return the median of the offsets of that half of the samples that took the least time.

    :raises InvalidOption: there is none.
    """
    best = sorted(samples, key=lambda sample: sample.round_trip_ns)
    if not best:
        raise InvalidOption("samples", 0, "an offset needs at least one")
    return median_low(sample.offset_ns for sample in best[: (len(best) + 1) // 2])


class RemoteClock(Closable):
    """Follows a server's clock, by samples that are taken again and again."""

    def __init__(
        self,
        host: str,
        port: int = CLOCK_PORT,
        *,
        samples: int = 9,
        every: float = 10.0,
        between: float = 0.02,
    ) -> None:
        """Take the first `samples` now, and then one `every` so many seconds.

        :raises ConnectionLost: the server gives no answer.
        """
        if samples < 1:
            raise InvalidOption("samples", samples, "must be at least 1")
        self._place = (host, port)
        self._samples: deque[ClockSample] = deque(maxlen=samples)
        #: Attempts that failed since the start; the offset stays as it was then.
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
        """Whether the server is on this machine, by its name; psi takes the offset as 0 then."""
        return self.machine == socket.gethostname()

    @property
    def offset_ns(self) -> int:
        """What to add to our clock for the server's."""
        return filtered_offset_ns(list(self._samples))

    @property
    def uncertainty_ns(self) -> int:
        """How far off that may be, at most: half of the shortest round trip."""
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
        """Ask no more. Closing twice is fine."""
        self._worker.stop(2 * _PATIENCE)
