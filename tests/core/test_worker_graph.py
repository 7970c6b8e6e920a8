from __future__ import annotations

import pytest

from penstock.core.errors import ConfigError, ConfigErrors
from penstock.core.worker_graph import fields_of, filled, parse_graph

GRAPH = """\
graph: words
vertices:
  split: {use: "words:split", from: lines, to: [words, rest], workers: 2}
  count: {command: [./count, "{input}"], speaks: udp, from: words, to: counts}
edges:
  lines:
  words: {lb: 2, by: key}
  rest: {durable: false}
  counts: {url: "log:/tmp/x", lease: 5s}
"""


def test_a_graph_is_read_and_tells_who_reads_and_writes_an_edge() -> None:
    graph = parse_graph(GRAPH)
    assert graph.vertices["split"].workers == 2
    assert graph.edges["counts"].lease == 5
    assert graph.readers("words") == ["count"]
    assert graph.writers("words") == ["split"]
    assert graph.joined().topological_order()[0] == ("edge", "lines")
    assert graph.warnings() == []
    assert parse_graph(GRAPH.replace("rest]", "counts]")).warnings() == [
        "<text>:8: edges.rest: no vertex uses it"
    ]


def test_edges_may_be_a_list_of_names() -> None:
    text = "graph: g\nvertices: {v: {use: 'a:b', from: x, to: [x, y]}}\nedges: [x, y]\n"
    assert list(parse_graph(text).edges) == ["x", "y"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("graph: words", "graph: a/b", "1: graph: should have letters"),
        ("from: lines", "from: line", "3: vertices.split.from: there is no edge line"),
        ("[words, rest]", "[words, words]", "3: vertices.split.to[1]: words stands here twice"),
        ('use: "words:split"', "use: words", "3: vertices.split.use: should be module:function"),
        ("workers: 2", "command: [x]", "3: vertices.split: has both use and command"),
        ('use: "words:split", ', "", "3: vertices.split: does nothing"),
        ("workers: 2", "speaks: udp", "3: vertices.split.speaks: is for a program"),
        ("workers: 2", "wokers: 2", "3: vertices.split.wokers: unknown key"),
        ("from: lines, ", "", "3: vertices.split: takes from no edge"),
        ("{input}", "{inputs}", "4: vertices.count.command[1]: {inputs} is no field"),
        ("[./count, ", "x # ", "4: vertices.count.command: should be a list of words"),
        ("lb: 2, ", "", "7: edges.words.by: says nothing without lb"),
        ("by: key", "key: a", "7: edges.words.key: says nothing without by: key"),
        ("by: key", "by: key, key: '('", "7: edges.words.key: is no regular expression"),
        ("durable: false", "durable: false, sync: batch", "8: edges.rest.sync: is for a queue"),
        ("durable: false", "deliveries: 3", "8: edges.rest.deliveries: deliveries: N and dead"),
        ("lease: 5s", "port: 1", "9: edges.counts.port: is for a queue that is made here"),
        ("log:/tmp/x", "lgo:/tmp/x", "9: edges.counts.url: no endpoint answers to lgo:"),
        ("lease: 5s", "transport: tcp", "9: edges.counts.transport: count speaks udp"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_field(old: str, new: str, said: str) -> None:
    text = GRAPH.replace(old, new)
    if new == "x # ":
        text = GRAPH.replace('[./count, "{input}"]', "./count")
    assert text != GRAPH
    with pytest.raises(ConfigError) as caught:
        parse_graph(text)
    assert f"<text>:{said}" in str(caught.value)


def test_several_mistakes_are_told_together() -> None:
    text = GRAPH.replace("from: lines", "from: line").replace("lb: 2, ", "")
    with pytest.raises(ConfigErrors) as caught:
        parse_graph(text)
    assert [error.line for error in caught.value.errors] == [3, 7]


def test_the_fields_of_a_command_are_its_edges() -> None:
    vertex = parse_graph(GRAPH).vertices["count"]
    assert fields_of(vertex) == {
        "words": "words", "counts": "counts", "input": "words", "output": "counts",
    }  # fmt: skip
    assert filled("--in={input} {{x}}", {"input": "h:1"}) == "--in=h:1 {x}"
