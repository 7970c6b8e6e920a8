"""Do receivers that hold up their deliveries, or wait for long, delay others?"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from penstock.core.clock import SYSTEM_CLOCK
from penstock.dispatch import Subscriber
from penstock.dispatch.scheduler import Scheduler
from penstock.protocols.uprotocol import UMessage, UStatus, UUri
from support.dispatching import BOB, TOPIC, Table, World, status
from support.threads import own_threads
from support.until import until
from support.waiting import SOON, background


def address(number: int) -> UUri:
    return UUri("here", 0x100 + number, 1, 0)


def test_however_many_receivers_hang_the_others_get_their_messages(tmp_path: Path) -> None:
    world = World(tmp_path, clock=SYSTEM_CLOCK, threads=True)
    release = threading.Event()
    hanging: set[UUri] = set()

    def hang(to: UUri, _: UMessage) -> UStatus | None:
        if to != BOB:
            hanging.add(to)
            release.wait(30)
        return None

    world.local.judge = hang
    for number in range(20):
        world.ingest(world.notify(sink=address(number)))
    world.ingest(world.notify())
    until(lambda: world.local.arrived[BOB])
    until(lambda: len(hanging) == 20)
    release.set()
    until(lambda: world.queued == 0)
    world.balance()
    world.close()


class Hanging:
    """Stands for the outlet of a receiver; with `release` set, one that does not hang."""

    took_last = True

    def __init__(self, release: threading.Event) -> None:
        self.release = release
        self.entered = threading.Event()

    def next_due(self) -> None:
        return None

    def deliver(self) -> bool:
        self.entered.set()
        self.release.wait(30)
        return False


def test_two_receivers_that_come_while_one_thread_is_free_need_not_wait_for_each_other() -> None:
    """Which thread sees them first is chance, so there are some rounds."""
    free = threading.Event()
    free.set()
    for _ in range(16):
        release = threading.Event()
        scheduler = Scheduler(SYSTEM_CLOCK)
        scheduler.start(Hanging.deliver)  # type: ignore[arg-type]
        try:
            for outlet in [*(Hanging(release) for _ in range(3)), Hanging(free)]:
                scheduler.wake(outlet)  # type: ignore[arg-type]
                assert outlet.entered.wait(10)
            time.sleep(0.15)  # the timer has nothing to look after
            both = [Hanging(release), Hanging(release)]
            for outlet in both:
                scheduler.wake(outlet)  # type: ignore[arg-type]
            assert all(outlet.entered.wait(10) for outlet in both)
        finally:
            release.set()
            scheduler.stop()


class SlowTable(Table):
    """Subscriptions that a delivery has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.release = threading.Event(), threading.Event()

    def receivers_of(self, topic: UUri) -> list[Subscriber]:
        if threading.current_thread() is not threading.main_thread():
            self.asked.set()
            self.release.wait(30)
        return super().receivers_of(topic)


def test_messages_are_stored_while_those_to_deliver_are_chosen(tmp_path: Path) -> None:
    table = SlowTable()
    table.add(TOPIC, BOB)
    world = World(tmp_path, clock=SYSTEM_CLOCK, threads=True, table=table)
    world.ingest(world.publish(b"0"))
    assert table.asked.wait(10)
    with background(world.ingest, world.notify(b"1")) as call:
        try:
            call.result(SOON)
        finally:
            table.release.set()
    until(lambda: world.queued == 0)
    assert world.local.payloads(BOB) == [b"0", b"1"]
    world.balance()
    world.close()


def test_threads_are_as_many_as_deliveries_and_not_as_receivers(tmp_path: Path) -> None:
    world = World(tmp_path, clock=SYSTEM_CLOCK, threads=True)
    world.local.always = status("UNAVAILABLE")
    before = len(own_threads())
    most = 0
    for number in range(60):
        world.ingest(world.notify(sink=address(number)))
        most = max(most, len(own_threads()))
    assert most - before <= 12
    world.local.always = None
    until(lambda: world.queued == 0)
    world.balance()
    world.close()


def test_a_receiver_with_much_to_get_lets_others_come_between(tmp_path: Path) -> None:
    world = World(tmp_path, clock=SYSTEM_CLOCK, threads=True)
    world.local.judge = lambda *_: time.sleep(0.0005)
    for number in range(10):  # more than there are threads at first
        world.ingest(*(world.notify(b"%d" % i, sink=address(number)) for i in range(600)))
    began = time.monotonic()
    world.ingest(world.notify())
    until(lambda: world.local.arrived[BOB])
    assert time.monotonic() - began < 5
    assert world.queued > 0
    until(lambda: world.queued == 0, 60)
    for number in range(10):
        assert world.local.payloads(address(number)) == [b"%d" % i for i in range(600)]
    world.balance()
    world.close()
