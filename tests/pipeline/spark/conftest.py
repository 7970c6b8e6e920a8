"""What all tests with a real Spark share: one session, since starting one takes ten seconds."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.pipeline.run.spark import spark_session
from support.spark_pipelines import STAGES, stages, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession


TESTS = Path(__file__).parents[2]
#: Endpoints installed as anybody's would be: one cannot be read again, the other appends once.
INSTALLED = [str(TESTS / "support" / name) for name in ("live", "third_party")]
# Before Java starts: the processes that it starts for Python have its environment.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (*INSTALLED, str(TESTS), os.environ.get("PYTHONPATH")))
)
sys.path += INSTALLED


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session of the whole run: `local[2]`, without a page, two shuffle partitions."""
    session = spark_session(
        "penstock-tests",
        "local[2]",
        settings={"spark.sql.shuffle.partitions": "2", "spark.driver.host": "127.0.0.1"},
    )
    yield session
    session.stop()


@pytest.fixture
def settings_restored(spark: SparkSession) -> Iterator[None]:
    """What the test sets in the session of all tests ends with it."""
    before = dict(spark.conf.getAll)
    yield
    for name in dict(spark.conf.getAll).keys() - before.keys():
        spark.conf.unset(name)
    for name, value in before.items():
        if spark.conf.get(name, None) != value:
            spark.conf.set(name, value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own with stages in it, and a queue of 100 messages."""
    name = stages(tmp_path)
    (tmp_path / f"{name}.py").write_text(STAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, 0, 100)
    yield tmp_path
    sys.modules.pop(name, None)
