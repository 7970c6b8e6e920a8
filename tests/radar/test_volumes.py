"""Beams become whole files of volumes: none is lost, none is there twice."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pytest

from penstock import describe, open_reader, open_writer
from penstock.core.batch import batch_from_messages, messages_from_batch
from penstock.core.capabilities import AppendOnce, Tabular, Worded
from penstock.core.endpoints import endpoint_of
from penstock.core.errors import Malformed, PositionError, StorageError
from penstock.core.interfaces import Ancestor, Bounds
from penstock.core.message import Message
from penstock.core.overflow import DropReason
from penstock.core.provenance import Commit
from penstock.core.url import URL
from penstock.queue.append_once import Staging
from penstock.queue.waiting import wait_any
from penstock.radar import cfradial
from penstock.radar.beams import (
    FIELDS,
    batch_from_beams,
    batch_from_rows,
    beams_from_batch,
    check_beams,
)
from penstock.radar.cfradial import write_cfradial
from penstock.radar.file_endpoints import CfRadialEndpoint, _WriterOptions
from penstock.radar.grids import Axis, GridOptions, grid_beams, grid_row
from penstock.radar.iwrf.files import files_in
from penstock.radar.volume_files import read_volume
from penstock.radar.volumes import VolumeStore
from support.radar_volumes import START_NS, volume
from support.small_disks import small_disk_at
from support.unprivileged import run_without_rights
from support.until import until
from support.waiting import SOON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Reader

TESTS = Path(__file__).parents[1]
#: A grid of one cell.
SMALL = GridOptions(x=Axis.parse("0"), y=Axis.parse("0"), z=Axis.parse("1"))


def write(folder: Path, *tables: pa.Table, **options: object) -> None:
    with open_writer(f"cfradial:{folder}", datamapper=False, **options) as writer:
        for table in tables:
            writer.write_batch(batch_from_beams(table))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("2*/*.nc"))


def announced(folder: Path) -> list[str]:
    with open_reader(f"latest:{folder}?format=json") as reader:
        return [json.loads(message.payload)["rel_data_path"] for message in reader.available()]


def rays(paths: Sequence[Path]) -> Counter[int]:
    return Counter(ns for path in paths for ns in read_volume(path).column("time_ns").to_pylist())


def set_column(table: pa.Table, name: str, values: object) -> pa.Table:
    at = table.schema.get_field_index(name)
    field = table.schema.field(at)
    return table.set_column(at, field, pa.array(values, field.type))


def test_volumes_become_files_and_each_is_announced_when_it_is_complete(tmp_path: Path) -> None:
    tables = [volume(number, rays=6, gates=8, ends=number != 2) for number in (1, 2, 3)]
    write(tmp_path, *tables)
    found = files(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in found] == announced(tmp_path)
    for path, table in zip(found, tables, strict=True):
        assert str(read_volume(path).column("time_ns")) == str(table.column("time_ns"))
    with open_reader(f"latest:{tmp_path}?format=json") as reader:
        entry = json.loads(next(reader.available()).payload)
    assert (entry["file_ext"], entry["data_type"]) == ("nc", "netCDF")
    assert entry["latest_time"] == START_NS // 1_000_000_000
    assert not list(tmp_path.rglob("*.new"))


def test_files_become_the_beams_that_they_were_made_of(tmp_path: Path) -> None:
    write(tmp_path, volume(1, rays=4, gates=3), volume(2, rays=4, gates=3))
    with open_reader(f"cfradial:{tmp_path}") as reader:
        batch = reader.read_batch(100)
        assert isinstance(reader, Worded)
        said = reader.in_words(next(messages_from_batch(batch)))
        assert said.startswith("GOLDEN, volume 1, sweep 0, azimuth 0.25, elevation 0.50, 3 gates")
        found = beams_from_batch(batch)
        assert reader.statistics().lost == 0
        with pytest.raises(PositionError, match="no numbers"):
            reader.seek(5)
    both = pa.concat_tables([volume(1, rays=4, gates=3), volume(2, rays=4, gates=3, ends=True)])
    assert found.num_rows == 16
    for name in ("time_ns", "azimuth", "VEL", "sweep_number", "radar"):
        assert found.column(name).to_pylist() == both.column(name).to_pylist(), name


def test_what_is_there_now_is_read_also_if_a_file_is_of_tomorrow(tmp_path: Path) -> None:
    for number in (1, 2):
        write_cfradial(tmp_path / f"{number}.nc", volume(number, rays=3, gates=2))
        tomorrow = time.time() + 86_400
        os.utime(tmp_path / f"{number}.nc", (tomorrow, tomorrow))
    with open_reader(f"cfradial:{tmp_path}") as reader:
        assert len(list(reader.available())) == 12
        assert list(reader.available()) == []


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_left_out() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        folder.chmod(0o755)
        write_cfradial(folder / "1.nc", volume(1, rays=3, gates=2))
        (folder / "20250615").mkdir(mode=0o700)
        (folder / "lost+found").mkdir(mode=0o700)

        def check() -> None:
            with open_reader(f"cfradial:{folder}") as reader:
                for _ in range(2):
                    with pytest.raises(StorageError, match="20250615"):
                        reader.read_many(1)
            with pytest.raises(StorageError, match="20250615"):
                files_in(folder)  # of iwrf:

        run_without_rights(check)


def test_a_file_that_has_just_come_is_there(tmp_path: Path) -> None:
    write_cfradial(tmp_path / "1.nc", volume(1, rays=3, gates=2))
    with open_reader(f"cfradial:{tmp_path}?every=1h") as reader:
        assert len(list(reader.available())) == 6
        write_cfradial(tmp_path / "2.nc", volume(2, rays=3, gates=2))
        assert len(list(reader.available())) == 6


def test_a_file_that_comes_ends_the_wait_for_it(tmp_path: Path) -> None:
    with open_reader(f"cfradial:{tmp_path}?every=10ms") as reader:
        assert wait_any([reader], 0) == []
        write_cfradial(tmp_path / "1.nc", volume(1, rays=3, gates=2))
        assert wait_any([reader], SOON) == [reader]
        assert len(reader.read_many(10)) == 6
        assert wait_any([reader], 0.05) == []


def test_files_at_work_are_not_read_and_those_that_are_gone_are_counted(tmp_path: Path) -> None:
    write(tmp_path, *(volume(number, rays=2, gates=3) for number in (1, 2, 3)))
    first, second, _ = files(tmp_path)
    (first.parent / "tmp.4711.1750000000.5.tmp").write_bytes(first.read_bytes()[:100])  # Radx's
    with open_reader(f"cfradial:{tmp_path}") as reader:
        assert len(reader.read_many(4)) == 4
        second.unlink()
        assert len(list(reader.available())) == 4
        books = reader.statistics()
    assert books.lost == 1
    assert [loss.reason for loss in books.losses] == [DropReason.RETENTION]


def test_a_file_that_cannot_be_read_now_is_read_when_it_can(tmp_path: Path) -> None:
    write(tmp_path, *(volume(number, rays=2, gates=3) for number in (1, 2, 3)))
    second = files(tmp_path)[1]
    whole = second.read_bytes()
    second.write_bytes(whole[:100])
    with open_reader(f"cfradial:{tmp_path}") as reader:
        assert len(reader.read_many(4)) == 4
        for _ in range(2):  # not behind it, and nothing said of that
            with pytest.raises(Malformed, match=second.name):
                reader.read_many(4)
        second.write_bytes(whole)
        assert len(list(reader.available())) == 8
        assert reader.statistics().lost == 0


def test_a_volume_that_stays_open_ends_by_its_timeout_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"cfradial:{tmp_path}?datamapper=false&timeout=0.2"
    with caplog.at_level(logging.WARNING), open_writer(url) as writer:
        writer.write_batch(batch_from_beams(volume(7, rays=3, gates=2, ends=False)))
        until(lambda: files(tmp_path))
    assert "volume 7 of GOLDEN, 6 rays: ended, for no ray came any more" in caplog.text
    import netCDF4

    with netCDF4.Dataset(files(tmp_path)[0]) as file:
        assert file.comment == "ended without its last ray: timeout"


def test_a_volume_that_is_kept_open_goes_on_with_the_next_writer(tmp_path: Path) -> None:
    whole = volume(1, rays=6, gates=2)
    write(tmp_path, whole.slice(0, 5), close="keep")
    assert files(tmp_path) == []
    write(tmp_path, whole.slice(5))
    assert rays(files(tmp_path)) == Counter(whole.column("time_ns").to_pylist())
    assert len(files(tmp_path)) == 1


def test_a_volume_is_not_cut_because_its_writer_was_away(tmp_path: Path) -> None:
    whole = volume(1, rays=6, gates=2)
    url = f"cfradial:{tmp_path}?datamapper=false&timeout=2&close=keep"
    with open_writer(url) as writer:
        writer.write_batch(batch_from_beams(whole.slice(0, 5)))
    time.sleep(2.5)
    CfRadialEndpoint().tend(URL.parse(url))  # as a pipeline that was started again
    with open_writer(url) as writer:
        writer.flush()
        assert files(tmp_path) == []
        writer.write_batch(batch_from_beams(whole.slice(5)))
    assert len(files(tmp_path)) == 1
    assert rays(files(tmp_path)) == Counter(whole.column("time_ns").to_pylist())


def test_two_radars_and_rays_out_of_order_are_sorted_into_their_volumes(tmp_path: Path) -> None:
    one, two = (volume(1, rays=5, gates=2, radar=name) for name in ("ONE", "TWO"))
    mixed = pa.concat_tables([one, two]).take(np.random.default_rng(1).permutation(20))
    write(tmp_path, mixed)
    assert [path.name.rsplit("_", 2)[1] for path in files(tmp_path)] == ["ONE", "TWO"]
    assert set(rays(files(tmp_path)[:1]).values()) == {1}
    assert read_volume(files(tmp_path)[0]).column("time_ns").to_pylist() == sorted(
        one.column("time_ns").to_pylist()
    )


def test_a_ray_that_is_late_does_not_end_the_volume_that_has_begun(tmp_path: Path) -> None:
    first, second = volume(1, rays=4, gates=2), volume(2, rays=4, gates=2)
    late, first = first.slice(3, 1), pa.concat_tables([first.slice(0, 3), first.slice(4)])
    with open_writer(f"cfradial:{tmp_path}", datamapper=False) as writer:
        for part in (first, second.slice(0, 4), late, second.slice(4)):
            writer.write_batch(batch_from_beams(part))
            writer.flush()
    counts = [read_volume(path).num_rows for path in files(tmp_path)]
    assert sorted(counts) == [1, 7, 8]
    assert set(rays(files(tmp_path)).values()) == {1}


@pytest.mark.parametrize("back_s", [0.35, 3600])
@pytest.mark.parametrize("at", [3, 8, 12])
@pytest.mark.parametrize("numbered", [True, False])
def test_a_clock_that_is_set_back_cuts_no_volume(
    tmp_path: Path, back_s: float, at: int, numbered: bool
) -> None:
    both = pa.concat_tables([volume(number, rays=4, gates=2) for number in (1, 2)])
    times = both.column("time_ns").to_numpy().copy()
    times[at:] -= int(back_s * 1e9)
    both = set_column(both, "time_ns", times)
    if not numbered:
        both = set_column(both, "volume_number", [None] * 16)
    with open_writer(f"cfradial:{tmp_path}", datamapper=False) as writer:
        for start, end in ((0, 3), (3, 14), (14, 16)):  # borders that know nothing of volumes
            writer.write_batch(batch_from_beams(both.slice(start, end - start)))
            writer.flush()
    found = [read_volume(path) for path in files(tmp_path)]
    assert [table.num_rows for table in found] == [8, 8]
    expected = [sorted(times[:8].tolist()), sorted(times[8:].tolist())]
    assert sorted(sorted(table.column("time_ns").to_pylist()) for table in found) == sorted(
        expected
    )


@pytest.mark.parametrize("first", [0, 20, 36])
@pytest.mark.parametrize("late", [0, 1])
def test_volumes_of_one_number_whose_rays_stand_by_azimuth_are_not_mixed(
    tmp_path: Path, late: int, first: int
) -> None:
    tables = []
    for number in (1, 2):
        table = volume(number, sweeps=1, rays=36, gates=2)
        times = np.roll(table.column("time_ns").to_numpy(), 12)  # the antenna began at 120 degrees
        tables.append(set_column(set_column(table, "time_ns", times), "volume_number", [0] * 36))
    # Files may be read in any order: that of their names, which need not be times.
    both = pa.concat_tables([tables[late], tables[1 - late]])
    with open_writer(f"cfradial:{tmp_path}", datamapper=False) as writer:
        for part in (both.slice(0, first), both.slice(first)):
            writer.write_batch(batch_from_beams(part))
            writer.flush()
    found = [sorted(read_volume(path).column("time_ns").to_pylist()) for path in files(tmp_path)]
    assert found == [sorted(table.column("time_ns").to_pylist()) for table in tables]


def test_parts_of_one_volume_that_came_in_turned_order_are_one_volume(tmp_path: Path) -> None:
    table = volume(1, rays=4, gates=2)
    write(tmp_path, pa.concat_tables([table.slice(4), table.slice(0, 4)]))
    assert [read_volume(path).num_rows for path in files(tmp_path)] == [8]


def test_parts_of_one_volume_are_one_volume_also_if_a_later_one_is_sorted_before_the_others_come(
    tmp_path: Path,
) -> None:
    table = volume(1, rays=6, gates=2)
    first, second, third = table.slice(0, 4), table.slice(4, 4), table.slice(8)
    with open_writer(f"cfradial:{tmp_path}", datamapper=False) as writer:
        for parts in ([second], [third, first, volume(2, rays=6, gates=2)]):
            writer.write_batch(batch_from_beams(pa.concat_tables(parts)))
            writer.flush()
    assert [read_volume(path).num_rows for path in files(tmp_path)] == [12, 12]


def test_rays_with_other_gates_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    table = volume(1, rays=4, gates=2)
    table = set_column(table, "gate_spacing", [150.0] * 4 + [75.0] * 4)
    write(tmp_path, table)
    spacings = [set(read_volume(p).column("gate_spacing").to_pylist()) for p in files(tmp_path)]
    assert sorted(spacings, key=min) == [{75.0}, {150.0}]


def test_other_beams_of_the_same_times_do_not_replace_a_file(tmp_path: Path) -> None:
    table = volume(1, rays=4, gates=2)
    write(tmp_path, table)
    write(tmp_path, table)  # the same again is the same file
    assert len(files(tmp_path)) == 1
    write(tmp_path, set_column(table, "elevation", [9.0] * 8))
    assert [path.stem[-4:] for path in files(tmp_path)] == ["_SUR", "UR_2"]


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("azimuth", [float("nan")], "azimuth"),
        ("gate_spacing", [0.0], "gate_spacing"),
        ("start_range", [float("inf")], "start_range"),
    ],
)
def test_a_ray_that_fits_no_volume_is_refused_before_it_is_taken(
    tmp_path: Path, column: str, values: list[float], reason: str
) -> None:
    ray = set_column(volume(1, rays=1, sweeps=1, gates=2), column, values)
    with open_writer(f"cfradial:{tmp_path}", datamapper=False) as writer:
        with pytest.raises(Malformed, match=reason):
            writer.write_batch(batch_from_beams(ray))
        assert writer.statistics().refused == 1
    assert files(tmp_path) == []


def test_a_ray_without_gates_is_refused(tmp_path: Path) -> None:
    table = volume(1, rays=1, sweeps=1, gates=1)
    empty = [name for name in table.column_names if pa.types.is_list(table.schema.field(name).type)]
    for name in empty:
        table = set_column(table, name, [[]])
    with (
        open_writer(f"cfradial:{tmp_path}", datamapper=False) as writer,
        pytest.raises(Malformed, match="gates"),
    ):
        writer.write_batch(batch_from_beams(check_beams(table)))


def test_rays_that_other_systems_made_of_other_types_are_one_volume(tmp_path: Path) -> None:
    whole = volume(1, rays=2, gates=3)
    wide = pa.schema(
        [
            field.with_type({pa.float32(): pa.float64(), pa.int32(): pa.int64()}[field.type])
            if field.type in (pa.float32(), pa.int32())
            else field.with_type(pa.list_(pa.float64()))
            if pa.types.is_list(field.type)
            else field
            for field in whole.schema
        ]
    )
    parts = [whole.slice(0, 2), whole.slice(2).cast(wide)]
    with open_writer(f"cfradial:{tmp_path}", datamapper=False) as writer:
        for part in parts:
            writer.write_batch(batch_from_rows(part))
        writer.write_batch(batch_from_messages([]))
    assert [read_volume(path).num_rows for path in files(tmp_path)] == [4]


@pytest.mark.parametrize(
    "name", ["time", "range", "frequency", "a b", "1st", "sweep", "", "x" * 300]
)
def test_a_field_may_have_any_name(tmp_path: Path, name: str) -> None:
    table = volume(1, rays=2, gates=3)
    for each in (name, "a_b"):
        table = table.append_column(pa.field(each, pa.list_(pa.float32())), table.column("VEL"))
    write(tmp_path, table)
    (path,) = files(tmp_path)
    found = read_volume(path)
    others = [each for each in found.column_names if each not in volume().column_names]
    assert len(others) == 2
    for each in others:
        assert found.column(each).to_pylist() == table.column("VEL").to_pylist()


@pytest.mark.parametrize("radar", ["x" * 400, "Zürich " * 40, "a\0b\n/..", "../../etc"])
def test_a_radar_may_have_any_name(tmp_path: Path, radar: str) -> None:
    write(tmp_path / "out", volume(1, rays=2, gates=3, radar=radar))
    assert len(files(tmp_path / "out")) == 1


def test_rays_of_a_pipeline_without_a_gate_are_in_their_volume(tmp_path: Path) -> None:
    table = volume(1, rays=2, gates=3)
    for name in FIELDS:
        table = set_column(table, name, [[]] * 4)
    write_cfradial(tmp_path / "x.nc", table)
    found = read_volume(tmp_path / "x.nc")
    assert found.num_rows == 4
    assert np.isnan(found.column("DBZ").to_pylist()).all()


def test_what_no_file_can_be_made_of_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    lost = set_column(volume(1, rays=2, gates=3), "latitude", [None] * 4)
    grid = grid_row(grid_beams(volume(1, rays=2, gates=3), SMALL))
    half = grid.set_column(grid.schema.get_field_index("x0"), "x0", pa.array([[0.0, 1.0]]))
    for url, rows, reason in (
        (f"cfgrid:{tmp_path}/a", lost, "latitude"),
        (f"cfgrid:{tmp_path}/b?fields=DBZ,KDP", volume(1, rays=2, gates=3), "KDP"),
        (f"cfgrid:{tmp_path}/c", half, "2 values"),
        (f"cfradial:{tmp_path}/d", grid, "a grid"),
    ):
        place = URL.parse(url, {"datamapper": "false"})
        endpoint = endpoint_of(place)
        assert isinstance(endpoint, Tabular)
        with pytest.raises(Malformed, match=reason):  # as a pipeline writes
            endpoint.messages_of(place, rows.to_batches()[0])
        with open_writer(place.text, **place.options) as writer:
            with pytest.raises(Malformed, match=reason):
                writer.write_batch(batch_from_rows(rows))
            assert writer.statistics().refused == rows.num_rows
            writer.write_batch(batch_from_messages([]))
        assert not list(Path(place.path).glob("2*"))


def test_a_volume_of_which_no_grid_can_be_made_does_not_hold_up_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tables = [volume(number, rays=64, gates=3) for number in (1, 2, 3)]
    tables[1] = tables[1].drop_columns(["DBZ"])
    url = f"cfgrid:{tmp_path}?fields=DBZ&x=0&y=0&z=1&datamapper=false"
    writer = open_writer(url)
    messages = [m for table in tables for m in messages_from_batch(batch_from_beams(table))]
    writer.write_batch(batch_from_messages(messages))  # taken: a relay must not send them again
    assert writer.statistics()[:3:2] == (384, 0)
    assert len(files(tmp_path)) == 2
    assert "DBZ" in caplog.text
    assert describe(url).details["unwritten"] == ["volume 2 of GOLDEN, 128 rays"]
    with pytest.raises(Malformed, match="DBZ"):
        writer.flush()
    writer.write_batch(batch_from_beams(volume(4, rays=64, gates=3)))
    with pytest.raises(Malformed, match="DBZ"):
        writer.close()
    assert len(files(tmp_path)) == 3
    with open_writer(url.replace("fields=DBZ", "fields=VEL")):  # its rays are still there
        pass
    assert len(files(tmp_path)) == 4
    assert describe(url).details["unwritten"] == []


def test_a_volume_that_netcdf_refuses_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_field = cfradial._File._field

    def of_volume_2_under_a_wrong_name(file: cfradial._File, name: str) -> None:
        if file._first("volume_number") == 2:
            file._file.createDimension("a/b", 1)
        write_field(file, name)

    monkeypatch.setattr(cfradial._File, "_field", of_volume_2_under_a_wrong_name)
    with pytest.raises(Malformed, match=r"volume 2 of GOLDEN.*illegal"):
        write(tmp_path, *(volume(number, rays=2, gates=2) for number in (1, 2, 3)))
    assert len(files(tmp_path)) == 2
    assert not list(tmp_path.rglob("*.new"))
    monkeypatch.undo()
    write(tmp_path)
    assert len(files(tmp_path)) == 3


def test_payloads_of_a_pipeline_that_are_no_rays_are_refused_before_they_are_taken(
    tmp_path: Path,
) -> None:
    url = URL.parse(f"cfradial:{tmp_path}/out?datamapper=false")
    endpoint = endpoint_of(url)
    assert isinstance(endpoint, AppendOnce)

    def commit(batch: int, messages: Batch) -> Commit:
        task = Staging(tmp_path / "staging" / str(batch), 0)
        task.add([url.text], messages)
        return Commit("query", batch, task.finish())

    endpoint.append_once(url, commit(0, batch_from_beams(volume(1, rays=2, gates=3))))
    garbage = Message(0, 0, 0, 0, 0, None, None, b"no ray")
    none = next(messages_from_batch(batch_from_beams(volume(2, rays=2, gates=3))))
    with pa.ipc.open_stream(none.payload) as stream:
        schema = stream.schema
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    for bad in (garbage, none._replace(payload=sink.getvalue().to_pybytes())):
        with pytest.raises(Malformed, match="a beam"):
            endpoint.append_once(url, commit(1, batch_from_messages([bad])))
    endpoint.append_once(url, commit(1, batch_from_beams(volume(2, rays=2, gates=3))))
    assert len(files(tmp_path / "out")) == 2


def test_rays_that_a_power_failure_took_from_the_log_are_in_no_volume(tmp_path: Path) -> None:
    write(tmp_path, volume(1, rays=4, gates=2).slice(0, 5), close="keep")
    path = tmp_path / ".penstock" / "volumes.json"
    book = json.loads(path.read_bytes())
    (kept,) = book["open"]
    # As if five more had been in memory only, of a volume that had ended and of the next.
    ended = {**kept, "runs": [[0, 7]], "rays": 8, "reason": "end"}
    book["open"], book["position"] = [{**kept, "runs": [[8, 9]], "number": 3}], 10
    book["writing"] = [ended, {**ended, "runs": [[5, 7]], "number": 2}]
    path.write_text(json.dumps(book))
    store = VolumeStore(tmp_path, CfRadialEndpoint().product(_WriterOptions()))

    class Cut:  # the log as its recovery leaves it
        def bounds(self) -> Bounds:
            return Bounds(book["epoch"] + 1, 0, 5, (Ancestor(book["epoch"], 5),))

    found = store._read_book(cast("Reader", Cut()))
    assert found.position == 5
    assert found.open == []
    assert [volume.runs for volume in found.writing] == [[(0, 4)]]
    assert found.writing[0].rays == 5


def test_a_disk_that_fills_leaves_no_half_file_and_no_ray_is_lost(tmp_path: Path) -> None:
    whole = volume(1, rays=20, gates=200)
    day = tmp_path / "20250615"
    with small_disk_at(day, "64k"):
        with pytest.raises(StorageError, match="No space left"):
            write(tmp_path, whole)
        assert list(day.iterdir()) == []
        assert not (tmp_path / "_latest_data_info.xml").exists()
        unwritten = describe(f"cfradial:{tmp_path}").details["unwritten"]
        assert unwritten == ["volume 1 of GOLDEN, 40 rays"]
    write(tmp_path)  # who comes next finds room
    assert describe(f"cfradial:{tmp_path}").details["unwritten"] == []
    assert rays(files(tmp_path)) == Counter(whole.column("time_ns").to_pylist())
    assert len(announced(tmp_path)) == 1


def test_beams_that_were_taken_before_the_disk_was_full_are_counted_and_not_sent_again(
    tmp_path: Path,
) -> None:
    whole = volume(1, rays=500, gates=50, ends=False)
    with small_disk_at(tmp_path / "out", "1m") as place:
        writer = open_writer(f"cfradial:{place}", datamapper=False, close="keep")
        with pytest.raises(StorageError, match="No space left"):
            writer.write_batch(batch_from_beams(whole))
        books = writer.statistics()
        with open_reader(f"log:{place}/.penstock/beams") as reader:
            taken = len(list(reader.available()))
        assert 0 < taken < whole.num_rows
        assert (books.messages, books.refused) == (taken, whole.num_rows - taken)
        assert books.last_seq == taken - 1
        with suppress(StorageError):
            writer.close()


def test_beams_that_were_taken_are_no_error_when_their_file_has_no_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = volume(1, rays=150, gates=50)
    with small_disk_at(tmp_path / "20250615", "64k"):
        writer = open_writer(f"cfradial:{tmp_path}", datamapper=False)
        writer.write_batch(batch_from_beams(whole))  # or a relay would send them again
        assert writer.statistics()[:3:2] == (300, 0)
        assert "volumes wait in their log" in caplog.text
        with pytest.raises(StorageError, match="No space left"):
            writer.flush()
        with pytest.raises(StorageError, match="No space left"):
            writer.close()
    write(tmp_path)
    assert rays(files(tmp_path)) == Counter(whole.column("time_ns").to_pylist())


def check_lives(folder: Path, count: int, kills: int) -> None:
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TESTS))))
    done = subprocess.run(
        [sys.executable, "-m", "support.volume_lives", str(folder), str(count), str(kills)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kills"] >= kills // 2
    out = folder / "out"
    found = rays(files(out))
    assert set(found.values()) == {1}
    assert len(found) == 8 * count
    assert len(files(out)) == count
    assert not list(out.rglob("*.new"))
    told = Counter(announced(out))
    assert set(told) == {str(path.relative_to(out)) for path in files(out)}
    assert sum(told.values()) - len(told) <= kills


def test_no_ray_is_lost_or_doubled_by_processes_that_are_killed(tmp_path: Path) -> None:
    check_lives(tmp_path, 3, 4)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_no_ray_is_lost_or_doubled_by_fifty_kills_in_twenty_volumes(tmp_path: Path) -> None:
    check_lives(tmp_path, 20, 50)
