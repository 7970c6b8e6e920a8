"""Which pipelines are joined by a stream that one writes and another reads?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.core.endpoints import is_named_by
from penstock.core.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.model import Pipeline

__all__ = ["Node", "streams_between", "whole_graph"]


class Node(NamedTuple):
    """A source, stage or sink among those of several pipelines."""

    pipeline: str
    name: str

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.name}"


def streams_between(pipelines: Sequence[Pipeline]) -> list[tuple[Node, Node]]:
    """Return each sink and a source that reads its stream, by name or by a pattern."""
    written = [
        (sink.stream, Node(pipeline.name, name))
        for pipeline in pipelines
        for name, sink in pipeline.sinks.items()
        if sink.stream is not None
    ]
    return [
        (sink, Node(pipeline.name, name))
        for pipeline in pipelines
        for name, source in pipeline.sources.items()
        for stream, sink in written
        if any(is_named_by(stream, url) for url in source.urls)
    ]


def whole_graph(pipelines: Sequence[Pipeline]) -> Graph[Node]:
    """Return the graph of all pipelines together, joined by their streams."""
    parents: dict[Node, list[Node]] = {
        Node(pipeline.name, name): [Node(pipeline.name, parent) for parent in above]
        for pipeline in pipelines
        for name, above in pipeline.inputs().items()
    }
    for sink, source in streams_between(pipelines):
        parents[source].append(sink)
    return Graph(parents)
