"""Killed between any two stores to shared memory, a process leaves a whole queue behind."""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from penstock import describe, open_reader, open_writer
from support.lives import Lives
from support.until import until
from support.wide_aftermath import LOCK, ROOM_WANTED, SOON, Follower, check, go_on, is_same, word_of
from support.wide_faults import LOCK_WAITERS, FaultyProcesses, build, message_of
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import list_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.message import Message

#: More than any of these have.
MANY_POINTS = 1000


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyProcesses]:
    processes = FaultyProcesses(build(tmp_path_factory.mktemp("core")))
    yield processes
    processes.end()


class Case(NamedTuple):
    """What a writer does while it is killed, and the queue that it does it to."""

    how: str
    sizes: tuple[int, ...]
    options: str
    #: Sizes of the messages that were there before.
    before: tuple[int, ...]
    block: bool = False

    def expected(self) -> dict[int, Message]:
        """Return the messages that may be there, by their numbers."""
        old = {i: message_of(i, size) for i, size in enumerate(self.before)}
        first = len(old)
        kind = first if self.how == "write_many" else None
        for number, size in enumerate(self.sizes, first):
            message = message_of(number, size, with_block=self.block)
            old[number] = message if kind is None else message._replace(type=kind)
        return old


CASES = {
    "write": Case("write", (100,), "slots=16&size=8192", (50, 0, 3000)),
    "write, first of all": Case("write", (100,), "slots=2&size=4096", ()),
    "write nothing": Case("write", (0,), "slots=4&size=4096", (10, 10)),
    "write, evicting by slots": Case("write", (100,), "slots=4&size=8192", (10, 20, 30, 40)),
    "write, evicting by bytes": Case("write", (3000,), "slots=16&size=4096", (900, 0, 900, 900)),
    "write, evicting all": Case("write", (4096,), "slots=16&size=4096", (900, 900, 900)),
    "write, around the end": Case("write", (900,), "slots=16&size=4096", (1500, 1500, 600)),
    "write with block": Case("write", (100,), "slots=4&size=8192", (9, 9, 9, 9), block=True),
    "write with crc": Case("write", (100,), "slots=4&size=8192&crc=true", (9, 9, 9, 9)),
    "write one by one": Case("write", (10, 200, 0), "slots=4&size=4096", (9, 9, 9)),
    "write_many": Case("write_many", (10, 0, 300, 64, 65), "slots=16&size=8192", (9, 9)),
    "write_many, more than fit": Case(
        "write_many", (10, 700, 20, 900, 3000, 1, 800, 0), "slots=4&size=4096", (9, 9, 9)
    ),
    "write_batch": Case(
        "write_batch", (10, 0, 3000, 64), "slots=8&size=8192", (9, 900, 9, 4000), block=True
    ),
    "commit": Case("commit", (500,), "slots=4&size=4096", (900, 900, 900, 900)),
    "commit with block": Case("commit", (50,), "slots=4&size=4096", (9, 9), block=True),
    "abort": Case("abort", (500,), "slots=4&size=4096", (900, 900, 900, 900)),
    "many writers": Case("write", (100, 50), "slots=4&size=4096&writers=many", (9, 9, 9)),
    "many writers, batch": Case(
        "write_many", (10, 700, 20, 900), "slots=4&size=4096&writers=many", (9, 9, 9)
    ),
    "many writers, commit": Case("commit", (500,), "slots=4&size=4096&writers=many", (9, 9)),
    "many writers, abort": Case("abort", (500,), "slots=4&size=4096&writers=many", (9, 9)),
}

#: The small form takes one of so many points, each case others.
SMALL_STEP = 13
POINTS = pytest.mark.parametrize(
    "step",
    [
        pytest.param(SMALL_STEP, id="some"),
        pytest.param(1, id="every", marks=[pytest.mark.full, pytest.mark.timeout(900)]),
    ],
)


class Queue:
    """A queue of a case, made anew for each kill."""

    def __init__(self, directory: Path, case: Case) -> None:
        self._original = directory / "original.fmq"
        self.path = directory / "queue.fmq"
        self.url = f"fmq:{self.path}"
        with open_writer(f"fmq:{self._original}?{case.options}") as writer:
            for number, size in enumerate(case.before):
                assert writer.write(message_of(number, size).payload, number) == number
        self.before = list_queue(self._original)

    def renew(self) -> None:
        self.path.unlink(missing_ok=True)
        shutil.copy(self._original, self.path)


def every_kill(name: str, step: int, kill_at: Callable[[int], bool], at_least: int = 4) -> None:
    """Be killed at one point after the other, until one is not reached."""
    first = 1 + zlib.crc32(name.encode()) % step
    for count, at in enumerate(range(first, MANY_POINTS, step)):
        if not kill_at(at):
            assert step > 1 or count >= at_least
            return
    raise AssertionError("there is no end to it")


