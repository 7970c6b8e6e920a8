"""How does a program register its data with a DataMapper, and ask it for those of others?"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.addresses import default_port
from penstock.protocols.lrose.connection import Connection
from penstock.protocols.lrose.datamapper_info import NO_LEAD, DataSetInfo
from penstock.protocols.lrose.datamapper_messages import (
    DATAMAPPER_TYPE,
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)
from penstock.protocols.lrose.ds_message import ErrorCode
from penstock.protocols.lrose.errors import RequestRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "SCHEME",
    "DataMapClient",
    "below_data_dir",
    "is_active",
    "own_host",
    "register_latest",
]

#: What LROSE calls this service.
SCHEME: Final = "dmapp"

_FIRST_SECOND: Final = -(2**31)
_LATEST_SECOND: Final = 2**31 - 1


def is_active() -> bool:
    """Tell whether programs are to register: `DATA_MAPPER_ACTIVE=false` turns it off."""
    return os.environ.get("DATA_MAPPER_ACTIVE", "").strip().lower() != "false"


def below_data_dir(path: str) -> str:
    """Return a path without `$RAP_DATA_DIR` or `$DATA_DIR`, so that all machines name it alike."""
    path = os.path.abspath(path)  # noqa: PTH100 - a Path would not take every name
    for variable in ("RAP_DATA_DIR", "DATA_DIR"):
        root = os.environ.get(variable, "").rstrip("/")
        if root and path.startswith(f"{root}/"):
            return path[len(root) + 1 :].lstrip("/")
    return path


@cache
def own_host() -> tuple[str, str]:
    """Return the name and the address of this machine, as the map knows it."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "127.0.0.1"
    return name, address


class DataMapClient:
    """Talks to one DataMapper, LROSE's or ours: a connection for each request, as it wants it.

    Safe to share between threads. Every method raises `ConnectionLost` where nobody answers,
    `RequestRefused` where the server says no (LROSE's own client does not notice that), and
    `Malformed` where the answer is none.
    """

    def __init__(
        self,
        hosts: str = "localhost",
        port: int | None = None,
        *,
        connect_timeout: float = 5.0,
        timeout: float = 30.0,
    ) -> None:
        """Use the map on a host, or, with colons between, the last of these through the others.

        :raises InvalidOption: there is no host, or no such port.
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
        """Say that a data set has data of this time (seconds since 1970)."""
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
        """Say how a data set is, in words."""
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
        """Say what of a data set is in store."""
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
        """Hand over whole entries, as they are."""
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
        """Return those of a type and of a directory; an empty text matches any."""
        info = DataSetInfo(datatype=datatype, dir=directory)
        return self.request(MapRequest(RequestKind.REQ_SELECTED, (info,), self._relay)).infos

    def request(self, request: MapRequest) -> MapReply:
        """Ask for entries, as the request says."""
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
    """Register latest data with the map of this machine, unless that is turned off.

    :raises PenstockError: as `DataMapClient` does.
    """
    if is_active():
        client = DataMapClient(host, port, connect_timeout=timeout, timeout=timeout)
        client.register(RequestKind.REG_LATEST_DATA, info)


def _second(time: int) -> int:
    """Return a time as far as 32 bits go."""
    return max(_FIRST_SECOND, min(time, _LATEST_SECOND))
