"""Is the floor right, and the counts of what is below and above it, and the index of classes?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch.outbox import CLASSES, Reason
from penstock.dispatch.outbox.state import BLOCK, UNKNOWN, Marks

RUNS = st.lists(
    st.tuples(st.integers(0, 3 * BLOCK), st.integers(1, BLOCK + 50), st.sampled_from(Reason)),
    max_size=12,
)
#: Classes of messages that follow each other: how many of each.
COMING = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(1, 700)), max_size=8)


@given(RUNS, COMING, st.integers(0, 5000), st.integers(1, 300))
def test_the_floor_is_at_the_first_that_is_not_settled(
    runs: list[tuple[int, int, Reason]], coming: list[tuple[int, int]], start: int, some: int
) -> None:
    marks = Marks(start)
    classes = [priority for priority, count in coming for _ in range(count)]
    classes += [1] * (5 * BLOCK - len(classes))
    for at in range(0, len(classes), some):
        marks.append(classes[at : at + some])
    known: dict[int, Reason] = {}
    for offset, count, reason in runs:
        first = start + offset
        end = first
        while end < first + count and end not in known:
            end += 1
        if end > first:
            marks.settle(first, end - first, reason)
            known |= dict.fromkeys(range(first, end), reason)
    numbers = range(start, start + 5 * BLOCK)
    floor = next(seq for seq in numbers if seq not in known)
    assert marks.floor == floor
    for reason in Reason:
        below = sum(why is reason for seq, why in known.items() if seq < floor)
        assert marks.below[reason] == below
        assert marks.count(reason) == sum(why is reason for why in known.values())
    assert marks.ahead == sum(seq > floor for seq in known)
    assert min(marks.blocks) == floor // BLOCK
    probes = numbers[::97]
    assert [seq in marks for seq in probes] == [seq in known for seq in probes]

    again = Marks(floor, marks.below)
    again.append(bytes((UNKNOWN,)) * (numbers[-1] + 1 - floor))
    again.restore({number: bytes(block) for number, block in marks.blocks.items()}, 1 << 60)
    assert (again.floor, again.below, again.above) == (floor, marks.below, marks.above)
    assert again.queued == marks.queued
    assert [seq in again for seq in probes] == [seq in known for seq in probes]
    for priority in range(CLASSES):
        expected = [
            seq
            for seq, own in zip(numbers, classes, strict=False)
            if own == priority and seq not in known
        ]
        assert len(expected) == marks.queued[priority]
        found: list[int] = []
        at = start
        while at < marks.head:
            several, at = marks.numbers_of(priority, at, marks.head, some)
            found += several
        assert found == expected


def test_marks_of_messages_that_are_not_there_are_forgotten() -> None:
    marks = Marks(10)
    marks.append(bytes((UNKNOWN,)) * 10)
    acked = bytes([0x40 + Reason.ACKED]) * BLOCK
    marks.restore({0: acked, 1: bytes([0x40 + Reason.GONE]) * BLOCK}, 20)
    assert marks.floor == 20
    assert marks.below[Reason.ACKED] == 10
    assert marks.below[Reason.GONE] == 0
