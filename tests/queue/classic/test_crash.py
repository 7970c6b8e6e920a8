"""A writer dies at any point: the queue opens, keeps what it confirmed, and goes on."""

from __future__ import annotations

import json
import random
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from penstock import Position, open_reader, open_writer
from penstock.queue.classic.layout import FREE_SLOT, ID_COUNT, MESSAGE_MAGIC, SLOT_SIZE
from support import self_describing
from support.lrose_programs import needs_lrose, program
from support.peer import LAST_TYPE
from support.processes import peers, shared_memory_path
from support.queue_files import QueueBytes, check_queue, read_all, reader_of, writer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# --- killed for real ------------------------------------------------------------------------


SLOTS = 60


@contextmanager
def queue_in(storage: str, directory: Path) -> Iterator[str]:
    if storage == "file":
        yield str(directory / "queue")
    else:
        with shared_memory_path(directory) as path:
            yield path


# Of very different sizes, so that one message evicts many; and small, so that each evicts one.
@pytest.mark.parametrize("largest", [6000, 100])
@pytest.mark.parametrize("batch", [1, 40], ids=["single", "batches"])
@pytest.mark.parametrize("storage", ["file", "shared memory"])
@pytest.mark.parametrize(
    "kills",
    [4, pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(600)])],
)
def test_after_a_kill_every_confirmed_message_in_range_is_read_back(
    storage: str, batch: int, largest: int, kills: int, tmp_path: Path
) -> None:
    chance = random.Random(f"{storage} {batch} {largest} {kills}")
    sizes = {"smallest": 0, "largest": largest}
    # A message that is under way costs the one whose slot it takes, a batch a quarter of them.
    under_way = 1 if batch == 1 else SLOTS // 4
    with queue_in(storage, tmp_path) as path, peers() as started:
        url = f"fmq:{path}?layout=classic"
        open_writer(url, create="always", slots=SLOTS, size=50_000).close()
        nursery = started.start("nursery")
        follower = started.start("read", url=url, numbered=False, at_once=10)
        assert nursery.hear()["ready"]
        assert follower.hear()["ready"]
        killed = 0
        for life in range(kills):
            nursery.say(
                json.dumps(
                    {
                        "url": url,
                        "writer": life,
                        "batch": batch,
                        "seconds": chance.uniform(0, 0.02),
                        **sizes,
                    }
                )
            )
            report = nursery.hear()
            assert report["killed"], "the writer ended by itself"
            killed += 1
            confirmed = dict(report["confirmed"])
            assert confirmed
            with open_reader(url) as reader:
                oldest = reader.statistics().next_seq
                assert oldest is not None
                found = {m.seq: self_describing.check(m.payload) for m in reader.available()}
                books = reader.statistics()
                assert books.lost == 0
                assert books.next_seq is not None
                assert max(confirmed) < books.next_seq
            for seq, number in confirmed.items():
                if seq >= oldest:
                    assert found[seq] == (life, number)
            if largest * SLOTS < 50_000:
                assert len(found) >= min(SLOTS, max(confirmed) + 1) - under_way
        with open_writer(url) as writer:
            last = writer.write(b"the end", type=LAST_TYPE)
        books_of_follower = follower.hear()
        assert books_of_follower["messages"] + books_of_follower["lost_count"] == last + 1
        assert books_of_follower["restarts"] == 0
        assert killed == kills


def what_lrose_would_clear(queue: QueueBytes) -> str | None:
    """Return why an LROSE writer would empty a queue, when it opens it or at its next write.

    Its check (docs/specs/lrose.md 1.12) wants slots and status to agree, and its write the oldest
    message where the status says that free space ends (1.8, step F).
    """
    status, live = queue.status, set(queue.live())
    slots = [queue.slot(index) for index in range(status.nslots)]
    if status.youngest_id >= 0 and status.youngest_id not in [slot.id for slot in slots]:
        return "the youngest message has no slot"
    for index, slot in enumerate(slots):
        if bool(slot.active) != (index in live):
            return f"slot {index} is active: {slot.active}"
        frame = queue.buf[slot.offset : slot.offset + slot.stored_len]
        if slot.active and (int.from_bytes(frame[:4]), int.from_bytes(frame[-4:])) != (
            MESSAGE_MAGIC,
            slot.id,
        ):
            return f"message {slot.id} cannot be read"
    if live and slots[status.oldest_slot].offset != status.end_insert:
        return "the oldest message is elsewhere"
    return None


