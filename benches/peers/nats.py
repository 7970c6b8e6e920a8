"""How does NATS pass messages?"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peers.contract import (
    PATIENCE,
    Case,
    Receiver,
    Scratch,
    Sender,
    Way,
    library,
    not_installed,
    version_of,
)
from peers.servers import NATS, missing_server, server_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.tally import Taker

__all__ = ["NatsWay", "connect"]

#: A reader that did not see the end after so long (seconds) gives up.
_LONGEST = 4 * PATIENCE


@dataclass(frozen=True)
class NatsWay(Way):
    """Core publish and subscribe. It keeps nothing, so the server may hold what a run sends."""

    name: str = "NATS core"
    storage: str = "tcp"
    port: int = 0

    def missing(self) -> str | None:
        return missing_server(NATS) or not_installed("nats", "nats-py")

    def version(self) -> str:
        return f"{server_version(NATS)} with {version_of('nats-py')}"

    def address(self, scratch: Scratch) -> str:
        return scratch.name()

    def open_writer(self, address: str, case: Case) -> Sender:
        del case
        return _NatsSender(self.port, address)

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        del case, number
        return _NatsReceiver(self.port, address)


async def connect(port: int) -> Any:
    """Connect to the server of this comparison."""
    return await library("nats").connect(f"nats://127.0.0.1:{port}")


class _NatsSender(Sender):
    def __init__(self, port: int, subject: str) -> None:
        self._subject = subject
        self._loop = asyncio.Runner()
        self._nats = self._loop.run(connect(port))

    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        return self._loop.run(self._send_for(seconds, payloads))

    async def _send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        publish, subject = self._nats.publish, self._subject
        sent = 0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            for payload in payloads:
                await publish(subject, payload)
            sent += len(payloads)
        return sent

    def send(self, payload: bytes) -> None:
        self._loop.run(self._send(payload))

    async def _send(self, payload: bytes) -> None:
        await self._nats.publish(self._subject, payload)
        await self._nats.flush(round(_LONGEST))

    def close(self) -> None:
        self._loop.run(self._nats.close())
        self._loop.close()


class _NatsReceiver(Receiver):
    """Gets messages by a callback: several times as fast as iterating over a subscription."""

    def __init__(self, port: int, subject: str) -> None:
        self._loop = asyncio.Runner()
        self._taker: Taker | None = None
        self._ready = asyncio.Event()
        self._done = asyncio.Event()
        self._nats = self._loop.run(self._subscribed(port, subject))

    async def _subscribed(self, port: int, subject: str) -> Any:
        nats = await connect(port)
        # No limits: what does not fit would be dropped.
        await nats.subscribe(subject, cb=self._arrived, pending_msgs_limit=0, pending_bytes_limit=0)
        await nats.flush()
        return nats

    async def _arrived(self, message: Any) -> None:
        if self._taker is None:
            await self._ready.wait()  # it came before somebody wanted it
        assert self._taker is not None
        if self._taker.one(message.data):
            self._taker = None
            self._ready.clear()
            self._done.set()

    def take_all(self, taker: Taker) -> None:
        self._loop.run(self._take_all(taker))

    async def _take_all(self, taker: Taker) -> None:
        self._done.clear()
        self._taker = taker
        self._ready.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._done.wait(), _LONGEST)

    def close(self) -> None:
        self._loop.run(self._nats.close())
        self._loop.close()
