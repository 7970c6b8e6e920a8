"""Checkpoints and notes that release 0.1 has written go on: nothing is lost, nothing doubled.

The archive has a log of 60 numbers, four queries that have delivered them in three batches, and a
batch of 20 that was cut off after 7. `/fixture` stands for where it was.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from penstock.core.batch import batch_from_messages
from penstock.core.endpoints import file_name_of
from penstock.core.message import Message
from penstock.core.provenance import AnotherBatch, Staged
from penstock.pipeline import Pipeline, plan
from penstock.pipeline.run import QueryFailed, run
from penstock.protocols.flight import FlightServer, ServerOptions
from penstock.queue.append_once import Staging, append_once
from support.spark_streams import fill, numbers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ARCHIVE = Path(__file__).parents[2] / "fixtures" / "release-0.1" / "spark" / "checkpoints.tar.xz"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """What the release has left, in a folder of its own."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in tmp_path.rglob("*"):
        if path.is_file() and b"/fixture" in (content := path.read_bytes()):
            path.write_bytes(content.replace(b"/fixture", str(tmp_path).encode()))
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_cut_off", [True, pytest.param(False, marks=pytest.mark.full)])
def test_queries_of_the_release_go_on(spark: SparkSession, old: Path, is_cut_off: bool) -> None:
    source = f"log:{old}/in"
    fill(source, range(60, 80))
    (legacy,) = (old / "staging").iterdir()  # where the release kept the notes of remote streams
    with FlightServer(ServerOptions(root=old / "remote", port=0)) as server:
        far = f"{server.url}far?kind=log&segment=4k&segment_slots=32"
        legacy.rename(legacy.with_name(f"{file_name_of(f'{server.url}far?kind=log')}.commits.json"))
        targets = {
            "tolog": {"url": f"log:{old}/log"},
            "toring": {"url": f"fmq:{old}/ring"},
            "toflight": {"url": far, "options": {"staging": f"{old}/staging"}},
            "toparquet": {"parquet": f"{old}/parquet"},
        }
        checkpoint = old / "checkpoints"
        for name, target in targets.items():
            if is_cut_off:  # it was delivered, and Spark did not note it any more
                (checkpoint / f"{name}-out" / "commits" / "2").unlink()
            read = Pipeline(name).source("a", url=source)
            pipeline = read.sink("out", from_="a", **target)  # type: ignore[arg-type]
            run(plan(pipeline), spark=spark, once=True, checkpoint=str(checkpoint))
        for url in (f"log:{old}/log", f"fmq:{old}/ring", f"{server.url}far"):
            assert sorted(numbers(url)) == list(range(80))
    files = sorted((old / "parquet").glob("*.parquet"))
    rows = [int(row.as_py()) for file in files for row in pq.read_table(file)["payload"]]
    assert sorted(rows) == list(range(80))


@pytest.mark.timeout(300)
def test_one_of_which_it_is_not_known_what_it_had_is_refused(
    spark: SparkSession, old: Path
) -> None:
    pipeline = Pipeline("tolog").source("a", url=f"log:{old}/in")
    pipeline = pipeline.sink("out", from_="a", url=f"log:{old}/log")
    checkpoint = old / "checkpoints"
    for name in ("offsets", "commits"):
        for batch in "12":
            (checkpoint / "tolog-out" / name / batch).unlink()
    with pytest.raises(QueryFailed, match=r"batch 1 is made of .*/in 20 to 59, but delivered was"):
        run(plan(pipeline), spark=spark, once=True, checkpoint=str(checkpoint))
    assert numbers(f"log:{old}/log") == list(range(60))


def staged(old: Path, first: int, end: int) -> list[Staged]:
    task = Staging(old / "begun-staging" / "query-q" / "2", 0)
    messages = [Message(0, 0, 0, 0, 0, None, None, b"%d" % n) for n in range(first, end)]
    task.add([f"log:{old}/begun"], batch_from_messages(messages))
    return list(task.finish())


@pytest.mark.parametrize("has_files", [True, False])
def test_a_batch_that_the_release_had_begun_is_completed(old: Path, has_files: bool) -> None:
    url, folder = f"log:{old}/begun", old / "begun-staging"
    assert numbers(url) == list(range(17))
    if not has_files:
        for file in (folder / "query-q" / "1").iterdir():
            file.unlink()
    parts = staged(old, 10, 30)
    assert append_once(url, parts, "q", 1, folder) == 13
    assert append_once(url, parts, "q", 1, folder) == 0
    assert numbers(url) == list(range(30))


def test_what_was_before_it_is_not_taken_for_it(old: Path) -> None:
    url, folder = f"log:{old}/begun", old / "begun-staging"
    with pytest.raises(AnotherBatch):
        append_once(url, staged(old, 0, 10), "q", 0, folder)
    assert numbers(url) == list(range(17))
