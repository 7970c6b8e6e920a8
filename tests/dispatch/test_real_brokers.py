"""Does a streamer between a real zenoh and a real broker keep its promise, whatever dies?"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.dispatch import DeadLetters, Dispatcher, Routes
from penstock.protocols.uprotocol import UCode, UMessage, UStatusError, UUri
from penstock.protocols.uprotocol.transports import InProcessBus, InProcessLeg, InProcessTransport
from penstock.protocols.uprotocol.transports.mqtt import MqttBroker, MqttLeg, MqttTransport
from support.certificates import Authority
from support.hasty_lives import numbers
from support.mosquitto import free_port, mosquitto
from support.outbox_backlog import disk_of
from support.roles import Role, cast
from support.streamer import Heard, Streamer
from support.streamer_traffic import BUS, Fate, access, fate, made, number_of
from support.until import until


def memory_of(role: Role) -> int:
    """Return the bytes of memory that a process has for itself, without files that it maps."""
    status = Path(f"/proc/{role.process.pid}/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if "RssAnon" in line)


@pytest.mark.parametrize(
    ("count", "rate", "kills", "restarts", "patience"),
    [
        pytest.param(2_000, 500, 2, 1, 60, id="quick"),
        pytest.param(
            *(100_000, 1_500, 20, 3, 900),
            id="full",
            marks=[pytest.mark.full, pytest.mark.timeout(1500)],
        ),
    ],
)
def test_a_streamer_loses_nothing_that_was_acknowledged_or_stored(
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    count: int,
    rate: float,
    kills: int,
    restarts: int,
    patience: float,
) -> None:
    lines = ["persistence true", f"persistence_location {tmp_path}/"]
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - to do the same again
    with mosquitto(tmp_path, lines) as broker, cast() as roles:
        streamer = Streamer(roles, broker, tmp_path, count=count, rate=rate, seed=seed)
        streamer.begin()
        streamer.torture(kills, restarts)
        books = streamer.drain(patience)
        stored = books["receivers"]["cloud"]["stored"]
        streamer.settle(stored)

    # The books balance over all lives, and nothing is left or was given up.
    assert books["problems"] == []
    copies = books["copies"]
    assert copies["stored"] == copies["acked"] + copies["queued"]
    assert copies["queued"] == 0

    # From the broker: all that was acknowledged is there, in order.
    device, cloud = streamer.heard("device"), streamer.heard("cloud")
    arriving = {number for number in range(count) if fate(number) is Fate.ARRIVES}
    assert device.distinct == arriving
    assert device.disorder() == []
    letters = cloud.letters["device"]
    assert letters.codes == {n: {fate(n).value.name} for n in range(count) if n not in arriving}

    # From zenoh: all that was stored is there, in order; each was sent once, so counts tell.
    assert cloud.distinct <= arriving
    assert cloud.disorder() == []
    others = cloud.letters["cloud"]
    assert others.codes == {n: {fate(n).value.name} for n in others.codes}
    assert not arriving & set(others.codes)
    assert len(cloud.distinct) + len(letters.ids) + len(others.ids) == stored

    # All letters that are kept were told of, one about each message at least. A kill between the
    # two makes it twice: the message comes again, and is refused again.
    kept = {str(letter.id) for letter in DeadLetters(streamer.state / "dead", writable=False)}
    assert kept <= letters.ids | others.ids
    assert len(kept) >= len(letters.codes) + len(others.codes)

    lost = count - len(cloud.distinct) - len(others.codes)
    found = {
        "sent each way": count,
        "zenoh: sent minus stored": lost,
        "zenoh to broker: repeated": cloud.repeated,
        "broker to zenoh: repeated": device.repeated,
        "broker to zenoh: stored again": books["receivers"]["device"]["stored"] - len(arriving),
    }
    for name, value in found.items():
        record_property(name, value)
    print(found)  # noqa: T201 - the record of the test
    assert lost < count / 2


@pytest.mark.parametrize(
    "lives", [pytest.param(4, id="quick"), pytest.param(40, id="full", marks=pytest.mark.full)]
)
def test_what_zenoh_took_as_the_dispatcher_died_is_delivered_again(
    tmp_path: Path, lives: int
) -> None:
    """The hand-over is not settled before its bytes have left the process."""
    count = 256
    place = f"tcp/127.0.0.1:{free_port()}"
    state, notes = str(tmp_path / "state"), tmp_path / "heard"
    with cast() as roles:
        receiver = roles.start(
            *("streamer_roles", "receive_by_zenoh"), side="device", place=place, notes=str(notes)
        )
        for life in range(lives):
            dying = roles.begin(
                *("hasty_lives", "live_and_die"),
                state=state,
                place=place,
                life=life,
                count=count,
                size=1000,
            )
            assert dying.process.wait(60) == -signal.SIGKILL
        last = roles.start("hasty_lives", "live_on", state=state, place=place)
        wanted = {number for life in range(lives) for number in numbers(life, count)}
        until(lambda: last.ask()["copies"]["queued"] == 0, 60)
        books = json.loads(last.leave())
        receiver.leave()
    heard = Heard(notes)
    assert sorted(wanted - heard.distinct) == []
    assert heard.disorder() == []
    assert books["problems"] == []
    assert books["copies"]["acked"] == books["copies"]["stored"] == len(wanted)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(50_000, id="quick"),
        pytest.param(1_000_000, id="full", marks=[pytest.mark.full, pytest.mark.timeout(1500)]),
    ],
)
def test_what_waits_for_a_receiver_that_is_down_is_on_the_disk_and_not_in_memory(
    tmp_path: Path, record_property: Callable[[str, object], None], count: int
) -> None:
    state, rings = str(tmp_path / "state"), str(tmp_path / "rings")
    with cast() as roles:
        module = "ring_backlog"
        dispatcher = roles.start(module, "dispatch", state=state, rings=rings, count=count)
        before = highest = memory_of(dispatcher)

        def is_queued(number: int) -> bool:
            nonlocal highest
            highest = max(highest, memory_of(dispatcher))
            return bool(dispatcher.ask()["copies"]["queued"] == number)

        sender = roles.start(module, "send", rings=rings, count=count, size=1024)
        until(lambda: is_queued(count), 600)
        sender.hear()
        on_disk = disk_of(tmp_path / "state")
        receiver = roles.start(module, "receive", rings=rings, count=count)
        until(lambda: is_queued(0), 600)
        got = receiver.hear()
        assert is_queued(0)
        books = json.loads(dispatcher.leave())
    growth = (highest - before) >> 20
    print(f"{count:,} waited; the memory grew by {growth} MiB, repeated {got['repeated']}")  # noqa: T201
    record_property("MiB of memory", growth)
    assert on_disk > count * 1024
    assert (got["next"], got["missed"]) == (count, 0)
    assert books["problems"] == []
    assert books["copies"]["stored"] == books["copies"]["acked"] == count
    assert highest - before < 100 << 20


def test_who_has_no_certificate_gets_nothing_in_and_who_has_one_only_what_is_its_own(
    tmp_path: Path,
) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("broker")
    lines = [
        f"cafile {authority.certificate}",
        f"certfile {server.certificate}",
        f"keyfile {server.key}",
        "require_certificate true",
        "use_identity_as_username true",
    ]
    bus = InProcessBus()
    heard: list[UMessage] = []
    entity = InProcessTransport(bus, "device", entity=UUri("device", 0x20, 1, 0))
    entity.register_listener(UUri.ANY, heard.append, UUri("device", 0x20, 1, 0))
    with mosquitto(tmp_path, lines, is_open=False) as broker:
        tls = MqttBroker(port=broker.port, tls=True, ca=authority.certificate)

        def identified(name: str) -> MqttBroker:
            mine = authority.issue(name)
            return replace(tls, certificate=mine.certificate, key=mine.key, client_id=name)

        leg = MqttLeg("cloud", BUS, identified(BUS))
        with Dispatcher(
            BUS,
            tmp_path / "state",
            [leg, InProcessLeg("device", bus)],
            routes=Routes(authorities={"device": ["device"], "cloud": ["cloud"]}),
            access=access(),
        ) as dispatcher:
            dispatcher.start()
            assert leg.await_connection(20) is None
            with (
                MqttTransport("cloud", replace(tls, connect_timeout=0.5)) as stranger,
                pytest.raises(UStatusError) as error,
            ):
                stranger.send(made(0, "cloud"))
            assert error.value.code == UCode.UNAVAILABLE
            with MqttTransport("cloud", identified("cloud"), must_be_heard=True) as known:
                for number in (22, 37, 1):
                    known.send(made(number, "cloud"))
            until(lambda: heard)
            dispatcher.stop(grace=10)
            books = dispatcher.books()
            codes = {number_of(it.original): it.code for it in dispatcher.dead_letters}
    assert books.counts.received == 3
    assert books.problems() == []
    assert [number_of(message) for message in heard] == [1]
    assert codes == {22: UCode.UNAUTHENTICATED, 37: UCode.PERMISSION_DENIED}


@pytest.mark.parametrize(
    ("count", "kills"),
    [
        pytest.param(50_000, 2, id="quick"),
        pytest.param(
            *(1_000_000, 20), id="full", marks=[pytest.mark.full, pytest.mark.timeout(1500)]
        ),
    ],
)
def test_what_a_ring_has_taken_comes_out_of_another_however_often_the_dispatcher_is_killed(
    tmp_path: Path, count: int, kills: int
) -> None:
    chance = random.Random(kills)
    options = {"state": str(tmp_path / "state"), "rings": str(tmp_path / "rings"), "count": count}
    module = "ring_backlog"
    with cast() as roles:
        dispatcher = roles.start(module, "dispatch", **options)
        receiver = roles.start(module, "receive", rings=options["rings"], count=count)
        roles.start(module, "send", rings=options["rings"], count=count, size=100)
        for _ in range(kills):
            # Not when it has answered something: then it is idle, and nothing is under way.
            time.sleep(chance.uniform(0.05, 0.4))
            dispatcher.kill()
            dispatcher = roles.start(module, "dispatch", **options)
        got = receiver.hear()
        until(lambda: dispatcher.ask()["copies"]["queued"] == 0, 60)
        books = json.loads(dispatcher.leave())
    again = books["copies"]["stored"] - count
    print(f"{count:,} by rings, {kills} kills: {again} stored again, {got['repeated']} received")  # noqa: T201
    assert (got["next"], got["missed"]) == (count, 0)
    assert books["problems"] == []
    assert books["copies"]["stored"] == books["copies"]["acked"] >= count