# --- killed while it writes -----------------------------------------------------------------------


@POINTS
@pytest.mark.parametrize("name", CASES)
def test_a_writer_killed_at_any_point_leaves_every_message_that_it_need_not_evict(
    name: str, step: int, faulty: FaultyProcesses, lives: Lives, tmp_path: Path
) -> None:
    case = CASES[name]
    queue = Queue(tmp_path, case)
    expected = case.expected()
    writing = {
        "url": queue.url,
        "how": case.how,
        "first": len(case.before),
        "sizes": case.sizes,
        "block": case.block,
    }
    before = queue.before.header
    queue.renew()
    assert faulty.run("write", 0, **writing) == (False, 0)
    final = check(queue.path).header
    assert final.head == (before.head if case.how == "abort" else len(expected))

    def kill_at(at: int) -> bool:
        queue.renew()
        follower = Follower(lives, queue.path, tmp_path / "report")
        outcome = faulty.run("write", at, **writing)
        assert outcome.killed or outcome.code == 0
        left = check(queue.path)
        header = left.header
        if outcome.killed:
            assert before.tail <= header.tail <= final.tail
            assert before.head <= header.head <= final.head
        else:
            assert (header.tail, header.head) == (final.tail, final.head)
        for stored in left.messages:
            assert is_same(stored, expected[stored.seq]), f"message {stored.seq} is another one"
        go_on(queue.path, follower, header.head)
        follower.end(before.head, header.head + 3)
        return outcome.killed

    every_kill(name, step, kill_at)


def test_the_test_build_has_a_point_between_any_two_stores_of_a_write(
    faulty: FaultyProcesses, tmp_path: Path
) -> None:
    """A slot has 8 words, before them come tail, block and payload, after them head and a wake."""
    queue = Queue(tmp_path, CASES["write with block"])
    heads: list[tuple[int, int]] = []

    def kill_at(at: int) -> bool:
        queue.renew()
        killed = faulty.run(
            "write", at, url=queue.url, how="write", first=4, sizes=[100], block=True
        ).killed
        header = list_queue(queue.path).header
        heads.append((header.tail, header.head))
        return killed

    every_kill("points", 1, kill_at, at_least=14)
    assert sorted(set(heads)) == [(0, 4), (1, 4), (1, 5)]
    assert heads == sorted(heads)


# --- killed around the lock of many writers -------------------------------------------------------

MANY = Case("write", (100,), "slots=8&size=4096&writers=many", (9, 9, 9))


@POINTS
def test_a_writer_killed_while_it_takes_the_lock_of_a_dead_one_leaves_it_to_the_next(
    step: int, faulty: FaultyProcesses, lives: Lives, tmp_path: Path
) -> None:
    queue = Queue(tmp_path, MANY)
    expected = MANY.expected()

    def kill_at(at: int) -> bool:
        queue.renew()
        follower = Follower(lives, queue.path, tmp_path / "report")
        assert faulty.run("die with lock", 0, url=queue.url, size=200).killed
        assert word_of(queue.path, LOCK) != 0
        outcome = faulty.run(
            "write", at, url=queue.url, how="write", first=3, sizes=[100], block=False
        )
        left = check(queue.path)
        assert left.header.head in ({3, 4} if outcome.killed else {4})
        assert all(is_same(stored, expected[stored.seq]) for stored in left.messages)
        assert left.header.tail == 0
        go_on(queue.path, follower, left.header.head)
        follower.end(3, left.header.head + 3)
        return outcome.killed

    every_kill("take", step, kill_at)


@POINTS
def test_a_writer_killed_while_it_waits_for_the_lock_hinders_nobody(
    step: int, faulty: FaultyProcesses, lives: Lives, tmp_path: Path
) -> None:
    queue = Queue(tmp_path, MANY)
    mine = message_of(77, 40)

    def kill_at(at: int) -> bool:
        queue.renew()
        follower = Follower(lives, queue.path, tmp_path / "report")
        with wide_writer(queue.url) as writer:
            place = writer.reserve(40, 77)
            place.buffer[:] = mine.payload
            other = faulty.start(
                "write", at=at, url=queue.url, how="write", first=3, sizes=[100], block=False
            )
            until(lambda: other.ended() or word_of(queue.path, LOCK) & LOCK_WAITERS)
            assert place.commit() == 3
            outcome = other.end(SOON)
        left = check(queue.path)
        assert left.header.head in ({4, 5} if outcome.killed else {5})
        for stored in left.messages[3:]:
            wanted = mine if stored.seq == 3 else message_of(3, 100)
            assert is_same(stored, wanted)
        go_on(queue.path, follower, left.header.head)
        follower.end(3, left.header.head + 3)
        return outcome.killed

    every_kill("wait", step, kill_at)


