"""What is a worker's job: its sources, its targets, and its function or program?"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pydantic import BaseModel

__all__ = ["JOB", "UNFIT", "Job", "Source", "Target"]

#: The environment variable of the job.
JOB: Final = "PENSTOCK_JOB"
#: Exit status of a worker that cannot begin, however often it is started: it has no function.
UNFIT: Final = 78


class Source(NamedTuple):
    """Where a worker takes messages from."""

    edge: str
    url: str
    options: dict[str, Any]


class Target(NamedTuple):
    """Where a worker appends messages to."""

    edge: str
    url: str
    #: Others write there too, and only one can at a time: it is let go after each batch.
    is_shared: bool


class Job(BaseModel):
    """What one worker has to do."""

    graph: str
    vertex: str
    #: Which of the vertex's workers it is.
    number: int
    sources: list[Source]
    targets: list[Target]
    use: str | None
    options: dict[str, Any]
    command: tuple[str, ...] | None
    environment: dict[str, str]
    #: Folders where functions are looked for first.
    path: list[str]
    batch: int
    grace: float
    counters: str
