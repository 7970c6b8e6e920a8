"""Reading latest_data_info: what is new, what is kept, what is waited for, where files are."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import open_writer
from penstock.core.errors import Closed, InvalidOption
from penstock.protocols.lrose.ldata_format import LatestInfo
from penstock.registry import latest_reader
from penstock.registry.latest_files import LatestSettings
from support.latest_sets import drained, latest, paths, write


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in list(os.environ):
        if variable.startswith("LDATA_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("TMP_DIR", str(tmp_path / "tmp"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


# --- reading ----------------------------------------------------------------------------------


def test_texts_of_lroses_writers_may_hold_anything(data: str) -> None:
    odd = "a <b>\n\t<user_info1>FMQ_id:7</user_info1>"
    info = LatestInfo.as_read(latest_time=1705320000, max_time=1705320000, rel_data_path=odd)
    with latest(data) as there:
        there.write(info=info)
        there.write("next.nc")
    with latest(data, label="test") as there:
        first = there.read(from_start=True)
        assert first is not None
        assert first.rel_data_path == odd
    # The place that is kept is not mistaken for what stands in a text.
    with latest(data, label="test") as there:
        assert paths(drained(there)) == ["next.nc"]


def test_two_updates_in_one_second_are_two(data: str) -> None:
    for settings in (
        LatestSettings(),
        LatestSettings(use_fmq=False),
        LatestSettings().only(ascii=True),
    ):
        with latest(data, settings=settings) as there:
            drained(there)
            there.write("first.nc")
            assert paths(drained(there)) in (["first.nc"], ["unknown"])
            there.write("second.nc")
            assert len(drained(there)) == 1


def test_what_is_too_old_at_first_is_passed_over(data: str) -> None:
    write(data, "old.nc")
    for end in (".stat", ".xml", ""):
        os.utime(f"{data}/_latest_data_info{end}", (1000, 1000))
    with latest(data) as there:
        assert there.read(max_valid_age=60) is None
        write(data, "new.nc", "newer.nc")
        assert paths(drained(there, max_valid_age=60)) == ["new.nc", "newer.nc"]
    with latest(data) as there:
        assert there.read() is not None


def test_an_open_queue_is_read_on_whatever_its_age(data: str) -> None:
    write(data, "a.nc")
    with latest(data) as there:
        assert there.read(max_valid_age=60) is not None
        write(data, "b.nc")
        os.utime(f"{data}/_latest_data_info.stat", (1000, 1000))
        assert paths(drained(there, max_valid_age=60)) == ["b.nc"]


def test_a_forced_read_returns_the_last_entry_again(data: str) -> None:
    write(data, "a.nc", "b.nc")
    with latest(data) as there:
        assert there.read(forced=True) is not None  # from the XML file
        assert paths(drained(there)) == ["b.nc"]
        again = there.read(forced=True)
        assert again is not None
        assert again.rel_data_path == "b.nc"
        assert there.read() is None
        assert there.statistics().repeated == 2


def test_files_take_over_when_there_is_no_queue(data: str) -> None:
    with latest(data) as there:
        there.write("a.nc", writer="W")
        assert paths(drained(there)) == ["a.nc"]
        for end in (".stat", ".buf"):
            Path(f"{data}/_latest_data_info{end}").unlink()
        assert there.read() is None  # the file tells of the same entry
        with latest(data, settings=LatestSettings(use_fmq=False)) as other:
            other.write("b.nc", writer="W")
        assert paths(drained(there)) == ["b.nc"]


def test_files_are_news_beside_a_queue_that_nobody_uses_any_more(data: str) -> None:
    write(data, "old.nc")
    for end in (".stat", ".xml", ""):
        os.utime(f"{data}/_latest_data_info{end}", (1000, 1000))
    with latest(data) as there:
        assert there.read(max_valid_age=60) is None
        with latest(data, settings=LatestSettings(use_fmq=False)) as other:
            other.write("a.nc")
            assert paths(drained(there, max_valid_age=60)) == ["a.nc"]
            other.write("b.nc")
            assert paths(drained(there, max_valid_age=60)) == ["b.nc"]
        write(data, "c.nc")
        assert paths(drained(there, max_valid_age=60)) == ["c.nc"]


def test_an_entry_seen_in_a_file_before_there_was_a_queue_comes_once(data: str) -> None:
    settings = LatestSettings(use_fmq=False)
    with latest(data) as there, latest(data, settings=settings) as writer:
        info = writer.write("a.nc", time=1705320000)
        assert paths(drained(there)) == ["a.nc"]
        with latest(data) as other:
            other.write(info=info)
        write(data, "b.nc", "c.nc")
        assert paths(drained(there)) == ["b.nc", "c.nc"]


def test_a_set_of_files_that_is_being_written_is_read_when_it_is_whole(data: str) -> None:
    with latest(data, settings=LatestSettings(use_fmq=False)) as there:
        with latest(data, settings=LatestSettings().only(ascii=True)) as writer:
            writer.write("a.nc", writer="W")
        began = time.monotonic()
        info = there.wait(timeout=10)
        assert time.monotonic() - began > 0.05  # the XML might have followed, and did not
        assert info is not None
        with latest(data, settings=LatestSettings(use_fmq=False)) as writer:
            for number in range(50):
                writer.write(f"{number}.nc")
                info = there.wait(timeout=10)
                assert info is not None
                assert info.rel_data_path == f"{number}.nc"


@pytest.mark.parametrize("end", [".xml", ""])
def test_a_file_that_is_not_readable_stays_where_it_is(data: str, end: str) -> None:
    settings = LatestSettings().only(xml=end == ".xml", ascii=end == "")
    Path(data).mkdir()
    file = Path(f"{data}/_latest_data_info{end}")
    file.write_bytes(b"half of it")
    with latest(data, settings=settings) as there:
        assert there.read() is None
        assert there.read() is None
        assert file.read_bytes() == b"half of it"
        assert there.statistics().unreadable == 1
        there.write("a.nc")
        assert len(drained(there)) == 1


def test_an_entry_that_is_not_readable_is_counted_and_passed_over(data: str) -> None:
    write(data, "a.nc")
    with open_writer(f"fmq:{data}/_latest_data_info") as writer:
        writer.write(b"not an entry")
    write(data, "b.nc")
    with latest(data) as there:
        assert paths(drained(there, from_start=True)) == ["a.nc", "b.nc"]
        assert there.statistics()[:3] == (2, 0, 1)


def test_entries_that_are_gone_are_counted(data: str) -> None:
    with latest(data, settings=LatestSettings(fmq_slots=10)) as there:
        there.write("0")
        assert paths(drained(there)) == ["0"]
        for number in range(1, 26):
            there.write(str(number))
        assert paths(drained(there)) == [str(number) for number in range(16, 26)]
        assert there.statistics() == (11, 0, 0, 15, 0)


def test_a_removed_queue_is_followed_to_the_next_one(data: str) -> None:
    with latest(data) as there:
        there.write("a.nc")
        assert paths(drained(there)) == ["a.nc"]
        shutil.rmtree(data)
        assert there.read() is None
        there.write("b.nc")
        assert paths(drained(there)) == ["b.nc"]


# --- a place that is kept ---------------------------------------------------------------------


def test_a_label_finds_its_place_again(data: str, tmp_path: Path) -> None:
    write(data, "a.nc", "b.nc", "c.nc")
    with latest(data, label="test") as there:
        assert paths([there.read(from_start=True) or LatestInfo(latest_time=0)]) == ["a.nc"]
    name = f"_latest_read_info.test.{data.replace('/', '_')}.xml"
    kept = (tmp_path / "tmp" / name).read_text()
    assert "<user_info1>FMQ_id:0</user_info1>" in kept
    assert "<rel_data_path>a.nc</rel_data_path>" in kept
    with latest(data, label="test") as there:
        assert paths(drained(there)) == ["b.nc", "c.nc"]
    with latest(data, label="other") as there:
        assert paths(drained(there)) == ["c.nc"]
    write(data, "d.nc")
    with latest(data, label="test", label_max_age=3600) as there:
        assert paths(drained(there)) == ["d.nc"]


def test_a_place_that_is_too_old_is_not_used(data: str, tmp_path: Path) -> None:
    write(data, "a.nc", "b.nc", "c.nc")
    with latest(data, label="test") as there:
        there.read(from_start=True)
    name = f"_latest_read_info.test.{data.replace('/', '_')}.xml"
    os.utime(tmp_path / "tmp" / name, (1000, 1000))
    with latest(data, label="test", label_max_age=60) as there:
        assert paths(drained(there)) == ["c.nc"]


def test_a_place_that_was_overwritten_tells_what_is_lost(data: str) -> None:
    settings = LatestSettings(fmq_slots=10)
    with latest(data, settings=settings, label="test") as there:
        there.write("0")
        there.read()
    with latest(data, settings=settings) as writer:
        for number in range(1, 16):
            writer.write(str(number))
    with latest(data, label="test") as there:
        assert paths(drained(there)) == [str(number) for number in range(6, 16)]
        assert there.statistics().lost == 5


def test_a_place_in_a_queue_that_was_made_anew_is_its_start(data: str) -> None:
    write(data, "a", "b", "c")
    with latest(data, label="test") as there:
        drained(there)
    shutil.rmtree(data)
    write(data, "x", "y")
    with latest(data, label="test") as there:
        assert paths(drained(there)) == ["x", "y"]
        assert there.statistics().restarts == 1


def test_a_place_that_is_not_readable_stays_where_it_is(data: str, tmp_path: Path) -> None:
    write(data, "a", "b")
    name = f"_latest_read_info.test.{data.replace('/', '_')}.xml"
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / name).write_text("junk")
    with latest(data, label="test") as there:
        assert (tmp_path / "tmp" / name).read_text() == "junk"
        assert paths(drained(there)) == ["b"]
    with pytest.raises(InvalidOption):
        latest(data, label="a/b")


# --- waiting ----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [LatestSettings(), LatestSettings(use_fmq=False)])
@pytest.mark.parametrize("there_before", [True, False])
def test_a_follower_is_woken_by_a_new_entry(
    data: str, settings: LatestSettings, there_before: bool
) -> None:
    writer = latest(data, settings=settings)
    if there_before:
        writer.write("old.nc", time=5)
    began: list[float] = []

    def soon() -> None:
        time.sleep(0.3)
        began.append(time.monotonic())
        writer.write("new.nc", time=6)

    thread = threading.Thread(target=soon)
    with latest(data, settings=settings) as there:
        drained(there)
        thread.start()
        follower = there.follow(timeout=20)
        info = next(follower)
        took = time.monotonic() - began[0]
        assert info.rel_data_path == "new.nc"
        assert took < 2
    thread.join()
    writer.close()


def test_following_ends_when_nothing_comes(data: str) -> None:
    write(data, "a", "b")
    with latest(data) as there:
        assert paths(there.follow(from_start=True, timeout=0.05)) == ["a", "b"]
        assert paths(there.follow(timeout=0.05)) == []
    with pytest.raises(Closed):
        there.read()


# --- where the file is ------------------------------------------------------------------------


def test_a_file_is_looked_for_in_the_order_of_lrose(data: str) -> None:
    """But for what was observed at the time of a forecast, which is another file."""
    info = LatestInfo(
        latest_time=1705320000,
        rel_data_path="one.nc",
        file_ext="nc",
        user_info1="four",
        user_info2="three",
        is_forecast=True,
        forecast_lead_secs=3600,
    )
    order = [
        "one.nc",
        "three",
        "four.nc",
        "four",
        "three.nc",
        "20240115/g_120000/f_00003600.nc",
    ]
    there = latest(data)
    assert there.data_path(info) is None
    for name in reversed(order):
        path = Path(data) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert there.data_path(info) == str(path)
    displaced = Path(data).parent / "other"
    displaced.mkdir()
    (displaced / "one.nc").touch()
    info = replace(info, displaced_dir_path=str(displaced))
    assert there.data_path(info) == str(displaced / "one.nc")


def test_a_file_outside_its_directory_is_not_found(data: str, tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    Path(data).mkdir()
    for name in ("../secret", str(tmp_path / "secret"), "x/../../secret"):
        info = LatestInfo(latest_time=0, rel_data_path=name, user_info1=name, user_info2=name)
        assert latest(data).data_path(info) is None


def test_settings_that_no_file_can_have_are_refused() -> None:
    wrongs: tuple[dict[str, Any], ...] = (
        {"name": "a/b"},
        {"name": ""},
        {"fmq_slots": 0},
        {"fmq_slots": 10**9},
    )
    for wrong in wrongs:
        with pytest.raises(InvalidOption):
            LatestSettings(**wrong)


# --- holes in time ----------------------------------------------------------------------------


def make_old(data: str) -> None:
    for end in (".stat", ".xml", ""):
        os.utime(f"{data}/_latest_data_info{end}", (1000, 1000))


def test_a_label_gets_all_since_its_place_once_an_old_queue_is_fresh_again(data: str) -> None:
    write(data, "a", "b")
    with latest(data, label="test") as there:
        there.read()
    write(data, "c", "d")
    make_old(data)
    with latest(data, label="test") as there:
        assert there.read(max_valid_age=60) is None
        write(data, "e")
        assert paths(drained(there, max_valid_age=60)) == ["c", "d", "e"]


def test_the_start_of_an_old_queue_is_read_once_it_is_fresh_again(data: str) -> None:
    write(data, "a", "b")
    make_old(data)
    with latest(data) as there:
        assert there.read(max_valid_age=60, from_start=True) is None
        write(data, "c")
        assert paths(drained(there, max_valid_age=60, from_start=True)) == ["a", "b", "c"]


def test_files_do_not_overtake_the_queue_that_a_label_goes_on_in(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latest_reader, "_BETWEEN_FILES", 60 * 10**9)  # on a busy machine, too
    write(data, "a")
    with latest(data, label="test") as there:
        there.read()
    write(data, "b")
    make_old(data)
    with latest(data, label="test") as there:
        assert there.read(max_valid_age=60) is None
        with latest(data, settings=LatestSettings(use_fmq=False)) as files:
            info = files.write("c", time=1705320000)
        assert there.read(max_valid_age=60) is None  # as between the files and the queue
        with latest(data) as writer:
            writer.write(info=info, fmq_only=True)
        assert paths(drained(there, max_valid_age=60)) == ["b", "c"]


def test_a_place_is_not_taken_for_one_of_the_same_id_in_another_queue(data: str) -> None:
    write(data, "a", "b")
    with latest(data, label="test") as there:
        drained(there)
    shutil.rmtree(data)
    with latest(data) as writer:
        for number, name in enumerate(("w", "x", "y", "z")):
            writer.write(name, time=1800000000 + number)
    with latest(data, label="test") as there:
        assert paths(drained(there)) == ["w", "x", "y", "z"]
        assert there.statistics().restarts == 1


def test_a_queue_that_is_being_made_is_read_from_its_start(data: str) -> None:
    Path(data).mkdir(parents=True)
    for end in (".stat", ".buf"):
        Path(f"{data}/_latest_data_info{end}").touch()
    with latest(data) as there:
        began = time.monotonic()
        assert there.read() is None
        assert time.monotonic() - began < 0.25
        write(data, "a", "b", "c")
        assert paths(drained(there)) == ["a", "b", "c"]


def test_files_do_not_tell_again_what_a_queue_told_that_is_gone(data: str) -> None:
    with latest(data) as there, latest(data, settings=LatestSettings(use_fmq=False)) as files:
        files.write("a", time=1)
        assert paths(drained(there)) == ["a"]
        write(data, "b", "c")
        assert paths(drained(there)) == ["b", "c"]
        for end in (".stat", ".buf"):
            Path(f"{data}/_latest_data_info{end}").unlink()
        assert drained(there) == []
        files.write("d", time=2)
        assert paths(drained(there)) == ["d"]


def test_files_do_while_a_queue_is_damaged(data: str, caplog: pytest.LogCaptureFixture) -> None:
    write(data, "a")
    with latest(data) as there, latest(data, settings=LatestSettings(use_fmq=False)) as files:
        assert paths(drained(there)) == ["a"]
        with Path(f"{data}/_latest_data_info.stat").open("r+b") as status:
            status.write(b"junk" * 14)
        assert drained(there) == []
        files.write("b", time=5)
        assert paths(drained(there)) == ["b"]
        assert [record.message for record in caplog.records if "instead" in record.message][
            1:
        ] == []
        write(data, "c", "d")  # which makes the queue anew
        assert paths(drained(there)) == ["c", "d"]


@pytest.mark.parametrize("name", ["shmem_4711", "shmem_0", "a_shmem_99999999999"])
def test_a_name_that_means_shared_memory_is_refused(name: str) -> None:
    with pytest.raises(InvalidOption):
        LatestSettings(name=name)
