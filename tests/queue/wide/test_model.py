"""The wide queue as a state machine, beside a model of what the format document says."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

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

from penstock import Message, Position, StreamId
from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.errors import PositionError
from penstock.queue.wide.writer import WideWriter
from support.wide_model import Follower, Header, Refused, RingModel, Stored
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import Listing, list_queue

#: The name of the reader that writers may have to wait for.
HELD = "archive"

#: The size of a payload in thousandths of the buffer: mostly small, sometimes all of it or more.
shares = st.one_of(st.integers(0, 60), st.integers(0, 300), st.integers(0, 1050))
kinds = st.integers(0, 2)


headers = st.builds(
    Header,
    st.integers(-1, 1),
    st.sampled_from([0, -(2**31), 2**31 - 1]),
    st.one_of(st.none(), st.none(), st.binary(min_size=16, max_size=16).map(StreamId)),
    st.one_of(st.none(), st.none(), st.binary(max_size=40)),
)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-model-", dir="/dev/shm"))
        self.path = str(self.directory / "queue")
        self.followers: list[Follower] = []
        self.writer: WideWriter | None = None
        self.waits = self.keeps = False
        #: Where the held reader is, also while it is not there.
        self.held_at: int | None = None
        self.counter = self.written = self.refused = 0

    def teardown(self) -> None:
        for follower in self.followers:
            follower.reader.close()
        if self.writer is not None:
            self.writer.close()
        shutil.rmtree(self.directory)

    # --- the queue and its writer -----------------------------------------------------------

    @initialize(
        slots=st.integers(2, 20),
        pages=st.integers(1, 2),
        options=st.sampled_from(["", "", "&crc=true", "&writers=many", "&sparse=true"]),
        compression=st.sampled_from([None, None, "lz4", "zstd"]),
        own=st.sampled_from([None, StreamId(bytes(range(16)))]),
    )
    def create(
        self, slots: int, pages: int, options: str, compression: str | None, own: StreamId | None
    ) -> None:
        self.own = own
        self.options = f"slots={slots}&size={pages * 4096}&readers=6{options}"
        self.options += f"&compress={compression}" if compression else ""
        self.options += f"&stream={own.hex()}" if own else ""
        self.model = RingModel(1 << (slots - 1).bit_length(), pages * 4096, compression)
        self._open_writer()
        self.open_reader(None, newest=False, holds=False)

    def _open_writer(
        self, *, waits: bool = False, keeps: bool = False, always: bool = False
    ) -> None:
        if self.writer is not None:
            self.writer.close()
        url = f"fmq:{self.path}?{self.options}"
        url += f"&hold={HELD}&policy=fail&keep={'true' if keeps else 'false'}" if waits else ""
        self.writer = wide_writer(url + ("&create=always" if always else ""))
        self.waits, self.keeps = waits, keeps
        if always:
            self.held_at = None
        if waits and self.held_at is None:
            self.held_at = self.model.tail  # it was given a place
        self.written = self.refused = 0

    def recreate(self) -> None:
        """Create the queue anew; readers read what is left of the old one, then the new one."""
        for follower in self.followers:
            if follower.holds:
                self.close_reader(follower)
                break
        old = self.model
        old.limit = None
        self.model = RingModel(old.slots, old.size, old.compression)
        self._open_writer(always=True)
        for follower in self.followers:
            expected = follower.deliver(old, 1000)
            self._same(follower.reader.read_many(1000), expected)
            assert follower.reader.read(timeout=0.01) is None
            follower.restarts += 1
            follower.stand_at(0)

    @rule(data=st.data(), what=st.integers(0, 11))
    def upset(self, data: st.DataObject, what: int) -> None:
        """What happens now and then."""
        match what:
            case 0:
                self.recreate()
            case 1 | 2:
                self._open_writer()
            case 3 | 4 | 5:
                self._open_writer(waits=True, keeps=data.draw(st.booleans()))
            case 6 if self.followers:
                self.close_reader(self._one(data))
            case 7 | 8 if len(self.followers) < 4:
                wanted = data.draw(st.sampled_from([None, None, -1, 0, 1]))
                self.open_reader(wanted, newest=data.draw(st.booleans()), holds=False)
            case _ if not any(f.holds for f in self.followers) and len(self.followers) < 5:
                self.open_reader(None, newest=False, holds=True)
            case _:
                for follower in self.followers:
                    follower.reader.acknowledge()
                    follower.acknowledged = follower.next

    # --- writing ----------------------------------------------------------------------------

    def _payload(self, share: int, kind: int) -> bytes:
        self.counter += 1
        size = self.model.size * share // 1000
        if kind == 0:
            return (b"message %d " % self.counter * (size // 8 + 1))[:size]
        return random.Random(self.counter).randbytes(size) if kind == 1 else bytes(size)

    def _look_at_held(self) -> None:
        """Tell the model up to where the writer may overwrite."""
        holder = next((f for f in self.followers if f.holds), None)
        if holder is not None:
            self.held_at = holder.acknowledged
        waits = self.waits and (self.keeps or holder is not None)
        self.model.limit = self.held_at if waits else None

    def _expect(self, header: Header, payloads: list[bytes]) -> Exception | None:
        """Write to the model; return what the writer must raise, or None."""
        self._look_at_held()
        for number, payload in enumerate(payloads):
            try:
                at = self.model.place(header, payload)
            except Refused as refused:
                self.refused += len(payloads) - number
                return refused
            self.model.append(at, header, payload)
            self.written += 1
        return None

    def _write(self, expected: Exception | None, how: Any) -> None:
        if isinstance(expected, Refused):
            with pytest.raises(expected.kind):
                how()
        else:
            assert how() == self.model.head - 1

    @rule(share=shares, kind=kinds, header=headers, time_ns=st.none() | st.integers(-9, 9))
    def write(self, share: int, kind: int, header: Header, time_ns: int | None) -> None:
        payload = self._payload(share, kind)
        expected = self._expect(header, [payload])
        type, subtype, stream, attributes = header
        writer = self.writer
        assert writer is not None
        self._write(
            expected,
            lambda: writer.write(payload, type, subtype, time_ns, None, stream, attributes),
        )

    @rule(
        likes=st.lists(st.tuples(shares, kinds), min_size=1, max_size=40),
        header=headers,
        as_batch=st.booleans(),
    )
    def write_several(self, likes: list[tuple[int, int]], header: Header, as_batch: bool) -> None:
        writer = self.writer
        assert writer is not None
        payloads = [self._payload(*like) for like in likes]
        if not as_batch:
            header = Header(header.type, header.subtype, None, None)
        if as_batch and self.model.compression is not None:
            self._one_by_one(header, payloads)
            return
        expected = self._expect(header, payloads)
        if as_batch:
            batch = batch_from_messages(
                [Message(0, 5, 0, *header, payload) for payload in payloads]
            )
            self._write(expected, lambda: writer.write_batch(batch))
        else:
            self._write(
                expected, lambda: writer.write_many(iter(payloads), header.type, header.subtype)
            )

    def _one_by_one(self, header: Header, payloads: list[bytes]) -> None:
        """A compressed batch goes message by message; those behind a refusal are refused, too."""
        writer = self.writer
        assert writer is not None
        expected: Exception | None = None
        for number, payload in enumerate(payloads, 1):
            if (expected := self._expect(header, [payload])) is not None:
                self.refused += len(payloads) - number
                break
        batch = batch_from_messages([Message(0, 5, 0, *header, payload) for payload in payloads])
        self._write(expected, lambda: writer.write_batch(batch))

    @precondition(lambda self: self.writer is not None and self.model.compression is None)
    @rule(share=shares, kind=kinds, header=headers, used=st.integers(-300, 1000))
    def reserve(self, share: int, kind: int, header: Header, used: int) -> None:
        writer = self.writer
        assert writer is not None
        payload = self._payload(share, kind)
        type, subtype, stream, attributes = header
        self._look_at_held()
        try:
            at = self.model.place(header, payload)
        except Refused as refused:
            self.refused += 1
            with pytest.raises(refused.kind):
                writer.reserve(len(payload), type, subtype, None, None, stream, attributes)
            return
        place = writer.reserve(len(payload), type, subtype, None, None, stream, attributes)
        place.buffer[:] = payload
        if used < 0:
            place.abort()  # what had to go for it is gone
            return
        part = payload[: len(payload) * used // 1000]
        assert place.commit(len(part)) == self.model.append(at, header, part).seq
        self.written += 1

    # --- reading ----------------------------------------------------------------------------

    def open_reader(self, wanted: int | None, *, newest: bool, holds: bool) -> None:
        url = f"fmq:{self.path}?resume={'newest' if newest else 'oldest'}"
        url += f"&type={wanted}" if wanted is not None else ""
        reader = wide_reader(url + (f"&hold={HELD}" if holds else ""))
        follower = Follower(reader, wanted, newest, holds, 0, 0)
        follower.stand_at(self.model.tail)
        if holds:
            if self.held_at is not None:
                follower.stand_at(min(self.held_at, self.model.head))
            self.held_at = follower.next
        self.followers.append(follower)

    def close_reader(self, follower: Follower) -> None:
        follower.reader.close()
        self.followers.remove(follower)
        if follower.holds:
            self.held_at = follower.next  # what it was given is done

    def _one(self, data: st.DataObject) -> Follower:
        return self.followers[data.draw(st.integers(0, len(self.followers) - 1))]

    def _same(self, found: list[Message], expected: list[Stored]) -> None:
        assert [(m.seq, *m[3:]) for m in found] == [
            (m.seq, *m.header[:2], m.header.stream or self.own, m.header.attributes, m.payload)
            for m in expected
        ]

    @precondition(lambda self: self.followers)
    @rule(data=st.data(), n=st.integers(1, 25), how=st.integers(0, 4))
    def read(self, data: st.DataObject, n: int, how: int) -> None:
        follower = self._one(data)
        ways = [self.read_one, self.read_many, self.read_batch, self.view, self.view_batch]
        ways[how](follower, n)

    @precondition(lambda self: self.followers)
    @rule(n=st.integers(1, 25))
    def read_all_round(self, n: int) -> None:
        for follower in self.followers:
            self.read_many(follower, n)

    def read_one(self, follower: Follower, _n: int) -> None:
        message = follower.reader.read(timeout=0)
        self._same([] if message is None else [message], follower.deliver(self.model, 1))

    def read_many(self, follower: Follower, n: int) -> None:
        self._same(follower.reader.read_many(n), follower.deliver(self.model, n))

    def read_batch(self, follower: Follower, n: int) -> None:
        found = list(messages_from_batch(follower.reader.read_batch(n)))
        self._same(found, follower.deliver(self.model, n))

    def view(self, follower: Follower, n: int) -> None:
        if self.model.compression is not None:
            self.read_one(follower, n)
            return
        with follower.reader.view(timeout=0) as message:
            found = [] if message is None else [message._replace(payload=bytes(message.payload))]
        self._same(found, follower.deliver(self.model, 1))

    def view_batch(self, follower: Follower, n: int) -> None:
        if self.model.compression is not None:
            self.read_batch(follower, n)
            return
        with follower.reader.view_batch(n) as batch:
            found = list(map(Message, *(column.to_pylist() for column in batch.columns)))
        self._same(found, follower.lend(self.model, n))

    @precondition(lambda self: self.followers)
    @rule(data=st.data(), where=st.sampled_from(["start", "end", "last", "seq", "seq", "time"]))
    def seek(self, data: st.DataObject, where: str) -> None:
        follower, model = self._one(data), self.model
        match where:
            case "start" | "end" | "last":
                place = Position.of(where)
                last = max(model.tail, model.head - 1)
                target = {"start": model.tail, "end": model.head, "last": last}[where]
            case "seq":
                target = max(0, model.head + data.draw(st.integers(-25, 3)))
                place = Position.sequence(target)
            case _:
                times = [m.created_ns for m in self.listing().messages]
                moment = data.draw(st.sampled_from([0, 2**63 - 1, *times]))
                moment += data.draw(st.integers(-1, 1)) if times and moment in times else 0
                place = Position.time(moment)
                target = model.tail + sum(time < moment for time in times)
        if target > model.head:
            with pytest.raises(PositionError, match=f"the next is {model.head}"):
                follower.reader.seek(place)
            return
        follower.reader.seek(place)
        follower.stand_at(target)

    # --- what holds after every step --------------------------------------------------------

    def listing(self) -> Listing:
        return list_queue(f"{self.path}.fmq")

    @invariant()
    def the_file_is_as_the_model_says(self) -> None:
        if self.writer is None:
            return
        listing, model = self.listing(), self.model
        assert (listing.header.tail, listing.header.head) == (model.tail, model.head)
        assert [
            (m.seq, m.position, m.type, m.subtype, m.stream, m.attributes, m.payload)
            for m in listing.messages
        ] == [
            (m.seq, m.position, *m.header[:2], m.header.stream or self.own, m.header[3], m.payload)
            for m in model.live()
        ]

    @invariant()
    def a_fresh_reader_sees_what_is_in_the_file(self) -> None:
        if self.writer is None:
            return
        with wide_reader(f"fmq:{self.path}") as reader:
            found = reader.read_many(100)
            assert reader.statistics().lost == 0
        assert [tuple(m) for m in found] == [
            (m.seq, m.time_ns, m.created_ns, m.type, m.subtype, m.stream, m.attributes, m.payload)
            for m in self.listing().messages
        ]

    @invariant()
    def the_books_of_the_readers_add_up(self) -> None:
        for follower in self.followers:
            books = follower.reader.statistics()
            assert (books.messages, books.bytes, books.lost, books.filtered, books.restarts) == (
                follower.delivered,
                follower.size,
                follower.lost,
                follower.filtered,
                follower.restarts,
            )
            assert books.lost == sum(loss.count for loss in books.losses)
            assert books.next_seq == follower.next
            # delivered + lost + filtered + what is still to come = what was written
            passed = follower.books - follower.settled
            assert passed == follower.next - follower.start
            assert books.backlog == max(0, self.model.head - follower.next)

    @invariant()
    def the_reader_table_says_where_held_readers_are(self) -> None:
        if self.writer is None:
            return
        named = {entry.name: entry.position for entry in self.listing().readers if entry.name}
        holder = next((f for f in self.followers if f.holds), None)
        at = self.held_at if holder is None else holder.acknowledged
        assert named == ({} if at is None else {HELD: at})

    @invariant()
    def the_books_of_the_writer_add_up(self) -> None:
        if self.writer is not None:
            books = self.writer.statistics()
            assert (books.messages, books.refused) == (self.written, self.refused)
            assert books.last_seq == (self.model.head - 1 if self.written else None)


_CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.timeout(600)  # to find the shortest history that is not, which takes long
def test_any_history_of_a_wide_queue_is_what_the_model_says() -> None:
    chosen = settings(max_examples=60, stateful_step_count=40, suppress_health_check=_CHECKS)
    run_state_machine_as_test(QueueMachine, settings=chosen)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_very_many_histories_of_a_wide_queue_are_what_the_model_says() -> None:
    chosen = settings(max_examples=2000, stateful_step_count=80, suppress_health_check=_CHECKS)
    run_state_machine_as_test(QueueMachine, settings=chosen)
