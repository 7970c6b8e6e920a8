"""The rules of each type of message (docs/specs/uprotocol.md 3.2)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from penstock.protocols.uprotocol.codes import UCode, UMessageType, UPayloadFormat, UPriority
from penstock.protocols.uprotocol.errors import InvalidMessage
from penstock.protocols.uprotocol.message import UAttributes, UMessage
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import RULES, check, is_traceparent, validate
from protocols.uprotocol.strategies import messages
from protocols.uprotocol.vectors import cases

TOPIC, ENTITY, METHOD = UUri("a", 1, 1, 0x8000), UUri("b", 2, 1, 0), UUri("c", 3, 1, 1)
ID = UUID7.parse("018bcfe5-6800-7123-8000-000000abcdef")
V4 = UUID7.unchecked(0x195F9BD1526D4C28, 0x91B1FF34C8E3632D)
VALID: dict[str, UAttributes] = {
    "publish": UAttributes(id=ID, type=UMessageType.PUBLISH, source=TOPIC),
    "notification": UAttributes(id=ID, type=UMessageType.NOTIFICATION, source=TOPIC, sink=ENTITY),
    "request": UAttributes(
        id=ID,
        type=UMessageType.REQUEST,
        source=ENTITY,
        sink=METHOD,
        priority=UPriority.CS4,
        ttl=1,
    ),
    "response": UAttributes(
        id=ID,
        type=UMessageType.RESPONSE,
        source=METHOD,
        sink=ENTITY,
        priority=UPriority.CS4,
        ttl=1,
        reqid=ID,
    ),
}
RESOURCES = (0, 1, 0x7FFF, 0x8000, 0xFFFE)
TOPICS, METHODS, ENTITIES = {0x8000, 0xFFFE}, {1, 0x7FFF}, {0}


@pytest.mark.parametrize("case", cases("attributes_validation"))
def test_the_vectors_violate_the_rules_they_say(case: Any) -> None:
    attributes = UAttributes.from_bytes(bytes.fromhex(case["hex"]))
    for _ in range(2):  # the second time from memory
        assert validate(attributes, case["has_payload"]) == case["violated"]
    anew = UAttributes.from_bytes(bytes.fromhex(case["hex"])).replace(_origin=None)
    assert validate(anew, case["has_payload"]) == case["violated"]
    if case["violated"]:
        with pytest.raises(InvalidMessage) as caught:
            check(attributes, case["has_payload"])
        assert caught.value.rules == tuple(case["violated"])
    else:
        check(attributes, case["has_payload"])


@pytest.mark.parametrize("kind", list(VALID))
def test_the_least_of_each_type_is_valid(kind: str) -> None:
    assert validate(VALID[kind], has_payload=True) == []
    assert validate(VALID[kind], has_payload=False) == []


@pytest.mark.parametrize(
    ("kind", "name", "allowed"),
    [
        ("publish", "source", TOPICS),
        ("notification", "source", TOPICS),
        ("notification", "sink", ENTITIES),
        ("request", "source", ENTITIES),
        ("request", "sink", METHODS),
        ("response", "source", METHODS),
        ("response", "sink", ENTITIES),
    ],
)
def test_source_and_sink_have_the_resource_of_their_type(
    kind: str, name: str, allowed: set[int]
) -> None:
    for resource in RESOURCES:
        changed = VALID[kind].replace(**{name: UUri("x", 1, 1, resource)})
        expected = [] if resource in allowed else [f"{kind}-{name}"]
        assert validate(changed, has_payload=True) == expected
    assert validate(VALID[kind].replace(**{name: None}), has_payload=True) == [f"{kind}-{name}"]
    wild = UUri("x", 1, 1, 0xFFFF)
    assert validate(VALID[kind].replace(**{name: wild}), has_payload=True) == [
        f"{kind}-{name}",
        f"{name}-wildcard",
    ]


@pytest.mark.parametrize("kind", list(VALID))
@pytest.mark.parametrize("name", ["source", "sink"])
@pytest.mark.parametrize(
    "changes",
    [
        {"authority_name": "*"},
        {"ue_id": 0xFFFF},
        {"ue_id": 0xFFFF0001},
        {"ue_id": 0xFFFFFFFF},
        {"ue_version_major": 0xFF},
    ],
)
def test_no_address_of_a_message_is_a_pattern(
    kind: str, name: str, changes: dict[str, Any]
) -> None:
    was = getattr(VALID[kind], name)
    if was is None:
        changed = VALID[kind].replace(sink=ENTITY.replace(**changes))
        assert validate(changed, has_payload=True) == ["publish-sink"]
    else:
        changed = VALID[kind].replace(**{name: was.replace(**changes)})
        assert validate(changed, has_payload=True) == [f"{name}-wildcard"]


@pytest.mark.parametrize(
    ("sink", "fine"),
    [
        ("//cloud/FFFFFFFF/FF/FFFF", True),
        ("/FFFFFFFF/FF/FFFF", False),
        ("//cloud/FFFF/FF/FFFF", False),
        ("//cloud/FFFF0000/FF/FFFF", False),
        ("//cloud/FFFFFFFF/1/FFFF", False),
        ("//cloud/FFFFFFFF/FF/0", False),
        ("//cloud/1/1/0", False),
        ("/0/0/0", False),
    ],
)
def test_only_a_streamer_puts_a_sink_on_a_publish(sink: str, fine: bool) -> None:
    changed = VALID["publish"].replace(sink=UUri.parse(sink))
    assert validate(changed, has_payload=True) == ([] if fine else ["publish-sink"])


@pytest.mark.parametrize("kind", list(VALID))
@pytest.mark.parametrize("priority", list(UPriority))
def test_rpc_needs_cs4_or_higher_and_others_need_none(kind: str, priority: UPriority) -> None:
    fine = kind in ("publish", "notification") or priority >= UPriority.CS4
    found = validate(VALID[kind].replace(priority=priority), has_payload=True)
    assert found == ([] if fine else [f"{kind}-priority"])


@pytest.mark.parametrize("kind", list(VALID))
@pytest.mark.parametrize("ttl", [None, 0, 1, 2**32 - 1])
def test_rpc_needs_a_ttl_and_others_need_none(kind: str, ttl: int | None) -> None:
    fine = kind in ("publish", "notification") or bool(ttl)
    found = validate(VALID[kind].replace(ttl=ttl), has_payload=True)
    assert found == ([] if fine else [f"{kind}-ttl"])


@pytest.mark.parametrize("kind", list(VALID))
@pytest.mark.parametrize("id", [None, V4, UUID7.unchecked(0x7000, 3 << 62)])
def test_an_id_is_of_version_7(kind: str, id: UUID7 | None) -> None:
    assert validate(VALID[kind].replace(id=id), has_payload=True) == ["id"]
    found = validate(VALID[kind].replace(reqid=id), has_payload=True)
    assert found == (["response-reqid"] if kind == "response" else [])


@pytest.mark.parametrize("kind", list(VALID))
def test_attributes_of_other_types_are_tolerated(kind: str) -> None:
    extra = VALID[kind].replace(
        token="t", permission_level=0, commstatus=UCode.UNAVAILABLE, reqid=ID, traceparent=""
    )
    assert validate(extra, has_payload=True) == []


@pytest.mark.parametrize("kind", list(VALID))
@pytest.mark.parametrize("format", list(UPayloadFormat))
def test_a_format_needs_a_payload(kind: str, format: UPayloadFormat) -> None:
    changed = VALID[kind].replace(payload_format=format)
    assert validate(changed, has_payload=True) == []
    expected = ["payload-format-without-payload"] if format else []
    assert validate(changed, has_payload=False) == expected


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff", True),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\n", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", False),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331", False),
        (" ", False),
    ],
)
def test_a_trace_is_of_the_w3c(text: str, fine: bool) -> None:
    assert is_traceparent(text) is fine
    for kind in VALID.values():
        found = validate(kind.replace(traceparent=text), has_payload=True)
        assert found == ([] if fine else ["traceparent"])


def test_every_rule_is_named_at_once() -> None:
    bad = UUri.unchecked("VEH", 0xFFFF, 1, 0x10000)
    everything = UAttributes(
        id=V4,
        type=UMessageType.RESPONSE,
        source=bad,
        sink=bad,
        traceparent="x",
        payload_format=UPayloadFormat.RAW,
    )
    found = UAttributes.from_bytes(everything.to_bytes())
    for attributes in (everything, found):
        rules = validate(attributes, has_payload=False)
        assert set(rules) == {
            *("id", "source-uuri", "sink-uuri", "response-source", "response-sink"),
            *("response-priority", "response-ttl", "response-reqid", "source-wildcard"),
            *("sink-wildcard", "traceparent", "payload-format-without-payload"),
        }
    assert validate(UAttributes(), has_payload=True) == ["id", "type"]


def test_the_answer_is_the_callers_own() -> None:
    found = UAttributes.from_bytes(VALID["publish"].to_bytes())
    validate(found, has_payload=True).append("changed")
    assert validate(found, has_payload=True) == []


def test_the_rules_are_those_of_the_vectors() -> None:
    named = {rule for case in cases("attributes_validation") for rule in case.values[0]["violated"]}
    assert named <= set(RULES)


@given(messages())
def test_a_valid_message_is_valid_by_either_way(message: UMessage) -> None:
    assert message.validate() == []
    assert UMessage.from_bytes(message.to_bytes()).validate() == []
