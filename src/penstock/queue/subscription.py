"""How are all streams read that match a request, while streams appear and disappear?

Each matching stream is read in its creator's shared memory, without a broker: a slow subscriber
does not affect others. Across streams, messages are in order of append time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections import deque
from itertools import repeat
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np

from penstock.core.errors import (
    Closed,
    DamagedQueue,
    InvalidOption,
    NotFound,
    Overrun,
    PenstockError,
    Unsupported,
)
from penstock.core.interfaces import Closable
from penstock.core.message import Message
from penstock.core.overflow import DropReason, OverflowPolicy
from penstock.core.position import Position
from penstock.core.stream_id import StreamId
from penstock.core.worker import Worker
from penstock.queue.classic.watch import ENTRIES, FileWatch
from penstock.queue.stream_directory import (
    StreamKind,
    StreamPlace,
    list_places,
    make_streams_directory,
    streams_directory,
)
from penstock.queue.streams import OutputStream
from penstock.queue.waiting import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager
    from typing import Self

    from numpy.typing import NDArray

    from penstock.core.batch import Batch
    from penstock.core.statistics import ReaderStatistics
    from penstock.queue.streams import InputStream
    from penstock.queue.wide.reader import WideReader

__all__ = [
    "Loan",
    "StreamBatch",
    "StreamMessage",
    "Subscription",
    "SubscriptionStatistics",
    "requests_for",
]

log = logging.getLogger(__name__)

#: Most messages of a stream that are sorted by time in one round.
_WINDOW: Final = 4096
#: How soon (seconds) a stream is tried again that could not be opened.
_AGAIN: Final = 1.0
#: Poll interval (seconds) of the directory if no inotify watch is available.
_LOOK: Final = 0.1


def requests_for(
    destinations: int | Iterable[int] | None = None,
    device: int | None = None,
    path: str | None = None,
    name: str | None = None,
) -> tuple[StreamId, ...]:
    """Return the requests for streams with these fields; None matches any value (ANY).

    Each destination makes a request of its own: one with the bits of two matches streams of
    neither.

    :raises InvalidStreamId: a number is out of range.
    """
    if destinations is None or isinstance(destinations, int):
        return (StreamId.generate(destinations, device, path, name),)
    return tuple(StreamId.generate(each, device, path, name) for each in sorted(set(destinations)))


class StreamMessage(Message):
    """A message of one of many streams, with its stream and sender.

    Its `payload` is a read-only view of the stream's memory, valid until the loan ends: `copy` the
    message to keep it.
    """

    #: Name of the sender: the creator of an output stream, or the producer of an input stream.
    #: Without a name, the process; empty if unknown.
    sender: str = ""
    kind: StreamKind = StreamKind.OUTPUT

    @classmethod
    def of(cls, message: Message, place: StreamPlace, sender: str) -> Self:
        routed = cls(*message[:5], place.stream, *message[6:])
        routed.sender = sender
        routed.kind = place.kind
        return routed

    def copy(self) -> Self:
        """Return a copy with a payload of its own."""
        copied = self._replace(payload=bytes(self.payload))
        copied.sender = self.sender
        copied.kind = self.kind
        return copied


class StreamBatch(NamedTuple):
    """Messages of one stream, on loan."""

    stream: StreamId
    kind: StreamKind
    #: As in `StreamMessage`, but empty for an input stream: see the column `attributes`.
    sender: str
    batch: Batch


class SubscriptionStatistics(NamedTuple):
    """Counters of a subscription: each message is delivered, lost or waiting."""

    #: Messages delivered.
    messages: int
    #: Payload bytes delivered.
    bytes: int
    #: Messages not delivered: overwritten, unreadable, or dropped by the policy.
    lost: int
    #: Messages waiting.
    backlog: int
    #: Counters of each current stream.
    streams: dict[StreamId, ReaderStatistics]


class Subscription(Closable):
    """Reads all output streams that match its requests, and added input streams.

        with Subscription("archive") as subscription:
            subscription.add(*requests_for(destinations={1, 2}, device=5))
            with subscription.receive(timeout=1.0) as message:
                ...

    A stream that exists at its request is read from its end on, a later one from its start. Not
    thread-safe, except for `interrupt`.

    `policy` applies to a backlog. With `queue_size`, the oldest or the newest messages above this
    number are dropped and counted. Without it, a stream's creator overwrites the oldest when its
    queue is full. `block`: creators that hold this reader (`hold=NAME`) wait, and after a restart
    it resumes at its position.

    :raises InvalidOption: the name, `queue_size` or the policy is invalid.
    """

    def __init__(
        self,
        name: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        queue_size: int | None = None,
        policy: OverflowPolicy = OverflowPolicy.DROP_OLDEST,
    ) -> None:
        if policy is OverflowPolicy.FAIL:
            raise InvalidOption("policy", policy, "nobody can refuse what others write")
        if queue_size is not None and (queue_size < 1 or policy is OverflowPolicy.BLOCK):
            raise InvalidOption(
                "queue_size", queue_size, "must be at least 1, and is not for the policy block"
            )
        if policy is OverflowPolicy.DROP_NEWEST and queue_size is None:
            raise InvalidOption("queue_size", None, "is needed to drop the newest")
        self.name = name
        self.directory = os.fspath(directory or streams_directory())
        self._queue_size = queue_size
        self._policy = policy
        self._requests: dict[StreamId, None] = {}
        self._sources: dict[StreamPlace, _Source] = {}
        # Streams given up after an error. They are not reopened until they are removed.
        self._unreadable: set[StreamPlace] = set()
        # Streams that could not be opened yet, and where each is to be read from.
        self._refused: dict[StreamPlace, Position] = {}
        self._round = _Round()
        self._is_interrupted = False
        self._is_closed = False
        # Counters of streams that were removed.
        self._past = SubscriptionStatistics(0, 0, 0, 0, {})
        make_streams_directory(self.directory)
        self._waiter = Waiter()
        self._has_asked = False
        self._watch = _DirectoryWatch(self.directory, self._waiter.interrupt)

    # --- requests and streams -------------------------------------------------------------------

    @property
    def requests(self) -> tuple[StreamId, ...]:
        """The current requests."""
        return tuple(self._requests)

    @property
    def streams(self) -> tuple[StreamId, ...]:
        """The streams that are read now."""
        self._find_streams(Position.START)
        return tuple(place.stream for place, source in self._sources.items() if not source.is_gone)

    def add(self, *requests: StreamId) -> None:
        """Add requests. Idempotent: a message is delivered once."""
        self._check_open()
        self._find_streams(Position.START)
        self._requests.update(dict.fromkeys(requests))
        self._has_asked = True
        self._find_streams(Position.END)

    def discard(self, *requests: StreamId) -> None:
        """Remove requests (equal to those added), and close streams that no other one matches."""
        self._check_open()
        for request in requests:
            self._requests.pop(request, None)
        for place, source in list(self._sources.items()):
            if not source.is_own and not self._is_wanted(place):
                self._forget(place)
        self._round = _Round()

    def add_input(self, stream: InputStream) -> None:
        """Add an input stream that the caller created; the subscription closes it."""
        self._check_open()
        place = StreamPlace.of(stream.stream, StreamKind.INPUT, self.directory)
        self._sources[place] = _Source(place, stream, is_own=True)

    def _is_wanted(self, place: StreamPlace) -> bool:
        return (
            place.kind is StreamKind.OUTPUT
            and place.stream.is_concrete
            and any(key in self._requests for key in place.stream.lookup_keys())
        )

    def _find_streams(self, start: Position) -> None:
        """Open new streams that match, and mark removed ones."""
        if not self._watch.has_news() and not self._has_asked:
            return
        self._has_asked = True  # until all is done: without a descriptor, for one, it is not
        there = set(list_places(self.directory))
        self._has_asked = False
        self._unreadable &= there
        self._refused = {place: at for place, at in self._refused.items() if place in there}
        for place in there - self._sources.keys() - self._unreadable:
            if self._is_wanted(place):
                self._open(place, self._refused.get(place, start))
        for place, source in self._sources.items():
            source.is_gone = not source.is_own and place not in there
            source.may_be_another = True

    def _open(self, place: StreamPlace, start: Position) -> None:
        options = {"hold": self.name} if self._policy is OverflowPolicy.BLOCK else {}
        try:
            reader = OutputStream.open(
                place.stream, start, directory=self.directory, damaged="skip", **options
            )
        except NotFound:
            return  # removed meanwhile
        except PenstockError as error:
            if place not in self._refused:
                log.warning("%s does not read %s: %s", self.name, place, error)
            self._refused[place] = start
            if not isinstance(error, (DamagedQueue, Unsupported)):
                self._has_asked = True  # it may be possible later
            return
        self._refused.pop(place, None)
        self._sources[place] = _Source(place, reader)

    def _forget(self, place: StreamPlace) -> None:
        source = self._sources.pop(place)
        source.reader.close()
        books = source.reader.statistics()
        past = self._past
        self._past = past._replace(
            messages=past.messages + books.messages,
            bytes=past.bytes + books.bytes,
            lost=past.lost + books.lost,
        )

    # --- receiving ------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> Loan:
        """Lend the next message, for a `with`; None after `timeout` seconds, or if interrupted.

        `timeout=None` waits forever, 0 does not wait. The loan ends with the `with` block.

        :raises Overrun: at the end of the `with`: the message was overwritten meanwhile.
        :raises Closed: the subscription was closed.
        """
        return Loan(self, timeout)

    def read(self, timeout: float | None = None) -> StreamMessage | None:
        """Return a copy of the next message; `timeout` as for `receive`."""
        while True:
            with contextlib.suppress(Overrun), self.receive(timeout) as message:
                return None if message is None else message.copy()

    @contextlib.contextmanager
    def receive_batch(
        self, n: int = _WINDOW, timeout: float | None = 0
    ) -> Iterator[StreamBatch | None]:
        """Lend up to `n` messages of one stream as an Arrow batch; streams take turns.

        :raises Overrun: at the end of the `with`: some were overwritten meanwhile.
        :raises Closed: the subscription was closed.
        """
        deadline = _deadline(timeout)
        while True:
            run = self._round.next_run(n)
            if run is None:
                if not self._has_news(deadline):
                    yield None
                    return
                continue
            source, count = run
            with contextlib.ExitStack() as stack:
                try:
                    batch = stack.enter_context(source.reader.view_batch(count, 0))
                except PenstockError as error:
                    self._give_up(source, error)
                    continue
                if len(batch):
                    place = source.place
                    yield StreamBatch(place.stream, place.kind, source.sender, batch)
                    return

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a message; False: `timeout` passed, or interrupted."""
        return self._round.has_more or self._has_news(_deadline(timeout))

    def interrupt(self) -> None:
        """End the current wait, or else the next one. Thread-safe."""
        self._is_interrupted = True
        self._waiter.interrupt()

    def lend_next(self, deadline: float | None) -> _Lent | None:
        """Lend the next message, or return None at the deadline; for `Loan`."""
        while True:
            source = self._round.next_source()
            if source is None:
                if not self._has_news(deadline):
                    return None
                continue
            view = source.reader.view(0)
            try:
                message = view.__enter__()
            except PenstockError as error:
                self._give_up(source, error)
                continue
            if message is not None:
                return _Lent(view, source.routed(message))

    def _has_news(self, deadline: float | None) -> bool:
        """Wait for messages until the deadline, and start a new round; False: none arrived."""
        self._check_open()
        while True:
            self._find_streams(Position.START)
            if self._begin_round():
                return True
            left = None if deadline is None else deadline - time.monotonic()
            if self._is_interrupted or (left is not None and left <= 0):
                self._is_interrupted = False
                return False
            if self._has_asked:
                left = _AGAIN if left is None else min(left, _AGAIN)
            self._waiter.wait([source.reader for source in self._sources.values()], left)

    def _begin_round(self) -> bool:
        for place, source in list(self._sources.items()):
            if source.reader.backlog:
                continue
            if source.is_gone or source.reader.is_closed:
                self._forget(place)
            elif source.may_be_another:
                source.may_be_another = False
                try:
                    source.reader.bounds()  # which checks that
                except PenstockError as error:
                    self._give_up(source, error)
        seen = {s: count for s in self._sources.values() if (count := s.reader.backlog)}
        if not seen:
            return False
        # A second look sees all messages that were appended before any of the first.
        ready = [source for source in self._sources.values() if source.reader.backlog]
        for source in ready:
            source.find_sender()
            source.look()
        counts = [seen.get(source, 0) for source in ready]
        self._round = _Round(ready, counts, self._queue_size, self._policy)
        return True

    def _give_up(self, source: _Source, error: PenstockError) -> None:
        """Stop reading an unreadable stream, and count what waits in it; the others continue."""
        if self._sources.get(source.place) is source:  # otherwise it was closed meanwhile
            source.look()
            self._forget(source.place)
            self._unreadable.add(source.place)
            lost = max(0, source.known - source.reader.passed)
            self._past = self._past._replace(lost=self._past.lost + lost)
            log.error(
                "%s reads %s no more, with %d messages that are lost: %s",
                *(self.name, source.place, lost, error),
            )

    # --- counters and closing -------------------------------------------------------------------

    def statistics(self) -> SubscriptionStatistics:
        """Return the counters."""
        books = [source.reader.statistics() for source in self._sources.values()]
        places = [place.stream for place in self._sources]
        return SubscriptionStatistics(
            messages=self._past.messages + sum(each.messages for each in books),
            bytes=self._past.bytes + sum(each.bytes for each in books),
            lost=self._past.lost + sum(each.lost for each in books),
            backlog=sum(each.backlog for each in books),
            streams=dict(zip(places, books, strict=True)),
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"the subscription of {self.name} was closed")

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.close()
        for place in list(self._sources):
            self._forget(place)
        self._waiter.close()


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


