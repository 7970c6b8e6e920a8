"""What is a pipeline: which sources, stages and sinks does it have, and what joins several?"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, field_serializer, model_validator

from penstock.core.config import ConfigModel, FieldPath, Lines, dotted_path
from penstock.core.endpoints import is_named_by
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.functions import function_name
from penstock.core.graph import Graph
from penstock.core.options import nearest
from penstock.core.retry import Backoff
from penstock.pipeline.graph.fields import (
    Bytes,
    Conf,
    Decode,
    Delay,
    Function,
    LogUrl,
    Names,
    Offsets,
    Restarts,
    SparkTrigger,
    Text,
    Trigger,
    Url,
    Urls,
    Watermark,
    spark_interval,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "Lines",
    "Node",
    "Pipeline",
    "Settings",
    "Sink",
    "SinkKind",
    "Source",
    "Stage",
    "streams_between",
    "whole_graph",
]

SinkKind = Literal[
    "url", "dead_letter", "parquet", "csv", "json", "xml", "struct", "console", "format"
]
_FILES = frozenset({"parquet", "csv", "json", "xml", "struct"})
#: Formats of files that Spark reads, and those whose columns are always the same.
_READ_FILES = frozenset({"parquet", "csv", "json", "orc", "text", "xml", "avro", "binaryfile"})
_OWN_COLUMNS = frozenset({"text", "binaryfile"})
#: Fields of a source that are no options of `format("penstock")`.
_NO_OPTIONS = {"urls", "decode", "options", "static", "format", "path", "schema_"}


#: What the source takes as no.
_NO = {"false", "0", "no", "off", "n", "f"}


class Source(ConfigModel):
    """Streams to read, or the input of another Spark format.

    The keys are the options of `format("penstock")`; with `format`, only the keys from that one on.
    """

    urls: Urls = Field(default=(), alias="url")
    starting_offsets: Offsets | None = Field(default=None, alias="startingOffsets")
    max_offsets_per_trigger: int | None = Field(default=None, alias="maxOffsetsPerTrigger", ge=1)
    max_bytes_per_trigger: Bytes | None = Field(default=None, alias="maxBytesPerTrigger")
    fail_on_data_loss: bool | None = Field(default=None, alias="failOnDataLoss")
    min_partitions: int | None = Field(default=None, alias="minPartitions", ge=1)
    type: int | None = None
    hold: Text | None = None
    #: A log that buffers a stream which cannot be re-read.
    stage: LogUrl | None = None
    #: With `failOnDataLoss: false`, a stream that gets a message for every lost range.
    loss_url: Url | None = Field(default=None, alias="lossUrl")
    #: A format of Spark, or of a package that it loads; instead of `url`.
    format: Text | None = None
    path: Text | None = None
    #: In Spark's DDL.
    schema_: Text | None = Field(default=None, alias="schema")
    #: Whether it is read as a table, to join with streams.
    static: bool = False
    #: How payloads become columns; not an option of the source.
    decode: Decode | None = None
    #: Further Spark options of the source.
    options: Conf = Field(default_factory=dict)

    @property
    def reads_files(self) -> bool:
        return self.format is not None and self.format.lower() in _READ_FILES

    @property
    def needs_schema(self) -> bool:
        """Whether it needs `schema` when it is streamed."""
        return self.reads_files and str(self.format).lower() not in _OWN_COLUMNS

    @property
    def goes_on_after_loss(self) -> bool:
        """Whether lost messages are counted instead of failing the query."""
        if self.format is not None:
            return False  # it counts nothing
        return self._option("failOnDataLoss", "true").strip().lower() in _NO

    @property
    def losses_to(self) -> str | None:
        """The stream that is told of lost messages, wherever it is given."""
        return None if self.format is not None else self._option("lossUrl", "") or None

    def _option(self, name: str, otherwise: str) -> str:
        """Return an option of the source by its name, in which Spark ignores the case."""
        given = {key.lower(): value for key, value in self.spark_options().items()}
        return given.get(name.lower(), otherwise)

    @property
    def decodes_inside(self) -> bool:
        """Whether the source itself decodes payloads, which saves a round trip through Java.

        Not with `on_error: skip`: Spark counts skipped rows after the source.
        """
        decode, given = self.decode, {name.lower() for name in self.options}
        if decode is None or decode.get("on_error") == "skip":
            return False
        return self.format is None and "columns" not in given

    def spark_options(self) -> dict[str, str]:
        """Return the arguments for `.options(…)` of the source."""
        if self.format is not None:
            return {**({} if self.path is None else {"path": self.path}), **self.options}
        given = self.model_dump(by_alias=True, exclude_none=True, exclude=_NO_OPTIONS)
        url = self.urls[0] if len(self.urls) == 1 else json.dumps(self.urls)
        return {
            "url": url,
            **{key: v if isinstance(v, str) else json.dumps(v) for key, v in given.items()},
            **self.options,
        }

    def describe(self) -> str:
        """Describe the input in a few words."""
        if self.format is None:
            return ", ".join(self.urls)
        said = f"{self.format} {self.path or ''}".rstrip()
        return f"{said}, a table" if self.static else said


class Stage(ConfigModel):
    """A transformation of data frames.

    `decode` and `watermark` apply to each input first. Then the function of `use` gets the
    inputs, in their order, and `options` as keywords; or `sql` queries them as views by name;
    or, with neither, it is the union of its inputs by column name.
    """

    from_: Names = Field(alias="from")
    use: Function | None = None
    sql: Text | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    #: The column of the event time, and how many seconds late a row may be.
    watermark: Watermark | None = None
    decode: Decode | None = None
    #: Whether it keeps state across batches; None: inferred from SQL and the watermark.
    stateful: bool | None = None
    #: When it raises for a row: fail the query, or write the row as a dead letter.
    errors: Literal["fail", "dead_letter"] = "fail"

    @field_serializer("use")
    def _name_function(self, use: Any) -> str | None:
        return None if use is None else function_name(use)

    def describe(self) -> str:
        """Describe the transformation in a few words."""
        if self.use is not None:
            return function_name(self.use)
        if self.sql is not None:
            return " ".join(self.sql.split())
        said = [f"union of {len(self.from_)}"] if len(self.from_) > 1 else []
        if self.decode is not None:
            said.append(f"decode {self.decode['format']}")
        if self.watermark is not None:
            said.append(f"watermark on {next(iter(self.watermark))}")
        return ", ".join(said)


class Sink(ConfigModel):
    """Where rows go: a stream, files, the console, or another Spark format."""

    from_: Text = Field(alias="from")
    url: Url | None = None
    #: A stream of dead letters.
    dead_letter: Url | None = None
    parquet: Text | None = None
    csv: Text | None = None
    json_: Text | None = Field(default=None, alias="json")
    xml: Text | None = None
    #: Fixed binary records, which `layout` describes.
    struct: Text | None = None
    layout: JsonValue | None = None
    #: Announce complete files in latest_data_info of the directory.
    announce: bool | None = None
    console: Literal[True] | None = None
    #: A format of Spark, or of a package that it loads.
    format: Text | None = None
    path: Text | None = None
    partition_by: Names | None = None
    mode: Literal["append", "update", "complete"] = "append"
    #: Further options of Spark's writer.
    options: Conf = Field(default_factory=dict)

    def targets(self) -> dict[SinkKind, str]:
        """Return the target keys that were given; there should be exactly one."""
        given: dict[SinkKind, str | None] = {
            "url": self.url,
            "dead_letter": self.dead_letter,
            "parquet": self.parquet,
            "csv": self.csv,
            "json": self.json_,
            "xml": self.xml,
            "struct": self.struct,
            "console": None if self.console is None else "",
            "format": self.format,
        }
        return {kind: target for kind, target in given.items() if target is not None}

    @property
    def kind(self) -> SinkKind:
        return next(iter(self.targets()))

    @property
    def target(self) -> str:
        """The URL or the directory; empty for the console."""
        if self.kind == "format":
            return self.path or ""
        return next(iter(self.targets().values()))

    @property
    def stream(self) -> str | None:
        """The URL of the stream that it writes, if it writes one."""
        if self.url is None or self.announce is None:
            return self.url or self.dead_letter
        between = "&" if "?" in self.url else "?"
        return f"{self.url}{between}announce={str(self.announce).lower()}"

    @property
    def writes_files(self) -> bool:
        return self.kind in _FILES

    def describe(self) -> str:
        """Describe the target in a few words."""
        if self.kind == "url":
            return self.target
        if self.kind == "format":
            return f"{self.format} {self.target}".rstrip()
        return f"{self.kind.replace('_', ' ')} {self.target}".rstrip()


class Restart(ConfigModel):
    """When a query that failed because of an outage is restarted."""

    initial: Delay = 1.0
    factor: float = Backoff().factor
    maximum: Delay = 60.0
    jitter: float = Backoff().jitter
    #: Restarts without a batch in between; None: unlimited.
    max_attempts: Annotated[int, Field(ge=1)] | None = 10

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self.backoff()
        return self

    def backoff(self) -> Backoff:
        return Backoff(
            initial=self.initial, factor=self.factor, maximum=self.maximum, jitter=self.jitter
        )


class Settings(ConfigModel):
    """How the queries of a pipeline run. The runner chooses what is not given."""

    trigger: SparkTrigger = Trigger()
    #: The directory for the checkpoints of the queries.
    checkpoint: Text | None = None
    #: When a query is restarted after an outage; without it, the run ends.
    restart: Annotated[Restart | None, Restarts] = None
    #: One Spark session runs all pipelines of a file, so these are the same for all of them.
    master: Text | None = None
    spark: Conf = Field(default_factory=dict)
    shuffle_partitions: int | None = Field(default=None, ge=1)

    @field_serializer("trigger")
    def _write_trigger(self, trigger: Trigger) -> str:
        if trigger.interval is None:
            return "available now"
        return spark_interval(trigger.interval)


_Part = TypeVar("_Part", Source, Stage, Sink, Settings)


@dataclass(frozen=True)
class Pipeline:
    """A directed graph of sources, stages and sinks, from a file or built in Python.

    Immutable: each call returns a new pipeline with the addition.

        Pipeline("storm-watch")
            .source("beams", url="fmq:/tmp/radar/iq")
            .stage("moments", from_="beams", use=moments)
            .sink("out", from_="moments", url="fmq:/tmp/radar/moments")

    A name may be used before it is defined: `plan` checks the whole.
    """

    name: str
    sources: Mapping[str, Source] = field(default_factory=dict)
    stages: Mapping[str, Stage] = field(default_factory=dict)
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    lines: Lines | None = field(default=None, compare=False, repr=False)

    def source(self, name: str, url: str | Sequence[str] | None = None, **options: Any) -> Pipeline:
        """Add streams to read, with the options of the source, as `startingOffsets="latest"`.

        With `format=` it is a source of another Spark format.

        :raises ConfigError: an option is unknown or its value does not fit, or the name is taken.
        """
        given = options if url is None else {"url": _url_or_list(url), **options}
        source = self._part(Source, ("sources", name), given)
        return replace(self, sources={**self.sources, name: source})

    def stage(
        self,
        name: str,
        *,
        from_: str | Sequence[str],
        use: str | Callable[..., Any] | None = None,
        sql: str | None = None,
        options: Mapping[str, Any] | None = None,
        watermark: Mapping[str, str | float] | None = None,
        decode: Mapping[str, JsonValue] | None = None,
        stateful: bool | None = None,
        errors: Literal["fail", "dead_letter"] = "fail",
    ) -> Pipeline:
        """Add a stage: `use` is a function, or names one as `module:function`.

        :raises ConfigError: a value does not fit, or the name is taken.
        """
        given = {
            "from": from_ if isinstance(from_, str) else list(from_),
            "use": use,
            "sql": sql,
            "options": dict(options or {}),
            "watermark": None if watermark is None else dict(watermark),
            "decode": None if decode is None else dict(decode),
            "stateful": stateful,
            "errors": errors,
        }
        stage = self._part(Stage, ("stages", name), given)
        return replace(self, stages={**self.stages, name: stage})

    def sink(self, name: str, *, from_: str, **target: Any) -> Pipeline:
        """Add a target: `url=`, `parquet=` and so on, as in a file.

        :raises ConfigError: a key is unknown or its value does not fit, or the name is taken.
        """
        sink = self._part(Sink, ("sinks", name), {"from": from_, **target})
        return replace(self, sinks={**self.sinks, name: sink})

    def with_settings(self, **settings: Any) -> Pipeline:
        """Set `trigger`, `checkpoint`, `restart`, `master`, `spark` or `shuffle_partitions`.

        :raises ConfigError: one is unknown or its value does not fit.
        """
        given = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        return replace(self, settings=self._part(Settings, ("settings",), {**given, **settings}))

    def takes_failures(self, sink: str) -> bool:
        """Tell whether a sink gets the dead letters of its source or stage."""
        wanted = self.sinks[sink]
        stage = self.stages.get(wanted.from_)
        node = stage or self.sources.get(wanted.from_)
        decode = None if node is None else node.decode
        is_kept = decode is not None and decode.get("on_error") == "dead_letter"
        is_kept |= stage is not None and stage.errors == "dead_letter"
        return is_kept and wanted.kind == "dead_letter"

    def is_static(self, name: str) -> bool:
        """Tell whether a source is a table, or a stage has only tables as inputs."""
        tables = {name for name, source in self.sources.items() if source.static}
        while tables and name not in tables:
            made = {node for node, one in self.stages.items() if tables.issuperset(one.from_)}
            if tables.issuperset(made):
                return False
            tables |= made
        return name in tables

    def streams_of(self, stage: Stage) -> list[str]:
        """Return the inputs of a stage that are streams."""
        return [name for name in stage.from_ if not self.is_static(name)]

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return the inputs of every node, by name."""
        return {
            **dict.fromkeys(self.sources, ()),
            **{name: stage.from_ for name, stage in self.stages.items()},
            **{name: (sink.from_,) for name, sink in self.sinks.items()},
        }

    def graph(self) -> Graph[str]:
        return Graph(self.inputs())

    def error(
        self,
        path: FieldPath,
        reason: str,
        *,
        hint: str | None = None,
        at_key: bool = False,
        within: tuple[str, int] | None = None,
    ) -> ConfigError:
        """Return an error about one field of this pipeline, with its line if known.

        :param within: the words of the value that are wrong, and how many equal ones precede them
        """
        if self.lines is None:
            dotted = dotted_path(path) or None
            return ConfigError(f"pipeline {self.name}", None, dotted, reason, hint=hint)
        return self.lines.error(path, reason, hint=hint, at_key=at_key, within=within)

    def _part(self, model: type[_Part], path: FieldPath, given: dict[str, Any]) -> _Part:
        if len(path) > 1:
            for section in ("sources", "stages", "sinks"):
                if path[1] in getattr(self, section):
                    raise self.error(path, f"the name is taken: it is in {section} already")
        try:
            return model.model_validate(given)
        except ValidationError as error:
            raise self._explain(model, path, given, error) from None

    def _explain(
        self,
        model: type[ConfigModel],
        path: FieldPath,
        given: dict[str, Any],
        error: ValidationError,
    ) -> ConfigError:
        first = error.errors(include_url=False, include_input=False)[0]
        loc = first["loc"]
        if isinstance(given.get(str(loc[0])), str):
            loc = loc[:1]  # one text that stands for a list of one
        place = (*path, *loc)
        if first["type"] == "extra_forbidden":
            known = sorted(part.alias or name for name, part in model.model_fields.items())
            hint = nearest(str(first["loc"][-1]), known, "known keys")
            return self.error(place, "unknown key", hint=hint)
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, PenstockError):
            return self.error(place, str(cause), hint=cause.hint)
        return self.error(place, first["msg"].replace("Input should", "should", 1))


