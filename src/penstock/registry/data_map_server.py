"""How is a data map served to LROSE's programs and ours?"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from pydantic import BeforeValidator, Field

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import InvalidOption, Malformed, PenstockError, StorageError, Unsupported
from penstock.core.options import Duration, Size  # noqa: TC001 - pydantic reads it
from penstock.core.worker import Worker
from penstock.protocols.lrose.addresses import default_port
from penstock.protocols.lrose.datamapper_client import SCHEME, DataMapClient
from penstock.protocols.lrose.datamapper_wire import (
    DATAMAPPER_TYPE,
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)
from penstock.protocols.lrose.ds_server import DsServer, ServingOptions
from penstock.registry.data_map import (
    DEFAULT_MAX_ENTRIES,
    DataMap,
    load_state,
    save_state,
    state_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.lrose.ds_message import DsMessage

__all__ = [
    "DataMapServer",
    "MapAnswers",
    "MapServerOptions",
    "MapStatistics",
    "RelayHost",
    "server_port",
]

# --- options ------------------------------------------------------------------------------------

_LAST_PORT: Final = 0xFFFF


def server_port() -> int:
    """Return the port of a server: `DMAP_PORT`, or the default of its clients.

    :raises InvalidOption: the environment holds an invalid port.
    """
    said = os.environ.get("DMAP_PORT", "").strip()
    if not said:
        return default_port(SCHEME)
    if not (said.isascii() and said.isdigit() and int(said) <= _LAST_PORT):
        raise InvalidOption("DMAP_PORT", said, "the environment should name a port")
    return int(said)


class RelayHost(NamedTuple):
    """A host to which requests may be relayed."""

    #: Its name in requests.
    name: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> RelayHost:
        """Parse `inner`, or `inner=10.0.0.7:5434`.

        :raises InvalidOption: it is neither.
        """
        name, _, address = text.strip().partition("=")
        host, _, port = (address or name).partition(":")
        is_port = not port or (port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT)
        if not name or not host or not is_port or ":" in name:
            raise InvalidOption("relay", text, "should be NAME or NAME=HOST:PORT")
        return cls(name, host, int(port) if port else default_port(SCHEME))


def _relays(said: object) -> object:
    if isinstance(said, str):
        return tuple(RelayHost.parse(each) for each in said.split(",") if each.strip())
    return said


class MapServerOptions(ServingOptions):
    """Options of a server of a data map."""

    port: Annotated[int, Field(ge=0, le=65535)] = Field(default_factory=server_port)
    #: Keep the map in this file, in LROSE's own form.
    state: Path | None = None
    #: Interval between two saves of a changed map.
    save_every: Annotated[Duration, Field(gt=0)] = 10.0
    #: Remove data sets without an update for this long; None: never.
    purge_age: Annotated[Duration, Field(gt=0)] | None = None
    #: Most data sets in the map; one reply holds all of them.
    max_entries: Annotated[int, Field(ge=1, le=50_000)] = DEFAULT_MAX_ENTRIES
    #: Hosts to which requests may be relayed, separated by commas. No others: a client that could
    #: name any host could probe this machine's network.
    relay: Annotated[tuple[RelayHost, ...], BeforeValidator(_relays)] = ()
    #: Enough for a full map of the default size.
    max_message: Annotated[Size, Field(ge=1024, le=1 << 31)] = 16 << 20
    max_held: Annotated[Size, Field(ge=1024)] = 64 << 20
    #: A connection has one request, sent at once.
    idle: Annotated[Duration, Field(gt=0)] = 60.0


# --- answers to requests ------------------------------------------------------------------------

_NS_PER_SECOND: Final = 1_000_000_000
_LATEST_SECOND: Final = 2**31 - 1
#: Most characters of an error text.
_LONGEST_ERROR: Final = 1000


class MapStatistics(NamedTuple):
    """Counters of a map. Every request was answered in one of these ways."""

    #: Requests received.
    requests: int
    #: Those that registered something.
    registered: int
    #: Those that asked to delete something.
    deleted: int
    #: Those that asked for entries, and got them from this map.
    asked: int
    #: Those that asked for the entries of another host, and got them.
    relayed: int
    #: Those that got an error: malformed, map full, not allowed, other host down.
    refused: int


def _refusal(error: PenstockError) -> DsMessage:
    """Return the reply that reports an error."""
    text = str(error) if error.hint is None else f"{error} ({error.hint})"
    return MapReply(ReplyKind.REG_STATUS, error=text[:_LONGEST_ERROR]).to_message()


class MapAnswers:
    """Answers requests from one map, and counts them. For one thread at a time."""

    def __init__(self, data_map: DataMap, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.map = data_map
        self._clock = clock
        self._counts = dict.fromkeys(MapStatistics._fields, 0)

    def statistics(self) -> MapStatistics:
        return MapStatistics(**self._counts)

    def count(self, what: str) -> None:
        """Count a request, and how it was answered: a field of the statistics."""
        self._counts["requests"] += 1
        self._counts[what] += 1

    def reply_to(self, message: DsMessage) -> DsMessage:
        """Answer one message from this map; report errors to the client."""
        try:
            request = MapRequest.from_message(message)
        except Malformed as fault:
            return self.refuse(fault)
        return self.reply_to_request(request)

    def reply_to_request(self, request: MapRequest) -> DsMessage:
        """Answer one request from this map, ignoring its relays; report errors to the client."""
        try:
            reply = self._answer(request).to_message()
        except PenstockError as error:
            return self.refuse(error)
        self.count(_COUNTED.get(request.kind, "registered"))
        return reply

    def refuse(self, error: PenstockError) -> DsMessage:
        """Return the reply that reports an error, and count it."""
        self.count("refused")
        return _refusal(error)

    def _answer(self, request: MapRequest) -> MapReply:
        map_, kind = self.map, request.kind
        if kind is RequestKind.REQ_ALL:
            return self._with_entries("", "")
        if kind is RequestKind.REG_FULL:
            map_.register_full(request.infos)
            return MapReply(ReplyKind.REG_STATUS)
        (info,) = request.infos
        if kind is RequestKind.REQ_SELECTED:
            return self._with_entries(info.datatype, info.dir)
        if kind is RequestKind.REG_LATEST_DATA:
            map_.register_latest(info)
        elif kind is RequestKind.REG_STATUS:
            map_.register_status(info)
        elif kind is RequestKind.REG_DATA_SET:
            map_.register_data_set(info)
        else:
            map_.delete(*info.key)
        return MapReply(ReplyKind.REG_STATUS)

    def _with_entries(self, datatype: str, directory: str) -> MapReply:
        now = min(self._clock.now_ns() // _NS_PER_SECOND, _LATEST_SECOND)
        infos = self.map.selected(datatype, directory)
        return MapReply(ReplyKind.WITH_INFO, tuple(replace(info, check_time=now) for info in infos))


#: How a request that was answered is counted; the others registered something.
_COUNTED: Final = {
    RequestKind.REQ_ALL: "asked",
    RequestKind.REQ_SELECTED: "asked",
    RequestKind.DELETE: "deleted",
}


# --- the server ---------------------------------------------------------------------------------

log = logging.getLogger(__name__)

#: Seconds between two purges of old entries, as in LROSE's server.
_PURGE_EVERY: Final = 5.0
#: Most hosts that a request may pass.
_MOST_HOPS: Final = 8
#: Most requests relayed at the same time; and most that wait for that.
_RELAYING: Final = 8
_MOST_RELAYED: Final = 64
#: Timeout (seconds) of a relayed request.
_RELAY_TIMEOUT: Final = 10.0


class _MapSession:
    """One client: one request, one reply."""

    socket_id = DATAMAPPER_TYPE

    def __init__(self, server: DataMapServer) -> None:
        self.is_over = False
        self._server = server

    def handle(self, request: DsMessage) -> DsMessage:
        self.is_over = True
        return self._server.reply_to(request)

    def failure(self, request: DsMessage, error: Exception) -> tuple[int, DsMessage]:
        del request
        if not isinstance(error, PenstockError):
            error = PenstockError("the server failed", hint="its log says more")
        return self.socket_id, _refusal(error)

    def close(self) -> None:
        """Do nothing: a client has no resources."""


class DataMapServer(DsServer):
    """A DataMapper. Serves from construction until `close`."""

    def __init__(self, options: MapServerOptions) -> None:
        """Read the state file, if there is one.

        :raises StorageError: the file cannot be read.
        :raises MapFull: the file holds more entries than the map allows.
        :raises InvalidOption: the folder of the file does not exist.
        """
        self.map = DataMap(max_entries=options.max_entries)
        self.answers = MapAnswers(self.map)
        self._state = options.state
        self._relays = {each.name: each for each in options.relay}
        self._relaying = 0
        #: Limits the requests relayed at the same time.
        self._asking = threading.Semaphore(_RELAYING)
        #: Guards the map and the counters.
        self._using = threading.Lock()
        self._could_save = True
        is_damaged = False
        if self._state is not None:
            self._check_folder(self._state)
            loaded, is_damaged = load_state(self._state, self.map)
            log.info("%s: %d data sets", self._state, loaded)
        #: The version of the map in the file; None: the file is damaged.
        self._saved_version = None if is_damaged else self.map.version
        self._chores: list[Worker] = []
        super().__init__(options, lambda _: _MapSession(self), grants="read and change its map")
        if self._state is not None:
            self._begin("data map, saving", self._save, options.save_every)
        if (age := options.purge_age) is not None:
            self._begin("data map, purging", lambda: self._purge(age), min(_PURGE_EVERY, age))

    def _begin(self, name: str, chore: Callable[[], None], every: float) -> None:
        self._chores.append(Worker(name, lambda _: chore(), log=log, every=every).start())

    def map_statistics(self) -> MapStatistics:
        """Return the number of requests by kind of answer."""
        with self._using:
            return self.answers.statistics()

    def reply_to(self, request: DsMessage) -> DsMessage:
        """Answer a request, or relay it to another host."""
        try:
            asked = MapRequest.from_message(request)
        except Malformed as fault:
            with self._using:
                return self.answers.refuse(fault)
        if asked.relay:
            return self._relay(asked)
        with self._using:
            return self.answers.reply_to_request(asked)

    @staticmethod
    def _check_folder(path: Path) -> None:
        """Check at the start, not at the first save, that the folder of the file exists."""
        if not path.parent.is_dir():
            raise InvalidOption("state", str(path), f"there is no directory {path.parent}")

    def close(self) -> None:
        chores, self._chores = self._chores, []
        for chore in chores:
            chore.stop()
        super().close()
        self._save()

    # --- the state file ---------------------------------------------------------------------

    def _save(self) -> None:
        with self._using:
            version, known = self.map.version, self.map.all()
        if self._state is None or version == self._saved_version:
            return
        try:
            save_state(self._state, state_bytes(known))
        except StorageError as error:
            if self._could_save:
                log.warning("the map is not saved: %s; it is tried again", error)
            self._could_save = False
        else:
            self._could_save = True
            self._saved_version = version

    def _purge(self, age: float) -> None:
        with self._using:
            purged = self.map.purge(age)
        if purged:
            log.info("%d data sets not heard of for %g s are forgotten", purged, age)

    # --- asking another host ----------------------------------------------------------------

    def _relay(self, request: MapRequest) -> DsMessage:
        """Relay a request to the next host, and return its answer."""
        with self._using:
            self._relaying += 1
        try:
            reply = self._ask(request)
        except PenstockError as error:
            with self._using:
                return self.answers.refuse(error)
        finally:
            with self._using:
                self._relaying -= 1
        with self._using:
            self.answers.count("relayed")
        return reply

    def _ask(self, request: MapRequest) -> DsMessage:
        name, *further = request.relay
        there = self._relays.get(name)
        if there is None:
            raise Unsupported(
                f"this map passes no questions on to {name}",
                hint=f"allow it there: penstock serve datamapper --relay {name}",
            )
        if len(further) >= _MOST_HOPS:
            raise Unsupported(f"a question may pass {_MOST_HOPS} hosts at most")
        if self._relaying > _MOST_RELAYED:
            raise Unsupported("too many questions are under way to other hosts", hint="try later")
        client = DataMapClient(
            there.host, there.port, connect_timeout=_RELAY_TIMEOUT, timeout=_RELAY_TIMEOUT
        )
        onward = request._replace(relay=tuple(further))
        with self._asking:
            return client.request(onward).to_message()
