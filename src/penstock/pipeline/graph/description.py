"""How is a file of pipelines read, or one of a graph of workers that Spark is to run?

In a graph of workers a vertex becomes a stage that calls its function for each row, and an edge a
stage of the rows that are meant for it. An edge with a URL becomes a source where vertices take
from it, and a sink where they append to it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pydantic import Field, model_validator

from penstock.core.batch import BATCH_SCHEMA, batch_from_messages, messages_from_batch
from penstock.core.config import ConfigModel, Line, Lines, parse_with_lines, read_text
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.message import Message
from penstock.core.worker_function import load_worker_function, outputs_of
from penstock.core.worker_graph import parse_graph
from penstock.pipeline.graph.check import check
from penstock.pipeline.graph.fields import Text  # noqa: TC001 - pydantic reads it at run time
from penstock.pipeline.graph.model import Pipeline, Settings, Sink, Source, Stage
from penstock.pipeline.source.ranges import spark_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import DataFrame

    from penstock.core.config import FieldPath
    from penstock.core.worker_graph import WorkerGraph

__all__ = ["load_pipelines", "parse_pipelines", "pipeline_of"]

#: YAML 1.2.2, 9.1.2: at the start of a line this always ends a document.
_NEXT_DOCUMENT = re.compile(r"^---(?=\s|\Z)", re.MULTILINE)
#: The key that marks a document as a graph of workers.
_IS_GRAPH = re.compile(r"^(graph|'graph'|\"graph\")\s*:", re.MULTILINE)
#: Any character that is no line break in YAML.
_IN_LINES = re.compile("[^\r\n\x85\u2028\u2029]")


#: The column with the edge that a result goes to.
_EDGE: Final = "edge"
_COLUMNS: Final = tuple(BATCH_SCHEMA.names)


#: Sections whose entries may use a template.
_SECTIONS: Final = ("sources", "stages", "sinks")
_ELSEWHERE: Final = "run it without --engine spark"


class _Description(ConfigModel):
    pipeline: Text
    sources: dict[str, Source]
    stages: dict[str, Stage] = Field(default_factory=dict)
    sinks: dict[str, Sink]
    settings: Settings = Field(default_factory=Settings)
    #: Already expanded; listed here so that the keys are accepted.
    include: None = None
    templates: None = None

    @model_validator(mode="before")
    @classmethod
    def _is_a_pipeline(cls, data: Any) -> Any:
        # For a file of another command, one fault is clearer than one per missing key.
        if isinstance(data, dict) and data and not data.keys() & cls.model_fields.keys():
            raise ValueError("is not a pipeline: it has none of pipeline, sources and sinks")
        return data


class _Document(ConfigModel):
    pipelines: tuple[_Description, ...]

    @model_validator(mode="before")
    @classmethod
    def _one_or_a_list(cls, data: Any) -> Any:
        return {"pipelines": data if isinstance(data, list) else [data]}


def load_pipelines(path: str | os.PathLike[str]) -> list[Pipeline]:
    """Read and check the pipelines of a YAML file.

    :raises ConfigError: there is exactly one fault; it has the line.
    :raises ConfigErrors: there are several faults.
    """
    return parse_pipelines(read_text(path), os.fspath(path))


def parse_pipelines(text: str, file: str = "<text>") -> list[Pipeline]:
    """Read pipelines from YAML text; `file` is its name in errors.

    A document is one pipeline or a list of them, or a graph of workers, which becomes one; `---`
    separates documents.

    :raises ConfigError: there is exactly one fault; it has the line.
    :raises ConfigErrors: there are several faults.
    """
    pipelines = [pipeline for document in _documents(text) for pipeline in _read(document, file)]
    if not pipelines:
        raise ConfigError(file, None, None, "has no pipeline", hint="it starts with pipeline: NAME")
    check(pipelines)
    return pipelines


def _documents(text: str) -> Iterator[str]:
    """Split the text into documents, each padded so that line numbers stay the same."""
    starts = [0, *(match.end() for match in _NEXT_DOCUMENT.finditer(text)), len(text) + 3]
    for start, end in itertools.pairwise(starts):
        part = text[start : end - 3]
        if any(line.lstrip()[:1] not in {"", "#", "%"} for line in part.splitlines()):
            yield _IN_LINES.sub("", text[:start]) + part


def _read(document: str, file: str) -> Iterator[Pipeline]:
    if _IS_GRAPH.search(document):
        yield pipeline_of(parse_graph(document, file))
        return
    found, lines = parse_with_lines(document, _Document, file, sections=_SECTIONS)
    is_list = (0,) in lines.by_path
    for index, described in enumerate(found.pipelines):
        yield Pipeline(
            described.pipeline,
            described.sources,
            described.stages,
            described.sinks,
            described.settings,
            lines.below((index,), f"[{index}]") if is_list else lines,
        )


def pipeline_of(graph: WorkerGraph) -> Pipeline:
    """Translate a graph of workers into an equivalent pipeline.

    :raises ConfigError: Spark cannot run it: it has a cycle or programs, or two vertices share the
        messages of an edge.
    """
    _refuse(graph)
    return _Translation(graph).pipeline()


def _refuse(graph: WorkerGraph) -> None:
    for name, vertex in graph.vertices.items():
        if vertex.command is not None:
            raise graph.error(
                ("vertices", name, "command"),
                "Spark runs functions, and no programs",
                hint=_ELSEWHERE,
            )
        if not vertex.to:
            raise graph.error(
                ("vertices", name), "it gives nothing, and so Spark would not run it", at_key=True
            )
    for cycle in graph.joined().cycles():
        first = next(node for node in cycle if node[0] == "vertex")
        start = cycle.index(first)
        names = [node[1] for node in (*cycle[start:], *cycle[:start], first)]
        raise graph.error(
            ("vertices", first[1], "from"),
            f"Spark cannot go round in a circle: {' -> '.join(names)}",
            hint=_ELSEWHERE,
        )
    for name, edge in graph.edges.items():
        path: FieldPath = ("edges", name)
        readers, writers = graph.readers(name), graph.writers(name)
        if edge.chaos is not None:
            raise graph.error(
                (*path, "chaos"), "Spark has no network on this edge to break", at_key=True
            )
        if len(readers) > 1:
            raise graph.error(
                path,
                f"{' and '.join(readers)} share its messages, which Spark cannot tell apart",
                hint="give each an edge of its own",
                at_key=True,
            )
        if edge.url is None and not (readers and writers):
            does = "writes" if readers else "reads"
            hint = "give it url:, as in log:/path/name"
            raise graph.error(path, f"nobody {does} it, and Spark makes no queue", hint=hint)


class _Translation:
    """Builds the pipeline of a graph: names vertices and edges for SQL, and connects them."""

    def __init__(self, graph: WorkerGraph) -> None:
        self._graph = graph
        self._taken: set[str] = set()
        self._lines: dict[FieldPath, Line] = {(): Line(1, 1)}
        self._pipeline = Pipeline(graph.name)
        #: The source or stage that yields the rows of an edge.
        self._rows: dict[str, str] = {}
        #: The stages whose rows go to an edge.
        self._parts: defaultdict[str, list[str]] = defaultdict(list)

    def pipeline(self) -> Pipeline:
        graph = self._graph
        for name, edge in graph.edges.items():
            if edge.url is not None and graph.readers(name):
                self._rows[name] = self._name(name, "sources", ("edges", name, "url"))
                self._pipeline = self._pipeline.source(self._rows[name], edge.url)
        order = graph.joined().topological_order()
        for kind, name in order:
            if kind == "vertex":
                self._add_vertex(name)
            elif graph.writers(name):
                self._add_edge(name)
        lines = Lines(graph.lines.file, self._lines)
        made = self._pipeline
        return Pipeline(made.name, made.sources, made.stages, made.sinks, made.settings, lines)

    def _name(self, wanted: str, section: str, path: FieldPath) -> str:
        plain = re.sub(r"\W", "_", wanted, flags=re.ASCII)
        plain = f"_{plain}" if plain[0].isdigit() else plain
        name, count = plain, 1
        while name.lower() in self._taken:
            count += 1
            name = f"{plain}_{count}"
        self._taken.add(name.lower())
        line = self._graph.lines.find(path, at_key=True)
        if line is not None:
            self._lines[section, name] = Line(line, line)
        return name

    def _add_vertex(self, name: str) -> None:
        vertex = self._graph.vertices[name]
        assert vertex.use is not None
        path = ("vertices", name)
        stage = self._name(name, "stages", path)
        self._pipeline = self._pipeline.stage(
            stage,
            from_=[self._rows[edge] for edge in vertex.from_],
            use=_VertexStage(vertex.use, vertex.options, vertex.to),
        )
        if len(vertex.to) == 1:
            self._parts[vertex.to[0]].append(stage)
            return
        for edge in vertex.to:
            rows = self._name(f"{name}_to_{edge}", "stages", path)
            # Names of edges cannot contain quotes.
            sql = f"SELECT * EXCEPT ({_EDGE}) FROM {stage} WHERE {_EDGE} = '{edge}'"  # noqa: S608
            self._pipeline = self._pipeline.stage(rows, from_=stage, sql=sql)
            self._parts[edge].append(rows)

    def _add_edge(self, name: str) -> None:
        parts, path = self._parts[name], ("edges", name)
        rows = parts[0]
        if len(parts) > 1:
            rows = self._name(f"{name}_in" if name in self._rows else name, "stages", path)
            self._pipeline = self._pipeline.stage(rows, from_=parts)
        url = self._graph.edges[name].url
        if url is None:
            self._rows[name] = rows
        else:
            sink = self._name(f"{name}_out" if name in self._rows else name, "sinks", path)
            self._pipeline = self._pipeline.sink(sink, from_=rows, url=url)


class _VertexStage:
    """The function of a vertex, wrapped as a function of data frames."""

    def __init__(self, use: str, options: Mapping[str, Any], edges: Sequence[str]) -> None:
        self._use = use
        self._options = dict(options)
        self._edges = tuple(edges)
        # Plans show these names.
        self.__module__, _, self.__qualname__ = use.partition(":")

    def __call__(self, *frames: DataFrame) -> DataFrame:
        """Return the results for all rows, with their edge in a column if there are several.

        :raises PenstockError: the function does not exist, or keeps state.
        """
        from penstock.pipeline.run.data_frames import united  # noqa: PLC0415 - loads Spark

        function = load_worker_function(self._use)
        if function.state is not None:
            raise PenstockError(
                f"{self._use} keeps a state in its process, which tasks of Spark do not have",
                hint=_ELSEWHERE,
            )
        function.bound(self._options)
        rows = united([frame.select(*_COLUMNS) for frame in frames])
        work = partial(_work, self._use, self._options, self._edges)
        schema = spark_schema(_COLUMNS)
        if len(self._edges) > 1:
            schema += f", {_EDGE} STRING NOT NULL"
        return rows.mapInArrow(work, schema)


def _work(
    use: str,
    options: Mapping[str, Any],
    edges: Sequence[str],
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Call a function for each row, in a Spark task."""
    call = load_worker_function(use).bound(options)
    for batch in batches:
        results: list[Message] = []
        targets: list[str] = []
        for message in messages_from_batch(_as_batch(batch)):
            for output in outputs_of(call(message), edges):
                results.append(Message(0, message.time_ns, 0, 0, 0, None, None, output.payload))
                targets.append(output.edge)
        made = batch_from_messages(results)
        columns = [made.column(name) for name in made.schema.names]
        columns[_COLUMNS.index("stream")] = made.column("stream").cast(pa.binary())
        yield pa.RecordBatch.from_arrays(
            [*columns, pa.array(targets, pa.string())], [*_COLUMNS, _EDGE]
        )


def _as_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast rows to the types of messages: Spark has no fixed-length binary type."""
    columns = [batch.column(field.name).cast(field.type) for field in BATCH_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=BATCH_SCHEMA)