class _Lent(NamedTuple):
    view: AbstractContextManager[Message | None]
    message: StreamMessage


class Loan:
    """A message on loan; see `Subscription.receive`."""

    __slots__ = ("_deadline", "_lent", "_subscription")

    def __init__(self, subscription: Subscription, timeout: float | None) -> None:
        self._subscription = subscription
        self._deadline = _deadline(timeout)
        self._lent: _Lent | None = None

    def __enter__(self) -> StreamMessage | None:
        self._lent = self._subscription.lend_next(self._deadline)
        return None if self._lent is None else self._lent.message

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        lent, self._lent = self._lent, None
        if lent is None:
            return
        try:
            lent.view.__exit__(kind, *error)  # type: ignore[arg-type]
        finally:
            # A view made by `cast` may still exist: it keeps the memory, which may change.
            with contextlib.suppress(BufferError):
                cast("memoryview", lent.message.payload).release()


class _Source:
    """A stream that is read."""

    def __init__(self, place: StreamPlace, reader: WideReader, *, is_own: bool = False) -> None:
        self.place = place
        self.reader = reader
        #: Whether it is an input stream of the caller.
        self.is_own = is_own
        #: Whether it was removed; its messages can still be read.
        self.is_gone = False
        #: Whether its name may belong to a new stream.
        self.may_be_another = False
        self.sender = ""
        self._writer_pid = 0
        #: Messages that it is known to have had since it is read.
        self.known = 0

    def look(self) -> None:
        """Note how many messages there are: a damaged file may not tell later."""
        self.known = max(self.known, self.reader.passed + self.reader.backlog)

    def find_sender(self) -> None:
        """Update the sender of an output stream, if its writer changed."""
        if self.is_own or (pid := self.reader.writer_pid) == self._writer_pid:
            return
        self._writer_pid = pid
        owner = self.place.owner()
        self.sender = owner.name if owner.pid == pid else f"process {pid}"

    def routed(self, message: Message) -> StreamMessage:
        sender = self.sender
        if self.is_own and message.attributes is not None:
            sender = message.attributes.decode(errors="replace")
        return StreamMessage.of(message, self.place, sender)


