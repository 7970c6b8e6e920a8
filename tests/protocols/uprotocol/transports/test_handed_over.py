from __future__ import annotations

from penstock.core.clock import ManualClock
from penstock.protocols.uprotocol.transports.in_process import InProcessBus, InProcessLeg
from penstock.protocols.uprotocol.transports.interface import HandedOver


class Unsure(InProcessLeg):
    """A leg that may lose what it took over, with its link."""

    settle_after = 1.0
    lost = 0

    @property
    def links_lost(self) -> int:
        return self.lost


def made() -> tuple[Unsure, ManualClock, HandedOver[int]]:
    leg, clock = Unsure("local", InProcessBus()), ManualClock()
    return leg, clock, HandedOver(leg, clock)


def test_what_was_handed_over_has_arrived_when_its_time_is_over() -> None:
    _, clock, handed = made()
    assert (handed.take(), handed.next_due) == (([], []), None)
    handed.add([1, 2], 0)
    clock.advance(0.5)
    handed.add([3], 0)
    assert (handed.take(), len(handed), handed.next_due) == (([], []), 3, 1.0)
    clock.advance(0.5)
    assert (handed.take(), len(handed), handed.next_due) == (([1, 2], []), 1, 1.5)
    clock.advance(0.5)
    assert (handed.take(), len(handed)) == (([3], []), 0)


def test_after_a_lost_link_all_of_it_comes_again_in_order() -> None:
    leg, clock, handed = made()
    handed.add([1, 2], leg.links_lost)
    leg.lost += 1
    handed.add([3], leg.links_lost)
    clock.advance(2)
    assert handed.take() == ([], [1, 2, 3])
    assert (handed.take(), len(handed)) == (([], []), 0)


def test_messages_and_bytes_on_their_way_are_bounded() -> None:
    _, clock, handed = made()
    for items, size in ((range(65_536), 0), ([1], 64 << 20)):
        handed.add(items, 0, size)
        was_full = handed.is_full
        clock.advance(1)
        handed.take()
        assert (was_full, handed.is_full) == (True, False)
