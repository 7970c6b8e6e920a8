"""Spark's daemon, whose Python processes say nothing when Java hangs up.

`spark_session` lets Spark start this one. PySpark's own prints the traceback of whatever a process
was to say last, between the lines that people read; also of one that has not loaded us yet.
"""

import sys
import traceback
from types import SimpleNamespace

from pyspark import daemon

__all__ = ["main"]


def main() -> None:
    """Run PySpark's daemon."""
    quiet = {**vars(traceback), "print_exc": _print_unless_java_hung_up}
    vars(daemon)["traceback"] = SimpleNamespace(**quiet)
    daemon.manager()


def _print_unless_java_hung_up() -> None:
    error = sys.exception()
    if not isinstance(error, ConnectionError | EOFError):
        traceback.print_exception(error)


if __name__ == "__main__":
    main()
