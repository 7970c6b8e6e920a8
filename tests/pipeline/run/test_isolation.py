"""What Spark cannot help is no fault of a row."""

from __future__ import annotations

import pytest

from penstock.pipeline.run.isolation import is_of_a_row, is_of_stage


@pytest.mark.parametrize(
    "said",
    [
        "[DIVIDE_BY_ZERO] Division by zero. Use `try_divide` to tolerate divisor being 0",
        "Job aborted.\nTraceback (most recent call last):\n  File ...\nValueError: -4 has no root",
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
        "java.io.IOException: No space left on device",
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
