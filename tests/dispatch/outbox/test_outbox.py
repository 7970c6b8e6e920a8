"""What does an outbox do for the one who uses it?"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import Closed, InvalidOption, LockTimeout, MessageTooLarge, StorageError
from penstock.dispatch.outbox import Entry, Item, Outbox, Reason, store
from penstock.dispatch.outbox.log import OutboxLog
from penstock.dispatch.outbox.state import StateFile
from support.outbox_backlog import disk_of
from support.outbox_messages import message, messages, texts

# --- order --------------------------------------------------------------------------------------


def test_messages_of_all_classes_come_in_the_order_of_arrival(outbox: Outbox) -> None:
    outbox.append([message("a", 1), message("b", 6), message("c", 0)])
    outbox.append([message("d", 6)])
    assert texts(outbox.take(3)) == ["a", "b", "c"]
    assert texts(outbox.take(3)) == ["d"]
    assert outbox.take(3) == []


def test_an_item_is_what_was_stored(folder: Path) -> None:
    clock = ManualClock(5_000_000)
    entry = Entry(4, 77, 9, (1 << 64) - 1, 255, b"\x00raw")
    with Outbox(folder, clock=clock) as outbox:
        outbox.append([entry])
        expected = [Item(4, 0, 77, 9, 5, (1 << 64) - 1, 255, b"\x00raw")]
        assert outbox.take() == expected
    with Outbox(folder) as outbox:
        assert outbox.take() == expected
        assert outbox.last_arrival == 77


def test_by_priority_the_highest_class_comes_first(outbox: Outbox) -> None:
    outbox.append([message("low", 0), message("mid", 3), message("high", 6), message("mid 2", 3)])
    assert texts(outbox.take(10, order="priority")) == ["high", "mid", "mid 2", "low"]


def test_the_lowest_class_has_its_turn_however_many_higher_ones_wait(folder: Path) -> None:
    with Outbox(folder, starvation=3) as outbox:
        outbox.append([*messages(8, 6), message("low", 0), message("low 2", 0)])
        first = texts(outbox.take(2, order="priority"))
        rest = texts(outbox.take(20, order="priority"))
    assert first == ["0", "1"]
    assert rest == ["2", "low", "3", "4", "5", "low 2", "6", "7"]


def test_a_source_that_is_held_up_delays_no_other_even_from_behind_the_window(folder: Path) -> None:
    with Outbox(folder, window=4) as outbox:
        outbox.append(message(f"a{i}", source=1) for i in range(3000))
        outbox.append([message("b0", source=2), message("c0", source=3), message("b1", source=2)])
        assert texts(outbox.take(10, blocked={1})) == ["b0", "c0", "b1"]
        assert outbox.take(10, blocked={1}) == []
        outbox.append([message("b2", source=2)])
        assert texts(outbox.take(10, blocked={1})) == ["b2"]
        assert texts(outbox.take(5000)) == [f"a{i}" for i in range(3000)]


def test_messages_of_a_source_keep_their_order_while_others_are_held_up_in_turns(
    folder: Path,
) -> None:
    with Outbox(folder, window=2) as outbox:
        outbox.append(message(f"{i}", source=i % 3) for i in range(300))
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        turn = 0
        while outbox.waiting:
            blocked = {turn % 3, (turn // 7) % 3}
            for item in outbox.take(5, blocked=blocked):
                assert item.source not in blocked
                seen[item.source].append(int(item.raw))
            turn += 1
    assert seen == {source: list(range(source, 300, 3)) for source in range(3)}


def test_what_is_given_back_comes_again_in_its_place(outbox: Outbox) -> None:
    outbox.append(messages(6))
    items = outbox.take(5)
    outbox.settle([items[0], items[3]], Reason.ACKED)
    outbox.give_back([items[4], items[1], items[2]])
    assert texts(outbox.take()) == ["1", "2", "4", "5"]


def test_a_batch_has_a_limit_of_bytes_but_at_least_one_message(outbox: Outbox) -> None:
    outbox.append([message("x" * 10), message("y" * 10), message("z" * 50), message("w")])
    assert texts(outbox.take(9, 25)) == ["x" * 10, "y" * 10]
    assert texts(outbox.take(9, 25)) == ["z" * 50]
    assert texts(outbox.take(9, 25)) == ["w"]


# --- no room ------------------------------------------------------------------------------------


def test_when_it_is_full_the_oldest_of_the_lowest_class_makes_room(folder: Path) -> None:
    with Outbox(folder, max_messages=3) as outbox:
        outbox.append([message("mid", 3), message("low 1", 0), message("low 2", 0)])
        done = outbox.append([message("high", 6)])
        assert (done.stored, texts(done.evicted), done.refused) == (1, ["low 1"], [])
        refused = message("low 3", 0)
        assert outbox.append([refused]).refused == [refused]
        assert texts(outbox.take()) == ["mid", "low 2", "high"]
        assert outbox.books()[:4] == (4, 0, 0, 1)


def test_what_is_in_flight_makes_no_room(folder: Path) -> None:
    with Outbox(folder, max_messages=2) as outbox:
        outbox.append([message("low 1", 0), message("low 2", 0)])
        outbox.take(1)
        assert texts(outbox.append([message("high", 6)]).evicted) == ["low 2"]
        assert len(outbox.append([message("high 2", 6)]).refused) == 1


def test_nobody_is_evicted_for_a_message_that_does_not_fit_anyway(folder: Path) -> None:
    with Outbox(folder, max_bytes=100) as outbox:
        outbox.append([message("x" * 60, 1), message("y" * 30, 0)])
        done = outbox.append([message("z" * 101, 6)])
        assert (done.stored, done.evicted, len(done.refused)) == (0, [], 1)
        assert texts(outbox.append([message("z" * 90, 6)]).evicted) == ["y" * 30, "x" * 60]


def test_what_leaves_is_settled_only_when_its_letter_is_written(folder: Path) -> None:
    with Outbox(folder, max_messages=1) as outbox:
        outbox.append([message("low", 0, expires_at_ms=5)])
        evicted = outbox.append([message("high", 6, expires_at_ms=6)], settle=False).evicted
        assert texts(evicted) == ["low"]
        assert outbox.books().queued == 2
        expired = outbox.expire(10, settle=False)
        assert texts(expired) == ["high"]
        assert outbox.take() == []
        assert outbox.expire(10) == []
    with Outbox(folder, max_messages=1) as outbox:  # nobody wrote the letters
        assert texts(outbox.take()) == ["low", "high"]
        assert outbox.settle(evicted, Reason.QUEUE_FULL) == 1
        assert outbox.settle(expired, Reason.EXPIRED) == 1
        assert outbox.books() == (2, 0, 1, 1, 0, 0, 0, 0, 0, 0)


# --- time ---------------------------------------------------------------------------------------


def test_a_message_expires_when_it_is_due_and_not_before(outbox: Outbox) -> None:
    outbox.append([message("never"), message("b", expires_at_ms=20), message("a", expires_at_ms=9)])
    assert outbox.next_expiry_ms() == 9
    assert outbox.expire(8) == []
    assert texts(outbox.expire(9)) == ["a"]
    assert outbox.next_expiry_ms() == 20
    assert texts(outbox.expire(1000)) == ["b"]
    assert outbox.next_expiry_ms() is None
    assert texts(outbox.take()) == ["never"]


def test_what_is_in_flight_expires_only_when_it_is_given_back(outbox: Outbox) -> None:
    outbox.append([message("a", expires_at_ms=5)])
    items = outbox.take()
    assert outbox.expire(6) == []
    assert outbox.next_expiry_ms() is None
    outbox.give_back(items)
    assert outbox.next_expiry_ms() == 5
    assert texts(outbox.expire(6)) == ["a"]


@pytest.mark.parametrize("restarts", [False, True])
def test_messages_that_are_not_in_memory_expire_one_by_one(folder: Path, *, restarts: bool) -> None:
    outbox = Outbox(folder, window=8)
    outbox.append(message(str(i), expires_at_ms=10_000 - i) for i in range(5000))
    if restarts:
        outbox.close()
        outbox = Outbox(folder, window=8)
    with outbox:
        for now in range(5001, 5101):
            assert outbox.next_expiry_ms() == now
            assert texts(outbox.expire(now)) == [str(10_000 - now)]
        assert len(outbox.expire(20_000)) == 4900
        assert outbox.queued == 0


def test_what_expired_and_was_not_settled_expires_again_after_a_restart(folder: Path) -> None:
    with Outbox(folder) as outbox:
        outbox.append(message(str(i), expires_at_ms=10 if i < 5 else 1000) for i in range(2000))
        flying = outbox.take(1)
        assert len(outbox.expire(20, settle=False)) == 4  # and nobody writes the letters
    with Outbox(folder) as outbox:
        assert outbox.next_expiry_ms() == 10
        assert texts(outbox.expire(20))[:1] == texts(flying)
        assert outbox.next_expiry_ms() == 1000


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("reads", [0, 1, 2, 3])
def test_what_could_not_be_read_when_it_was_due_expires_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, reads: int, *, restarts: bool
) -> None:
    outbox = Outbox(folder, window=8)
    outbox.append(message(str(i), expires_at_ms=10) for i in range(4000))
    if restarts:
        outbox.close()
        outbox = Outbox(folder, window=8)
    calls = itertools.count()
    read = OutboxLog.read

    def fail(log: OutboxLog, which: str, at: int, count: int) -> Any:
        if next(calls) >= reads:
            raise StorageError("reading", "it", OSError(errno.EIO, "no answer"))
        return read(log, which, at, count)

    with outbox:
        with monkeypatch.context() as patch:
            patch.setattr(OutboxLog, "read", fail)
            with pytest.raises(StorageError):
                outbox.expire(20)
        assert outbox.next_expiry_ms() == 10
        assert texts(outbox.expire(20)) == [str(i) for i in range(4000)]
        assert outbox.next_expiry_ms() is None


# --- latest only --------------------------------------------------------------------------------


def test_a_newer_message_takes_the_place_of_one_that_waits(outbox: Outbox) -> None:
    outbox.append_latest(b"speed", message("1"))
    outbox.append_latest(b"gear", message("2"))
    assert outbox.append_latest(b"speed", message("3")).superseded == 1
    assert texts(outbox.take(1)) == ["2"]
    assert outbox.append_latest(b"gear", message("4")).superseded == 0  # that one is in flight
    assert texts(outbox.take()) == ["3", "4"]
    assert outbox.books().superseded == 1


def test_a_newer_message_takes_the_place_of_one_of_another_class(outbox: Outbox) -> None:
    outbox.append_latest(1, message("old", 3))
    assert outbox.append_latest(1, message("new", 5)).superseded == 1
    assert texts(outbox.take()) == ["new"]


def test_the_last_of_a_key_needs_no_room_of_its_own(folder: Path) -> None:
    with Outbox(folder, max_messages=1) as outbox:
        outbox.append_latest(1, message("old"))
        done = outbox.append_latest(1, message("new"))
        assert (done.stored, done.evicted, done.refused, done.superseded) == (1, [], [], 1)
        assert outbox.append_latest(2, message("other")).stored == 0


def test_so_many_of_a_key_wait_and_no_more_also_after_a_restart(folder: Path) -> None:
    with Outbox(folder) as outbox:
        done = [outbox.append_latest(1, message(str(n)), 3).superseded for n in range(5)]
        assert done == [0, 0, 0, 1, 1]
        assert texts(outbox.take(1)) == ["2"]
        assert outbox.append_latest(1, message("5"), 3).superseded == 0  # two wait
        assert outbox.append_latest(1, message("6"), 3).superseded == 1
    with Outbox(folder) as outbox:
        # The one that was in flight waits again.
        assert outbox.append_latest(1, message("7"), 3).superseded == 2
        assert texts(outbox.take()) == ["5", "6", "7"]


def test_messages_given_back_do_not_add_to_those_that_wait(outbox: Outbox) -> None:
    outbox.append_latest(1, message("0"))
    for n in range(1, 4):
        items = outbox.take()
        assert outbox.append_latest(1, message(f"{n}")).superseded == 0  # the other is in flight
        outbox.give_back(items)
        assert outbox.append_latest(1, message(f"{n}, newer")).superseded == 2
        assert outbox.waiting == 1
    assert texts(outbox.take()) == ["3, newer"]
    assert outbox.books().superseded == 6


def test_all_that_a_message_supersedes_makes_room(folder: Path) -> None:
    with Outbox(folder, max_messages=2) as outbox:
        outbox.append_latest(1, message("old"))
        items = outbox.take()
        outbox.append_latest(1, message("newer", 0))
        outbox.give_back(items)
        done = outbox.append_latest(1, message("newest", 6))
        assert (done.stored, done.evicted, done.refused, done.superseded) == (1, [], [], 2)
        assert texts(outbox.take()) == ["newest"]


def test_the_keys_outlive_a_restart(folder: Path) -> None:
    with Outbox(folder) as outbox:
        outbox.append_latest(1, message("old"))
    with Outbox(folder) as outbox:
        assert outbox.append_latest(1, message("new")).superseded == 1
        assert texts(outbox.take()) == ["new"]


# --- restart ------------------------------------------------------------------------------------


def test_everything_that_is_not_settled_comes_again_in_order(folder: Path) -> None:
    with Outbox(folder, window=8) as outbox:
        outbox.append([message(str(i), priority=i % 7) for i in range(3000)])
        items = outbox.take(2500)
        outbox.settle(items[1::2], Reason.ACKED)
        books = outbox.books()
    with Outbox(folder, window=8) as outbox:
        assert outbox.books() == books
        left = [*range(0, 2500, 2), *range(2500, 3000)]
        assert texts(outbox.take(5000)) == [str(i) for i in left]
        assert outbox.last_arrival == 3000
        outbox.append([message("next")])
        assert outbox.take()[0].arrival == 3001


def test_the_books_tell_what_became_of_every_message(folder: Path) -> None:
    with Outbox(folder) as outbox:
        outbox.append(messages(20))
        items = outbox.take(20)
        for i, reason in enumerate(Reason):
            assert outbox.settle(items[2 * i : 2 * i + 2], reason) == 2
        assert outbox.settle(items[:4], Reason.ADMIN) == 0  # they are settled already
        books = outbox.books()
        assert books == (20, 2, 2, 2, 2, 2, 2, 2, 2, 4)
        assert books.settled == 16
    with Outbox(folder) as outbox:
        assert outbox.books() == books


def test_what_waits_can_be_looked_at_and_dropped(folder: Path) -> None:
    with Outbox(folder, window=2) as outbox:
        outbox.append(messages(10))
        some, following = outbox.look(limit=4)
        assert texts(some) == ["0", "1", "2", "3"]
        assert following is not None
        more, end = outbox.look(following, 100)
        assert (len(more), end) == (6, None)
        assert outbox.settle([*some[1:], *more[:2]], Reason.ADMIN) == 5
        assert texts(outbox.take()) == ["0", "6", "7", "8", "9"]


# --- refusals -----------------------------------------------------------------------------------


def test_an_outbox_has_one_owner(outbox: Outbox, folder: Path) -> None:
    code = (
        f"from penstock.dispatch.outbox import Outbox; Outbox({str(folder)!r}, lock_timeout=0.05)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "LockTimeout" in done.stderr
    with pytest.raises(LockTimeout):
        Outbox(folder, lock_timeout=0.05)
    assert outbox.queued == 0


def test_a_closed_outbox_says_so(folder: Path) -> None:
    outbox = Outbox(folder)
    outbox.close()
    outbox.close()
    outbox.tend()
    for call in (outbox.take, outbox.next_expiry_ms):
        with pytest.raises(Closed):
            call()
    with pytest.raises(Closed):
        outbox.append(messages(1))


def test_what_cannot_be_stored_is_refused_and_nothing_of_the_batch_is_stored(folder: Path) -> None:
    with Outbox(folder, segment=1 << 16) as outbox:
        with pytest.raises(MessageTooLarge):
            outbox.append([message("fits"), message("x" * (1 << 16))])
        with pytest.raises(ValueError, match="class 7"):
            outbox.append([message("fits"), message("x", 7)])
        with pytest.raises(ValueError, match="does not fit"):
            outbox.append([message("fits"), message("x", source=-1)])
        assert outbox.books().stored == 0
    with pytest.raises(InvalidOption):
        Outbox(folder, max_messages=0)


def test_a_full_disk_loses_nothing_that_was_stored(folder: Path) -> None:
    entries = [message(f"{i:04}" + "x" * 1000) for i in range(100)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Outbox(folder, segment=1 << 16) as outbox:
        outbox.append(entries[:10])
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))  # no new segment can be made
        try:
            with pytest.raises(StorageError):
                outbox.append(entries[10:])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        stored = outbox.books().stored
        assert 10 < stored < 100
        outbox.append(entries[stored:])
        assert texts(outbox.take(200)) == [entry.raw.decode() for entry in entries]


def test_nobody_is_evicted_for_a_message_that_the_disk_has_no_room_for(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Outbox(folder, max_messages=100, segment=1 << 16) as outbox:
        outbox.append(messages(100, priority=0))
        high = message("x" * 60_000, 6)  # it needs another segment
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
        try:
            with pytest.raises(StorageError):
                outbox.append([high])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert outbox.books() == (100, 0, 0, 0, 0, 0, 0, 0, 0, 100)
        assert texts(outbox.append([high]).evicted) == ["0"]
        assert len(outbox.take(200)) == 100


# --- threads ------------------------------------------------------------------------------------


def test_many_threads_can_share_it(folder: Path) -> None:
    count, batches = 4, 50
    with Outbox(folder, window=64, sync=0.01) as outbox:
        seen: list[str] = []

        def put(number: int) -> None:
            for i in range(batches):
                entries = [message(f"{number} {i} {k}", number % 3, number, 1) for k in range(10)]
                outbox.append(entries)

        def get() -> None:
            while len(seen) < count * batches * 10:
                items = outbox.take(7)
                outbox.give_back(items[5:])
                outbox.settle(items[:5], Reason.ACKED)
                seen.extend(texts(items[:5]))
                if not items:
                    seen.extend(texts(outbox.expire(1)))

        threads = [threading.Thread(target=put, args=(number,)) for number in range(count)]
        threads += [threading.Thread(target=get) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        books = outbox.books()
    assert len(set(seen)) == len(seen) == books.stored == books.acked + books.expired
    assert books.queued == 0


def test_the_files_of_a_log_at_rest_are_closed_and_opened_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_IDLE", 0.0)
    with Outbox(folder, sync=3600.0) as outbox:
        idle = _open_files()
        outbox.append(messages(3))
        assert _open_files() > idle
        outbox.tend()
        assert _open_files() == idle  # also while something is queued
        outbox.settle(outbox.take(), Reason.ACKED)
        outbox.tend()
        assert _open_files() == idle
        outbox.append(messages(2, first=3))
        assert [item.seq for item in outbox.take()] == [3, 4]
        assert outbox.books() == (5, 3, 0, 0, 0, 0, 0, 0, 0, 2)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("step", ["sync", "free"])
def test_the_notes_are_saved_once_the_disk_answers_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("syncing", "it", OSError(errno.EIO, "no answer"))

    with Outbox(folder, sync=3600.0) as outbox:
        outbox.append(messages(10))
        outbox.settle(outbox.take(10)[5:], Reason.ACKED)
        with monkeypatch.context() as patch:
            patch.setattr(OutboxLog, step, fail)
            with pytest.raises(StorageError):
                outbox.tend()
        assert not (folder / "settled").exists()
        outbox.tend()
        assert (folder / "settled").exists()


def test_a_state_that_could_not_be_synced_is_synced_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    state = StateFile(folder / "state")
    folder.mkdir()
    state.open(sync=False)
    state.keep()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageError):
        state.sync()
    monkeypatch.setattr(os, "fdatasync", synced.append)
    state.sync()
    assert len(synced) == 1
    state.sync()
    assert len(synced) == 1
    state.close()


def test_disk_is_given_back_while_messages_pass(folder: Path) -> None:
    with Outbox(folder, segment=1 << 20, sync=3600.0) as outbox:
        for _ in range(20):
            outbox.append([message("x" * 10_000) for _ in range(50)])
            outbox.settle(outbox.take(50), Reason.ACKED)
            outbox.tend()
        assert disk_of(folder) < 4 << 20


def test_messages_of_any_size_pass_through_a_small_window(folder: Path) -> None:
    sizes = [1, 500_000, 3, 999_999, 0, 250_000] * 20
    with Outbox(folder, segment=1 << 20, window_bytes=100_000) as outbox:
        outbox.append(message("x" * size) for size in sizes)
        assert outbox.size == sum(sizes)
        found = []
        while items := outbox.take(7, 1_000_000):
            found += [len(item.raw) for item in items]
            outbox.settle(items, Reason.ACKED)
        assert found == sizes
        assert outbox.size == 0
