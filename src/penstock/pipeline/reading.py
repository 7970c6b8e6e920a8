"""How is a file of pipelines read?"""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field, model_validator

from penstock.core.config import ConfigModel, parse_config, read_text
from penstock.core.errors import ConfigError
from penstock.pipeline.checking import check
from penstock.pipeline.fields import Text  # noqa: TC001 - pydantic reads it at run time
from penstock.pipeline.model import Line, Lines, Path, Pipeline, Settings, Sink, Source, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["load_pipelines", "parse_pipelines"]

#: YAML 1.2.2, 9.1.2: at the start of a line this ends a document wherever it stands.
_NEXT_DOCUMENT = re.compile(r"^---(?=\s|\Z)", re.MULTILINE)
#: All but what ends a line for YAML.
_IN_LINES = re.compile("[^\r\n\x85\u2028\u2029]")


class _Description(ConfigModel):
    pipeline: Text
    sources: dict[str, Source]
    stages: dict[str, Stage] = Field(default_factory=dict)
    sinks: dict[str, Sink]
    settings: Settings = Field(default_factory=Settings)

    @model_validator(mode="before")
    @classmethod
    def _is_a_pipeline(cls, data: Any) -> Any:
        # Of a file that was meant for another command, one fault says more than all of them.
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
    """Read the pipelines of a YAML file, and check that all fits together.

    :raises ConfigError: the one thing that is wrong: what, and in which line.
    :raises ConfigErrors: several things are wrong.
    """
    return parse_pipelines(read_text(path), os.fspath(path))


def parse_pipelines(text: str, file: str = "<text>") -> list[Pipeline]:
    """Read pipelines from YAML text; `file` is what errors call it.

    A document is one pipeline or a list of them; `---` stands between documents.

    :raises ConfigError: the one thing that is wrong: what, and in which line.
    :raises ConfigErrors: several things are wrong.
    """
    pipelines = [pipeline for document in _documents(text) for pipeline in _read(document, file)]
    if not pipelines:
        raise ConfigError(file, None, None, "has no pipeline", hint="it starts with pipeline: NAME")
    check(pipelines)
    return pipelines


def _documents(text: str) -> Iterator[str]:
    """Cut the text, and keep each part in the lines where it stands."""
    starts = [0, *(match.end() for match in _NEXT_DOCUMENT.finditer(text)), len(text) + 3]
    for start, end in itertools.pairwise(starts):
        part = text[start : end - 3]
        if any(line.lstrip()[:1] not in {"", "#", "%"} for line in part.splitlines()):
            yield _IN_LINES.sub("", text[:start]) + part


def _read(document: str, file: str) -> Iterator[Pipeline]:
    found = parse_config(document, _Document, file).pipelines
    root = yaml.compose(document, Loader=yaml.SafeLoader)
    is_list = isinstance(root, yaml.SequenceNode)
    for index, (node, described) in enumerate(
        zip(root.value if is_list else [root], found, strict=True)
    ):
        lines = dict(_lines(node, (), node.start_mark.line + 1))
        yield Pipeline(
            described.pipeline,
            described.sources,
            described.stages,
            described.sinks,
            described.settings,
            Lines(file, lines, f"[{index}]" if is_list else ""),
        )


def _lines(node: yaml.Node, path: Path, key: int) -> Iterator[tuple[Path, Line]]:
    """Yield the lines of everything; it is known that the text is not too large or too deep."""
    yield path, Line(key, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _lines(value, (*path, name.value), name.start_mark.line + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _lines(value, (*path, index), value.start_mark.line + 1)
