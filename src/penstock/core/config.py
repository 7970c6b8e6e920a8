"""How is a YAML file read into a model, and which line of it is wrong?"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from penstock.core.errors import ConfigError, PenstockError
from penstock.core.options import nearest
from penstock.core.redaction import remember

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic_core import ErrorDetails

__all__ = ["ConfigErrors", "ConfigModel", "load_config", "parse_config", "read_text"]

# A configuration is written by hand. Beyond these it is a mistake, or an attack by aliases of
# aliases, which are counted as often as they are used.
_LARGEST_BYTES = 1 << 20
_DEEPEST = 50
_MOST_NODES = 100_000

_UNREADABLE = "give the path of a YAML file that you may read"


class ConfigErrors(ConfigError):
    """A configuration file has several faults: its fields are the first one's.

    `errors` has them all, in the order of the file, and the message has one a line.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.file, first.line, first.field, first.reason, hint=first.hint)
        self.errors = tuple(errors)
        self.args = ("\n".join(_with_hint(error) for error in errors),)


class ConfigModel(BaseModel):
    """The base of every configuration: unknown keys are refused, and it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _tell_known_keys(cls, data: Any, info: ValidationInfo) -> Any:
        # Pydantic says that a key is unknown, but not of which model: the one to ask for a
        # key that was meant is the one that looked at this very mapping.
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


def parse_config(text: str, model: type[_Model], file: str = "<text>") -> _Model:
    """Read YAML text into a model; `file` is what errors call it.

    The values are those of YAML 1.2: `yes`, `on`, `12:30` and dates are text, so that no model
    meets a value its author did not write. Keys are text. `${NAME}` in a text is replaced by
    that environment variable, `${NAME:-default}` by the default where it is unset or empty, and
    `$${` stands for `${` itself. Empty text is an empty mapping.

    :raises ConfigError: the one thing that is wrong: what, and in which line
    :raises ConfigErrors: several values do not fit the model
    """
    _refuse_large(file, len(text.encode("utf-8", "surrogatepass")))
    tree = _Tree(file)
    tree.build(text)
    known = _KnownKeys()
    try:
        return model.model_validate(tree.data, context=known)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    # The members of a union each have their say about one field: that is one fault.
    faults: dict[tuple[int, str], list[_Fault]] = {}
    for fault in (_explain(detail, tree, known) for detail in details):
        faults.setdefault((fault.line, fault.field), []).append(fault)
    errors = [
        ConfigError(
            file,
            line,
            field or None,
            ", or ".join(dict.fromkeys(fault.reason for fault in group)),
            hint=group[0].hint,
        )
        for (line, field), group in sorted(faults.items(), key=lambda item: item[0])
    ]
    raise errors[0] if len(errors) == 1 else ConfigErrors(errors)


def _refuse_large(file: str, size: int) -> None:
    if size > _LARGEST_BYTES:
        raise ConfigError(file, None, None, f"is larger than {_LARGEST_BYTES:,} bytes")


def _with_hint(error: ConfigError) -> str:
    return str(error) if error.hint is None else f"{error} ({error.hint})"


# --- from text to values, with the line of each ---------------------------------------------


_Path = tuple[str | int, ...]


class _Lines(NamedTuple):
    key: int
    value: int


class _Tree:
    """The plain values of a YAML text, and the lines where each stands, by its path."""

    def __init__(self, file: str) -> None:
        self.data: Any = {}
        self.lines: dict[_Path, _Lines] = {(): _Lines(1, 1)}
        self._file = file
        self._nodes = 0

    def build(self, text: str) -> None:
        """Fill the tree. Raises ConfigError."""
        try:
            root = yaml.compose(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            line = None if error.problem_mark is None else error.problem_mark.line + 1
            began = error.context_mark
            hint = None if began is None else f"{error.context} from line {began.line + 1} on"
            raise ConfigError(
                self._file, line, None, f"cannot be read as YAML: {error.problem}", hint=hint
            ) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise ConfigError(
                self._file, line, None, f"cannot be read as YAML: {error.reason}"
            ) from None
        if root is not None:
            self.data = self._value(root, (), _line(root))

    def _value(self, node: yaml.Node, path: _Path, key_line: int) -> Any:
        self.lines[path] = _Lines(key_line, _line(node))
        # Only aliases can lead beyond these limits here: the loader checks what is written out.
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
        tag = _short(node.tag)
        if isinstance(node, yaml.MappingNode) and tag == "!!map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and tag == "!!seq":
            return [
                self._value(item, (*path, index), _line(item))
                for index, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        raise self._error(node, path, f"the tag {tag} is not known here")

    def _mapping(self, node: yaml.MappingNode, path: _Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        self._nodes += len(node.value)  # the keys
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "a key should be text, not a mapping or list")
            key = key_node.value
            inner = (*path, key)
            if key in mapping:
                first = self.lines[inner].key
                raise self._error(key_node, inner, f"the key stands in line {first} already")
            if key == "<<" and key_node.style is None:
                raise self._error(key_node, inner, "merging mappings with << is not supported")
            mapping[key] = self._value(value_node, inner, _line(key_node))
        return mapping

    def _scalar(self, node: yaml.ScalarNode, path: _Path) -> Any:
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

    def _expand(self, text: str, node: yaml.Node, path: _Path) -> str:
        """Put the environment in."""
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
        self, node: yaml.Node, path: _Path, reason: str, hint: str | None = None
    ) -> ConfigError:
        return ConfigError(self._file, _line(node), _dotted(path) or None, reason, hint=hint)


_STANDARD_TAG = "tag:yaml.org,2002:"

_VARIABLE = re.compile(
    r"\$\$\{|\$\{(?:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})?"
)


class _Loader(yaml.SafeLoader):
    """Composes nodes by the core schema of YAML 1.2, as many as a configuration may have."""

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


def _dotted(path: _Path) -> str:
    """Return a path as people write it: `sinks.archive.partition_by[0]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


# --- from what pydantic found to what the person should change -------------------------------


class _Fault(NamedTuple):
    line: int
    field: str
    reason: str
    hint: str | None = None


class _KnownKeys:
    """The keys that the models know which looked at a mapping; it is told by its identity."""

    def __init__(self) -> None:
        self._keys: dict[int, set[str]] = {}

    def add(self, data: object, keys: Iterable[str]) -> None:
        self._keys.setdefault(id(data), set()).update(keys)

    def of(self, data: object) -> list[str]:
        return sorted(self._keys.get(id(data), ()))


def _explain(detail: ErrorDetails, tree: _Tree, known: _KnownKeys) -> _Fault:
    """Say where it is wrong, and what was expected. The value may be a secret: it is left out."""
    loc = detail["loc"]
    match detail["type"]:
        case "missing":
            path, _ = _descend(tree.data, loc[:-1])
            return _Fault(tree.lines[path].key, _dotted((*path, loc[-1])), "is required")
        case "extra_forbidden":
            path, _ = _descend(tree.data, loc)
            _, parent = _descend(tree.data, path[:-1])
            near = nearest(str(path[-1]), known.of(parent), "known keys")
            return _Fault(tree.lines[path].key, _dotted(path), "unknown key", near)
    path, _ = _descend(tree.data, loc)
    cause = detail.get("ctx", {}).get("error")
    hint = cause.hint if isinstance(cause, PenstockError) else None
    return _Fault(tree.lines[path].value, _dotted(path), _reason(detail), hint)


def _descend(data: Any, loc: _Path) -> tuple[_Path, Any]:
    """Follow an error's location as far as it is in the file.

    Pydantic puts the names of union members and validators between the keys; those are skipped.
    """
    path: _Path = ()
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
