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
        (
            "Traceback (most recent call last):\n"  # noqa: ISC004 - a text of several lines
            '  File "/home/me/beams.py", line 7, in one\n    json.loads(x)\n'
            '  File "/usr/lib/python3.11/json/decoder.py", line 3, in decode\n    raise\n'
            "json.JSONDecodeError: Expecting value\n",
            "json.JSONDecodeError: Expecting value (beams.py, line 7)",
        ),
        (
            "By the Proxy. Return Message: Traceback (most recent call last):\n"  # noqa: ISC004
            '  File "/x/site-packages/py4j/protocol.py", line 3, in f\n    raise\n'
            "py4j.protocol.Py4JJavaError: An error occurred while calling o95.save.\n"
            ": org.apache.spark.SparkException: Job aborted.\n\tat org.a.B.c(B.java:1)\n"
            "Caused by: java.io.IOException: No space left on device\n",
            "IOException: No space left on device",
        ),
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


def test_what_spark_says_about_a_watermark_comes_with_what_to_do() -> None:
    text = "[STREAMING_OUTPUT_MODE] not supported for streaming aggregations without watermark"
    error = QueryFailed.of("q", RuntimeError(text), "mend it")
    assert error.hint == "give the stage a watermark, or its sink mode: update or complete"
    assert QueryFailed.of("q", RuntimeError("another"), "mend it").hint == "mend it"


def test_the_hint_of_an_error_of_ours_comes_with_it() -> None:
    text = OURS.replace("overwritten\n", "overwritten\nhint: make the queue larger\n")
    error = QueryFailed.of("q", RuntimeError(text))
    assert error.hint == "make the queue larger"
    assert error.reason.endswith("overwritten")
