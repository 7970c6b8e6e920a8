"""What do the processes of a Spark job share: task properties, files, and a quiet exit?"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

from penstock.core.errors import PenstockError, Unsupported
from penstock.queue.storage import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = [
    "BATCH",
    "QUERY",
    "RUN",
    "end_quietly",
    "explained",
    "freeze_modules",
    "private_folder",
]

#: Properties of Spark's tasks: the id of the query, the id of the batch, and the id of the run.
QUERY: Final = "sql.streaming.queryId"
BATCH: Final = "streaming.sql.batchId"
RUN: Final = "spark.jobGroup.id"

_are_frozen = False

#: Main module of the process that plans a streaming source, and of all others.
_PLANNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"
_DAEMON: Final = "pyspark.daemon"
#: Errors after Java has closed the connection.
_HUNG_UP: Final = (ConnectionError, EOFError)


def freeze_modules() -> None:
    """Exclude the loaded modules from garbage collection. Call it in every task.

    Spark collects garbage between two tasks, which scans every object of every module and takes
    longer than a small batch. Modules are not garbage; later objects are still collected.
    """
    global _are_frozen  # noqa: PLW0603 - of this process
    if not _are_frozen:  # gc.get_freeze_count() would count them one by one
        gc.freeze()
        _are_frozen = True


def end_quietly() -> None:
    """Let this process exit without a traceback when Java closes the connection.

    Called wherever Spark imports this package, which includes processes that only look up data
    sources.

    Spark closes the connection to a process that it does not need any more: when a query is
    stopped, a task cancelled, or the session ends. PySpark would then print the traceback of its
    last write into the user's output. Real errors have reached Java before.
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


@contextmanager
def explained() -> Iterator[None]:
    """Add an error's hint to its notes.

    Spark passes a Python error on as the text of its traceback, which has the message and the
    notes but no fields. Works as a decorator too, but not for generators.
    """
    try:
        yield
    except PenstockError as error:
        note = f"hint: {error.hint}"
        if error.hint and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


def private_folder(name: str) -> Path:
    """Return a folder of this user in the temporary directory.

    :raises Unsupported: the path belongs to another user, or is a link.
    """
    folder = Path(tempfile.gettempdir()) / f"penstock-{name}-{os.getuid()}"
    with storage_errors("making", str(folder)):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise Unsupported(
                f"{folder} belongs to somebody else", hint="set TMPDIR to a directory of your own"
            )
    return folder
