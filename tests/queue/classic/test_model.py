"""The queue as a state machine, beside an independent model of LROSE's algorithm."""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock import Message, Position
from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.clock import ManualClock
from penstock.core.errors import MessageTooLarge, PositionError
from penstock.core.url import URL
from penstock.queue.classic.compression import compress
from penstock.queue.classic.layout import FREE_SLOT, ID_COUNT
from penstock.queue.classic.options import ClassicOptions, Compression
from penstock.queue.classic.writer import ClassicWriter
from support.lrose_model import LroseModel, Stored
from support.queue_files import QueueBytes, check_queue, reader_of

if TYPE_CHECKING:
    from penstock.queue.classic.reader import ClassicReader

SECOND = 10**9
#: Just before the ids begin again.
NEAR_WRAP = ID_COUNT - 15

#: The size of a payload in thousandths of the buffer: mostly small, sometimes all of it or more.
shares = st.one_of(st.integers(0, 60), st.integers(0, 300), st.integers(0, 1050))
payloads = st.tuples(shares, st.sampled_from(["text", "noise", "zero"]))
types = st.integers(-1, 1)


@dataclass
class Follower:
    """A reader, and what the model says about it. All numbers are the model's."""

    reader: ClassicReader
    #: What is added to the reader's numbers to get the model's.
    base: int
    wanted: int | None
    #: The youngest message when the reader last looked.
    known: int
    #: The first message that it has not copied yet.
    next: int
    #: Copied ahead and not delivered yet, those of other types among them.
    ahead: list[Stored] = field(default_factory=list)
    delivered: int = 0
    lost: int = 0
    filtered: int = 0
    restarts: int = 0
    #: Where it stands after the last seek, and its books then.
    start: int = 0
    settled: int = 0

    @property
    def position(self) -> int:
        """The next message to be delivered: the first one ahead that it wants, or the next."""
        wanted = [m for m in self.ahead if self.wants(m)]
        return wanted[0].seq if wanted else self.next

    def wants(self, message: Stored) -> bool:
        return self.wanted is None or message.type == self.wanted

    @property
    def books(self) -> int:
        return self.delivered + self.lost + self.filtered

    def stand_at(self, seq: int) -> None:
        self.next = self.start = seq
        self.ahead = []
        self.settled = self.books


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-model-"))
        self.path = str(self.directory / "queue")
        self.clock = ManualClock(1_700_000_000 * SECOND)
        self.followers: list[Follower] = []
        self.writer: ClassicWriter | None = None
        self.compression = Compression.OFF
        self.counter = 0
        self.written = 0
        self.refused = 0

    def teardown(self) -> None:
        for follower in self.followers:
            follower.reader.close()
        if self.writer is not None:
            self.writer.close()
        shutil.rmtree(self.directory)

    # --- the queue and its writer -----------------------------------------------------------

    @initialize(
        slots=st.integers(1, 20),
        size=st.integers(64, 4096),
        compression=st.sampled_from(Compression),
        near_wrap=st.booleans(),
    )
    def create(self, slots: int, size: int, compression: Compression, near_wrap: bool) -> None:
        self._open_writer(compression, create="always", slots=slots, size=size)
        self.model = LroseModel(slots, size)
        if near_wrap:
            # As after an eviction of everything: no message, and ids that go on.
            QueueBytes.load(self.path).with_status(
                youngest_id=NEAR_WRAP, youngest_slot=slots - 1
            ).store(self.path)
            self.model = LroseModel(slots, size, NEAR_WRAP)
            self._open_writer(compression, create="never")
        self.open_reader(None)

    def _open_writer(self, compression: Compression, **options: object) -> None:
        if self.writer is not None:
            self.writer.close()
        self.compression = compression
        chosen = ClassicOptions.of(URL.parse("fmq:/x", {"compress": compression, **options}))
        self.writer = ClassicWriter(f"fmq:{self.path}", self.path, chosen, self.clock)
        self.written = self.refused = 0

    def reopen_writer(self, compression: Compression) -> None:
        # Another geometry than that of the queue that is there has no say.
        self._open_writer(compression, slots=7, size=12345)

    def recreate(self, slots: int, size: int, same: bool) -> None:
        if same:
            slots, size = self.model.nslots, self.model.buf_size
        another = (slots, size) != (self.model.nslots, self.model.buf_size)
        self._open_writer(self.compression, create="always", slots=slots, size=size)
        self.model = LroseModel(slots, size)
        for follower in self.followers:
            assert follower.reader.newest_seq() is None
            if another or follower.known - follower.base >= 0:
                follower.lost += max(0, follower.known - follower.next + 1)
                follower.restarts += 1
                follower.base = 0
                # What it had copied is still delivered, from a queue that is no more.
                follower.next = follower.start = 0
                follower.settled = follower.books + len(follower.ahead)
                follower.known = -1

    @rule(data=st.data(), what=st.integers(0, 9))
    def upset(self, data: st.DataObject, what: int) -> None:
        """What happens now and then."""
        match what:
            case 0:
                same = data.draw(st.booleans())
                self.recreate(data.draw(st.integers(1, 20)), data.draw(st.integers(64, 4096)), same)
            case 1 | 2:
                self.reopen_writer(data.draw(st.sampled_from(Compression)))
            case 3 if self.followers:
                self.reopen_reader(self._one(data))
            case 4 | 5 | 6 if len(self.followers) < 4:
                self.open_reader(data.draw(st.sampled_from([None, None, -1, 0, 1])))
            case _:
                self.clock.advance(data.draw(st.integers(1, 3)))

    # --- writing ----------------------------------------------------------------------------

    def _payload(self, share: int, kind: str) -> bytes:
        self.counter += 1
        size = self.model.buf_size * share // 1000
        if kind == "text":
            return (b"message %d " % self.counter * (size // 8 + 1))[:size]
        return random.Random(self.counter).randbytes(size) if kind == "noise" else bytes(size)

    def _length(self, payload: bytes) -> int:
        method = self.compression.method
        return len(payload) if method is None else len(compress(payload, method))

    def _fits(self, payload: bytes) -> bool:
        return self.model.fits(self._length(payload), len(payload))

    def _expect(self, payload: bytes, type: int, subtype: int) -> Stored:
        self.written += 1
        return self.model.write(
            self._length(payload),
            payload,
            type,
            subtype,
            self.clock.now_ns() // SECOND,
            self.compression.method is not None,
        )

    @property
    def _writer_base(self) -> int:
        return _base(self.model)

    @rule(like=payloads, type=types, subtype=st.integers(-(2**31), 2**31 - 1))
    def write(self, like: tuple[int, str], type: int, subtype: int) -> None:
        assert self.writer is not None
        payload = self._payload(*like)
        if self._fits(payload):
            base = self.model.youngest
            seq = self.writer.write(payload, type, subtype)
            self._expect(payload, type, subtype)
            assert (seq - self.model.youngest) % ID_COUNT == 0
            assert self.model.youngest == base + 1
        else:
            before = QueueBytes.load(self.path)
            with pytest.raises(MessageTooLarge):
                self.writer.write(payload, type, subtype)
            assert QueueBytes.load(self.path) == before
            self.refused += 1

    @rule(likes=st.lists(payloads, max_size=30), type=types, as_batch=st.booleans())
    def write_several(self, likes: list[tuple[int, str]], type: int, as_batch: bool) -> None:
        assert self.writer is not None
        payloads = [self._payload(*like) for like in likes]
        fitting = next(
            (i for i, payload in enumerate(payloads) if not self._fits(payload)), len(payloads)
        )
        before = QueueBytes.load(self.path)
        now = self.clock.now_ns()

        def go() -> int | None:
            assert self.writer is not None
            if not as_batch:
                return self.writer.write_many(iter(payloads), type, 5)
            return self.writer.write_batch(
                batch_from_messages(
                    [Message(i, now, 0, type, 5, None, None, p) for i, p in enumerate(payloads)]
                )
            )

        if fitting < len(payloads):
            with pytest.raises(MessageTooLarge):
                go()
            self.refused += len(payloads) - fitting
        else:
            last = go()
            assert (last is None) == (not payloads)
        for payload in payloads[:fitting]:
            self._expect(payload, type, 5)
        if fitting == 0:
            assert QueueBytes.load(self.path) == before
        elif fitting == len(payloads):
            assert last is not None
            assert (last - self.model.youngest) % ID_COUNT == 0

    # --- reading ----------------------------------------------------------------------------

    def open_reader(self, wanted: int | None) -> None:
        reader = reader_of(self.path, type=wanted)
        base = _base(self.model)
        follower = Follower(reader, base, wanted, self.model.youngest, 0)
        follower.stand_at(self.model.oldest)
        self.followers.append(follower)

    def reopen_reader(self, follower: Follower) -> None:
        follower.reader.close()
        self.followers.remove(follower)
        self.open_reader(follower.wanted)

    def _one(self, data: st.DataObject) -> Follower:
        return self.followers[data.draw(st.integers(0, len(self.followers) - 1))]

    def _copy(self, follower: Follower, limit: int) -> None:
        """Fill `ahead` as the reader does: what is gone is counted, the rest is copied."""
        follower.known = self.model.youngest
        if follower.next < self.model.oldest and follower.next <= self.model.youngest:
            follower.lost += self.model.oldest - follower.next
            follower.next = self.model.oldest
        there = [m for m in self.model.live() if m.seq >= follower.next]
        follower.ahead = there[:limit]
        follower.next += len(follower.ahead)

    def _deliver(self, follower: Follower, limit: int) -> list[Stored]:
        """What the next `limit` messages must be."""
        if not any(follower.wants(m) for m in follower.ahead):
            follower.filtered += len(follower.ahead)
            follower.ahead = []
            self._copy(follower, max(limit, 64))
        chosen: list[Stored] = []
        while follower.ahead and len(chosen) < limit:
            message = follower.ahead.pop(0)
            if follower.wants(message):
                chosen.append(message)
            else:
                follower.filtered += 1
        # Others behind the last one it wants are passed over at once.
        if not any(follower.wants(m) for m in follower.ahead):
            follower.filtered += len(follower.ahead)
            follower.ahead = []
        else:
            while not follower.wants(follower.ahead[0]):
                follower.filtered += 1
                follower.ahead.pop(0)
        follower.delivered += len(chosen)
        return chosen

    @staticmethod
    def _same(found: list[Message], expected: list[Stored]) -> None:
        assert [(m.seq % ID_COUNT, m.type, m.subtype, m.payload, m.time_ns) for m in found] == [
            (m.seq % ID_COUNT, m.type, m.subtype, m.payload, m.second * SECOND) for m in expected
        ]

    @precondition(lambda self: self.followers)
    @rule(data=st.data(), n=st.integers(1, 25), how=st.integers(0, 2))
    def read(self, data: st.DataObject, n: int, how: int) -> None:
        [self.read_many, self.read_batch, self.read_one][how](self._one(data), n)

    @precondition(lambda self: self.followers)
    @rule(n=st.integers(1, 25))
    def read_all_round(self, n: int) -> None:
        for follower in self.followers:
            self.read_many(follower, n)

    def read_one(self, follower: Follower, _n: int) -> None:
        message = follower.reader.read(timeout=0)
        self._same([] if message is None else [message], self._deliver(follower, 1))

    def read_many(self, follower: Follower, n: int) -> None:
        self._same(follower.reader.read_many(n), self._deliver(follower, n))

    def read_batch(self, follower: Follower, n: int) -> None:
        if follower.wanted is None and not follower.ahead:
            self._copy(follower, n)
            if any(m.compressed for m in follower.ahead):  # read again, message by message
                follower.next -= len(follower.ahead)
                follower.ahead = []
        found = list(messages_from_batch(follower.reader.read_batch(n)))
        self._same(found, self._deliver(follower, n))

    @precondition(lambda self: self.followers)
    @rule(data=st.data(), where=st.integers(0, 6), n=st.integers(-3, 25))
    def seek(self, data: st.DataObject, where: int, n: int) -> None:
        follower = self._one(data)
        match where:
            case 0 | 1 | 2:
                place = [Position.START, Position.END, Position.LAST][where]
                self.seek_to_a_named_place(follower, place)
            case 3:
                self.seek_to_a_number(follower, n)
            case 4:
                self.seek_to_a_time(follower, n // 4)
            case 5:
                self.seek_back(follower, abs(n))
            case _:
                self.seek_after_an_id(follower, n)

    def seek_to_a_named_place(self, follower: Follower, place: Position) -> None:
        follower.reader.seek(place)
        follower.known = self.model.youngest
        follower.stand_at(
            {
                "start": self.model.oldest,
                "end": self.model.youngest + 1,
                "last": max(self.model.youngest, 0),
            }[place.anchor]
        )

    def seek_to_a_number(self, follower: Follower, back: int) -> None:
        seq = max(self.model.youngest - back, follower.base)
        # It is said in the reader's own numbers.
        place = Position.sequence(seq - follower.base)
        follower.known = self.model.youngest
        if seq > self.model.youngest + 1:
            with pytest.raises(PositionError):
                follower.reader.seek(place)
        else:
            follower.reader.seek(place)
            follower.stand_at(seq)

    def seek_to_a_time(self, follower: Follower, before: int) -> None:
        second = self.clock.now_ns() // SECOND - before
        follower.reader.seek(Position.time(second * SECOND))
        follower.known = self.model.youngest
        at = [m.seq for m in self.model.live() if m.second >= second]
        follower.stand_at(at[0] if at else self.model.youngest + 1)

    def seek_back(self, follower: Follower, messages: int) -> None:
        position = follower.position
        follower.reader.seek_back(messages)
        follower.known = self.model.youngest
        follower.stand_at(max(position - messages, min(self.model.oldest, position)))

    def seek_after_an_id(self, follower: Follower, back: int) -> None:
        seq = self.model.youngest - back
        follower.known = self.model.youngest
        if self.model.oldest <= seq <= self.model.youngest:
            follower.reader.seek_after_id(seq % ID_COUNT)
            follower.stand_at(seq + 1)
        else:
            with pytest.raises(PositionError):
                follower.reader.seek_after_id(seq % ID_COUNT)

    # --- what holds after every step --------------------------------------------------------

    @invariant()
    def the_medium_is_as_the_model_says(self) -> None:
        if self.writer is None:
            return
        status = check_queue(self.path)
        words = self.model.status_words()
        assert {name: getattr(status, name) for name in words} == words
        found = QueueBytes.load(self.path)
        for index, entry in enumerate(self.model.slots):
            if entry is None:
                assert found.slot(index).encode() == FREE_SLOT
            else:
                slot = found.slot(index)
                assert (slot.id, slot.offset) == (entry.seq % ID_COUNT, entry.offset)

    @invariant()
    def the_books_of_the_readers_add_up(self) -> None:
        for follower in self.followers:
            books = follower.reader.statistics()
            assert (books.messages, books.lost, books.filtered, books.restarts) == (
                follower.delivered,
                follower.lost,
                follower.filtered,
                follower.restarts,
            )
            assert books.lost == sum(loss.count for loss in books.losses)
            if not follower.ahead:
                assert books.next_seq is not None
                assert (books.next_seq - follower.next) % ID_COUNT == 0
                passed = follower.books - follower.settled
                assert passed == follower.next - follower.start
            wanted = [m for m in follower.ahead if follower.wants(m)]
            held = follower.ahead[-1].seq + 1 - wanted[0].seq if wanted else 0
            there = max(0, follower.known + 1 - follower.next)
            assert books.backlog == there + held

    @invariant()
    def the_books_of_the_writer_add_up(self) -> None:
        if self.writer is not None:
            books = self.writer.statistics()
            assert (books.messages, books.refused) == (self.written, self.refused)


def _base(model: LroseModel) -> int:
    """Who opens a queue numbers it from its ids: rounds that left no trace are not known."""
    rounds = model.youngest // ID_COUNT * ID_COUNT if model.youngest >= 0 else 0
    if rounds and len(model.live()) > model.youngest % ID_COUNT + 1:
        return rounds - ID_COUNT
    return rounds


_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_any_history_of_a_queue_is_what_the_model_says() -> None:
    chosen = settings(max_examples=100, stateful_step_count=50, suppress_health_check=_CHECKS)
    run_state_machine_as_test(QueueMachine, settings=chosen)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_very_many_histories_of_a_queue_are_what_the_model_says() -> None:
    chosen = settings(max_examples=2000, stateful_step_count=80, suppress_health_check=_CHECKS)
    run_state_machine_as_test(QueueMachine, settings=chosen)
