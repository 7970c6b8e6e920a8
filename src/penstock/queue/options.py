"""Which options do all queues have in common?"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator

from penstock.core.units import parse_duration

__all__ = ["Creation", "Patience"]


class Creation(StrEnum):
    """When a writer makes the queue."""

    #: When there is none (LROSE's READ_WRITE).
    MISSING = "missing"
    #: Always, which empties one that is there (LROSE's CREATE).
    ALWAYS = "always"
    #: Never (LROSE's BLOCKING_READ_WRITE, with `wait`).
    NEVER = "never"


def _patience(value: str | float) -> float:
    """Accept `true` for as long as it takes."""
    seconds = {"true": math.inf, "false": 0.0}.get(str(value))
    return parse_duration(value) if seconds is None else seconds


#: Seconds, or `true` for ever.
Patience: TypeAlias = Annotated[float, BeforeValidator(_patience)]
