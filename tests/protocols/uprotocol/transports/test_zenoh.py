from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import zenoh

from penstock.core.errors import ConnectionLost, InvalidOption, StorageError
from penstock.protocols.uprotocol import (
    UCode,
    UMessage,
    UMessageType,
    UPriority,
    UStatusError,
    UUri,
    notification,
    publish,
    request,
)
from penstock.protocols.uprotocol.transports.interface import NOT_TRIED, HandedOver
from penstock.protocols.uprotocol.transports.zenoh import ZenohLeg, ZenohLink, ZenohTransport
from penstock.protocols.uprotocol.zenoh_wire import encode_attachment, key_of
from support.mosquitto import free_port
from support.until import until

TOPIC = UUri("device1", 0x10AB, 3, 0x80CD)
ENTITY = UUri("device2", 0x300EF, 4, 0)
METHOD = UUri("device2", 0x300EF, 4, 7)


@contextmanager
def two_links(echo: bool = False) -> Iterator[tuple[ZenohLink, ZenohLink]]:
    place = [f"tcp/127.0.0.1:{free_port()}"]
    one = ZenohLink("device1", listen=place, echo=echo)
    two = ZenohLink("device2", connect=place, echo=echo)
    try:
        until(lambda: one.is_connected and two.is_connected)
        yield one, two
    finally:
        one.close()
        two.close()


def send(transport: ZenohTransport, message: UMessage) -> bool:
    transport.send(message)
    return True


def deliver(leg: ZenohLeg, messages: Sequence[UMessage]) -> None:
    """Deliver once the other side's subscription has arrived."""
    until(lambda: leg.deliver(ENTITY, messages[:1]) == [None])
    assert leg.deliver(ENTITY, messages[1:]) == [None] * (len(messages) - 1)


def test_all_kinds_of_messages_arrive_unchanged() -> None:
    with two_links() as (one, two), ZenohTransport(one) as sender, ZenohTransport(two) as receiver:
        heard: list[UMessage] = []
        receiver.register_listener(UUri.ANY, heard.append)
        receiver.register_listener(UUri.ANY, heard.append, UUri.ANY.with_authority("device2"))
        sent = [
            publish(TOPIC, b"payload", priority=UPriority.CS4, ttl=60_000),
            notification(TOPIC, ENTITY, b"\x00" * 100, priority=UPriority.CS4),
            request(TOPIC.with_resource(0), METHOD, token="secret"),
        ]
        until(lambda: send(sender, publish(TOPIC, b"first")) and heard)
        heard.clear()
        for message in sent:
            sender.send(message)
        until(lambda: len([it for it in heard if it in sent]) == 3)
        assert [it for it in heard if it in sent] == sent


def test_a_session_does_not_hear_itself_unless_asked_to() -> None:
    for echo, expected in ((False, 0), (True, 1)):
        with two_links(echo) as (one, two), ZenohTransport(one) as me, ZenohTransport(two) as other:
            mine: list[UMessage] = []
            others: list[UMessage] = []
            me.register_listener(TOPIC, mine.append)
            other.register_listener(TOPIC, others.append)
            until(lambda: send(me, publish(TOPIC, b"x")) and others)  # noqa: B023
            time.sleep(0.05)
            assert bool(mine) == bool(expected)


def test_what_is_put_looks_as_other_implementations_expect_it() -> None:
    with two_links() as (one, two), ZenohTransport(one) as sender:
        samples: list[zenoh.Sample] = []
        subscriber = two._session.declare_subscriber("up/**", samples.append)
        message = notification(TOPIC, ENTITY, b"payload", priority=UPriority.CS5)
        until(lambda: send(sender, message) and samples)
        [sample] = samples[:1]
        assert str(sample.key_expr) == "up/device1/10AB/0/3/80CD/device2/EF/3/4/0"
        assert sample.payload.to_bytes() == b"payload"
        assert sample.attachment is not None
        assert sample.attachment.to_bytes() == b"\x01" + message.attributes.to_bytes()
        assert sample.priority == zenoh.Priority.INTERACTIVE_HIGH
        assert sample.congestion_control == zenoh.CongestionControl.BLOCK
        subscriber.undeclare()  # type: ignore[no-untyped-call]


def test_what_is_no_message_or_claims_another_source_is_counted_and_dropped() -> None:
    with two_links() as (one, two), ZenohTransport(two) as receiver:
        heard: list[UMessage] = []
        receiver.register_listener(UUri.ANY, heard.append)
        good = publish(TOPIC, b"good")
        key = key_of(good.attributes, "device1")
        session = one._session
        until(lambda: session.put(key, b"x") or two.counts["undecodable"])
        session.put(key, b"x", attachment=b"\x02" + good.attributes.to_bytes())
        session.put(key, b"x", attachment=b"\x01\xff\xff")
        until(lambda: two.counts["undecodable"] >= 3)
        spoofed = publish(TOPIC.with_authority("device9"))
        session.put(key, b"x", attachment=encode_attachment(spoofed.attributes))
        until(lambda: two.counts["mismatched"] == 1)
        session.put(key, b"good", attachment=encode_attachment(good.attributes))
        until(lambda: heard)
        assert heard == [good]


