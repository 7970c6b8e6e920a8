"""The state file: LROSE's own bytes; damage is named, kept aside, and costs no more than itself."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock import StorageError
from penstock.protocols.lrose.datamapper_info import DataSetInfo
from penstock.registry.data_map import DataMap, MapFull
from penstock.registry.data_map_state import load_state, save_state, state_bytes

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
    assert load_state(tmp_path / "none", DataMap()) == 0


def test_an_empty_file_is_an_empty_map_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    path.touch()
    assert load_state(path, DataMap()) == 0
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
    assert not path.exists()
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
