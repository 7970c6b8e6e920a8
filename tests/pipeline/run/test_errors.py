from __future__ import annotations

import pytest

from penstock.pipeline.run.errors import QueryFailed, is_outage, reason_of

OURS = """[STREAM_FAILED] Query [id = 4a] terminated with exception: Job aborted. SQLSTATE: XXKST
=== Streaming Query ===
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
ValueError: 3

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "worker.py", line 2, in main
penstock.pipeline.source.loss_reports.DataLoss: fmq:/a: 4 messages lost (seq 3 to 6): overwritten

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


def test_that_executors_lack_the_package_comes_with_what_to_do() -> None:
    text = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'penstock'\n"
    error = QueryFailed.of("q", RuntimeError(text), "mend it")
    assert error.reason == "the package penstock is not installed where the tasks run"
    assert error.hint is not None
    assert error.hint.startswith("install Penstock in the Python of every node")


def test_the_hint_of_an_error_of_ours_comes_with_it() -> None:
    text = OURS.replace("overwritten\n", "overwritten\nhint: make the queue larger\n")
    error = QueryFailed.of("q", RuntimeError(text))
    assert error.hint == "make the queue larger"
    assert error.reason.endswith("overwritten")


_TRACEBACK = """[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted
Traceback (most recent call last):
  File "/home/somebody/stages.py", line 3, in reach
    raise {0}
{0}: it is so
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (_TRACEBACK.format("ConnectionRefusedError"), True),
        (_TRACEBACK.format("penstock.core.errors.ConnectionLost"), True),
        (_TRACEBACK.format("pyarrow._flight.FlightUnavailableError"), True),
        (_TRACEBACK.format("KeyError"), False),
        (_TRACEBACK.format("penstock.core.provenance.AnotherBatch"), False),
        ("Caused by: java.net.ConnectException: Connection refused", True),
        ("Python worker exited unexpectedly (crashed)", True),
        ("[UNRESOLVED_COLUMN] there is no column", False),
    ],
)
def test_an_outage_is_told_from_what_stays_wrong(text: str, expected: bool) -> None:
    assert is_outage(RuntimeError(text)) is expected


@pytest.mark.parametrize(
    "first",
    [
        "[STREAM_FAILED] Query [id = 1] terminated with exception: Broken pipe SQLSTATE: XXKST",
        "Broken pipe",  # by `exception()`
    ],
)
def test_a_planner_that_is_gone_is_said(first: str) -> None:
    said = f"{first}\n=== Streaming Query ===\nIdentifier: [id = 1, runId = 2]"
    assert reason_of(RuntimeError(said)) == (
        "the Python process that plans the query has died (Broken pipe)"
    )


def test_a_package_that_is_missing_is_said() -> None:
    missing = "/usr/bin/python3: ... (ModuleNotFoundError: No module named 'pyspark_penstock')"
    assert reason_of(RuntimeError(missing)) == (
        "the package penstock is not installed where the tasks run"
    )
