"""Pictures of graphs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from core.drawing.test_layout import overlap
from penstock.core.drawing import draw, to_dot, to_mermaid
from penstock.core.drawing.picture import compose
from penstock.core.worker_graph import parse_graph
from penstock.workers.graph_diagram import diagram_of, render

GRAPH = parse_graph(
    """
graph: ping-pong
vertices:
  ping: {use: "a:ping", from: table, to: net}
  pong: {use: "a:pong", from: net, to: [table, heard], workers: 3}
  alone: {command: [./x.sh, "<&>"], from: own, to: own}
edges:
  table: {chaos: {drop: 20%}}
  net:
  own: {lb: 3}
  heard: {url: "flight://ann:secret@host:5000/heard"}
"""
)


def text_of() -> str:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(render(GRAPH))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def test_the_text_is_a_tree_in_which_a_circle_ends() -> None:
    assert text_of() == (
        "ping-pong\n"
        "├── table  queue, with faults\n"
        "│   └── ping  function  a:ping\n"
        "│       └── net  queue\n"
        "│           └── pong  function x 3  a:pong\n"
        "│               ├── table  (above)\n"
        "│               └── heard  stream  flight://…@host:5000/heard\n"
        "└── own  3 queues by round robin\n"
        "    └── alone  program  ./x.sh <&>\n"
        "        └── own  (above)"
    )


def test_boxes_lie_apart_within_the_picture_and_circles_are_closed() -> None:
    picture = compose(diagram_of(GRAPH))
    boxes = list(picture.boxes.values())
    assert len(boxes) == 7
    assert not any(overlap(one, other) for i, one in enumerate(boxes) for other in boxes[i + 1 :])
    assert len(picture.arrows) == 7
    assert sum(arrow.is_dashed for arrow in picture.arrows.values()) == 2
    assert all(
        0 <= x <= picture.width and 0 <= y <= picture.height
        for arrow in picture.arrows.values()
        for x, y in arrow.points
    )


def test_it_is_written_as_svg_and_png_and_for_others_to_draw(tmp_path: Path) -> None:
    diagram = diagram_of(GRAPH)
    draw(diagram, tmp_path / "graph.svg", "svg")
    draw(diagram, tmp_path / "graph.png", "png")
    svg = (tmp_path / "graph.svg").read_text()
    assert "./x.sh &lt;&amp;&gt;" in svg
    assert (tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")
    for text in (svg, to_dot(diagram), to_mermaid(diagram)):
        assert "secret" not in text
        assert "ping-pong" in text
