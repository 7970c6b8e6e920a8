"""Entries of latest_data_info as text, XML and messages: exactly as LROSE writes them."""

from __future__ import annotations

import contextlib
import datetime as dt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import open_reader
from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.lrose.ldata_format import (
    LatestInfo,
    catalog_line,
    decode_ascii,
    decode_body,
    decode_xml,
    encode_ascii,
    encode_body,
    encode_xml,
    guess_data_type,
    xml_in_body,
)

VECTORS = Path(__file__).parents[2] / "vectors" / "lrose" / "ldata"

FORECAST = LatestInfo(
    latest_time=1705320000,
    rel_data_path="20240115/g_120000/f_00007200.nc",
    file_ext="nc",
    data_type="mdv",
    is_forecast=True,
    forecast_lead_secs=7200,
    max_time=1705320000,
)

# Texts as file names are: anything but what the formats have no place for, and not what stands
# for "nobody said so".
texts = st.text(
    st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="<>"), max_size=40
).filter(lambda text: text not in {"none", "unknown"})
infos = st.builds(
    LatestInfo,
    latest_time=st.integers(-(10**9), 10**11),
    rel_data_path=texts,
    file_ext=texts,
    data_type=texts,
    user_info1=texts,
    user_info2=texts,
    displaced_dir_path=texts,
    writer=texts,
    max_time=st.integers(-(10**9), 10**11),
    prev_mod_time=st.integers(0, 10**10),
)
forecasts = st.builds(
    lambda info, lead: LatestInfo(
        **{**info.to_fields(), "is_forecast": True, "forecast_lead_secs": lead}
    ),
    infos,
    st.integers(-(2**31), 2**31 - 1),
)
entries = st.one_of(infos, forecasts)


@pytest.mark.parametrize("name", ["obs", "fcst"])
def test_the_files_that_lrose_wrote_are_written_again_from_what_was_read(name: str) -> None:
    xml = (VECTORS / name / "_latest_data_info.xml").read_bytes()
    info = decode_xml(xml)
    assert encode_xml(info) == xml
    assert encode_ascii(info) == (VECTORS / name / "_latest_data_info").read_bytes()


@pytest.mark.parametrize("name", ["obs", "fcst"])
def test_the_messages_that_lrose_wrote_are_written_again_from_what_was_read(name: str) -> None:
    with open_reader(f"fmq:{VECTORS / name / '_latest_data_info'}") as reader:
        bodies = [message.payload for message in reader.available()]
    assert len(bodies) >= 2
    for body in bodies:
        assert encode_body(decode_body(body)) == body


@given(entries)
def test_xml_carries_every_field(info: LatestInfo) -> None:
    assert decode_xml(encode_xml(info)) == info
    assert decode_xml(encode_xml(info) + b"\0 whatever follows") == info


@given(entries)
def test_a_message_carries_every_field_in_its_xml(info: LatestInfo) -> None:
    assert decode_body(encode_body(info)) == info
    assert decode_body(encode_body(info, ascii_on=False)) == info
    assert xml_in_body(encode_body(info)) == encode_xml(info)


@given(entries)
def test_ascii_carries_the_time_and_what_old_programs_expect(info: LatestInfo) -> None:
    found = decode_ascii(encode_ascii(info))
    if info.latest_time != -1:
        assert found.latest_time == info.latest_time
    assert (found.file_ext, found.user_info1, found.user_info2) == (
        info.file_ext,
        info.first_info,
        info.second_info,
    )
    assert found.valid_time - found.latest_time == info.valid_time - info.latest_time


def test_a_message_without_xml_is_read_from_its_struct() -> None:
    body = encode_body(FORECAST, xml_on=False)
    assert len(body) == 204
    assert xml_in_body(body) is None
    found = decode_body(body)
    assert (found.latest_time, found.is_forecast, found.forecast_lead_secs) == (
        1705320000,
        True,
        7200,
    )
    assert (found.file_ext, found.rel_data_path, found.data_type) == ("nc", "unknown", "unknown")


def test_a_message_needs_one_of_its_two_forms() -> None:
    with pytest.raises(InvalidOption):
        encode_body(FORECAST, ascii_on=False, xml_on=False)


def test_texts_in_the_struct_end_after_63_bytes() -> None:
    body = encode_body(LatestInfo(latest_time=0, user_info1="x" * 100), xml_on=False)
    assert decode_body(body).user_info1 == "x" * 63


def test_the_date_wins_over_the_seconds_when_they_disagree() -> None:
    xml = encode_xml(FORECAST).replace(b">1705320000</unix", b">17</unix")
    assert decode_xml(xml).latest_time == 1705320000
    only_seconds = xml.replace(b"<sec>", b"<other>").replace(b">17</unix", b">18</unix")
    assert decode_xml(only_seconds).latest_time == 18


def test_seconds_of_minus_one_in_ascii_mean_the_date() -> None:
    line = encode_ascii(FORECAST).replace(b"1705320000 ", b"-1 ", 1)
    assert decode_ascii(line).latest_time == 1705320000


