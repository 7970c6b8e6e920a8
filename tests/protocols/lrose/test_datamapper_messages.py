"""Requests and replies of the DataMapper, as bytes: each reads what it writes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidOption
from penstock.protocols.lrose.datamapper_info import DataSetInfo
from penstock.protocols.lrose.datamapper_messages import (
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)
from penstock.protocols.lrose.ds_message import DsMessage
from protocols.lrose.recordings import RECORDINGS, messages_of, recording

infos = st.builds(
    DataSetInfo,
    latest_time=st.integers(0, 2**31 - 1),
    datatype=st.text("abcü", max_size=10),
    dir=st.text("ab/é", max_size=60),
    hostname=st.text("xyz", max_size=5),
)
hosts = st.lists(st.text("abc.-", min_size=1, max_size=8), max_size=4).map(tuple)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=50)


@st.composite
def requests(draw: st.DrawFn) -> MapRequest:
    kind = draw(st.sampled_from(RequestKind))
    count = {RequestKind.REQ_ALL: (0, 0), RequestKind.REG_FULL: (0, 5)}.get(kind, (1, 1))
    entries = draw(st.lists(infos, min_size=count[0], max_size=count[1]))
    is_question = kind in {RequestKind.REQ_ALL, RequestKind.REQ_SELECTED}
    return MapRequest(kind, tuple(entries), draw(hosts) if is_question else ())


@given(requests())
def test_a_request_reads_what_it_writes(request: MapRequest) -> None:
    data = request.to_message().to_bytes()
    assert MapRequest.from_message(DsMessage.from_bytes(data)) == request


@given(st.builds(MapReply, st.sampled_from(ReplyKind), st.lists(infos, max_size=4).map(tuple), st.none() | texts))  # fmt: skip  # noqa: E501
def test_a_reply_reads_what_it_writes(reply: MapReply) -> None:
    data = reply.to_message().to_bytes()
    assert MapReply.from_message(DsMessage.from_bytes(data)) == reply


@pytest.mark.parametrize("name", [name for name in RECORDINGS if name.startswith("dmap_")])
def test_recorded_messages_are_written_again_byte_for_byte(name: str) -> None:
    (message,) = messages_of(recording(name))
    kind = MapRequest if name.endswith("c2s") else MapReply
    assert kind.from_message(message).to_message() == message
    assert message.to_bytes() == recording(name)[20:]


def test_an_entry_that_does_not_fit_is_refused_before_it_travels() -> None:
    with pytest.raises(InvalidOption):
        MapRequest(RequestKind.REG_STATUS, (DataSetInfo(status="x" * 128),)).to_message()