@pytest.mark.parametrize(
    ("batch", "largest", "kills"),
    [
        pytest.param(1, 3000, 5, id="single, the buffer wraps first"),
        pytest.param(40, 100, 5, id="batches, the slots wrap first"),
        *(
            pytest.param(batch, largest, 300, marks=pytest.mark.full)
            for batch in (1, 40)
            for largest in (3000, 100)
        ),
    ],
)
@pytest.mark.timeout(600)
def test_a_kill_leaves_a_small_queue_that_lroses_writers_do_not_empty(
    batch: int, largest: int, kills: int, tmp_path: Path
) -> None:
    chance = random.Random(f"{batch} {largest} {kills}")
    path = str(tmp_path / "queue")
    url = f"fmq:{path}?layout=classic"
    with peers() as started:
        open_writer(url, create="always", slots=100, size=50_000).close()
        nursery = started.start("nursery")
        assert nursery.hear()["ready"]
        for life in range(kills):
            order = {"url": url, "writer": life, "batch": batch, "smallest": 0, "largest": largest}
            nursery.say(json.dumps({**order, "seconds": chance.uniform(0, 0.02)}))
            assert nursery.hear()["killed"]
            assert what_lrose_would_clear(QueueBytes.load(path)) is None


@needs_lrose
@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.timeout(600)
def test_lroses_own_writer_goes_on_with_a_small_queue_after_a_kill(
    kills: int, tmp_path: Path
) -> None:
    chance = random.Random(kills)
    url = f"fmq:{tmp_path}/queue?layout=classic"
    commands = f"open rw {tmp_path}/queue 100 50000 0 5 start 0\nw 1 1 50 1 ramp\nclose\n"
    with peers() as started:
        open_writer(url, create="always", slots=100, size=50_000).close()
        nursery = started.start("nursery")
        assert nursery.hear()["ready"]
        for life in range(kills):
            order = {"url": url, "writer": life, "batch": 1, "smallest": 0, "largest": 3000}
            nursery.say(json.dumps({**order, "seconds": chance.uniform(0, 0.02)}))
            assert nursery.hear()["killed"]
            with open_reader(url) as reader:
                before = reader.bounds()
                subprocess.run(
                    [program("fmq_driver")],
                    input=commands,
                    text=True,
                    capture_output=True,
                    check=True,
                )
                assert reader.bounds().end == before.end + 1


# --- every state that a death can leave, made by hand ---------------------------------------


class Death(NamedTuple):
    """A queue as a writer left it when it died in the middle of a write."""

    at: str
    queue: QueueBytes
    #: Slots of the old messages that it had not freed yet.
    live: list[int]


