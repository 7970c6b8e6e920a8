"""How does a program register its data with a DataMapper, and query those of others?"""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption, Malformed
from penstock.core.interfaces import Closable
from penstock.core.worker import Worker
from penstock.protocols.lrose.addresses import default_port
from penstock.protocols.lrose.datamapper_wire import (
    DATAMAPPER_TYPE,
    NO_LEAD,
    DataSetInfo,
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)
from penstock.protocols.lrose.ds_client import Connection, RequestRefused
from penstock.protocols.lrose.ds_message import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DEFAULT_INTERVAL",
    "SCHEME",
    "DataMapClient",
    "Registrar",
    "RegistrarStatistics",
    "below_data_dir",
    "is_active",
    "own_host",
    "register_latest",
]

#: LROSE's name of this service.
SCHEME: Final = "dmapp"

_FIRST_SECOND: Final = -(2**31)
_LATEST_SECOND: Final = 2**31 - 1


def is_active() -> bool:
    """Tell whether registration is on: `DATA_MAPPER_ACTIVE=false` turns it off."""
    return os.environ.get("DATA_MAPPER_ACTIVE", "").strip().lower() != "false"


def below_data_dir(path: str) -> str:
    """Return a path without `$RAP_DATA_DIR` or `$DATA_DIR`: the same on all machines."""
    path = os.path.abspath(path)  # noqa: PTH100 - a Path would not take every name
    for variable in ("RAP_DATA_DIR", "DATA_DIR"):
        root = os.environ.get(variable, "").rstrip("/")
        if root and path.startswith(f"{root}/"):
            return path[len(root) + 1 :].lstrip("/")
    return path


