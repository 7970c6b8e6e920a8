"""What is a graph of workers: which vertices does it have, and which edges join them?

An edge is a queue: vertices with the edge in `to` append, and each message goes to one of the
vertices with it in `from`. So an edge may have many vertices, and a graph may have cycles.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue

from penstock.core.config import (
    ConfigModel,
    Lines,
    Names,
    Text,
    Url,
    WrongField,
    is_function_name,
    listed,
    parse_with_lines,
    read_text,
)
from penstock.core.errors import ConfigErrors
from penstock.core.graph import Graph
from penstock.core.options import Duration, Size, nearest
from penstock.core.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.core.config import FieldPath
    from penstock.core.errors import ConfigError

__all__ = [
    "Edge",
    "GraphSettings",
    "Vertex",
    "WorkerGraph",
    "fields_of",
    "filled",
    "load_graph",
    "parse_graph",
]

#: Used in paths and in the names of groups and processes.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}")
#: A field in a word of a command; doubled braces stand for themselves.
_FIELD: Final = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def _function(value: object) -> str:
    if not is_function_name(value):
        raise WrongField("should be module:function", hint="a function marked with @worker")
    return str(value)


def _words(value: object) -> object:
    if isinstance(value, str):
        raise WrongField("should be a list of words", hint='as in ["./worker.sh", "--fast"]')
    return listed(value)


def _regular_expression(value: str) -> str:
    try:
        re.compile(value.encode())
    except re.error as error:
        raise WrongField(f"is no regular expression: {error}") from None
    return value


def _sync(value: object) -> object:
    if value in {"none", "batch"}:
        return value
    if isinstance(value, str | int | float):
        parse_duration(value)
        return str(value)
    return value


class Vertex(ConfigModel):
    """A worker that reads and writes messages: a function, or a program."""

    #: The edges that it reads from.
    from_: Names = Field(default=(), alias="from")
    #: The edges that its results go to.
    to: Names = ()
    #: `module:function`, marked with `@worker`.
    use: Annotated[str, BeforeValidator(_function)] | None = None
    #: Keyword arguments for that function.
    options: dict[str, Any] = Field(default_factory=dict)
    #: A program and its arguments.
    command: Annotated[tuple[Text, ...], BeforeValidator(_words)] | None = None
    #: How the program gets its messages: as frames on its standard input, or by UDP requests.
    speaks: Literal["frames", "udp"] = "frames"
    #: Added to the program's environment.
    environment: dict[str, str] = Field(default_factory=dict)
    #: Processes that share the messages.
    workers: int = Field(default=1, ge=1, le=1000)

    @property
    def is_udp(self) -> bool:
        """Whether it is a program that talks to its queues itself."""
        return self.command is not None and self.speaks == "udp"

    def describe(self) -> str:
        """Describe it in a few words."""
        return self.use or " ".join(self.command or ())


class Edge(ConfigModel):
    """A queue between vertices: one of its own, or the stream at its URL."""

    url: Url | None = None
    #: Queue: its address; any free port by default.
    host: Text = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    #: Queue: the transport of its workers. URL: the transport that `chaos` disturbs.
    transport: Literal["udp", "tcp"] = "udp"
    #: Queue: number of queues behind one address.
    lb: int | None = Field(default=None, ge=1, le=256)
    by: Literal["round_robin", "key"] = "round_robin"
    #: Queue, by key: a pattern for the key in a message: its first group, or the whole match.
    key: Annotated[str, AfterValidator(_regular_expression)] | None = None
    #: Queue: whether its messages are stored on disk, and outlive the run.
    durable: bool = True
    #: Queue: when messages are synced to the disk, as in a log.
    sync: Annotated[str, BeforeValidator(_sync)] | None = None
    #: Queue: the most messages and bytes that it holds.
    capacity: int = Field(default=1_000_000, ge=1)
    capacity_bytes: Size = 128 << 20
    #: How long a worker may keep a message before another gets it.
    lease: Annotated[Duration, Field(gt=0)] | None = None
    #: The most deliveries of a message, and the dead-letter stream that it then goes to.
    deliveries: int | None = Field(default=None, ge=1)
    dead: Url | None = None
    #: The faults of a router in front of the queue, and its seed.
    chaos: dict[str, JsonValue] | None = None


class GraphSettings(ConfigModel):
    """How a graph runs."""

    #: The folder of its queues, below which each edge has one.
    state: Text | None = None
    #: Grace period (seconds) of workers that are told to end.
    grace: Annotated[Duration, Field(gt=0)] = 5.0
    #: Messages that a worker takes at once, at most.
    batch: int = Field(default=500, ge=1, le=10_000)


def _named(value: object) -> object:
    """Turn a list of names into edges without options."""
    if isinstance(value, list):
        return {str(name): {} for name in value}
    if isinstance(value, dict):
        return {name: {} if edge is None else edge for name, edge in value.items()}
    return value


class _Description(ConfigModel):
    graph: Text
    vertices: dict[str, Vertex]
    edges: Annotated[dict[str, Edge], BeforeValidator(_named)]
    settings: GraphSettings = Field(default_factory=GraphSettings)


@dataclass(frozen=True)
class WorkerGraph:
    """Vertices and the edges between them, as a file describes them."""

    name: str
    vertices: Mapping[str, Vertex]
    edges: Mapping[str, Edge]
    settings: GraphSettings = field(default_factory=GraphSettings)
    lines: Lines = field(default_factory=lambda: Lines("<graph>"), compare=False, repr=False)

    @property
    def folder(self) -> str:
        """The folder of its file, where functions and programs are looked up."""
        return os.path.dirname(os.path.abspath(self.lines.file))  # noqa: PTH100, PTH120 - text

    def writers(self, edge: str) -> list[str]:
        """Return the vertices that append to an edge."""
        return [name for name, vertex in self.vertices.items() if edge in vertex.to]

    def readers(self, edge: str) -> list[str]:
        """Return the vertices that read from an edge."""
        return [name for name, vertex in self.vertices.items() if edge in vertex.from_]

    def joined(self) -> Graph[tuple[str, str]]:
        """Return the whole graph, with edges as nodes, too: ("vertex", …), ("edge", …)."""
        parents: dict[tuple[str, str], list[tuple[str, str]]] = {
            ("edge", name): [("vertex", writer) for writer in self.writers(name)]
            for name in self.edges
        }
        parents |= {
            ("vertex", name): [("edge", edge) for edge in vertex.from_]
            for name, vertex in self.vertices.items()
        }
        return Graph(parents)

    def error(
        self, path: FieldPath, reason: str, *, hint: str | None = None, at_key: bool = False
    ) -> ConfigError:
        """Return an error about a field of this graph, with its line."""
        return self.lines.error(path, reason, hint=hint, at_key=at_key)

    def warnings(self) -> list[str]:
        """Return warnings about valid settings that are probably mistakes."""
        return [
            str(self.error(("edges", name), "no vertex uses it", at_key=True))
            for name in self.edges
            if not self.readers(name) and not self.writers(name)
        ]


def load_graph(path: str | os.PathLike[str]) -> WorkerGraph:
    """Read the graph of a YAML file, and check that it is consistent.

    :raises ConfigError: one fault, with its line.
    :raises ConfigErrors: several faults.
    """
    return parse_graph(read_text(path), os.fspath(path))


def parse_graph(text: str, file: str = "<text>") -> WorkerGraph:
    """Read a graph from YAML text; `file` is its name in errors.

    :raises ConfigError: one fault, with its line.
    :raises ConfigErrors: several faults.
    """
    found, lines = parse_with_lines(text, _Description, file)
    graph = WorkerGraph(found.graph, found.vertices, found.edges, found.settings, lines)
    faults = sorted(_faults(graph), key=lambda fault: fault.line or 0)
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ConfigErrors(faults)
    return graph


# --- does it fit together? ------------------------------------------------------------------------


def _faults(graph: WorkerGraph) -> Iterator[ConfigError]:
    if not _NAME.fullmatch(graph.name):
        yield graph.error(("graph",), _BAD_NAME)
    for section in ("vertices", "edges"):
        if not getattr(graph, section):
            yield graph.error((section,), "a graph needs at least one", at_key=True)
        for name in getattr(graph, section):
            if not _NAME.fullmatch(name):
                yield graph.error((section, name), _BAD_NAME, at_key=True)
    for name, vertex in graph.vertices.items():
        yield from _vertex_faults(graph, name, vertex)
    for name, edge in graph.edges.items():
        yield from _edge_faults(graph, name, edge)


_BAD_NAME: Final = "should have letters, digits, '_', '-' and '.' only, 48 at most"


def _vertex_faults(graph: WorkerGraph, name: str, vertex: Vertex) -> Iterator[ConfigError]:
    path = ("vertices", name)
    if (vertex.use is None) == (vertex.command is None):
        reason = "has both use and command" if vertex.use else "does nothing"
        hint = 'give it use: "module:function", or command: [program]'
        yield graph.error(path, reason, hint=hint, at_key=True)
    for key in ("speaks", "environment") if vertex.command is None else ("options",):
        if key in vertex.model_fields_set:
            kind = "program (command)" if vertex.command is None else "function (use)"
            yield graph.error((*path, key), f"is for a {kind}", at_key=True)
    if not vertex.from_ and not vertex.is_udp:
        yield graph.error(path, "takes from no edge", hint="give it from: EDGE", at_key=True)
    for key, names in (("from", vertex.from_), ("to", vertex.to)):
        for index, edge in enumerate(names):
            where = (*path, key, index) if len(names) > 1 else (*path, key)
            if edge not in graph.edges:
                hint = nearest(edge, graph.edges, "there are")
                yield graph.error(where, f"there is no edge {edge}", hint=hint)
            elif edge in names[:index]:
                yield graph.error(where, f"{edge} stands here twice")
    yield from _command_faults(graph, name, vertex)


def _command_faults(graph: WorkerGraph, name: str, vertex: Vertex) -> Iterator[ConfigError]:
    known = fields_of(vertex) if vertex.is_udp else {}
    for index, word in enumerate(vertex.command or ()):
        for found in _FIELD.finditer(word) if vertex.is_udp else ():
            if found[0] not in {"{{", "}}"} and found[1] not in known:
                yield graph.error(
                    ("vertices", name, "command", index),
                    f"{found[0]} is no field",
                    hint=f"there are: {', '.join(f'{{{each}}}' for each in known)}; "
                    "{{ stands for a brace",
                )


def fields_of(vertex: Vertex) -> dict[str, str]:
    """Return the fields for braces in a program's command, and the edge of each."""
    fields = {edge: edge for edge in (*vertex.from_, *vertex.to)}
    if len(vertex.from_) == 1:
        fields["input"] = vertex.from_[0]
    if len(vertex.to) == 1:
        fields["output"] = vertex.to[0]
    return fields


