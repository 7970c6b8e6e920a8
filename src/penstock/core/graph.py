"""What comes before what in a directed graph, and does it turn in a circle?"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping

__all__ = ["Graph"]

_Node = TypeVar("_Node", bound="Hashable")


class Graph(Generic[_Node]):
    """A directed graph, given by the parents of each node. It never changes.

    Results keep the order in which the nodes were given, where they can. Parents that are not
    nodes are ignored. No method recurses: a graph may be deep.
    """

    def __init__(self, parents: Mapping[_Node, Iterable[_Node]]) -> None:
        self._parents = {
            node: tuple(dict.fromkeys(parent for parent in above if parent in parents))
            for node, above in parents.items()
        }
        below: defaultdict[_Node, list[_Node]] = defaultdict(list)
        for node, above in self._parents.items():
            for parent in above:
                below[parent].append(node)
        self._children = {node: tuple(below[node]) for node in self._parents}

    @property
    def nodes(self) -> tuple[_Node, ...]:
        return tuple(self._parents)

    def parents(self, node: _Node) -> tuple[_Node, ...]:
        return self._parents[node]

    def children(self, node: _Node) -> tuple[_Node, ...]:
        return self._children[node]

    def edges(self) -> list[tuple[_Node, _Node]]:
        """Return every edge, from parent to child."""
        return [(parent, node) for node, above in self._parents.items() for parent in above]

    def ancestors(self, *nodes: _Node) -> set[_Node]:
        """Return these nodes and all their ancestors."""
        return self._reach(nodes, self._parents)

    def descendants(self, *nodes: _Node) -> set[_Node]:
        """Return these nodes and all their descendants."""
        return self._reach(nodes, self._children)

    def topological_order(self) -> list[_Node]:
        """Return the nodes so that each comes after its parents.

        :raises ValueError: there is a cycle.
        """
        order: list[_Node] = []
        depth = self.depths()
        if len(depth) == len(self._parents):
            # Sorting keeps the order in which nodes of one depth were given.
            order = sorted(depth, key=lambda node: depth[node])
        if len(order) < len(self._parents):
            raise ValueError("there is a cycle")
        return order

    def depths(self) -> dict[_Node, int]:
        """Return the longest path length to each node, without nodes in or behind cycles."""
        waiting = {node: len(above) for node, above in self._parents.items()}
        depth = {node: 0 for node, count in waiting.items() if count == 0}
        ready = list(depth)
        while ready:
            node = ready.pop()
            for child in self._children[node]:
                depth[child] = max(depth.get(child, 0), depth[node] + 1)
                waiting[child] -= 1
                if waiting[child] == 0:
                    ready.append(child)
        return {node: depth[node] for node, count in waiting.items() if count == 0}

    def knots(self) -> list[list[_Node]]:
        """Return the strongly connected components that contain a cycle."""
        knots: list[list[_Node]] = []
        seen: set[_Node] = set()
        for node in self._rest():
            if node not in seen:
                both = self.ancestors(node) & self.descendants(node)
                seen |= both
                if len(both) > 1 or node in self._parents[node]:
                    knots.append([member for member in self._parents if member in both])
        return knots

    def cycles(self) -> list[list[_Node]]:
        """Return one shortest cycle of each knot; its first node is not repeated."""
        return [self._shortest_cycle(knot[0], set(knot)) for knot in self.knots()]

    def back_edges(self) -> set[tuple[_Node, _Node]]:
        """Return the back edges of a depth-first search: without them the graph has no cycle."""
        found: set[tuple[_Node, _Node]] = set()
        done: set[_Node] = set()
        # From the roots first, so that an edge into a cycle is none of them.
        for start in sorted(self._parents, key=lambda node: bool(self._parents[node])):
            way: dict[_Node, Iterator[_Node]] = {start: iter(self._children[start])}
            while way and start not in done:
                node = next(reversed(way))
                child = next(way[node], None)
                if child is None:
                    done.add(node)
                    del way[node]
                elif child in way:
                    found.add((node, child))
                elif child not in done:
                    way[child] = iter(self._children[child])
        return found

    def components(self) -> list[list[_Node]]:
        """Return the weakly connected components."""
        components: list[list[_Node]] = []
        seen: set[_Node] = set()
        neighbours = {node: self._parents[node] + self._children[node] for node in self._parents}
        for node in self._parents:
            if node not in seen:
                together = self._reach((node,), neighbours)
                seen |= together
                components.append([member for member in self._parents if member in together])
        return components

    def _rest(self) -> list[_Node]:
        """Return the nodes in cycles and their descendants."""
        depth = self.depths()
        return [node for node in self._parents if node not in depth]

    def _shortest_cycle(self, start: _Node, within: set[_Node]) -> list[_Node]:
        came_from: dict[_Node, _Node] = {}
        wave = [start]
        while start not in came_from:
            following: list[_Node] = []
            for node in wave:
                for child in self._children[node]:
                    if child in within and child not in came_from:
                        came_from[child] = node
                        following.append(child)
            wave = following
        cycle = [came_from[start]]
        while cycle[-1] != start:
            cycle.append(came_from[cycle[-1]])
        return cycle[::-1]

    @staticmethod
    def _reach(nodes: Iterable[_Node], following: Mapping[_Node, tuple[_Node, ...]]) -> set[_Node]:
        seen = set(nodes)
        ready = list(seen)
        while ready:
            for node in following[ready.pop()]:
                if node not in seen:
                    seen.add(node)
                    ready.append(node)
        return seen
