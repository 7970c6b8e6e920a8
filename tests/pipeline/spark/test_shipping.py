"""Modules beside a pipeline's file get to where its tasks run: a cluster, or a Connect server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest

from penstock import open_writer
from support.spark_cluster import cluster, connect_server
from support.spark_lives import programs, running
from support.spark_streams import payloads

if TYPE_CHECKING:
    from pathlib import Path

#: A stage that tasks import by its name, with a helper and a package beside it.
STAGE = """
import helper_of_it
from package_of_it.deeper import word


def doubled(frame):
    return frame.mapInArrow(_double, "seq BIGINT, payload STRING")


def _double(batches):
    for batch in batches:
        yield helper_of_it.double(batch, word())
"""
HELPER = """
import pyarrow as pa


def double(batch, word):
    values = [f"{word} {2 * n}" for n in batch.column("seq").to_pylist()]
    return pa.RecordBatch.from_pydict({"seq": batch.column("seq"), "payload": values})
"""

PIPELINE = """
pipeline: p
sources: {{a: {{url: "log:{folder}/in"}}}}
stages:
  twice: {{from: a, use: "stage_of_it:doubled"}}
  few: {{from: twice, sql: "select seq, payload from twice where seq < 10"}}
sinks:
  all_of_it: {{from: twice, url: "log:{folder}/all"}}
  few_of_it: {{from: few, url: "log:{folder}/few"}}
  files: {{from: few, parquet: "{folder}/files"}}
settings:
  checkpoint: "{folder}/checkpoints"
  spark: {spark}
---
pipeline: q
sources: {{a: {{url: "log:{folder}/in"}}}}
stages:
  even: {{from: a, sql: "select * from a where seq % 2 = 0"}}
sinks: {{even_of_it: {{from: even, url: "log:{folder}/even"}}}}
settings: {{checkpoint: "{folder}/checkpoints", spark: {spark}}}
"""


def write_pipeline(folder: Path, spark: dict[str, str]) -> Path:
    """Write the files into a folder that nobody's path has."""
    hidden = folder / "hidden"
    (hidden / "package_of_it").mkdir(parents=True)
    (hidden / "stage_of_it.py").write_text(STAGE)
    (hidden / "helper_of_it.py").write_text(HELPER)
    (hidden / "package_of_it" / "__init__.py").touch()
    (hidden / "package_of_it" / "deeper.py").write_text("def word():\n    return 'twice'\n")
    file = hidden / "p.yaml"
    file.write_text(PIPELINE.format(folder=folder, spark=json.dumps(spark)))
    with open_writer(f"log:{folder}/in") as writer:
        writer.write_many([b"%d" % i for i in range(100)])
    return file


def check(folder: Path) -> None:
    doubled = [b"twice %d" % (2 * i) for i in range(100)]
    assert sorted(payloads(f"log:{folder}/all")) == sorted(doubled)
    assert sorted(payloads(f"log:{folder}/few")) == sorted(doubled[:10])
    assert payloads(f"log:{folder}/even") == [b"%d" % i for i in range(0, 100, 2)]
    files = ds.dataset(folder / "files").to_table()
    assert sorted(files["seq"].to_pylist()) == list(range(10))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_executors_get_the_modules_that_stages_need(tmp_path: Path) -> None:
    spark = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        # As on another machine: the folder of the file is not there.
        "spark.executorEnv.PYTHONPATH": "/nowhere",
    }
    file = write_pipeline(tmp_path, spark)
    with cluster(tmp_path, workers=1) as started, programs() as all_:
        program = running(tmp_path / "errors", file, "--once", "--master", started.url)
        assert all_.add(program).wait()[-1]["event"] == "end"
    check(tmp_path)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_pipelines_run_over_connect_with_their_modules_and_files(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, {"spark.sql.shuffle.partitions": "2"})
    with connect_server(tmp_path) as remote, programs() as all_:
        for has_rows in (True, False):  # again: it goes on where it was
            program = running(tmp_path / "errors", file, "--once", "--master", remote)
            said = all_.add(program).wait()
            # Each sink that shares batches counts what it takes of them.
            assert (said[-1]["event"], said[-1]["rows"] > 0) == ("end", has_rows)
            check(tmp_path)
        with open_writer(f"log:{tmp_path}/in") as writer:
            writer.write(b"100")
        # As if the last batch had died before it was noted.
        for name in ("p-all_of_it", "q-even_of_it"):
            for file_name in ("0", ".0.crc"):
                (tmp_path / "checkpoints" / name / "commits" / file_name).unlink()
        program = running(tmp_path / "errors", file, "--once", "--master", remote)
        assert all_.add(program).wait()[-1]["event"] == "end"
    assert len(payloads(f"log:{tmp_path}/all")) == 101
    assert len(payloads(f"log:{tmp_path}/even")) == 51
