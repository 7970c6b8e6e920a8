from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from penstock.core.errors import StorageError
from penstock.protocols.uprotocol import UCode, UMessage, UStatusError, UUri, notification, publish
from penstock.protocols.uprotocol.transports import (
    NOT_TRIED,
    InProcessBus,
    InProcessLeg,
    InProcessTransport,
    ListenerLimits,
)

TOPIC = UUri("vehicle1", 0x10AB, 1, 0x8001)
ENTITY = UUri("vehicle1", 0x20AB, 1, 0)


def test_without_a_dispatcher_everybody_on_the_bus_hears_everything() -> None:
    bus = InProcessBus()
    one, two = InProcessTransport(bus, "vehicle1"), InProcessTransport(bus, "vehicle1")
    heard: list[tuple[int, UMessage]] = []
    one.register_listener(TOPIC, lambda message: heard.append((1, message)))
    two.register_listener(TOPIC, lambda message: heard.append((2, message)))
    message = publish(TOPIC, b"a")
    one.send(message)
    assert heard == [(1, message), (2, message)]
    two.close()
    one.send(message)
    assert len(heard) == 3
    with pytest.raises(UStatusError, match="FAILED_PRECONDITION"):
        two.send(message)


def test_an_invalid_message_is_not_sent() -> None:
    transport = InProcessTransport(InProcessBus(), "vehicle1")
    with pytest.raises(UStatusError, match="publish-source") as error:
        transport.send(publish(TOPIC).with_attributes(source=ENTITY))
    assert error.value.code == UCode.INVALID_ARGUMENT
    assert transport.statistics()["not_sent"] == 1


def test_an_expired_message_is_not_sent() -> None:
    transport = InProcessTransport(InProcessBus(), "vehicle1")
    from penstock.protocols.uprotocol import UUID7

    old = publish(TOPIC, ttl=1, id=UUID7.new(1000))
    with pytest.raises(UStatusError, match="DEADLINE_EXCEEDED"):
        transport.send(old)


def test_addresses_without_authority_get_the_senders() -> None:
    bus = InProcessBus()
    here, there = InProcessTransport(bus, "here"), InProcessTransport(bus, "there")
    here.send(publish(TOPIC.with_authority("")))
    assert there.receive(TOPIC.with_authority("here")).attributes.source == TOPIC.with_authority(
        "here"
    )
    with pytest.raises(UStatusError, match="NOT_FOUND"):
        there.receive(TOPIC)


@pytest.mark.parametrize("authority", ["", "*", "Upper", "a/b", "a" * 129])
def test_a_transport_needs_a_name_of_an_authority(authority: str) -> None:
    with pytest.raises(UStatusError, match="INVALID_ARGUMENT"):
        InProcessTransport(InProcessBus(), authority)


def test_what_a_listener_sends_is_delivered_after_it_returned() -> None:
    bus = InProcessBus()
    transport = InProcessTransport(bus, "vehicle1")
    order: list[str] = []

    def again(message: UMessage) -> None:
        number = int(message.payload or b"0")
        order.append(f"in {number}")
        if number < 3000:  # deeper than calls may be nested
            transport.send(publish(TOPIC, b"%d" % (number + 1)))
        order.append(f"out {number}")

    transport.register_listener(TOPIC, again)
    transport.send(publish(TOPIC, b"0"))
    assert order == [f"{what} {n}" for n in range(3001) for what in ("in", "out")]


def test_with_a_dispatcher_everything_goes_to_it_and_comes_from_it() -> None:
    bus = InProcessBus()
    ingested: list[bytes | UMessage] = []
    leg = InProcessLeg("local", bus)
    leg.start(ingested.extend, ["vehicle1"])
    sender = InProcessTransport(bus, "vehicle1", entity=TOPIC)
    one = InProcessTransport(bus, "vehicle1", entity=ENTITY)
    two = InProcessTransport(bus, "vehicle1", entity=ENTITY.replace(ue_id=0x30AB))
    heard: list[tuple[int, UMessage]] = []
    one.register_listener(TOPIC, lambda message: heard.append((1, message)))
    two.register_listener(TOPIC, lambda message: heard.append((2, message)))
    message = publish(TOPIC, b"a")
    sender.send(message)
    assert ingested == [message]
    assert heard == []
    assert leg.deliver(ENTITY, [message, message]) == [None, None]
    assert heard == [(1, message)] * 2
    assert leg.statistics() == {"received": 1, "refused": 0, "delivered": 2, "failed": 0}
    with pytest.raises(UStatusError, match="ALREADY_EXISTS"):
        InProcessLeg("other", bus).start(ingested.extend, [])


def test_after_a_failure_the_rest_of_a_batch_is_not_tried() -> None:
    bus = InProcessBus()
    leg = InProcessLeg("local", bus)
    transport = InProcessTransport(bus, "vehicle1", entity=ENTITY, limits=ListenerLimits(waiting=0))
    messages = [notification(TOPIC, ENTITY, b"%d" % n) for n in range(5)]
    [status, *rest] = leg.deliver(UUri("vehicle1", 5, 1, 0), messages)
    assert status is not None
    assert status.code == UCode.UNAVAILABLE
    assert all(it is NOT_TRIED for it in rest)
    heard: list[bytes | None] = []

    def listener(message: UMessage) -> None:
        if message.payload == b"2":
            raise UStatusError(UCode.ABORTED, "not this one")
        heard.append(message.payload)

    transport.register_listener(TOPIC, listener, ENTITY)
    found = leg.deliver(ENTITY, messages)
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2].message == "not this one"
    assert found[3:] == [NOT_TRIED, NOT_TRIED]
    assert heard == [b"0", b"1"]


def test_what_is_not_stored_is_not_sent() -> None:
    bus = InProcessBus()
    leg = InProcessLeg("local", bus)

    def full(messages: Sequence[bytes | UMessage]) -> None:
        raise StorageError("writing", str(len(messages)), OSError(28, "no space"))

    leg.start(full, ["vehicle1"])
    transport = InProcessTransport(bus, "vehicle1")
    with pytest.raises(UStatusError, match="did not store") as error:
        transport.send(publish(TOPIC))
    assert error.value.code == UCode.UNAVAILABLE
    leg.stop()
    with pytest.raises(UStatusError, match="has stopped"):
        transport.send(publish(TOPIC))
    assert leg.statistics()["refused"] == 2


def test_books_balance_when_many_threads_send() -> None:
    bus = InProcessBus()
    transport = InProcessTransport(bus, "vehicle1")
    heard: list[UMessage] = []
    transport.register_listener(TOPIC, heard.append)

    def send() -> None:
        for _ in range(500):
            transport.send(publish(TOPIC))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    books = transport.statistics()
    assert books["sent"] == books["arrived"] == books["delivered"] == len(heard) == 2000
