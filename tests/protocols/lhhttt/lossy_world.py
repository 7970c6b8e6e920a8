"""Clients, a network that loses, repeats and reorders, and a queue whose time is turned by hand.

Nothing sleeps, and a seed always gives the same history: the clock stands until it is moved, and
the background work of a queue is done when it is asked for.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.protocols.lhhttt.commands import (
    Reply,
    ack_request,
    format_tags,
    lease_request,
    nack_request,
    parse_reply,
    store_request,
)
from penstock.protocols.lhhttt.frames import decode_bytes, group
from penstock.protocols.lhhttt.interface import CommandQueue
from penstock.protocols.lhhttt.queue import MessageQueue
from penstock.protocols.lhhttt.runs import count_of
from penstock.queue.groups.state_file import StateFile
from protocols.lhhttt.queues import assert_balanced

LARGEST = 65_507
#: Seconds of a lease.
LEASE = 3.0
_EVERY = 1 << 62


class StandingClock:
    """Stands for the module `time`, and moves when it is told to.

    The disk of the groups is full whenever it is told to be.
    """

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME
    time_ns = staticmethod(time.time_ns)

    def __init__(self) -> None:
        self.now = 1000.0
        self.is_disk_full = False

    def monotonic(self) -> float:
        return self.now

    def clock_gettime_ns(self, _: int) -> int:
        return round(self.now * 1e9)


class TurnedByHand:
    """Stands for a `Worker`: its job has one round whenever `turn` is called."""

    made: list[TurnedByHand]

    def __init__(self, _: str, job: Callable[[Any], None], **__: object) -> None:
        self._job = job
        self.is_stopping = False
        self._is_stopped = False
        self.made.append(self)

    def start(self) -> TurnedByHand:
        return self

    def wake(self) -> None:
        """Do nothing: the round comes when the test wants it."""

    def wait(self, _: float | None) -> bool:
        self.is_stopping = True
        return True

    def turn(self) -> None:
        self.is_stopping = self._is_stopped
        self._job(self)

    def stop(self) -> None:
        self._is_stopped = True
        self.made.remove(self)


@contextmanager
def standing_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandingClock]:
    """Let time stand for queues and balancers, and for the groups of their logs."""
    clock = StandingClock()
    TurnedByHand.made = []
    append = StateFile._append

    def append_if_room(file: StateFile) -> None:
        if clock.is_disk_full and file._pending:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file)

    rooms = ("protocols.lhhttt.queue", "protocols.lhhttt.journal", "queue.groups.leases")
    with monkeypatch.context() as patch:
        patch.setattr(StateFile, "_append", append_if_room)
        for room in (*rooms, "workers.balancer"):
            patch.setattr(f"penstock.{room}.time", clock)
        for room in ("protocols.lhhttt.queue", "workers.balancer"):
            patch.setattr(f"penstock.{room}.Worker", TurnedByHand)
        yield clock


@dataclass
class Asked:
    """A request of a client, and what the server has ever answered to it."""

    client: Client
    verb: str
    frame: bytes
    about: bytes
    #: Of the messages that it stores, or numbers that it settles.
    payloads: Sequence[bytes] = ()
    tags: frozenset[tuple[int, int]] = frozenset()
    answers: list[Reply] = field(default_factory=list)

    def __hash__(self) -> int:
        return id(self)


@dataclass
class Client:
    """A program that has one request under way, and repeats it until it hears an answer."""

    name: bytes
    seq: int = 1
    waits_for: Asked | None = None
    #: What it was given, and has not settled.
    has: set[tuple[int, int]] = field(default_factory=set)

    def ask(self, rng: random.Random, number: int, stores: float) -> Asked:
        seq, self.seq = self.seq, self.seq + 1
        kind = "store" if rng.random() < stores else rng.choice(("lease", "settle", "settle"))
        if kind == "settle" and self.has:
            count = rng.randint(1, len(self.has))
            tags = rng.sample(sorted(self.has), count)
            if rng.random() < 0.9:
                self.has -= set(tags)
            if rng.random() < 0.6:
                return _acknowledgement(self, tags)
            named, about = _named(tags)
            frame = nack_request(self.name, named, rng.choice((0.0, 0.0, 0.5, 5.0)))
            return Asked(self, "NACK", frame, about, tags=frozenset(tags))
        if kind == "store":
            payloads = [b"%d.%d" % (number, i) for i in range(rng.choice((1, 1, 2, 5)))]
            frame = store_request(self.name, seq, payloads)
            return Asked(self, "STORE", frame, b"%d" % seq, payloads)
        wait = rng.choice((0.0, 1.0, 10.0))
        frame = lease_request(self.name, seq, rng.choice((1, 2, 10)), wait)
        return Asked(self, "LEASE", frame, b"%d" % seq)

    def hear(self, asked: Asked, reply: Reply) -> None:
        if asked is not self.waits_for:
            return
        self.waits_for = None
        self.has |= set(_numbers(reply))


def _named(tags: Sequence[tuple[int, int]]) -> tuple[bytes, bytes]:
    """Return tags as they are sent, and the first of them."""
    named = format_tags([(epoch, number, number) for epoch, number in sorted(tags)])
    return named, named.partition(b",")[0]


def _acknowledgement(client: Client, tags: Sequence[tuple[int, int]]) -> Asked:
    named, about = _named(tags)
    return Asked(client, "ACK", ack_request(client.name, named), about, tags=frozenset(tags))


def _numbers(reply: Reply) -> list[tuple[int, int]]:
    return [(epoch, n) for epoch, first, last in reply.tags for n in range(first, last + 1)]


class World:
    """A server, its clients and the network between them; every answer is checked."""

    def __init__(
        self,
        rng: random.Random,
        clock: StandingClock,
        front: CommandQueue,
        queues: Sequence[MessageQueue],
    ) -> None:
        self.rng = rng
        self.clock = clock
        self.front = front
        self.queues = queues
        self.clients = [Client(b"w%d-1.a" % number) for number in range(4)]
        self.lives = 1
        self.under_way: list[Asked] = []
        self.coming: list[tuple[Asked, Reply]] = []
        self.asked = 0
        #: The share of requests that store messages: few, so that most wait for one; or many.
        self.stores = rng.choice((0.05, 0.1, 0.3))
        #: What clients know to be stored; the messages that were given, by their numbers; and
        #: those whose acknowledgement was answered.
        self.stored: set[bytes] = set()
        self.given: dict[tuple[int, int], bytes] = {}
        self.done: set[tuple[int, int]] = set()
        #: The latest lease request of each client that has arrived, in an earlier batch.
        self.latest: dict[bytes, int] = {}

    # --- what happens -------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        what = rng.random()
        self.clock.is_disk_full = rng.random() < (0.8 if self.clock.is_disk_full else 0.01)
        if what < 0.35:
            self._ask(rng.choice(self.clients))
        elif what < 0.65:
            self._carry_requests()
        elif what < 0.85 and self.coming:
            at = rng.randrange(len(self.coming))
            asked, reply = self.coming[at] if rng.random() < 0.15 else self.coming.pop(at)
            if rng.random() > 0.15:
                asked.client.hear(asked, reply)
        elif what < 0.98:
            self.clock.now += rng.choice((0.01, 0.1, 1.0, LEASE))
            self.turn()
        elif self.front in self.queues:  # those that are told of a death
            self._bury(rng.choice(self.clients))
        self.check()

    def _ask(self, client: Client) -> None:
        if client.waits_for is not None and self.rng.random() < 0.9:
            self.under_way.append(client.waits_for)  # it sends it again
            return
        self.asked += 1
        # Also if it has given up the other.
        client.waits_for = client.ask(self.rng, self.asked, self.stores)
        self.under_way.append(client.waits_for)

    def _carry_requests(self) -> None:
        """Let some requests arrive, in one batch: in any order, and some once more later."""
        rng = self.rng
        rng.shuffle(self.under_way)
        count = rng.randint(0, min(6, len(self.under_way)))
        batch, self.under_way = self.under_way[:count], self.under_way[count:]
        self.under_way += [asked for asked in batch if rng.random() < 0.15]
        self.handle([asked for asked in batch if rng.random() > 0.1])

    def _bury(self, client: Client) -> None:
        """Let a client die, whose leases end, and another begin; what it sent may still arrive."""
        chosen = client.name.rpartition(b".")[0]
        for queue in self.queues:
            queue.release(chosen)
        self.lives += 1
        self.clients[self.clients.index(client)] = Client(
            b"%b-%d.a" % (chosen.partition(b"-")[0], self.lives)
        )

    def handle(self, batch: Sequence[Asked]) -> None:
        commands = group([(decode_bytes(asked.frame), asked) for asked in batch])
        replies, _ = self.front.handle(commands, self._take, LARGEST)  # type: ignore[arg-type]
        self._take(replies)
        for asked in batch:
            if asked.verb == "LEASE":
                name, number = asked.client.name, int(asked.about)
                self.latest[name] = max(number, self.latest.get(name, 0))

    def turn(self) -> None:
        for worker in list(TurnedByHand.made):
            worker.turn()
        # Nobody waits beside a message, or for longer than it wanted.
        parked = self.front._parked  # type: ignore[attr-defined]
        if not self.clock.is_disk_full:
            assert not parked or not any(map(_at_hand, self.queues))
        assert all(each.until > self.clock.now for each in parked.values())

    def begin_anew(
        self, front: CommandQueue, queues: Sequence[MessageQueue], *, is_killed: bool
    ) -> None:
        """Go on with a server that has the messages of the other, and not its memory of leases."""
        assert not self.clock.is_disk_full
        self.front, self.queues = front, queues
        for asked in [*self.under_way, *(asked for asked, _ in self.coming)]:
            asked.answers.clear()
        self.latest.clear()
        for client in self.clients:
            if client.waits_for is not None:
                client.waits_for.answers.clear()
        if is_killed:
            self.done.clear()  # it had not settled the last of them

    # --- what is promised ---------------------------------------------------------------------

    def _take(self, replies: Sequence[tuple[bytes, Any]]) -> None:
        """Check answers, and send them on their way."""
        for answer, asked in replies:
            reply = parse_reply(decode_bytes(answer))
            assert reply.about == asked.about
            self._check_answer(asked, reply)
            asked.answers.append(reply)
            self.coming.append((asked, reply))

    def _check_answer(self, asked: Asked, reply: Reply) -> None:
        if asked.verb == "STORE" and reply.code is None:
            self.stored |= set(asked.payloads)
        if asked.verb == "ACK" and reply.code is None:
            assert asked.tags <= set(self.given)
            self.done |= asked.tags
        numbers = _numbers(reply)
        for number, payload in zip(numbers, reply.messages, strict=True):
            assert self.given.setdefault(number, bytes(payload)) == payload
        assert not self.done & set(numbers), "what is done was given again"
        before = [each for each in asked.answers if each.code is None]
        if asked.verb == "LEASE" and numbers and not before:
            latest = self.latest.get(asked.client.name, 0)
            assert int(asked.about) >= latest, "a lease for a request that its client gave up"
        if asked.verb == "LEASE" and before:
            assert set(numbers) <= set(_numbers(before[0])), "one request, two leases"

    def check(self) -> None:
        assert len(set(self.given.values())) == len(self.given), "a message was stored twice"
        for queue in self.queues:
            _check_books(queue, self.clock.now)

    # --- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let all that is under way arrive, and then one client take the rest on a good network."""
        self.clock.is_disk_full = False
        self.handle(self.under_way)
        self.under_way = []
        last = Client(b"last-1.a")
        for _ in range(300):
            frame = lease_request(last.name, last.seq, 10, 0.0)
            asked = Asked(last, "LEASE", frame, b"%d" % last.seq)
            last.seq += 1
            self.handle([asked])
            if numbers := _numbers(asked.answers[0]):
                done = _acknowledgement(last, numbers)
                self.handle([done])
                assert done.answers[0].code is None
            else:
                self.clock.now += 1.0
                self.turn()
            self.check()
            if not self.front.statistics().held:
                break
        books = self.front.statistics()
        assert (books.held, books.leased, books.held_bytes) == (0, 0, 0), books
        missing = self.stored - set(self.given.values())
        assert len(missing) <= sum(books.dropped.values()) + books.dead, "it reached nobody"


