"""How does a plan look: as text, as SVG, as PNG?"""

from penstock.pipeline.drawing.png import write_png
from penstock.pipeline.drawing.svg import to_svg
from penstock.pipeline.drawing.text import to_text

__all__ = ["to_svg", "to_text", "write_png"]