def test_publishes_do_not_wait_for_who_listens_to_messages_with_a_sink() -> None:
    with two_links() as (one, two), ZenohTransport(one) as sender, ZenohTransport(two) as receiver:
        heard: list[UMessage] = []
        receiver.register_listener(UUri.ANY, heard.append, UUri.ANY)
        # The key of any sink also matches the placeholder of publishes.
        until(
            lambda: (
                send(sender, publish(TOPIC)) and send(sender, notification(TOPIC, ENTITY)) and heard
            )
        )
        assert {it.attributes.type for it in heard} == {UMessageType.NOTIFICATION}
        books = receiver.statistics()
        assert (books["waiting"], books["unheard"]) == (0, 0)


def test_a_local_address_is_one_of_the_authority_in_the_key() -> None:
    with two_links() as (one, two), ZenohTransport(two) as receiver:
        heard: list[UMessage] = []
        receiver.register_listener(TOPIC, heard.append)
        receiver.register_listener(UUri.ANY.with_resource(0), heard.append, METHOD)
        # As a peer puts it that leaves out its own authority.
        published = publish(TOPIC.with_authority(""), b"x")
        asked = request(TOPIC.with_authority("").with_resource(0), METHOD, b"x")
        for sent in (published, asked):
            key, attachment = key_of(sent.attributes, "device1"), encode_attachment(sent.attributes)
            count = len(heard)
            until(lambda: one._session.put(key, b"x", attachment=attachment) or len(heard) > count)  # noqa: B023
            source = sent.attributes.source
            assert source is not None
            assert heard[-1] == sent.with_attributes(source=source.with_authority("device1"))
        assert two.counts["mismatched"] == 0


def test_a_leg_receives_what_is_for_its_authorities_and_the_topics_it_listens_to() -> None:
    with two_links() as (one, two), ZenohLeg("one", one) as sender, ZenohLeg("two", two) as leg:
        ingested: list[bytes | UMessage] = []
        leg.listen(TOPIC)
        leg.start(ingested.extend, ["device2", "device3"])
        sender.start(lambda _: None, ["device1"])
        wanted = [
            notification(TOPIC, ENTITY),
            notification(TOPIC, ENTITY.with_authority("device3")),
            publish(TOPIC, b"x"),
        ]
        for message in wanted:
            deliver(sender, [message])
        other = [
            publish(TOPIC.with_resource(0x8002)),
            notification(TOPIC, ENTITY.with_authority("device4")),
        ]
        for message in other:
            [status] = sender.deliver(ENTITY, [message])
            assert status is not None
            assert status.code == UCode.UNAVAILABLE
        until(lambda: len(ingested) == 3)
        assert ingested == wanted
        leg.listen(other[0].attributes.source or TOPIC)
        deliver(sender, other[:1])
        leg.unlisten(TOPIC)
        until(lambda: sender.deliver(ENTITY, [publish(TOPIC)]) != [None])
        until(lambda: len(ingested) == 4)
        assert leg.statistics()["received"] == 4


def test_order_is_kept_and_after_a_failure_the_rest_for_that_entity_is_not_tried() -> None:
    with two_links() as (one, two), ZenohLeg("one", one) as sender, ZenohLeg("two", two) as leg:
        ingested: list[bytes | UMessage] = []
        leg.start(ingested.extend, ["device2"])
        messages = [notification(TOPIC, ENTITY, b"%d" % n) for n in range(500)]
        deliver(sender, messages)
        until(lambda: len(ingested) == 500)
        assert ingested == messages
        bad = notification(TOPIC, ENTITY.with_authority("device9"))
        found = sender.deliver(ENTITY, [messages[0], bad, messages[1], bad])
        assert found[0] is found[2] is None
        assert found[1] is not None
        assert found[3] is NOT_TRIED


def test_a_dispatcher_that_cannot_store_slows_the_sender_and_loses_nothing() -> None:
    with two_links() as (one, two), ZenohLeg("one", one) as sender, ZenohLeg("two", two) as leg:
        stored: list[bytes | UMessage] = []
        failures = iter(range(2))

        def ingest(messages: Sequence[bytes | UMessage]) -> None:
            if next(failures, None) is not None:
                raise StorageError("writing", "it", OSError(28, "no space"))
            stored.extend(messages)

        leg.start(ingest, ["device2"])
        messages = [notification(TOPIC, ENTITY, b"%d" % n) for n in range(100)]
        deliver(sender, messages)
        until(lambda: len(stored) == 100)
        assert stored == messages
        assert leg.statistics()["ingest_failures"] == 2


