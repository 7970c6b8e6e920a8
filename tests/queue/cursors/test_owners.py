"""Who owns a named position, and who gets a free one?"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest

from penstock.core.errors import CursorInUse, CursorTableFull, LockTimeout
from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import ENTRY_SIZE, Cursor
from support.cursor_tables import Start, in_child, memory_of


def test_a_cursor_in_use_is_refused_within_one_table(file: CursorFile) -> None:
    file.claim("a")
    for use in (file.claim, file.forget):
        with pytest.raises(CursorInUse) as caught:
            use("a")
        assert (caught.value.name, caught.value.pid) == ("a", os.getpid())
        assert caught.value.hint
    assert str(caught.value) == f"the cursor 'a' is in use by process {os.getpid()}"


def test_a_cursor_in_use_is_refused_between_tables_of_one_process(file: CursorFile) -> None:
    cursor = file.claim("a", seq=1)
    with CursorFile(file.path) as second:
        assert second.table.is_alive(cursor.index)
        for use in (second.claim, second.forget):
            with pytest.raises(CursorInUse):
                use("a")
        cursor.release()
        assert not second.table.is_alive(cursor.index)
        assert second.claim("a").seq == 1
        with pytest.raises(CursorInUse):
            file.claim("a")


def test_closing_one_table_does_not_free_the_cursors_of_another(file: CursorFile) -> None:
    cursor = file.claim("a")
    CursorFile(file.path).close()
    with CursorFile(file.path) as second:
        assert second.table.is_alive(cursor.index)


def test_a_cursor_in_use_is_refused_to_another_process(file: CursorFile, start: Start) -> None:
    other = start("hold", path=file.path, name="a", seq=10)
    other.hear()
    for use in (file.claim, file.forget):
        with pytest.raises(CursorInUse) as caught:
            use("a")
        assert caught.value.pid == other.process.pid
    [entry] = file.entries()
    assert (entry.pid, entry.alive) == (other.process.pid, True)
    other.say("release")
    other.hear()
    with file.claim("a") as cursor:
        assert cursor.seq == 10


def test_of_processes_that_claim_one_name_at_once_one_gets_it(
    file: CursorFile, start: Start
) -> None:
    others = [start("race", path=file.path, rounds=30) for _ in range(3)]
    for other in others:
        other.hear()
    for number in range(30):
        for other in others:
            other.say(f"name {number}")
        answers = [other.hear() for other in others]
        assert sum(answer["claimed"] for answer in answers) == 1
        [winner] = [o for o, a in zip(others, answers, strict=True) if a["claimed"]]
        losers = [a["pid"] for a in answers if not a["claimed"]]
        assert losers == [winner.process.pid] * 2
        for other in others:
            other.say("release")
        for other in others:
            other.hear()
        assert file.forget(f"name {number}")


def test_processes_that_claim_different_names_at_once_get_different_entries(
    path: str, start: Start
) -> None:
    with CursorFile(path, count=100) as file:
        others = [start("claim_many", path=path, prefix=f"{n}-", count=25) for n in range(4)]
        for other in others:
            other.hear()
        for other in others:
            other.say()
        taken = [other.hear()["entries"] for other in others]
        indexes = [index for entries in taken for index in entries.values()]
        assert sorted(indexes) == list(range(100))
        shown = {entry.name: entry.index for entry in file.entries()}
        assert shown == {name: index for entries in taken for name, index in entries.items()}
        with pytest.raises(CursorTableFull):
            file.claim(None)


def test_threads_that_claim_at_once_get_different_entries(path: str) -> None:
    with CursorFile(path, count=64) as file:
        claimed: list[Cursor] = []
        barrier = threading.Barrier(8)

        def claim(thread: int) -> None:
            barrier.wait()
            claimed.extend(file.claim(f"{thread}-{n}") for n in range(8))

        threads = [threading.Thread(target=claim, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(cursor.index for cursor in claimed) == list(range(64))
        assert {entry.name for entry in file.entries()} == {c.name for c in claimed}


def test_forgetting_makes_room(file: CursorFile) -> None:
    for number in range(8):
        file.claim(f"reader {number}").release()
    with pytest.raises(CursorTableFull) as caught:
        file.claim("one more")
    assert caught.value.count == 8
    assert caught.value.hint
    assert file.forget("reader 3")
    assert not file.forget("reader 3")
    assert file.find("reader 3") is None
    assert file.claim("one more", seq=5).seq == 5
    assert len(file.entries()) == 8


def test_a_full_table_still_gives_back_the_cursors_it_has(file: CursorFile) -> None:
    for number in range(8):
        file.claim(f"reader {number}", seq=number).release()
    assert file.claim("reader 6").seq == 6


def test_a_free_entry_that_is_still_locked_is_left_alone(file: CursorFile) -> None:
    # As while a passing reader is between the two steps of leaving.
    with CursorFile(file.path) as second:
        leaving = second.claim(None)
        with memory_of(file.path) as memory:
            memory[leaving.index * ENTRY_SIZE] = 0
        assert file.claim("a").index != leaving.index


def test_a_claim_waits_for_an_owner_that_is_about_to_unlock(file: CursorFile) -> None:
    with CursorFile(file.path) as second:
        leaving = second.claim("a", seq=3)
        with memory_of(file.path) as memory, memory.cast("I") as halves:
            halves[leaving.index * 32 + 1] = 0
        with pytest.raises(CursorInUse, match="another process") as caught:
            file.claim("a", timeout=0.05)
        assert caught.value.pid == 0
        timer = threading.Timer(0.1, leaving.release)
        timer.start()
        assert file.claim("a", timeout=10).seq == 3
        timer.join()


def test_an_entry_of_an_unknown_state_is_nobodys_to_take(path: str) -> None:
    with CursorFile(path, count=1) as file:
        with memory_of(path) as memory:
            memory[0] = 9
        assert file.entries() == []
        with pytest.raises(CursorTableFull):
            file.claim("a")


def test_a_process_that_stops_while_it_allocates_is_waited_for(
    file: CursorFile, start: Start
) -> None:
    other = start("hold_allocation", path=file.path)
    other.hear()
    for use in (file.claim, file.forget):
        began = time.monotonic()
        with pytest.raises(LockTimeout) as caught:
            use("a", timeout=0.2)
        assert 0.2 <= time.monotonic() - began < 5
        assert file.path in str(caught.value)
    assert file.entries() == []
    other.kill()
    assert file.claim("a", timeout=0).is_new


def test_a_thread_that_allocates_is_waited_for(file: CursorFile) -> None:
    with file.table._allocating(1), pytest.raises(LockTimeout):
        file.claim("a", timeout=0.05)
    assert file.claim("a", timeout=0).is_new


def test_an_owner_is_alone_however_often_a_cursor_changes_hands(path: str) -> None:
    with CursorFile(path, count=4) as file:
        file.claim("shared").release()

        def work() -> None:
            with CursorFile(path) as own:
                done = 0
                while done < 150:
                    with contextlib.suppress(CursorInUse), own.claim("shared") as cursor:
                        seq = cursor.seq
                        assert own.entries()[cursor.index].pid == os.getpid()
                        cursor.move(seq + 1)
                        done += 1
                    with own.claim(None, epoch=os.getpid()) as passing:
                        mine = [e for e in own.entries() if e.epoch == os.getpid()]
                        assert [e.index for e in mine] == [passing.index]

        codes: list[int] = []
        runners = [threading.Thread(target=lambda: codes.append(in_child(work))) for _ in range(3)]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
        assert codes == [0, 0, 0]
        [left] = file.entries()
        assert left[1:5] == ("shared", 0, 0, 450)
