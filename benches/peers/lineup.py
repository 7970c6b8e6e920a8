"""Who takes part, and in which case?"""

from __future__ import annotations

from dataclasses import dataclass

from peers.contract import FILE, MEMORY, Way
from peers.iceoryx import IceoryxWay
from peers.nats import NatsWay
from peers.queues import Form, QueueWay
from peers.redis import RedisWay
from peers.replay import JetStreamStore, LogStore, QueueStore, RedisStore, Store
from peers.zenoh import ZenohWay
from peers.zeromq import ZeromqWay

__all__ = [
    "CLASSIC",
    "ICEORYX",
    "ICEORYX_EVENT",
    "ICEORYX_IN_PLACE",
    "JETSTREAM_PULL",
    "JETSTREAM_PUSH",
    "LOG",
    "REDIS_XREAD",
    "RING",
    "Lineup",
    "lineup",
]

#: Names of the forms in which a wide ring is used.
RING = {form: f"wide ring: {form.value}" for form in Form}
LOG = {form: f"durable log: {form.value}" for form in Form}
CLASSIC = {form: f"classic queue: {form.value}" for form in Form}

ICEORYX = "iceoryx2"
ICEORYX_IN_PLACE = "iceoryx2, in place"
ICEORYX_EVENT = "iceoryx2, event"

REDIS_XREAD = "Redis XREAD"
JETSTREAM_PUSH = "JetStream, push"
JETSTREAM_PULL = "JetStream, pull"


@dataclass(frozen=True, slots=True)
class Lineup:
    """The ways of each kind of measurement."""

    throughput: tuple[Way, ...]
    fan_out: tuple[Way, ...]
    latency: tuple[Way, ...]
    replay: tuple[Store, ...]

    def versions(self) -> list[str]:
        """Name what is there, each once."""
        ways = [*self.throughput, *(store.way for store in self.replay)]
        there = [way.version() for way in ways if way.missing() is None]
        return [version for version in dict.fromkeys(there) if version]


def lineup(redis_port: int, nats_port: int) -> Lineup:
    """Name everybody. A server that is not there has port 0, and its ways say so."""
    rings = tuple(
        QueueWay(RING[form], storage, "wide", form)
        for form in (Form.SINGLE, Form.LISTS, Form.ARROW, Form.IN_PLACE)
        for storage in (MEMORY, FILE)
    )
    classic = tuple(
        QueueWay(CLASSIC[form], FILE, "classic", form) for form in (Form.SINGLE, Form.LISTS)
    )
    iceoryx = (IceoryxWay(ICEORYX), IceoryxWay(ICEORYX_IN_PLACE, in_place=True))
    redis, nats = RedisWay(port=redis_port), NatsWay(port=nats_port)
    peers: tuple[Way, ...] = (
        ZeromqWay(),
        ZeromqWay(storage="tcp"),
        ZenohWay(),
        ZenohWay(storage="shm"),
        redis,
        nats,
    )
    waiting = (
        QueueWay(RING[Form.POLLED], MEMORY, "wide", Form.POLLED),
        QueueWay(RING[Form.SLEEPING], MEMORY, "wide", Form.SLEEPING),
        QueueWay(RING[Form.SLEEPING], FILE, "wide", Form.SLEEPING),
        QueueWay(CLASSIC[Form.SLEEPING], FILE, "classic", Form.SLEEPING),
    )
    in_file = [QueueWay(RING[form], FILE, "wide", form) for form in (Form.LISTS, Form.ARROW)]
    return Lineup(
        throughput=(*rings, *iceoryx, *peers, *classic),
        # A classic queue waits for one reader only.
        fan_out=(*rings, *iceoryx, *peers),
        latency=(*waiting, IceoryxWay(ICEORYX), IceoryxWay(ICEORYX_EVENT, event=True), *peers),
        replay=(
            *(QueueStore(way.name, way) for way in in_file),
            *(LogStore(LOG[way.form], way) for way in in_file),
            RedisStore(REDIS_XREAD, redis),
            JetStreamStore(JETSTREAM_PUSH, nats),
            JetStreamStore(JETSTREAM_PULL, nats, push=False),
        ),
    )
