"""What can every transport of uProtocol do, for an entity and for a dispatcher, and by what means?

(docs/specs/uprotocol.md 4)
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    ClassVar,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
)

from penstock.core.clock import SYSTEM_CLOCK, Clock
from penstock.core.errors import Closed
from penstock.core.interfaces import Closable
from penstock.core.retry import Backoff
from penstock.core.worker import Worker
from penstock.protocols.uprotocol.codes import UCode, UStatus
from penstock.protocols.uprotocol.message import UMessage

if TYPE_CHECKING:
    from penstock.protocols.uprotocol.uuri import UUri

__all__ = [
    "BATCH",
    "NOT_TRIED",
    "Counts",
    "HandedOver",
    "Ingest",
    "Leg",
    "Listener",
    "Owner",
    "Pump",
    "UListener",
    "UTransport",
    "Unreadable",
    "hand_over",
    "not_tried_after",
]

log = logging.getLogger(__name__)


class UListener(Protocol):
    """A receiver of messages.

    If it has a method `accepts`, it gets only the messages for which that returns True; the others
    wait for another listener.
    """

    def on_receive(self, message: UMessage) -> None: ...


#: A listener may be an object with `on_receive`, or any function of a message.
Listener: TypeAlias = UListener | Callable[[UMessage], None]


class Unreadable(NamedTuple):
    """An invalid message received from a transport."""

    #: Its bytes, in a form for diagnosis.
    raw: bytes
    reason: str
    code: UCode = UCode.INVALID_ARGUMENT
    #: The decodable part of the message; None: it is undecodable.
    message: UMessage | None = None

    @property
    def size(self) -> int:
        return len(self.raw)


#: The function that a leg passes its messages to. It returns when all are stored, else it raises:
#: a leg acknowledges messages to the transport only after it returned.
Ingest: TypeAlias = Callable[[Sequence[bytes | UMessage]], None]

#: The outcome of a message not sent because an earlier one of its batch failed. It is delivered
#: after the failed one, and no attempt is counted. Compare by identity.
NOT_TRIED: Final = UStatus(UCode.ABORTED, "not tried: one before it in the batch failed")


def not_tried_after(status: UStatus, rest: int) -> list[UStatus | None]:
    """Return the last part of a result of `Leg.deliver`: a failure and `rest` NOT_TRIED."""
    return [status, *[NOT_TRIED] * rest]


class _Counting(Closable):
    @abstractmethod
    def statistics(self) -> Mapping[str, int]:
        """Return the counters by name."""


class UTransport(_Counting):
    """Sends and receives messages for entities: uP-L1. Thread-safe."""

    #: The authority of local addresses.
    authority: str

    @abstractmethod
    def send(self, message: UMessage) -> None:
        """Send a message; return when the transport has accepted it.

        :raises UStatusError: INVALID_ARGUMENT, the message violates a rule, and a retry is useless;
            UNAVAILABLE, a retry may succeed; PERMISSION_DENIED, UNAUTHENTICATED or
            RESOURCE_EXHAUSTED, as reported by the transport; DEADLINE_EXCEEDED, the message is
            expired. A failed message may have been sent nevertheless.
        """

    @abstractmethod
    def receive(self, source_filter: UUri, sink_filter: UUri | None = None) -> UMessage:
        """Return the oldest matching message that is not expired and had no listener.

        :raises UStatusError: NOT_FOUND, no message matches; UNIMPLEMENTED, the transport only calls
            listeners; INVALID_ARGUMENT, no message can match such filters.
        """

    @abstractmethod
    def register_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        """Call a listener for each matching message. Idempotent.

        Without a sink filter it gets messages without a sink, else those with a matching sink. It
        also gets earlier messages that wait: a transport acknowledges only what a listener took.

        :raises UStatusError: INVALID_ARGUMENT, no message can match such filters;
            RESOURCE_EXHAUSTED, there are too many listeners; UNAVAILABLE, the transport cannot
            be reached.
        """

    @abstractmethod
    def unregister_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        """Unregister a listener: after this returns no further call starts.

        Messages that still arrive for it are acknowledged, counted and dropped.

        :raises UStatusError: NOT_FOUND, the listener is not registered; INVALID_ARGUMENT as above.
        """

    def withdraw_listener(
        self, source_filter: UUri, listener: Listener, sink_filter: UUri | None = None
    ) -> None:
        """Unregister a listener, but keep its later messages for another listener if possible.

        :raises UStatusError: NOT_FOUND, the listener is not registered; INVALID_ARGUMENT as above.
        """
        self.unregister_listener(source_filter, listener, sink_filter)


class Leg(_Counting):
    """A transport as a dispatcher uses it: messages in batches, acknowledged."""

    #: Whether a message for several entities of one authority is delivered to each ("entity"), or
    #: once to their authority ("authority").
    scope: ClassVar[Literal["entity", "authority"]]

    #: Seconds during which an accepted message may still be lost, with this process or the link.
    #: 0: the transport acknowledges messages.
    settle_after: float = 0.0

    def __init__(self, name: str) -> None:
        #: Its name in the dispatcher's configuration.
        self.name = name
        #: The function that it passes invalid messages to, like an `Ingest`; None: they are counted
        #: and dropped. Set it before `start`.
        self.on_unreadable: Callable[[Sequence[Unreadable]], None] | None = None

    def hand_over(self, came: Sequence[UMessage | Unreadable], ingest: Ingest) -> None:
        """Pass messages to `ingest`, and invalid ones to `on_unreadable`."""
        messages = [it for it in came if isinstance(it, UMessage)]
        if len(messages) < len(came) and self.on_unreadable is not None:
            self.on_unreadable([it for it in came if isinstance(it, Unreadable)])
        if messages:
            ingest(messages)

    @abstractmethod
    def start(self, ingest: Ingest, authorities: Collection[str]) -> None:
        """Start receiving point-to-point messages for these authorities; "*" is any.

        `ingest` is called by threads of the leg. When it raises, the messages stay unacknowledged
        and are redelivered.

        :raises PenstockError: the source of messages does not exist, or is invalid. A broker that
            does not answer is no error: the leg retries.
        """

    @abstractmethod
    def listen(self, topic: UUri) -> None:
        """Receive publishes of a topic, too. Idempotent.

        :raises UStatusError: INVALID_ARGUMENT, it is neither a topic nor a pattern of topics.
        """

    @abstractmethod
    def unlisten(self, topic: UUri) -> None:
        """Stop receiving publishes of a topic. Idempotent."""

    @abstractmethod
    def deliver(self, address: UUri, messages: Sequence[UMessage]) -> list[UStatus | None]:
        """Send messages to one receiver, in order; return the outcome of each.

        Returns within seconds, with UNAVAILABLE if necessary. None means that the transport has
        accepted the message. After the first failure nothing more is sent if possible, and the
        rest are `NOT_TRIED`. A transport that sends ahead may have sent some of them: such a
        message is None if it was accepted. Several threads may call this, each for its own address.
        """

    def await_connection(self, patience: float) -> UStatus | None:  # noqa: ARG002
        """Wait for the connection; return None, or after the timeout why it is missing."""
        return None

    @property
    def is_lasting(self) -> bool:
        """Whether messages that were not acknowledged when it was closed come to the next one."""
        return False

    @property
    def links_lost(self) -> int:
        """Number of lost links: messages in flight on them may be lost."""
        return 0

    @property
    def is_up(self) -> bool:
        """Whether the transport is reachable now, as far as known."""
        return True

    @abstractmethod
    def stop(self) -> None:
        """Stop receiving: after this returns no call of `ingest` runs or starts."""


# --- what transports and their users share ------------------------------------------------------


class Counts:
    """A fixed set of counters by name."""

    def __init__(self, *names: str) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Increment a counter by one or more.

        :raises KeyError: no counter has this name.
        """
        with self._lock:
            self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        """Return a consistent copy of all counters."""
        with self._lock:
            return dict(self._counts)


