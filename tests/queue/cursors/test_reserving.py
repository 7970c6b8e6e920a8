"""What does it mean to reserve a named position for somebody else?"""

from __future__ import annotations

import mmap
import threading

import pytest

from penstock.core.errors import CursorTableFull
from penstock.queue.cursor_file import CursorFile
from support.cursor_tables import in_child


def test_reserving_makes_a_cursor_that_has_no_owner_and_leaves_others_alone(
    file: CursorFile,
) -> None:
    file.reserve("a", epoch=3, seq=30)
    entry = file.find("a")
    assert entry is not None
    assert (entry.pid, entry.epoch, entry.seq, entry.alive) == (0, 3, 30, False)
    with file.claim("a", epoch=9, seq=90) as cursor:
        assert (cursor.is_new, cursor.epoch, cursor.seq) == (False, 3, 30)
        file.reserve("a", epoch=9, seq=90)
        assert cursor.seq == 30


def test_reserving_in_a_full_table_is_refused(path: str) -> None:
    with CursorFile(path, count=1) as file:
        file.reserve("a")
        file.reserve("a")
        with pytest.raises(CursorTableFull):
            file.reserve("b")


def test_a_cursor_that_is_reserved_by_many_is_free_for_the_one_who_claims_it(path: str) -> None:
    with CursorFile(path, count=4):
        pass
    stop = mmap.mmap(-1, 1)

    def reserve() -> None:
        with CursorFile(path) as own:
            while not stop[0]:
                own.reserve("held", seq=7)

    codes: list[int] = []
    runners = [threading.Thread(target=lambda: codes.append(in_child(reserve))) for _ in range(2)]
    for runner in runners:
        runner.start()
    try:
        with CursorFile(path) as file:
            for _ in range(2000):
                file.claim("held", seq=7).release()
                file.forget("held")
    finally:
        stop[0] = 1
        for runner in runners:
            runner.join()
    assert codes == [0, 0]
