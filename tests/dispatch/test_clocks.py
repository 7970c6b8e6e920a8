"""What becomes of messages when somebody sets the clock?"""

from __future__ import annotations

from pathlib import Path

from penstock.core.clock import ManualClock
from penstock.protocols.uprotocol import UCode
from support.dispatching import BOB, START_NS, World, status

HOUR = 3600


class SetClock(ManualClock):
    """A clock whose wall time can be set, as by a person or by NTP."""

    def __init__(self, now_ns: int = START_NS) -> None:
        super().__init__(now_ns)
        self.offset_s = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.offset_s * 1_000_000_000


def test_a_clock_that_is_set_back_loses_nothing_and_new_messages_end_in_time(
    tmp_path: Path,
) -> None:
    clock = SetClock()
    world = World(tmp_path, clock=clock)
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(b"old", ttl=60_000), world.notify(b"for ever"))
    world.run(0.01)
    clock.offset_s -= HOUR
    world.ingest(world.notify(b"new", ttl=500), world.notify(b"newer", ttl=60_000))
    world.run(0.6)
    (letter,) = world.letters
    assert (letter.code, letter.header.ttl) == (UCode.DEADLINE_EXCEEDED, 500)
    assert letter.header.id is not None
    assert 500 < letter.dead_ms - letter.header.id.time_ms <= 511
    world = world.reopen()
    world.run(20)
    assert world.local.payloads(BOB) == [b"old", b"for ever", b"newer"]
    assert world.dispatcher.books().copies.queued == 0
    world.balance()
    world.close()


def test_messages_from_before_the_clock_went_back_live_from_when_they_come(tmp_path: Path) -> None:
    clock = SetClock()
    world = World(tmp_path, clock=clock)
    world.local.always = status("UNAVAILABLE")
    late = world.notify(ttl=1000)
    clock.offset_s -= HOUR
    world.ingest(late)
    world.run(0.9)
    assert world.letters == []
    world.run(0.2)
    assert world.codes == [UCode.DEADLINE_EXCEEDED]
    world.balance()
    world.close()


def test_a_clock_that_is_set_forward_ends_what_is_too_old_then(tmp_path: Path) -> None:
    clock = SetClock()
    world = World(tmp_path, clock=clock)
    world.local.always = status("UNAVAILABLE")
    world.ingest(world.notify(b"short", ttl=60_000), world.notify(b"long"))
    world.run(0.01)
    clock.offset_s += HOUR
    world.run(0.01)
    assert [letter.header.ttl for letter in world.letters] == [60_000]
    world.local.always = None
    world.run(20)
    assert world.local.payloads(BOB) == [b"long"]
    world.balance()
    world.close()


def test_what_came_before_the_clock_was_set_is_not_too_old_afterwards(tmp_path: Path) -> None:
    clock = SetClock(now_ns=10_000_000_000)  # ten seconds after 1970 began
    world = World(tmp_path, clock=clock)
    world.local.always = status("UNAVAILABLE")
    world.ingest(*[world.notify(b"%d" % i) for i in range(20)])
    world.run(0.01)
    clock.offset_s = START_NS // 1_000_000_000
    world.ingest(world.notify(b"20"))
    world.run(0.01)
    world.local.always = None
    world.run(20)
    assert world.local.payloads(BOB) == [b"%d" % i for i in range(21)]
    assert world.letters == []
    world.balance()
    world.close()
