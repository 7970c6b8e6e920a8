"""Does what waits for an entity wait until somebody in it listens?"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from penstock.core.endpoints import describe
from penstock.protocols.uprotocol import UMessage, UUri, notification, publish, response
from penstock.protocols.uprotocol.communication import LocalUriProvider, RpcClient
from penstock.protocols.uprotocol.transports import ListenerLimits
from penstock.protocols.uprotocol.transports.ring import RingLeg, RingTransport
from support.until import until

ME = LocalUriProvider("vehicle1", 0x20, 1)
TOPIC = UUri("vehicle1", 0x10, 1, 0x8001)
OTHER = UUri("vehicle1", 0x10, 1, 0x8002)
METHOD = UUri("vehicle1", 0x10, 1, 7)


def ring(path: Path, slots: int = 256) -> str:
    return f"fmq:{path}/20?slots={slots}&size=256k"


def numbered(count: int, topic: UUri = TOPIC, first: int = 0) -> list[UMessage]:
    return [publish(topic, b"%06d" % number) for number in range(first, first + count)]


def deliver(path: Path, messages: list[UMessage]) -> int:
    with RingLeg("local", send=f"fmq:{path}/{{ue_id}}") as leg:
        return leg.deliver(ME.source, messages).count(None)


def acknowledged(path: Path) -> int:
    """Return where the next process begins to read."""
    readers = describe(f"fmq:{path}/20").details["readers"]
    return int(next(it["next_seq"] for it in readers if it["name"] == "uprotocol"))


def test_a_restarted_entity_hears_all_that_waited_however_late_it_listens(tmp_path: Path) -> None:
    RingTransport("vehicle1", receive=ring(tmp_path)).close()
    heard: list[UMessage] = []
    for life in range(6):
        heard.clear()
        sent = numbered(100, first=100 * life)
        assert deliver(tmp_path, sent) == 100
        with RingTransport("vehicle1", receive=ring(tmp_path)) as transport:
            until(lambda: transport.statistics()["arrived"] == 100)
            assert acknowledged(tmp_path) == 100 * life
            with RpcClient(transport, ME):
                transport.register_listener(TOPIC, heard.append)
                until(lambda: len(heard) >= 100)
        assert heard == sent
        assert acknowledged(tmp_path) == 100 * (life + 1)


def test_what_waited_comes_again_when_the_entity_is_killed_before_it_listens(
    tmp_path: Path,
) -> None:
    RingTransport("vehicle1", receive=ring(tmp_path)).close()
    sent = numbered(50)
    assert deliver(tmp_path, sent) == 50
    program = (
        "import sys, time\n"
        "from penstock.protocols.uprotocol.transports.ring import RingTransport\n"
        "transport = RingTransport('vehicle1', receive=sys.argv[1])\n"
        "while transport.statistics()['arrived'] < 50: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "print('all', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, ring(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as entity:
        assert entity.stdout is not None
        assert entity.stdout.readline() == "all\n"
        entity.kill()
    heard: list[UMessage] = []
    with RingTransport("vehicle1", receive=ring(tmp_path)) as transport:
        transport.register_listener(TOPIC, heard.append)
        until(lambda: len(heard) >= 50)
    assert heard == sent


def test_what_comes_while_what_waited_is_served_comes_after_it(tmp_path: Path) -> None:
    with RingTransport("vehicle1", receive=ring(tmp_path)) as transport:
        sent = numbered(40)
        assert deliver(tmp_path, sent[:20]) == 20
        until(lambda: transport.statistics()["waiting"] == 20)
        heard: list[UMessage] = []

        def slow(message: UMessage) -> None:
            time.sleep(0.005)
            heard.append(message)

        transport.register_listener(TOPIC, slow)
        assert deliver(tmp_path, sent[20:]) == 20
        until(lambda: len(heard) == 40)
        assert heard == sent
        until(lambda: acknowledged(tmp_path) == 40)


def test_answers_pass_by_what_waits_and_notifications_wait_for_their_listener(
    tmp_path: Path,
) -> None:
    told = notification(OTHER, ME.source, b"told")
    with (
        RingTransport("vehicle1", send=f"fmq:{tmp_path}/20", receive=ring(tmp_path)) as transport,
        RpcClient(transport, ME) as client,
    ):
        assert deliver(tmp_path, [*numbered(10), told]) == 11
        until(lambda: transport.statistics()["waiting"] == 11)
        call = client.invoke_method(METHOD)
        until(lambda: transport.statistics()["waiting"] == 12)  # our own request, on this ring
        asked = transport.receive(UUri.ANY.with_resource(0), METHOD)
        assert deliver(tmp_path, [response(asked, b"yes")]) == 1
        assert call.result(5).data == b"yes"
        assert acknowledged(tmp_path) == 0
        heard: list[UMessage] = []
        transport.register_listener(OTHER, heard.append, ME.source)
        until(lambda: heard)
        assert heard == [told]
        for each in numbered(10):
            assert transport.receive(TOPIC).payload == each.payload
        until(lambda: acknowledged(tmp_path) == 13)


def test_a_stray_message_does_not_stop_an_entity_and_is_not_lost_either(tmp_path: Path) -> None:
    heard: list[UMessage] = []
    stray = notification(OTHER, ME.source, b"stray")
    with RingTransport("vehicle1", receive=ring(tmp_path)) as transport:
        transport.register_listener(TOPIC, heard.append)
        assert deliver(tmp_path, [stray]) == 1
        sent = numbered(2000)
        rest = sent
        while rest:
            rest = rest[deliver(tmp_path, rest) :]
        until(lambda: len(heard) >= 2000)
        assert heard == sent
        assert transport.statistics()["waiting"] == 1
    late: list[UMessage] = []
    with RingTransport("vehicle1", receive=ring(tmp_path)) as transport:
        transport.register_listener(OTHER, late.append, ME.source)
        until(lambda: late)
    assert late == [stray]


def test_too_many_that_nobody_listens_to_hold_up_the_ring_and_are_heard_when_somebody_does(
    tmp_path: Path,
) -> None:
    limits = ListenerLimits(waiting=8)
    with RingTransport("vehicle1", receive=ring(tmp_path), limits=limits) as transport:
        sent = numbered(30)
        assert deliver(tmp_path, sent) == 30
        until(lambda: transport.statistics()["stalls"] == 1)
        assert transport.statistics()["waiting"] == 8
        heard: list[UMessage] = []
        transport.register_listener(TOPIC, heard.append)
        until(lambda: len(heard) == 30)
        assert heard == sent
        until(lambda: acknowledged(tmp_path) == 30)


def test_a_transport_that_is_held_up_is_closed_at_once_and_acknowledges_nothing(
    tmp_path: Path,
) -> None:
    limits = ListenerLimits(waiting=8)
    with RingTransport("vehicle1", receive=ring(tmp_path), limits=limits) as transport:
        assert deliver(tmp_path, numbered(30)) == 30
        until(lambda: transport.statistics()["waiting"] == 8)
        began = time.monotonic()
    assert time.monotonic() - began < 2
    assert acknowledged(tmp_path) == 0


def test_what_expires_while_it_waits_and_what_was_unregistered_holds_back_nothing(
    tmp_path: Path,
) -> None:
    heard: list[UMessage] = []
    with RingTransport("vehicle1", receive=ring(tmp_path)) as transport:
        transport.register_listener(TOPIC, heard.append)
        transport.unregister_listener(TOPIC, heard.append)
        short = publish(OTHER, b"short", ttl=300)
        assert deliver(tmp_path, [short, *numbered(10)]) == 11
        until(lambda: transport.statistics()["unheard"] == 10)
        assert acknowledged(tmp_path) == 0
        time.sleep(1)
        assert deliver(tmp_path, numbered(1)) == 1
        until(lambda: acknowledged(tmp_path) == 12)
        assert transport.statistics()["expired"] == 1
    assert heard == []


def test_a_ring_is_read_once_its_file_of_waiting_messages_can_be(tmp_path: Path) -> None:
    heard: list[UMessage] = []
    file = tmp_path / "20.unheard"
    file.mkdir()  # or it belongs to somebody else
    with RingTransport("vehicle1", receive=ring(tmp_path)) as transport:
        transport.register_listener(TOPIC, heard.append)
        sent = numbered(3)
        assert deliver(tmp_path, sent) == 3
        time.sleep(0.3)
        assert heard == []
        file.rmdir()
        until(lambda: heard == sent)
