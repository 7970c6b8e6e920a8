"""Which pipelines are joined by a stream that one writes and another reads?"""

from __future__ import annotations

import fnmatch
import os
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.graph import Graph
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.model import Pipeline

__all__ = ["Node", "place", "streams_between", "whole_graph"]


class Node(NamedTuple):
    """A source, stage or sink among those of several pipelines."""

    pipeline: str
    name: str

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.name}"


def place(url: str) -> str:
    """Return the same text for all URLs that name the same stream."""
    parsed = URL.parse(url)
    if parsed.host is None:  # on this machine: the options are about how to open it
        return f"{parsed.scheme}:{_absolute(parsed.path)}"
    port = "" if parsed.port is None else f":{parsed.port}"
    options = "&".join(f"{key}={value}" for key, value in sorted(parsed.options.items()))
    return f"{parsed.scheme}://{parsed.host}{port}{parsed.path}?{options}"


def _absolute(path: str) -> str:
    # Not resolve(): what a link leads to may be made only when the pipeline runs.
    return os.path.abspath(path)  # noqa: PTH100


def streams_between(pipelines: Sequence[Pipeline]) -> list[tuple[Node, Node]]:
    """Return each sink and a source that reads its stream, by name or by a pattern."""
    written = [
        (place(sink.stream), Node(pipeline.name, name))
        for pipeline in pipelines
        for name, sink in pipeline.sinks.items()
        if sink.stream is not None
    ]
    return [
        (sink, Node(pipeline.name, name))
        for pipeline in pipelines
        for name, source in pipeline.sources.items()
        for stream, sink in written
        if any(_is_read(stream, place(url)) for url in source.urls)
    ]


def _is_read(stream: str, pattern: str) -> bool:
    return stream == pattern or (
        # A wildcard stands for a part of a name, as in a shell, and not for directories.
        stream.count("/") == pattern.count("/") and fnmatch.fnmatchcase(stream, pattern)
    )


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
