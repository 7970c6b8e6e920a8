"""Which options do all queues have in common?"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, InstanceOf

from penstock.core.stream_id import StreamId
from penstock.core.units import parse_duration

__all__ = ["Creation", "FileMode", "HeldReaders", "OwnStream", "Patience", "Sync", "SyncOption"]


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


def _names(value: object) -> object:
    if not isinstance(value, str):
        return value
    names = tuple(name.strip() for name in value.split(","))
    if not all(names):
        raise ValueError("is a list of names, as in hold=archive,display")
    return names


#: Readers that a writer waits for.
HeldReaders: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_names)]


def _stream(value: object) -> object:
    return StreamId.parse(value) if isinstance(value, str) else value


#: The stream of messages that have none of their own.
OwnStream: TypeAlias = Annotated[InstanceOf[StreamId] | None, BeforeValidator(_stream)]

_MOST_RIGHTS = 0o777


def _mode(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        mode = int(value, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= _MOST_RIGHTS:
        raise ValueError("is a number of chmod, as in mode=0640")
    return mode


#: Who may read and write what is created, as a number of `chmod`; none: its owner alone.
FileMode: TypeAlias = Annotated[int | None, BeforeValidator(_mode)]

#: When messages are brought to the disk: never, after every call, or every so many seconds.
Sync: TypeAlias = Literal["none", "batch"] | float


def _sync(value: object) -> object:
    if value in {"none", "batch"} or not isinstance(value, str | int | float):
        return value
    return parse_duration(value) or "batch"  # no time between is: after every call


SyncOption: TypeAlias = Annotated[Sync, BeforeValidator(_sync)]
