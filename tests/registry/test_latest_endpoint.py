"""`latest:/dir`: new files as a stream that can be read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock import create, open_reader, open_writer
from penstock.core import endpoints
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    InvalidOption,
    InvalidURL,
    Malformed,
    NotFound,
)
from penstock.core.interfaces import Bounds
from penstock.pipeline.source.ranges import Range, read_range
from penstock.protocols.lrose.ldata_format import LatestInfo, decode_xml
from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_files import LatestSettings
from penstock.relay import copy

FORECAST: dict[str, Any] = {"forecast_lead_secs": 3600}


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


def write(directory: str, *names: str, slots: int = 2500, **fields: Any) -> None:
    settings = LatestSettings(fmq_slots=slots)
    with LatestDataInfo(directory, settings=settings, register=None) as latest:
        for number, name in enumerate(names):
            latest.write(name, time=1705320000 + number, data_type="mdv", **fields)


def test_a_message_is_the_xml_of_lrose_and_its_time_the_valid_time(data: str) -> None:
    write(data, "a.nc", **FORECAST)
    with open_reader(f"latest:{data}") as reader:
        message = reader.read(0)
    assert message is not None
    assert message.payload == (Path(data) / "_latest_data_info.xml").read_bytes()
    assert message.time_ns == (1705320000 + 3600) * 10**9
    assert message.seq == 0


def test_a_message_can_be_json_with_the_path_of_the_file(data: str) -> None:
    write(data, "a.nc", "b.nc")
    (Path(data) / "b.nc").touch()
    with open_reader(f"latest:{data}?format=json") as reader:
        first, second = (json.loads(message.payload) for message in reader.available())
    assert (first["rel_data_path"], first["path"]) == ("a.nc", None)
    assert (second["path"], second["directory"]) == (f"{data}/b.nc", data)


def test_a_stream_is_read_again_from_any_entry(data: str) -> None:
    write(data, "a", "b", "c", "d")
    with open_reader(f"latest:{data}", start="last") as reader:
        assert reader.bounds() == Bounds(0, 0, 4)
        assert [message.seq for message in reader.available()] == [3]
        reader.seek(1)
        assert [message.seq for message in reader.read_many(10)] == [1, 2, 3]
        assert reader.statistics().messages == 4
        write(data, "e")
        message = reader.read(timeout=10)
        assert message is not None
        assert decode_xml(message.payload).rel_data_path == "e"


def test_spark_reads_a_range_and_hears_of_what_is_gone(data: str) -> None:
    write(data, *map(str, range(15)), slots=10)
    found: list[Any] = list(read_range(Range(f"latest:{data}", 0, 2, 8)))
    lost, rows = found
    assert (lost.first, lost.last) == (2, 4)
    assert rows.column("seq").to_pylist() == [5, 6, 7]
    paths = [decode_xml(row).rel_data_path for row in rows.column("payload").to_pylist()]
    assert paths == ["5", "6", "7"]


def test_an_entry_that_is_none_is_counted_as_lost(data: str) -> None:
    write(data, "a")
    with open_writer(f"fmq:{data}/_latest_data_info") as writer:
        writer.write(b"nothing of the kind")
    write(data, "b")
    with open_reader(f"latest:{data}") as reader:
        assert [message.seq for message in reader.read_many(10)] == [0, 2]
        books = reader.statistics()
    assert (books.messages, books.lost, books.losses[0].first) == (2, 1, 1)


def test_a_directory_without_entries_is_waited_for_or_told_of(data: str) -> None:
    for url in (f"latest:{data}", f"latest:{data}?wait=0.05"):
        with pytest.raises(NotFound, match=f"{data} has no latest_data_info yet") as caught:
            open_reader(url)
        assert f"penstock latest write {data}" in str(caught.value.hint)


def test_a_stream_without_entries_can_be_made_and_read_from_its_beginning(data: str) -> None:
    create(f"latest:{data}/new?format=json")
    with open_reader(f"latest:{data}/new") as reader:
        assert reader.read(timeout=0) is None
        write(f"{data}/new", "a.nc")
        assert reader.read(timeout=5) is not None
    with pytest.raises(AlreadyExists):
        create(f"latest:{data}/new")


@pytest.mark.parametrize("url", ["latest:", "latest://host/dir"])
def test_a_url_that_names_no_directory_is_refused(url: str) -> None:
    with pytest.raises(InvalidURL):
        open_reader(url)


def test_an_option_that_is_none_is_refused(data: str) -> None:
    for option in ("format=csv", "colour=red"):
        with pytest.raises(InvalidOption):
            open_reader(f"latest:{data}?{option}")


def test_entries_are_written_as_json_or_xml(data: str) -> None:
    with open_writer(f"latest:{data}?datamapper=false") as writer:
        assert writer.write(b'{"latest_time": 1705320000, "rel_data_path": "a.nc"}') == 0
        assert writer.write(b'{"rel_data_path": "b.nc"}', time_ns=5 * 10**9) == 1
        xml = (Path(data) / "_latest_data_info.xml").read_bytes()
        assert writer.write(xml) == 2
        for wrong in (
            b"",
            b"[]",
            b"{",
            b'{"rel_data_path": 5}',
            b"<latest_data_info>",
            b"[" * 10**5,
        ):
            with pytest.raises(Malformed):
                writer.write(wrong)
        assert writer.statistics()[:3] == (3, 52 + 25 + len(xml), 6)
    with pytest.raises(Closed):
        writer.write(xml)
    with LatestDataInfo(data, register=None) as latest:
        infos = [latest.read(from_start=True) for _ in range(3)]
    assert [info and (info.latest_time, info.rel_data_path) for info in infos] == [
        (1705320000, "a.nc"),
        (5, "b.nc"),
        (5, "b.nc"),
    ]


@pytest.mark.parametrize("form", ["xml", "json"])
def test_a_stream_of_new_files_can_be_copied_to_another_directory(
    data: str, tmp_path: Path, form: str
) -> None:
    write(data, "a", "b", **FORECAST)
    target = tmp_path / "other"
    with (
        open_reader(f"latest:{data}?format={form}") as reader,
        open_writer(f"latest:{target}?datamapper=false") as writer,
    ):
        copy(reader, writer)
    for end in ("", ".xml"):
        name = f"_latest_data_info{end}"
        assert (target / name).read_bytes() == (Path(data) / name).read_bytes()


@pytest.mark.parametrize("form", ["xml", "json"])
def test_texts_that_only_lroses_programs_write_are_copied_too(
    data: str, tmp_path: Path, form: str
) -> None:
    odd = {"user_info1": "a\ttab, <b> and \udcff", "user_info2": "two\nlines"}
    info = LatestInfo.as_read(latest_time=5, max_time=5, rel_data_path="x" * 2000, **odd)
    with LatestDataInfo(data, register=None) as latest:
        latest.write(info=info)
    target = tmp_path / "other"
    with (
        open_reader(f"latest:{data}?format={form}") as reader,
        open_writer(f"latest:{target}?datamapper=false") as writer,
    ):
        copy(reader, writer)
    for end in ("", ".xml"):
        name = f"_latest_data_info{end}"
        assert (target / name).read_bytes() == (Path(data) / name).read_bytes()


@pytest.mark.parametrize(
    "text",
    ["a</user_info1>", "a\0b", "<writer>x</writer>", "<max_time>9</max_time>", "\ud800"],
)
def test_a_text_that_the_xml_would_give_back_as_another_is_refused(data: str, text: str) -> None:
    with open_writer(f"latest:{data}?datamapper=false") as writer:
        with pytest.raises(Malformed):
            writer.write(json.dumps({"latest_time": 5, "user_info1": text}).encode())
        assert writer.statistics().refused == 1


def test_a_stream_can_be_described(data: str) -> None:
    write(data, "a", "b")
    found = endpoints.describe(f"latest:{data}")
    assert (found.count, found.youngest_seq, found.slots) == (2, 1, 2500)


def test_a_payload_may_be_the_file_itself_and_one_that_is_gone_is_counted(data: str) -> None:
    write(data, "a.xml", "gone.xml", "large.xml", "b.xml")
    for name, text in (("a.xml", "<a/>"), ("b.xml", "<b/>"), ("large.xml", "x" * 2000)):
        (Path(data) / name).write_text(text)
    with open_reader(f"latest:{data}?format=file&max_file=1k") as reader:
        assert [message.payload for message in reader.available()] == [b"<a/>", b"<b/>"]
        assert reader.statistics().lost == 2


def test_an_entry_whose_every_path_leaves_the_directory_is_counted_and_costs_no_other(
    data: str,
) -> None:
    write(data, "a.xml")
    with LatestDataInfo(data, register=None) as latest:
        latest.write(time=1705320001, file_ext="x/../y", user_info1="/x", user_info2="/y")
    write(data, "b.xml")
    for name in "ab":
        (Path(data) / f"{name}.xml").write_text(f"<{name}/>")
    with open_reader(f"latest:{data}?format=file") as reader:
        assert [message.payload for message in reader.read_many(9)] == [b"<a/>", b"<b/>"]
        assert reader.statistics().lost == 1
