"""How does a plan look in a terminal?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text
from rich.tree import Tree

from penstock.core.redaction import as_written
from penstock.pipeline.links import Node, streams_between

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from penstock.pipeline.model import Pipeline
    from penstock.pipeline.plan import Plan

    Streams = Sequence[tuple[Node, Node]]

__all__ = ["render", "to_text"]

_LONGEST = 64
_STYLES = {"source": "bold blue", "stage": "bold", "sink": "bold green"}


def render(plan: Plan) -> RenderableType:
    """Return a tree of each pipeline from its sources to its sinks, and the queries."""
    parts: list[RenderableType] = []
    streams = streams_between(plan.pipelines)
    for pipeline in plan.pipelines:
        parts += [_tree(plan, pipeline, streams), Text()]
    count = len(plan.queries)
    parts.append(Text(f"{count} {'query' if count == 1 else 'queries'}", style="bold"))
    for index, query in enumerate(plan.queries):
        way = [query.sources, query.stages, query.sinks]
        after = f", reads from {', '.join(query.after)}" if query.after else ""
        parts += [
            Text.assemble(
                (f"[{index + 1}] ", "magenta"),
                (query.name, "bold"),
                (f"  {query.kind.replace('_', ' ')}{after}", "magenta"),
            ),
            _indented(" -> ".join(", ".join(names) for names in way if names), "dim"),
            _indented(query.reason),
        ]
    return Group(*parts)


def _indented(text: str, style: str = "") -> Padding:
    return Padding(Text(text, style), (0, 0, 0, 4), expand=False)


def to_text(plan: Plan, width: int = 100) -> str:
    """Return the same as plain text."""
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as capture:
        console.print(render(plan))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _tree(plan: Plan, pipeline: Pipeline, streams: Streams) -> Tree:
    root = Tree(
        Text.assemble(
            (pipeline.name, "bold underline"), (f"  trigger: {pipeline.settings.trigger}", "dim")
        )
    )
    graph = pipeline.graph()
    seen: set[str] = set()
    waiting = [(root, name) for name in reversed(list(pipeline.sources))]
    while waiting:
        above, name = waiting.pop()
        if name in seen:
            above.add(Text.assemble((name, "italic"), ("  (above)", "dim")))
            continue
        seen.add(name)
        branch = above.add(_label(plan, pipeline, name, streams))
        waiting += [(branch, child) for child in reversed(graph.children(name))]
    return root


def _label(plan: Plan, pipeline: Pipeline, name: str, streams: Streams) -> Text:
    node = Node(pipeline.name, name)
    if (source := pipeline.sources.get(name)) is not None:
        role, about = "source", ", ".join(source.urls)
    elif (stage := pipeline.stages.get(name)) is not None:
        role, about = "stage", _cut(stage.describe())
    else:
        sink = pipeline.sinks[name]
        role, about = "sink", sink.describe()
        about += "" if sink.mode == "append" else f", mode {sink.mode}"
    about = as_written(about)
    about = "".join(c if c.isprintable() else "?" for c in about)  # a terminal obeys some of them
    queries = "".join(f" [{plan.queries.index(query) + 1}]" for query in plan.queries_of(node))
    label = Text.assemble(
        (name, _STYLES[role]), (f"  {role}", "dim"), f"  {about}", (queries, "magenta")
    )
    for sink_node, source_node in streams:
        if node == source_node:
            label.append(f"  <- {sink_node}", style="yellow")
        elif node == sink_node:
            label.append(f"  -> {source_node}", style="yellow")
    return label


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