def _at_hand(queue: MessageQueue) -> int:
    """Count the messages that nobody has, and that could be given now."""
    journal = queue._journal
    group = journal._reader.group()
    fresh = group.lag - group.leased - group.waiting
    return journal._again.count + journal._ready_count + fresh


def _check_books(queue: MessageQueue, now: float) -> None:
    """Make sure that each message is in one place, from which it gets on."""
    loans, journal = queue._loans, queue._journal
    held = journal.held
    books = queue.statistics()
    assert_balanced(books)
    assert held >= books.held  # it may not know yet of the last dead letters
    assert held == books.held or books.dead
    # Each leased message belongs to a lease that ends.
    parts = list(loans._runs.within(0, _EVERY))
    for part in parts:
        assert part.loan is not None
        assert loans._loans[part.loan.request.client, part.loan.request.seq] is part.loan
    assert sum(loan.left for loan in loans._loans.values()) == books.leased
    assert all(loan.until <= now + LEASE for loan in loans._loans.values())
    assert journal.out == books.leased == sum(part.count for part in parts)
    # What waits for its time is looked for then.
    due = {n for _, ranges in journal._due for first, end in ranges for n in range(first, end)}
    delayed = {n for part in journal._delayed.within(0, _EVERY) for n in range(*part.range)}
    assert delayed <= due
    # The group knows the same.
    group = journal._reader.group()
    at_hand = journal._again.count + journal._ready_count
    returned = sum(count_of(ranges) for _, ranges in journal._returned)
    assert group.leased == journal.out + at_hand + journal._done_count + returned
    assert group.lag == journal.held + journal._done_count
    assert journal.held_bytes >= journal.held * 2  # no message is shorter here
