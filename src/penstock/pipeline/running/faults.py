"""What went wrong, in one line, where Spark says it in a hundred?"""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NotStarted", "QueryFailed", "place_of", "reason_of"]

_TRACEBACK = "Traceback (most recent call last):"
#: How Python ends a traceback: the error's class, and what it says.
_RAISED = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*): (?P<said>\S.*)")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
#: Files in which nobody who runs a pipeline looks for a mistake of their own.
_NOT_THEIRS = re.compile(r"<|.*/(pyspark(\.zip)?|py4j\S*|penstock|site-packages|lib/python3\.\d+)/")
#: Spark numbers its errors, and says more below the first paragraph.
_SPARK = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_.]+)\]\s*(?P<said>[^\n]*)")
#: How Java tells of an error, and of the one that caused it.
_JAVA = re.compile(
    r"^(?:: |Caused by: )(?:[\w$]+\.)+(?P<type>[\w$]+): (?P<said>\S.*)$", re.MULTILINE
)
_OURS = "penstock."
#: Wrappers, of which what they wrap is the reason.
_WRAPPERS = ("pyspark.errors", "py4j.", "org.apache.spark", "java.", "Caused by", "pyspark.sql")
_LONGEST = 1000


class NotStarted(PenstockError):
    """Spark does not start."""

    def __init__(self, master: str, reason: str, hint: str) -> None:
        super().__init__(f"Spark does not start with the master {master}: {reason}", hint=hint)
        self.master = master
        self.reason = reason


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
        """Return what Spark says of a query, in our words; `hint`: if the error has none."""
        return cls(query, reason_of(error), _hint_of(error) or hint)


def reason_of(error: BaseException) -> str:
    """Return the cause of an error of Spark: ours if there is one, else the innermost."""
    text = str(error)
    raised = [one for one in _raised(text) if not one.type.startswith(_WRAPPERS)]
    for one in reversed(raised):
        if one.type.startswith(_OURS):
            return one.said[:_LONGEST]
    if raised:
        last = raised[-1]
        return f"{last.type}: {last.said}"[:_LONGEST] + (last.place and f" ({last.place})")
    spark, java = _SPARK.search(text), list(_JAVA.finditer(text))
    if spark is not None and spark["said"]:
        return spark["said"].partition(" SQLSTATE: ")[0].strip()[:_LONGEST]
    if java:
        return f"{java[-1]['type']}: {java[-1]['said'].strip()}"[:_LONGEST]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_LONGEST]


def place_of(error: BaseException) -> str:
    """Return where in somebody's own code an error was raised; nothing if it was not there."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((place for f in reversed(frames) if (place := _place(f.filename, f.lineno))), "")


def _place(file: str, line: str | int | None) -> str:
    return "" if _NOT_THEIRS.match(file) else f"{Path(file).name}, line {line}"


class _Raised(NamedTuple):
    type: str
    said: str
    #: The last place on the way there that is in nobody's library.
    place: str


def _raised(text: str) -> Iterator[_Raised]:
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
                yield _Raised(match["type"], match["said"].strip(), place)


def _hint_of(error: BaseException) -> str | None:
    """Return the hint of an error of ours, which is told below it, or ours for one of Spark's."""
    text = str(error)
    found = re.findall(r"^hint: (\S.*)$", text, re.MULTILINE)
    if found:
        return str(found[-1]).strip()[:_LONGEST]
    if "without watermark" in text:
        return "give the stage a watermark, or its sink mode: update or complete"
    return None