def deaths(before: QueueBytes, after: QueueBytes) -> Iterator[Death]:
    """Yield the states between two: freed slots, bytes, slots, status (docs/specs/lrose.md 1.8)."""
    freed_count = (after.status.oldest_slot - before.status.oldest_slot) % before.status.nslots
    written = (after.status.youngest_id - before.status.youngest_id) % ID_COUNT
    old = before.live()
    if freed_count == 0 and written and before.slot(old[0]).id != after.slot(old[0]).id:
        freed_count = len(old)  # all the way round
    freed, live = old[:freed_count], old[freed_count:]
    queue = before
    for number, index in enumerate(freed):
        torn = queue.with_raw_slot(index, bytes(4))  # `active` goes first
        yield Death(f"in freeing slot {number + 1} of {len(freed)}", torn, old[number + 1 :])
        queue = queue.with_free_slot(index)
        yield Death(f"{number + 1} of {len(freed)} slots freed", queue, old[number + 1 :])
    half = len(before.buf) // 2
    yield Death("half of the bytes", queue._replace(buf=after.buf[:half] + queue.buf[half:]), live)
    yield Death("the other half", queue._replace(buf=queue.buf[:half] + after.buf[half:]), live)
    queue = queue._replace(buf=after.buf)
    yield Death("all of the bytes", queue, live)
    first = before.status.youngest_slot + 1
    for number in range(written):
        index = (first + number) % before.status.nslots
        raw = after.slot(index).encode()
        torn = queue.with_raw_slot(index, bytes(4) + raw[4:])  # `active` comes last
        yield Death(f"in new slot {number + 1} of {written}", torn, live)
        page = queue.with_raw_slot(index, raw[:8])  # a file's slot cut by the end of a page
        yield Death(f"in new slot {number + 1} of {written}, cut", page, live)
        queue = queue.with_raw_slot(index, raw)
        yield Death(f"{number + 1} of {written} slots, no status", queue, live)


class Written(NamedTuple):
    before: QueueBytes
    after: QueueBytes
    payloads: dict[int, bytes]


