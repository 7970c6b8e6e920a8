"""No code outside an endpoint's own package looks at a scheme: it asks what an endpoint can do."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.core.endpoints import OWN_ENDPOINTS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
#: The package that owns each scheme.
OWNERS = {
    scheme: target.partition(":")[0].rpartition(".")[0] for scheme, target in OWN_ENDPOINTS.items()
}
#: A scheme, or the beginning of a URL.
SCHEME = re.compile(rf"({'|'.join(map(re.escape, OWNERS))})(:.*)?", re.DOTALL)
#: Where URLs are taken apart, and endpoints are found.
HERE = {"penstock.core.url", "penstock.core.endpoints"}
#: Methods that tell one text from another.
TESTS = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"),
    *("split", "index", "find", "count", "match", "fullmatch", "search", "get", "pop", "__eq__"),
}
#: Words that are a scheme, and are something else in this place.
OTHERWISE = {
    *(("penstock.cli.commands", command) for command in ("fmq", "latest", "log")),
    ("penstock.core.decoding.options", "arrow"),  # formats of payloads
    ("penstock.core.decoding.options", "csv"),
    ("penstock.core.delivery_policy", "latest"),  # a delivery policy
    ("penstock.core.quota", "psi:"),  # whose formula a quota follows
    ("penstock.pipeline.graph.fields", "latest"),  # Kafka's word for the end of a stream
    ("penstock.pipeline.graph.model", "csv"),  # formats of Spark's sinks
    ("penstock.pipeline.graph.model", "parquet"),
    ("penstock.pipeline.source.options", "latest"),
    ("penstock.pipeline.source.stream", "latest"),
    ("penstock.protocols.psi.store.export", "csv"),  # formats of an exported store
    ("penstock.protocols.psi.store.export", "log"),
    ("penstock.protocols.psi.store.export", "parquet"),
    ("penstock.radar.stages", "iwrf"),  # a format of a file
}


def looks(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of all that a module should not look at."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    is_an_endpoints = any(is_within(module, owner) for owner in OWNERS.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "scheme" and not is_an_endpoints:
            if not isinstance(parents[node], ast.FormattedValue):  # else a message shows it
                yield node.lineno, ".scheme"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = SCHEME.fullmatch(node.value)
            if found and not is_within(module, OWNERS[found[1]]) and is_tested(node, parents):
                yield node.lineno, node.value


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def is_tested(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Tell whether something is compared with a text, and not made of it."""
    parent = parents[node]
    match parent:
        case (
            ast.Tuple() | ast.List() | ast.Starred() | ast.BoolOp() | ast.IfExp() | ast.NamedExpr()
        ):
            return is_tested(parent, parents)
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in TESTS
        case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple")):
            return True
        case ast.Dict(keys=keys):
            return node in keys
    return isinstance(parent, ast.Compare | ast.Set | ast.MatchValue | ast.Subscript)


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SRC.rglob("*.py")):
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        if module not in HERE:
            yield module, ast.parse(path.read_text(), str(path))


def test_no_module_looks_at_a_scheme_but_those_of_its_endpoint() -> None:
    found = [
        (module, line, text) for module, tree in modules() for line, text in looks(tree, module)
    ]
    assert [one for one in found if (one[0], one[2]) not in OTHERWISE] == []
    assert {(module, text) for module, _, text in found} == OTHERWISE


@pytest.mark.parametrize(
    "code",
    [
        'if url.startswith("log:"): pass',
        'if url.startswith(("fmq:", "log:")): pass',
        "if URL.parse(url).scheme != kind: pass",
        "scheme = url.scheme",
        'if url.partition(":")[0] == "flight": pass',
        'if url[:4] in ("fmq:", "log:"): pass',
        'OURS = frozenset(["fmq", "log"])',
        'OURS = {"fmq", "flight+tls"}',
        'opened = {"fmq": open_queue, "log": open_log}[kind]',
        'match kind:\n    case "up+mqtt": pass',
        'path = url.removeprefix("psi://")',
        'factories["latest"]()',
    ],
)  # fmt: skip
def test_each_way_to_look_at_one_is_found(code: str) -> None:
    assert list(looks(ast.parse(code), "penstock.relay.relay"))


@pytest.mark.parametrize(
    ("code", "module"),
    [
        ('url = f"log:{folder}"', "penstock.relay.relay"),
        ('raise ValueError(f"{url.scheme}: has none")', "penstock.relay.relay"),
        ('hint = "write fmq:/path/name"', "penstock.relay.relay"),
        ('if url.scheme == "flight+tls": pass', "penstock.protocols.flight.client"),
        ('if url.startswith("log:"): pass', "penstock.queue.log.endpoint"),
    ],
)
def test_to_make_a_url_or_a_message_is_no_look(code: str, module: str) -> None:
    assert not list(looks(ast.parse(code), module))
