"""Do children that outlive the owner of a named position keep it?"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import threading
from pathlib import Path

from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import ENTRY_SIZE, CursorTable
from support.cursor_tables import Start, descriptors, in_child


def test_a_forked_child_does_not_keep_its_parents_cursor(file: CursorFile, start: Start) -> None:
    other = start("hold_and_fork", path=file.path, name="a", seq=10)
    heard = other.hear()
    child = heard["child"]
    try:
        assert heard["refused"] == ["Closed"] * 6
        [entry] = file.entries()
        assert (entry.alive, entry.pid, entry.seq) == (True, other.process.pid, 10)
        other.kill()
        os.kill(child, 0)  # the child is still there
        [entry] = file.entries()
        assert not entry.alive
        assert file.claim("a").seq == 10
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_can_open_the_file_for_itself(file: CursorFile) -> None:
    cursor = file.claim("parent")

    def claim() -> None:
        cursor.release()  # as a `with` block would on the way out
        with CursorFile(file.path) as own:
            assert own.table.is_alive(cursor.index)
            own.claim("child", seq=5)

    assert in_child(claim) == 0
    assert cursor.seq == 0
    assert file.table.is_alive(cursor.index)
    assert file.claim("child").seq == 5


def test_a_program_that_was_started_does_not_keep_a_cursor(path: str) -> None:
    with CursorFile(path) as file:
        file.claim("a")
        sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with CursorFile(path) as file:
            assert not file.entries()[0].alive
    finally:
        sleeper.kill()
        sleeper.wait(10)


def test_forks_while_other_threads_open_tables_inherit_none_of_them(path: str) -> None:
    Path(path).touch()
    for _ in range(20):
        barrier = threading.Barrier(3)
        tables: list[CursorTable] = []
        children: list[int] = []

        def open_many(barrier: threading.Barrier, tables: list[CursorTable]) -> None:
            barrier.wait()
            tables.extend(CursorTable(path, memoryview(bytearray(ENTRY_SIZE))) for _ in range(40))

        threads = [threading.Thread(target=open_many, args=(barrier, tables)) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait()
        while any(thread.is_alive() for thread in threads):
            pid = os.fork()
            if pid == 0:
                os._exit(path in descriptors())
            children.append(pid)
        for table in tables:
            table.close()
        assert {os.waitpid(pid, 0)[1] for pid in children} <= {0}


def test_a_child_that_was_forked_while_a_table_closed_keeps_no_cursor(path: str) -> None:
    file = CursorFile(path)
    file.claim("a")
    inherited = os.dup(file.table._locks.fd)  # the same description, as in a child
    try:
        del file
        gc.collect()
        with CursorFile(path) as again:
            assert not again.entries()[0].alive
    finally:
        os.close(inherited)
