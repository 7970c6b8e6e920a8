"""Addresses, ids and messages by chance, valid ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from penstock.protocols.uprotocol.codes import UCode, UMessageType, UPayloadFormat, UPriority
from penstock.protocols.uprotocol.message import UAttributes, UMessage
from penstock.protocols.uprotocol.uuid7 import UUID7
from penstock.protocols.uprotocol.uuri import UUri

NAME = st.text("abcdefghijklmnopqrstuvwxyz0123456789-._~", min_size=1, max_size=128)
AUTHORITY = st.one_of(st.just(""), NAME, st.sampled_from(["192.168.1.1", "[2001::7]", "[::1]"]))
#: Of any kind, patterns among them.
UURI = st.builds(
    UUri,
    AUTHORITY | st.just("*"),
    st.integers(0, 0xFFFFFFFF),
    st.integers(0, 0xFF),
    st.integers(0, 0xFFFF),
)
ID = st.builds(
    lambda ms, a, b: UUID7(ms << 16 | 7 << 12 | a, 0b10 << 62 | b),
    st.integers(0, 2**48 - 1),
    st.integers(0, 2**12 - 1),
    st.integers(0, 2**62 - 1),
)
TRACEPARENT = st.just("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
_ENTITY = st.integers(0, 0xFFFE) | st.integers(1, 0xFFFE).map(lambda n: n << 16 | 7)


def address(low: int, high: int) -> st.SearchStrategy[UUri]:
    return st.builds(UUri, AUTHORITY, _ENTITY, st.integers(0, 0xFE), st.integers(low, high))


TOPIC, METHOD, ENTITY = address(0x8000, 0xFFFE), address(1, 0x7FFF), address(0, 0)
_OPTIONAL: dict[str, Any] = {
    "permission_level": st.none() | st.integers(0, 2**31 - 1),
    "commstatus": st.none() | st.sampled_from(UCode),
    "token": st.none() | st.text(max_size=20),
    "traceparent": st.none() | TRACEPARENT,
}


@st.composite
def messages(draw: st.DrawFn, *, shared_memory: bool = True) -> UMessage:
    type = draw(st.sampled_from([kind for kind in UMessageType if kind]))
    formats = [kind for kind in UPayloadFormat if shared_memory or kind != UPayloadFormat.SHM]
    format = draw(st.sampled_from(formats))
    payload = draw(st.binary(max_size=300) if format else st.none() | st.binary(max_size=300))
    rpc = type in (UMessageType.REQUEST, UMessageType.RESPONSE)
    sources = {UMessageType.REQUEST: ENTITY, UMessageType.RESPONSE: METHOD}
    sinks = {UMessageType.REQUEST: METHOD, UMessageType.PUBLISH: st.none()}
    priorities = [UPriority.CS4, UPriority.CS5, UPriority.CS6] if rpc else list(UPriority)
    ttl = st.integers(1, 2**31 - 1)
    attributes = UAttributes(
        id=draw(ID),
        type=type,
        source=draw(sources.get(type, TOPIC)),
        sink=draw(sinks.get(type, ENTITY)),
        priority=draw(st.sampled_from(priorities)),
        ttl=draw(ttl if rpc else st.none() | st.just(0) | ttl),
        reqid=draw(ID if type == UMessageType.RESPONSE else st.none()),
        payload_format=format,
        **{name: draw(some) for name, some in _OPTIONAL.items()},
    )
    return UMessage(attributes, payload)