def filled(word: str, values: Mapping[str, str]) -> str:
    """Return a word of a command with its fields replaced."""
    return _FIELD.sub(
        lambda found: found[0][0] if found[0] in {"{{", "}}"} else values[found[1]], word
    )


def _edge_faults(graph: WorkerGraph, name: str, edge: Edge) -> Iterator[ConfigError]:
    path = ("edges", name)
    given = edge.model_fields_set
    if edge.url is not None:
        for key in sorted(given & _OF_QUEUES):
            yield graph.error(
                (*path, key), "is for a queue that is made here: leave the url out", at_key=True
            )
    for key in ("by", "key"):
        if key in given and (edge.lb is None or (key == "key" and edge.by != "key")):
            needs = "lb: N" if edge.lb is None else "by: key"
            yield graph.error((*path, key), f"says nothing without {needs}", at_key=True)
    if (edge.deliveries is None) != (edge.dead is None):
        reason = "deliveries: N and dead: URL belong together: when, and where to"
        yield graph.error((*path, "dead" if edge.dead else "deliveries"), reason)
    if "sync" in given and not edge.durable:
        yield graph.error((*path, "sync"), "is for a queue on the disk", at_key=True)
    for vertex in (*graph.readers(name), *graph.writers(name)):
        if graph.vertices[vertex].is_udp and edge.transport == "tcp":
            yield graph.error((*path, "transport"), f"{vertex} speaks udp")


#: Options that do not apply to an edge with a URL.
_OF_QUEUES: Final = frozenset(
    {"host", "port", "lb", "by", "key", "durable", "sync", "capacity", "capacity_bytes"}
)
