"""How do Redis streams pass and keep messages?"""

from __future__ import annotations

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
    send_each,
    version_of,
)
from peers.servers import REDIS, missing_server, server_version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.tally import Taker

__all__ = ["RedisWay", "add", "connect", "group_of", "take_after"]

_FIELD = b"p"

#: Messages that a reader asks for at a time, at most.
_READ_GROUP = 1000

#: What a pipeline and an answer may hold: more only makes both ends wait for each other.
_GROUP_BYTES = 1 << 20


@dataclass(frozen=True)
class RedisWay(Way):
    """XADD in pipelines and blocking XREAD, on a server that logs to a file every second."""

    name: str = "Redis streams"
    storage: str = "tcp, AOF"
    port: int = 0

    def missing(self) -> str | None:
        return missing_server(REDIS) or not_installed("redis", "redis")

    def version(self) -> str:
        return f"{server_version(REDIS)} with {version_of('redis')}, {version_of('hiredis')}"

    def address(self, scratch: Scratch) -> str:
        return scratch.name()

    def open_writer(self, address: str, case: Case) -> Sender:
        return _RedisSender(self.port, address, case)

    def open_reader(self, address: str, case: Case, number: int) -> Receiver:
        del number
        return _RedisReceiver(self.port, address, case)


def connect(port: int) -> Any:
    """Connect to the server of this comparison."""
    return library("redis").Redis(port=port, socket_timeout=4 * PATIENCE)


def group_of(size: int) -> int:
    """How many messages of a size go in one exchange."""
    return max(1, min(_READ_GROUP, _GROUP_BYTES // size))


class _RedisSender(Sender):
    def __init__(self, port: int, stream: str, case: Case) -> None:
        self._redis = connect(port)
        self._stream = stream
        self._group = group_of(case.size)

    def send_for(self, seconds: float, payloads: Sequence[bytes]) -> int:
        groups = [payloads[at : at + self._group] for at in range(0, len(payloads), self._group)]
        rounds = send_each(self._send_all, [groups], seconds)
        return rounds * len(payloads)

    def _send_all(self, groups: Sequence[Sequence[bytes]]) -> None:
        for group in groups:
            add(self._redis, self._stream, group)

    def send(self, payload: bytes) -> None:
        self._redis.xadd(self._stream, {_FIELD: payload})

    def close(self) -> None:
        self._redis.unlink(self._stream)
        self._redis.close()


def add(redis: Any, stream: str, payloads: Sequence[bytes]) -> None:
    """Append messages in one pipeline."""
    pipeline = redis.pipeline(transaction=False)
    for payload in payloads:
        pipeline.xadd(stream, {_FIELD: payload})
    pipeline.execute()


class _RedisReceiver(Receiver):
    def __init__(self, port: int, stream: str, case: Case) -> None:
        self._redis = connect(port)
        self._stream = stream
        self._group = group_of(case.size)
        self._last = b"0"

    def take_all(self, taker: Taker) -> None:
        self._last = take_after(self._redis, self._stream, self._last, self._group, taker)

    def close(self) -> None:
        self._redis.close()


def take_after(redis: Any, stream: str, last: bytes, group: int, taker: Taker) -> bytes:
    """Read what comes after an id up to the last message; return the id reached."""
    while answer := redis.xread({stream: last}, count=group, block=round(PATIENCE * 1000)):
        entries = answer[0][1] if isinstance(answer, list) else answer[stream.encode()][0]
        last = entries[-1][0]
        if taker.many([fields[_FIELD] for _, fields in entries]):
            break
    return last
