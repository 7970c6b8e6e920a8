"""Which shapes make up the picture of a plan?"""

from __future__ import annotations

import textwrap
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.core.graph import Graph
from penstock.core.redaction import as_written
from penstock.pipeline.drawing.layout import Box, Layout, Size, arrange
from penstock.pipeline.links import Node, streams_between

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.model import Pipeline
    from penstock.pipeline.plan import Plan, Query

__all__ = ["Line", "Mark", "Picture", "Point", "Rectangle", "Words", "compose", "text_width"]

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box with round corners."""

    box: Box
    fill: str
    stroke: str
    radius: float = 7.0


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text; `at` is the start, middle or end of its baseline."""

    at: Point
    text: str
    size: float
    colour: str
    bold: bool = False
    anchor: Literal["start", "middle", "end"] = "start"


@dataclass(frozen=True, slots=True)
class Line:
    """A curve from left to right through points, level at each of them; or straight pieces."""

    points: tuple[Point, ...]
    colour: str
    dashed: bool = False
    straight: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """The head of an arrow that points to the right, by its tip."""

    tip: Point
    colour: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes, to be drawn in their order, in units of a pixel with y downwards."""

    width: float
    height: float
    shapes: tuple[Rectangle | Words | Line | Mark, ...]
    title: str
    #: Where the sources, stages and sinks are.
    boxes: dict[Node, Box] = field(default_factory=dict)


_MARGIN = 24.0
_PADDING = 22.0
_HEADER = 34.0
_BOX_HEIGHT = 52.0
_NARROWEST = 130.0
_LONGEST_DETAIL = 38
_ACROSS, _DOWN = 64.0, 18.0
_NAME, _DETAIL, _LABEL = 13.5, 11.0, 10.0

_INK, _FAINT, _EDGE, _STREAM = "#1f2933", "#6b7785", "#8592a0", "#b45309"
_COLOURS = {  # fill and border
    "source": ("#e3effb", "#2b6cb0"),
    "stage": ("#f4f5f7", "#6b7785"),
    "sink": ("#e5f4ea", "#2f855a"),
}
_QUERY_COLOURS = ("#5b3fa0", "#b83280", "#0b7285", "#c05621", "#2c5282", "#57730e", "#9b2c2c")


def compose(plan: Plan) -> Picture:
    """Draw pipelines as frames from left to right, and below them the queries."""
    inner = {pipeline.name: _arrange(pipeline, plan) for pipeline in plan.pipelines}
    streams = streams_between(plan.pipelines)
    outer = _arrange_frames(plan, inner, streams)
    shapes: list[Rectangle | Words | Line | Mark] = []
    boxes: dict[Node, Box] = {}
    for pipeline in plan.pipelines:
        frame = outer.boxes[pipeline.name].moved(_MARGIN, _MARGIN)
        x, y = frame.x + _PADDING, frame.y + _HEADER
        layout = inner[pipeline.name]
        boxes |= {Node(pipeline.name, name): box.moved(x, y) for name, box in layout.boxes.items()}
        shapes += _frame(pipeline, frame)
        for (parent, child), gates in layout.gates.items():
            ends = boxes[Node(pipeline.name, parent)], boxes[Node(pipeline.name, child)]
            shapes += _arrow(*ends, [gate.moved(x, y) for gate in gates], _EDGE)
    arrows, lowest = _streams(streams, boxes, outer)
    shapes += arrows
    for node, box in boxes.items():
        shapes += _node(plan, node, box)
    headings = [text_width(query.name + _kind(query), _NAME) + 60 for query in plan.queries]
    width = max(outer.width, 640.0, *headings)
    text, height = _queries(plan, lowest + 34, width)
    return Picture(
        width + 2 * _MARGIN,
        height + _MARGIN,
        (*shapes, *text),
        ", ".join(pipeline.name for pipeline in plan.pipelines),
        boxes,
    )


def _streams(
    streams: Sequence[tuple[Node, Node]], boxes: dict[Node, Box], outer: Layout[str]
) -> tuple[list[Line | Mark], float]:
    """Draw the streams between pipelines, and say how far down that goes."""
    shapes: list[Line | Mark] = []
    lowest, count = _MARGIN + outer.height, 0
    for sink, source in streams:
        way = outer.gates.get((sink.pipeline, source.pipeline))
        if way is not None:
            gates = [gate.moved(_MARGIN, _MARGIN) for gate in way]
            shapes += _arrow(boxes[sink], boxes[source], gates, _STREAM, dashed=True)
            continue
        # Back to the left, below everything. The frames of a column start at the same place.
        lowest += 16
        start = outer.boxes[sink.pipeline].x
        column = max(box.right for box in outer.boxes.values() if box.x == start)
        right = column + _MARGIN + 12 + 5 * (count % 8)
        left = outer.boxes[source.pipeline].x + _MARGIN - 14 + 3 * (count % 4)
        points = (
            (boxes[sink].right, boxes[sink].middle),
            (right, boxes[sink].middle),
            (right, lowest),
            (left, lowest),
            (left, boxes[source].middle),
            (boxes[source].x - 7, boxes[source].middle),
        )
        shapes.append(Line(points, _STREAM, dashed=True, straight=True))
        shapes.append(Mark((boxes[source].x - 1, boxes[source].middle), _STREAM))
        count += 1
    return shapes, lowest


def text_width(text: str, size: float) -> float:
    """Return about how wide a text is, in the widest of the usual fonts."""
    width = 0.0
    for character in text:
        if unicodedata.east_asian_width(character) in "WF":
            width += 1.0
        elif character in "ijl.,:;'|!/() ":
            width += 0.38
        elif character in "mwMW@%":
            width += 0.98
        else:
            width += 0.72 if character.isupper() else 0.64
    return width * size


def _arrange(pipeline: Pipeline, plan: Plan) -> Layout[str]:
    """Put sources into the first column, sinks into the last, stages where they can be."""
    graph = pipeline.graph()
    columns = graph.depths()
    last = max((columns[name] for name in pipeline.sinks), default=1)
    last = max(last, *(columns[name] + 1 for name in pipeline.stages), 1)
    columns |= dict.fromkeys(pipeline.sinks, last)
    widths: dict[int, float] = {}
    for name in graph.nodes:
        title, label, detail = _words(plan, Node(pipeline.name, name))
        badges = 20.0 * len(plan.queries_of(Node(pipeline.name, name)))
        first = text_width(title, _NAME) * 1.08 + 16 + text_width(label, _LABEL)
        second = text_width(detail, _DETAIL) + 8 + badges
        widths[columns[name]] = max(widths.get(columns[name], _NARROWEST), first + 24, second + 24)
    sizes = {name: Size(widths[columns[name]], _BOX_HEIGHT) for name in graph.nodes}
    return arrange(graph, sizes, columns, across=_ACROSS, down=_DOWN)


def _arrange_frames(
    plan: Plan, inner: dict[str, Layout[str]], streams: Sequence[tuple[Node, Node]]
) -> Layout[str]:
    sizes = {
        pipeline.name: Size(
            max(
                inner[pipeline.name].width + 2 * _PADDING,
                text_width(f"{pipeline.name} {_remark(pipeline)}", _NAME) + 60,
            ),
            inner[pipeline.name].height + _HEADER + _PADDING,
        )
        for pipeline in plan.pipelines
    }
    # An edge that would lead back is drawn below the frames: pipelines may read from each other.
    parents: dict[str, list[str]] = {name: [] for name in sizes}
    for sink, source in streams:
        if source.pipeline not in Graph(parents).ancestors(sink.pipeline):
            parents[source.pipeline].append(sink.pipeline)
    graph = Graph(parents)
    return arrange(graph, sizes, graph.depths(), across=_ACROSS + 10, down=26)


def _words(plan: Plan, node: Node) -> tuple[str, str, str]:
    """Return what stands in a box: its name, its kind, and what it is about."""
    pipeline = plan.pipeline(node.pipeline)
    if (source := pipeline.sources.get(node.name)) is not None:
        more = f" + {len(source.urls) - 1} more" if len(source.urls) > 1 else ""
        return node.name, "source", _shortened(source.urls[0]) + more
    if (stage := pipeline.stages.get(node.name)) is not None:
        kind = "sql" if stage.sql else "python" if stage.use else "stage"
        return node.name, kind, _shortened(stage.describe(), at_end=True)
    sink = pipeline.sinks[node.name]
    label = "stream" if sink.kind == "url" else sink.kind.replace("_", " ")
    if sink.mode != "append":
        label += f", {sink.mode}"
    return node.name, label, _shortened(sink.target or "on the screen")


def _shortened(text: str, *, at_end: bool = False) -> str:
    text = "".join(c if c.isprintable() else "�" for c in as_written(text))
    if len(text) <= _LONGEST_DETAIL:
        return text
    if at_end:
        return text[: _LONGEST_DETAIL - 1] + "…"
    return text[:12] + "…" + text[-(_LONGEST_DETAIL - 13) :]


def _remark(pipeline: Pipeline) -> str:
    return f"trigger: {pipeline.settings.trigger}"


def _frame(pipeline: Pipeline, frame: Box) -> list[Rectangle | Words]:
    return [
        Rectangle(frame, "#fcfcfd", "#d3d9e0", 10.0),
        Words((frame.x + 14, frame.y + 21), pipeline.name, _NAME, _INK, bold=True),
        Words((frame.right - 14, frame.y + 21), _remark(pipeline), _LABEL, _FAINT, anchor="end"),
    ]


def _node(plan: Plan, node: Node, box: Box) -> list[Rectangle | Words]:
    pipeline = plan.pipeline(node.pipeline)
    role = (
        "source" if node.name in pipeline.sources
        else "stage" if node.name in pipeline.stages
        else "sink"
    )  # fmt: skip
    fill, border = _COLOURS[role]
    title, label, detail = _words(plan, node)
    shapes: list[Rectangle | Words] = [
        Rectangle(box, fill, border),
        Words((box.x + 12, box.y + 21), title, _NAME, _INK, bold=True),
        Words((box.right - 12, box.y + 20), label, _LABEL, border, anchor="end"),
        Words((box.x + 12, box.y + 40), detail, _DETAIL, _FAINT),
    ]
    right = box.right - 9
    for query in reversed(plan.queries_of(node)):
        shapes += _badge(plan.queries.index(query), right - 9, box.y + 36)
        right -= 20
    return shapes


def _badge(index: int, x: float, y: float) -> list[Rectangle | Words]:
    colour = _QUERY_COLOURS[index % len(_QUERY_COLOURS)]
    return [
        Rectangle(Box(x - 8, y - 8, 16, 16), colour, colour, 8.0),
        Words((x, y + 3.6), str(index + 1), _LABEL, "#ffffff", bold=True, anchor="middle"),
    ]


def _arrow(
    parent: Box, child: Box, gates: Sequence[Box], colour: str, *, dashed: bool = False
) -> list[Line | Mark]:
    points = [(parent.right, parent.middle)]
    for gate in gates:
        points += [(gate.x, gate.middle), (gate.right, gate.middle)]
    points.append((child.x - 7, child.middle))
    return [Line(tuple(points), colour, dashed), Mark((child.x - 1, child.middle), colour)]


def _kind(query: Query) -> str:
    after = f", reads from {', '.join(query.after)}" if query.after else ""
    return query.kind.replace("_", " ") + after


def _queries(plan: Plan, top: float, width: float) -> tuple[list[Rectangle | Words], float]:
    """Write below the frames which queries it becomes, and why."""
    count = len(plan.queries)
    shapes: list[Rectangle | Words] = [
        Words(
            (_MARGIN, top),
            "Spark runs it as one query" if count == 1 else f"Spark runs it as {count} queries",
            _NAME,
            _INK,
            bold=True,
        )
    ]
    y = top + 28
    for index, query in enumerate(plan.queries):
        shapes += _badge(index, _MARGIN + 9, y - 4)
        shapes.append(Words((_MARGIN + 28, y), query.name, _NAME - 1, _INK, bold=True))
        at = _MARGIN + 44 + text_width(query.name, _NAME - 1) * 1.08
        shapes.append(Words((at, y), _kind(query), _DETAIL, _FAINT))
        for line in textwrap.wrap(query.reason, int((width - 28) / (_DETAIL * 0.58))):
            y += 17
            shapes.append(Words((_MARGIN + 28, y), line, _DETAIL, _INK))
        y += 28
    return shapes, y - 20