def histories(path: str, seed: int, slots: int, size: int, steps: int) -> Iterator[Written]:
    """Yield the steps of a queue that appends, wraps, inserts and flips."""
    chance = random.Random(seed)
    payloads: dict[int, bytes] = {}
    with writer_of(path, slots=slots, size=size, create="always") as writer:
        for step in range(steps):
            largest = chance.choice((10, size // 8, size // 3, size - 12))
            count = chance.choice((1, 1, 1, 2, 5))
            new = [
                b"%d/%d " % (step, i) + chance.randbytes(chance.randrange(largest))
                for i in range(count)
            ]
            new = [payload[: size // 4 * 4 - 12] for payload in new]
            before = QueueBytes.load(path)
            last = writer.write_many(new)
            assert last is not None
            payloads.update(zip(range(last - count + 1, last + 1), new, strict=True))
            after = QueueBytes.load(path)
            # A batch that comes round to itself is written in several goes: not one step.
            if before.status.youngest_id >= 0 and len(after.live()) >= count:
                yield Written(before, after, payloads)


SHAPES = [(1, 200), (2, 150), (3, 400), (7, 300), (12, 2000)]


@pytest.mark.parametrize(("slots", "size"), SHAPES)
@pytest.mark.parametrize(
    "steps", [40, pytest.param(600, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_any_death_of_a_writer_leaves_a_queue_that_reads_and_goes_on(
    slots: int, size: int, steps: int, tmp_path: Path
) -> None:
    source, path = str(tmp_path / "source"), str(tmp_path / "queue")
    modes = set()
    for before, after, payloads in histories(source, slots, slots, size, steps):
        youngest = before.status.youngest_id
        oldest = youngest - len(before.live()) + 1
        for death in deaths(before, after):
            modes.add((before.status.append_mode, after.status.append_mode))
            kept = {s: payloads[s] for s in range(youngest - len(death.live) + 1, youngest + 1)}
            before.store(path)
            with reader_of(path) as from_before, reader_of(path, Position.END) as at_end:
                death.queue.store(path)
                # A new reader gets what is left; an older one knows what is not.
                assert read_all(path) == kept, death.at
                assert {m.seq: m.payload for m in from_before.read_many(100)} == kept, death.at
                books = from_before.statistics()
                assert books.lost == youngest + 1 - oldest - len(kept), death.at
                assert sum(loss.count for loss in books.losses) == books.lost
                # The next writer goes on.
                with writer_of(path, create="never") as writer:
                    seq = writer.write(b"next")
                assert seq == youngest + 1
                check_queue(path)
                now = read_all(path)
                assert now.pop(seq) == b"next", death.at
                assert now.items() <= kept.items(), death.at
                assert [m.payload for m in at_end.read_many(9)] == [b"next"], death.at
                assert from_before.statistics().restarts == at_end.statistics().restarts == 0
    if slots > 2:
        assert {(1, 1), (0, 0), (1, 0), (0, 1)} <= modes


def test_the_next_writer_evicts_no_more_than_it_needs(queue_path: str) -> None:
    with writer_of(queue_path, slots=5, size=1000) as writer:
        writer.write_many([b"%d" % number for number in range(5)])
    QueueBytes.load(queue_path).with_free_slot(0).store(queue_path)
    with writer_of(queue_path) as writer:
        writer.write(b"5")
    assert read_all(queue_path) == {n: b"%d" % n for n in range(1, 6)}


def test_a_slot_given_to_a_message_that_was_never_published_is_used_again(
    queue_path: str,
) -> None:
    """The slots are full: the new message has the slot of the oldest one, and no status."""
    with writer_of(queue_path, slots=4, size=1000) as writer:
        writer.write_many([b"%d" % number for number in range(9)])
        before = QueueBytes.load(queue_path)
        writer.write(b"never published")
    after = QueueBytes.load(queue_path)
    QueueBytes(before.stat[:56] + after.stat[56:], after.buf).store(queue_path)
    assert read_all(queue_path) == {6: b"6", 7: b"7", 8: b"8"}
    with writer_of(queue_path) as writer:
        assert writer.write(b"9") == 9
    check_queue(queue_path)
    assert read_all(queue_path) == {6: b"6", 7: b"7", 8: b"8", 9: b"9"}


@pytest.mark.parametrize("zeroed", [0, 56, 300, 856], ids=lambda n: f"{n} bytes")
@pytest.mark.parametrize("buffer", [0, 8192])
def test_a_queue_whose_creator_died_is_made_by_the_next_writer(
    zeroed: int, buffer: int, queue_path: str
) -> None:
    """Creation writes the status last, so there is none."""
    table = (bytes(56) + FREE_SLOT * 20)[:zeroed]
    QueueBytes(table, bytes(buffer)).store(queue_path)
    with writer_of(queue_path, slots=20, size=8192) as writer:
        assert writer.write(b"first") == 0
    check_queue(queue_path)
    assert read_all(queue_path) == {0: b"first"}


def test_a_queue_emptied_by_a_dying_creator_is_made_by_a_running_writer_s_successor(
    queue_path: str,
) -> None:
    with writer_of(queue_path, slots=20, size=8192) as writer:
        writer.write(b"first")
    before = QueueBytes.load(queue_path)
    QueueBytes(bytes(len(before.stat)), bytes(len(before.buf))).store(queue_path)
    with writer_of(queue_path, slots=3, size=500) as writer:
        assert writer.write(b"second") == 0
    assert len(QueueBytes.load(queue_path).stat) == 56 + 3 * SLOT_SIZE


def test_a_queue_whose_messages_were_all_freed_keeps_a_status_that_lrose_can_read(
    queue_path: str,
) -> None:
    """An oldest slot of -1 beside an id crashes LROSE's reader (docs/specs/lrose.md 6.1 item 1)."""
    with writer_of(queue_path, slots=5, size=1000) as writer:
        writer.write_many([b"0", b"1", b"2"])
    dead = QueueBytes.load(queue_path)
    for index in dead.live():
        dead = dead.with_free_slot(index)
    dead.store(queue_path)
    with reader_of(queue_path) as reader, writer_of(queue_path, create="never") as writer:
        status = QueueBytes.load(queue_path).status
        assert (status.youngest_id, status.youngest_slot, status.oldest_slot) == (2, 2, 3)
        assert reader.read(timeout=0) is None
        assert writer.write(b"3") == 3
        message = reader.read(timeout=0)
        assert message is not None
        assert (message.seq, message.payload) == (3, b"3")
    assert QueueBytes.load(queue_path).status.oldest_slot == 3
    check_queue(queue_path)
