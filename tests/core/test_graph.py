from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.graph import Graph

GRAPHS = st.dictionaries(
    st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3), max_size=10
).map(Graph[int])


def test_a_graph_knows_what_is_before_and_after_each_node() -> None:
    graph = Graph({"a": [], "b": ["a"], "c": ["a", "b"], "d": []})
    assert graph.nodes == ("a", "b", "c", "d")
    assert graph.children("a") == ("b", "c")
    assert graph.parents("c") == ("a", "b")
    assert graph.ancestors("c") == {"a", "b", "c"}
    assert graph.descendants("a") == {"a", "b", "c"}
    assert graph.depths() == {"a": 0, "b": 1, "c": 2, "d": 0}
    assert graph.components() == [["a", "b", "c"], ["d"]]
    assert graph.edges() == [("a", "b"), ("a", "c"), ("b", "c")]


def test_nodes_of_one_depth_keep_the_order_in_which_they_were_given() -> None:
    assert Graph({"z": [], "a": ["z"], "y": []}).topological_order() == ["z", "y", "a"]


def test_parents_that_are_no_nodes_are_left_out() -> None:
    assert Graph({"a": ["nobody", "a2"], "a2": []}).parents("a") == ("a2",)


def test_a_cycle_is_found_at_its_shortest() -> None:
    graph = Graph({"a": ["d"], "b": ["a"], "c": ["b"], "d": ["c", "b"], "e": ["d"], "f": ["f"]})
    assert graph.cycles() == [["a", "b", "d"], ["f"]]
    assert graph.knots() == [["a", "b", "c", "d"], ["f"]]
    with pytest.raises(ValueError, match="cycle"):
        graph.topological_order()


def test_a_graph_may_be_deeper_than_the_stack() -> None:
    chain = Graph({i: [i - 1] if i else [] for i in range(20_000)})
    assert chain.topological_order()[-1] == 19_999
    assert len(chain.ancestors(19_999)) == 20_000


@given(GRAPHS)
def test_an_order_puts_parents_first_and_a_cycle_is_one(graph: Graph[int]) -> None:
    cycles = graph.cycles()
    if not cycles:
        order = graph.topological_order()
        assert sorted(order) == sorted(graph.nodes)
        assert all(order.index(parent) < order.index(child) for parent, child in graph.edges())
    for cycle in cycles:
        assert len(set(cycle)) == len(cycle)
        ring = [*cycle, cycle[0]]
        assert set(itertools.pairwise(ring)) <= set(graph.edges())


@given(GRAPHS)
def test_components_hold_every_node_once_and_no_edge_joins_two(graph: Graph[int]) -> None:
    components = graph.components()
    assert sorted(node for part in components for node in part) == sorted(graph.nodes)
    home = {node: i for i, part in enumerate(components) for node in part}
    assert all(home[parent] == home[child] for parent, child in graph.edges())


def test_without_its_back_edges_a_graph_has_no_cycle() -> None:
    parents = {"a": ["c", "root"], "b": ["a"], "c": ["b"], "root": [], "d": ["d", "c"]}
    graph = Graph(parents)
    back = graph.back_edges()
    assert back == {("c", "a"), ("d", "d")}
    rest = {node: [p for p in above if (p, node) not in back] for node, above in parents.items()}
    assert len(Graph(rest).topological_order()) == len(parents)
