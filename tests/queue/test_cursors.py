"""Named positions: what they keep, who owns them, and what a crash leaves.

Run as a program it is the other process of these tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from penstock.core.errors import (
    Closed,
    CursorInUse,
    CursorTableFull,
    DamagedQueue,
    InvalidOption,
    LockTimeout,
    NotFound,
    PositionError,
    StorageError,
    Unsupported,
)
from penstock.queue import cursor_entries, cursor_file, cursors
from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import ENTRY_SIZE, LIVE_BASE, Cursor, CursorTable
from support.processes import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Start = Callable[..., "Other"]

HEADER = 4096
LARGEST = 2**64 - 1


class Other(Peer):
    """A process that runs one command of this file."""

    def __init__(self, command: str, **arguments: object) -> None:
        tests = str(Path(__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, __file__, command, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": tests, "PYTHONWARNINGS": "error"},
        )

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start other processes, none of which outlives the test."""
    with contextlib.ExitStack() as running:

        def start(command: str, **arguments: object) -> Other:
            other = Other(command, **arguments)
            running.callback(other.end)
            return other

        yield start


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "cursors")


@pytest.fixture
def file(path: str) -> Iterator[CursorFile]:
    with CursorFile(path, count=8) as file:
        yield file


@contextlib.contextmanager
def memory_of(path: str) -> Iterator[memoryview]:
    """The table's bytes, as native code would have them."""
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        view = memoryview(mapped)
        table = view[HEADER:]
        try:
            yield table
        finally:
            table.release()
            view.release()


def names(file: CursorFile | CursorTable) -> list[str]:
    return [entry.name for entry in file.entries()]


# --- what a cursor keeps --------------------------------------------------------------------


def test_a_new_cursor_starts_where_it_is_told(file: CursorFile) -> None:
    before = time.time_ns()
    cursor = file.claim("spark", epoch=7, seq=100)
    assert (cursor.name, cursor.is_new, cursor.epoch, cursor.seq) == ("spark", True, 7, 100)
    [entry] = file.entries()
    assert entry == file.find("spark")
    assert entry[:5] == (cursor.index, "spark", os.getpid(), 7, 100)
    assert entry.alive
    assert before <= entry.updated_ns <= time.time_ns()


def test_a_named_cursor_keeps_its_position_and_stays_when_released(path: str) -> None:
    with CursorFile(path) as file, file.claim("spark", epoch=7, seq=100) as cursor:
        cursor.move(250)
    with CursorFile(path) as file:
        [left] = file.entries()
        assert (left.name, left.pid, left.epoch, left.seq, left.alive) == (
            "spark",
            0,
            7,
            250,
            False,
        )
        again = file.claim("spark", epoch=9, seq=9)
        assert (again.is_new, again.epoch, again.seq) == (False, 7, 250)
        assert again.index == left.index


def test_a_passing_reader_is_seen_while_it_is_there(file: CursorFile) -> None:
    with file.claim(None, epoch=1, seq=5) as cursor:
        [entry] = file.entries()
        assert (entry.name, entry.seq, entry.alive, cursor.name) == ("", 5, True, "")
    assert file.entries() == []


def test_moving_may_go_anywhere_that_64_bits_go(file: CursorFile) -> None:
    cursor = file.claim("a", epoch=3, seq=LARGEST)
    assert cursor.seq == LARGEST
    cursor.move(0)
    assert (cursor.epoch, cursor.seq) == (3, 0)
    cursor.move(4, epoch=LARGEST)
    assert (cursor.epoch, cursor.seq) == (LARGEST, 4)
    for seq, epoch in ((-1, None), (LARGEST + 1, None), (0, -1), (0, LARGEST + 1)):
        with pytest.raises(PositionError):
            cursor.move(seq, epoch)
        assert (cursor.epoch, cursor.seq) == (LARGEST, 4)
    with pytest.raises(PositionError):
        file.claim("b", seq=-1)
    assert names(file) == ["a"]


def test_moving_from_python_updates_the_time(file: CursorFile) -> None:
    cursor = file.claim("a")
    before = time.time_ns()
    cursor.move(1)
    [entry] = file.entries()
    assert entry.updated_ns >= before


