"""Stages open files and make grids: what runs in Spark's tasks, without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.core.errors import InvalidOption, Malformed, NotFound
from penstock.radar.beams import batch_from_beams
from penstock.radar.cfradial import write_cfradial
from penstock.radar.dwells import DwellOptions
from penstock.radar.grids import GridOptions
from penstock.radar.moments_stage import moments_of_batch
from penstock.radar.stages import _Gridding, _opener, _Opening, _Unpacking
from support.radar_volumes import volume

TESTS = Path(__file__).parents[1]


def entries(*paths: Path | None) -> pa.RecordBatch:
    said = [{"path": None if path is None else str(path)} for path in paths]
    return pa.record_batch({"payload": [json.dumps(one).encode() for one in said]})


def opened(format: str, *paths: Path | None, skips: bool = False, **options: Any) -> pa.Table:
    opener = _opener(format, ["DBZ", "OTHER"], options, skips=skips)
    made = list(_Opening(opener, skips=skips)(iter([entries(*paths)])))
    return pa.Table.from_batches(made, made[0].schema if made else opener.schema)


def test_volumes_become_beams_with_the_fields_that_were_asked_for(tmp_path: Path) -> None:
    write_cfradial(tmp_path / "v.nc", volume(rays=3, gates=2))
    rows = opened("cfradial", tmp_path / "v.nc")
    assert rows.num_rows == 6
    assert rows.column("OTHER").null_count == 6
    assert "VEL" not in rows.column_names


def test_time_series_become_messages_that_moments_take() -> None:
    rows = opened("iwrf", TESTS / "vectors" / "iwrf" / "fl32.iwrf_ts")
    assert rows.num_rows > 0
    assert set(rows.column_names) == {"url", "seq", "time_ns", "payload"}
    batch = rows.combine_chunks().to_batches()[0]
    assert moments_of_batch(batch, DwellOptions(pulses=5)).num_rows > 0


def test_xml_and_records_become_columns(tmp_path: Path) -> None:
    (tmp_path / "s.xml").write_text('<s><storm id="1"/><storm id="2"/></s>')
    rows = opened("xml", tmp_path / "s.xml", rows="storm", schema="id INT")
    assert rows.to_pylist() == [{"path": str(tmp_path / "s.xml"), "id": n} for n in (1, 2)]
    (tmp_path / "r.bin").write_bytes(b"\1\0\2\0")
    rows = opened("struct", tmp_path / "r.bin", layout="uint16_t n;", records=True)
    assert rows.column("n").to_pylist() == [1, 2]


def test_a_file_that_is_gone_or_wrong_fails_or_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "bad.nc").write_text("no")
    with pytest.raises(Malformed, match="first bytes"):
        opened("cfradial", tmp_path / "bad.nc")
    with pytest.raises(NotFound, match="is gone"):
        opened("cfradial", None)
    assert opened("cfradial", tmp_path / "bad.nc", None, skips=True).num_rows == 0
    with pytest.raises(InvalidOption, match="no such format"):
        opened("mdv", tmp_path)


def test_grids_are_made_of_whole_volumes() -> None:
    options = GridOptions.model_validate({"x": "-3:3:1", "y": "0", "z": "2"})
    both = pa.concat_tables([volume(1, rays=4, gates=9), volume(2, rays=4, gates=9)])
    batches = both.to_batches(max_chunksize=3)
    rows = list(_Gridding(options, partial=False)(iter(batches)))
    assert len(rows) == 2
    with pytest.raises(Malformed, match="without its end"):
        list(_Gridding(options, partial=False)(iter(both.slice(0, 12).to_batches())))
    with pytest.raises(Malformed, match="without its beginning"):
        list(_Gridding(options, partial=False)(iter(both.slice(2).to_batches())))
    assert len(list(_Gridding(options, partial=True)(iter(both.slice(2, 10).to_batches())))) == 2


def test_a_volume_whose_end_is_missing_is_not_put_together_with_the_next() -> None:
    options = GridOptions.model_validate({"x": "-3:3:1", "y": "0", "z": "2"})
    cut = volume(1, rays=4, gates=9, ends=False)
    whole, other = volume(2, rays=4, gates=9), volume(1, rays=4, gates=9, radar="OTHER")
    for following in (whole, whole.slice(1), other.slice(1)):
        batches = pa.concat_tables([cut, following]).to_batches(max_chunksize=3)
        with pytest.raises(Malformed, match=r"volume 1 .* without its end"):
            list(_Gridding(options, partial=False)(iter(batches)))
        made = list(_Gridding(options, partial=True)(iter(batches)))
        ends = [batch.column("end_ns")[0].as_py() for batch in made]
        assert ends == [max(each.column("time_ns").to_pylist()) for each in (cut, following)]


@pytest.mark.parametrize("damage", ["inside", "cut off"])
def test_time_series_that_are_damaged_fail_or_give_what_is_whole(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = (TESTS / "vectors" / "iwrf" / "fl32.iwrf_ts").read_bytes()
    path = tmp_path / "x.iwrf_ts"
    damaged = {"cut off": data[:-100], "inside": data[:20_000] + bytes(77) + data[20_000:]}
    path.write_bytes(damaged[damage])
    with pytest.raises(Malformed, match="bytes that are no packet"):
        opened("iwrf", path)
    rows = opened("iwrf", path, skips=True)
    assert rows.num_rows >= 27
    assert "bytes that are no packet" in caplog.text


def test_messages_become_beams() -> None:
    beams = volume(1, rays=3, gates=2)
    found = pa.Table.from_batches(list(_Unpacking(beams.schema)(iter([batch_from_beams(beams)]))))
    assert str(found.column("DBZ")) == str(beams.column("DBZ"))
