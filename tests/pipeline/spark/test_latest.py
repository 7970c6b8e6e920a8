"""Spark starts from new files: `url=latest:DIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.registry.latest import LatestDataInfo

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def write(directory: Path, *names: str) -> None:
    directory.mkdir(exist_ok=True)
    with LatestDataInfo(directory, register=None) as latest:
        for name in names:
            (directory / name).touch()
            latest.write(name, time=1705320000)


def run_query(spark: SparkSession, directory: Path, checkpoint: Path, target: Path) -> list[str]:
    """Let a query take what is new, and return the paths of all files that it has taken."""
    stream = spark.readStream.format("penstock").option("url", f"latest:{directory}?format=json")
    query = (
        stream.load()
        .selectExpr("get_json_object(cast(payload as string), '$.path') as path")
        .writeStream.format("json")
        .option("path", str(target))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    lines = [line for file in target.glob("*.json") for line in file.read_text().splitlines()]
    return sorted(Path(json.loads(line)["path"]).name for line in lines)


@pytest.mark.full
def test_a_query_takes_every_new_file_once_and_goes_on_from_its_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    directory, checkpoint, target = (tmp_path / name for name in ("data", "checkpoint", "out"))
    write(directory, "a", "b", "c")
    assert run_query(spark, directory, checkpoint, target) == ["a", "b", "c"]
    write(directory, "d", "e")
    assert run_query(spark, directory, checkpoint, target) == ["a", "b", "c", "d", "e"]
