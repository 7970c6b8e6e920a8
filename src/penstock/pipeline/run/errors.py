"""What went wrong, in one line, where Spark says it in a hundred?"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyspark.errors import PySparkException, QueryContextType

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "NotStarted",
    "QueryFailed",
    "Raised",
    "SparkDied",
    "is_outage",
    "place_of",
    "raised_in",
    "reason_of",
    "without_tracebacks",
    "words_of",
]

_TRACEBACK = "Traceback (most recent call last):"
#: A Python traceback with its error, as Spark quotes it: an empty line or Java's own follow.
_QUOTED = re.compile(
    r"Traceback \(most recent call last\):.*?(?=^[ \t]*$|^\tat |^Caused by: |\Z)",
    re.DOTALL | re.MULTILINE,
)
#: The last line of a Python traceback: the error's class and message.
_RAISED = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*): (?P<said>\S.*)")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
#: Files that are not the user's code.
_NOT_THEIRS = re.compile(r"<|.*/(pyspark(\.zip)?|py4j\S*|penstock|site-packages|lib/python3\.\d+)/")
#: Spark's error class and message; details follow below.
_SPARK = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_.]+)\]\s*(?P<said>[^\n]*)")
#: A Java exception, or its cause.
_JAVA = re.compile(
    r"^(?:: |Caused by: )(?:[\w$]+\.)+(?P<type>[\w$]+): (?P<said>\S.*)$", re.MULTILINE
)
#: The position of a parse error in a query.
_POSITION = re.compile(r"\(line (?P<line>\d+), pos (?P<at>\d+)\)")
_WORD = re.compile(r"\w+|\S|$")
_OURS = "penstock."
#: Wrappers of the actual error.
_WRAPPERS = ("pyspark.errors", "py4j.", "org.apache.spark", "java.", "Caused by", "pyspark.sql")
_LONGEST = 1000
#: Python errors that may be temporary.
_OUTAGES = re.compile(
    r"(.*\.)?(ConnectionLost|Unacknowledged|ServerBusy|LockTimeout|WriteTimeout|StorageError"
    r"|Connection\w*Error|BrokenPipeError|TimeoutError|Flight(Unavailable|TimedOut|Cancelled)Error)"
)
#: Java errors that may be temporary, and Spark's messages about dead processes.
_LATER = re.compile(
    r"\b(ConnectException|SocketException|SocketTimeoutException|UnknownHostException"
    r"|NoRouteToHostException|ClosedChannelException|EOFException|ExecutorLostFailure"
    r"|ConnectionRefused\w*|SafeModeException|RetriableException)\b|exited unexpectedly"
    r"|failed to connect back|Broken pipe|Connection reset|No space left on device"
)
#: Spark's messages when the Python process that plans a streaming source has died: as it raises
#: them, and as a query keeps them.
_PLANNER_IS_GONE = re.compile(
    r"(?:\[STREAM_FAILED\] .* terminated with exception: |^)(Broken pipe|Connection reset\S*|null)"
    r"(?= SQLSTATE|\n=== Streaming Query ===)"
)
#: Tasks, or the daemon that starts them, cannot import the package.
_NOT_THERE = re.compile(r"No module named '?(pyspark_)?penstock\b")


class NotStarted(PenstockError):
    """Spark does not start."""

    def __init__(self, master: str, reason: str, hint: str) -> None:
        super().__init__(f"Spark does not start with the master {master}: {reason}", hint=hint)
        self.master = master
        self.reason = reason


class SparkDied(PenstockError):
    """Spark itself has ended: Java, or the server of Spark Connect."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            hint="what was finished is kept; run it again. Killed by SIGKILL, it was most likely "
            "the system, for want of memory: dmesg tells",
        )


class QueryFailed(PenstockError):
    """A query of a pipeline ended by an error."""

    def __init__(self, query: str, reason: str, hint: str | None = None) -> None:
        super().__init__(
            f"{query}: {reason}",
            hint=hint or "what it finished is kept; run it again when the cause is gone",
        )
        self.query = query
        self.reason = reason

    @classmethod
    def of(cls, query: str, error: BaseException, hint: str | None = None) -> QueryFailed:
        """Return Spark's error of a query in short; `hint` is for errors without one."""
        return cls(query, reason_of(error), _hint_of(error) or hint)


