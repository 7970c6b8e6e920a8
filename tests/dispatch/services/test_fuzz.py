"""Whatever a request has in it, a service answers it once, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.clock import SYSTEM_CLOCK
from penstock.dispatch.services import SubscriptionTable, UDiscovery, USubscription, UTwin
from penstock.dispatch.services.leg import Service
from penstock.protocols.uprotocol import (
    UMessage,
    UMessageType,
    UPayloadFormat,
    UUri,
    notification,
    proto,
    request,
)

_SOURCES = [UUri("here", 0x20, 1, 0), UUri("there", 0, 4, 0)]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    path: Path = tmp_path_factory.mktemp("fuzz") / "table"
    made: list[Service] = [
        USubscription("here", SubscriptionTable(path), SYSTEM_CLOCK),
        UTwin("here", SYSTEM_CLOCK),
        UDiscovery("here", SYSTEM_CLOCK),
    ]
    yield made
    for service in made:
        service.close()


def _uuris() -> st.SearchStrategy[object]:
    return st.builds(
        proto.UUri,
        authority_name=st.sampled_from(["", "here", "there", "*", "UPPER", "x" * 200]),
        ue_id=st.sampled_from([0, 0x10, 0xFFFF, 0xFFFF0010, 0xFFFFFFFF]),
        ue_version_major=st.sampled_from([0, 1, 0xFF, 0x100, 0xFFFFFFFF]),
        resource_id=st.sampled_from([0, 1, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x10000]),
    )


def _subscribes() -> st.SearchStrategy[bytes]:
    times = st.builds(
        proto.Timestamp,
        seconds=st.integers(-(2**63), 2**63 - 1),
        nanos=st.integers(-(2**31), 2**31 - 1),
    )
    return st.builds(
        proto.SubscribeRequest,
        topic=_uuris(),
        expiration=st.none() | times,
        sample_period=st.none() | st.integers(0, 2**32 - 1),
    ).map(lambda it: it.SerializeToString())


_payloads = (
    st.none()
    | st.binary(max_size=60)
    | _subscribes()
    | st.lists(_uuris(), max_size=4).map(lambda it: proto.UUriBatch(uris=it).SerializeToString())
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    number=st.integers(0, 2),
    method=st.integers(1, 10),
    payload=_payloads,
    form=st.sampled_from(list(UPayloadFormat)),
    source=st.sampled_from(_SOURCES),
)
def test_every_request_has_one_answer(
    services: list[Service],
    number: int,
    method: int,
    payload: bytes | None,
    form: UPayloadFormat,
    source: UUri,
) -> None:
    service = services[number]
    kind = UPayloadFormat.UNSPECIFIED if payload is None else form
    asked = request(source, service.address.with_resource(method), payload, payload_format=kind)
    said = service.receive(asked)
    answers = [one for one in said if one.attributes.type == UMessageType.RESPONSE]
    assert [one.attributes.reqid for one in answers] == [asked.attributes.id]
    assert all(one.validate() == [] for one in said)
    service.work()
    service.next_due()


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(payload=_payloads, form=st.sampled_from(list(UPayloadFormat)))
def test_no_notification_is_answered(
    services: list[Service], payload: bytes | None, form: UPayloadFormat
) -> None:
    kind = UPayloadFormat.UNSPECIFIED if payload is None else form
    told = notification(
        UUri("there", 0, 4, 0x8000), services[0].address, payload, payload_format=kind
    )
    for service in services:
        said = service.receive(UMessage.from_bytes(told.to_bytes()))
        assert not any(one.attributes.type == UMessageType.RESPONSE for one in said)