def _url_or_list(url: str | Sequence[str]) -> str | list[str]:
    return url if isinstance(url, str) else list(url)


class Node(NamedTuple):
    """A source, stage or sink, identified across pipelines."""

    pipeline: str
    name: str

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.name}"


def streams_between(pipelines: Sequence[Pipeline]) -> list[tuple[Node, Node]]:
    """Return the pairs of a sink and a source that reads its stream, by URL or pattern."""
    written = [
        (sink.stream, Node(pipeline.name, name))
        for pipeline in pipelines
        for name, sink in pipeline.sinks.items()
        if sink.stream is not None
    ]
    return [
        (sink, Node(pipeline.name, name))
        for pipeline in pipelines
        for name, source in pipeline.sources.items()
        for stream, sink in written
        if any(is_named_by(stream, url) for url in source.urls)
    ]


def whole_graph(pipelines: Sequence[Pipeline]) -> Graph[Node]:
    """Return one graph of all pipelines, connected by their streams."""
    parents: dict[Node, list[Node]] = {
        Node(pipeline.name, name): [Node(pipeline.name, parent) for parent in above]
        for pipeline in pipelines
        for name, above in pipeline.inputs().items()
    }
    for sink, source in streams_between(pipelines):
        parents[source].append(sink)
    return Graph(parents)