def is_outage(error: BaseException) -> bool:
    """Tell whether a query failed because of an outage, so that a restart may help."""
    text = str(error)
    raised = [one for one in raised_in(text) if not one.type.startswith(_WRAPPERS)]
    ours = [one for one in raised if one.type.startswith(_OURS)]
    if raised:
        return _OUTAGES.fullmatch((ours or raised)[-1].type) is not None
    return _LATER.search(text) is not None


def reason_of(error: BaseException) -> str:
    """Return the cause of a Spark error: a Penstock error if there is one, else the innermost."""
    text = str(error)
    if _NOT_THERE.search(text):
        return "the package penstock is not installed where the tasks run"
    raised = [one for one in raised_in(text) if not one.type.startswith(_WRAPPERS)]
    for one in reversed(raised):
        if one.type.startswith(_OURS):
            return one.said[:_LONGEST]
    if raised:
        last = raised[-1]
        return f"{last.type}: {last.said}"[:_LONGEST] + (last.place and f" ({last.place})")
    if (gone := _PLANNER_IS_GONE.search(text)) is not None:
        return f"the Python process that plans the query has died ({gone[1]})"
    spark, java = _SPARK.search(text), list(_JAVA.finditer(text))
    if spark is not None and spark["said"]:
        return spark["said"].partition(" SQLSTATE: ")[0].strip()[:_LONGEST]
    if java:
        return f"{java[-1]['type']}: {java[-1]['said'].strip()}"[:_LONGEST]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_LONGEST]


def place_of(error: BaseException) -> str:
    """Return where in the user's code an error was raised; empty if not there."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((place for f in reversed(frames) if (place := _place(f.filename, f.lineno))), "")


def words_of(error: BaseException, sql: str) -> tuple[str, int] | None:
    """Return the word of a query that Spark rejects, and how many equal ones precede it.

    None: the error has no position.
    """
    at = _index_of(error, sql)
    found = None if at is None else _WORD.match(sql, at)
    return None if found is None else (found[0], sql.count(found[0], 0, found.start()))


def _index_of(error: BaseException, sql: str) -> int | None:
    contexts = error.getQueryContext() if isinstance(error, PySparkException) else []
    for context in contexts:
        if context.contextType() is QueryContextType.SQL:
            return context.startIndex()
    # Parse errors have the line and position in their text.
    said = _POSITION.search(str(error))
    if said is None:
        return None
    lines = sql.split("\n")[: int(said["line"]) - 1]
    return sum(len(line) + 1 for line in lines) + int(said["at"])


def _place(file: str, line: str | int | None) -> str:
    return "" if _NOT_THEIRS.match(file) else f"{Path(file).name}, line {line}"


class Raised(NamedTuple):
    """The error at the end of a Python traceback."""

    type: str
    said: str
    #: The innermost place in the user's code.
    place: str


def raised_in(text: str) -> Iterator[Raised]:
    """Yield the errors at the ends of the tracebacks in a text."""
    is_within, place = False, ""
    for line in text.splitlines():
        if _TRACEBACK in line:
            is_within, place = True, ""
        elif is_within and (frame := _FRAME.match(line)) is not None:
            place = _place(frame["file"], frame["line"]) or place
        elif is_within and line[:1].strip():  # what is not indented ends it
            is_within = False
            if (match := _RAISED.match(line)) is not None:
                yield Raised(match["type"], match["said"].strip(), place)


def without_tracebacks(text: str) -> str:
    """Return what Spark says itself: a text without the Python tracebacks that it quotes."""
    return _QUOTED.sub("", text)


def _hint_of(error: BaseException) -> str | None:
    """Return the hint in the text of a Penstock error, or one for a known Spark error."""
    text = str(error)
    found = re.findall(r"^hint: (\S.*)$", text, re.MULTILINE)
    if found:
        return str(found[-1]).strip()[:_LONGEST]
    if "No module named 'penstock'" in text:
        return "install Penstock in the Python of every node, or set PYTHONPATH for the executors"
    if "without watermark" in text:
        return "give the stage a watermark, or its sink mode: update or complete"
    return None
