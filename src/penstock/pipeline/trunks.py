"""Up to where is the work for several sinks the same, and can be done once for all of them?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.pipeline.model import Pipeline, Stage

__all__ = ["has_branches", "keeps_state", "stem", "trunk"]

#: Words of SQL for which Spark keeps rows, or sums of them, from one batch to the next.
_STATEFUL_SQL = re.compile(
    r"\b(group\s+by|join|distinct|intersect|except|limit|over\s*\()", re.IGNORECASE
)


def keeps_state(stage: Stage) -> bool:
    """Tell whether a stage remembers rows of earlier batches, by what is said about it.

    A function does not show it: `stateful: true` says so. The runner checks that it is true.
    """
    if stage.stateful is not None:
        return stage.stateful
    return stage.watermark is not None or _STATEFUL_SQL.search(stage.sql or "") is not None


def _counts(stage: Stage) -> bool:
    """Tell whether it leaves rows out and counts them, which Spark tells of streams only."""
    return stage.decode is not None and stage.decode.get("on_error") == "skip"


def stem(pipeline: Pipeline, sink: str) -> list[str]:
    """Return the nodes above a sink that its batches can be taken from, the nearest first.

    Below each of them every row is worked on by itself, so it is the same whether Spark does it as
    a part of the stream or batch by batch.
    """
    node = pipeline.sinks[sink].from_
    if node in pipeline.stages and pipeline.takes_failures(sink):
        # What a stage could not decode is not among the rows that come out of it.
        inputs = pipeline.stages[node].from_
        if len(inputs) > 1:
            return []
        node = inputs[0]
    nodes = [node]
    while node in pipeline.stages:
        stage = pipeline.stages[node]
        if len(stage.from_) > 1 or keeps_state(stage) or _counts(stage):
            break
        node = stage.from_[0]
        nodes.append(node)
    return nodes


def trunk(pipeline: Pipeline, sinks: Iterable[str]) -> str | None:
    """Return the lowest node from which the batches of all these sinks can be taken, if any."""
    stems = [stem(pipeline, sink) for sink in sinks]
    return next((node for node in stems[0] if all(node in other for other in stems)), None)


def has_branches(pipeline: Pipeline, sinks: Iterable[str], root: str) -> bool:
    """Tell whether there is still work to do between a trunk and any of the sinks."""
    return any(
        pipeline.sinks[s].from_ != root or pipeline.sinks[s].kind == "dead_letter" for s in sinks
    )
