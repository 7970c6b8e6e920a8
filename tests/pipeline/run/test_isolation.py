"""What Spark cannot help is no fault of a row."""

from __future__ import annotations

import pytest

from penstock.pipeline.run.isolation import is_of_a_row, is_of_stage

#: What Spark says when a Python function raises.
TRACEBACK = """Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times:
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/data/stages.py", line 7, in work
    {}
{}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException
Driver stacktrace:"""


@pytest.mark.parametrize(
    "said",
    [
        "[DIVIDE_BY_ZERO] Division by zero. Use `try_divide` to tolerate divisor being 0",
        "Job aborted.\nTraceback (most recent call last):\n  File ...\nValueError: -4 has no root",
        *(
            TRACEBACK.format(source, said)
            for source, said in (
                ("check(order)", "ValueError: order 7 was cancelled"),
                ("check(pump)", "stages.Alarm: pump 3: emergency shutdown"),
                ("check(bin)", "ValueError: No space left in bin 4"),
                ("check(bin)", "stages.BinIOException: bin 4: No space left"),
                ("if order.is_cancelled and shutdown:  # OutOfMemory", "KeyError: 'dbz'"),
                ("run(job)", "ValueError: two lines\nJob 4 cancelled"),
                ("run(job)", "OSError: [Errno 2] No space left on device"),
            )
        ),
        "[USER_RAISED_EXCEPTION] order 7 was cancelled: shut down SQLSTATE: P0001",
    ],
)
def test_what_a_function_or_sql_raises_is_of_a_row(said: str) -> None:
    assert is_of_a_row(RuntimeError(said))


@pytest.mark.parametrize(
    "said",
    [
        "Python worker failed to connect back.",
        "[WRITING_JOB_ABORTED] aborted: ExecutorLostFailure (executor 1 exited)",
        "Python worker exited unexpectedly (crashed)\nTraceback (most recent call last):",
        "[INTERNAL_ERROR] it should not be",
        "Job 3 cancelled because SparkContext was shut down",
        "[SPARK_JOB_CANCELLED] Job 3 cancelled part of cancelled job group 1 SQLSTATE: XXKDA",
        "[WRITING_JOB_ABORTED] aborted: TaskKilled (Stage cancelled: Job 3 ...)",
        "java.io.IOException: No space left on device",
        (
            "[TASK_WRITE_FAILED] Task failed while writing rows.\n"
            "Caused by: java.nio.file.FileSystemException: /tmp/0c: No space left on device"
        ),
        (
            "[CANNOT_WRITE_STATE_STORE.CANNOT_COMMIT] Cannot commit.\nCaused by: "
            "org.rocksdb.RocksDBException: While appending to file: /1.sst: No space left on device"
        ),
        TRACEBACK.format("open(path)", "OSError: [Errno 28] No space left on device: '/tmp/x'"),
        TRACEBACK.format(
            "writer.flush()",
            "penstock.core.errors.StorageError: writing /tmp/x: No space left on device",
        ),
        TRACEBACK.format("f(x)", "ValueError: x") + "\nCaused by: java.lang.OutOfMemoryError: heap",
        "[FAILED_READ_FILE.FILE_NOT_EXIST] Encountered error while reading file /a/table.parquet",
        "something else",
    ],
)
def test_what_spark_lacks_is_not(said: str) -> None:
    assert not is_of_a_row(RuntimeError(said))


_MODULE = "ModuleNotFoundError: No module named 'radar' (stages.py, line 7)"
_FILE = "FileNotFoundError: [Errno 2] No such file or directory: 'sites.csv' (stages.py, line 7)"


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([_MODULE], True),
        ([_MODULE, _MODULE.replace("radar", "rain")], True),
        (["the package penstock is not installed where the tasks run"], True),
        ([_FILE, _FILE], True),
        ([_FILE], False),  # a row may name a file
        ([_FILE, _FILE.replace("sites", "other")], False),
        ([_MODULE, "ValueError: -4 has no root"], False),
        (["ValueError: it is so", "ValueError: it is so"], False),
    ],
)
def test_what_no_row_can_cause_is_the_fault_of_the_stage(
    reasons: list[str], expected: bool
) -> None:
    assert is_of_stage(reasons) is expected
