"""What is a pipeline: which sources, stages and sinks does it have, and where do they stand?"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from pydantic import Field, JsonValue, ValidationError, field_serializer

from penstock.core.config import ConfigModel
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.graph import Graph
from penstock.core.options import nearest
from penstock.pipeline.fields import (
    Bytes,
    Conf,
    Decode,
    Function,
    LogUrl,
    Names,
    Offsets,
    SparkTrigger,
    Text,
    Url,
    Urls,
    Watermark,
    function_name,
)
from penstock.pipeline.timing import Trigger, spark_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Lines", "Pipeline", "Settings", "Sink", "SinkKind", "Source", "Stage"]

SinkKind = Literal["url", "dead_letter", "parquet", "csv", "json", "console"]
_SINK_KINDS: tuple[SinkKind, ...] = ("url", "dead_letter", "parquet", "csv", "json", "console")
_FILES = frozenset({"parquet", "csv", "json"})


class Source(ConfigModel):
    """Streams that are read. The keys are the options of `format("penstock")`."""

    urls: Urls = Field(alias="url")
    starting_offsets: Offsets | None = Field(default=None, alias="startingOffsets")
    max_offsets_per_trigger: int | None = Field(default=None, alias="maxOffsetsPerTrigger", ge=1)
    max_bytes_per_trigger: Bytes | None = Field(default=None, alias="maxBytesPerTrigger")
    fail_on_data_loss: bool | None = Field(default=None, alias="failOnDataLoss")
    min_partitions: int | None = Field(default=None, alias="minPartitions", ge=1)
    type: int | None = None
    hold: Text | None = None
    #: A log through which a stream goes that cannot be read again.
    stage: LogUrl | None = None
    #: With `failOnDataLoss: false`, a stream that is told of every range that was lost.
    loss_url: Url | None = Field(default=None, alias="lossUrl")
    #: How payloads become columns; not an option of the source.
    decode: Decode | None = None
    #: Further options of the source, as Spark takes them.
    options: Conf = Field(default_factory=dict)

    @property
    def goes_on_after_loss(self) -> bool:
        """Whether what is gone is counted, and does not end the query."""
        return self.spark_options().get("failOnDataLoss", "true").strip().lower() == "false"

    def spark_options(self) -> dict[str, str]:
        """Return what `.options(…)` of the source takes."""
        given = self.model_dump(
            by_alias=True, exclude_none=True, exclude={"urls", "decode", "options"}
        )
        url = self.urls[0] if len(self.urls) == 1 else json.dumps(self.urls)
        return {
            "url": url,
            **{key: v if isinstance(v, str) else json.dumps(v) for key, v in given.items()},
            **self.options,
        }


class Stage(ConfigModel):
    """What is done to data frames.

    `decode` and `watermark` are done to each input first. Then the function of `use` gets the
    inputs, in their order, and `options` as keywords; or `sql` finds them as views by their names;
    or, with neither, they are united by the names of their columns.
    """

    from_: Names = Field(alias="from")
    use: Function | None = None
    sql: Text | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    #: The column of the event time, and how many seconds late a row may be.
    watermark: Watermark | None = None
    decode: Decode | None = None
    #: Whether it remembers rows of earlier batches; if it is not said, SQL and a watermark tell.
    stateful: bool | None = None

    @field_serializer("use")
    def _name_function(self, use: Any) -> str | None:
        return None if use is None else function_name(use)

    def describe(self) -> str:
        """Say in a few words what it does."""
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
    """Where rows go: to one of a stream, files, or the console."""

    from_: Text = Field(alias="from")
    url: Url | None = None
    #: A stream of the rows as dead letters.
    dead_letter: Url | None = None
    parquet: Text | None = None
    csv: Text | None = None
    json_: Text | None = Field(default=None, alias="json")
    console: Literal[True] | None = None
    partition_by: Names | None = None
    mode: Literal["append", "update", "complete"] = "append"
    #: Further options of Spark's writer.
    options: Conf = Field(default_factory=dict)

    def targets(self) -> dict[SinkKind, str]:
        """Return what was given of the kinds of which there should be exactly one."""
        given: dict[SinkKind, str | None] = {
            "url": self.url,
            "dead_letter": self.dead_letter,
            "parquet": self.parquet,
            "csv": self.csv,
            "json": self.json_,
            "console": None if self.console is None else "",
        }
        return {kind: target for kind, target in given.items() if target is not None}

    @property
    def kind(self) -> SinkKind:
        return next(iter(self.targets()))

    @property
    def target(self) -> str:
        """The URL or the directory; empty for the console."""
        return next(iter(self.targets().values()))

    @property
    def stream(self) -> str | None:
        """The URL of the stream that it writes, if it writes one."""
        return self.url or self.dead_letter

    @property
    def writes_files(self) -> bool:
        return self.kind in _FILES

    def describe(self) -> str:
        """Say in a few words where it writes."""
        if self.kind == "url":
            return self.target
        return f"{self.kind.replace('_', ' ')} {self.target}".rstrip()


class Settings(ConfigModel):
    """How the queries of a pipeline run. What is not given is for the runner to choose."""

    trigger: SparkTrigger = Trigger()
    #: A directory below which each query keeps its progress.
    checkpoint: Text | None = None
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

Path = tuple[str | int, ...]


class Line(NamedTuple):
    """Where something stands in a file."""

    key: int
    value: int


@dataclass(frozen=True, slots=True)
class Lines:
    """Where a pipeline was described."""

    file: str
    #: By path, such as ("stages", "strong", "from", 0).
    by_path: Mapping[Path, Line] = field(default_factory=dict)
    #: What stands before the path when it is named, in a file that has a list of pipelines.
    prefix: str = ""

    def find(self, path: Path, *, at_key: bool = False) -> int | None:
        """Return the line of a path, or of the innermost thing around it that has one."""
        for end in range(len(path), -1, -1):
            if (line := self.by_path.get(path[:end])) is not None:
                return line.key if at_key or end < len(path) else line.value
        return None


@dataclass(frozen=True)
class Pipeline:
    """A directed graph of sources, stages and sinks, from a file or put together in Python.

    Nothing changes: each call returns the pipeline with one thing more.

        Pipeline("storm-watch")
            .source("beams", url="fmq:/tmp/radar/iq")
            .stage("moments", from_="beams", use=moments)
            .sink("out", from_="moments", url="fmq:/tmp/radar/moments")

    A name may be used before it is given: that all fit together is checked by `plan`.
    """

    name: str
    sources: Mapping[str, Source] = field(default_factory=dict)
    stages: Mapping[str, Stage] = field(default_factory=dict)
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)
    lines: Lines | None = field(default=None, compare=False, repr=False)

    def source(self, name: str, url: str | Sequence[str], **options: Any) -> Pipeline:
        """Add streams to read, with the options of the source, as `startingOffsets="latest"`.

        :raises ConfigError: an option is unknown or its value does not fit, or the name is taken.
        """
        urls = url if isinstance(url, str) else list(url)
        source = self._part(Source, ("sources", name), {"url": urls, **options})
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
        }
        stage = self._part(Stage, ("stages", name), given)
        return replace(self, stages={**self.stages, name: stage})

    def sink(self, name: str, *, from_: str, **target: Any) -> Pipeline:
        """Add a place to write to: `url=`, `parquet=` and so on, as in a file.

        :raises ConfigError: a key is unknown or its value does not fit, or the name is taken.
        """
        sink = self._part(Sink, ("sinks", name), {"from": from_, **target})
        return replace(self, sinks={**self.sinks, name: sink})

    def with_settings(self, **settings: Any) -> Pipeline:
        """Set `trigger`, `checkpoint`, `master`, `spark` or `shuffle_partitions`.

        :raises ConfigError: one is unknown or its value does not fit.
        """
        given = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        return replace(self, settings=self._part(Settings, ("settings",), {**given, **settings}))

    def takes_failures(self, sink: str) -> bool:
        """Tell whether a sink gets the rows that its source or stage could not decode."""
        wanted = self.sinks[sink]
        node = self.stages.get(wanted.from_) or self.sources.get(wanted.from_)
        decode = None if node is None else node.decode
        is_kept = decode is not None and decode.get("on_error") == "dead_letter"
        return is_kept and wanted.kind == "dead_letter"

    def inputs(self) -> dict[str, tuple[str, ...]]:
        """Return every name, and the names that it takes its rows from."""
        return {
            **dict.fromkeys(self.sources, ()),
            **{name: stage.from_ for name, stage in self.stages.items()},
            **{name: (sink.from_,) for name, sink in self.sinks.items()},
        }

    def graph(self) -> Graph[str]:
        return Graph(self.inputs())

    def error(
        self, path: Path, reason: str, *, hint: str | None = None, at_key: bool = False
    ) -> ConfigError:
        """Return an error about one place of this pipeline, with its line if it has one."""
        dotted = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)
        if self.lines is None:
            return ConfigError(
                f"pipeline {self.name}", None, dotted.removeprefix(".") or None, reason, hint=hint
            )
        line = self.lines.find(path, at_key=at_key)
        named = (self.lines.prefix + dotted).removeprefix(".") or None
        return ConfigError(self.lines.file, line, named, reason, hint=hint)

    def _part(self, model: type[_Part], path: Path, given: dict[str, Any]) -> _Part:
        if len(path) > 1:
            for section in ("sources", "stages", "sinks"):
                if path[1] in getattr(self, section):
                    raise self.error(path, f"the name is taken: it is in {section} already")
        try:
            return model.model_validate(given)
        except ValidationError as error:
            raise self._explain(model, path, given, error) from None

    def _explain(
        self, model: type[ConfigModel], path: Path, given: dict[str, Any], error: ValidationError
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
