"""How does a test run `penstock dispatch run` and entities that talk through it?"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.protocols.uprotocol import UMessage, UUri
from penstock.protocols.uprotocol.communication import LocalUriProvider, RpcClient, Subscriber
from penstock.protocols.uprotocol.transports import UTransport
from penstock.protocols.uprotocol.transports.ring import RingTransport

__all__ = ["BusProcess", "Entity", "bus_process", "ring_entity"]

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


class BusProcess:
    """A dispatcher in a process of its own."""

    def __init__(self, file: Path, variables: Mapping[str, str] | None = None) -> None:
        self.file = file
        self._environment = {**os.environ, **(variables or {})}
        self.start()

    def start(self) -> None:
        """Return when it receives."""
        self.process = subprocess.Popen(
            [PENSTOCK, "dispatch", "run", str(self.file), "--progress", "none"],
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " runs as " in line, f"it said {line!r} and ended with {self.process.wait(30)}"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self._wait()

    def end(self) -> str:
        """Tell it to stop; return what it said last."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        said = self.process.stdout.read()
        assert self._wait() == 0
        return said

    def _wait(self) -> int:
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def bus_process(file: Path, variables: Mapping[str, str] | None = None) -> Iterator[BusProcess]:
    bus = BusProcess(file, variables)
    try:
        yield bus
    finally:
        if bus.process.poll() is None:
            bus.kill()


class Entity:
    """A uEntity: a transport, its addresses, a client, and what it has heard."""

    def __init__(self, transport: UTransport, authority: str, ue_id: int) -> None:
        self.transport = transport
        self.uris = LocalUriProvider(authority, ue_id, 1)
        self.client = RpcClient(transport, self.uris)
        self.subscriber = Subscriber(transport, self.client)
        self._lock = threading.Lock()
        self._heard: list[UMessage] = []

    def hear(self, message: UMessage) -> None:
        with self._lock:
            self._heard.append(message)

    @property
    def heard(self) -> list[UMessage]:
        with self._lock:
            return list(self._heard)

    @property
    def payloads(self) -> list[bytes | None]:
        return [message.payload for message in self.heard]

    def subscribe(self, topic: UUri, **options: Any) -> Any:
        return self.subscriber.subscribe(topic, self.hear, **options).result(20)

    def close(self) -> None:
        self.client.close()
        self.transport.close()


@contextlib.contextmanager
def ring_entity(rings: Path, authority: str, ue_id: int) -> Iterator[Entity]:
    """Connect an entity to the dispatcher whose rings are in this folder."""
    transport = RingTransport(
        authority, send=f"fmq:{rings}/in", receive=f"fmq:{rings}/{ue_id:X}?slots=10000&size=4M"
    )
    entity = Entity(transport, authority, ue_id)
    try:
        yield entity
    finally:
        entity.close()
