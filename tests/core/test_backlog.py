from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.backlog import Backlog


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=50))
def test_items_leave_in_the_order_in_which_they_came(steps: list[tuple[bool, int]]) -> None:
    backlog: Backlog[int] = Backlog()
    expected: list[int] = []
    came = 0
    for adds, count in steps:
        if adds:
            backlog.extend(range(came, came + count))
            expected += range(came, came + count)
            came += count
        else:
            first = backlog.first(count)
            assert first == expected[:count]
            backlog.drop(len(first))
            del expected[:count]
        assert len(backlog) == len(expected)


def test_what_is_looked_at_stays_until_it_is_dropped() -> None:
    backlog: Backlog[int] = Backlog()
    backlog.extend([1, 2, 3])
    assert backlog.first(2) == backlog.first(2) == [1, 2]
    backlog.drop(2)
    assert backlog.first(2) == [3]


@given(st.integers(0, 9), st.integers(0, 9))
def test_what_is_put_back_comes_first(dropped: int, count: int) -> None:
    backlog: Backlog[int] = Backlog()
    backlog.extend(range(9))
    backlog.drop(dropped)
    backlog.put_back(list(range(dropped - count, dropped)))
    assert backlog.first(99) == list(range(dropped - count, 9))
    assert len(backlog) == 9 - dropped + count