@pytest.mark.parametrize(
    ("date", "seconds"),
    [
        ((2024, 2, 30, 25, 0, 61), 1709341261),  # as LROSE's library
        ((2024, 13, 1, 0, 0, 0), 1735689600),
        ((2024, 0, 0, 0, 0, 0), 1701302400),
        ((1970, 1, 1, 24, 0, 0), 86400),
        ((1970, 1, 1, 0, 0, -1), -1),
    ],
)
def test_what_is_out_of_range_in_a_date_is_carried_over(
    date: tuple[int, ...], seconds: int
) -> None:
    tags = zip(("year", "month", "day", "hour", "min", "sec"), date, strict=True)
    inner = "".join(f"<{tag}>{value}</{tag}>" for tag, value in tags)
    assert decode_xml(f"{inner}</latest_data_info>".encode()).latest_time == seconds
    line = f"-1 {' '.join(map(str, date))} \nnc\na\nb\n0\n"
    assert decode_ascii(line.encode()).latest_time == seconds


def test_what_is_missing_in_xml_has_its_default() -> None:
    found = decode_xml(b"<latest_data_info><unix_time>5</unix_time></latest_data_info>")
    assert found == LatestInfo(latest_time=5, max_time=5)


def test_the_time_of_a_forecast_is_that_of_its_making_and_its_lead() -> None:
    assert FORECAST.valid_time == 1705327200
    assert FORECAST.time_ns == 1705327200 * 10**9
    assert FORECAST.calendar == dt.datetime(2024, 1, 15, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("directory", "kind"),
    [
        ("/data/mdv/radar", "mdv"),
        ("mdv/radar", "mdv"),
        ("/data/nc/radar", ""),
        ("/data/ncraw/x", "ncraw"),
        ("/data/mdv", ""),
        ("/spdb/titan/x", "spdb"),
    ],
)
def test_a_kind_of_data_is_guessed_from_the_directory(directory: str, kind: str) -> None:
    assert guess_data_type(directory) == kind
    xml = encode_xml(LatestInfo(latest_time=0), directory)
    assert f"<data_type>{kind}</data_type>".encode() in xml


def test_a_line_of_the_catalog_is_xml_without_spaces() -> None:
    assert catalog_line(FORECAST, "") == (
        b"<utime>1705320000</utime><time>2024-01-15T12:00:00</time><max_time>1705320000</max_time>"
        b"<lead_secs>7200</lead_secs><rpath>20240115/g_120000/f_00007200.nc</rpath>"
        b"<ext>nc</ext><dtype>mdv</dtype>\n"
    )


@pytest.mark.parametrize("text", ["two\nlines", "</writer>", "a <year> b", "nul\0", "x" * 2000])
def test_texts_that_the_formats_have_no_place_for_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption):
        LatestInfo(latest_time=0, writer=text)


@pytest.mark.parametrize(
    "text", ["a <b>bold</b>\ttab", "two\nlines", "x" * 2000, "5 < 6 & 7 > 6", "\x1b[31m", "", " "]
)
def test_texts_that_lrose_writes_and_reads_are_read_and_written_again(text: str) -> None:
    plain = LatestInfo(latest_time=1705320000, max_time=1705320000, user_info1="HERE", writer="w")
    xml = encode_xml(plain).replace(b"HERE", text.encode())
    info = decode_xml(xml)
    assert (info.user_info1, info.writer) == (text, "w")
    assert encode_xml(info) == xml
    assert decode_body(encode_body(info)) == info
    assert decode_body(encode_body(info, xml_on=False)).user_info1 == text[:63]
    if "\n" not in text:
        assert decode_ascii(encode_ascii(info)).user_info1 == text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<latest_data_info>",
        b"<latest_data_info></latest_data_info>",
        b"<latest_data_info><unix_time>x</unix_time></latest_data_info>",
        b"<latest_data_info><unix_time>99999999999999</unix_time></latest_data_info>",
        b"x" * 100_000,
    ],
)
def test_xml_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_xml(data)


@pytest.mark.parametrize("data", [b"", b"1 2\n", b"x\na\nb\nc\n0\n", b"1\na\nb\nc\n1\nx\n"])
def test_ascii_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        decode_ascii(data)


@given(
    st.binary(max_size=400)
    | st.builds(
        lambda a, b: b"<latest_data_info>" + a + b,
        st.binary(max_size=100),
        st.just(b"</latest_data_info>"),
    )
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_ascii, decode_xml, decode_body):
        with contextlib.suppress(Malformed):
            decode(data)


@given(entries, st.data())
def test_a_changed_byte_is_read_or_refused(info: LatestInfo, data: st.DataObject) -> None:
    body = bytearray(encode_body(info))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Malformed):
        decode_body(bytes(body))


def test_fields_travel_as_json_does() -> None:
    assert LatestInfo.from_fields(FORECAST.to_fields()) == FORECAST
    for wrong in ({}, {"latest_time": "5"}, {"latest_time": 5, "x": 1}, {"latest_time": True}):
        with pytest.raises(Malformed):
            LatestInfo.from_fields(wrong)


def test_the_last_line_of_ascii_needs_no_end() -> None:
    assert decode_ascii(b"5 1970 1 1 0 0 5 \nnc\na\nb\n0").latest_time == 5
    assert decode_ascii(b"5 1970 1 1 0 0 5 \nnc\na\nb\n1\n600").forecast_lead_secs == 600
    for torn in (b"5 \nnc\na\nb\n", b"5 \nnc\na\nb", b"5 \nnc\na\nb\n1\n", b"5 \nnc\na\nb\n1"):
        with pytest.raises(Malformed):
            decode_ascii(torn)
