"""The blocks of Python in the documentation that need Spark, in the order of their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from docs import given
from docs.blocks import python_blocks
from docs.machine import Machine
from docs.test_blocks import ON_SPARK
from penstock import open_writer

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

STAGES = """
from pyspark.sql import functions as F


def moments(beams):
    return beams.select("payload", F.lit(50.0).alias("dbz"), F.lit(0).alias("sweep"))
"""


@pytest.mark.usefixtures("settings_restored")
@pytest.mark.parametrize("page", sorted({page for page, _ in ON_SPARK}))
def test_the_blocks_of_a_page_run(
    page: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Machine(tmp_path) as machine:
        given.routed_streams(machine)
        for url in ("fmq:/tmp/radar/beams", "fmq:/tmp/radar/iq"):
            with open_writer(machine.here(url)) as writer:
                writer.write_many([b"a beam"] * 5, type=1)
        for step in ("mkdir -p /data/radar", "penstock latest write /data/radar x.nc"):
            machine.do(step)
        (tmp_path / "my_stages.py").write_text(STAGES)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {"spark": spark}
        blocks = python_blocks(page)
        try:
            for _, number in sorted(key for key in ON_SPARK if key[0] == page):
                exec(compile(machine.here(blocks[number]), page, "exec"), names)
            if page == "spark":
                names["query"].processAllAvailable()
            if page == "pipelines":
                assert names["outcome"].lost == 0
        finally:
            for query in spark.streams.active:
                query.stop()
            if "server" in names:
                names["server"].close()
