"""How is a data map served to LROSE's programs and ours?"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from penstock.core.errors import InvalidOption, Malformed, PenstockError, StorageError, Unsupported
from penstock.protocols.lrose.datamapper_client import DataMapClient
from penstock.protocols.lrose.datamapper_messages import DATAMAPPER_TYPE, MapRequest
from penstock.protocols.lrose.serving import DsServer
from penstock.registry.data_map import DataMap
from penstock.registry.data_map_answers import MapAnswers, MapStatistics, refusal
from penstock.registry.data_map_state import load_state, save_state, state_bytes

if TYPE_CHECKING:
    from collections.abc import Coroutine
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

    def handle(self, request: DsMessage) -> DsMessage | Coroutine[None, None, DsMessage]:
        self.is_over = True
        answers = self._server.answers
        try:
            asked = MapRequest.from_message(request)
        except Malformed as fault:
            return answers.refuse(fault)
        return self._server.relay(asked) if asked.relay else answers.reply_to_request(asked)

    def failure(self, request: DsMessage, error: Exception) -> tuple[int, DsMessage]:
        del request
        if not isinstance(error, PenstockError):
            error = PenstockError("the server failed", hint="its log says more")
        return self.socket_id, refusal(error)

    def close(self) -> None:
        """Nothing is kept for a client."""


class DataMapServer(DsServer):
    """A DataMapper. All of it runs in one event loop."""

    def __init__(self, options: MapServerOptions) -> None:
        """Read the state file, if there is one.

        :raises StorageError: it cannot be read.
        :raises MapFull: it holds more than the map may.
        """
        super().__init__(options, lambda _name: _MapSession(self), grants="read and change its map")
        self.map = DataMap(max_entries=options.max_entries)
        self.answers = MapAnswers(self.map)
        self._state = options.state
        self._save_every = options.save_every
        self._purge_age = options.purge_age
        self._relays = {each.name: each for each in options.relay}
        self._relaying = 0
        self._relay_threads = ThreadPoolExecutor(_RELAYING, thread_name_prefix="data-map-relay")
        self._chores: list[asyncio.Task[None]] = []
        self._could_save = True
        #: Two saves at the same time would write into one file.
        self._saving = asyncio.Lock()
        if self._state is not None:
            loaded = load_state(self._state, self.map)
            log.info("%s: %d data sets", self._state, loaded)
        self._saved_version = self.map.version
        if self._state is not None and len(self.map) and not self._state.exists():
            self._saved_version -= (
                1  # a damaged one was put aside: what could be read is saved anew
            )

    def map_statistics(self) -> MapStatistics:
        """Return how many requests of which kind were answered."""
        return self.answers.statistics()

    async def start(self) -> None:
        if self._state is not None:
            self._check_folder(self._state)
        await super().start()
        if self._state is not None:
            self._chores.append(asyncio.create_task(self._save_now_and_then(self._state)))
        if self._purge_age is not None:
            self._chores.append(asyncio.create_task(self._purge_now_and_then(self._purge_age)))

    @staticmethod
    def _check_folder(path: Path) -> None:
        """Find out at the start, and not ten seconds later, that there is no place for the file."""
        if not path.parent.is_dir():
            raise InvalidOption("state", str(path), f"there is no directory {path.parent}")

    async def close(self) -> None:
        chores, self._chores = self._chores, []
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)
        await super().close()
        self._relay_threads.shutdown(wait=False, cancel_futures=True)
        if self._state is not None:
            await self._save(self._state)

    # --- the state file ---------------------------------------------------------------------

    async def _save_now_and_then(self, path: Path) -> None:
        while True:
            await asyncio.sleep(self._save_every)
            # A save that has begun comes to its end, also when the server is told to stop.
            await asyncio.shield(asyncio.ensure_future(self._save(path)))

    async def _save(self, path: Path) -> None:
        async with self._saving:
            version = self.map.version
            if version == self._saved_version:
                return
            content = state_bytes(self.map.all())
            try:
                await asyncio.to_thread(save_state, path, content)
            except StorageError as error:
                if self._could_save:
                    log.warning("the map is not saved: %s; it is tried again", error)
                self._could_save = False
            else:
                self._could_save = True
                self._saved_version = version

    async def _purge_now_and_then(self, age: float) -> None:
        while True:
            if purged := self.map.purge(age):
                log.info("%d data sets not heard of for %g s are forgotten", purged, age)
            await asyncio.sleep(min(_PURGE_EVERY, age))

    # --- asking another host ----------------------------------------------------------------

    async def relay(self, request: MapRequest) -> DsMessage:
        """Ask the next host, and return its answer as ours."""
        self._relaying += 1
        try:
            reply = await self._ask(request)
        except PenstockError as error:
            return self.answers.refuse(error)
        finally:
            self._relaying -= 1
        self.answers.count("relayed")
        return reply

    async def _ask(self, request: MapRequest) -> DsMessage:
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
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._relay_threads, client.request, onward)
        return reply.to_message()
