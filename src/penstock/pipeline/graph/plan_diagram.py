"""How does a plan look: in a terminal, and as a diagram?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text
from rich.tree import Tree

from penstock.core.drawing.diagram import Card, Diagram, Frame, Remark, shortened
from penstock.core.redaction import as_written
from penstock.pipeline.graph.model import Node, streams_between, whole_graph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from penstock.pipeline.graph.model import Pipeline
    from penstock.pipeline.graph.plan import Plan, Query

    Streams = Sequence[tuple[Node, Node]]

__all__ = ["diagram_of", "render", "to_text"]

_LONGEST: Final = 64
_STYLES: Final = {"source": "bold blue", "stage": "bold", "sink": "bold green"}


def diagram_of(plan: Plan) -> Diagram[Node]:
    """Return a diagram with a frame per pipeline, and the queries below."""
    graph = whole_graph(plan.pipelines)
    frames = {pipeline.name: number for number, pipeline in enumerate(plan.pipelines)}
    count = len(plan.queries)
    return Diagram(
        ", ".join(frames),
        graph,
        {node: _card(plan, node) for node in graph.nodes},
        [Frame(p.name, f"trigger: {p.settings.trigger}") for p in plan.pipelines],
        {node: frames[node.pipeline] for node in graph.nodes},
        "Spark runs it as one query" if count == 1 else f"Spark runs it as {count} queries",
        [Remark(query.name, _kind(query), query.reason) for query in plan.queries],
    )


def _card(plan: Plan, node: Node) -> Card:
    pipeline = plan.pipeline(node.pipeline)
    badges = tuple(plan.queries.index(query) + 1 for query in plan.queries_of(node))
    if (source := pipeline.sources.get(node.name)) is not None:
        more = f" + {len(source.urls) - 1} more" if len(source.urls) > 1 else ""
        about = source.urls[0] if source.urls else source.describe()
        label = "table" if source.static else "source"
        return Card(node.name, label, shortened(about) + more, "blue", badges)
    if (stage := pipeline.stages.get(node.name)) is not None:
        kind = "sql" if stage.sql else "python" if stage.use else "stage"
        return Card(node.name, kind, shortened(stage.describe(), at_end=True), "grey", badges)
    sink = pipeline.sinks[node.name]
    label = "stream" if sink.kind == "url" else sink.kind.replace("_", " ")
    if sink.mode != "append":
        label += f", {sink.mode}"
    about = sink.describe() if sink.kind == "format" else sink.target or "on the screen"
    return Card(node.name, label, shortened(about), "green", badges)


def _kind(query: Query) -> str:
    after = f", reads from {', '.join(query.after)}" if query.after else ""
    return query.kind.replace("_", " ") + after


def render(plan: Plan) -> RenderableType:
    """Return each pipeline as a tree from sources to sinks, and the queries."""
    parts: list[RenderableType] = []
    streams = streams_between(plan.pipelines)
    for pipeline in plan.pipelines:
        parts += [_tree(plan, pipeline, streams), Text()]
    count = len(plan.queries)
    parts.append(Text(f"{count} {'query' if count == 1 else 'queries'}", style="bold"))
    for index, query in enumerate(plan.queries):
        way = [query.sources, query.stages, query.sinks]
        parts += [
            Text.assemble(
                (f"[{index + 1}] ", "magenta"),
                (query.name, "bold"),
                (f"  {_kind(query)}", "magenta"),
            ),
            _indented(" -> ".join(", ".join(names) for names in way if names), "dim"),
            _indented(query.reason),
        ]
    return Group(*parts)


def _indented(text: str, style: str = "") -> Padding:
    return Padding(Text(text, style), (0, 0, 0, 4), expand=False)


def to_text(plan: Plan, width: int = 100) -> str:
    """Return what `render` draws, as plain text."""
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
        role, about = "source", source.describe()
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
