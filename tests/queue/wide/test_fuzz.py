"""Damaged wide queues: a typed error or the right message, never anything else, never for long.

The cases run in a process of their own, so that a crash of the native core is seen: this file
is also that process's program.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock import Message, PenstockError, Position, describe, open_reader, open_writer
from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.errors import DamagedQueue
from penstock.queue.endpoint import check
from support.wide_damage import (
    BUFFER,
    END,
    KINDS,
    PAGE,
    SLOT_TABLE,
    Original,
    damaged,
    is_checked,
    is_read_alike,
    is_untouched,
    make,
)

#: Nothing takes this long (seconds), however damaged.
LONGEST = 20
#: Nothing takes this much memory.
LARGEST = 256 << 20

# --- reading, in every way that there is ------------------------------------------------------


def one_by_one(reader: Any) -> Iterator[Message]:
    while (message := reader.read(timeout=0)) is not None:
        yield message


def many(reader: Any) -> Iterator[Message]:
    while messages := reader.read_many(3):
        yield from messages


def batches(reader: Any) -> Iterator[Message]:
    while (batch := reader.read_batch(5)).num_rows:
        yield from messages_from_batch(batch)


def views(reader: Any) -> Iterator[Message]:
    while True:
        with reader.view(timeout=0) as message:
            if message is None:
                return
            copy = message._replace(payload=bytes(message.payload))
        yield copy


def view_batches(reader: Any) -> Iterator[Message]:
    while True:
        with reader.view_batch(5) as batch:
            rows = list(map(Message, *(column.to_pylist() for column in batch.columns)))
        if not rows:
            return
        yield from rows


Way = Callable[[Any], Iterator[Message]]
COPYING: tuple[Way, ...] = (one_by_one, many, batches)
IN_PLACE: tuple[Way, ...] = (views, view_batches)


def ways_of(reader: Any) -> tuple[Way, ...]:
    is_compressed = type(reader).__name__ == "CompressedReader"
    return COPYING if is_compressed else COPYING + IN_PLACE


class Read(NamedTuple):
    messages: list[Message]
    lost: list[int]
    start: int
    raised: PenstockError | None


def drain(path: str, chance: random.Random, *, skip: bool, way: int | None = None) -> Read:
    """Read everything from the oldest on; make sure that the books add up."""
    found: list[Message] = []
    raised: PenstockError | None = None
    with open_reader(
        f"fmq:{path}?damaged={'skip' if skip else 'fail'}", start=Position.START
    ) as reader:
        chosen = ways_of(reader)
        read = chance.choice(chosen) if way is None else chosen[way % len(chosen)]
        start = reader.statistics().next_seq
        assert start is not None
        try:
            found.extend(read(reader))
        except PenstockError as error:
            raised = error
        books = reader.statistics()
    assert books.messages == len(found), (read.__name__, books)
    assert books.bytes == sum(len(m.payload) for m in found), (read.__name__, books)
    assert books.lost == sum(loss.count for loss in books.losses)
    assert books.next_seq is not None
    assert books.messages + books.lost == books.next_seq - start, (read.__name__, books)
    lost = sorted(seq for loss in books.losses for seq in range(loss.first, loss.last + 1))
    return Read(found, lost, start, raised)


# --- the cases --------------------------------------------------------------------------------


def read_case(path: str, original: Original, data: bytes, chance: random.Random) -> str:
    try:
        every = drain(path, chance, skip=True, way=1)
    except PenstockError:
        assert original.data[:PAGE] != data[:PAGE] or len(data) < END
        return "refused"
    assert every.raised is None
    seqs = [message.seq for message in every.messages]
    assert sorted({*seqs, *every.lost}) == sorted(seqs + every.lost)
    there = range(every.start, every.start + len(seqs) + len(every.lost))
    for message in every.messages:
        if is_checked(original, data):
            assert message == original.history[message.seq], message
    for stored in original.listing.messages:
        if stored.seq in there and is_untouched(original, data, stored):
            assert original.history[stored.seq] in every.messages, stored

    again = drain(path, chance, skip=True)
    assert again == every
    failing = drain(path, chance, skip=False)
    if every.lost:
        assert isinstance(failing.raised, DamagedQueue)
        assert failing.raised.hint
        assert failing.messages == [m for m in every.messages if m.seq < every.lost[0]]
    else:
        assert failing.raised is None
        assert failing.messages == every.messages
    return "damaged" if every.lost else "whole"


def look_case(path: str, original: Original, data: bytes, chance: random.Random) -> str:
    """Look at a queue, and move about in it."""
    with contextlib.suppress(PenstockError):
        assert describe(f"fmq:{path}").details
    try:
        count = check(f"fmq:{path}")
    except PenstockError:
        count = None
    options = chance.choice(("", "hold=archive", "hold=other", "type=1", "resume=newest"))
    try:
        reader = open_reader(f"fmq:{path}?{options}", start=Position.START)
    except PenstockError as error:
        is_row = isinstance(error, DamagedQueue) and error.field.startswith("row")
        if count is not None and not is_row:
            raise
        return "refused"
    with reader:
        if count is not None and is_checked(original, data):
            found = drain(path, chance, skip=False)
            assert found.raised is None
            assert len(found.messages) == count
        moments = [*(m.created_ns for m in original.history.values()), 0, -(2**63), 2**63 - 1]
        for _ in range(4):
            place: Any = chance.choice(
                (
                    Position.START,
                    Position.END,
                    Position.LAST,
                    Position.time(chance.choice(moments)),
                    Position.sequence(chance.choice((0, 3, 40, 50, 2**63 - 1))),
                )
            )
            with contextlib.suppress(PenstockError):
                reader.seek(place)
                list(itertools.islice(chance.choice(ways_of(reader))(reader), 20))
                reader.acknowledge()
        books = reader.statistics()
        assert books.lost == sum(loss.count for loss in books.losses)
    return "damaged" if count is None else "whole"


def write_case(path: str, original: Original, data: bytes, chance: random.Random) -> str:
    """A writer refuses a damaged queue, or what it writes can be read."""
    held = chance.choice(("", "", "&hold=archive&policy=drop", "&hold=archive,new&policy=fail"))
    written: dict[int, bytes] = {}
    try:
        writer: Any = open_writer(f"fmq:{path}?create=never&lock_timeout=0.1{held}")
    except PenstockError:
        left = Path(f"{path}.fmq").read_bytes()
        assert left[SLOT_TABLE:] == data[SLOT_TABLE:]
        assert left[:384] == data[:384]
        return "refused"
    compresses = type(writer).__name__ == "CompressingWriter"
    with writer:
        for number in range(chance.randrange(1, 14)):
            payload = b"new message %d" % number * chance.randrange(1, 60)
            with contextlib.suppress(PenstockError):
                match chance.randrange(4):
                    case 0 if not compresses:
                        with writer.reserve(len(payload), 7) as place:
                            place.buffer[:] = payload
                        written[writer.statistics().last_seq] = payload
                    case 1:
                        row = Message(0, 5, 5, 7, number, None, b"own", payload)
                        written[writer.write_batch(batch_from_messages([row]))] = payload
                    case 2:
                        written[writer.write_many([payload], 7)] = payload
                    case _:
                        written[writer.write(payload, 7, number)] = payload
    if not is_read_alike(original, data):
        return "another"
    after = drain(path, chance, skip=True, way=1)
    assert after.raised is None
    found = {m.seq: m.payload for m in after.messages}
    slots_are_right = original.data[SLOT_TABLE:BUFFER] == data[SLOT_TABLE:BUFFER]
    if slots_are_right or is_checked(original, data):
        for seq, payload in written.items():
            if seq in found:
                assert found[seq] == payload, seq
            else:
                assert seq < after.start or not slots_are_right, seq
    if is_checked(original, data):
        for seq in found.keys() - written.keys():
            assert found[seq] == original.history[seq].payload
    return "written" if written else "full"


def running_case(path: str, original: Original, data: bytes, chance: random.Random) -> str:
    """The queue is damaged while readers and a writer have it open."""
    file = f"{path}.fmq"
    Path(file).write_bytes(original.data)
    with contextlib.ExitStack() as stack:
        readers: list[Any] = [
            stack.enter_context(open_reader(f"fmq:{path}?{options}", start=Position.START))
            for options in ("damaged=skip", "damaged=fail", "damaged=skip&resume=newest&type=1")
        ]
        writer = stack.enter_context(open_writer(f"fmq:{path}?create=never&lock_timeout=0.1"))
        readers[1].read(timeout=0)
        with Path(file).open("r+b") as out:
            out.write(data)
        errors = 0
        for number in range(4):
            with contextlib.suppress(PenstockError):
                writer.write(b"new message %d" % number)
            for reader in readers:
                errors += 1
                with contextlib.suppress(PenstockError):
                    list(itertools.islice(chance.choice(ways_of(reader))(reader), 5))
                    errors -= 1
        for reader in readers:
            books = reader.statistics()
            assert books.lost == sum(loss.count for loss in books.losses)
    return "damaged" if errors else "whole"


CASES: dict[str, Callable[[str, Original, bytes, random.Random], str]] = {
    "read": read_case,
    "look": look_case,
    "write": write_case,
    "running": running_case,
}


def run_cases(case: str, first: int, last: int) -> None:
    """Run the cases of these numbers in this process."""
    logging.disable()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        originals = {kind: make(f"{folder}/{kind}", kind) for kind in KINDS}
        kinds = list(KINDS)
        path = f"{folder}/queue"
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + LARGEST
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        outcomes: Counter[str] = Counter()
        for number in range(first, last):
            chance = random.Random(number)
            kind = kinds[number % len(kinds)]
            original = originals[kind]
            data = damaged(original.data, chance, same_size=case == "running")
            Path(f"{path}.fmq").write_bytes(data)
            faulthandler.dump_traceback_later(LONGEST, exit=True)
            try:
                outcomes[CASES[case](path, original, data, chance)] += 1
            except BaseException:
                sys.stderr.write(f"{case} {number}, {kind}\n")
                raise
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps(outcomes))  # noqa: T201


# --- the tests --------------------------------------------------------------------------------

COUNTS = [
    pytest.param(1500, id="some"),
    pytest.param(40_000, id="all", marks=[pytest.mark.full, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("read", id="gives_the_right_messages_or_a_typed_error"),
        pytest.param("look", id="can_be_looked_at_and_moved_about_in"),
        pytest.param("write", id="is_refused_by_a_writer_or_takes_new_messages"),
        pytest.param("running", id="may_become_so_under_running_readers_and_writers"),
    ],
)
def test_a_damaged_queue(case: str, count: int) -> None:
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", __file__, case, "0", str(count)],
        env={**os.environ, "PYTHONPATH": tests},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stderr[-6000:]}"
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == count
    # Damage that nobody sees, and damage that nobody gets past, would test nothing.
    assert sum(n > count // 10 for n in outcomes.values()) >= 2, outcomes


if __name__ == "__main__":
    run_cases(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
