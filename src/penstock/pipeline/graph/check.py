"""Do the parts of pipelines fit together, and are their options valid?

No stream is opened. Opening sources and sinks finds the same faults, but only after Spark has
started, and without the line in the file.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.dead_letter import KEEPS_REASONS, NO_REASONS
from penstock.core.endpoints import cannot_carry, identity
from penstock.core.errors import ConfigErrors, InvalidOption, PenstockError
from penstock.core.functions import FunctionNotFound, find_function
from penstock.core.options import nearest
from penstock.pipeline.graph.model import whole_graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pydantic import JsonValue

    from penstock.core.config import FieldPath
    from penstock.core.errors import ConfigError
    from penstock.pipeline.graph.model import Pipeline, Sink, Source, Stage

__all__ = [
    "check",
    "check_functions",
    "python_folders",
    "raise_all",
    "warnings",
]

_PIPELINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
#: A view name that SQL accepts without quotes.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECTIONS = ("sources", "stages", "sinks")
#: Keys that a source with `format` may have.
_OF_FORMATS = frozenset({"format", "path", "schema_", "static", "decode", "options"})
_OR_FORMAT = "or give format, for another source of Spark's"


def check(pipelines: Sequence[Pipeline]) -> None:
    """Check pipelines that run together, as those of a file do.

    :raises ConfigError: there is exactly one fault.
    :raises ConfigErrors: there are several, in the order of the file.
    """
    faults = [fault for pipeline in pipelines for fault in _faults(pipeline)]
    # Relations between pipelines are checked only if each of them is valid.
    raise_all(faults or list(_faults_between(pipelines)))


def check_functions(pipelines: Sequence[Pipeline], *, are_changed: bool = False) -> None:
    """Check that the functions of stages exist, without importing them.

    :param are_changed: their files may have changed since they were imported
    :raises ConfigError: one is missing.
    :raises ConfigErrors: several are missing.
    """
    python_folders(pipelines)
    faults = []
    for pipeline in pipelines:
        for name, stage in pipeline.stages.items():
            try:
                if isinstance(stage.use, str):
                    find_function(stage.use, is_changed=are_changed)
            except FunctionNotFound as error:
                path = ("stages", name, "use")
                faults.append(pipeline.error(path, str(error), hint=error.hint))
    raise_all(faults)


def python_folders(pipelines: Iterable[Pipeline]) -> list[str]:
    """Add the folders of the files and the working directory to `sys.path`; return them."""
    files = {Path(p.lines.file).absolute().parent for p in pipelines if p.lines is not None}
    folders = [str(folder) for folder in (*sorted(files), Path.cwd()) if folder.is_dir()]
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return folders


def raise_all(faults: Sequence[ConfigError]) -> None:
    """Raise the faults, if there are any.

    :raises ConfigError: there is exactly one.
    :raises ConfigErrors: there are several, in the order of the file.
    """
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ConfigErrors(sorted(faults, key=lambda fault: fault.line or 0))


def warnings(pipelines: Sequence[Pipeline]) -> list[str]:
    """Return warnings about sources and stages that nothing uses."""
    return [
        str(pipeline.error((section, name), f"nothing uses it, so it {effect}", at_key=True))
        for pipeline in pipelines
        for graph in (pipeline.graph(),)
        for section, effect in (("sources", "is not read"), ("stages", "does not run"))
        for name in getattr(pipeline, section)
        if not graph.children(name)
    ]


def _faults(pipeline: Pipeline) -> Iterator[ConfigError]:
    if not _PIPELINE_NAME.fullmatch(pipeline.name):
        yield pipeline.error(
            ("pipeline",),
            "should have letters, digits, '_', '-' and '.' only",
            hint="it names the directories of its queries",
        )
    for section in ("sources", "sinks"):
        if not getattr(pipeline, section):
            yield pipeline.error((section,), "a pipeline needs at least one", at_key=True)
    yield from _names(pipeline)
    for name, source in pipeline.sources.items():
        yield from _source(pipeline, name, source)
    for name, stage in pipeline.stages.items():
        yield from _inputs(pipeline, ("stages", name), stage.from_)
        yield from _stage(pipeline, name, stage)
    for name, sink in pipeline.sinks.items():
        yield from _inputs(pipeline, ("sinks", name), (sink.from_,))
        yield from _sink(pipeline, name, sink)
    yield from _option_faults(pipeline)
    # A name used for two things can look like a cycle that is not in the file.
    is_plain = len(pipeline.inputs()) == sum(len(getattr(pipeline, s)) for s in _SECTIONS)
    for cycle in pipeline.graph().cycles() if is_plain else ():
        path = ("stages", cycle[0], "from")
        if len(cycle) == 1:
            yield pipeline.error(path, "it takes its rows from itself")
        else:
            circle = " -> ".join([*cycle, cycle[0]])
            yield pipeline.error(path, f"goes round in a circle: {circle}")


def _names(pipeline: Pipeline) -> Iterator[ConfigError]:
    taken: dict[str, tuple[str, str]] = {}
    for section in _SECTIONS:
        for name in getattr(pipeline, section):
            if not _NAME.fullmatch(name):
                yield pipeline.error(
                    (section, name),
                    "should be letters, digits and '_', and start with no digit",
                    hint=f"it is a name in SQL: {_as_name(name)}",
                    at_key=True,
                )
            where, other = taken.setdefault(name.lower(), (section, name))
            if (where, other) == (section, name):
                continue
            reason = f"the name is taken: {where}.{other}{_in_line(pipeline, (where, other))}"
            if other != name:
                reason += ", and SQL does not tell upper from lower case"
            yield pipeline.error((section, name), reason, at_key=True)


def _as_name(text: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9_]+", "_", text)
    return plain if _NAME.fullmatch(plain) else f"_{plain}"


def _in_line(pipeline: Pipeline, path: FieldPath) -> str:
    line = None if pipeline.lines is None else pipeline.lines.find(path, at_key=True)
    return "" if line is None else f" in line {line}"


def _inputs(
    pipeline: Pipeline, path: tuple[str, str], names: tuple[str, ...]
) -> Iterator[ConfigError]:
    known = [*pipeline.sources, *pipeline.stages]
    for index, name in enumerate(names):
        where = (*path, "from", index) if len(names) > 1 else (*path, "from")
        if name in pipeline.sinks and name not in known:
            yield pipeline.error(
                where,
                f"{name} is a sink, and no rows come out of a sink",
                hint=f"take them from {pipeline.sinks[name].from_}, as it does",
            )
        elif name not in known:
            yield pipeline.error(
                where,
                f"there is no source or stage {name}",
                hint=nearest(name, (other for other in known if other != path[1]), "there are"),
            )
        elif name in names[:index]:
            yield pipeline.error(where, f"{name} stands here twice")


def _source(pipeline: Pipeline, name: str, source: Source) -> Iterator[ConfigError]:
    path = ("sources", name)
    if source.format is None:
        for key in ("path", "schema_"):
            if getattr(source, key) is not None:
                named = key.rstrip("_")
                yield pipeline.error((*path, named), "is for a source with format", at_key=True)
        if not source.urls:
            yield pipeline.error((*path, "url"), "is required", hint=_OR_FORMAT, at_key=True)
        elif source.static and source.hold is not None:
            yield pipeline.error((*path, "hold"), "nothing is held for a table", at_key=True)
        return
    for key in source.model_fields_set - _OF_FORMATS:
        named = type(source).model_fields[key].alias or key
        reason = f"is for url; this source has format {source.format}"
        hint = "give what the format takes as options" if key != "urls" else "leave one out"
        yield pipeline.error((*path, named), reason, hint=hint, at_key=True)
    if source.reads_files and source.path is None and "path" not in source.options:
        hint = "the directory that the files are in"
        yield pipeline.error((*path, "path"), "is required", hint=hint, at_key=True)
    if source.needs_schema and source.schema_ is None and not source.static:
        yield pipeline.error(
            (*path, "schema"),
            "is required: files that come later should have the same columns",
            hint='as in schema: "id BIGINT, name STRING"; or static: true, for a table',
            at_key=True,
        )


def _stage(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[ConfigError]:
    path = ("stages", name)
    yield from _stage_errors(pipeline, name, stage)
    if stage.use is not None and stage.sql is not None:
        yield pipeline.error(
            path, "has both use and sql", hint="make two stages of it", at_key=True
        )
    elif len(stage.from_) == 1 and not any((stage.use, stage.sql, stage.decode, stage.watermark)):
        yield pipeline.error(
            path,
            "does nothing",
            hint="give it use, sql, decode, watermark, or several inputs to unite",
            at_key=True,
        )
    if stage.options and stage.use is None:
        yield pipeline.error((*path, "options"), "only a function (use) takes options", at_key=True)
    for view in stage.from_ if stage.sql is not None else ():
        if not re.search(rf"(?<!\w){re.escape(view)}(?!\w)", stage.sql or "", re.IGNORECASE):
            yield pipeline.error(
                (*path, "sql"),
                f"does not mention {view}, from which the stage takes its rows",
                hint=f"the view is called {view}, as its source or stage is",
            )


def _stage_errors(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[ConfigError]:
    """Yield why a stage cannot have `errors: dead_letter`."""
    if stage.errors != "dead_letter":
        return
    path = ("stages", name, "errors")
    is_joined = len(pipeline.streams_of(stage)) > 1
    if stage.use is None and stage.sql is None:
        yield pipeline.error(
            path, "is for use and sql", hint="decode has on_error: dead_letter", at_key=True
        )
    elif stage.watermark is not None or stage.stateful or is_joined:
        what = "joins several streams" if is_joined else "keeps state"
        yield pipeline.error(
            path,
            f"a row is tried by itself, and this stage {what}",
            hint="let a stage of its own do what may raise",
            at_key=True,
        )
    takers = {sink.from_ for sink in pipeline.sinks.values() if sink.dead_letter is not None}
    if name not in takers:
        yield pipeline.error(
            path,
            "no sink takes its dead letters, so they would be lost",
            hint=f"add one, {{from: {name}, dead_letter: URL}}",
        )


def _sink(pipeline: Pipeline, name: str, sink: Sink) -> Iterator[ConfigError]:
    path = ("sinks", name)
    kinds = list(sink.targets())
    if len(kinds) != 1:
        yield pipeline.error(
            path,
            f"has {' and '.join(kinds)}: a sink writes to one place"
            if kinds
            else "does not say where it writes",
            hint="make a sink of each"
            if kinds
            else "give one of url, dead_letter, parquet, csv, json, xml, struct, console, format",
            at_key=True,
        )
        return
    if sink.path is not None and sink.kind != "format":
        yield pipeline.error(
            (*path, "path"), f"is for format; this sink has {sink.kind}", at_key=True
        )
    if sink.from_ in pipeline.inputs() and pipeline.is_static(sink.from_):
        yield pipeline.error(
            (*path, "from"),
            f"{sink.from_} is a table, and no rows come of it by themselves",
            hint="join it with a stream",
        )
    writes_columns = (sink.writes_files and sink.kind != "struct") or sink.kind == "format"
    if sink.partition_by is not None and not writes_columns:
        yield pipeline.error(
            (*path, "partition_by"),
            f"is for files; this sink has {sink.kind}",
            at_key=True,
        )
    if (sink.layout is None) == (sink.kind == "struct"):
        yield pipeline.error(
            (*path, "layout"),
            "is missing: it says what a record is"
            if sink.layout is None
            else f"is for struct; this sink has {sink.kind}",
            hint="as in layout: float azimuth; uint16_t gates;",
            at_key=True,
        )
    if sink.announce is not None and not (sink.writes_files or sink.url is not None):
        yield pipeline.error(
            (*path, "announce"), f"is for files; this sink has {sink.kind}", at_key=True
        )
    if sink.mode != "append" and sink.writes_files:
        yield pipeline.error(
            (*path, "mode"), f"{sink.kind} files can only be appended to", hint="mode: append"
        )


def _faults_between(pipelines: Sequence[Pipeline]) -> Iterator[ConfigError]:
    by_name: dict[str, Pipeline] = {}
    for pipeline in pipelines:
        if by_name.setdefault(pipeline.name, pipeline) is not pipeline:
            yield pipeline.error(
                ("pipeline",), f"there is another pipeline {pipeline.name} in this file"
            )
    yield from _same_places(pipelines)
    yield from _same_holds(pipelines)
    yield from _session(pipelines)
    if len(by_name) < len(pipelines):
        return
    for cycle in whole_graph(pipelines).cycles():
        first = next(n for n in cycle if n.name in by_name[n.pipeline].sources)
        start = cycle.index(first)
        circle = " -> ".join(str(n) for n in [*cycle[start:], *cycle[:start], first])
        yield by_name[first.pipeline].error(
            ("sources", first.name, "url"), f"goes round in a circle through streams: {circle}"
        )


def _same_places(pipelines: Sequence[Pipeline]) -> Iterator[ConfigError]:
    taken: dict[str, tuple[Pipeline, FieldPath]] = {}
    for pipeline, path, where in _places(pipelines):
        first, other = taken.setdefault(where, (pipeline, path))
        if (first, other) != (pipeline, path):
            named = ".".join(str(part) for part in other[:2])
            if first is not pipeline:
                named += f" of {first.name}"
            yield pipeline.error(path, f"{named}{_in_line(first, other)} writes to the same place")


def _same_holds(pipelines: Sequence[Pipeline]) -> Iterator[ConfigError]:
    held: dict[tuple[str, str], tuple[Pipeline, str]] = {}
    for pipeline in pipelines:
        for name, source in pipeline.sources.items():
            for url in source.urls if source.hold is not None else ():
                key = (str(identity(url)), str(source.hold))
                first, other = held.setdefault(key, (pipeline, name))
                if (first, other) != (pipeline, name):
                    yield pipeline.error(
                        ("sources", name, "hold"),
                        f"sources.{other} of {first.name} holds {url} by this name",
                        hint="give each a name of its own; a writer may hold for several",
                    )


def _places(pipelines: Sequence[Pipeline]) -> Iterator[tuple[Pipeline, FieldPath, str]]:
    for pipeline in pipelines:
        for name, source in pipeline.sources.items():
            if source.stage is not None:
                yield pipeline, ("sources", name, "stage"), str(identity(source.stage))
        for name, sink in pipeline.sinks.items():
            path = ("sinks", name, sink.kind)
            if sink.stream is not None:
                yield pipeline, path, str(identity(sink.stream))
            elif sink.writes_files or (sink.kind == "format" and sink.path is not None):
                where = "path" if sink.kind == "format" else sink.kind
                yield pipeline, ("sinks", name, where), f"files {_directory(sink.target)}"


def _directory(text: str) -> str:
    path = re.sub(r"^file:(//(?=/))?", "", text)
    # Resolve links: a query has one note per directory, so a second sink's batch would be skipped.
    return path if re.match(r"[a-z][a-z0-9+.-]*:", path) else os.path.realpath(path)


def _session(pipelines: Sequence[Pipeline]) -> Iterator[ConfigError]:
    set_by: dict[str, tuple[object, Pipeline]] = {}
    for pipeline in pipelines:
        settings = pipeline.settings
        given: dict[FieldPath, object] = {
            ("settings", "master"): settings.master,
            ("settings", "shuffle_partitions"): settings.shuffle_partitions,
            **{("settings", "spark", key): value for key, value in settings.spark.items()},
        }
        for path, value in given.items():
            if value is None:
                continue
            known, other = set_by.setdefault(str(path[-1]), (value, pipeline))
            if known != value:
                yield pipeline.error(
                    path,
                    f"{other.name} has {known}: one Spark session runs all pipelines of a file",
                )


def _option_faults(pipeline: Pipeline) -> Iterator[ConfigError]:
    """Yield the faults of options, with their lines, without opening a stream."""
    for name, source in pipeline.sources.items():
        yield from _source_options(pipeline, name, source)
        yield from _decode_options(pipeline, "sources", name, source.decode)
    for name, stage in pipeline.stages.items():
        yield from _decode_options(pipeline, "stages", name, stage.decode)
    for name, sink in pipeline.sinks.items():
        yield from _sink_options(pipeline, name, sink)


def _source_options(pipeline: Pipeline, name: str, source: Source) -> Iterator[ConfigError]:
    if source.format is not None or not source.urls:
        return  # they are Spark's; or it is told already
    from penstock.pipeline.source.options import SourceOptions, parse_spark_options  # noqa: PLC0415 - Arrow

    try:
        asked = parse_spark_options(source.spark_options(), SourceOptions)
        if source.static:
            asked.check_table()
        else:
            asked.check_stream()
    except InvalidOption as error:
        key = next((one for one in source.options if one.lower() == error.option.lower()), None)
        path = (error.option,) if key is None else ("options", key)
        yield pipeline.error(("sources", name, *path), error.reason, hint=_in_yaml(error.hint))


def _in_yaml(hint: str | None) -> str | None:
    """Return a hint with `.option("name", value)` written as YAML."""
    return hint and re.sub(r'\.option\("(\w+)", "?([^")]*)"?\)', r"\1: \2", hint)


def _decode_options(
    pipeline: Pipeline, section: str, name: str, decode: Mapping[str, JsonValue] | None
) -> Iterator[ConfigError]:
    if decode is None:
        return
    from penstock.core.decoding import InvalidDecoding, parse_decoding  # noqa: PLC0415 - Arrow

    try:
        chosen = parse_decoding(decode)
    except InvalidDecoding as error:
        yield pipeline.error((section, name, "decode", *error.path), error.reason, hint=error.hint)
        return
    takers = {sink.from_ for sink in pipeline.sinks.values() if sink.dead_letter is not None}
    if chosen.on_error == "dead_letter" and name not in takers and pipeline.graph().children(name):
        yield pipeline.error(
            (section, name, "decode", "on_error"),
            "no sink takes its dead letters, so they would be lost",
            hint=f"add one, {{from: {name}, dead_letter: URL}}, or on_error: skip, to count them",
        )


def _sink_options(pipeline: Pipeline, name: str, sink: Sink) -> Iterator[ConfigError]:
    if len(sink.targets()) != 1:
        return  # which is told already
    if sink.stream is not None:
        from penstock.pipeline.source.options import check_target  # noqa: PLC0415 - Arrow

        try:
            check_target(sink.stream)
        except InvalidOption as error:
            yield pipeline.error(("sinks", name, sink.kind), error.reason, hint=error.hint)
    if sink.dead_letter is not None and _drops_reasons(sink.dead_letter):
        yield pipeline.error(("sinks", name, "dead_letter"), NO_REASONS, hint=KEEPS_REASONS)
    if sink.writes_files or sink.kind == "format":
        return  # they are Spark's
    for key in sink.options:
        if sink.stream is None:
            yield pipeline.error(("sinks", name, "options", key), "the console has no options")
        elif key != "staging":
            yield pipeline.error(
                ("sinks", name, "options", key),
                "there is no such option of a stream",
                hint="there is staging; what is about the stream stands in its URL",
            )


def _drops_reasons(url: str) -> bool:
    """Tell whether a stream is known not to store attributes; the runner asks the stream itself."""
    try:
        return "attributes" in cannot_carry(url)
    except PenstockError:  # opening it will raise the error
        return False
