"""How are Spark's DDL, mappings and Arrow schemas converted?"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.core.errors import PenstockError
from penstock.core.options import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Wrong", "arrow_schema", "ddl_of", "filled_list", "has_type", "parse_ddl", "type_ddl"]


class Wrong(PenstockError, ValueError):
    """A fault in an option's value; the caller adds the option's name."""


_TYPES: Final = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
#: The first name of a type is used for output.
_NAMES: Final = {kind: name for name, kind in reversed(_TYPES.items())}
_OTHERS: Final = ("decimal", "array", "map", "struct")
_TOKEN: Final = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([^\W\d]\w*)|(\d+)|([<>(),:]))")
_DEEPEST: Final = 32
_LONGEST: Final = 1 << 20
_DECIMAL_DIGITS: Final = 38


def arrow_schema(given: str | Mapping[str, str] | pa.Schema) -> pa.Schema:
    """Return a schema as Arrow schema.

    :raises Wrong: it does not parse, or a type is not one of Spark's.
    """
    if isinstance(given, pa.Schema):
        for field in given:
            type_ddl(field.type)
        schema = pa.schema([pa.field(field.name, _nullable(field.type)) for field in given])
    elif isinstance(given, str):
        schema = parse_ddl(given)
    else:
        schema = pa.schema([(name, _Text(text).only_type()) for name, text in given.items()])
    if not schema.names:
        raise Wrong("should have at least one column")
    return schema


def parse_ddl(text: str) -> pa.Schema:
    """Read columns as in `azimuth FLOAT, gates ARRAY<INT>`.

    :raises Wrong: it does not parse.
    """
    return pa.schema(_Text(text).columns())


def ddl_of(schema: pa.Schema) -> str:
    """Write columns as Spark's DDL."""
    return ", ".join(f"{_quoted(field.name)} {type_ddl(field.type)}" for field in schema)


def type_ddl(kind: pa.DataType) -> str:
    """Write a type as Spark's DDL.

    :raises Wrong: Spark does not have it.
    """
    if (name := _NAMES.get(kind)) is not None:
        return name.upper()
    if pa.types.is_decimal128(kind) and 0 <= kind.scale <= kind.precision:
        return f"DECIMAL({kind.precision},{kind.scale})"
    if pa.types.is_list(kind):
        return f"ARRAY<{type_ddl(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"MAP<{type_ddl(kind.key_type)}, {type_ddl(kind.item_type)}>"
    if pa.types.is_struct(kind):
        inner = ", ".join(f"{_quoted(field.name)}: {type_ddl(field.type)}" for field in kind)
        return f"STRUCT<{inner}>"
    raise Wrong(f"Spark has no type {kind}", hint=f"it has {', '.join([*_TYPES, *_OTHERS])}")


def filled_list(kind: pa.DataType) -> pa.DataType:
    """Return a list type without null values.

    Spark then skips the null check per value, which is most of its work for a long list.
    """
    return pa.list_(pa.field("element", kind, nullable=False))


def has_type(kind: pa.DataType, *tests: str) -> bool:
    """Tell whether `pa.types.is_…` holds for a type or for any type nested in it."""
    if any(getattr(pa.types, f"is_{test}")(kind) for test in tests):
        return True
    return any(has_type(kind.field(i).type, *tests) for i in range(kind.num_fields))


def _nullable(kind: pa.DataType) -> pa.DataType:
    """Return a type in which every value is nullable: a payload may lack any of them.

    Spark does not check for nulls where the type excludes them.
    """
    if pa.types.is_list(kind):
        return pa.list_(pa.field(kind.value_field.name, _nullable(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_nullable(kind.key_type), _nullable(kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _nullable(field.type)) for field in kind])
    return kind


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


class _Text:
    """A recursive-descent parser of DDL."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise Wrong(f"is longer than {_LONGEST:,} characters")
        self._text = text
        self._at = 0
        self._depth = 0

    def columns(self) -> list[pa.Field]:
        found = [self._column()]
        while self._take(","):
            found.append(self._column())
        self._end()
        return found

    def only_type(self) -> pa.DataType:
        kind = self._type()
        self._end()
        return kind

    def _column(self) -> pa.Field:
        name = self._name("the name of a column")
        self._take(":")
        kind = self._type()
        if self._word() == "not":
            raise Wrong(
                f"column {name}: NOT NULL is not checked here",
                hint="leave it out; a filter can drop rows without a value",
            )
        return pa.field(name, kind)

    def _type(self) -> pa.DataType:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise Wrong(f"types are nested deeper than {_DEEPEST} levels")
        name = self._name("a type").lower()
        kind = self._parameterized(name) if name in _OTHERS else _TYPES.get(name)
        if kind is None:
            raise Wrong(
                f"there is no type {name}", hint=nearest(name, [*_TYPES, *_OTHERS], "types")
            )
        self._depth -= 1
        return kind

    def _parameterized(self, name: str) -> pa.DataType:
        if name == "decimal":
            return self._decimal()
        self._need("<")
        if name == "array":
            kind = pa.list_(self._type())
        elif name == "map":
            key = self._type()
            self._need(",")
            kind = pa.map_(key, self._type())
        else:
            fields = [self._column()]
            while self._take(","):
                fields.append(self._column())
            kind = pa.struct(fields)
        self._need(">")
        return kind

    def _decimal(self) -> pa.DataType:
        precision, scale = 10, 0  # Spark's own
        if self._take("("):
            precision = self._number()
            if self._take(","):
                scale = self._number()
            self._need(")")
        if not (1 <= precision <= _DECIMAL_DIGITS and scale <= precision):
            raise Wrong(f"there is no decimal({precision},{scale})")
        return pa.decimal128(precision, scale)

    # --- tokens -----------------------------------------------------------------------------

    def _peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self._text, self._at)

    def _word(self) -> str | None:
        token = self._peek()
        return token[2].lower() if token and token[2] else None

    def _take(self, sign: str) -> bool:
        token = self._peek()
        if token is None or token[4] != sign:
            return False
        self._at = token.end()
        return True

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise self._fault(f"{sign!r}")

    def _name(self, what: str) -> str:
        token = self._peek()
        if token is None or not (token[1] or token[2]):
            raise self._fault(what)
        self._at = token.end()
        return token[1].replace("``", "`") if token[1] else str(token[2])

    def _number(self) -> int:
        token = self._peek()
        if token is None or not token[3] or len(token[3]) > len("38"):
            raise self._fault("a number")
        self._at = token.end()
        return int(token[3])

    def _end(self) -> None:
        if self._text[self._at :].strip():
            raise self._fault("a comma or the end")

    def _fault(self, expected: str) -> Wrong:
        rest = self._text[self._at :].strip()
        where = f"at {rest[:20]!r}" if rest else "at the end"
        return Wrong(f"{where} there should be {expected}", hint='as in "azimuth FLOAT, gates INT"')
