"""Where do the boxes of a directed graph go, so that it reads from left to right?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from penstock.core.graph import Graph

__all__ = ["Box", "Layout", "Size", "arrange"]

_Node = TypeVar("_Node", bound="Hashable")

_SWEEPS = 8


class Size(NamedTuple):
    """The size of a box."""

    width: float
    height: float


class Box(NamedTuple):
    """A rectangle, by its left upper corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def middle(self) -> float:
        return self.y + self.height / 2

    def moved(self, x: float, y: float) -> Box:
        return Box(self.x + x, self.y + y, self.width, self.height)


@dataclass(frozen=True)
class Layout(Generic[_Node]):
    """The places of all boxes and edges, from (0, 0)."""

    boxes: dict[_Node, Box]
    #: By edge: the points to pass through in the columns between its ends.
    gates: dict[tuple[_Node, _Node], list[Box]]
    width: float
    height: float


class _Item(Generic[_Node]):
    """An item of a column: a node, or the point where an edge passes."""

    def __init__(self, column: int, height: float, node: _Node | None) -> None:
        self.column = column
        self.height = height
        self.node = node
        self.left: list[_Item[_Node]] = []
        self.right: list[_Item[_Node]] = []
        self.middle = 0.0


def arrange(
    graph: Graph[_Node],
    sizes: Mapping[_Node, Size],
    columns: Mapping[_Node, int],
    *,
    across: float,
    down: float,
) -> Layout[_Node]:
    """Place the nodes in their columns, with few crossings, by a few sweeps.

    Every edge must lead to a column further right. Connected nodes stay together. `across` and
    `down` are the space between columns, and between boxes in a column.
    """
    widths = [0.0] * (max(columns.values(), default=-1) + 1)
    for node, size in sizes.items():
        widths[columns[node]] = max(widths[columns[node]], size.width)
    lefts = [0.0, *itertools.accumulate(width + across for width in widths)]
    boxes: dict[_Node, Box] = {}
    gates: dict[tuple[_Node, _Node], list[Box]] = {}
    top = 0.0
    for component in graph.components():
        items = {node: _Item(columns[node], sizes[node].height, node) for node in component}
        passing = _join(graph, items, down)
        everything = [*items.values(), *itertools.chain(*passing.values())]
        layers = _layers(everything)
        _order(layers)
        _place(layers, down)
        highest = min(item.middle - item.height / 2 for item in everything)
        lowest = max(item.middle + item.height / 2 for item in everything)

        def box(item: _Item[_Node], shift: float = top - highest) -> Box:
            width = widths[item.column] if item.node is None else sizes[item.node].width
            return Box(
                lefts[item.column], item.middle - item.height / 2 + shift, width, item.height
            )

        boxes.update({node: box(item) for node, item in items.items()})
        gates.update({edge: [box(item) for item in way] for edge, way in passing.items()})
        top += lowest - highest + down
    return Layout(boxes, gates, lefts[-1] - across if widths else 0.0, max(top - down, 0.0))


def _join(
    graph: Graph[_Node], items: Mapping[_Node, _Item[_Node]], down: float
) -> dict[tuple[_Node, _Node], list[_Item[_Node]]]:
    """Link the items of each edge, with a dummy item in every column between."""
    passing: dict[tuple[_Node, _Node], list[_Item[_Node]]] = {}
    for parent, child in graph.edges():
        if child not in items:
            continue
        between = range(items[parent].column + 1, items[child].column)
        way: list[_Item[_Node]] = [_Item(column, down / 2, None) for column in between]
        for left, right in itertools.pairwise([items[parent], *way, items[child]]):
            left.right.append(right)
            right.left.append(left)
        passing[parent, child] = way
    return passing


def _layers(items: Sequence[_Item[_Node]]) -> list[list[_Item[_Node]]]:
    layers: list[list[_Item[_Node]]] = [[] for _ in range(max(i.column for i in items) + 1)]
    for item in items:
        layers[item.column].append(item)
    return layers


def _order(layers: list[list[_Item[_Node]]]) -> None:
    """Sort each layer by the positions of its neighbours, and keep the best order."""
    best = [list(layer) for layer in layers]
    fewest = _crossings(layers)
    for sweep in range(_SWEEPS):
        to_the_right = sweep % 2 == 0
        for layer in layers if to_the_right else reversed(layers):
            rank = {item: float(i) for other in layers for i, item in enumerate(other)}

            def wanted(item: _Item[_Node], rank: dict[_Item[_Node], float] = rank) -> float:
                near = item.left if to_the_right else item.right  # noqa: B023 - used at once
                return sum(rank[n] for n in near) / len(near) if near else rank[item]

            layer.sort(key=wanted)
        crossings = _crossings(layers)
        if crossings < fewest:
            fewest, best = crossings, [list(layer) for layer in layers]
    for layer, kept in zip(layers, best, strict=True):
        layer[:] = kept


def _crossings(layers: Sequence[Sequence[_Item[_Node]]]) -> int:
    rank = {item: i for layer in layers for i, item in enumerate(layer)}
    count = 0
    for layer in layers:
        ends = [(rank[item], rank[child]) for item in layer for child in item.right]
        count += sum((a[0] - b[0]) * (a[1] - b[1]) < 0 for a, b in itertools.combinations(ends, 2))
    return count


def _place(layers: Sequence[Sequence[_Item[_Node]]], down: float) -> None:
    """Move items towards the middle of their neighbours, without overlap."""
    for layer in layers:
        _spread(layer, [0.0] * len(layer), down)
    for sweep in range(_SWEEPS):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            wanted = []
            for item in layer:
                near = item.left if sweep % 2 == 0 else item.right
                near = near or item.left or item.right
                wanted.append(sum(n.middle for n in near) / len(near) if near else item.middle)
            _spread(layer, wanted, down)


def _spread(layer: Sequence[_Item[_Node]], wanted: Sequence[float], down: float) -> None:
    """Place a layer as near to the wanted positions as possible without overlap (least squares).

    After subtracting the space of the items above, positions must not decrease: pool adjacent
    violators, each pool at the mean of its members' wanted positions.
    """
    offsets = [0.0]
    for above, below in itertools.pairwise(layer):
        offsets.append(offsets[-1] + (above.height + below.height) / 2 + down)
    pools: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=False):
        total, count = want - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    placed = [total / count for total, count in pools for _ in range(count)]
    for item, at, offset in zip(layer, placed, offsets, strict=False):
        item.middle = at + offset
