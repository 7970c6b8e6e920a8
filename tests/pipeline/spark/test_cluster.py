"""Executors in processes of their own: they find the package, die, and every row is there once."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

import pytest

from penstock import create
from support.exactly_once import (
    check_nothing_left,
    check_pipeline,
    check_stream,
    write_messages,
    write_pipeline,
)
from support.spark_cluster import Cluster, cluster
from support.spark_lives import Program, copying, programs, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Size(NamedTuple):
    messages: int
    per_batch: int


SIZES = [
    pytest.param(Size(60_000, 3_000), id="quick", marks=pytest.mark.timeout(600)),
    pytest.param(
        Size(1_000_000, 25_000), id="full", marks=[pytest.mark.full, pytest.mark.timeout(1200)]
    ),
]

EXECUTORS = {"spark.executor.memory": "512m", "spark.driver.host": "127.0.0.1"}


@pytest.fixture(scope="module")
def started_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster"), workers=2) as started:
        yield started


@pytest.mark.parametrize("size", SIZES)
def test_executors_and_workers_of_a_cluster_are_killed_and_rows_are_there_once(
    started_cluster: Cluster, tmp_path: Path, size: Size
) -> None:
    source, target = f"fmq:{tmp_path}/in", f"log:{tmp_path}/out"
    create(f"{source}?slots={size.messages}&size={size.messages * 256}")
    third = size.messages // 3
    portions = (range(third), range(third, 2 * third), range(2 * third, size.messages))
    left = iter(portions)
    with programs() as started:
        driver = started.add(
            copying(
                tmp_path / "errors",
                source=source,
                target=target,
                checkpoint=str(tmp_path / "checkpoint"),
                total=size.messages,
                per_batch=size.per_batch,
                master=started_cluster.url,
                settings=EXECUTORS,
            )
        )
        kill_some(driver, started_cluster, lambda: write_messages(source, next(left)))
    check_stream(target, range(size.messages))
    check_nothing_left(tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_pipeline_on_a_cluster_delivers_exactly_once_to_streams_and_files(
    started_cluster: Cluster, tmp_path: Path
) -> None:
    file = write_pipeline(tmp_path, range(1_000_000), per_batch=25_000)
    with programs() as started:
        options = ("--once", "--checkpoint", str(tmp_path / "checkpoints"))
        driver = running(tmp_path / "errors", file, *options, "--master", started_cluster.url)
        kill_some(started.add(driver), started_cluster)
    check_pipeline(tmp_path, range(1_000_000))


def kill_some(driver: Program, of: Cluster, write_more: Callable[[], None] = lambda: None) -> None:
    """Kill an executor and a worker in the middle of batches, and let the driver get done."""
    for kill in (of.kill_executor, of.kill_worker):
        of.wait_for_executors(2)
        write_more()
        said = driver.until(state="running")
        time.sleep(random.uniform(0, min(said["batch_seconds"], 1)))
        kill()
    write_more()
    batches = [said for said in driver.wait() if said.get("state") == "running"]
    assert batches, "nothing was left to do after the kills"
    of.add_workers()  # for the next test


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_local_cluster_finds_what_is_installed(tmp_path: Path) -> None:
    source, target = f"fmq:{tmp_path}/in", f"log:{tmp_path}/out"
    write_messages(source, range(5_000))
    with programs() as started:
        driver = started.add(
            copying(
                tmp_path / "errors",
                source=source,
                target=target,
                checkpoint=str(tmp_path / "checkpoint"),
                total=5_000,
                per_batch=2_500,
                master="local-cluster[2,1,1024]",
                settings=EXECUTORS,
            )
        )
        driver.wait()
    check_stream(target, range(5_000))
