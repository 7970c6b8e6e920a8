"""Beams go through Spark into files, and files trigger what comes next."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from penstock import open_reader, open_writer
from penstock.pipeline import load_pipelines, plan
from penstock.pipeline.run.runner import run
from penstock.radar.beams import batch_from_beams
from penstock.radar.grids import read_grid
from penstock.radar.volume_files import read_volume
from support.radar_volumes import volume

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VOLUMES = """
pipeline: volumes
sources:
  raw: {{url: "log:{folder}/beams", maxOffsetsPerTrigger: {per_batch}}}
stages:
  beams: {{from: raw, use: "penstock.radar:decode_beams"}}
  angles: {{from: beams, sql: "select radar, azimuth, elevation from beams"}}
sinks:
  volumes: {{from: beams, announce: true,
             url: "cfradial:{folder}/volumes?datamapper=false&timeout=1h"}}
{more}
settings: {{spark: {{spark.driver.host: "127.0.0.1"}}}}
"""
KILLS = 10
MORE = """
  table: {{from: angles, parquet: "{folder}/table", announce: true}}
  xml: {{from: angles, xml: "{folder}/xml", announce: true, options: {{rowTag: ray}}}}
  records: {{from: angles, struct: "{folder}/records", announce: true,
             layout: "char radar[8]; float azimuth; float elevation;"}}
"""
GRIDS = """
pipeline: grids
sources:
  files: {{url: "latest:{folder}/volumes?format=json"}}
  xml: {{url: "latest:{folder}/xml?format=file",
         decode: {{format: xml, rows: //ray, schema: "azimuth DOUBLE", keep: []}}}}
  records: {{url: "latest:{folder}/records?format=file",
             decode: {{format: struct, records: true, keep: [],
                       layout: "char radar[8]; float azimuth; float elevation;"}}}}
stages:
  opened: {{from: files, use: "penstock.radar:open_files",
            options: {{format: cfradial, fields: [DBZ, VEL]}}}}
  grids: {{from: opened, use: "penstock.radar:grid",
           options: {{x: "-5:5:1", y: "-5:5:1", z: "2:3:1"}}}}
sinks:
  out: {{from: grids, url: "cfgrid:{folder}/grids?datamapper=false"}}
  xml_rows: {{from: xml, parquet: "{folder}/xml_rows"}}
  record_rows: {{from: records, parquet: "{folder}/record_rows"}}
"""


def described(folder: Path, text: str) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(text)
    return path


def write_beams(folder: Path, count: int, rays: int) -> None:
    with open_writer(f"log:{folder}/beams") as writer:
        for number in range(1, count + 1):
            ends = number % 3 != 0 or number == count
            writer.write_batch(batch_from_beams(volume(number, rays=rays, gates=20, ends=ends)))


def announced(folder: Path) -> list[str]:
    with open_reader(f"latest:{folder}?format=json") as reader:
        return [json.loads(message.payload)["rel_data_path"] for message in reader.available()]


def rows(folder: Path) -> list[dict[str, object]]:
    return [row for path in folder.glob("*.parquet") for row in pq.read_table(path).to_pylist()]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_beams_become_files_of_every_kind_and_the_files_trigger_grids(
    spark: SparkSession, tmp_path: Path
) -> None:
    write_beams(tmp_path, 2, 6)
    more = MORE.format(folder=tmp_path)
    first = VOLUMES.format(folder=tmp_path, per_batch=1000, more=more)
    for text in (first, GRIDS.format(folder=tmp_path)):
        pipelines = load_pipelines(described(tmp_path, text))
        run(plan(pipelines), spark=spark, once=True, checkpoint=str(tmp_path / "checkpoints"))
    for name in ("volumes", "table", "xml", "records"):
        for path in announced(tmp_path / name):
            assert (tmp_path / name / path).is_file()
    assert len(announced(tmp_path / "volumes")) == 2
    grids = sorted((tmp_path / "grids").glob("2*/*.nc"))
    assert [list(read_grid(path).fields) for path in grids] == [["DBZ", "VEL"]] * 2
    azimuths = sorted(row["azimuth"] for row in rows(tmp_path / "table"))  # type: ignore[type-var]
    assert len(azimuths) == 24
    for name in ("xml_rows", "record_rows"):
        assert sorted(row["azimuth"] for row in rows(tmp_path / name)) == azimuths  # type: ignore[type-var]


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_a_pipeline_that_is_killed_ten_times_writes_each_ray_once(tmp_path: Path) -> None:
    write_beams(tmp_path, 20, 10)
    text = VOLUMES.format(folder=tmp_path, per_batch=25, more="")
    path = described(tmp_path, text)
    penstock = str(Path(sys.executable).with_name("penstock"))
    command = [penstock, "run", str(path), "--once"]
    command += ["--checkpoint", str(tmp_path / "checkpoints")]
    rng, kills = random.Random(), 0
    out = tmp_path / "volumes"
    while True:
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        began = len(list(out.glob("2*/*.nc")))
        if kills < KILLS:
            while process.poll() is None and len(list(out.glob("2*/*.nc"))) <= began:
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.5))
            if process.poll() is None:
                kills += 1
                os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == 0:
            break
    assert kills == KILLS
    files = sorted(out.glob("2*/*.nc"))
    found = Counter(ns for file in files for ns in read_volume(file).column("time_ns").to_pylist())
    assert set(found.values()) == {1}
    assert (len(found), len(files)) == (400, 20)
    assert not list(out.rglob("*.new"))
    told = Counter(announced(out))
    assert set(told) == {str(file.relative_to(out)) for file in files}
    assert sum(told.values()) - len(told) <= kills
