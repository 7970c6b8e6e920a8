"""Diagrams of directed graphs: as Graphviz and Mermaid text, and as SVG and PNG by matplotlib."""

from penstock.core.drawing.diagram import Card, Diagram, Frame, Remark, to_dot, to_mermaid
from penstock.core.drawing.picture import draw

__all__ = ["Card", "Diagram", "Frame", "Remark", "draw", "to_dot", "to_mermaid"]
