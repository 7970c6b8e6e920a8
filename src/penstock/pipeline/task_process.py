"""What keeps the Python processes that Spark starts quick, and quiet?"""

from __future__ import annotations

import gc
import sys
import traceback
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["BATCH", "QUERY", "RUN", "end_quietly", "settle_in"]

#: What Spark tells its tasks: the name of the query for life, the number of the batch, and the name
#: of the query from its start to its end.
QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
RUN: Final = "spark.jobGroup.id"

_is_settled = False

#: What runs in the process that plans a streaming source, and in all others.
_PLANNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_DAEMON: Final = "pyspark.daemon"
#: Java does not listen any more, or does not speak.
_HUNG_UP: Final = (ConnectionError, EOFError)


def settle_in() -> None:
    """Take what is loaded by now out of the garbage collector's sight. Call it in every task.

    Between two tasks Spark collects garbage, and looks at every object of every module for that:
    longer than a small batch takes. Modules are not garbage; what comes after them is looked at.
    """
    global _is_settled  # noqa: PLW0603 - of this process
    if not _is_settled:  # gc.get_freeze_count() would count them one by one
        gc.freeze()
        _is_settled = True


def end_quietly() -> None:
    """Let this process end without a word when Java hangs up. Called wherever Spark loads us.

    That is more than where it calls us: a process that looks for data sources only loads them.

    Spark closes the connection to a process that it has no use for any more: when a query is
    stopped, a task given up, or all ends. PySpark then prints the traceback of whatever was to be
    said last, between the lines that people read. Errors of ours went to Java long before.
    """
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name == _PLANNER:
        sys.excepthook = _unless_java_hung_up
    elif name == _DAEMON:
        quiet = {**vars(traceback), "print_exc": _print_unless_java_hung_up}
        main.traceback = SimpleNamespace(**quiet)  # type: ignore[attr-defined]


def _unless_java_hung_up(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    if not issubclass(kind, _HUNG_UP):
        sys.__excepthook__(kind, error, where)


def _print_unless_java_hung_up() -> None:
    error = sys.exception()
    if not isinstance(error, _HUNG_UP):
        traceback.print_exception(error)
