"""How is a Spark session made that suits streams?"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PenstockError
from penstock.pipeline import quick_start
from penstock.pipeline.java import find_java

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

__all__ = ["MissingSpark", "is_local", "spark_session"]

#: Without its native library Hadoop forks a process for every checkpoint file on a local disk.
#: These two do not; they are for `file:` checkpoints only, where a rename is atomic.
_LOCAL_CHECKPOINTS: Final = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}

_STATE_STORE: Final = "spark.sql.streaming.stateStore.providerClass"

#: Before Spark has read its settings it would log a page of what is of no interest here.
_QUIET: Final = Path(__file__).with_name("log4j2.properties").as_uri()

#: Spark asks whether a value is null before it takes it from Arrow, and knows how many there are:
#: Arrow need not look at each again. Arrow data from outside is checked in Python, in full.
_JAVA: Final = "-Darrow.enable_null_check_for_get=false -Darrow.enable_unsafe_memory_access=true"

_ALWAYS: Final = {
    "spark.executor.extraJavaOptions": _JAVA,
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # A graph of queries takes turns on the same cores.
    "spark.scheduler.mode": "FAIR",
    # Rows go to Python and back quicker, and small ones are not held up by TCP.
    "spark.python.unix.domain.socket.enabled": "true",
    # Python processes that Java hangs up on end without a traceback.
    "spark.python.daemon.module": "pyspark_penstock.daemon",
}


class MissingSpark(PenstockError):
    """PySpark is not installed."""


def spark_session(
    name: str = "penstock",
    master: str | None = "local[*]",
    checkpoint: str | None = None,
    settings: Mapping[str, str] | None = None,
    python_path: Sequence[str] = (),
) -> SparkSession:
    """Make a session, or return the one that is there.

    Checkpoints on this machine's disk are made cheap; elsewhere Spark's own way stays. `settings`
    win over what is chosen here. With `master=None` it is as the environment says. In the folders
    of `python_path` tasks find modules that are not installed.

    :raises MissingSpark: PySpark is not installed.
    :raises MissingJava: Spark needs a Java that is not there.
    """
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingSpark(
            "PySpark is not installed", hint="pip install 'penstock[spark]'"
        ) from error
    from penstock.pipeline.source import PenstockSource  # noqa: PLC0415 - needs PySpark

    find_java()  # or say now that there is none
    # Tasks must run in the same environment as the driver.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = {
        **_ALWAYS,
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_QUIET} {_JAVA} {quick_start.options()}"
        ),
    }
    if python_path:
        before = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(dict.fromkeys([*python_path, *before.split(os.pathsep)])).strip(":")
        os.environ["PYTHONPATH"] = path  # for what is started on this machine
        chosen["spark.executorEnv.PYTHONPATH"] = path
    if is_local(checkpoint):
        chosen |= _LOCAL_CHECKPOINTS
        if "RocksDB" in dict(settings or {}).get(_STATE_STORE, ""):
            del chosen["spark.hadoop.fs.file.impl"]  # it does not work with that one
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
        if master.startswith("local"):
            chosen["spark.sql.shuffle.partitions"] = str(os.cpu_count() or 2)
    for key, value in (chosen | dict(settings or {})).items():
        builder = builder.config(key, value)
    on_interrupt = signal.getsignal(signal.SIGINT)
    session = builder.getOrCreate()
    if on_interrupt not in {signal.getsignal(signal.SIGINT), signal.default_int_handler}:
        # PySpark has put its own in place, which cancels the batches that are to be finished.
        signal.signal(signal.SIGINT, on_interrupt)
    # PySpark logs a page of JSON for an error that it raises as well.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    # Spark would find it by itself, but not say why it could not load it.
    session.dataSource.register(PenstockSource)
    return session


def is_local(checkpoint: str | None) -> bool:
    """Tell whether checkpoints go to this machine's disk."""
    if checkpoint is None:
        return True
    scheme, separator, _ = checkpoint.partition(":")
    return not separator or scheme == "file" or "/" in scheme
