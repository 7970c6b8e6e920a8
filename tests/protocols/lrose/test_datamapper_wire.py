"""Entries, requests and replies of the DataMapper: LROSE's bytes are read and written exactly."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import InvalidOption, Malformed
from penstock.protocols.lrose.datamapper_wire import (
    INFO_SIZE,
    NO_LEAD,
    DataSetInfo,
    MapReply,
    MapRequest,
    ReplyKind,
    RequestKind,
)
from penstock.protocols.lrose.ds_message import DsMessage, Part
from protocols.lrose.recordings import RECORDINGS, messages_of, recording

# --- entries ------------------------------------------------------------------------------------

TABLE = (Path(__file__).parents[2] / "vectors" / "lrose" / "wire" / "dmap_table.bin").read_bytes()
RECORDS = [TABLE[at : at + INFO_SIZE] for at in range(0, len(TABLE), INFO_SIZE)]

seconds = st.integers(-(2**31), 2**31 - 1)
counts = st.floats(width=32, allow_nan=False, allow_infinity=False)


def text(size: int) -> st.SearchStrategy[str]:
    """Text whose bytes leave room for the NUL; some of it is not UTF-8."""
    return (
        st.binary(max_size=size - 1)
        .map(lambda raw: raw.replace(b"\0", b"0"))
        .map(lambda raw: raw.decode(errors="surrogateescape"))
    )


infos = st.builds(
    DataSetInfo,
    start_time=seconds,
    end_time=seconds,
    latest_time=seconds,
    last_reg_time=seconds,
    nfiles=counts,
    total_bytes=counts,
    forecast_lead_time=seconds,
    check_time=seconds,
    hostname=text(128),
    ipaddr=text(64),
    datatype=text(32),
    dir=text(256),
    status=text(128),
)


def test_the_recorded_table_is_read_as_it_was_registered() -> None:
    read = [DataSetInfo.read(record) for record in RECORDS]
    assert [(each.datatype, each.dir, each.forecast_lead_time) for each in read] == [
        ("mdv", "mdv/fcst", 3600),
        ("mdv", "mdv/remote", NO_LEAD),
        ("mdv", "mdv/test", NO_LEAD),
    ]
    assert {(each.hostname, each.ipaddr, each.check_time) for each in read} == {
        ("vm", "127.0.0.1", 0)
    }
    assert [each.latest_time for each in read] == [1705320000, 1706745600, 1705322096]


@pytest.mark.parametrize("record", RECORDS)
def test_a_recorded_entry_is_written_byte_for_byte(record: bytes) -> None:
    assert DataSetInfo.read(record).write() == record


@given(infos)
def test_an_entry_reads_what_it_writes(info: DataSetInfo) -> None:
    record = info.write()
    assert len(record) == INFO_SIZE
    assert DataSetInfo.read(record) == info


def test_each_field_is_where_lrose_has_it() -> None:
    record = DataSetInfo(
        start_time=1,
        end_time=2,
        latest_time=3,
        last_reg_time=4,
        nfiles=1.5,
        total_bytes=2.5,
        forecast_lead_time=5,
        check_time=6,
        hostname="h",
        ipaddr="i",
        datatype="t",
        dir="d",
        status="s",
    ).write()
    assert struct.unpack_from(">4i2f2i", record) == (1, 2, 3, 4, 1.5, 2.5, 5, 6)
    offsets = {128: b"h", 256: b"i", 320: b"t", 352: b"d", 608: b"s"}
    assert {at: record[at : at + 1] for at in offsets} == offsets
    assert record[32:128] == bytes(96)
    assert record[736:] == bytes(128)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("latest_time", 2**31),
        ("check_time", -(2**31) - 1),
        ("total_bytes", 1e39),
        ("hostname", "x" * 128),
        ("dir", "ü" * 128),
        ("status", "a\0b"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        replace(DataSetInfo(), **{field: value}).write()
    assert field in caught.value.option


def test_the_longest_texts_fit() -> None:
    info = DataSetInfo(hostname="h" * 127, ipaddr="i" * 63, datatype="t" * 31, dir="d" * 255)
    assert DataSetInfo.read(info.write()) == info


@pytest.mark.parametrize("size", [0, 32, INFO_SIZE - 1, INFO_SIZE + 1])
def test_another_size_is_refused(size: int) -> None:
    with pytest.raises(Malformed, match="864"):
        DataSetInfo.read(bytes(size))


@pytest.mark.parametrize(("field", "at", "size"), [("hostname", 128, 128), ("dir", 352, 256)])
def test_a_text_without_an_end_is_refused(field: str, at: int, size: int) -> None:
    record = bytearray(INFO_SIZE)
    record[at : at + size] = b"x" * size
    with pytest.raises(Malformed, match=field):
        DataSetInfo.read(record)


@pytest.mark.parametrize("message", [MapRequest(RequestKind.REG_FULL, (DataSetInfo(),)),
                                     MapReply(ReplyKind.WITH_INFO, (DataSetInfo(),))])  # fmt: skip
def test_in_a_message_a_text_without_an_end_is_cut_as_by_lrose(
    message: MapRequest | MapReply,
) -> None:
    whole = message.to_message()
    record = bytearray(whole.parts[0].data)
    record[128:256], record[320:352] = b"h" * 128, b"t" * 32
    sent = whole._replace(parts=(Part(whole.parts[0].type, bytes(record)),))
    (info,) = message.from_message(sent).infos
    assert (info.hostname, info.datatype, info.dir) == ("h" * 127, "t" * 31, "")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_count_that_is_no_number_is_refused(number: float) -> None:
    record = bytearray(INFO_SIZE)
    struct.pack_into(">f", record, 16, number)
    with pytest.raises(Malformed, match="nfiles"):
        DataSetInfo.read(record)


def test_what_follows_the_nul_of_a_text_is_not_read() -> None:
    record = bytearray(INFO_SIZE)
    record[320:330] = b"fmq\0garbag"
    assert DataSetInfo.read(record).datatype == "fmq"


# --- requests and replies -----------------------------------------------------------------------

small_infos = st.builds(
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
    entries = draw(st.lists(small_infos, min_size=count[0], max_size=count[1]))
    is_question = kind in {RequestKind.REQ_ALL, RequestKind.REQ_SELECTED}
    return MapRequest(kind, tuple(entries), draw(hosts) if is_question else ())


@given(requests())
def test_a_request_reads_what_it_writes(request: MapRequest) -> None:
    data = request.to_message().to_bytes()
    assert MapRequest.from_message(DsMessage.from_bytes(data)) == request


@given(st.builds(MapReply, st.sampled_from(ReplyKind), st.lists(small_infos, max_size=4).map(tuple), st.none() | texts))  # fmt: skip  # noqa: E501
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