def test_native_code_moves_a_cursor_by_its_offset(file: CursorFile) -> None:
    file.claim("first")
    cursor = file.claim("second", seq=1)
    assert cursor.offset == cursor.index * 128 + 16
    with memory_of(file.path) as memory, memory.cast("Q") as words:
        words[cursor.offset // 8] = 77
    assert cursor.seq == 77


def test_the_bytes_of_an_entry_are_as_documented(file: CursorFile) -> None:
    file.claim("first")
    cursor = file.claim("zweite Düse", epoch=5, seq=6)
    [_, entry] = file.entries()
    raw = Path(file.path).read_bytes()
    assert raw[:16] == struct.pack("<8sII", b"PNCURSOR", 1, 8)
    assert not raw[16:HEADER].strip(b"\0")
    assert len(raw) == HEADER + 8 * ENTRY_SIZE
    at = HEADER + cursor.index * ENTRY_SIZE
    assert raw[at : at + 128] == struct.pack(
        "<IIQQq96s", 1, os.getpid(), 5, 6, entry.updated_ns, "zweite Düse".encode()
    )


def test_released_cursors_are_closed_and_releasing_again_does_nothing(file: CursorFile) -> None:
    cursor = file.claim("a")
    cursor.release()
    other = file.claim("a")
    cursor.release()
    assert other.seq == 0
    for use in (lambda: cursor.move(1), lambda: cursor.seq, lambda: cursor.epoch):
        with pytest.raises(Closed):
            use()


def test_closing_a_table_releases_its_cursors(path: str) -> None:
    file = CursorFile(path)
    named, passing = file.claim("a"), file.claim(None)
    file.close()
    file.close()
    named.release()
    for use in (
        lambda: named.move(1),
        lambda: passing.seq,
        lambda: file.claim("a"),
        lambda: file.find("a"),
        lambda: file.forget("a"),
        lambda: file.table.is_alive(0),
        file.entries,
        file.sync,
    ):
        with pytest.raises(Closed):
            use()
    with CursorFile(path) as again:
        assert [(e.name, e.pid, e.alive) for e in again.entries()] == [("a", 0, False)]


def test_a_table_that_is_dropped_keeps_no_cursor_in_use(path: str) -> None:
    file = CursorFile(path)
    file.claim("a", seq=3)
    del file
    gc.collect()
    with CursorFile(path) as again:
        assert again.claim("a").seq == 3


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 96, "é" * 48, "\udc80"])
def test_a_name_that_does_not_fit_is_refused(file: CursorFile, name: str) -> None:
    for use in (file.claim, file.find, file.forget):
        with pytest.raises(InvalidOption) as caught:
            use(name)
        assert (caught.value.option, caught.value.value) == ("cursor", name)
    assert file.entries() == []


def test_names_that_begin_alike_are_different(file: CursorFile) -> None:
    for name in ("x" * 95, "x" * 94, "x", "é" * 47):
        assert file.claim(name).is_new
    assert names(file) == ["x" * 95, "x" * 94, "x", "é" * 47]


def test_a_name_that_is_no_text_is_shown_all_the_same(file: CursorFile) -> None:
    cursor = file.claim("abc")
    with memory_of(file.path) as memory:
        at = cursor.index * ENTRY_SIZE + 32
        memory[at : at + 96] = b"a\xff" + b"z" * 94
    assert names(file) == ["a�" + "z" * 94]


# --- who owns it ----------------------------------------------------------------------------


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


# --- crashes --------------------------------------------------------------------------------


def test_killing_its_owner_frees_a_cursor_and_keeps_its_position(
    file: CursorFile, start: Start
) -> None:
    other = start("hold", path=file.path, name="a", epoch=4, seq=10)
    other.hear()
    other.say("move 25")
    other.hear()
    other.kill()
    [entry] = file.entries()
    assert (entry.pid, entry.alive, entry.epoch, entry.seq) == (other.process.pid, False, 4, 25)
    cursor = file.claim("a", epoch=9)
    assert (cursor.is_new, cursor.epoch, cursor.seq) == (False, 4, 25)
    assert file.entries()[0].pid == os.getpid()


