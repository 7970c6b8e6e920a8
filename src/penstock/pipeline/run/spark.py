"""How is a Spark session made that suits streams, and that outlives a signal meant for us?"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import PenstockError
from penstock.pipeline.run import java
from penstock.pipeline.run.java import find_java
from penstock.pipeline.source.checkpoint import is_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import SparkSession

__all__ = [
    "CONNECT",
    "ROCKS_DB_FILES",
    "STATE_STORE",
    "MissingSpark",
    "java_ignores",
    "spark_session",
]

#: Without its native library Hadoop forks a process for every checkpoint file on a local disk.
#: These two do not; they are for `file:` checkpoints only, where a rename is atomic.
_LOCAL_CHECKPOINTS: Final = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
}

#: The scheme of a Spark Connect server.
CONNECT: Final = "sc://"

STATE_STORE: Final = "spark.sql.streaming.stateStore.providerClass"

#: RocksDB's state store needs Hadoop's default local file system; and without the second setting
#: Hadoop would reuse its cached instance of the other one.
ROCKS_DB_FILES: Final = {
    "fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}

#: Silences what Spark logs before it has read its settings.
_QUIET: Final = Path(__file__).with_name("log4j2.properties").as_uri()

#: Disables Arrow's null and bounds checks: Spark itself checks for nulls and knows the lengths.
#: Arrow data from outside is fully validated in Python.
_JAVA: Final = "-Darrow.enable_null_check_for_get=false -Darrow.enable_unsafe_memory_access=true"

_ALWAYS: Final = {
    "spark.executor.extraJavaOptions": _JAVA,
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    # Filters on numbers and times reduce what is read.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Queries share the cores fairly.
    "spark.scheduler.mode": "FAIR",
    # Faster than TCP between Java and Python, without delays for small batches.
    "spark.python.unix.domain.socket.enabled": "true",
    # On a busy machine a Python process may take longer to start than Spark's 15 seconds.
    "spark.python.authenticate.socketTimeout": "120s",
    # Python processes end without a traceback when Java closes the connection.
    "spark.python.daemon.module": "pyspark_penstock.daemon",
}


#: Signals that Java ignores if it is started now.
_ignored: set[signal.Signals] = set()


class MissingSpark(PenstockError):
    """PySpark is not installed."""


def spark_session(
    name: str = "penstock",
    master: str | None = "local[*]",
    checkpoint: str | None = None,
    settings: Mapping[str, str] | None = None,
    python_path: Sequence[str] = (),
) -> SparkSession:
    """Create a session, or return the existing one.

    Checkpoints on the local disk use a faster file manager; others use Spark's default. `settings`
    override the ones chosen here. With `master=None` the environment decides. `python_path` has
    folders with modules for tasks. `sc://host:15002` is a Spark Connect server, of which only SQL
    settings can be changed.

    :raises MissingSpark: PySpark is not installed.
    :raises MissingJava: the Java that Spark needs is not installed.
    """
    try:
        from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingSpark(
            "PySpark is not installed", hint="pip install 'penstock[spark]'"
        ) from error
    from penstock.pipeline.source.stream import PenstockSource  # noqa: PLC0415 - needs PySpark

    if master is not None and master.startswith(CONNECT):
        return _remote_session(master, dict(settings or {}))
    find_java()  # or say now that there is none
    # Tasks must run in the same environment as the driver.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _use_prepared_home(master)
    chosen = {
        **_ALWAYS,
        "spark.driver.extraJavaOptions": (
            f"-Dlog4j2.configurationFile={_QUIET} {_JAVA} {java.options()}"
        ),
    }
    if python_path:
        before = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join(dict.fromkeys([*python_path, *before.split(os.pathsep)])).strip(":")
        os.environ["PYTHONPATH"] = path  # for what is started on this machine
        chosen["spark.executorEnv.PYTHONPATH"] = path
    if is_local(checkpoint):
        chosen |= _LOCAL_CHECKPOINTS
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
        # PySpark has installed a handler that would cancel batches in progress.
        signal.signal(signal.SIGINT, on_interrupt)
    _fit_state_store(session, dict(settings or {}))
    _end_quietly(session)
    # PySpark logs a page of JSON for errors that it also raises.
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    logging.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)
    # Spark would find it by itself, but would hide why it cannot load it.
    session.dataSource.register(PenstockSource)
    return session


def _use_prepared_home(master: str | None) -> None:
    """Let the Python processes of this machine start sooner; YARN needs Spark's own home."""
    if master is not None and master.startswith("local") and (home := java.home()) is not None:
        os.environ.setdefault("SPARK_HOME", str(home))


def _fit_state_store(session: SparkSession, settings: Mapping[str, str]) -> None:
    """Give RocksDB the files that it needs; the session may be an earlier one."""
    if "RocksDB" in settings.get(STATE_STORE, ""):
        for key, value in ROCKS_DB_FILES.items():
            session.conf.set(key, value)


def _end_quietly(session: SparkSession) -> None:
    """Keep PySpark's accumulator server from logging when Java closes the connection."""
    server: Any = getattr(session.sparkContext, "_accumulatorServer", None)
    if server is None:
        return
    tell = server.handle_error

    def handle_error(request: object, address: object) -> None:
        if not isinstance(sys.exception(), EOFError | ConnectionError):
            tell(request, address)

    server.handle_error = handle_error


def _remote_session(url: str, settings: Mapping[str, str]) -> SparkSession:
    """Create a session of a Spark Connect server, with these SQL settings."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

    chosen = {key: value for key, value in _ALWAYS.items() if key.startswith("spark.sql.")}
    try:
        # A new session: an existing one keeps the modules that it got first.
        session = SparkSession.builder.remote(url).create()
    except ImportError as error:
        raise MissingSpark(
            "PySpark's client for Connect is not installed",
            hint="pip install 'pyspark[connect]'",
        ) from error
    for key, value in (chosen | dict(settings)).items():
        session.conf.set(key, value)
    return session


@contextmanager
def java_ignores(*signals: signal.Signals) -> Iterator[None]:
    """Let Java ignore these signals if it is started in this context.

    PySpark does that for Ctrl-C. `timeout` and other programs send SIGTERM to the process group,
    and Java would end before the batches in progress are finished. It still ends with this process.
    """
    _ignored.update(signals)
    try:
        yield
    finally:
        _ignored.difference_update(signals)


def _ignore() -> None:
    for one in _ignored:
        signal.signal(one, signal.SIG_IGN)


# Ignored signals stay ignored after exec.
os.register_at_fork(after_in_child=_ignore)
