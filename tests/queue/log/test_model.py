"""The log as a state machine, beside a list of what was written to it."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock import Message, Position, StreamId
from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.errors import MessageTooLarge
from penstock.queue.log.endpoint import check, segments, trim_log
from penstock.queue.log.reader import LogReader
from penstock.queue.log.retention import Limits
from penstock.queue.log.writer import LogWriter
from support.log_files import after_power_failure, log_reader, log_writer, segment_files, url_of

LARGEST = 4096

payloads = st.one_of(
    st.binary(max_size=40),
    st.integers(0, 1500).map(lambda size: bytes([size % 251]) * size),
    st.integers(0, LARGEST + 50).map(lambda size: bytes([size % 251]) * size),
)
kinds = st.integers(0, 2)
streams = st.one_of(st.none(), st.none(), st.binary(min_size=16, max_size=16).map(StreamId))
names = st.sampled_from(["red", "blue"])
share = st.floats(0, 1)


class Written(NamedTuple):
    type: int
    stream: StreamId | None
    attributes: bytes | None
    payload: bytes

    @property
    def size(self) -> int:
        block = (16 if self.stream is not None else 0) + len(self.attributes or b"")
        return -(-block // 8) * 8 + len(self.payload)


messages = st.builds(
    Written, kinds, streams, st.one_of(st.none(), st.binary(max_size=20)), payloads
)


@dataclass
class Follower:
    """A reader, and what is known of it."""

    reader: LogReader
    name: str | None
    type: int | None
    next: int
    #: Messages that it passed, since it was opened or did seek.
    passed: int = 0
    lost: int = 0


class LogMachine(RuleBasedStateMachine):
    """Writes, trims, crashes, reads and seeks."""

    compression = "none"

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-model-", dir="/dev/shm"))
        self.path = self.folder / "log"
        self.written: list[Written] = []
        self.oldest = 0
        self.clock = 0
        self.refused = 0
        #: Where each cursor was confirmed.
        self.cursors: dict[str, int] = {}
        self.followers: list[Follower] = []
        self.writer = self.open_writer()
        self.before = 0

    def open_writer(self) -> LogWriter:
        return log_writer(
            self.path, f"segment=4k&segment_slots=8&sync=none&compress={self.compression}"
        )

    def teardown(self) -> None:
        for follower in self.followers:
            follower.reader.close()
        self.writer.close()
        shutil.rmtree(self.folder)

    # --- writing ---

    def fits(self, message: Written) -> bool:
        return self.compression != "none" or message.size <= LARGEST

    @rule(message=messages)
    def write(self, message: Written) -> None:
        self.clock += 1
        kind, stream, attributes, payload = message
        try:
            seq = self.writer.write(payload, kind, 0, 7, self.clock, stream, attributes)
        except MessageTooLarge:
            assert len(payload) > LARGEST or not self.fits(message)
            self.refused += 1
            return
        assert seq == len(self.written)
        self.written.append(message)

    @rule(many=st.lists(st.binary(max_size=900), max_size=30), kind=kinds)
    def write_many(self, many: list[bytes], kind: int) -> None:
        last = self.writer.write_many(many, kind)
        self.written += [Written(kind, None, None, payload) for payload in many]
        assert last == (len(self.written) - 1 if many else None)

    @rule(many=st.lists(messages.filter(lambda m: m.size <= LARGEST), max_size=12))
    def write_batch(self, many: list[Written]) -> None:
        batch = batch_from_messages(
            [Message(0, 7, 0, m.type, 0, m.stream, m.attributes, m.payload) for m in many]
        )
        last = self.writer.write_batch(batch)
        self.written += many
        assert last == (len(self.written) - 1 if many else None)

    @rule(payload=st.binary(min_size=1, max_size=2000), fate=st.sampled_from(["all", "part", "no"]))
    def reserve(self, payload: bytes, fate: str) -> None:
        if self.compression != "none":
            return
        place = self.writer.reserve(len(payload), type=1)
        place.buffer[:] = payload
        if fate == "no":
            place.abort()
            return
        size = len(payload) // 2 if fate == "part" else len(payload)
        assert place.commit(size) == len(self.written)
        self.written.append(Written(1, None, None, payload[:size]))

    @rule(crash=st.booleans())
    def open_again(self, crash: bool) -> None:
        books = self.writer.statistics()
        assert books.messages == len(self.written) - self.before
        assert books.refused == self.refused
        self.writer.close()
        if crash:
            after_power_failure(self.path)
        self.before, self.refused = len(self.written), 0
        self.writer = self.open_writer()
        assert self.writer.recovery.cut == 0

    # --- retention ---

    def note_oldest(self, removed: int) -> None:
        found = segments(url_of(self.path))[0].segment
        assert found is not None
        assert found.tail - self.oldest == removed
        self.oldest = found.tail

    @rule(at=share)
    def trim_before(self, at: float) -> None:
        seq = int(at * len(self.written))
        self.note_oldest(trim_log(url_of(self.path), Limits(before_seq=seq)).messages)
        assert self.oldest <= max(seq, self.oldest)

    @rule(size=st.integers(0, 60_000))
    def trim_to_size(self, size: int) -> None:
        done = trim_log(url_of(self.path), Limits(retain=size))
        self.note_oldest(done.messages)
        assert done.left <= size or len(segment_files(self.path)) == 1

    # --- reading ---

    @rule(name=st.one_of(st.none(), names), kind=st.one_of(st.none(), kinds), at=share)
    def open_reader(self, name: str | None, kind: int | None, at: float) -> None:
        if len(self.followers) > 3 or any(name and f.name == name for f in self.followers):
            return
        start = int(at * len(self.written))
        options = "&".join(
            ([f"cursor={name}"] if name else []) + ([] if kind is None else [f"type={kind}"])
        )
        reader = log_reader(self.path, options, start=start)
        if name is not None:
            start = self.cursors.setdefault(name, start)
        assert reader.statistics().next_seq == start
        self.followers.append(Follower(reader, name, kind, start))

    def follower(self, at: float) -> Follower | None:
        return self.followers[int(at * 0.999 * len(self.followers))] if self.followers else None

    @rule(at=share, n=st.integers(1, 20), how=st.sampled_from(["one", "many", "batch", "all"]))
    def read(self, at: float, n: int, how: str) -> None:
        follower = self.follower(at)
        if follower is None:
            return
        reader = follower.reader
        if follower.name is not None:
            self.cursors[follower.name] = follower.next
        if how == "one":
            one = reader.read(0)
            got = [] if one is None else [one]
        elif how == "many":
            got = reader.read_many(n)
        elif how == "batch":
            got = list(messages_from_batch(reader.read_batch(n)))
        else:
            got = list(reader.available())
        self.check_got(follower, got, is_all=how == "all")

    def check_got(self, follower: Follower, got: list[Message], *, is_all: bool) -> None:
        first = max(follower.next, self.oldest)
        wanted = [
            seq
            for seq in range(first, len(self.written))
            if follower.type is None or self.written[seq].type == follower.type
        ]
        if is_all:
            assert [m.seq for m in got] == wanted
        else:
            assert [m.seq for m in got] == wanted[: len(got)]
            assert got or not wanted
        for message in got:
            expected = self.written[message.seq]
            assert message.payload == expected.payload
            assert (message.type, message.stream) == (expected.type, expected.stream)
            assert message.attributes == expected.attributes
        books = follower.reader.statistics()
        assert books.next_seq is not None
        if got or books.next_seq > follower.next:
            follower.lost += first - follower.next
            follower.passed += books.next_seq - follower.next
            follower.next = books.next_seq
        if follower.name is not None and is_all and got:
            # Each was confirmed when the next was taken.
            self.cursors[follower.name] = min(got[-1].seq, follower.next)
        assert books.lost == follower.lost
        assert books.messages + books.filtered + books.lost == follower.passed

    @rule(at=share, to=share, how=st.sampled_from(["seq", "start", "end", "last"]))
    def seek(self, at: float, to: float, how: str) -> None:
        follower = self.follower(at)
        if follower is None:
            return
        seq = int(to * len(self.written))
        position = {"seq": Position.sequence(seq)}.get(how) or Position.of(how)
        follower.reader.seek(position)
        end = len(self.written)
        expected = {"seq": seq, "start": self.oldest, "end": end, "last": max(self.oldest, end - 1)}
        follower.next = expected[how]
        assert follower.reader.statistics().next_seq == follower.next
        if follower.name is not None:
            self.cursors[follower.name] = follower.next

    @rule(at=share, fails=st.booleans())
    def close_reader(self, at: float, fails: bool) -> None:
        follower = self.follower(at)
        if follower is None:
            return
        self.followers.remove(follower)
        if fails:
            follower.reader.__exit__(ValueError, ValueError(), None)
        else:
            follower.reader.close()
            if follower.name is not None:
                self.cursors[follower.name] = follower.next

    @rule(at=share)
    def acknowledge(self, at: float) -> None:
        follower = self.follower(at)
        if follower is not None:
            follower.reader.acknowledge()
            if follower.name is not None:
                self.cursors[follower.name] = follower.next

    @initialize()
    def begin(self) -> None:
        assert self.writer.statistics().last_seq is None

    @invariant()
    def the_newest_is_known(self) -> None:
        for follower in self.followers:
            assert follower.reader.newest_seq() == (len(self.written) - 1 if self.written else None)
            books = follower.reader.statistics()
            assert books.backlog <= len(self.written) - min(len(self.written), follower.next)

    @invariant()
    def all_is_whole(self) -> None:
        found = [listed.segment for listed in segments(url_of(self.path))]
        assert sum(segment.count for segment in found if segment) == len(self.written) - self.oldest
        assert not any(checked.faults for checked in check(url_of(self.path)))


class CompressedLogMachine(LogMachine):
    compression = "lz4"


@pytest.mark.parametrize("machine", [LogMachine, CompressedLogMachine])
@pytest.mark.parametrize(
    "examples", [25, pytest.param(400, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_a_log_does_what_a_list_would(machine: type[LogMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