def test_the_place_of_a_passing_reader_that_was_killed_is_taken_again(
    path: str, start: Start
) -> None:
    with CursorFile(path, count=2) as file:
        others = [start("hold", path=path, name=None, seq=n) for n in range(2)]
        for other in others:
            other.hear()
        assert [entry.alive for entry in file.entries()] == [True, True]
        with pytest.raises(CursorTableFull):
            file.claim("a")
        others[1].kill()
        assert [entry.pid for entry in file.entries()] == [others[0].process.pid]
        assert file.claim("a", seq=7).seq == 7
        assert sorted(names(file)) == ["", "a"]


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


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(str(link.readlink()))
    return found


def in_child(work: Callable[[], object]) -> int:
    """Do it in a forked process; return how that ended, as of `os.waitstatus_to_exitcode`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


MODULES = {module.__file__ for module in (cursors, cursor_entries, cursor_file)}


def at_every_line(look: Callable[[], object], work: Callable[[], object]) -> None:
    """Do the work, and look before each line of the modules that it comes to."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in MODULES:
            return None
        if event == "line":
            look()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do it in a process that is killed at the `step`th line of the modules, if it comes so far."""

    def doomed() -> None:
        lines = itertools.count(1)

        def look() -> None:
            if next(lines) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        at_every_line(look, work)

    code = in_child(doomed)
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize("name", ["a", None])
def test_nothing_is_stored_once_a_cursor_can_be_had_by_others(
    file: CursorFile, name: str | None
) -> None:
    cursor = file.claim(name, seq=5)
    with CursorFile(file.path) as second, memory_of(file.path) as memory:
        seen: list[bytes] = []

        def look() -> None:
            if not second.table.is_alive(cursor.index):
                seen.append(bytes(memory))

        at_every_line(look, cursor.release)
        assert seen
        assert set(seen) == {bytes(memory)}


def test_an_entry_that_changes_hands_is_never_shown_as_a_mixture(path: str) -> None:
    with (
        CursorFile(path, count=1) as file,
        CursorFile(path) as second,
        memory_of(path) as memory,
    ):
        file.claim(None, epoch=1, seq=1).release()
        memory[0] = 2  # as of a passing reader that was killed
        seen: list[tuple[object, ...]] = []
        at_every_line(
            lambda: seen.extend((e.name, e.pid, e.epoch, e.seq, e.alive) for e in second.entries()),
            lambda: file.claim("a", epoch=7, seq=70),
        )
        assert seen[-1] == ("a", os.getpid(), 7, 70, True)
        assert set(seen) <= {seen[-1], ("", os.getpid(), 1, 1, True)}


def test_a_kill_at_any_line_leaves_a_usable_table(path: str) -> None:
    def life() -> None:
        file = CursorFile(path, count=2)
        kept, passing = file.claim("kept", epoch=2, seq=20), file.claim(None, epoch=3, seq=30)
        kept.move(21)
        kept.move(1, epoch=5)
        passing.release()
        kept.release()
        file.forget("kept")
        file.close()

    # Never the new epoch with the old position: that would be taken for a place in the new one.
    places = [(2, 20), (2, 21), (2, 1), (5, 1)]
    step = 1
    while killed_at(step, life):
        step += 1
        if not Path(path).exists():
            continue
        with CursorFile(path) as file:
            entries = file.entries()
            assert [(e.name, e.alive) for e in entries] in ([], [("kept", False)])
            assert all((entry.epoch, entry.seq) in places for entry in entries)
            with file.claim("kept", epoch=2, seq=20, timeout=0) as cursor, file.claim(None):
                assert cursor.is_new == (not entries)
            file.forget("kept")
            # What the next life takes was somebody else's, and nothing of that may show through.
            with file.claim("before", epoch=9, seq=90), file.claim("too", epoch=9, seq=90):
                pass
            file.forget("before")
            file.forget("too")
            if step % 2:
                file.claim("kept", epoch=2, seq=20).release()
    assert step > 100
    with CursorFile(path) as file:
        assert file.entries() == []


def test_a_kill_at_any_line_of_reserving_leaves_all_of_it_or_nothing(path: str) -> None:
    def life() -> None:
        with CursorFile(path, count=1) as file:
            file.reserve("kept", epoch=2, seq=20)

    step = 1
    while killed_at(step, life):
        step += 1
        if not Path(path).exists():
            continue
        with CursorFile(path) as file:
            entries = file.entries()
            places = [(e.name, e.pid, e.epoch, e.seq, e.alive) for e in entries]
            assert places in ([], [("kept", 0, 2, 20, False)])
            # What the next life takes was somebody else's, and nothing of that may show through.
            file.forget("kept")
            file.claim("before", epoch=9, seq=90).release()
            file.forget("before")
    assert step > 30


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


def test_kills_at_any_moment_leave_a_usable_table(path: str) -> None:
    chance = random.Random(7)
    with CursorFile(path, count=6) as file:
        for _ in range(40):
            pids = []
            for worker in range(3):
                pid = os.fork()
                if pid == 0:
                    churn(path, worker)
                pids.append(pid)
            time.sleep(chance.uniform(0.001, 0.03))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
            for entry in file.entries():
                assert not entry.alive
                assert entry.name == f"worker {entry.epoch}"
            with contextlib.ExitStack() as held:
                indexes = {
                    held.enter_context(file.claim(f"worker {n}", epoch=n, timeout=0)).index
                    for n in range(3)
                }
                indexes |= {held.enter_context(file.claim(None, timeout=0)).index for _ in range(3)}
                assert len(indexes) == 6


def churn(path: str, worker: int) -> None:
    """Claim, move, release and forget, until killed."""
    try:
        file = CursorFile(path)
        while True:
            with file.claim(f"worker {worker}", epoch=worker) as named, file.claim(None):
                named.move(named.seq + 1)
            file.forget(f"worker {worker}")
    finally:
        os._exit(3)


# --- a table in memory of one's own -----------------------------------------------------------


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[tuple[str, memoryview]]:
    path = tmp_path / "queue"
    path.write_bytes(bytes(4096))
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        view = memoryview(mapped)
        yield str(path), view
        view.release()


def test_a_table_may_be_any_part_of_any_file(mapped: tuple[str, memoryview]) -> None:
    path, memory = mapped
    with memory[256:1024] as part, CursorTable(path, part) as table:
        index = table.claim("a", seq=9).index
        assert memory.cast("Q")[(256 + index * 128 + 16) // 8] == 9
        assert not any(memory[1024:])
        with pytest.raises(IndexError):
            table.is_alive(6)
        with pytest.raises(IndexError):
            table.is_alive(-1)


def test_two_tables_in_one_file_have_locks_of_their_own(mapped: tuple[str, memoryview]) -> None:
    path, memory = mapped
    with (
        memory[:1024] as first,
        memory[1024:2048] as second,
        CursorTable(path, first) as one,
        CursorTable(path, second, live_base=LIVE_BASE + 1024) as two,
    ):
        a, b = one.claim("a"), two.claim("a")
        assert a.index == b.index
        a.release()
        assert two.is_alive(b.index)
        assert not one.is_alive(a.index)


def test_a_descriptor_is_reopened_and_stays_the_callers(mapped: tuple[str, memoryview]) -> None:
    path, memory = mapped
    fd = os.open(path, os.O_RDWR)
    Path(path).unlink()
    with memory[:1024] as part, CursorTable(fd, part) as table, CursorTable(fd, part) as second:
        os.fstat(fd)
        os.close(fd)
        cursor = table.claim("a")
        assert second.is_alive(cursor.index)
        with pytest.raises(CursorInUse):
            second.claim("a")


def test_the_owner_locks_the_byte_that_is_documented(file: CursorFile) -> None:
    file.claim("first")
    cursor = file.claim("a")
    with Path(file.path).open("r+b") as other:
        for byte, is_free in ((LIVE_BASE + cursor.index, False), (LIVE_BASE - 1, True)):
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            found = fcntl.fcntl(other, fcntl.F_OFD_GETLK, lock)
            assert (struct.unpack("hhqqi4x", found)[0] == fcntl.F_UNLCK) == is_free


@pytest.mark.parametrize(
    "memory",
    [
        memoryview(bytes(128)),
        memoryview(bytearray(127)),
        memoryview(bytearray(0)),
        memoryview(bytearray(137))[1:129],
    ],
    ids=["read-only", "part of an entry", "empty", "not aligned"],
)
def test_memory_that_cannot_be_a_table_is_refused(file: CursorFile, memory: memoryview) -> None:
    with pytest.raises(InvalidOption) as caught:
        CursorTable(file.path, memory)
    assert caught.value.option == "memory"


@pytest.mark.parametrize("live_base", [0, -5, 2**63 - 1])
def test_locks_that_no_file_can_have_are_refused(file: CursorFile, live_base: int) -> None:
    with pytest.raises(InvalidOption, match="live_base"):
        CursorTable(file.path, memoryview(bytearray(256)), live_base=live_base)


def test_a_table_needs_its_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        CursorTable(str(tmp_path / "none"), memoryview(bytearray(128)))
    with pytest.raises(NotFound):
        CursorTable(999_999, memoryview(bytearray(128)))


# --- the file ---------------------------------------------------------------------------------


def test_a_file_is_made_with_its_folders_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "cursors"
    with CursorFile(str(path), count=3) as file:
        for number in range(3):
            file.claim(f"{number}")
    assert path.stat().st_size == HEADER + 3 * ENTRY_SIZE
    assert path.stat().st_mode & 0o600 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_exists_keeps_its_own_count(path: str) -> None:
    CursorFile(path, count=2).close()
    with CursorFile(path, count=100) as file:
        file.claim("a")
        file.claim("b")
        with pytest.raises(CursorTableFull):
            file.claim("c")


@pytest.mark.parametrize("count", [0, -1, 65537])
def test_a_count_out_of_range_is_refused_and_nothing_is_made(path: str, count: int) -> None:
    with pytest.raises(InvalidOption, match="count"):
        CursorFile(path, count=count)
    assert not Path(path).exists()


def test_processes_that_make_the_file_at_once_share_one(path: str) -> None:
    for _ in range(20):
        pids = []
        for worker in range(4):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    CursorFile(path, count=4).claim(f"{worker}")
                    code = 0
                finally:
                    os._exit(code)
            pids.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
        with CursorFile(path) as file:
            assert sorted(names(file)) == ["0", "1", "2", "3"]
        assert [p.name for p in Path(path).parent.iterdir()] == ["cursors"]
        Path(path).unlink()


def patched(path: str, offset: int, data: bytes) -> None:
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize(
    ("offset", "data", "field"),
    [
        (0, b"PNCURSOS", "magic"),
        (8, struct.pack("<I", 0), "version"),
        (12, struct.pack("<I", 0), "count"),
        (12, struct.pack("<I", 2**32 - 1), "count"),
        (12, struct.pack("<I", 9), "size"),
        (12, struct.pack("<I", 7), "size"),
    ],
)
def test_a_damaged_header_is_named(path: str, offset: int, data: bytes, field: str) -> None:
    CursorFile(path, count=8).close()
    patched(path, offset, data)
    before = Path(path).read_bytes()
    with pytest.raises(DamagedQueue) as caught:
        CursorFile(path)
    assert (caught.value.path, caught.value.field) == (path, field)
    assert caught.value.hint
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("size", [0, 1, 15, 16, 4095, 4096, HEADER + 8 * ENTRY_SIZE - 1])
def test_a_truncated_file_is_damaged(path: str, size: int) -> None:
    CursorFile(path, count=8).close()
    os.truncate(path, size)
    with pytest.raises(DamagedQueue) as caught:
        CursorFile(path)
    assert (caught.value.field, caught.value.offset) == ("size", size)


@settings(max_examples=200)
@given(header=st.binary(min_size=16, max_size=16), tail=st.integers(0, 300))
def test_fuzz_of_the_header_ends_in_a_clear_error(header: bytes, tail: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cursors"
        path.write_bytes(header.ljust(HEADER, b"\0") + bytes(tail))
        with pytest.raises((DamagedQueue, Unsupported)):
            CursorFile(str(path))


def test_a_file_of_a_newer_version_is_refused_and_says_so(path: str) -> None:
    CursorFile(path, count=8).close()
    patched(path, 8, struct.pack("<I", 2))
    with pytest.raises(Unsupported, match="version 2") as caught:
        CursorFile(path)
    assert caught.value.hint


def test_what_the_system_refuses_is_said(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        CursorFile(str(tmp_path))
    dangling = tmp_path / "link"
    dangling.symlink_to("/nowhere/at/all")
    with pytest.raises(StorageError):
        CursorFile(str(dangling))
    assert list(tmp_path.iterdir()) == [dangling]


def test_a_refused_file_leaves_no_descriptor_open(path: str) -> None:
    Path(path).write_bytes(b"no cursors")
    before = len(descriptors())
    for _ in range(20):
        with pytest.raises(DamagedQueue):
            CursorFile(path)
    gc.collect()
    assert len(descriptors()) <= before


def test_a_closed_file_leaves_no_descriptor_open(path: str) -> None:
    CursorFile(path).close()
    before = len(descriptors())
    for _ in range(20):
        with CursorFile(path) as file:
            file.claim("a")
    assert len(descriptors()) == before


def test_sync_writes_the_file_of_the_positions(
    file: CursorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the disk holds shows only after a power failure: see that the kernel is asked to.
    synced: list[str] = []
    fdatasync = os.fdatasync

    def spy(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", spy)
    file.claim("a", seq=5).move(6)
    file.sync()
    assert synced == [file.path]


def test_a_device_that_refuses_to_sync_is_told(
    file: CursorFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        file.sync()


# --- any history ------------------------------------------------------------------------------

some_names = st.sampled_from(["a", "b", "c", "é" * 47, "a b/c"])
numbers = st.integers(0, LARGEST)
COUNT = 4
TABLES = 2


class CursorMachine(RuleBasedStateMachine):
    """Two tables of one file, beside a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="penstock-cursors-")
        self.path = str(Path(self.folder.name) / "cursors")
        self.files = [CursorFile(self.path, count=COUNT) for _ in range(TABLES)]
        #: Where each named cursor stands, as (epoch, seq).
        self.named: dict[str, tuple[int, int]] = {}
        self.passing: dict[Cursor, tuple[int, int]] = {}
        #: Who owns what: a cursor, and the table that it is of.
        self.owned: dict[Cursor, int] = {}

    def teardown(self) -> None:
        for file in self.files:
            file.close()
        self.folder.cleanup()

    def is_full(self) -> bool:
        return len(self.named) + len(self.passing) == COUNT

    def owner_of(self, name: str) -> Cursor | None:
        return next((cursor for cursor in self.owned if cursor.name == name), None)

    @rule(table=st.integers(0, TABLES - 1), name=some_names, epoch=numbers, seq=numbers)
    def claim(self, table: int, name: str, epoch: int, seq: int) -> None:
        if self.owner_of(name):
            with pytest.raises(CursorInUse):
                self.files[table].claim(name, epoch=epoch, seq=seq)
        elif name not in self.named and self.is_full():
            with pytest.raises(CursorTableFull):
                self.files[table].claim(name, epoch=epoch, seq=seq)
        else:
            cursor = self.files[table].claim(name, epoch=epoch, seq=seq)
            assert cursor.is_new == (name not in self.named)
            self.named.setdefault(name, (epoch, seq))
            assert (cursor.epoch, cursor.seq) == self.named[name]
            self.owned[cursor] = table

    @rule(table=st.integers(0, TABLES - 1), epoch=numbers, seq=numbers)
    def pass_by(self, table: int, epoch: int, seq: int) -> None:
        if self.is_full():
            with pytest.raises(CursorTableFull):
                self.files[table].claim(None, epoch=epoch, seq=seq)
        else:
            cursor = self.files[table].claim(None, epoch=epoch, seq=seq)
            assert cursor.is_new
            self.owned[cursor] = table
            self.passing[cursor] = (epoch, seq)

    @rule(data=st.data(), seq=numbers, epoch=st.none() | numbers)
    def move(self, data: st.DataObject, seq: int, epoch: int | None) -> None:
        if self.owned:
            cursor = data.draw(st.sampled_from(list(self.owned)))
            kept = cursor.epoch
            cursor.move(seq, epoch)
            at = (kept if epoch is None else epoch, seq)
            if cursor.name:
                self.named[cursor.name] = at
            else:
                self.passing[cursor] = at

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            cursor = data.draw(st.sampled_from(list(self.owned)))
            cursor.release()
            del self.owned[cursor]
            self.passing.pop(cursor, None)

    @rule(table=st.integers(0, TABLES - 1), name=some_names)
    def forget(self, table: int, name: str) -> None:
        if self.owner_of(name):
            with pytest.raises(CursorInUse):
                self.files[table].forget(name)
        else:
            assert self.files[table].forget(name) == (name in self.named)
            self.named.pop(name, None)

    @rule(table=st.integers(0, TABLES - 1))
    def open_again(self, table: int) -> None:
        self.files[table].close()
        for cursor in [cursor for cursor, of in self.owned.items() if of == table]:
            del self.owned[cursor]
            self.passing.pop(cursor, None)
        self.files[table] = CursorFile(self.path)

    @invariant()
    def every_table_shows_what_the_model_has(self) -> None:
        expected = sorted(
            [(name, *at, self.owner_of(name) is not None) for name, at in self.named.items()]
            + [("", *at, True) for at in self.passing.values()]
        )
        for file in self.files:
            entries = file.entries()
            assert sorted((e.name, e.epoch, e.seq, e.alive) for e in entries) == expected
            assert len({entry.index for entry in entries}) == len(entries)
            for entry in entries:
                owned = entry.alive
                assert entry.pid == (os.getpid() if owned else 0)
                assert file.table.is_alive(entry.index) == owned
                if entry.name:
                    assert file.find(entry.name) == entry


