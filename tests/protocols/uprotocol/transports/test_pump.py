from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.core.errors import Closed
from penstock.protocols.uprotocol.transports.interface import Pump
from support.until import until
from support.waiting import SOON


def test_everything_is_handed_over_in_order_and_in_batches() -> None:
    taken: list[int] = []
    sizes: list[int] = []

    def take(batch: Sequence[int]) -> None:
        sizes.append(len(batch))
        taken.extend(batch)

    pump: Pump[int] = Pump("test", take, capacity=64, batch=16)
    for number in range(2000):
        assert pump.put(number)
    pump.stop()
    assert taken == list(range(2000))
    assert max(sizes) <= 16
    assert not pump.put(1)


def test_what_is_left_is_handed_over_before_it_stops() -> None:
    go_on = threading.Event()
    taken: list[int] = []

    def take(batch: Sequence[int]) -> None:
        assert go_on.wait(SOON)
        taken.extend(batch)

    pump: Pump[int] = Pump("test", take)
    for number in range(10):
        pump.put(number)
    stopping = threading.Thread(target=pump.stop)
    stopping.start()
    go_on.set()
    stopping.join(SOON)
    assert taken == list(range(10))


def test_a_full_pump_takes_no_more_in_time() -> None:
    go_on = threading.Event()

    def take(batch: Sequence[int]) -> None:
        del batch
        assert go_on.wait(SOON)

    pump: Pump[int] = Pump("test", take, capacity=2, batch=1)
    until(lambda: not pump.put(1, timeout=0))
    go_on.set()
    pump.stop()


def test_a_batch_that_is_not_taken_is_offered_again_and_dropped_only_at_the_end() -> None:
    offered: list[list[int]] = []
    failures: list[None] = []

    def take(batch: Sequence[int]) -> None:
        offered.append(list(batch))
        raise OSError

    pump: Pump[int] = Pump("test", take, on_failure=lambda: failures.append(None))
    pump.put(1)
    until(lambda: len(offered) > 2)
    pump.stop()
    assert all(batch == [1] for batch in offered)
    assert len(failures) == len(offered)


def test_a_taker_that_is_closed_gets_no_more() -> None:
    offered: list[int] = []

    def take(batch: Sequence[int]) -> None:
        offered.extend(batch)
        raise Closed("gone")

    pump: Pump[int] = Pump("test", take)
    pump.put(1)
    until(lambda: offered)
    pump.stop()
    assert offered == [1]


def test_no_more_bytes_wait_than_allowed_but_for_one_message() -> None:
    go_on = threading.Event()
    taken: list[bytes] = []

    def take(batch: Sequence[bytes]) -> None:
        assert go_on.wait(SOON)
        taken.extend(batch)

    pump: Pump[bytes] = Pump("test", take, size_of=len, most_bytes=100)
    assert pump.put(bytes(1000), timeout=0)
    assert not pump.put(b"x", timeout=0.05)
    go_on.set()
    for _ in range(50):
        assert pump.put(bytes(60), SOON)
    pump.stop()
    assert [len(it) for it in taken] == [1000, *[60] * 50]
    assert not pump.put(b"x")