class _Round:
    """A snapshot of the backlog: the order in which messages are taken from the streams."""

    def __init__(
        self,
        sources: list[_Source] | None = None,
        seen: list[int] | None = None,
        queue_size: int | None = None,
        policy: OverflowPolicy = OverflowPolicy.DROP_OLDEST,
    ) -> None:
        """Plan a round through `sources`; `seen` is the backlog of each at the first look."""
        self._sources = sources or []
        self._seen = seen or []
        counts = [source.reader.backlog for source in self._sources]
        self._order: Iterator[int] | None = None if self._sources else iter(())
        # Newest messages of each stream, to be dropped at the end of the round.
        self._surplus: list[int] = []
        if queue_size is not None and sum(counts) > queue_size:
            order = self._by_time(counts)
            excess = max(0, len(order) - queue_size)
            if policy is OverflowPolicy.DROP_OLDEST:
                dropped, order = order[:excess], order[excess:]
                for source, count in zip(self._sources, self._count(dropped), strict=True):
                    source.reader.skip(count, DropReason.OVERFLOW_OLDEST)
            else:
                order, dropped = order[:queue_size], order[queue_size:]
                self._surplus = self._count(dropped)
            counts = self._count(order)
            self._order = iter(order.tolist())
        self._left = counts
        self._turns = deque(range(len(self._sources)))

    @property
    def has_more(self) -> bool:
        return any(self._left)

    def next_source(self) -> _Source | None:
        """Return the stream of the next message; None: the round is over."""
        if self._order is None:
            self._order = self._in_order([min(count, _WINDOW) for count in self._left])
        for index in self._order:
            if self._left[index]:  # otherwise a batch took it
                self._left[index] -= 1
                return self._sources[index]
        self._end()
        return None

    def next_run(self, n: int) -> tuple[_Source, int] | None:
        """Return the next stream in turn, and how many of its messages to take, or None."""
        while self._turns:
            index = self._turns.popleft()
            count = min(n, self._left[index])
            if count:
                self._left[index] -= count
                self._turns.append(index)
                return self._sources[index], count
        self._end()
        return None

    def _end(self) -> None:
        self._left = [0] * len(self._sources)
        surplus, self._surplus = self._surplus, []
        for source, count in zip(self._sources, surplus, strict=False):
            if not source.reader.is_closed:  # otherwise it was given up, and all of it counted
                source.reader.skip(count, DropReason.OVERFLOW_NEWEST)

    def _in_order(self, counts: list[int]) -> Iterator[int]:
        if len(counts) == 1:
            return repeat(0, min(counts[0], self._seen[0]))
        return iter(self._by_time(counts).tolist())

    def _by_time(self, counts: list[int]) -> NDArray[np.intp]:
        """Return the stream of each of the next `counts` messages, in order of append time."""
        times = [s.reader.append_times(n) for s, n in zip(self._sources, counts, strict=True)]
        streams = np.repeat(np.arange(len(times)), [len(each) for each in times])
        together = np.concatenate(times)
        order = np.argsort(together, kind="stable")
        # Messages after the first look may follow unseen ones of other streams: cut there.
        seen = [t[:n][-1] for t, n in zip(times, self._seen, strict=True) if len(t[:n])]
        ends = [max(seen)] if seen else []
        # Later messages of a stream with more may precede the last ones of others: cut there.
        ends += [
            t[-1]
            for t, s, n in zip(times, self._sources, counts, strict=True)
            if len(t) and s.reader.backlog > n
        ]
        if ends:
            order = order[: np.searchsorted(together[order], min(ends), side="right")]
        return streams[order]

    def _count(self, order: NDArray[np.intp]) -> list[int]:
        return [int(count) for count in np.bincount(order, minlength=len(self._sources))]


