"""latest_data_info: read as LROSE reads it, written as LROSE writes it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.core.clock import ManualClock
from penstock.core.errors import InvalidOption, LockTimeout, StorageError
from penstock.protocols.lrose.ldata_format import LatestInfo
from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_files import LatestSettings, relative_path
from support.latest_sets import drained, latest, paths, write

VECTORS = Path(__file__).parents[1] / "vectors" / "lrose" / "ldata"
NAMES = ("", ".xml", ".stat", ".buf", ".lock")

FORMS = {
    "from start": (LatestSettings(), {"from_start": True}),
    "newest": (LatestSettings(), {}),
    "xml": (LatestSettings(use_fmq=False), {}),
    "ascii": (LatestSettings(use_fmq=False, use_xml=False), {}),
}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in list(os.environ):
        if variable.startswith("LDATA_"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("TMP_DIR", str(tmp_path / "tmp"))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


# --- what LROSE wrote -------------------------------------------------------------------------


def expected_reads(name: str) -> list[str]:
    text = (VECTORS / "expected_reads.txt").read_text()
    return text.partition(f"== {name}\n")[2].partition("\n==")[0].splitlines()


def as_lrose_says(info: LatestInfo | None, there: LatestDataInfo) -> str:
    if info is None:
        return "rc=-1"
    kind = "" if info.data_type == "unknown" else info.data_type
    return (
        f"rc=0 latest={info.latest_time} valid={info.valid_time} max={info.max_time} "
        f"rel={relative_path(info, there.directory)} ext={info.file_ext} type={kind} "
        f"writer={info.writer_name} u1={info.first_info} u2={info.second_info} "
        f"fcast={info.is_forecast:d} lead={info.forecast_lead_secs} "
        f"path={there.data_path(info) or 'unknown'}"
    )


@pytest.mark.parametrize("name", ["obs", "fcst"])
def test_what_lrose_wrote_is_read_as_lrose_reads_it(name: str) -> None:
    said = []
    for settings, options in FORMS.values():
        with latest(VECTORS / name, settings=settings) as there:
            while True:
                info = there.read(**options)
                said.append(as_lrose_says(info, there))
                if info is None:
                    break
    assert said == expected_reads(name)


def written_again(directory: str, name: str) -> None:
    clock = ManualClock(1700000000 * 10**9)
    settings = LatestSettings(fmq_slots=20)
    with latest(directory, settings=settings, clock=clock) as there:
        if name == "obs":
            for number in (1, 2, 3):
                path = f"20240115/12000{number}.mdv"
                there.write(path, time=1705320000 + number, data_type="mdv", writer=f"W{number}")
            return
        common: dict[str, Any] = {"time": 1705320000, "data_type": "mdv"}
        there.write(
            "20240115/g_120000/f_00003600.nc",
            forecast_lead_secs=3600,
            user_info1="hello",
            user_info2="world",
            **common,
        )
        there.write("20240115/g_120000/f_00007200.nc", forecast_lead_secs=7200, **common)


@pytest.mark.parametrize("name", ["obs", "fcst"])
def test_what_lrose_wrote_is_written_byte_for_byte(name: str, data: str) -> None:
    written_again(data, name)
    assert sorted(path.name for path in Path(data).iterdir()) == sorted(
        f"_latest_data_info{end}" for end in NAMES
    )
    for end in NAMES:
        file = f"_latest_data_info{end}"
        assert (Path(data) / file).read_bytes() == (VECTORS / name / file).read_bytes(), file


# --- writing ----------------------------------------------------------------------------------


def test_every_entry_is_told_once_and_in_order(data: str) -> None:
    with latest(data) as reader:
        assert reader.read() is None
        write(data, "a.nc", "b.nc")
        assert paths(drained(reader)) == ["a.nc", "b.nc"]  # none was there when it looked
        with latest(data) as late:
            assert paths(drained(late)) == ["b.nc"]  # the newest one that is there at first
            write(data, "c.nc", "d.nc", "e.nc")
            assert paths(drained(late)) == ["c.nc", "d.nc", "e.nc"]
        assert paths(drained(reader)) == ["c.nc", "d.nc", "e.nc"]
        assert reader.statistics() == (5, 0, 0, 0, 0)


def test_what_a_name_tells_need_not_be_said(data: str) -> None:
    with latest(data) as there:
        info = there.write(f"{data}/20240115/cfrad.nc", time=5)
        assert (info.rel_data_path, info.file_ext) == ("20240115/cfrad.nc", "nc")
        assert there.write("README", time=5).file_ext == "none"
        with pytest.raises(InvalidOption):
            there.write("/somewhere/else.nc")
        with pytest.raises(InvalidOption):
            there.write("../else.nc")
        with pytest.raises(InvalidOption):
            there.write("a.nc", colour="red")


def test_the_largest_time_stays(data: str) -> None:
    with latest(data) as there:
        assert there.write("a", time=10).max_time == 10
        assert there.write("b", time=5).max_time == 10


def test_a_whole_entry_is_written_as_it_is(data: str) -> None:
    info = LatestInfo(latest_time=7, rel_data_path="x", data_type="mdv")
    with latest(data) as there:
        there.write(info=info)
        assert there.last_seq == 0
        assert there.read() == info


def test_nothing_is_written_when_the_environment_says_so(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LDATA_NO_WRITE", "true")
    told: list[str] = []
    with latest(data, register=lambda _, directory: told.append(directory)) as there:
        there.write("a.nc")
    assert not Path(data).exists()
    assert told == []


@pytest.mark.parametrize(
    ("variable", "missing"),
    [
        ("LDATA_FMQ_ACTIVE", {".stat", ".buf"}),
        ("LDATA_AS_XML", {".xml"}),
        ("LDATA_AS_ASCII", {""}),
    ],
)
def test_the_environment_turns_forms_off(
    data: str, monkeypatch: pytest.MonkeyPatch, variable: str, missing: set[str]
) -> None:
    monkeypatch.setenv(variable, "false")
    write(data, "a.nc")
    there = {path.name.removeprefix("_latest_data_info") for path in Path(data).iterdir()}
    assert there == set(NAMES) - missing
    with latest(data) as reader:
        info = reader.read()
        assert info is not None
        assert info.latest_time == 1705320000


def test_the_environment_sets_the_size_of_the_queue(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LDATA_FMQ_NSLOTS", "40")
    write(data, "a.nc")
    assert (Path(data) / "_latest_data_info.stat").stat().st_size == 56 + 40 * 40
    assert (Path(data) / "_latest_data_info.buf").stat().st_size == 40 * 500


def test_the_default_size_of_the_queue_is_that_of_lrose(data: str) -> None:
    write(data, "a.nc")
    assert (Path(data) / "_latest_data_info.buf").stat().st_size == 1_250_000


def test_a_catalog_is_kept_where_one_is_wanted(data: str) -> None:
    write(data, "a.nc")
    (Path(data) / "_ldata_write_catalog").touch()
    write(data, "b.nc", "c.nc")
    lines = (Path(data) / "20240115" / "ldata_file_catalog").read_text().splitlines()
    assert [line.partition("<rpath>")[2].partition("<")[0] for line in lines] == ["b.nc", "c.nc"]


def test_a_writer_waits_for_the_lock_that_lrose_holds(data: str) -> None:
    write(data, "a.nc")
    lock = (Path(data) / "_latest_data_info.lock").open("r+b")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    with latest(data, settings=LatestSettings(lock_timeout=0.05)) as there:
        with pytest.raises(LockTimeout):
            there.write("b.nc")
        fcntl.lockf(lock, fcntl.LOCK_UN)
        there.write("c.nc")
    lock.close()
    with latest(data) as reader:
        assert paths(drained(reader, from_start=True)) == ["a.nc", "c.nc"]


def test_a_queue_that_is_no_queue_is_made_anew(data: str) -> None:
    write(data, "a.nc")
    (Path(data) / "_latest_data_info.stat").write_bytes(b"junk" * 100)
    write(data, "b.nc")
    with latest(data) as reader:
        assert paths(drained(reader, from_start=True)) == ["b.nc"]


def test_a_map_that_is_down_stops_nobody(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BASE_PORT", "1")
    with LatestDataInfo(data) as there:
        there.write("a.nc")
        assert there.read() is not None


def test_a_register_of_ones_own_hears_of_every_entry(data: str) -> None:
    told: list[tuple[str, str]] = []
    with latest(data, register=lambda info, at: told.append((info.rel_data_path, at))) as there:
        there.write("a.nc")
        there.write("b.nc")
    assert told == [("a.nc", data), ("b.nc", data)]


def test_a_directory_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError), latest(tmp_path / "file") as there:
        there.write("a.nc")


def test_a_map_hears_of_what_is_written(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.protocols.lrose.datamapper_client import DataMapClient
    from penstock.registry import DataMapServer, MapServerOptions

    with DataMapServer(MapServerOptions(port=0)) as server:
        monkeypatch.setenv("DS_BASE_PORT", str(server.port - 4))
        monkeypatch.setenv("DATA_DIR", str(Path(data).parent))
        with LatestDataInfo(f"{data}/mdv/radar") as there:
            there.write("a.nc", time=1705320000)
            there.write("b.nc", time=1705320060, forecast_lead_secs=3600)
        (entry,) = DataMapClient().all()
    assert (entry.dir, entry.latest_time, entry.forecast_lead_time) == (
        "data/mdv/radar",
        1705320060,
        3600,
    )


def test_a_map_that_hangs_holds_up_no_writer(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("DS_BASE_PORT", str(deaf.getsockname()[1] - 4))
        there = LatestDataInfo(data)
        began = time.monotonic()
        for _ in range(5):
            there.write("a.nc")
        assert time.monotonic() - began < 1.5
        there.close()
