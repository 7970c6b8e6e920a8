"""What the native scan finds in messages is what the protobuf library finds, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dispatch._headers import scan
from penstock.dispatch.intake import groups_of
from penstock.dispatch.plan import id_key
from penstock.protocols.uprotocol import UUID7, UMessage, UPayloadFormat, UUri, publish

LARGEST = 1 << 20

messages = st.builds(
    lambda resource, ttl, payload, ms: publish(
        UUri("v" * 2 * resource, 0x10, 1, 0x8000 + resource),
        payload,
        ttl=ttl,
        id=UUID7.new(ms),
        payload_format=UPayloadFormat.UNSPECIFIED if payload is None else UPayloadFormat.RAW,
    ),
    st.integers(1, 60),
    st.sampled_from([None, 5, 100_000]),
    st.none() | st.sampled_from([b"", b"x", bytes(127), bytes(128), bytes(300)]),
    st.integers(0, (1 << 48) - 1),
)


@given(batch=st.lists(messages, max_size=12))
def test_messages_are_grouped_by_their_attributes_without_the_id(batch: list[UMessage]) -> None:
    raws = [message.to_bytes() for message in batch]
    groups = groups_of(raws, LARGEST)
    found = {place: group for group in groups for place in group.places}
    assert sorted(found) == list(range(len(batch)))
    for place, message in enumerate(batch):
        group, id = found[place], message.attributes.id
        assert id is not None
        at = group.places.index(place)
        assert group.is_found
        assert group.raws[at] == raws[place]
        assert (group.ids[at], group.made_ms[at]) == (id_key(id), id.time_ms)
        assert group.attributes in message.attributes.to_bytes()
        assert group.has_payload == (message.payload is not None)
        for other, another in enumerate(batch):
            alike = message.attributes.replace(id=None) == another.attributes.replace(id=None)
            alike = alike and (message.payload is None) == (another.payload is None)
            assert (found[other] is group) == alike


@given(message=messages, resource=st.integers(1, 40), ttl=st.none() | st.integers(1, 1 << 31))
def test_a_message_gets_other_attributes_and_keeps_its_id_and_payload(
    message: UMessage, resource: int, ttl: int | None
) -> None:
    raw = message.to_bytes()
    changed = message.with_attributes(source=UUri("x" * resource, 1, 1, 0x8001), ttl=ttl)
    (group,) = groups_of([raw], LARGEST)
    behind = changed.attributes.to_bytes()[20:]
    assert UMessage.from_bytes(group.with_attributes(raw, behind)) == changed


@given(message=messages, at=st.integers(0, 200), byte=st.integers(0, 255), end=st.integers(0, 300))
def test_what_is_damaged_or_cut_off_is_left_to_the_library_or_right(
    message: UMessage, at: int, byte: int, end: int
) -> None:
    data = bytearray(message.to_bytes())
    data[at % len(data)] = byte
    for raw in (bytes(data), bytes(data[:end]), bytes(data[end:])):
        (group,) = groups_of([raw], LARGEST)
        assert group.raws == [raw]
        if group.is_found:
            ends = group.attributes_begin, group.attributes_end
            assert 0 < ends[0] + 20 <= ends[1] <= len(raw)
            assert raw[ends[0] + 20 : ends[1]] == group.attributes


@given(batch=st.lists(st.binary(max_size=64), max_size=8))
def test_any_bytes_are_taken(batch: list[bytes]) -> None:
    groups = groups_of(batch, LARGEST)
    assert sorted(place for group in groups for place in group.places) == list(range(len(batch)))


def test_nothing_is_looked_for_in_what_is_too_large_or_no_bytes() -> None:
    raw = publish(UUri("here", 1, 1, 0x8001), b"x", payload_format=UPayloadFormat.RAW).to_bytes()
    assert groups_of([raw], len(raw))[0].is_found
    large = publish(UUri("here", 1, 1, 0x8001), bytes(70_000), payload_format=UPayloadFormat.RAW)
    assert groups_of([large.to_bytes()], LARGEST)[0].is_found
    assert not groups_of([raw], len(raw) - 1)[0].is_found
    for wrong in (None, [raw, memoryview(raw)], ["text"]):
        given_wrong: Any = wrong
        with pytest.raises(TypeError):
            scan(given_wrong, LARGEST)
