from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.drawing.layout import Box, Size, arrange
from penstock.core.graph import Graph


def overlap(one: Box, other: Box) -> bool:
    return (
        one.x < other.right - 1e-6
        and other.x < one.right - 1e-6
        and one.y < other.bottom - 1e-6
        and other.y < one.bottom - 1e-6
    )


@st.composite
def graphs(draw: st.DrawFn) -> Graph[int]:
    count = draw(st.integers(1, 12))
    return Graph(
        {
            node: draw(st.lists(st.integers(0, max(node - 1, 0)), max_size=3)) if node else []
            for node in range(count)
        }
    )


def test_a_straight_chain_is_drawn_straight() -> None:
    graph = Graph({"a": [], "b": ["a"], "c": ["b"]})
    sizes = {"a": Size(10, 10), "b": Size(20, 30), "c": Size(10, 10)}
    layout = arrange(graph, sizes, graph.depths(), across=5, down=5)
    assert {box.middle for box in layout.boxes.values()} == {15}
    assert [box.x for box in layout.boxes.values()] == [0, 15, 40]
    assert (layout.width, layout.height) == (50, 30)


def test_a_crossing_that_need_not_be_is_undone() -> None:
    graph = Graph({"a": [], "b": [], "c": [], "y": ["b"], "x": ["a"], "z": ["a", "b", "c"]})
    layout = arrange(
        graph, dict.fromkeys(graph.nodes, Size(10, 10)), graph.depths(), across=5, down=5
    )
    above = layout.boxes["a"].y < layout.boxes["b"].y
    assert (layout.boxes["x"].y < layout.boxes["y"].y) is above


def test_an_edge_over_columns_has_a_free_place_to_pass() -> None:
    graph = Graph({"a": [], "b": ["a"], "c": ["b", "a"]})
    layout = arrange(
        graph, dict.fromkeys(graph.nodes, Size(10, 10)), graph.depths(), across=5, down=5
    )
    (gate,) = layout.gates["a", "c"]
    assert gate.x == layout.boxes["b"].x
    assert not overlap(gate, layout.boxes["b"])


@given(graphs(), st.data())
def test_nothing_overlaps_and_everything_reads_from_left_to_right(
    graph: Graph[int], data: st.DataObject
) -> None:
    lengths = st.integers(5, 60)
    sizes = {n: Size(data.draw(lengths), data.draw(lengths)) for n in graph.nodes}
    layout = arrange(graph, sizes, graph.depths(), across=20, down=10)
    assert set(layout.boxes) == set(graph.nodes)
    taken = [*layout.boxes.values(), *itertools.chain(*layout.gates.values())]
    for one, other in itertools.combinations(taken, 2):
        assert not overlap(one, other)
    for parent, child in graph.edges():
        way = [layout.boxes[parent], *layout.gates[parent, child], layout.boxes[child]]
        assert all(a.right + 20 <= b.x + 1e-6 for a, b in itertools.pairwise(way))
    for box in taken:
        assert box.x >= -1e-6
        assert box.y >= -1e-6
        assert box.right <= layout.width + 1e-6
        assert box.bottom <= layout.height + 1e-6
