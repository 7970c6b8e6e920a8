"""How does Zenoh pass messages?"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peers.contract import (
    BUFFER,
    PATIENCE,
    Case,
    Receiver,
    Scratch,
    Sender,
    Way,
    free_port,
    library,
    not_installed,
    send_each,
    version_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.tally import Taker

__all__ = ["ZenohWay"]

_KEY = "penstock/bench"

#: How long (seconds) a subscription may take to become known to a publisher.
_PROPAGATION = 0.3

#: A reader that did not see the end after so long (seconds) gives up.
_LONGEST = 4 * PATIENCE


@dataclass(frozen=True)
class ZenohWay(Way):
    """Peers on a loopback connection, or with payloads in shared memory; congestion blocks."""

    name: str = "zenoh"
    storage: str = "tcp"

    def missing(self) -> str | None:
        return not_installed("zenoh", "eclipse-zenoh")

    def version(self) -> str:
        return version_of("eclipse-zenoh")

    def address(self, scratch: Scratch) -> str:
        del scratch
        return f"tcp/127.0.0.1:{free_port()}"

    def open_writer(self, address: str, case: Case) -> Sender:
        session = _session("listen", address, shared=self.storage != "tcp")
        if self.storage == "tcp":
            return _ZenohSender(session)
        return _SharedSender(session, case)

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        del case, number
        return _ZenohReceiver(_session("connect", address, shared=self.storage != "tcp"))


def _session(direction: str, address: str, *, shared: bool) -> Any:
    zenoh = library("zenoh")
    zenoh.init_log_from_env_or("error")
    config = zenoh.Config()
    for key, value in {
        "mode": "peer",
        f"{direction}/endpoints": [address],
        "scouting/multicast/enabled": False,
        "transport/shared_memory/enabled": shared,
    }.items():
        config.insert_json5(key, json.dumps(value))
    if direction == "connect":
        config.insert_json5("listen/endpoints", "[]")
    return zenoh.open(config)


class _ZenohSender(Sender):
    def __init__(self, session: Any) -> None:
        zenoh = library("zenoh")
        self._session = session
        self._publisher = session.declare_publisher(
            _KEY, congestion_control=zenoh.CongestionControl.BLOCK
        )

    def wait_for_readers(self, readers: int) -> None:
        while len(self._session.info.peers_zid()) < readers:
            time.sleep(0.01)
        time.sleep(_PROPAGATION)

    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        return send_each(self.send, payloads, seconds)

    def send(self, payload: bytes) -> None:
        self._publisher.put(payload)

    def close(self) -> None:
        self._session.close()


class _SharedSender(_ZenohSender):
    def __init__(self, session: Any, case: Case) -> None:
        super().__init__(session)
        shm = library("zenoh").shm
        self._size = case.size
        self._provider = shm.ShmProvider.default_backend(BUFFER)
        self._policy = shm.BlockOn(shm.GarbageCollect())

    def send(self, payload: bytes) -> None:
        shared = self._provider.alloc(self._size, self._policy)
        shared[:] = payload
        self._publisher.put(shared)


class _ZenohReceiver(Receiver):
    """Gets messages by a callback, as Zenoh's own example of throughput does."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._taker: Taker | None = None
        self._ready = threading.Event()
        self._done = threading.Event()
        self._subscriber = session.declare_subscriber(_KEY, self._arrived)

    def take_all(self, taker: Taker) -> None:
        self._done.clear()
        self._taker = taker
        self._ready.set()
        self._done.wait(_LONGEST)

    def _arrived(self, sample: Any) -> None:
        if self._taker is None:
            self._ready.wait()  # it came before somebody wanted it
        assert self._taker is not None
        if self._taker.one(sample.payload.to_bytes()):
            self._taker = None
            self._ready.clear()
            self._done.set()

    def close(self) -> None:
        self._session.close()
