"""How is a picture painted as PNG?"""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

from penstock.core.errors import Unsupported
from penstock.pipeline.drawing.picture import Line, Mark, Rectangle, Words, compose

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

    from penstock.pipeline.drawing.picture import Picture, Point
    from penstock.pipeline.plan import Plan

__all__ = ["write_png"]

#: Twice the pixels of the SVG, for screens that have them.
_SCALE = 2
_DOTS_PER_INCH = 100.0
#: Of a font's size in pixels, in points of 1/72 inch.
_POINTS = 72 / _DOTS_PER_INCH


def write_png(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Draw a plan into a file; needs matplotlib, the extra `pictures`.

    :raises Unsupported: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise Unsupported(
            "a PNG is painted by matplotlib, which is not installed",
            hint="pip install 'penstock[pictures]', or draw an SVG, which needs nothing",
        ) from error
    picture = compose(plan)
    inches = picture.width / _DOTS_PER_INCH, picture.height / _DOTS_PER_INCH
    figure = Figure(figsize=inches, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    _paint(axes, picture)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # its font has no Chinese; it paints a box
        figure.savefig(path, format="png", dpi=_SCALE * _DOTS_PER_INCH)


def _paint(axes: Axes, picture: Picture) -> None:
    from matplotlib import patches  # noqa: PLC0415

    for order, shape in enumerate(picture.shapes):
        patch: Any
        match shape:
            case Words(at, text, size, colour, bold, anchor):
                axes.text(
                    *at,
                    text,
                    parse_math=False,  # a dollar sign would start a formula
                    fontsize=size * _POINTS,
                    color=colour,
                    weight="bold" if bold else "normal",
                    ha={"start": "left", "middle": "center", "end": "right"}[anchor],
                    va="baseline",
                    zorder=order,
                )
                continue
            case Rectangle(box, fill, stroke, radius):
                patch = patches.FancyBboxPatch(
                    (box.x, box.y),
                    box.width,
                    box.height,
                    boxstyle=f"round,pad=0,rounding_size={radius}",
                    facecolor=fill,
                    edgecolor=stroke,
                    linewidth=0.72,
                )
            case Mark((x, y), colour):
                patch = patches.Polygon(
                    [(x, y), (x - 9, y - 4.5), (x - 9, y + 4.5)], color=colour, linewidth=0
                )
            case Line(points, colour, dashed, straight):
                patch = patches.PathPatch(
                    _path(points, straight=straight),
                    fill=False,
                    edgecolor=colour,
                    linewidth=1.15,
                    linestyle=(0, (4, 2.6)) if dashed else "solid",
                )
        patch.set_zorder(order)
        axes.add_patch(patch)


def _path(points: tuple[Point, ...], *, straight: bool) -> Any:
    from matplotlib.path import Path  # noqa: PLC0415

    vertices, codes = [points[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (x0 + x1) / 2
        if straight or y0 == y1:
            vertices.append((x1, y1))
            codes.append(Path.LINETO)
        else:
            vertices += [(middle, y0), (middle, y1), (x1, y1)]
            codes += [Path.CURVE4] * 3
    return Path(vertices, codes)
