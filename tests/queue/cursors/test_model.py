"""Named positions, against a model, through any history."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from penstock.core.errors import CursorInUse, CursorTableFull
from penstock.queue.cursor_file import CursorFile
from penstock.queue.cursors import Cursor

LARGEST = 2**64 - 1


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