def test_what_cannot_be_stored_before_the_end_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    def ingest(messages: Sequence[bytes | UMessage]) -> None:
        raise StorageError("writing", "it", OSError(28, f"no space for {len(messages)}"))

    with two_links() as (one, two), ZenohLeg("one", one) as sender:
        leg = ZenohLeg("two", two)
        leg.start(ingest, ["device2"])
        pump = leg._pump
        assert pump is not None
        messages = [notification(TOPIC, ENTITY, b"%d" % n) for n in range(100)]
        deliver(sender, messages)
        until(lambda: pump._bytes == sum(message.size for message in messages))
        until(lambda: leg.statistics()["ingest_failures"] > 0)
        assert leg.statistics()["abandoned"] == 0
        leg.close()
        assert leg.statistics()["abandoned"] == 100
    assert "100 messages came and were not taken" in caplog.text


def test_what_is_put_between_the_loss_of_a_link_and_of_its_receivers_counts_as_lost() -> None:
    # zenoh tells of the link first; what is put in between goes nowhere.
    with two_links() as (one, two), ZenohLeg("one", one) as sender:
        leg = ZenohLeg("two", two)
        leg.start(lambda _: None, ["device2"])
        deliver(sender, [notification(TOPIC, ENTITY)])
        before = sender.links_lost
        one._link_events.undeclare()  # type: ignore[no-untyped-call]
        one._link_events = one._session.info.declare_link_events_listener(lambda _: None)
        one._link_changed(SimpleNamespace(kind=zenoh.SampleKind.DELETE))
        assert sender.links_lost == before + 1
        on_its_way: HandedOver[UMessage] = HandedOver(sender)
        links_lost = sender.links_lost
        message = notification(TOPIC, ENTITY, b"into the void")
        assert sender.deliver(ENTITY, [message]) == [None]
        on_its_way.add([message], links_lost)
        leg.close()
        until(lambda: on_its_way.take() == ([], [message]))


def test_a_receiver_that_goes_while_its_link_stays_loses_nobody_anything() -> None:
    with two_links() as (one, two), ZenohLeg("one", one) as sender:
        leg = ZenohLeg("two", two)
        leg.start(lambda _: None, ["device2"])
        deliver(sender, [notification(TOPIC, ENTITY)])
        leg.stop()
        until(lambda: sender.deliver(ENTITY, [notification(TOPIC, ENTITY)]) != [None])
        assert sender.links_lost == 0


def test_a_leg_comes_back_when_the_other_side_does() -> None:
    place = [f"tcp/127.0.0.1:{free_port()}"]
    with ZenohLeg("one", ZenohLink("device1", connect=place)) as sender:
        [status] = sender.deliver(ENTITY, [notification(TOPIC, ENTITY)])
        assert status is not None
        assert status.code == UCode.UNAVAILABLE
        for _ in range(2):
            stored: list[bytes | UMessage] = []
            with ZenohLeg("two", ZenohLink("device2", listen=place)) as leg:
                leg.start(stored.extend, ["device2"])
                deliver(sender, [notification(TOPIC, ENTITY)])
                until(lambda: stored)  # noqa: B023
            until(lambda: sender.deliver(ENTITY, [notification(TOPIC, ENTITY)]) != [None])


def test_after_stop_nothing_is_ingested_and_after_close_all_is_unavailable() -> None:
    with two_links() as (one, two), ZenohLeg("one", one) as sender:
        stored: list[bytes | UMessage] = []
        leg = ZenohLeg("two", two)
        leg.start(stored.extend, ["*"])
        deliver(sender, [notification(TOPIC, ENTITY)])
        leg.stop()
        before = len(stored)
        sender.deliver(ENTITY, [notification(TOPIC, ENTITY)])
        leg.close()
        leg.close()
        assert len(stored) == before
        [status] = leg.deliver(ENTITY, [notification(TOPIC, ENTITY)])
        assert status is not None
        assert status.code == UCode.UNAVAILABLE


def test_a_transport_that_must_be_heard_says_when_it_is_not() -> None:
    with (
        two_links() as (one, _),
        ZenohTransport(one, must_be_heard=True) as sender,
        pytest.raises(UStatusError, match="UNAVAILABLE"),
    ):
        sender.send(notification(TOPIC, ENTITY))


def test_bad_settings_are_told() -> None:
    with pytest.raises(InvalidOption, match="zenoh refuses"):
        ZenohLink("device1", mode="nonsense")
    with pytest.raises(ConnectionLost):
        ZenohLink("device1", listen=["tcp/192.0.2.1:1"])


def test_a_listener_is_called_once_however_many_patterns_match() -> None:
    with two_links() as (one, two), ZenohTransport(one) as sender, ZenohTransport(two) as receiver:
        heard: list[UMessage] = []
        others: list[UMessage] = []
        receiver.register_listener(UUri.ANY, heard.append)
        receiver.register_listener(TOPIC, others.append)
        receiver.register_listener(UUri.ANY, print, UUri.ANY)
        until(lambda: send(sender, publish(TOPIC, b"first")) and heard and others)
        time.sleep(0.1)
        heard.clear()
        others.clear()
        sender.send(publish(TOPIC, b"once"))
        until(lambda: heard and others)
        time.sleep(0.1)
        assert [it.payload for it in heard] == [it.payload for it in others] == [b"once"]
