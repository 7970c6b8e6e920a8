"""Do the options that a pipeline gives to sources, decoders and sinks fit them?

The same is found when they are opened; by then Spark has been started, and the line is forgotten.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pydantic import JsonValue

    from penstock.core.errors import ConfigError
    from penstock.pipeline.model import Pipeline, Sink, Source

__all__ = ["option_faults"]


def option_faults(pipeline: Pipeline) -> Iterator[ConfigError]:
    """Yield what is wrong, with its line. Nothing is opened."""
    for name, source in pipeline.sources.items():
        yield from _source(pipeline, name, source)
        yield from _decode(pipeline, "sources", name, source.decode)
    for name, stage in pipeline.stages.items():
        yield from _decode(pipeline, "stages", name, stage.decode)
    for name, sink in pipeline.sinks.items():
        yield from _sink(pipeline, name, sink)


def _source(pipeline: Pipeline, name: str, source: Source) -> Iterator[ConfigError]:
    from penstock.pipeline.options import SourceOptions, parse_spark_options  # noqa: PLC0415 - Arrow

    try:
        parse_spark_options(source.spark_options(), SourceOptions).check_stream()
    except InvalidOption as error:
        given = next((key for key in source.options if key.lower() == error.option.lower()), None)
        path = (error.option,) if given is None else ("options", given)
        yield pipeline.error(("sources", name, *path), error.reason, hint=_in_yaml(error.hint))


def _in_yaml(hint: str | None) -> str | None:
    """Say in the words of a file what is said in Python's."""
    return hint and re.sub(r'\.option\("(\w+)", "?([^")]*)"?\)', r"\1: \2", hint)


def _decode(
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


def _sink(pipeline: Pipeline, name: str, sink: Sink) -> Iterator[ConfigError]:
    if len(sink.targets()) != 1:
        return  # which is told already
    if sink.stream is not None:
        from penstock.pipeline.options import check_target  # noqa: PLC0415 - Arrow

        try:
            check_target(sink.stream)
        except InvalidOption as error:
            yield pipeline.error(("sinks", name, sink.kind), error.reason, hint=error.hint)
    if sink.writes_files:
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
