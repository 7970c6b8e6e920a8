"""Executors in processes of their own: they find the package, die, and every row is there once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from penstock import create
from protocols.flight.serving import ServerProcess, server_process
from support.exactly_once import (
    check_nothing_left,
    check_pipeline,
    check_stream,
    write_messages,
    write_pipeline,
)
from support.spark_cluster import Cluster, cluster
from support.spark_lives import KEPT, Program, alone, copying, programs, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Size(NamedTuple):
    messages: int
    per_batch: int


SIZES = [
    pytest.param(
        Size(20_000, 2_000), id="small", marks=[pytest.mark.full, pytest.mark.timeout(600)]
    ),
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


# --- machines that have nothing in common but the network ----------------------------------------


class Apart(NamedTuple):
    messages: int
    per_batch: int
    kills: tuple[str, ...]


@pytest.mark.skipif(
    subprocess.run([*alone(), "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine gives nobody a file system of his own",
)
@pytest.mark.skipif(
    Path(sys.prefix).is_relative_to(tempfile.gettempdir()),
    reason="Python is in the temporary directory, which workers and driver do not share",
)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(
            Apart(6_000, 1_500, ("server",)),
            id="small",
            marks=[pytest.mark.full, pytest.mark.timeout(400)],
        ),
        pytest.param(
            Apart(200_000, 5_000, ("executor", "server", "worker", "driver") * 2),
            id="full",
            marks=[pytest.mark.full, pytest.mark.timeout(1800)],
        ),
    ],
)
def test_rows_are_there_once_though_nobody_shares_a_folder(tmp_path: Path, size: Apart) -> None:
    """Workers and driver have a temporary directory each; they reach streams by the network."""
    (tmp_path / "root").mkdir()
    (tmp_path / "driver").mkdir()
    with (
        server_process(tmp_path / "root", "--quiet") as server,
        cluster(tmp_path, workers=2, apart=True) as started_cluster,
        programs() as started,
    ):

        def drive() -> Program:
            return started.add(
                copying(
                    tmp_path / "errors",
                    alone(tmp_path / "driver"),
                    source=f"{server.url}in",
                    target=f"{server.url}out?kind=log",
                    checkpoint=f"{KEPT}/checkpoint",
                    total=size.messages,
                    per_batch=size.per_batch,
                    master=started_cluster.url,
                    settings=EXECUTORS,
                )
            )

        portion = -(-size.messages // (len(size.kills) + 1))
        portions = iter(range(0, size.messages, portion))

        def write_more() -> None:
            first = next(portions)
            numbers = range(first, min(first + portion, size.messages))
            write_messages(f"log:{tmp_path}/root/in", numbers)

        write_more()
        driver = drive()
        for what in size.kills:
            said = driver.until(state="running")
            started_cluster.wait_for_executors(2)
            write_more()
            time.sleep(random.uniform(0, min(said["batch_seconds"], 2)))
            kill(what, started_cluster, server, driver)
            if what == "driver":
                driver = drive()
        driver.wait()
        check_stream(f"{server.url}out", range(size.messages))
        server.stop()
    check_nothing_left(tmp_path / "root")


def kill(what: str, of: Cluster, server: ServerProcess, driver: Program) -> None:
    if what == "executor":
        of.kill_executor()
    elif what == "worker":
        of.kill_worker()
        of.add_workers()
    elif what == "server":
        server.kill()
        server.start()
    else:
        driver.kill()


#: Executors find no Penstock, though the driver does.
LACKING = """
import os, sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "penstock":
            raise ModuleNotFoundError("No module named 'penstock'", name="penstock")

if "SPARK_LOG_URL_STDERR" in os.environ:  # as in all that a worker starts
    sys.meta_path.insert(0, Lacking())
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_that_executors_lack_the_package_is_said_in_one_line(tmp_path: Path) -> None:
    write_messages(f"log:{tmp_path}/in", range(100))
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "sitecustomize.py").write_text(LACKING)
    file = tmp_path / "numbers.yaml"
    settings = {**EXECUTORS, "spark.executorEnv.PYTHONPATH": f"{tmp_path}/lacking"}
    pipeline = {
        "pipeline": "numbers",
        "sources": {"numbers": {"url": f"log:{tmp_path}/in"}},
        "sinks": {"out": {"from": "numbers", "url": f"log:{tmp_path}/out"}},
        "settings": {"spark": settings},
    }
    file.write_text(json.dumps(pipeline))  # which is YAML, too
    with programs() as started:
        options = ("--once", "--checkpoint", str(tmp_path / "checkpoints"))
        master = ("--master", "local-cluster[1,1,1024]")
        driver = started.add(running(tmp_path / "errors", file, *options, *master))
        assert driver.process.wait(500) != 0
    said = (tmp_path / "errors").read_text().splitlines()
    pages, line = [line for line in said if line.startswith("penstock: ")]
    assert "Spark's pages are at" in pages
    assert "the package penstock is not installed where the tasks run" in line
    assert "install Penstock in the Python of every node" in line
