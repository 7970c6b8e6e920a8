"""How fast are messages that were kept read again, from a point in time?"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import penstock
from peers import nats, queues, redis
from peers.contract import PATIENCE, Scratch, Way, library
from peers.queues import Form, QueueWay
from peers.runs import Failed
from peers.tally import Tally, end_marker, payloads_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers.nats import NatsWay
    from peers.redis import RedisWay
    from peers.tally import Taker

__all__ = ["JetStreamStore", "LogStore", "QueueStore", "RedisStore", "Store", "keep", "replay"]

#: Rounds of the prepared messages before the point in time, and from it on.
_BEFORE, _AFTER = 20, 180

#: A pause (seconds) on both sides of the point in time, so that no clock is too coarse for it.
_PAUSE = 0.02


class Kept(ABC):
    """Messages in storage."""

    @abstractmethod
    def add(self, payloads: Sequence[bytes]) -> None:
        """Append messages."""

    @abstractmethod
    def take_since(self, moment: int, taker: Taker) -> None:
        """Hand over what was appended since a moment (ns since 1970), up to the last message."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back but the messages."""


@dataclass(frozen=True)
class Store(ABC):
    """One place to keep messages in. It is sent to the processes that use it."""

    name: str
    #: How the place is named, found and versioned.
    way: Way

    @property
    def label(self) -> str:
        return self.name

    def missing(self) -> str | None:
        return self.way.missing()

    def address(self, scratch: Scratch) -> str:
        return self.way.address(scratch)

    @abstractmethod
    def open(self, address: str, *, new: bool) -> Kept:
        """Open the place; make it first if it is new."""


def keep(store: Store, address: str, size: int) -> int:
    """Fill a store and return a moment that lies between its messages."""
    payloads = payloads_of(size)
    with closing(store.open(address, new=True)) as kept:
        for _ in range(_BEFORE):
            kept.add(payloads)
        time.sleep(_PAUSE)
        moment = time.time_ns()
        time.sleep(_PAUSE)
        for _ in range(_AFTER):
            kept.add(payloads)
        kept.add([end_marker(size, _AFTER * len(payloads))])
    return moment


def replay(store: Store, address: str, size: int, moment: int, seconds: float) -> float:
    """Read everything since the moment, again and again; return messages a second.

    :raises Failed: it was not everything.
    """
    with closing(store.open(address, new=False)) as kept:
        _take(kept, moment, Tally(size, thorough=True))
        received = 0
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            received += _take(kept, moment, Tally(size))
        return received / (time.perf_counter() - began)


def _take(kept: Kept, moment: int, tally: Tally) -> int:
    kept.take_since(moment, tally)
    delivery = tally.delivery()
    if delivery.problem is not None:
        raise Failed(delivery.problem)
    return delivery.received


# --- the stores ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueueStore(Store):
    """A wide queue in a file, large enough for all."""

    way: QueueWay

    def open(self, address: str, *, new: bool) -> Kept:
        if new:
            options = {"layout": self.way.layout, "slots": 65_536, "size": 128 << 20}
            return _KeptInQueue(penstock.open_writer(f"fmq:{address}", **options), None)
        return _KeptInQueue(None, penstock.open_reader(f"fmq:{address}"), self.way.form)


@dataclass(frozen=True)
class LogStore(QueueStore):
    """A durable log as it comes: with checksums, which each read compares."""

    def open(self, address: str, *, new: bool) -> Kept:
        if new:
            return _KeptInQueue(penstock.open_writer(f"log:{address}"), None)
        return _KeptInQueue(None, penstock.open_reader(f"log:{address}"), self.way.form)


class _KeptInQueue(Kept):
    def __init__(self, writer: Any, reader: Any, form: Form = Form.LISTS) -> None:
        self._writer = writer
        self._reader = reader
        self._take_by = queues.take_batches if form is Form.ARROW else queues.take_lists

    def add(self, payloads: Sequence[bytes]) -> None:
        self._writer.write_many(payloads)

    def take_since(self, moment: int, taker: Taker) -> None:
        self._reader.seek(penstock.Position.time(moment))
        self._take_by(self._reader, 1000, taker)

    def close(self) -> None:
        (self._writer or self._reader).close()


@dataclass(frozen=True)
class RedisStore(Store):
    """A stream, read by XREAD from an id that is a time."""

    way: RedisWay

    def open(self, address: str, *, new: bool) -> Kept:
        del new
        return _KeptInRedis(redis.connect(self.way.port), address)


class _KeptInRedis(Kept):
    def __init__(self, connection: Any, stream: str) -> None:
        self._redis = connection
        self._stream = stream

    def add(self, payloads: Sequence[bytes]) -> None:
        redis.add(self._redis, self._stream, payloads)

    def take_since(self, moment: int, taker: Taker) -> None:
        before = f"{moment // 1_000_000}-0".encode()
        redis.take_after(self._redis, self._stream, before, 1000, taker)

    def close(self) -> None:
        self._redis.close()


@dataclass(frozen=True)
class JetStreamStore(Store):
    """A stream in files, read by an ordered push consumer or by a pull consumer."""

    way: NatsWay
    push: bool = True

    def open(self, address: str, *, new: bool) -> Kept:
        return _KeptInJetStream(self.way.port, address, new=new, push=self.push)


class _KeptInJetStream(Kept):
    def __init__(self, port: int, stream: str, *, new: bool, push: bool) -> None:
        self._stream = stream
        self._loop = asyncio.Runner()
        self._nats = self._loop.run(nats.connect(port))
        self._jetstream = self._nats.jetstream()
        self._push = push
        if new:
            self._loop.run(self._jetstream.add_stream(name=stream, subjects=[stream]))

    def add(self, payloads: Sequence[bytes]) -> None:
        self._loop.run(self._add(payloads))

    async def _add(self, payloads: Sequence[bytes]) -> None:
        # Only the last one is acknowledged, which vouches for those before it: how fast a stream
        # is filled is not measured here.
        *before, last = payloads
        for payload in before:
            await self._nats.publish(self._stream, payload)
        await self._jetstream.publish(self._stream, last)

    def take_since(self, moment: int, taker: Taker) -> None:
        self._loop.run(self._pushed(moment, taker) if self._push else self._pulled(moment, taker))

    def _since(self, moment: int) -> Any:
        api = library("nats.js.api")
        return api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_TIME,
            opt_start_time=datetime.fromtimestamp(moment / 1e9, UTC),
            ack_policy=api.AckPolicy.NONE,
        )

    async def _pushed(self, moment: int, taker: Taker) -> None:
        done = asyncio.Event()

        async def arrived(message: Any) -> None:
            if not done.is_set() and taker.one(message.data):
                done.set()

        subscription = await self._jetstream.subscribe(
            self._stream,
            stream=self._stream,
            cb=arrived,
            config=self._since(moment),
            ordered_consumer=True,
            pending_msgs_limit=0,
            pending_bytes_limit=0,
        )
        with suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), 4 * PATIENCE)
        await subscription.unsubscribe()

    async def _pulled(self, moment: int, taker: Taker) -> None:
        subscription = await self._jetstream.pull_subscribe(
            self._stream, stream=self._stream, config=self._since(moment)
        )
        with suppress(TimeoutError):
            while not taker.many([m.data for m in await subscription.fetch(1000, PATIENCE)]):
                pass
        await subscription.unsubscribe()

    def close(self) -> None:
        self._loop.run(self._nats.close())
        self._loop.close()
