"""How does a test run a dispatcher on a clock of its own, with legs that fail as told?"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from penstock.core.clock import Clock, ManualClock
from penstock.core.retry import Backoff
from penstock.dispatch import Dispatcher, Letter, Limits, Retry, Routes, Subscriber
from penstock.protocols.uprotocol import (
    UUID7,
    UCode,
    UMessage,
    UPayloadFormat,
    UPriority,
    UStatus,
    UUri,
    notification,
    publish,
    request,
    response,
)
from penstock.protocols.uprotocol.transports import Ingest, Leg, not_tried_after

__all__ = [
    "ALICE",
    "BOB",
    "CAROL",
    "METHOD",
    "START_NS",
    "TOPIC",
    "FaultyLeg",
    "Table",
    "World",
    "status",
]

START_NS = 1_800_000_000_000_000_000
ALICE = UUri("here", 0x10, 1, 0)
BOB = UUri("here", 0x20, 1, 0)
CAROL = UUri("there", 0x30, 1, 0)
TOPIC = UUri("here", 0x10, 1, 0x8001)
METHOD = UUri("there", 0x30, 1, 7)

_CODES = {code.name: code for code in UCode}


def status(name: str) -> UStatus:
    return UStatus(_CODES[name], "as told")


class FaultyLeg(Leg):
    """A transport in memory: it delivers, and fails whenever it is told to."""

    scope: ClassVar[Literal["entity", "authority"]] = "entity"

    def __init__(
        self, name: str, scope: Literal["entity", "authority"] = "entity", clock: Any = None
    ) -> None:
        super().__init__(name)
        self.__dict__["scope"] = scope  # of other legs it is the class's
        self.clock = clock
        #: What arrived, by address: in order, with the time.
        self.arrived: defaultdict[UUri, list[UMessage]] = defaultdict(list)
        self.times: dict[UUID7 | None, list[float]] = {}
        #: Calls of `deliver`: how many messages each had.
        self.calls: list[int] = []
        #: What becomes of the next messages: None is delivered; when it is empty, `always` holds.
        self.next: deque[UStatus | BaseException | None] = deque()
        self.always: UStatus | BaseException | None = None
        #: Decides for each message, before the others: True is delivered.
        self.judge: Callable[[UUri, UMessage], UStatus | None] | None = None
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.listens: set[UUri] = set()
        self.authorities: set[str] = set()
        self.ingest: Ingest | None = None
        self.is_stopped = self.is_closed = False
        self.lost = 0

    @property
    def links_lost(self) -> int:
        return self.lost

    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        self.ingest, self.authorities = ingest, set(authorities)

    def listen(self, topic: UUri) -> None:
        self.listens.add(topic)

    def unlisten(self, topic: UUri) -> None:
        self.listens.discard(topic)

    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        self.entered.set()
        self.calls.append(len(messages))
        if self.gate is not None:
            assert self.gate.wait(30)
        found: list[UStatus | None] = []
        for i, message in enumerate(messages):
            outcome = self.next.popleft() if self.next else self.always
            if outcome is None and self.judge is not None:
                outcome = self.judge(address, message)
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome is not None:
                return found + not_tried_after(outcome, len(messages) - i - 1)
            found.append(None)
            self.arrived[address].append(message)
            if self.clock is not None:
                self.times.setdefault(message.attributes.id, []).append(self.clock.monotonic())
        return found

    def stop(self) -> None:
        self.is_stopped = True

    def close(self) -> None:
        self.is_closed = True

    def statistics(self) -> Mapping[str, int]:
        return {"delivered": sum(map(len, self.arrived.values()))}

    def payloads(self, address: UUri) -> list[bytes | None]:
        return [message.payload for message in self.arrived[address]]


class Table:
    """Subscriptions that a test sets."""

    def __init__(self) -> None:
        self.rows: list[tuple[UUri, Subscriber]] = []
        self.generation = 0

    def add(self, topic: UUri, address: UUri, sample_period_ms: int = 0) -> None:
        self.rows.append((topic, Subscriber(address, sample_period_ms)))
        self.generation += 1

    def remove(self, topic: UUri, address: UUri) -> None:
        self.rows = [row for row in self.rows if (row[0], row[1].address) != (topic, address)]
        self.generation += 1

    def receivers_of(self, topic: UUri) -> list[Subscriber]:
        return [who for pattern, who in self.rows if pattern.matches(topic)]

    def topics(self) -> list[UUri]:
        return [topic for topic, _ in self.rows]


class World:
    """A dispatcher `here` with two legs: `local` to the entities here, `far` to `there`."""

    def __init__(self, state: Path, *, clock: Clock | None = None, **options: Any) -> None:
        self.clock = clock or ManualClock(START_NS)
        self.local = FaultyLeg("local", clock=self.clock)
        self.far = FaultyLeg("far", options.pop("scope", "authority"), clock=self.clock)
        self.table = options.pop("table", None) or Table()
        self.state = state
        self.options: dict[str, Any] = {
            "routes": Routes(authorities={"local": ["here"], "far": ["there"]}),
            "retry": Retry(backoff=Backoff(initial=0.1, maximum=10.0, jitter=0.0)),
            "limits": Limits(),
            "threads": False,
            "sync": "none",
            "rng": random.Random(4),
            **options,
        }
        self.dispatcher = Dispatcher(
            "here",
            state,
            [self.local, self.far],
            subscriptions=self.table,
            clock=self.clock,
            **self.options,
        )
        self.dispatcher.start()

    # --- messages of this moment ----------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    def id(self) -> UUID7:
        return UUID7.new(self.now_ms)

    def publish(self, payload: bytes = b"p", topic: UUri = TOPIC, **options: Any) -> UMessage:
        options.setdefault("id", self.id())
        options.setdefault("payload_format", UPayloadFormat.RAW)
        return publish(topic, payload, **options)

    def notify(
        self, payload: bytes = b"n", source: UUri = TOPIC, sink: UUri = BOB, **options: Any
    ) -> UMessage:
        options.setdefault("id", self.id())
        options.setdefault("payload_format", UPayloadFormat.RAW)
        return notification(source, sink, payload, **options)

    def request(self, source: UUri = ALICE, method: UUri = METHOD, **options: Any) -> UMessage:
        options.setdefault("id", self.id())
        options.setdefault("priority", UPriority.CS4)
        return request(source, method, **options)

    def response(self, asked: UMessage, **options: Any) -> UMessage:
        options.setdefault("id", self.id())
        return response(asked, **options)

    # --- what happens ---------------------------------------------------------------------------

    def ingest(self, *messages: UMessage | bytes, leg: str = "local") -> None:
        raw = [m if isinstance(m, bytes) else m.to_bytes() for m in messages]
        self.dispatcher.ingest(leg, raw)

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass, as far as that."""
        end = self.clock.monotonic() + seconds
        while True:
            due = self.dispatcher.step()
            now = self.clock.monotonic()
            if due is None or due > end:
                break
            assert isinstance(self.clock, ManualClock)
            self.clock.advance(max(due - now, 1e-9))
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(max(end - self.clock.monotonic(), 0.0))
        self.dispatcher.step()

    @property
    def letters(self) -> list[Letter]:
        return self.dispatcher.dead_letters.list()

    @property
    def codes(self) -> list[UCode]:
        return [letter.code for letter in self.letters]

    @property
    def queued(self) -> int:
        return self.dispatcher.books().copies.queued

    def responses(self, address: UUri = ALICE, leg: FaultyLeg | None = None) -> list[UMessage]:
        return [
            message
            for message in (leg or self.local).arrived[address]
            if message.attributes.reqid is not None
        ]

    def balance(self) -> None:
        assert self.dispatcher.books().problems() == []

    def reopen(self, **options: Any) -> World:
        """Close it, and open another one with the same state, clock and subscriptions."""
        self.dispatcher.close()
        changed = {**self.options, **options}
        return World(self.state, clock=self.clock, table=self.table, **changed)

    def close(self) -> None:
        self.dispatcher.close()


def in_order(messages: Iterable[UMessage]) -> list[bytes | None]:
    """Return the payloads without those that came again."""
    return list(dict.fromkeys(message.payload for message in messages))
