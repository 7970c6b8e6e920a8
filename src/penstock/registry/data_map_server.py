"""How is a data map served to LROSE's programs and ours?"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, Malformed, PenstockError, StorageError, Unsupported
from penstock.core.worker import Worker
from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.datamapper_messages import DATAMAPPER_TYPE, MapRequest
from penstock.protocols.lrose.serving import DsServer
from penstock.registry.data_map import DataMap
from penstock.registry.data_map_answers import MapAnswers, MapStatistics, refusal
from penstock.registry.data_map_state import load_state, save_state, state_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.protocols.lrose.ds_message import DsMessage
    from penstock.registry.data_map_options import MapServerOptions

__all__ = ["DataMapServer"]

log = logging.getLogger(__name__)

#: Seconds between two looks for old entries, as LROSE's server does.
_PURGE_EVERY: Final = 5.0
#: A request that has to pass more hosts than this is a mistake, or malice.
_MOST_HOPS: Final = 8
#: Requests that other hosts are asked at the same time; and those that wait for that.
_RELAYING: Final = 8
_MOST_RELAYED: Final = 64
#: Seconds that another host has to answer.
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
        return self.socket_id, refusal(error)

    def close(self) -> None:
        """Nothing is kept for a client."""


class DataMapServer(DsServer):
    """A DataMapper. It serves as soon as it is made."""

    def __init__(self, options: MapServerOptions) -> None:
        """Read the state file, if there is one.

        :raises StorageError: it cannot be read.
        :raises MapFull: it holds more than the map may.
        :raises InvalidOption: there is no place for it.
        """
        self.map = DataMap(max_entries=options.max_entries)
        self.answers = MapAnswers(self.map)
        self._state = options.state
        self._relays = {each.name: each for each in options.relay}
        self._relaying = 0
        #: Other hosts are asked by so many clients at the same time.
        self._asking = threading.Semaphore(_RELAYING)
        #: Whoever uses the map, or counts, has it.
        self._using = threading.Lock()
        self._could_save = True
        if self._state is not None:
            self._check_folder(self._state)
            loaded = load_state(self._state, self.map)
            log.info("%s: %d data sets", self._state, loaded)
        self._saved_version = self.map.version
        if self._state is not None and len(self.map) and not self._state.exists():
            self._saved_version -= (
                1  # a damaged one was put aside: what could be read is saved anew
            )
        self._chores: list[Worker] = []
        super().__init__(options, lambda _: _MapSession(self), grants="read and change its map")
        if self._state is not None:
            self._begin("data map, saving", self._save, options.save_every)
        if (age := options.purge_age) is not None:
            self._begin("data map, purging", lambda: self._purge(age), min(_PURGE_EVERY, age))

    def _begin(self, name: str, chore: Callable[[], None], every: float) -> None:
        self._chores.append(Worker(name, lambda _: chore(), log=log, every=every).start())

    def map_statistics(self) -> MapStatistics:
        """Return how many requests of which kind were answered."""
        with self._using:
            return self.answers.statistics()

    def reply_to(self, request: DsMessage) -> DsMessage:
        """Answer a request, or have another host do so."""
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
        """Find out at the start, and not ten seconds later, that there is no place for the file."""
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
        """Ask the next host, and return its answer as ours."""
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