@cache
def own_host() -> tuple[str, str]:
    """Return the name and the address of this machine for the map."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "127.0.0.1"
    return name, address


class DataMapClient:
    """A client of one DataMapper, LROSE's or ours: one connection for each request.

    Safe to share between threads. Every method raises `ConnectionLost` if the server does not
    answer, `RequestRefused` if it reports an error (LROSE's own client does not notice that), and
    `Malformed` if the answer is not valid.
    """

    def __init__(
        self,
        hosts: str = "localhost",
        port: int | None = None,
        *,
        connect_timeout: float = 5.0,
        timeout: float = 30.0,
    ) -> None:
        """Use the map on a host; of several, separated by colons, the last through the others.

        :raises InvalidOption: no host is given, or the port is not valid.
        """
        host, *relay = hosts.split(":")
        if not host or not all(relay):
            raise InvalidOption(
                "host", hosts, "should be a name, or several with colons between for relays"
            )
        self.host = host
        self.port = default_port(SCHEME) if port is None else port
        self._relay = tuple(relay)
        self._connect_timeout = connect_timeout
        self._timeout = timeout

    # --- registering ------------------------------------------------------------------------

    def register_latest(
        self, directory: str, latest_time: int, datatype: str = "", *, lead: int = NO_LEAD
    ) -> None:
        """Register the time (seconds since 1970) of the latest data of a data set."""
        self.register(
            RequestKind.REG_LATEST_DATA,
            DataSetInfo(
                latest_time=_second(latest_time),
                forecast_lead_time=lead,
                datatype=datatype,
                dir=directory,
            ),
        )

    def register_status(self, directory: str, status: str, datatype: str = "") -> None:
        """Register the status text of a data set."""
        self.register(
            RequestKind.REG_STATUS, DataSetInfo(status=status, datatype=datatype, dir=directory)
        )

    def register_data_set(
        self,
        directory: str,
        datatype: str = "",
        *,
        start_time: int,
        end_time: int,
        nfiles: float,
        total_bytes: float,
    ) -> None:
        """Register what of a data set is stored."""
        self.register(
            RequestKind.REG_DATA_SET,
            DataSetInfo(
                start_time=_second(start_time),
                end_time=_second(end_time),
                nfiles=nfiles,
                total_bytes=total_bytes,
                datatype=datatype,
                dir=directory,
            ),
        )

    def register_full(self, infos: Iterable[DataSetInfo]) -> None:
        """Register complete entries, unchanged."""
        self._ask(MapRequest(RequestKind.REG_FULL, tuple(infos)), ReplyKind.REG_STATUS)

    def register(self, kind: RequestKind, info: DataSetInfo) -> None:
        """Register an entry; the host is this one unless the entry names another."""
        if not info.hostname:
            hostname, ipaddr = own_host()
            info = replace(info, hostname=hostname, ipaddr=ipaddr)
        info = replace(info, last_reg_time=_second(int(time.time())))
        self._ask(MapRequest(kind, (info,)), ReplyKind.REG_STATUS)

    def delete(self, datatype: str, directory: str, hostname: str) -> None:
        """Delete the entries that match; `all` matches anything."""
        info = DataSetInfo(datatype=datatype, dir=directory, hostname=hostname)
        self._ask(MapRequest(RequestKind.DELETE, (info,)), ReplyKind.REG_STATUS)

    # --- asking -----------------------------------------------------------------------------

    def all(self) -> tuple[DataSetInfo, ...]:
        """Return every entry."""
        return self.request(MapRequest(RequestKind.REQ_ALL, (), self._relay)).infos

    def selected(self, datatype: str = "", directory: str = "") -> tuple[DataSetInfo, ...]:
        """Return the entries of a type and of a directory; an empty text matches any."""
        info = DataSetInfo(datatype=datatype, dir=directory)
        return self.request(MapRequest(RequestKind.REQ_SELECTED, (info,), self._relay)).infos

    def request(self, request: MapRequest) -> MapReply:
        """Send a request, and return the entries of the reply."""
        return self._ask(request, ReplyKind.WITH_INFO)

    def _ask(self, request: MapRequest, expected: ReplyKind) -> MapReply:
        message = request.to_message()  # what does not fit is no matter of the network
        with Connection(
            self.host, self.port, connect_timeout=self._connect_timeout, timeout=self._timeout
        ) as connection:
            answer = connection.ask(DATAMAPPER_TYPE, message)
            server = connection.server
        reply = MapReply.from_message(answer)
        if reply.error is not None:
            raise RequestRefused(server, ErrorCode.FAILED, reply.error)
        if reply.kind is not expected:
            raise Malformed("DataMapper reply", "subType", expected, reply.kind)
        return reply


def register_latest(
    info: DataSetInfo, *, host: str = "localhost", port: int | None = None, timeout: float = 2.0
) -> None:
    """Register latest data with the map of this machine, unless registration is off.

    :raises PenstockError: as `DataMapClient` does.
    """
    if is_active():
        client = DataMapClient(host, port, connect_timeout=timeout, timeout=timeout)
        client.register(RequestKind.REG_LATEST_DATA, info)


def _second(time: int) -> int:
    """Return a time limited to 32 bits."""
    return max(_FIRST_SECOND, min(time, _LATEST_SECOND))


# --- registration in the background -------------------------------------------------------------

log = logging.getLogger(__name__)

#: Least seconds between two registrations.
DEFAULT_INTERVAL: Final = 5.0
#: Short timeout: the map of this machine answers at once, or not at all.
_TIMEOUT: Final = 2.0
_NS_PER_SECOND: Final = 1_000_000_000
#: Least seconds between two looks for what is not registered yet.
_SHORTEST: Final = 1.0


class RegistrarStatistics(NamedTuple):
    """Counters of a registrar. Every attempt succeeded or failed."""

    #: Registrations that the map accepted.
    registered: int
    #: Attempts that failed: map down, or refused.
    failed: int
    #: Error of the last attempt; None after a success.
    error: str | None


class Registrar(Closable):
    """Registers the latest data of one data set periodically, in its own thread.

    It never raises, and never blocks its caller: a map that is down, hangs or refuses is logged
    once, and retried at the next interval.
    """

    def __init__(
        self,
        directory: str,
        datatype: str,
        *,
        interval: float = DEFAULT_INTERVAL,
        client: DataMapClient | None = None,
        level: int = logging.WARNING,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Register a directory under a type, at most once in `interval` seconds.

        :raises InvalidOption: the interval is negative.
        """
        if not interval >= 0:  # written so that NaN is refused too
            raise InvalidOption("interval", interval, "must not be negative")
        self.directory = directory
        self.datatype = datatype
        self.interval = interval
        self._level = level
        self._clock = clock
        self._client = client or DataMapClient(connect_timeout=_TIMEOUT, timeout=_TIMEOUT)
        self._is_active = is_active()
        self._next = 0.0
        #: The last note (time of the data, forecast lead), and the last one registered. Each is set
        #: by one thread only, so neither needs a lock.
        self._latest: tuple[int, int] | None = None
        self._told: tuple[int, int] | None = None
        self._is_closing = False
        self._worker = Worker("penstock-registrar", self._work, log=log)
        self._books = RegistrarStatistics(0, 0, None)

    def note(self, latest_time: int | None = None, lead: int = NO_LEAD) -> None:
        """Note new data of this time (seconds; None: now). Very cheap.

        The latest note is registered at the next interval, or at `close`.
        """
        if not self._is_active or self._is_closing:
            return
        if latest_time is None:
            latest_time = self._clock.now_ns() // _NS_PER_SECOND
        self._latest = latest_time, lead
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.interval
            if self._has_started():
                self._worker.wake()

    def _has_started(self) -> bool:
        """Start the thread; where the system has none left, a later note tries again."""
        try:
            self._worker.start()
        except RuntimeError as error:
            self._note_failure(error)
            return False
        return True

    def _work(self, worker: Worker) -> None:
        while True:
            # Also without another note: one within the interval, or after a failure, is left.
            is_last = worker.wait(max(self.interval, _SHORTEST))
            latest = self._latest
            if latest is not None and latest is not self._told:
                self._next = time.monotonic() + self.interval
                if self._register(*latest):
                    self._told = latest
            if is_last:
                return

    def _register(self, latest_time: int, lead: int) -> bool:
        books = self._books
        try:
            self._client.register_latest(self.directory, latest_time, self.datatype, lead=lead)
        except Exception as error:  # noqa: BLE001 - whatever it is, the data matter more
            self._note_failure(error)
            return False
        else:
            if books.error is not None:
                log.info("%s is registered with the data map again", self.directory)
            self._books = RegistrarStatistics(books.registered + 1, books.failed, None)
            return True

    def _note_failure(self, error: Exception) -> None:
        books = self._books
        if books.error is None:
            log.log(
                self._level,
                "%s is not registered with the data map: %s; it is tried again",
                self.directory,
                error,
            )
        self._books = books._replace(failed=books.failed + 1, error=str(error))

    def statistics(self) -> RegistrarStatistics:
        return self._books

    def close(self, patience: float = _TIMEOUT) -> None:
        """Register the last note, if that takes no longer than `patience` seconds; then stop."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._latest is not None:
            self._has_started()  # for what is left
        self._worker.stop(patience)
