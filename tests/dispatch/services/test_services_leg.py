"""How the services inside a dispatcher are reached, and when they act by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.core.clock import SYSTEM_CLOCK
from penstock.core.errors import PenstockError
from penstock.dispatch.services import ServicesLeg, SubscriptionTable, USubscription
from penstock.protocols.uprotocol import (
    UCode,
    UMessage,
    UMessageType,
    UPayloadFormat,
    UUri,
    notification,
    proto,
    request,
)
from support.until import until

TOPIC = UUri("here", 0x10, 1, 0x8001)
ALICE = UUri("here", 0x20, 1, 0)
ADDRESS = UUri("here", 0, 4, 0)


class _Store:
    """What a dispatcher is to a leg."""

    def __init__(self) -> None:
        self.messages: list[UMessage] = []
        self.is_full = False

    def ingest(self, messages: Sequence[bytes | UMessage]) -> None:
        if self.is_full:
            raise PenstockError("there is no space")
        self.messages += [one for one in messages if isinstance(one, UMessage)]

    def types(self) -> list[UMessageType]:
        return [one.attributes.type for one in self.messages]


def _leg(path: Path, *, threads: bool = False) -> tuple[ServicesLeg, _Store, SubscriptionTable]:
    table = SubscriptionTable(path)
    service = USubscription("here", table, SYSTEM_CLOCK)
    store = _Store()
    leg = ServicesLeg("services", [service], SYSTEM_CLOCK, threads=threads)
    leg.start(store.ingest, [])
    return leg, store, table


def _subscribe(expires_ms: int | None = None) -> UMessage:
    asked = proto.SubscribeRequest(topic=TOPIC.to_proto())
    if expires_ms is not None:
        asked.expiration.FromMilliseconds(expires_ms)
    return request(
        ALICE,
        ADDRESS.with_resource(1),
        asked.SerializeToString(),
        payload_format=UPayloadFormat.PROTOBUF,
    )


def test_the_answer_comes_before_the_news(tmp_path: Path) -> None:
    leg, store, _ = _leg(tmp_path / "table")
    assert leg.deliver(ADDRESS, [_subscribe()]) == [None]
    response, told, published = (
        UMessageType.RESPONSE,
        UMessageType.NOTIFICATION,
        UMessageType.PUBLISH,
    )
    assert store.types() == [response, told, published]
    leg.close()


def test_what_could_not_be_stored_is_said_later_and_nothing_of_it_is_lost(tmp_path: Path) -> None:
    leg, store, table = _leg(tmp_path / "table")
    store.is_full = True
    [status] = leg.deliver(ADDRESS, [_subscribe()])
    assert status is not None
    assert status.code == UCode.UNAVAILABLE
    assert table.count == 1
    store.is_full = False
    assert leg.deliver(ADDRESS, [_subscribe()]) == [None]
    kinds = store.types()
    assert kinds.count(UMessageType.NOTIFICATION) == 1
    assert kinds.count(UMessageType.RESPONSE) == 2  # at least once
    leg.close()


def test_an_instance_of_a_service_that_there_is_not_is_not_found(tmp_path: Path) -> None:
    leg, _, _ = _leg(tmp_path / "table")
    for address in (UUri("here", 0x10000, 4, 0), UUri("here", 9, 1, 0)):
        [status] = leg.deliver(address, [_subscribe()])
        assert status is not None
        assert status.code == UCode.NOT_FOUND
    leg.close()


def test_a_thread_ends_subscriptions_in_time(tmp_path: Path) -> None:
    leg, store, table = _leg(tmp_path / "table", threads=True)
    soon_ms = SYSTEM_CLOCK.now_ns() // 1_000_000 + 300
    leg.deliver(ADDRESS, [_subscribe(soon_ms)])
    until(lambda: table.count == 0)
    until(lambda: store.types().count(UMessageType.NOTIFICATION) == 2)
    assert SYSTEM_CLOCK.now_ns() // 1_000_000 >= soon_ms
    leg.close()


def test_a_leg_that_is_stopped_changes_nothing(tmp_path: Path) -> None:
    leg, store, table = _leg(tmp_path / "table", threads=True)
    leg.stop()
    [status] = leg.deliver(ADDRESS, [_subscribe()])
    assert status is not None
    assert status.code == UCode.UNAVAILABLE
    assert (store.messages, table.count) == ([], 0)
    leg.close()


@pytest.mark.parametrize("payload", [b"", b"\xff" * 10])
def test_what_is_no_request_is_taken_without_a_word(tmp_path: Path, payload: bytes) -> None:
    leg, store, _ = _leg(tmp_path / "table")
    source = UUri("there", 0, 4, 0x8000)
    message = notification(source, ADDRESS, payload, payload_format=UPayloadFormat.PROTOBUF)
    assert leg.deliver(ADDRESS, [message]) == [None]
    assert store.messages == []
    leg.close()
