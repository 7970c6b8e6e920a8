"""What do many receivers that are away cost one that is there?"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.dispatch import Dispatcher, Limits, Routes
from penstock.protocols.uprotocol import UMessage, UPayloadFormat, UUri, notification
from penstock.protocols.uprotocol.transports.ring import RingLeg, RingTransport
from support.dispatching import BOB, TOPIC
from support.until import until

#: Seconds between two messages to the one who is there.
_BETWEEN = 0.005
#: A thread for the ring of the leg, one each for timer, expiry, upkeep and some logs, four that
#: deliver and some more if these are held up, and those of this test.
_THREADS = 24


class Passage(NamedTuple):
    """How the messages of the receiver who is there got to it."""

    payloads: list[int]
    #: The longest that one took, in seconds, and in seconds of a core that this process had.
    longest: float
    computed: float
    threads: int
    memory: int


def memory() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) << 12


def opened(folder: Path) -> Dispatcher:
    rings = folder / "rings"
    leg = RingLeg("local", receive=f"fmq:{rings}/in?slots=8192", send=f"fmq:{rings}/{{ue_id}}")
    routes = Routes(authorities={"local": ["here"]})
    limits = Limits(receivers=2000)
    return Dispatcher("here", folder / "state", [leg], routes=routes, limits=limits)


def absent(number: int) -> UUri:
    return UUri("here", 0x1000 + number, 1, 0)


def made(number: int, sink: UUri) -> UMessage:
    payload = b"%d %d %d" % (number, time.monotonic_ns(), time.process_time_ns())
    return notification(TOPIC, sink, payload, payload_format=UPayloadFormat.RAW)


def flood_with(transport: RingTransport, count: int) -> None:
    for number in range(count):
        transport.send(made(number, absent(number)))


def passage(folder: Path, dispatcher: Dispatcher, count: int, seconds: float) -> Passage:
    """Send to one receiver all the time, and meanwhile to others that are not there, at once."""
    rings = folder / "rings"
    came: list[tuple[int, float, float]] = []
    threads = 0
    before = highest = memory()

    def take(message: UMessage) -> None:
        assert message.payload is not None
        number, sent, computed = map(int, message.payload.split())
        took = time.monotonic_ns() - sent, time.process_time_ns() - computed
        came.append((number, took[0] / 1e9, took[1] / 1e9))

    with (
        RingTransport("here", receive=f"fmq:{rings}/{BOB.ue_id:X}") as bob,
        RingTransport("here", send=f"fmq:{rings}/in") as alice,
    ):
        bob.register_listener(UUri.ANY, take, BOB)
        alice.send(made(0, BOB))
        until(lambda: came)
        came.clear()
        flood = threading.Thread(target=flood_with, args=(alice, count))
        flood.start()
        sent = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end or flood.is_alive():
            sent += 1
            alice.send(made(sent, BOB))
            threads = max(threads, threading.active_count())
            highest = max(highest, memory())
            time.sleep(_BETWEEN)
        flood.join()
        until(lambda: len(came) >= sent, 60)
        until(lambda: dispatcher.books().counts.received >= sent + count, 60)
    numbers, times, computed = zip(*came, strict=True)
    return Passage(list(numbers), max(times), max(computed), threads, highest - before)


@pytest.mark.parametrize(
    ("count", "seconds"),
    [
        pytest.param(150, 1.0, id="quick"),
        pytest.param(1100, 20.0, id="full", marks=pytest.mark.full),
    ],
)
def test_many_receivers_that_are_away_delay_none_that_is_there(
    tmp_path: Path, record_property: Callable[[str, object], None], count: int, seconds: float
) -> None:
    others = threading.active_count()
    with opened(tmp_path / "alone") as dispatcher:
        dispatcher.start()
        alone = passage(tmp_path / "alone", dispatcher, 0, seconds / 4)
    with opened(tmp_path / "beside") as dispatcher:
        dispatcher.start()
        beside = passage(tmp_path / "beside", dispatcher, count, seconds)
        books = dispatcher.books()
    for name, value in {"alone": alone, "beside": beside}.items():
        record_property(name, value[1:])
        print(f"{name}: {value[1:]}")  # noqa: T201 - the record of the test
    for each in (alone, beside):
        assert each.payloads == list(range(1, len(each.payloads) + 1))
    # A machine with more work than cores makes everything longer: what is computed by the attempts
    # to deliver that come meanwhile, and by the caches that other processes fill.
    if os.getloadavg()[0] > (os.cpu_count() or 1) + 1:
        assert beside.computed < 4.0
    else:
        assert beside.longest < 1.0 + alone.longest
    assert beside.threads < others + _THREADS < others + count
    assert beside.memory < (32 << 20) + count * (64 << 10)

    assert books.problems() == []
    assert books.copies.queued == count
    with opened(tmp_path / "beside") as again:
        waiting = {info.receiver.address: info.books.queued for info in again.receivers()}
        assert again.books().problems() == []
        assert again.books().copies.queued == count
    assert [waiting[absent(number)] for number in range(count)] == [1] * count
