"""How is a YAML file read into a model, and which line of it is wrong?"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from penstock.core.endpoints import endpoint_of
from penstock.core.errors import ConfigError, ConfigErrors, InvalidURL, PenstockError, UnknownScheme
from penstock.core.options import nearest
from penstock.core.redaction import remember
from penstock.core.url import URL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic_core import ErrorDetails

__all__ = [
    "ConfigModel",
    "FieldPath",
    "Line",
    "Lines",
    "Names",
    "Text",
    "Url",
    "WrongField",
    "dotted_path",
    "is_function_name",
    "line_of",
    "listed",
    "load_config",
    "parse_config",
    "parse_with_lines",
    "read_text",
    "url_text",
]

# A configuration is written by hand. Beyond these it is a mistake, or an attack by aliases of
# aliases, which are counted as often as they are used.
_LARGEST_BYTES = 1 << 20
_DEEPEST = 50
_MOST_NODES = 100_000
_MOST_FILES = 100

#: Folders, separated by colons, from which files may be included beside the file's own.
_INCLUDE_FROM = "PENSTOCK_INCLUDE"

_UNREADABLE = "give the path of a YAML file that you may read"


class ConfigModel(BaseModel):
    """Base of all configuration models: immutable, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _tell_known_keys(cls, data: Any, info: ValidationInfo) -> Any:
        # Pydantic reports an unknown key, but not its model: suggestions come from the model that
        # validated this very mapping.
        if isinstance(info.context, _KnownKeys):
            info.context.add(
                data, (field.alias or name for name, field in cls.model_fields.items())
            )
        return data


_Model = TypeVar("_Model", bound=ConfigModel)


