from __future__ import annotations

import pytest

from penstock.pipeline.running.faults import QueryFailed, reason_of

OURS = """[STREAM_FAILED] Query [id = 4a] terminated with exception: Job aborted. SQLSTATE: XXKST
=== Streaming Query ===
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
ValueError: 3

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "worker.py", line 2, in main
penstock.pipeline.losses.DataLoss: fmq:/a: 4 messages lost (seq 3 to 6): overwritten

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)
Caused by: java.lang.RuntimeException: no
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OURS, "fmq:/a: 4 messages lost (seq 3 to 6): overwritten"),
        (
            "id: [a = 3]\nTraceback (most recent call last):\n  in f\nKeyError: 'dbz'\n\nat java",
            "KeyError: 'dbz'",
        ),
        (
            "[UNRESOLVED_COLUMN] A column `a` cannot be resolved. SQLSTATE: 42703; line 1;\n'P",
            "A column `a` cannot be resolved.",
        ),
        ("\n  first line\nsecond", "first line"),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_is_one_line_and_ours_if_there_is_one(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason


def test_a_reason_is_never_a_page() -> None:
    assert len(reason_of(RuntimeError("x" * 100_000))) <= 1000


def test_a_query_that_failed_says_which_and_what_next() -> None:
    error = QueryFailed("storm-watch-alerts", "no space")
    assert str(error) == "storm-watch-alerts: no space"
    assert error.hint is not None
    assert "run it again" in error.hint


def test_the_hint_of_an_error_of_ours_comes_with_it() -> None:
    text = OURS.replace("overwritten\n", "overwritten\nhint: make the queue larger\n")
    error = QueryFailed.of("q", RuntimeError(text))
    assert error.hint == "make the queue larger"
    assert error.reason.endswith("overwritten")
