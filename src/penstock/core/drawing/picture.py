"""Where is everything in the picture of a diagram, and how does matplotlib paint it?

Frames stand from left to right, and so do the boxes in them. An arrow that leads back goes below
the boxes; one to another frame is dashed. Lengths are pixels, with y downwards.
"""

from __future__ import annotations

import itertools
import textwrap
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from penstock.core.drawing.diagram import COLOURS
from penstock.core.drawing.layout import Box, Layout, Size, arrange
from penstock.core.errors import Unsupported
from penstock.core.graph import Graph

if TYPE_CHECKING:
    import os
    from collections.abc import Hashable, Sequence

    from matplotlib.axes import Axes

    from penstock.core.drawing.diagram import Diagram

__all__ = ["Arrow", "Picture", "compose", "draw"]

_Node = TypeVar("_Node", bound="Hashable")
_Point = tuple[float, float]

_MARGIN: Final = 36.0
_PADDING: Final = 22.0
_HEADER: Final = 34.0
_BOX_HEIGHT: Final = 52.0
_NARROWEST: Final = 120.0
_ACROSS: Final = 60.0
_DOWN: Final = 18.0
#: Between two arrows that lead back below the boxes.
_BELOW: Final = 16.0
_NARROWEST_REMARKS: Final = 640.0

_TITLE: Final = 13.5
_DETAIL: Final = 11.0
_LABEL: Final = 10.0
#: Approximate width of a character in the widest common font, relative to its size.
_CHARACTER: Final = 0.66
_INK: Final = "#1f2933"
_FAINT: Final = "#6b7785"
_ARROW: Final = "#8592a0"
_DASHED: Final = "#b45309"
_BADGES: Final = ("#5b3fa0", "#b83280", "#0b7285", "#c05621", "#2c5282", "#57730e", "#9b2c2c")

_DOTS_PER_INCH: Final = 100.0
#: Font size in pixels to points of 1/72 inch.
_POINTS: Final = 72 / _DOTS_PER_INCH
#: Twice the pixels of the SVG, for high-resolution screens.
_SHARPNESS: Final = 2


@dataclass(frozen=True, slots=True)
class Arrow:
    """A path through points: a curve that is level at each of them, or straight segments."""

    points: tuple[_Point, ...]
    is_dashed: bool
    is_straight: bool


@dataclass
class Picture(Generic[_Node]):
    """The places of all parts of a picture."""

    width: float = 0.0
    height: float = 0.0
    boxes: dict[_Node, Box] = field(default_factory=dict)
    frames: list[Box] = field(default_factory=list)
    arrows: dict[tuple[_Node, _Node], Arrow] = field(default_factory=dict)
    #: Position of the heading of the remarks.
    remarks: float = 0.0
    #: The lines of each remark.
    paragraphs: list[list[str]] = field(default_factory=list)


