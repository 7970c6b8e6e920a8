"""How is a picture written as SVG?"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from penstock.pipeline.drawing.picture import Line, Mark, Rectangle, Words, compose

if TYPE_CHECKING:
    from penstock.pipeline.drawing.picture import Point
    from penstock.pipeline.plan import Plan

__all__ = ["to_svg"]

#: The first three are about as wide as each other; the boxes leave room for the last.
_FONTS = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"


def to_svg(plan: Plan) -> str:
    """Draw a plan as an SVG document that needs nothing else."""
    picture = compose(plan)
    width, height = _number(picture.width), _number(picture.height)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
            f'viewBox="0 0 {width} {height}" font-family={quoteattr(_FONTS)}>',
            f"<title>{escape(picture.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *(_shape(shape) for shape in picture.shapes),
            "</svg>\n",
        ]
    )


def _shape(shape: Rectangle | Words | Line | Mark) -> str:
    match shape:
        case Rectangle(box, fill, stroke, radius):
            x, y, width, height = map(_number, box)
            return (
                f'<rect x="{x}" y="{y}" width="{width}" height="{height}" '
                f'rx="{_number(radius)}" fill="{fill}" stroke="{stroke}"/>'
            )
        case Words(at, text, size, colour, bold, anchor):
            weight = ' font-weight="bold"' if bold else ""
            return (
                f'<text x="{_number(at[0])}" y="{_number(at[1])}" font-size="{_number(size)}" '
                f'fill="{colour}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
            )
        case Line(points, colour, dashed, straight):
            dash = ' stroke-dasharray="6 4"' if dashed else ""
            return (
                f'<path d="{_path(points, straight=straight)}" fill="none" stroke="{colour}" '
                f'stroke-width="1.6" stroke-linejoin="round"{dash}/>'
            )
        case Mark((x, y), colour):
            corners = " ".join(f"{_number(a)},{_number(b)}" for a, b in _head(x, y))
            return f'<polygon points="{corners}" fill="{colour}"/>'


def _head(x: float, y: float) -> list[Point]:
    return [(x, y), (x - 9, y - 4.5), (x - 9, y + 4.5)]


def _path(points: tuple[Point, ...], *, straight: bool) -> str:
    path = f"M{_pair(points[0])}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (x0 + x1) / 2
        if straight or y0 == y1:
            path += f" L{_pair((x1, y1))}"
        else:
            path += f" C{_pair((middle, y0))} {_pair((middle, y1))} {_pair((x1, y1))}"
    return path


def _pair(point: Point) -> str:
    return f"{_number(point[0])},{_number(point[1])}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
