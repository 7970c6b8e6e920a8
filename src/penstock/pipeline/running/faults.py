"""What went wrong, in one line, where Spark says it in a hundred?"""

from __future__ import annotations

import re

from penstock.core.errors import PenstockError

__all__ = ["QueryFailed", "reason_of"]

#: How Python ends a traceback: the error's class, and what it says.
_RAISED = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*): (?P<said>\S.*)$", re.MULTILINE)
#: Spark numbers its errors, and says more below the first paragraph.
_SPARK = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_.]+)\]\s*(?P<said>[^\n]*)")
_OURS = "penstock."
#: Wrappers, of which what they wrap is the reason.
_WRAPPERS = ("pyspark.errors", "py4j.", "org.apache.spark", "java.", "Caused by", "pyspark.sql")
_LONGEST = 1000


class QueryFailed(PenstockError):
    """A query of a pipeline ended by an error."""

    def __init__(self, query: str, reason: str) -> None:
        super().__init__(
            f"{query}: {reason}",
            hint="what it finished is kept; run it again when the cause is gone",
        )
        self.query = query
        self.reason = reason


def reason_of(error: BaseException) -> str:
    """Return the cause of an error of Spark: ours if there is one, else the innermost."""
    text = str(error)
    raised = [
        (str(match["type"]), str(match["said"]).strip())
        for match in _RAISED.finditer(text)
        if not match["type"].startswith(_WRAPPERS)
    ]
    for type_, said in reversed(raised):
        if type_.startswith(_OURS):
            return said[:_LONGEST]
    python = [f"{type_}: {said}" for type_, said in raised if "." not in type_]
    if python:
        return python[-1][:_LONGEST]
    spark = _SPARK.search(text)
    if spark is not None and spark["said"]:
        return spark["said"].strip()[:_LONGEST]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_LONGEST]