def load_config(path: str | os.PathLike[str], model: type[_Model]) -> _Model:
    """Read a YAML file into a model.

    :raises ConfigError: the file cannot be read, or `parse_config` refuses its text
    """
    return parse_config(read_text(path), model, os.fspath(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Read the text of a configuration file.

    :raises ConfigError: it cannot be read, is too large, or is no text
    """
    file = os.fspath(path)
    try:
        with Path(file).open("rb") as stream:
            # One byte more than allowed shows that there is more, however much there is.
            data = stream.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            file, None, None, f"cannot be read: {error.strerror}", hint=_UNREADABLE
        ) from error
    _refuse_large(file, len(data))  # before decoding: the cut may go through a character
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(file, line, None, "is not UTF-8 text") from None
    return text


def line_of(file: str | os.PathLike[str], path: tuple[str | int, ...]) -> int | None:
    """Return the line of a value in a readable YAML file, for errors found later."""
    tree = _Tree(os.fspath(file))
    tree.build(read_text(file))
    lines = tree.lines.get(path)
    return None if lines is None else lines.value


def parse_config(text: str, model: type[_Model], file: str = "<text>") -> _Model:
    """Read YAML text into a model; `file` is its name in errors.

    Values follow YAML 1.2: `yes`, `on`, `12:30` and dates are text, as the author wrote them.
    Keys are text. `${NAME}` in a text is replaced by that environment variable,
    `${NAME:-default}` by the default where it is unset or empty, and `$${` stands for `${` itself.
    `<<: *name` merges the keys of the mapping with the anchor `&name`. Empty text is an empty
    mapping.

    :raises ConfigError: one fault, with its line
    :raises ConfigErrors: several values do not fit the model
    """
    return parse_with_lines(text, model, file)[0]


def parse_with_lines(
    text: str, model: type[_Model], file: str = "<text>", *, sections: Sequence[str] = ()
) -> tuple[_Model, Lines]:
    """Read YAML text as `parse_config` does, and return the line of every value, too.

    :param sections: of a description, or of each in a list, that may have `include` (files that
        it overrides) and `templates`: in these sections an entry with `extends: NAME` inherits
        the values of the template
    :raises ConfigError: one fault, with its line
    :raises ConfigErrors: several values do not fit the model
    """
    _refuse_large(file, len(text.encode("utf-8", "surrogatepass")))
    tree = _Tree(file)
    tree.build(text, sections)
    known = _KnownKeys()
    lines = Lines(file, tree.lines)
    try:
        return model.model_validate(tree.data, context=known), lines
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    # The members of a union each have their say about one field: that is one fault.
    faults: dict[tuple[str, int, str], list[_Fault]] = {}
    for fault in (_explain(detail, tree, known) for detail in details):
        faults.setdefault((fault.file, fault.line, fault.field), []).append(fault)
    errors = [
        ConfigError(
            at,
            line,
            field or None,
            ", or ".join(dict.fromkeys(fault.reason for fault in group)),
            hint=group[0].hint,
        )
        for (at, line, field), group in sorted(faults.items(), key=lambda item: item[0])
    ]
    raise errors[0] if len(errors) == 1 else ConfigErrors(errors)


def _refuse_large(file: str, size: int) -> None:
    if size > _LARGEST_BYTES:
        raise ConfigError(file, None, None, f"is larger than {_LARGEST_BYTES:,} bytes")


# --- where things stand in a file -------------------------------------------------------------


FieldPath: TypeAlias = tuple[str | int, ...]


class Line(NamedTuple):
    """The place of a value in a file."""

    key: int
    value: int
    #: The value as it is written.
    text: str = ""
    #: The column of its first character, from 1 on.
    column: int = 1
    #: The included file; empty: the file of the description.
    file: str = ""


def dotted_path(path: FieldPath) -> str:
    """Return a path as people write it: `sinks.archive.partition_by[0]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a description's values, for errors found after parsing."""

    file: str
    #: By path, such as ("stages", "strong", "from", 0).
    by_path: Mapping[FieldPath, Line] = field(default_factory=dict)
    #: Prefix of the path in errors, in a file with a list of descriptions.
    prefix: str = ""

    def below(self, path: FieldPath, prefix: str) -> Lines:
        """Return the lines of one description among several."""
        size = len(path)
        inner = {key[size:]: line for key, line in self.by_path.items() if key[:size] == path}
        return Lines(self.file, inner, prefix)

    @property
    def files(self) -> list[str]:
        """The file of the description, and those that it includes."""
        return list(dict.fromkeys([self.file, *(one.file for one in self.by_path.values())]))

    def find(self, path: FieldPath, *, at_key: bool = False) -> int | None:
        """Return the line of a path, or of its innermost parent that has one."""
        line, is_there = self._nearest(path)
        if line is None:
            return None
        return line.key if at_key or not is_there else line.value

    def _nearest(self, path: FieldPath) -> tuple[Line | None, bool]:
        """Return the place of a path or of its nearest parent, and whether it is the path's own."""
        for end in range(len(path), -1, -1):
            if (line := self.by_path.get(path[:end])) is not None:
                return line, end == len(path)
        return None, False

    def find_within(self, path: FieldPath, words: str, before: int) -> tuple[int, int] | None:
        """Return the line and column of `words` in a value, after `before` earlier occurrences."""
        place = self.by_path.get(path)
        if place is None:
            return None
        at = -1
        for _ in range(before + 1):
            at = place.text.find(words, at + 1)
            if at < 0:
                return None
        above = place.text[:at].split("\n")
        first = place.column if len(above) == 1 else 1
        return place.value + len(above) - 1, first + len(above[-1])

    def error(
        self,
        path: FieldPath,
        reason: str,
        *,
        hint: str | None = None,
        at_key: bool = False,
        within: tuple[str, int] | None = None,
    ) -> ConfigError:
        """Return an error about one place, with its line.

        :param within: words in the value that are wrong, and the number of earlier occurrences
        """
        dotted = dotted_path(path)
        named = f"{self.prefix}.{dotted}" if self.prefix and dotted else self.prefix or dotted
        line, column = self.find(path, at_key=at_key), None
        if within is not None and (found := self.find_within(path, *within)) is not None:
            line, column = found
        place = self._nearest(path)[0]
        file = self.file if place is None or not place.file else place.file
        return ConfigError(file, line, named or None, reason, hint=hint, column=column)


# --- from text to values, with the line of each ---------------------------------------------


class _Tree:
    """The plain values of a YAML text, and their lines by path."""

    def __init__(self, file: str) -> None:
        self.data: Any = {}
        self.lines: dict[FieldPath, Line] = {(): Line(1, 1, file=file)}
        self._file = file
        self._nodes = 0
        self._files = 0

    def build(self, text: str, sections: Sequence[str] = ()) -> None:
        """Fill the tree. Raises ConfigError."""
        root = _compose(text, self._file)
        if root is None:
            return
        if sections and isinstance(root, yaml.SequenceNode):
            items = [self._described(item, sections, (self._file,)) for item in root.value]
            root = yaml.SequenceNode(root.tag, items, root.start_mark, root.end_mark)
        elif sections:
            root = self._described(root, sections, (self._file,))
        self.data = self._value(root, (), _line(root))

    # --- what stands elsewhere -------------------------------------------------------------------

    def _described(
        self, node: yaml.Node, sections: Sequence[str], files: tuple[str, ...]
    ) -> yaml.Node:
        """Return a description with its includes and templates resolved."""
        whole = self._with_included(node, files)
        if not isinstance(whole, yaml.MappingNode):
            return whole
        pairs = self._pairs(whole, ())
        templates: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        if "templates" in pairs:
            found = pairs.pop("templates")[1]
            if not isinstance(found, yaml.MappingNode):
                raise self._error(found, ("templates",), "should be a mapping")
            templates = self._pairs(found, ("templates",))
        for section in sections:
            key, parts = pairs.get(section, (whole, None))
            if isinstance(parts, yaml.MappingNode):
                entries = {
                    name: (at, self._extended(part, (section, name), templates, ()))
                    for name, (at, part) in self._pairs(parts, (section,)).items()
                }
                pairs[section] = key, _mapping_node(parts, entries)
        return _mapping_node(whole, pairs)

    def _with_included(self, node: yaml.Node, files: tuple[str, ...]) -> yaml.Node:
        """Merge the included files into a description, whose own values win."""
        if not isinstance(node, yaml.MappingNode) or _short(node.tag) != "!!map":
            return node
        pairs = self._pairs(node, ())
        if "include" not in pairs:
            return node
        named = pairs.pop("include")[1]
        whole: yaml.Node = _mapping_node(node, {})
        for one in named.value if isinstance(named, yaml.SequenceNode) else [named]:
            if not isinstance(one, yaml.ScalarNode) or not one.value:
                raise self._error(one, ("include",), "should be the path of a file, or a list")
            file = self._file_of(one, files)
            try:
                found = _compose(read_text(file), file)
            except ConfigError as error:
                if error.line is not None:
                    raise
                raise self._error(one, ("include",), f"{file} {error.reason}") from error
            if found is not None:
                if not isinstance(found, yaml.MappingNode):
                    raise self._error(found, (), "what is included should be a mapping")
                whole = self._merged(whole, self._with_included(found, (*files, file)), ())
        return self._merged(whole, _mapping_node(node, pairs), ())

    def _file_of(self, node: yaml.ScalarNode, files: tuple[str, ...]) -> str:
        """Return the path of an included file, which must be in an allowed folder."""
        self._files += 1
        if self._files > _MOST_FILES:
            raise self._error(node, ("include",), f"there are more than {_MOST_FILES} files")
        text = self._expand(node.value, node, ("include",))
        path = os.path.normpath(os.path.join(os.path.dirname(files[-1]), text))  # noqa: PTH118, PTH120
        allowed = [os.path.dirname(files[0]) or ".", *os.environ.get(_INCLUDE_FROM, "").split(":")]  # noqa: PTH120
        # With symbolic links resolved: one may lead out of the folder.
        real = Path(path).resolve()
        if not any(real.is_relative_to(Path(folder).resolve()) for folder in allowed if folder):
            raise self._error(
                node,
                ("include",),
                f"{text} is not below the folder of {os.path.basename(files[0])}",  # noqa: PTH119
                hint=f"name a path below it, or allow the folder: {_INCLUDE_FROM}=/path",
            )
        if real in (Path(file).resolve() for file in files):
            circle = " -> ".join([*files, path])
            raise self._error(node, ("include",), f"goes round in a circle: {circle}")
        return path

    def _extended(
        self,
        node: yaml.Node,
        path: FieldPath,
        templates: Mapping[str, tuple[yaml.Node, yaml.Node]],
        used: tuple[str, ...],
    ) -> yaml.Node:
        """Merge an entry over the template that it extends."""
        if not isinstance(node, yaml.MappingNode) or _short(node.tag) != "!!map":
            return node
        pairs = self._pairs(node, path)
        if "extends" not in pairs:
            return node
        at = pairs.pop("extends")[1]
        where = (*path, "extends")
        if not isinstance(at, yaml.ScalarNode) or not at.value:
            raise self._error(at, where, "should be the name of a template")
        if at.value in used:
            circle = " -> ".join([*used, at.value])
            raise self._error(at, where, f"goes round in a circle: {circle}")
        if at.value not in templates:
            hint = (
                nearest(at.value, templates, "there are")
                if templates
                else "templates stand under templates:"
            )
            raise self._error(at, where, f"there is no template {at.value}", hint=hint)
        base = templates[at.value][1]
        if not isinstance(base, yaml.MappingNode):
            raise self._error(base, ("templates", at.value), "should be a mapping")
        base = self._extended(base, ("templates", at.value), templates, (*used, at.value))
        return self._merged(base, _mapping_node(node, pairs), path)

    def _merged(self, base: yaml.Node, over: yaml.Node, path: FieldPath) -> yaml.Node:
        """Merge two nodes key by key; the second wins."""
        if not (isinstance(base, yaml.MappingNode) and isinstance(over, yaml.MappingNode)):
            return over
        self._count(over, path)
        pairs = self._pairs(base, path)
        for name, (key, value) in self._pairs(over, path).items():
            if name in pairs:
                value = self._merged(pairs[name][1], value, (*path, name))  # noqa: PLW2901
            pairs[name] = key, value
        return _mapping_node(over, pairs)

    def _pairs(
        self, node: yaml.MappingNode, path: FieldPath
    ) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Return the keys and values of a mapping, and of those that it merges with `<<`."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        self._nodes += len(node.value)  # the keys
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "a key should be text, not a mapping or list")
            key = key_node.value
            inner = (*path, key)
            if key == "<<" and key_node.style is None:
                is_list = isinstance(value_node, yaml.SequenceNode)
                for one in value_node.value if is_list else [value_node]:
                    if not isinstance(one, yaml.MappingNode):
                        raise self._error(one, inner, "should be a mapping, as in <<: *name")
                    self._count(one, inner)
                    merged = {**self._pairs(one, inner), **merged}
                continue
            if key in own:
                first = _line(own[key][0])
                raise self._error(key_node, inner, f"the key stands in line {first} already")
            own[key] = key_node, value_node
        return {**merged, **own}

    def _count(self, node: yaml.Node, path: FieldPath) -> None:
        # Only aliases can exceed these limits here: the loader checks the text itself.
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise self._error(node, path, f"there are more than {_MOST_NODES:,} keys and values")
        if len(path) > _DEEPEST:
            raise self._error(
                node,
                path[:3],
                f"is nested deeper than {_DEEPEST} levels",
                hint="does an alias stand inside what it names?",
            )

    # --- values ----------------------------------------------------------------------------------

    def _value(self, node: yaml.Node, path: FieldPath, key_line: int) -> Any:
        start, end = node.start_mark, node.end_mark
        text = ""
        if isinstance(node, yaml.ScalarNode) and start.buffer is not None:
            text = start.buffer[start.pointer : end.pointer]
        self.lines[path] = Line(key_line, _line(node), text, start.column + 1, start.name)
        self._count(node, path)
        tag = _short(node.tag)
        if isinstance(node, yaml.MappingNode) and tag == "!!map":
            return {
                name: self._value(value, (*path, name), _line(key))
                for name, (key, value) in self._pairs(node, path).items()
            }
        if isinstance(node, yaml.SequenceNode) and tag == "!!seq":
            return [
                self._value(item, (*path, index), _line(item))
                for index, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        raise self._error(node, path, f"the tag {tag} is not known here")

    def _scalar(self, node: yaml.ScalarNode, path: FieldPath) -> Any:
        text: str = node.value
        tag = _short(node.tag)
        if tag == "!!str":
            return self._expand(text, node, path)
        if tag == "!!null":
            return None
        try:
            match tag:
                case "!!bool":
                    return {"true": True, "false": False}[text.lower()]
                case "!!int":
                    return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
                case "!!float":
                    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        except (ValueError, KeyError):
            raise self._error(node, path, f"is not a value of {tag}") from None
        raise self._error(node, path, f"the tag {tag} is not known here")

    def _expand(self, text: str, node: yaml.Node, path: FieldPath) -> str:
        """Replace environment variables."""
        taken: dict[str, str] = {}

        def replacement(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            if match[0] == "$${":
                return "${"
            if name is None:
                raise self._error(
                    node,
                    path,
                    "'${' should be followed by the name of an environment variable and '}'",
                    hint="write $${ for the characters ${ themselves",
                )
            if default is not None and not os.environ.get(name):
                return default
            try:
                taken[name] = os.environ[name]
            except KeyError:
                raise self._error(
                    node,
                    path,
                    f"the environment variable {name} is not set",
                    hint=f"set it, or give a default: ${{{name}:-default}}",
                ) from None
            return taken[name]

        expanded = _VARIABLE.sub(replacement, text)
        remember(text, taken, expanded)
        return expanded

    def _error(
        self, node: yaml.Node, path: FieldPath, reason: str, hint: str | None = None
    ) -> ConfigError:
        file = node.start_mark.name
        return ConfigError(file, _line(node), dotted_path(path) or None, reason, hint=hint)


def _compose(text: str, file: str) -> yaml.Node | None:
    """Return the nodes of a text, each with its file. Raises ConfigError."""
    try:
        loader = _Loader(text)
        loader.name = file
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = None if error.problem_mark is None else error.problem_mark.line + 1
        began = error.context_mark
        hint = None if began is None else f"{error.context} from line {began.line + 1} on"
        raise ConfigError(
            file, line, None, f"cannot be read as YAML: {error.problem}", hint=hint
        ) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(file, line, None, f"cannot be read as YAML: {error.reason}") from None


def _mapping_node(
    like: yaml.MappingNode, pairs: Mapping[str, tuple[yaml.Node, yaml.Node]]
) -> yaml.MappingNode:
    return yaml.MappingNode(like.tag, list(pairs.values()), like.start_mark, like.end_mark)


_STANDARD_TAG = "tag:yaml.org,2002:"

_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?"
)


class _Loader(yaml.SafeLoader):
    """Composes nodes by the core schema of YAML 1.2, up to a configuration's size limit."""

    _depth = -1
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Checked here because composing is slow, and recurses: Python's own stack would end first.
        self._depth += 1
        self._nodes += 1
        if parent is not None and self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(
                problem=f"it is nested deeper than {_DEEPEST} levels",
                problem_mark=parent.start_mark,
            )
        if parent is not None and self._nodes > _MOST_NODES:
            raise yaml.MarkedYAMLError(
                problem=f"there are more than {_MOST_NODES:,} keys and values",
                problem_mark=parent.start_mark,
            )
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {}  # not those of YAML 1.1
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(_STANDARD_TAG + _tag, re.compile(rf"(?:{_pattern})\Z"), _first)


def _line(node: yaml.Node) -> int:
    """Return the line where a node starts, counted from 1."""
    return node.start_mark.line + 1


def _short(tag: str) -> str:
    """Return a tag as people write it: `!!int`."""
    return tag.replace(_STANDARD_TAG, "!!", 1)


# --- from what pydantic found to what the person should change -------------------------------


class _Fault(NamedTuple):
    file: str
    line: int
    field: str
    reason: str
    hint: str | None = None


class _KnownKeys:
    """The keys known to the models that validated a mapping, by the mapping's identity."""

    def __init__(self) -> None:
        self._keys: dict[int, set[str]] = {}

    def add(self, data: object, keys: Iterable[str]) -> None:
        self._keys.setdefault(id(data), set()).update(keys)

    def of(self, data: object) -> list[str]:
        return sorted(self._keys.get(id(data), ()))


def _explain(detail: ErrorDetails, tree: _Tree, known: _KnownKeys) -> _Fault:
    """Describe a fault: its place and what was expected. The value may be secret: left out."""
    loc = detail["loc"]
    match detail["type"]:
        case "missing":
            path, _ = _descend(tree.data, loc[:-1])
            line = tree.lines[path]
            return _Fault(line.file, line.key, dotted_path((*path, loc[-1])), "is required")
        case "extra_forbidden":
            path, _ = _descend(tree.data, loc)
            _, parent = _descend(tree.data, path[:-1])
            near = nearest(str(path[-1]), known.of(parent), "known keys")
            line = tree.lines[path]
            return _Fault(line.file, line.key, dotted_path(path), "unknown key", near)
    path, _ = _descend(tree.data, loc)
    cause = detail.get("ctx", {}).get("error")
    hint = cause.hint if isinstance(cause, PenstockError) else None
    line = tree.lines[path]
    return _Fault(line.file, line.value, dotted_path(path), _reason(detail), hint)


def _descend(data: Any, loc: FieldPath) -> tuple[FieldPath, Any]:
    """Follow an error's location as far as it exists in the file.

    Pydantic puts the names of union members and validators between the keys; those are skipped.
    """
    path: FieldPath = ()
    for part in loc:
        if isinstance(data, dict):
            found = part in data
        else:
            found = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if found:
            data = data[part]
            path = (*path, part)
    return path, data


def _reason(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "value_error" | "assertion_error":
            return str(detail["ctx"]["error"])
        case "model_type" | "dict_type":
            return "should be a mapping"
        case "list_type" | "tuple_type":
            return "should be a list"
        case "union_tag_not_found":
            return f"needs the key {detail['ctx']['discriminator']}"
        case "union_tag_invalid":
            ctx = detail["ctx"]
            return f"{ctx['discriminator']} should be one of {ctx['expected_tags']}"
    return detail["msg"].replace("Input should", "should", 1)


# --- fields that many descriptions have ---------------------------------------------------------

_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class WrongField(PenstockError, ValueError):
    """The reason alone: the parser of the file adds the field and its line."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise WrongField("should be text")
    if not value.strip():
        raise WrongField("should not be empty")
    return value


def url_text(value: object) -> str:
    """Check that a value is the URL of an endpoint that is installed."""
    text = _text(value)
    try:
        endpoint_of(text)
    except UnknownScheme as error:
        scheme = f"{URL.parse(text).scheme}:"
        raise WrongField(f"no endpoint answers to {scheme}", hint=error.hint) from None
    except InvalidURL as error:
        raise WrongField(str(error), hint=error.hint) from None
    return text


def listed(value: object) -> object:
    """Turn a single value into a list of one."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise WrongField("should be text, or a list of texts")
    if not value:
        raise WrongField("should have at least one")
    return value


def is_function_name(value: object) -> bool:
    """Tell whether a value is `module:function`."""
    return isinstance(value, str) and _FUNCTION.fullmatch(value) is not None


#: Text that is not blank.
Text = Annotated[str, BeforeValidator(_text)]
#: The URL of an endpoint that is installed.
Url = Annotated[str, BeforeValidator(url_text)]
#: One name or several.
Names = Annotated[tuple[Text, ...], BeforeValidator(listed)]
