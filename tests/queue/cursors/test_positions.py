"""What does a named position keep, and what may it be called?"""

from __future__ import annotations

import gc
import os
import struct
import time
from pathlib import Path

import pytest

from penstock.core.errors import Closed, DamagedQueue, InvalidOption, PositionError
from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import ENTRY_SIZE, check_word
from support.cursor_tables import HEADER, memory_of, names
from support.wide_oracle import crc32c

LARGEST = 2**64 - 1


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


def test_a_cursor_whose_owner_was_killed_between_two_stores_is_where_it_was_going(
    file: CursorFile,
) -> None:
    file.claim("first")
    cursor = file.claim("second", epoch=3, seq=2**32 - 1)
    with memory_of(file.path) as memory, memory.cast("Q") as words:
        words[cursor.index * 16 + 15] = check_word(b"second", 3, 2**32 + 7)
    assert cursor.seq == 2**32 + 7


def test_a_changed_byte_of_a_cursor_is_mended_or_refused_and_never_believed(
    file: CursorFile,
) -> None:
    file.claim("second", epoch=3, seq=1000).release()
    with memory_of(file.path) as memory:
        whole = bytes(memory[:128])
        for at in (*range(8, 24), *range(32, 40), *range(120, 128)):
            for bit in range(8):
                memory[at] ^= 1 << bit
                [entry] = file.entries()
                if entry.is_whole:  # the position is known from its checksum
                    assert (entry.epoch, entry.seq) == (3, 1000)
                else:
                    with pytest.raises(DamagedQueue, match="row 0 of the table of readers"):
                        file.find("second")
                memory[:128] = whole


def test_a_cursor_of_an_earlier_release_is_taken_and_gets_its_checksum(file: CursorFile) -> None:
    file.claim("old", epoch=3, seq=1000).release()
    with memory_of(file.path) as memory:
        memory[120:128] = bytes(8)
        with file.claim("old") as cursor:
            assert (cursor.epoch, cursor.seq) == (3, 1000)
        assert memory[120:128].cast("Q")[0] == check_word(b"old", 3, 1000)


def test_a_cursor_of_a_long_name_has_no_checksum(file: CursorFile) -> None:
    for name in ("x" * 87, "x" * 88, "x" * 95):
        with file.claim(name, epoch=3, seq=5) as cursor:
            cursor.move(6)
        found = file.find(name)
        assert found is not None
        assert (found.name, found.seq) == (name, 6)


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
        "<IIQQq88sII",
        *(1, os.getpid(), 5, 6, entry.updated_ns, "zweite Düse".encode()),
        *(crc32c("zweite Düse".encode().ljust(88, b"\0") + struct.pack("<QQ", 5, 6)), 6),
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