@POINTS
def test_a_writer_killed_while_it_gives_the_lock_away_keeps_nobody_waiting(
    step: int, faulty: FaultyProcesses, lives: Lives, tmp_path: Path
) -> None:
    queue = Queue(tmp_path, MANY)
    sent = {message_of(n, 100).payload: message_of(n, 100) for n in (77, 88)}

    def kill_at(at: int) -> bool:
        queue.renew()
        follower = Follower(lives, queue.path, tmp_path / "report")
        other = faulty.start("hand over", at=at, url=queue.url, number=77, size=100)
        until(lambda: other.ended() or word_of(queue.path, LOCK))
        with open_writer(queue.url) as writer:
            began = time.monotonic()
            mine = message_of(88, 100)
            seq = writer.write(mine.payload, mine.type)
            outcome = other.end(SOON)
            assert time.monotonic() - began < SOON
        left = check(queue.path)
        assert seq == left.header.head - 1
        assert left.header.head in ({4, 5} if outcome.killed else {5})
        assert all(is_same(stored, sent[stored.payload]) for stored in left.messages[3:])
        go_on(queue.path, follower, left.header.head)
        follower.end(3, left.header.head + 3)
        return outcome.killed

    every_kill("give", step, kill_at)


# --- killed while it reads ------------------------------------------------------------------------

HELD = Case("write", (100,), "slots=4&size=4096", (1, 2, 3, 4))


@POINTS
def test_a_held_reader_killed_at_any_point_gets_again_what_it_did_not_acknowledge(
    step: int, faulty: FaultyProcesses, tmp_path: Path
) -> None:
    queue = Queue(tmp_path, HELD)

    def kill_at(at: int) -> bool:
        queue.renew()
        with open_writer(f"{queue.url}?hold=a&keep=true&timeout=20") as writer:
            # It waits for room, since nobody has read anything.
            blocked = threading.Thread(target=writer.write, args=(b"the fifth",))
            blocked.start()
            until(lambda: word_of(queue.path, ROOM_WANTED))
            outcome = faulty.run("read", at, url=queue.url, name="a", counts=[2, 1])
            assert outcome.killed or outcome.code == 0
            [row] = describe(queue.url).details["readers"]
            position: int = row["next_seq"]
            assert position in ({0, 2, 3} if outcome.killed else {3})
            began = time.monotonic()
            if position == 0:
                assert list_queue(queue.path).header.head == 4
            with open_reader(f"{queue.url}?hold=a") as reader:
                first = reader.read(timeout=SOON)
                assert first is not None
                assert first.seq == position
                rest = [first.seq]
                while len(rest) < 5 - position:
                    message = reader.read(timeout=SOON)
                    assert message is not None
                    rest.append(message.seq)
                assert rest == list(range(position, 5))
                assert reader.statistics().lost == 0
            blocked.join(SOON)
            assert not blocked.is_alive(), "the writer was not woken"
            assert time.monotonic() - began < 2 * SOON
        return outcome.killed

    every_kill("hold", step, kill_at)


@POINTS
def test_a_writer_killed_while_it_waits_for_a_held_reader_costs_that_reader_nothing(
    step: int, faulty: FaultyProcesses, tmp_path: Path
) -> None:
    queue = Queue(tmp_path, HELD)
    expected = HELD.expected()

    def kill_at(at: int) -> bool:
        queue.renew()
        with wide_reader(f"{queue.url}?hold=a") as reader:
            other = faulty.start(
                "write",
                at=at,
                url=f"{queue.url}?hold=a",
                how="write",
                first=4,
                sizes=[100],
                block=False,
            )
            until(lambda: other.ended() or word_of(queue.path, ROOM_WANTED))
            seqs = [m.seq for m in reader.read_many(2)]
            reader.acknowledge()
            outcome = other.end(SOON)
            left = check(queue.path)
            assert left.header.head in ({4, 5} if outcome.killed else {5})
            assert all(is_same(stored, expected[stored.seq]) for stored in left.messages)
            with open_writer(f"{queue.url}?hold=a") as writer:
                assert writer.write(b"and on") == left.header.head
                seqs += [m.seq for m in reader.read_many(9, SOON)]
            assert seqs == list(range(left.header.head + 1))
            assert reader.statistics().lost == 0
        return outcome.killed

    every_kill("room", step, kill_at)


@POINTS
def test_a_reader_killed_while_it_falls_asleep_costs_the_writer_nothing(
    step: int, faulty: FaultyProcesses, lives: Lives, tmp_path: Path
) -> None:
    queue = Queue(tmp_path, CASES["write"])

    def kill_at(at: int) -> bool:
        queue.renew()
        follower = Follower(lives, queue.path, tmp_path / "report")
        outcome = faulty.run("wait", at, url=queue.url, seconds=0.05)
        left = check(queue.path)
        assert left.messages == queue.before.messages
        go_on(queue.path, follower, left.header.head)
        follower.end(3, left.header.head + 3)
        return outcome.killed

    every_kill("asleep", step, kill_at, at_least=1)