_FORKED: Final = UStatus(
    UCode.FAILED_PRECONDITION,
    "it belongs to the process that this one was forked from: open another one here",
)


class Owner:
    """The process that opened a link.

    A forked child shares its socket but not its threads: messages of the child would be mixed with
    those of the parent, or never be sent.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    @property
    def why_not(self) -> UStatus | None:
        """The error for use in a child process; None in the process that opened it."""
        return None if self.is_here else _FORKED


T = TypeVar("T")

#: Messages per batch, at most.
BATCH: Final = 1024
#: Bytes that wait to be handed over, at most; a single message may have more.
_MOST_BYTES_IN: Final = 64 << 20
#: If a message follows a batch within this time (seconds), wait for a fuller batch.
_IN_STREAM: Final = 0.002
_LINGER: Final = 0.001
#: Pauses between attempts after a failure.
_BACKOFF: Final = Backoff(initial=0.05, maximum=2.0)
_random = random.Random()  # noqa: S311 - spreads load, keeps no secret


def hand_over(
    take: Callable[[Sequence[T]], None],
    batch: Sequence[T],
    stopping: threading.Event,
    on_failure: Callable[[], None] = lambda: None,
) -> bool:
    """Call `take` until it succeeds; return False if it is closed, or `stopping` is set.

    After a disk error the messages are kept and not acknowledged, which slows down the transport.
    """
    failures = 0
    while True:
        try:
            take(batch)
        except Closed:
            return False  # there is nobody any more who could take them
        except Exception:
            failures += 1
            delay = _BACKOFF.delay(failures, _random)
            log.exception("%s messages were not taken; again in %.2g s", f"{len(batch):,}", delay)
            on_failure()
            if stopping.wait(delay):
                return False
        else:
            return True


class Pump(Generic[T]):
    """A bounded queue of single messages, and a thread that hands them over in batches.

    :param capacity: messages that wait, at most.
    :param size_of: returns the bytes of a message, which are bounded too.
    """

    def __init__(
        self,
        name: str,
        take: Callable[[Sequence[T]], None],
        *,
        capacity: int = 4 * BATCH,
        batch: int = BATCH,
        on_failure: Callable[[], None] = lambda: None,
        size_of: Callable[[T], int] = lambda _: 0,
        most_bytes: int = _MOST_BYTES_IN,
    ) -> None:
        self._take = take
        self._size_of = size_of
        self._most = capacity
        self._most_bytes = most_bytes
        self._batch = batch
        self._on_failure = on_failure
        self._waiting: deque[T] = deque()
        #: Bytes of the messages that wait, and of those being handed over.
        self._bytes = 0
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        self._has_room = threading.Condition(self._lock)
        self._is_failing = self._is_stopped = False
        self._refused = 0
        self._stopping = threading.Event()
        self._worker = Worker(name, self._run, log=log).start()

    @property
    def abandoned(self) -> int:
        """Messages that came and were not handed over, because the pump was stopped."""
        with self._lock:
            return self._refused + (len(self._waiting) if self._stopping.is_set() else 0)

    def put(self, item: T, timeout: float | None = None) -> bool:
        """Add a message; wait for room. Return False if stopped, or after the timeout."""
        size = self._size_of(item)
        with self._lock:
            if not self._fits(size):
                self._has_room.wait_for(lambda: self._is_stopped or self._fits(size), timeout)
            if self._is_stopped or not self._fits(size):
                self._refused += self._is_stopped
                return False
            self._waiting.append(item)
            self._bytes += size
            self._came.notify()
            return True

    def _fits(self, size: int) -> bool:
        has_bytes = not self._bytes or self._bytes + size <= self._most_bytes
        return has_bytes and len(self._waiting) < self._most

    def _next(self, most: int, timeout: float | None = None) -> list[T]:
        """Remove and return messages, at most so many; wait for one. Empty if there is none."""
        with self._lock:
            self._came.wait_for(lambda: self._waiting or self._is_stopped, timeout)
            batch = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._has_room.notify_all()
            return batch

    def _run(self, _: Worker) -> None:
        ended = 0.0
        while not self._stopping.is_set() and (batch := self._next(self._batch)):
            # Waking for each message would cost more than handling it.
            if time.monotonic() - ended < _IN_STREAM and len(batch) < self._batch:
                time.sleep(_LINGER)
                batch += self._next(self._batch - len(batch), 0)
            if not hand_over(self._take, batch, self._stopping, self._failed):
                with self._lock:
                    self._waiting.extendleft(reversed(batch))
                return
            with self._lock:
                self._bytes -= sum(map(self._size_of, batch))
                self._has_room.notify_all()
            self._is_failing = False
            ended = time.monotonic()

    def _failed(self) -> None:
        self._is_failing = True
        self._on_failure()

    def stop(self, patience: float = 5.0) -> None:
        """Accept no more messages, and pass on the rest; `abandoned` are those left after that."""
        with self._lock:
            self._is_stopped = True
            self._came.notify_all()
            self._has_room.notify_all()
        if not self._is_failing:
            self._worker.join(patience)
        self._stopping.set()
        self._worker.join()


#: Messages and bytes in flight, at most: they are held in memory.
_MOST: Final = 65_536
_MOST_BYTES: Final = 64 << 20


class _Some(NamedTuple, Generic[T]):
    #: When they count as delivered (monotonic seconds).
    due: float
    #: Number of links the leg had lost when they were sent.
    links_lost: int
    items: Sequence[T]
    size: int


class HandedOver(Generic[T]):
    """Messages in flight on one leg that may still be lost. Not thread-safe.

    A transport without acknowledgements buffers messages in this process: they are lost with the
    process or the link. So they are settled after a delay, and sent again if a link was lost
    meanwhile.
    """

    def __init__(self, leg: Leg, clock: Clock = SYSTEM_CLOCK) -> None:
        self._leg = leg
        self._clock = clock
        self._some: deque[_Some[T]] = deque()
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether the limits of messages in flight are reached."""
        return self._count >= _MOST or self._bytes >= _MOST_BYTES

    @property
    def next_due(self) -> float | None:
        """When the first of them count as delivered (monotonic seconds), or None."""
        return self._some[0].due if self._some else None

    def add(self, items: Sequence[T], links_lost: int, size: int = 0) -> None:
        """Add messages of `size` bytes, sent when the leg had lost `links_lost` links."""
        due = self._clock.monotonic() + self._leg.settle_after
        self._some.append(_Some(due, links_lost, items, size))
        self._count += len(items)
        self._bytes += size

    def take(self) -> tuple[list[T], list[T]]:
        """Remove and return the messages that arrived, and those to be sent again."""
        sure: list[T] = []
        again: list[T] = []
        if self._some and self._leg.links_lost != self._some[0].links_lost:
            # Also those sent since: otherwise they would overtake the lost ones.
            again = [item for some in self._some for item in some.items]
            self._some.clear()
            self._count = self._bytes = 0
        now = self._clock.monotonic()
        while self._some and self._some[0].due <= now:
            some = self._some.popleft()
            sure += some.items
            self._count -= len(some.items)
            self._bytes -= some.size
        return sure, again
