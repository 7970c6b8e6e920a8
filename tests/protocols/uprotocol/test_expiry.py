"""A message is alive until its ttl is over, and at its very end (docs/specs/uprotocol.md 3.3)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocols.uprotocol.message import UAttributes, expires_at_ms, is_expired
from penstock.protocols.uprotocol.uuid7 import UUID7
from protocols.uprotocol.vectors import cases


@pytest.mark.parametrize("case", cases("ttl_expiry"))
def test_the_vectors_are_alive_or_not(case: Any) -> None:
    id = UUID7.parse(case["uuid"])
    assert id.time_ms == case["created_ms"]
    assert is_expired(id, case["now_ms"], case["ttl"]) is case["expired"]
    attributes = UAttributes(id=id, ttl=case["ttl"])
    assert is_expired(attributes, case["now_ms"]) is case["expired"]
    found = UAttributes.from_bytes(attributes.to_bytes())
    assert is_expired(found, case["now_ms"]) is case["expired"]


@pytest.mark.parametrize("ttl", [1, 999, 1000, 2**32 - 1])
def test_the_end_is_the_last_millisecond_alive(ttl: int) -> None:
    id = UUID7.new(1_700_000_000_000)
    end = expires_at_ms(id, ttl)
    assert end == 1_700_000_000_000 + ttl
    assert not is_expired(id, end, ttl)
    assert is_expired(id, end + 1, ttl)


@pytest.mark.parametrize("ttl", [None, 0])
def test_without_ttl_there_is_no_end(ttl: int | None) -> None:
    id = UUID7.new(0)
    assert expires_at_ms(id, ttl) is None
    assert expires_at_ms(UAttributes(id=id, ttl=ttl)) is None
    assert not is_expired(id, 2**63, ttl)


def test_without_id_there_is_no_time() -> None:
    assert expires_at_ms(UAttributes(ttl=5)) is None
    assert not is_expired(UAttributes(ttl=5), 2**63)
