"""What all tests share."""

from __future__ import annotations

import gc
import os
import signal
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from penstock.pipeline.run import java

if TYPE_CHECKING:
    from pathlib import Path

# A shell lets what it starts in the background ignore Ctrl-C, and programs started here inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
    """Begin with the longest: the others fit in beside them, and all end together."""

    def rank(item: pytest.Item) -> int:
        if "spark" in item.path.parts or item.path.name in LONG:
            return 0
        return 1 if item.get_closest_marker("full") else 2

    items.sort(key=rank)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have each failure named at once: a whole run at full size takes more than an hour."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(FailuresAtOnce(terminal))


class FailuresAtOnce:
    """Prints the name and the last line of each failure as it comes."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            last = (report.longreprtext.strip().splitlines() or [""])[-1]
            self._terminal.ensure_newline()
            took = f"{report.duration:.0f} s"
            self._terminal.write_line(f"failed after {took}: {report.nodeid}: {last}")


def pytest_collection_finish() -> None:
    """Keep modules and tests from the collector, which would look at all of them in every fork."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let processes share the work: a file stays together, and so do all that share Spark.

    At full size a file may take an hour, and its tests are handed out one by one.
    """
    from xdist.scheduler import LoadScopeScheduling

    in_full = config.getoption("markexpr") != "not full"

    @cache
    def text_of(file: str) -> str:
        return (config.rootpath / file).read_text(encoding="utf-8")

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if "spark: SparkSession" in text_of(file):
                return "spark"
            return nodeid if in_full and "mark.full" in text_of(file) else file

    return ByFile(config, log)


def pytest_runtest_setup() -> None:
    """Let Ctrl-C interrupt each test: PySpark's handler, which stays, would ask an ended Java."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def queue_path(tmp_path: Path) -> str:
    """A path for a queue that does not exist yet."""
    return str(tmp_path / "queue")


@pytest.fixture
def queue_url(queue_path: str) -> str:
    """The URL of a small classic queue that does not exist yet."""
    return f"fmq:{queue_path}?layout=classic&slots=20&size=8192"
