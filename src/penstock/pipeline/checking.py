"""Do the parts of pipelines fit together?"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from penstock.core.config import ConfigErrors
from penstock.core.endpoints import identity
from penstock.core.options import nearest
from penstock.pipeline.links import whole_graph
from penstock.pipeline.option_faults import option_faults

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.core.errors import ConfigError
    from penstock.pipeline.model import Path, Pipeline, Sink, Stage

__all__ = ["check", "warnings"]

_PIPELINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
#: What SQL takes as the name of a view without quotes.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECTIONS = ("sources", "stages", "sinks")


def check(pipelines: Sequence[Pipeline]) -> None:
    """Check pipelines that run together, as those of a file do.

    :raises ConfigError: the one thing that is wrong.
    :raises ConfigErrors: several are, in the order of the file.
    """
    faults = [fault for pipeline in pipelines for fault in _faults(pipeline)]
    # What several pipelines are to each other can only be told of sound ones.
    faults = faults or list(_faults_between(pipelines))
    if len(faults) == 1:
        raise faults[0]
    if faults:
        raise ConfigErrors(sorted(faults, key=lambda fault: fault.line or 0))


def warnings(pipelines: Sequence[Pipeline]) -> list[str]:
    """Say what is probably not meant, though it can run."""
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
    for name, stage in pipeline.stages.items():
        yield from _inputs(pipeline, ("stages", name), stage.from_)
        yield from _stage(pipeline, name, stage)
    for name, sink in pipeline.sinks.items():
        yield from _inputs(pipeline, ("sinks", name), (sink.from_,))
        yield from _sink(pipeline, name, sink)
    yield from option_faults(pipeline)
    # A name that stands for two things can make a circle that nobody wrote.
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


def _in_line(pipeline: Pipeline, path: Path) -> str:
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


def _stage(pipeline: Pipeline, name: str, stage: Stage) -> Iterator[ConfigError]:
    path = ("stages", name)
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
            else "give one of url, dead_letter, parquet, csv, json, console",
            at_key=True,
        )
        return
    if sink.partition_by is not None and not sink.writes_files:
        yield pipeline.error(
            (*path, "partition_by"), f"is for files; this sink has {sink.kind}", at_key=True
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
    taken: dict[str, tuple[Pipeline, Path]] = {}
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


def _places(pipelines: Sequence[Pipeline]) -> Iterator[tuple[Pipeline, Path, str]]:
    for pipeline in pipelines:
        for name, source in pipeline.sources.items():
            if source.stage is not None:
                yield pipeline, ("sources", name, "stage"), str(identity(source.stage))
        for name, sink in pipeline.sinks.items():
            path = ("sinks", name, sink.kind)
            if sink.stream is not None:
                yield pipeline, path, str(identity(sink.stream))
            elif sink.writes_files:
                yield pipeline, path, f"files {_directory(sink.target)}"


def _directory(text: str) -> str:
    path = re.sub(r"^file:(//(?=/))?", "", text)
    # With links followed: files have one note for a query, and what two sinks write is skipped.
    return path if re.match(r"[a-z][a-z0-9+.-]*:", path) else os.path.realpath(path)


def _session(pipelines: Sequence[Pipeline]) -> Iterator[ConfigError]:
    set_by: dict[str, tuple[object, Pipeline]] = {}
    for pipeline in pipelines:
        settings = pipeline.settings
        given: dict[Path, object] = {
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
