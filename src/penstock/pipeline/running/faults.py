"""What went wrong, in one line, where Spark says it in a hundred?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["QueryFailed", "reason_of"]

_TRACEBACK = "Traceback (most recent call last):"
#: How Python ends a traceback: the error's class, and what it says.
_RAISED = re.compile(r"(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*): (?P<said>\S.*)")
#: Spark numbers its errors, and says more below the first paragraph.
_SPARK = re.compile(r"\[(?P<name>[A-Z][A-Z0-9_.]+)\]\s*(?P<said>[^\n]*)")
_OURS = "penstock."
#: Wrappers, of which what they wrap is the reason.
_WRAPPERS = ("pyspark.errors", "py4j.", "org.apache.spark", "java.", "Caused by", "pyspark.sql")
_LONGEST = 1000


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
    def of(cls, query: str, error: BaseException) -> QueryFailed:
        """Return what Spark says of a query, in our words."""
        return cls(query, reason_of(error), _hint_of(error))


def reason_of(error: BaseException) -> str:
    """Return the cause of an error of Spark: ours if there is one, else the innermost."""
    text = str(error)
    raised = [one for one in _raised(text) if not one[0].startswith(_WRAPPERS)]
    for type_, said in reversed(raised):
        if type_.startswith(_OURS):
            return said[:_LONGEST]
    if raised:
        return ": ".join(raised[-1])[:_LONGEST]
    spark = _SPARK.search(text)
    if spark is not None and spark["said"]:
        return spark["said"].partition(" SQLSTATE: ")[0].strip()[:_LONGEST]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_LONGEST]


def _raised(text: str) -> Iterator[tuple[str, str]]:
    """Yield the errors at the ends of the tracebacks in a text."""
    is_within = False
    for line in text.splitlines():
        if _TRACEBACK in line:
            is_within = True
        elif is_within and line[:1].strip():  # what is not indented ends it
            is_within = False
            if (match := _RAISED.match(line)) is not None:
                yield str(match["type"]), str(match["said"]).strip()


def _hint_of(error: BaseException) -> str | None:
    """Return the hint of an error of ours, which is told below it."""
    found = re.findall(r"^hint: (\S.*)$", str(error), re.MULTILINE)
    return found[-1].strip()[:_LONGEST] if found else None
