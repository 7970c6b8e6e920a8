from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.pending import Pending


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=50))
def test_items_leave_in_the_order_in_which_they_came(steps: list[tuple[bool, int]]) -> None:
    pending: Pending[int] = Pending()
    expected: list[int] = []
    came = 0
    for adds, count in steps:
        if adds:
            pending.extend(range(came, came + count))
            expected += range(came, came + count)
            came += count
        else:
            first = pending.first(count)
            assert first == expected[:count]
            pending.drop(len(first))
            del expected[:count]
        assert len(pending) == len(expected)


def test_what_is_looked_at_stays_until_it_is_dropped() -> None:
    pending: Pending[int] = Pending()
    pending.extend([1, 2, 3])
    assert pending.first(2) == pending.first(2) == [1, 2]
    pending.drop(2)
    assert pending.first(2) == [3]


@given(st.integers(0, 9), st.integers(0, 9))
def test_what_is_put_back_comes_first(dropped: int, count: int) -> None:
    pending: Pending[int] = Pending()
    pending.extend(range(9))
    pending.drop(dropped)
    pending.put_back(list(range(dropped - count, dropped)))
    assert pending.first(99) == list(range(dropped - count, 9))
    assert len(pending) == 9 - dropped + count