def draw(
    diagram: Diagram[_Node], path: str | os.PathLike[str], kind: Literal["svg", "png"]
) -> None:
    """Draw a diagram to a file; needs matplotlib, the extra `pictures`.

    :raises Unsupported: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context  # noqa: PLC0415 - an extra
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise Unsupported(
            "pictures are painted by matplotlib, which is not installed",
            hint="pip install 'penstock[pictures]', or let others draw it: --mermaid, --dot",
        ) from error
    picture = compose(diagram)
    inches = picture.width / _DOTS_PER_INCH, picture.height / _DOTS_PER_INCH
    figure = Figure(figsize=inches, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    _Painter(axes).paint(diagram, picture)
    metadata: dict[str, Any] = {"Title": diagram.title} | ({"Date": None} if kind == "svg" else {})
    dots = _DOTS_PER_INCH * (_SHARPNESS if kind == "png" else 1)
    # Text stays searchable text; and the file of a diagram is reproducible.
    as_text = rc_context({"svg.fonttype": "none", "svg.hashsalt": "penstock"})
    with warnings.catch_warnings(), as_text:
        warnings.filterwarnings("ignore", "Glyph")  # its font has no Chinese; it paints a box
        figure.savefig(path, format=kind, dpi=dots, metadata=metadata)


def compose(diagram: Diagram[_Node]) -> Picture[_Node]:
    """Place all parts. Boxes do not overlap, and everything is inside the picture."""
    picture: Picture[_Node] = Picture()
    insides = [_inside(diagram, diagram.members(number)) for number in range(len(diagram.frames))]
    outside = _outside(diagram, insides)
    for number, inside in enumerate(insides):
        frame = outside.boxes[number].moved(_MARGIN, _MARGIN)
        x, y = frame.x + _PADDING, frame.y + _HEADER
        picture.frames.append(frame)
        picture.boxes |= {node: box.moved(x, y) for node, box in inside.boxes.items()}
        for edge, gates in inside.gates.items():
            picture.arrows[edge] = _forward(picture, edge, [gate.moved(x, y) for gate in gates])
    lowest = _MARGIN + outside.height
    for edge in diagram.graph.edges():
        if edge in picture.arrows:
            continue
        way = outside.gates.get((diagram.frame_of[edge[0]], diagram.frame_of[edge[1]]))
        if way is not None:
            gates = [gate.moved(_MARGIN, _MARGIN) for gate in way]
            picture.arrows[edge] = _forward(picture, edge, gates, is_dashed=True)
            continue
        lowest += _BELOW
        picture.arrows[edge] = _backward(diagram, picture, edge, lowest)
    headings = [_width(one.title + one.label, _TITLE) + 60 for one in diagram.remarks]
    least = [_NARROWEST_REMARKS] if diagram.remarks else []
    width = max(outside.width, *least, *headings, 0.0)
    picture.width, picture.height = width + 2 * _MARGIN, lowest + _MARGIN
    if diagram.remarks:
        across = int((width - 28) / (_DETAIL * 0.58))
        picture.remarks = lowest + _MARGIN
        picture.paragraphs = [textwrap.wrap(one.text, across) for one in diagram.remarks]
        height = sum(28 + 17 * len(paragraph) for paragraph in picture.paragraphs)
        picture.height = picture.remarks + height + _MARGIN
    return picture


def _inside(diagram: Diagram[_Node], members: Sequence[_Node]) -> Layout[_Node]:
    """Arrange the boxes of a frame; nodes without successors are in the last column."""
    back = diagram.graph.back_edges()
    graph = Graph(
        {
            node: [p for p in diagram.graph.parents(node) if p in members and (p, node) not in back]
            for node in members
        }
    )
    columns = graph.depths()
    last = max(columns.values(), default=0)
    columns |= {
        node: last for node in graph.nodes if graph.parents(node) and not graph.children(node)
    }
    widths: dict[int, float] = {}
    for node in graph.nodes:
        card = diagram.cards[node]
        first = _width(card.title, _TITLE) * 1.08 + 16 + _width(card.label, _LABEL)
        second = _width(card.detail, _DETAIL) + 8 + 20.0 * len(card.badges)
        wanted = max(first, second) + 28
        widths[columns[node]] = max(widths.get(columns[node], _NARROWEST), wanted)
    sizes = {node: Size(widths[columns[node]], _BOX_HEIGHT) for node in graph.nodes}
    return arrange(graph, sizes, columns, across=_ACROSS, down=_DOWN)


def _outside(diagram: Diagram[_Node], insides: Sequence[Layout[_Node]]) -> Layout[int]:
    """Arrange the frames, ignoring backward edges."""
    sizes = {
        number: Size(
            max(inside.width + 2 * _PADDING, _width(f"{frame.title} {frame.remark}", _TITLE) + 60),
            inside.height + _HEADER + _PADDING,
        )
        for number, (frame, inside) in enumerate(zip(diagram.frames, insides, strict=True))
    }
    parents: dict[int, list[int]] = {number: [] for number in sizes}
    for edge in diagram.graph.edges():
        start, end = diagram.frame_of[edge[0]], diagram.frame_of[edge[1]]
        if start != end and end not in Graph(parents).ancestors(start):
            parents[end].append(start)
    graph = Graph(parents)
    return arrange(graph, sizes, graph.depths(), across=_ACROSS + 10, down=26)


def _forward(
    picture: Picture[_Node],
    edge: tuple[_Node, _Node],
    gates: Sequence[Box],
    *,
    is_dashed: bool = False,
) -> Arrow:
    start, end = picture.boxes[edge[0]], picture.boxes[edge[1]]
    points = [(start.right, start.middle)]
    for gate in gates:
        points += [(gate.x, gate.middle), (gate.right, gate.middle)]
    return Arrow((*points, (end.x - 7, end.middle)), is_dashed, is_straight=False)


def _backward(
    diagram: Diagram[_Node], picture: Picture[_Node], edge: tuple[_Node, _Node], lowest: float
) -> Arrow:
    """Route a backward arrow around the boxes: right, below, and back to the left."""
    start, end = picture.boxes[edge[0]], picture.boxes[edge[1]]
    away = 8 + 3 * (len(picture.arrows) % 5)
    right, left = start.right + away, end.x - away
    if diagram.is_between(edge):
        first, second = (picture.frames[diagram.frame_of[node]] for node in edge)
        # Boxes of a column share their left edge, but may end further right.
        right = max(frame.right for frame in picture.frames if frame.x == first.x) + away
        left = second.x - away
    points = (
        (start.right, start.middle),
        (right, start.middle),
        (right, lowest),
        (left, lowest),
        (left, end.middle),
        (end.x - 7, end.middle),
    )
    return Arrow(points, is_dashed=True, is_straight=True)


def _width(text: str, size: float) -> float:
    """Estimate the width of a text. East Asian characters may be twice as wide as others."""
    return sum(1.0 if ord(c) > 0x2E7F else _CHARACTER for c in text) * size  # noqa: PLR2004


class _Painter:
    """Paints on a matplotlib figure, each part above the earlier ones."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._order = itertools.count()

    def paint(self, diagram: Diagram[_Node], picture: Picture[_Node]) -> None:
        for frame, box in zip(diagram.frames, picture.frames, strict=True):
            self._rectangle(box, "#fcfcfd", "#d3d9e0", 10.0)
            self._words((box.x + 14, box.y + 21), frame.title, _TITLE, is_bold=True)
            at = box.right - 14, box.y + 21
            self._words(at, frame.remark, _LABEL, _FAINT, anchor="right")
        for arrow in picture.arrows.values():
            self._arrow(arrow)
        for node, box in picture.boxes.items():
            card = diagram.cards[node]
            fill, border = COLOURS[card.hue]
            self._rectangle(box, fill, border, 7.0)
            self._words((box.x + 12, box.y + 21), card.title, _TITLE, is_bold=True)
            self._words((box.right - 12, box.y + 20), card.label, _LABEL, border, anchor="right")
            self._words((box.x + 12, box.y + 40), card.detail, _DETAIL, _FAINT)
            for place, number in enumerate(reversed(card.badges)):
                self._badge(number, box.right - 18 - 20 * place, box.y + 36)
        self._remarks(diagram, picture)

    def _remarks(self, diagram: Diagram[_Node], picture: Picture[_Node]) -> None:
        y = picture.remarks
        if picture.paragraphs:
            self._words((_MARGIN, y), diagram.heading, _TITLE, is_bold=True)
        for number, lines in enumerate(picture.paragraphs, start=1):
            remark = diagram.remarks[number - 1]
            y += 28
            self._badge(number, _MARGIN + 9, y - 4)
            self._words((_MARGIN + 28, y), remark.title, _TITLE - 1, is_bold=True)
            at = _MARGIN + 44 + _width(remark.title, _TITLE - 1) * 1.08
            self._words((at, y), remark.label, _DETAIL, _FAINT)
            for line in lines:
                y += 17
                self._words((_MARGIN + 28, y), line, _DETAIL)

    def _words(
        self,
        at: _Point,
        text: str,
        size: float,
        colour: str = _INK,
        *,
        is_bold: bool = False,
        anchor: Literal["left", "center", "right"] = "left",
    ) -> None:
        self._axes.text(
            *at,
            text,
            parse_math=False,  # a dollar sign would start a formula
            fontsize=size * _POINTS,
            color=colour,
            weight="bold" if is_bold else "normal",
            ha=anchor,
            va="baseline",
            zorder=next(self._order),
        )

    def _rectangle(self, box: Box, fill: str, border: str, radius: float) -> None:
        from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415 - an extra

        shape = f"round,pad=0,rounding_size={radius}"
        patch = FancyBboxPatch((box.x, box.y), box.width, box.height, boxstyle=shape)
        patch.set(facecolor=fill, edgecolor=border, linewidth=0.72, zorder=next(self._order))
        self._axes.add_patch(patch)

    def _badge(self, number: int, x: float, y: float) -> None:
        colour = _BADGES[(number - 1) % len(_BADGES)]
        self._rectangle(Box(x - 8, y - 8, 16, 16), colour, colour, 8.0)
        self._words((x, y + 3.6), str(number), _LABEL, "#ffffff", is_bold=True, anchor="center")

    def _arrow(self, arrow: Arrow) -> None:
        from matplotlib.patches import PathPatch, Polygon  # noqa: PLC0415 - an extra
        from matplotlib.path import Path  # noqa: PLC0415

        vertices, codes = [arrow.points[0]], [Path.MOVETO]
        for (x0, y0), (x1, y1) in itertools.pairwise(arrow.points):
            middle = (x0 + x1) / 2
            if arrow.is_straight or y0 == y1:
                vertices.append((x1, y1))
                codes.append(Path.LINETO)
            else:
                vertices += [(middle, y0), (middle, y1), (x1, y1)]
                codes += [Path.CURVE4] * 3
        colour = _DASHED if arrow.is_dashed else _ARROW
        line = PathPatch(Path(vertices, codes), fill=False, edgecolor=colour, linewidth=1.15)
        line.set_linestyle((0, (4, 2.6)) if arrow.is_dashed else "solid")
        x, y = arrow.points[-1]
        head = Polygon([(x + 6, y), (x - 3, y - 4.5), (x - 3, y + 4.5)], color=colour, linewidth=0)
        for patch in (line, head):
            patch.set_zorder(next(self._order))
            self._axes.add_patch(patch)