class _DirectoryWatch(Closable):
    """Calls back when names in a directory appear or disappear."""

    def __init__(self, directory: str, on_change: Callable[[], None]) -> None:
        """Start to watch. `on_change` is called in a thread of its own."""
        self._on_change = on_change
        self._watch: FileWatch | None = None
        file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._watch = FileWatch(ENTRIES)
            self._watch.arm(file)
        except OSError as error:
            log.info("looking at %s again and again: inotify says %s", directory, error.strerror)
            if self._watch is not None:
                self._watch.close()
                self._watch = None
        finally:
            os.close(file)
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._worker = Worker("penstock-streams", self._run, log=log, rouse=self._rouse).start()

    def has_news(self) -> bool:
        """Tell whether something may have changed since the last call."""
        return self._watch is None or self._watch.drain()

    def _run(self, worker: Worker) -> None:
        with select.epoll() as waiting:
            waiting.register(self._waker, select.EPOLLIN)
            if self._watch is not None:
                # Edge-triggered: the woken thread drains the events by `has_news`.
                waiting.register(self._watch.fileno(), select.EPOLLIN | select.EPOLLET)
            while not worker.is_stopping:
                waiting.poll(None if self._watch is not None else _LOOK)
                self._on_change()

    def _rouse(self) -> None:
        os.eventfd_write(self._waker, 1)

    def close(self) -> None:
        self._worker.stop()
        if self._watch is not None:
            self._watch.close()
        os.close(self._waker)
