"""What all tests share."""

from __future__ import annotations

import gc
import os
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from penstock.pipeline.run import java

if TYPE_CHECKING:
    from pathlib import Path

# Tables are as wide as this, whichever test happens to be the first that loads the command.
os.environ["COLUMNS"] = "200"

# Java that lives for a minute spends much of it on compiling well what it runs for seconds.
os.environ.setdefault(
    "SPARK_SUBMIT_OPTS", f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {java.options()}"
)

# A busy two-core machine is not a slow test.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


#: They take longest, or start Java.
LONG = {
    "test_examples.py",
    "test_graph_run.py",
    "test_run.py",
    "test_shell.py",
    "test_storm_watch.py",
    "test_walks.py",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: the others fit in beside them, and all end together."""
    items.sort(key=lambda item: "spark" not in item.path.parts and item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """Keep modules and tests from the collector, which would look at all of them in every fork."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let processes share the work: a file stays together, and so do all that share Spark."""
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def scope_of(file: str) -> str:
        text = (config.rootpath / file).read_text(encoding="utf-8")
        return "spark" if "spark: SparkSession" in text else file

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid.partition("::")[0])

    return ByFile(config, log)


@pytest.fixture
def queue_path(tmp_path: Path) -> str:
    """A path for a queue that does not exist yet."""
    return str(tmp_path / "queue")


@pytest.fixture
def queue_url(queue_path: str) -> str:
    """The URL of a small classic queue that does not exist yet."""
    return f"fmq:{queue_path}?layout=classic&slots=20&size=8192"