def test_any_history_of_a_table_is_what_the_model_says() -> None:
    chosen = settings(max_examples=60, stateful_step_count=40)
    run_state_machine_as_test(CursorMachine, settings=chosen)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_very_many_histories_of_a_table_are_what_the_model_says() -> None:
    chosen = settings(max_examples=1000, stateful_step_count=80)
    run_state_machine_as_test(CursorMachine, settings=chosen)


# --- the other process ------------------------------------------------------------------------


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def hear() -> str:
    return sys.stdin.readline().strip()


def hold(path: str, *, name: str | None, epoch: int = 0, seq: int = 0) -> None:
    """Own a cursor; `move N` and `release` as told."""
    with CursorFile(path) as file:
        cursor = file.claim(name, epoch=epoch, seq=seq)
        say(ready=True)
        while line := hear():
            if line == "release":
                cursor.release()
            else:
                cursor.move(int(line.removeprefix("move ")))
            say(done=line)


def hold_and_fork(path: str, *, name: str, seq: int) -> None:
    """Own a cursor and have a child that stays; tell what the child was refused."""
    file = CursorFile(path)
    cursor = file.claim(name, seq=seq)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        refused = []
        for use in (
            lambda: cursor.move(99),
            lambda: cursor.seq,
            lambda: cursor.epoch,
            lambda: file.claim("b"),
            lambda: file.forget(name),
            file.entries,
        ):
            try:
                use()
            except Closed as error:
                refused.append(type(error).__name__)
        cursor.release()
        file.close()
        os.write(write_end, json.dumps(refused).encode())
        time.sleep(60)
        os._exit(0)
    say(child=child, refused=json.loads(os.read(read_end, 4096)))
    hear()


def race(path: str, *, rounds: int) -> None:
    """Claim the name that is told; release it when told."""
    with CursorFile(path) as file:
        say(ready=True)
        for _ in range(rounds):
            try:
                cursor = file.claim(hear())
            except CursorInUse as error:
                say(claimed=False, pid=error.pid)
                hear()
            else:
                say(claimed=True)
                hear()
                cursor.release()
            say(done=True)


def claim_many(path: str, *, prefix: str, count: int) -> None:
    """Claim many names as fast as can be."""
    with CursorFile(path) as file:
        say(ready=True)
        hear()
        claimed = [file.claim(f"{prefix}{number}", timeout=60) for number in range(count)]
        say(entries={cursor.name: cursor.index for cursor in claimed})
        hear()


def hold_allocation(path: str) -> None:
    """Stop in the middle of a claim."""
    with CursorFile(path) as file, file.table._allocating(1):
        say(ready=True)
        hear()


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (hold, hold_and_fork, race, claim_many, hold_allocation)
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](**json.loads(sys.argv[2]))
