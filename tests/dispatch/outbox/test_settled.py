"""Is the floor right, and the counts of what is below and above it?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch.outbox import Reason
from penstock.dispatch.outbox.settled import BLOCK, Settled

RUNS = st.lists(
    st.tuples(st.integers(0, 3 * BLOCK), st.integers(1, BLOCK + 50), st.sampled_from(Reason)),
    max_size=12,
)


@given(RUNS, st.integers(0, 5000))
def test_the_floor_is_at_the_first_that_is_not_settled(
    runs: list[tuple[int, int, Reason]], start: int
) -> None:
    settled = Settled(start)
    known: dict[int, Reason] = {}
    for offset, count, reason in runs:
        first = start + offset
        end = first
        while end < first + count and end not in known:
            end += 1
        if end > first:
            settled.add(first, end - first, reason)
            known |= dict.fromkeys(range(first, end), reason)
    floor = next(seq for seq in range(start, start + 10 * BLOCK) if seq not in known)
    assert settled.floor == floor
    for reason in Reason:
        below = sum(why is reason for seq, why in known.items() if seq < floor)
        assert settled.below[reason] == below
        assert settled.count(reason) == sum(why is reason for why in known.values())
    assert settled.ahead == sum(seq > floor for seq in known)
    # Blocks that hold nothing are not kept.
    assert set(settled.blocks) == {seq // BLOCK for seq in known if seq > floor}
    probes = range(start, start + 5 * BLOCK, 97)
    assert [seq in settled for seq in probes] == [seq in known for seq in probes]

    again = Settled(floor, settled.below)
    again.restore({number: bytes(block) for number, block in settled.blocks.items()}, 1 << 60)
    assert (again.floor, again.below, again.above) == (floor, settled.below, settled.above)
    assert [seq in again for seq in probes] == [seq in known for seq in probes]


def test_marks_of_messages_that_are_not_there_are_forgotten() -> None:
    settled = Settled(10)
    settled.restore({0: bytes([Reason.ACKED]) * BLOCK, 1: bytes([Reason.GONE]) * BLOCK}, 20)
    assert settled.floor == 20
    assert settled.below[Reason.ACKED] == 10
    assert settled.below[Reason.GONE] == 0
