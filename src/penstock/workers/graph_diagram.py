"""How does a graph of workers look: as a diagram, and in a terminal?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from penstock.core.drawing.diagram import Card, Diagram, Frame, shortened
from penstock.core.redaction import as_written

if TYPE_CHECKING:
    from penstock.core.drawing.diagram import Hue
    from penstock.core.worker_graph import WorkerGraph

__all__ = ["diagram_of", "render"]

_Node = tuple[str, str]


def diagram_of(graph: WorkerGraph) -> Diagram[_Node]:
    """Return a diagram of the vertices and the queues between them."""
    joined = graph.joined()
    cards = {node: _card(graph, node) for node in joined.nodes}
    return Diagram(graph.name, joined, cards, [Frame(graph.name)], dict.fromkeys(joined.nodes, 0))


def _card(graph: WorkerGraph, node: _Node) -> Card:
    kind, name = node
    if kind == "vertex":
        vertex = graph.vertices[name]
        what = "function" if vertex.command is None else "program"
        label = what if vertex.workers == 1 else f"{what} x {vertex.workers}"
        hue: Hue = "blue" if vertex.command is None else "green"
        return Card(name, label, shortened(vertex.describe(), at_end=True), hue)
    edge = graph.edges[name]
    label = "" if edge.chaos is None else "chaos"
    if edge.url is not None:
        return Card(name, label, shortened(edge.url), "amber")
    detail = "queue" if edge.lb is None else f"{edge.lb} queues by {edge.by.replace('_', ' ')}"
    if edge.port:
        detail += f", port {edge.port}"
    return Card(name, label, detail if edge.durable else f"{detail}, in memory", "grey")


def render(graph: WorkerGraph) -> Tree:
    """Return a tree of vertices and edges, starting at the inputs."""
    joined = graph.joined()
    root = Tree(Text(graph.name, "bold underline"))
    seen: set[_Node] = set()
    # What nobody writes to comes first; of a circle, whatever was written first.
    starts = sorted(joined.nodes, key=lambda node: bool(joined.parents(node)))
    for start in starts:
        waiting = [] if start in seen else [(root, start)]
        while waiting:
            above, node = waiting.pop()
            if node in seen:
                above.add(Text.assemble((node[1], "italic"), ("  (above)", "dim")))
                continue
            seen.add(node)
            branch = above.add(_label(graph, node))
            waiting += [(branch, child) for child in reversed(joined.children(node))]
    return root


def _label(graph: WorkerGraph, node: _Node) -> Text:
    card = _card(graph, node)
    if node[0] == "edge":
        about = card.detail if graph.edges[node[1]].url is None else f"stream  {card.detail}"
        about += ", with faults" if card.label else ""
        style = "bold yellow"
    else:
        about, style = f"{card.label}  {card.detail}", "bold blue"
    about = "".join(c if c.isprintable() else "?" for c in as_written(about))
    return Text.assemble((node[1], style), f"  {about}")
