"""The table of data sets: registrations change what LROSE says, and no more; its file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock import InvalidOption
from penstock.core.clock import ManualClock
from penstock.core.errors import StorageError
from penstock.protocols.lrose.datamapper_wire import NO_LEAD, DataSetInfo
from penstock.registry.data_map import (
    DataMap,
    MapFull,
    guess_datatype,
    load_state,
    save_state,
    state_bytes,
)

NOW = 1_700_000_000


def a_map(max_entries: int = 100) -> tuple[DataMap, ManualClock]:
    clock = ManualClock(NOW * 10**9)
    return DataMap(max_entries=max_entries, clock=clock), clock


def an_entry(directory: str = "mdv/radar", datatype: str = "mdv", hostname: str = "a", **fields: object) -> DataSetInfo:  # fmt: skip # noqa: E501
    return DataSetInfo(hostname=hostname, datatype=datatype, dir=directory, **fields)  # type: ignore[arg-type]


def test_latest_data_set_the_time_the_lead_and_when_it_was_heard_of() -> None:
    map_, clock = a_map()
    map_.register_data_set(an_entry(start_time=1, end_time=2, nfiles=3.0, total_bytes=4.0))
    clock.advance(5)
    map_.register_latest(
        an_entry(latest_time=1000, forecast_lead_time=NO_LEAD, last_reg_time=7, nfiles=99.0)
    )
    assert map_.all() == [
        an_entry(
            start_time=1,
            end_time=2,
            nfiles=3.0,
            total_bytes=4.0,
            latest_time=1000,
            forecast_lead_time=NO_LEAD,
            last_reg_time=NOW + 5,
        )
    ]


def test_a_status_sets_the_text_and_when_it_was_heard_of() -> None:
    map_, _ = a_map()
    map_.register_latest(an_entry(latest_time=1000))
    map_.register_status(an_entry(status="all is well", latest_time=5))
    (entry,) = map_.all()
    assert (entry.status, entry.latest_time, entry.last_reg_time) == ("all is well", 1000, NOW)


def test_a_data_set_leaves_alone_when_it_was_heard_of() -> None:
    map_, _ = a_map()
    map_.register_data_set(an_entry(start_time=1, end_time=2, nfiles=3.0, last_reg_time=NOW))
    assert map_.all() == [an_entry(start_time=1, end_time=2, nfiles=3.0)]


def test_full_entries_are_taken_as_they_are() -> None:
    map_, _ = a_map()
    map_.register_latest(an_entry(latest_time=1000))
    whole = an_entry(start_time=1, latest_time=2, last_reg_time=3, status="s", check_time=4)
    other = an_entry("mdv/other")
    map_.register_full([other, whole])
    assert map_.all() == [other, whole]


def test_the_host_is_part_of_what_makes_an_entry_and_the_address_is_not() -> None:
    map_, _ = a_map()
    map_.register_latest(an_entry(hostname="a", ipaddr="10.0.0.1"))
    map_.register_latest(an_entry(hostname="a", ipaddr="10.0.0.2"))
    map_.register_latest(an_entry(hostname="b"))
    assert [(each.hostname, each.ipaddr) for each in map_.all()] == [("a", "10.0.0.1"), ("b", "")]


@pytest.mark.parametrize(
    ("directory", "datatype"),
    [
        ("mdv/radar/ppi", "mdv"),
        ("/data/spdb/metar", "spdb"),
        ("project/nc/x", "nc"),
        ("raw/nc/x", "nc"),  # by the order of the list, not of the path
        ("x/mdv", "unknown"),
        ("xmdv/y", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_type_that_is_missing_is_guessed_from_the_directory(
    directory: str, datatype: str
) -> None:
    assert guess_datatype(directory) == datatype
    for given in ("", "unknown"):
        map_, _ = a_map()
        map_.register_latest(an_entry(directory, given))
        assert [each.datatype for each in map_.all()] == [datatype]


def test_entries_come_sorted_by_type_directory_and_host_as_one_text() -> None:
    map_, _ = a_map()
    keys = [("b", "x", "h"), ("a-", "x", "h"), ("a", "x", "h"), ("a", "x", "g"), ("ü", "x", "h")]
    for datatype, directory, hostname in keys:
        map_.register_latest(an_entry(directory, datatype, hostname))
    assert [each.key for each in map_.all()] == [
        ("a", "x", "g"),
        ("a", "x", "h"),
        ("a-", "x", "h"),  # a comma sorts before a dash
        ("b", "x", "h"),
        ("ü", "x", "h"),
    ]


def test_a_selection_matches_exactly_and_by_what_is_given() -> None:
    map_, _ = a_map()
    for directory, datatype in (("a", "mdv"), ("b", "mdv"), ("a", "spdb")):
        map_.register_latest(an_entry(directory, datatype))

    def found(datatype: str = "", directory: str = "") -> list[tuple[str, str]]:
        return [(each.dir, each.datatype) for each in map_.selected(datatype, directory)]

    assert found("mdv", "") == [("a", "mdv"), ("b", "mdv")]
    assert found("", "a") == [("a", "mdv"), ("a", "spdb")]
    assert found("mdv", "a") == [("a", "mdv")]
    assert found("md", "") == []
    assert found() == found("", "") == [("a", "mdv"), ("b", "mdv"), ("a", "spdb")]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (("mdv", "a", "x"), 5),
        (("all", "a", "x"), 4),
        (("mdv", "all", "all"), 2),
        (("all", "all", "y"), 3),
        (("all", "all", "all"), 0),
        (("nothing", "all", "all"), 6),
        (("", "a", "x"), 6),
    ],
)
def test_a_delete_takes_what_matches_and_all_matches_anything(
    wanted: tuple[str, str, str], left: int
) -> None:
    map_, _ = a_map()
    for key in [("mdv", "a", "x"), ("mdv", "b", "x"), ("mdv", "a", "y"), ("mdv", "b", "y"),
                ("spdb", "a", "x"), ("spdb", "a", "y")]:  # fmt: skip
        map_.register_latest(an_entry(key[1], key[0], key[2]))
    assert map_.delete(*wanted) == 6 - left
    assert len(map_) == left


def test_a_purge_goes_by_the_first_time_that_is_known() -> None:
    map_, _ = a_map()
    old, new = NOW - 101, NOW - 100
    map_.register_full(
        [
            an_entry("by reg", last_reg_time=old, latest_time=NOW),
            an_entry("by end", end_time=old, start_time=NOW),
            an_entry("by start", start_time=old, latest_time=NOW),
            an_entry("by latest", latest_time=old),
            an_entry("nothing known"),
            an_entry("new", last_reg_time=new, latest_time=1),
            an_entry("new by end", end_time=new, start_time=1),
        ]
    )
    assert map_.purge(100) == 5
    assert [each.dir for each in map_.all()] == ["new by end", "new"]


def test_a_full_map_refuses_new_entries_and_keeps_those_it_has() -> None:
    map_, _ = a_map(max_entries=2)
    map_.register_latest(an_entry("a"))
    map_.register_latest(an_entry("b"))
    with pytest.raises(MapFull, match="2 data sets"):
        map_.register_latest(an_entry("c"))
    with pytest.raises(MapFull):
        map_.register_full([an_entry("a", latest_time=5), an_entry("c")])
    map_.register_latest(an_entry("a", latest_time=1000))
    map_.register_full([an_entry("b", latest_time=2000)])
    assert [(each.dir, each.latest_time) for each in map_.all()] == [("a", 1000), ("b", 2000)]


def test_a_map_for_nothing_is_refused() -> None:
    with pytest.raises(InvalidOption):
        DataMap(max_entries=0)


def test_the_version_grows_when_and_only_when_something_changed() -> None:
    map_, _ = a_map()
    versions = [map_.version]
    for change in (
        lambda: map_.register_latest(an_entry()),
        lambda: map_.register_status(an_entry(status="s")),
        lambda: map_.register_data_set(an_entry()),
        lambda: map_.register_full([an_entry()]),
        lambda: map_.delete("all", "all", "all"),
    ):
        change()
        versions.append(map_.version)
    assert versions == sorted(set(versions))
    map_.delete("all", "all", "all")
    map_.purge(0)
    map_.register_full([])
    assert map_.version == versions[-1]


def test_a_clock_behind_2038_is_held_at_the_last_second_there_is() -> None:
    map_ = DataMap(clock=ManualClock(2**33 * 10**9))
    map_.register_latest(an_entry())
    assert map_.all()[0].last_reg_time == 2**31 - 1
    map_.all()[0].write()


# --- the file -----------------------------------------------------------------------------------

RECORDED = (
    Path(__file__).parents[1] / "vectors" / "lrose" / "wire" / "dmap_table.bin"
).read_bytes()


def loaded(path: Path, max_entries: int = 100) -> DataMap:
    found = DataMap(max_entries=max_entries)
    load_state(path, found)
    return found


def test_the_recorded_file_is_read_and_written_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(RECORDED)
    found = loaded(path)
    assert [each.dir for each in found.all()] == ["mdv/fcst", "mdv/remote", "mdv/test"]
    save_state(path, state_bytes(found.all()))
    assert path.read_bytes() == RECORDED
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_no_file_is_an_empty_map(tmp_path: Path) -> None:
    assert load_state(tmp_path / "none", DataMap()) == (0, False)


def test_an_empty_file_is_an_empty_map_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    path.touch()
    assert load_state(path, DataMap()) == (0, False)
    assert caplog.records == []


@pytest.mark.parametrize("size", [1, 863, 865, 2 * 864 + 500, 3 * 864 - 1])
def test_a_truncated_file_is_a_warning_and_its_whole_entries_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    path = tmp_path / "state"
    path.write_bytes(RECORDED[:size])
    found = loaded(path)
    assert len(found) == size // 864
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{size % 864} bytes of an entry of 864" in record.message
    assert f"{size // 864} data sets of it are used" in record.message
    assert path.read_bytes() == RECORDED[:size]  # until the next save
    assert (tmp_path / "state.damaged").read_bytes() == RECORDED[:size]


def test_a_file_of_another_kind_is_kept_aside_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"this is no state file. " * 1000)
    assert len(loaded(path)) == 0
    (record,) = caplog.records
    assert "25 more entries like it" in record.message
    assert (tmp_path / "state.damaged").exists()


def test_one_bad_entry_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state"
    bad = bytearray(RECORDED)
    bad[864 + 352 : 864 + 608] = b"x" * 256
    path.write_bytes(bad)
    assert [each.dir for each in loaded(path).all()] == ["mdv/fcst", "mdv/test"]
    assert "entry at byte 864: dir" in caplog.text


def test_a_file_larger_than_the_map_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(RECORDED)
    with pytest.raises(MapFull):
        loaded(path, max_entries=2)
    assert path.read_bytes() == RECORDED


def test_what_the_operating_system_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="reading"):
        loaded(tmp_path)
    with pytest.raises(StorageError, match="writing"):
        save_state(tmp_path / "none" / "state", state_bytes([DataSetInfo()]))
