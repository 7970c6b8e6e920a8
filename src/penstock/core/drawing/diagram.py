"""What is in a diagram of boxes and arrows, and how is it written for Graphviz and Mermaid?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, TypeVar

from penstock.core.redaction import as_written

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

    from penstock.core.graph import Graph

__all__ = [
    "COLOURS",
    "Card",
    "Diagram",
    "Frame",
    "Hue",
    "Remark",
    "shortened",
    "to_dot",
    "to_mermaid",
]

Hue = Literal["blue", "green", "grey", "amber"]

_Node = TypeVar("_Node", bound="Hashable")

#: Fill and border.
COLOURS: Final[Mapping[Hue, tuple[str, str]]] = {
    "blue": ("#e3effb", "#2b6cb0"),
    "green": ("#e5f4ea", "#2f855a"),
    "grey": ("#f4f5f7", "#6b7785"),
    "amber": ("#fdf3e4", "#b7791f"),
}

_LONGEST_DETAIL: Final = 38


class Card(NamedTuple):
    """The text in the box of a node."""

    title: str
    #: The kind of node, in a word or two.
    label: str
    detail: str
    hue: Hue
    #: Numbers of its remarks.
    badges: tuple[int, ...] = ()


class Frame(NamedTuple):
    """A group of nodes."""

    title: str
    remark: str = ""


class Remark(NamedTuple):
    """A paragraph below the boxes."""

    title: str
    label: str
    text: str


@dataclass(frozen=True)
class Diagram(Generic[_Node]):
    """A directed graph with its boxes, frames and remarks."""

    title: str
    graph: Graph[_Node]
    cards: Mapping[_Node, Card]
    #: In the order of their numbers.
    frames: Sequence[Frame]
    #: The number of the frame that each node is in.
    frame_of: Mapping[_Node, int]
    heading: str = ""
    remarks: Sequence[Remark] = ()

    def members(self, frame: int) -> list[_Node]:
        """Return the nodes of a frame."""
        return [node for node in self.graph.nodes if self.frame_of[node] == frame]

    def is_between(self, edge: tuple[_Node, _Node]) -> bool:
        """Tell whether an edge leads from one frame to another."""
        return self.frame_of[edge[0]] != self.frame_of[edge[1]]


def shortened(text: str, *, at_end: bool = False) -> str:
    """Shorten a text to fit a box: keep both ends, or the start."""
    text = "".join(c if c.isprintable() else "�" for c in as_written(text))
    if len(text) <= _LONGEST_DETAIL:
        return text
    if at_end:
        return text[: _LONGEST_DETAIL - 1] + "…"
    return text[:12] + "…" + text[-(_LONGEST_DETAIL - 13) :]


def to_dot(diagram: Diagram[_Node]) -> str:
    """Return a diagram as text for Graphviz: `dot -Tsvg`."""
    ids = _ids(diagram)
    lines = [f"digraph {_quoted(diagram.title)} {{", "  rankdir=LR; compound=true;"]
    lines.append('  node [shape=box, style="rounded,filled", fontname="Helvetica"];')
    for number, frame in enumerate(diagram.frames):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f"    label={_quoted(_joined(frame.title, frame.remark))};")
        for node in diagram.members(number):
            fill, border = COLOURS[diagram.cards[node].hue]
            label = _quoted("\n".join(_lines(diagram.cards[node])))
            lines.append(f'    {ids[node]} [label={label}, fillcolor="{fill}", color="{border}"];')
        lines.append("  }")
    for edge in diagram.graph.edges():
        style = " [style=dashed]" if diagram.is_between(edge) else ""
        lines.append(f"  {ids[edge[0]]} -> {ids[edge[1]]}{style};")
    return "\n".join([*lines, "}\n"])


def to_mermaid(diagram: Diagram[_Node]) -> str:
    """Return a diagram as text for Mermaid, which pages on GitHub and many wikis draw."""
    ids = _ids(diagram)
    lines = ["flowchart LR"]
    for number, frame in enumerate(diagram.frames):
        lines.append(f"  subgraph frame{number}[{_escaped(_joined(frame.title, frame.remark))}]")
        for node in diagram.members(number):
            card = diagram.cards[node]
            lines.append(f"    {ids[node]}[{_escaped(*_lines(card))}]:::{card.hue}")
        lines.append("  end")
    for edge in diagram.graph.edges():
        arrow = "-.->" if diagram.is_between(edge) else "-->"
        lines.append(f"  {ids[edge[0]]} {arrow} {ids[edge[1]]}")
    for hue, (fill, border) in COLOURS.items():
        lines.append(f"  classDef {hue} fill:{fill},stroke:{border}")
    return "\n".join([*lines, ""])


def _ids(diagram: Diagram[_Node]) -> dict[_Node, str]:
    return {node: f"n{number}" for number, node in enumerate(diagram.graph.nodes)}


def _lines(card: Card) -> Iterator[str]:
    numbers = "".join(f"[{number}]" for number in card.badges)
    yield _joined(card.title, card.label)
    if card.detail or numbers:
        yield " ".join(filter(None, (card.detail, numbers)))


def _joined(title: str, remark: str) -> str:
    return f"{title} ({remark})" if remark else title


def _quoted(text: str) -> str:
    """Quote a text for DOT."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _escaped(*lines: str) -> str:
    """Escape lines of text for Mermaid."""
    entities: dict[str, str | int | None] = {
        "#": "#35;",
        '"': "#quot;",
        "<": "#lt;",
        ">": "#gt;",
        "&": "#amp;",
    }
    return '"' + "<br>".join(line.translate(str.maketrans(entities)) for line in lines) + '"'
