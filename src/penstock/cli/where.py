"""Which messages does `--where` let through?

`type == 3 and size > 100`, `payload.name in ("a", "b")`, `not dbz < 10`: comparisons of fields and
values, joined by `and`, `or`, `not` and parentheses, as Python writes them. Nothing is called, and
nothing but fields is reached: the text is parsed, and interpreted here.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from penstock.cli.message_text import part_of
from penstock.core.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Condition"]

_Fields: TypeAlias = "Mapping[str, Any]"
_Value: TypeAlias = "Callable[[_Fields], Any]"

_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, many: one in many,
    ast.NotIn: lambda one, many: one not in many,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_WORDS: Final = {"true": True, "false": False, "null": None}
_LONGEST: Final = 10_000
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{1,40})?(?:[eE][+-]?[0-9]{1,3})?")
#: How others write it, and how it is written here.
_ELSEWHERE: Final = (
    (re.compile(r"^\s*$"), "it is empty"),
    (re.compile(r"<>"), "write != for unequal"),
    (re.compile(r"&&|\|\||!(?!=)"), "write and, or, not"),
    (
        re.compile(r"\b(?:AND|OR|NOT|IN|IS|NULL)\b"),
        "write and, or, not, in and is null in small letters",
    ),
    (re.compile(r"(?<![=!<>])=(?!=)"), "write == to compare"),
)
_HINT: Final = "as in 'type == 3 and size > 100', or 'payload.name in (\"a\", \"b\")'"


class Condition:
    """A condition on the fields of a message, and on columns that its payload has."""

    def __init__(self, text: str) -> None:
        """Parse the text.

        :raises InvalidOption: it is not a valid condition.
        """
        self._text = text
        try:
            if len(text) > _LONGEST:
                raise ValueError(f"it is longer than {_LONGEST:,} characters")  # noqa: TRY301
            self._value = self._compiled(ast.parse(text.strip(), mode="eval").body)
        except SyntaxError as error:
            reasons = (reason for written, reason in _ELSEWHERE if written.search(text))
            reason = next(reasons, str(error.msg))
            raise InvalidOption("where", text, reason, hint=_HINT) from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise InvalidOption("where", text, str(error), hint=_HINT) from None

    def __call__(self, fields: _Fields) -> bool:
        """Tell whether the condition holds. Missing or incomparable values do not match.

        :raises InvalidOption: a field does not exist.
        """
        try:
            return bool(self._value(fields))
        except (TypeError, ArithmeticError):
            return False

    def _compiled(self, node: ast.expr) -> _Value:  # noqa: C901 - a kind of node each
        match node:
            case ast.BoolOp(op=ast.And(), values=values):
                parts = [self._compiled(value) for value in values]
                return lambda fields: all(_holds(part, fields) for part in parts)
            case ast.BoolOp(values=values):
                parts = [self._compiled(value) for value in values]
                return lambda fields: any(_holds(part, fields) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._compiled(operand)
                return lambda fields: not _holds(inner, fields)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._compiled(operand)
                return lambda fields: -_as_number(inner(fields))
            case ast.Compare():
                return self._comparison(node)
            case ast.BinOp() if type(node.op) in _ARITHMETIC:
                left, right = self._compiled(node.left), self._compiled(node.right)
                do = _ARITHMETIC[type(node.op)]
                return lambda fields: do(_as_number(left(fields)), _as_number(right(fields)))
            case ast.Constant(value=value):
                return lambda _: value
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                items = [self._compiled(element) for element in elements]
                return lambda fields: [item(fields) for item in items]
            case ast.Name(id=name):
                return self._field(name)
            case ast.Attribute(value=whole, attr=key):
                outer = self._compiled(whole)
                return lambda fields: part_of(outer(fields), key)
            case ast.Subscript(value=whole, slice=ast.Constant(value=key)):
                outer = self._compiled(whole)
                return lambda fields: part_of(outer(fields), key)
        raise ValueError(f"{ast.unparse(node)} is not a comparison of fields")

    def _comparison(self, node: ast.Compare) -> _Value:
        compared = [
            # `type in (3)` is a list of one, as in SQL.
            ast.List([each]) if isinstance(op, ast.In | ast.NotIn) and _is_one(each) else each
            for op, each in zip(node.ops, node.comparators, strict=True)
        ]
        values = [self._compiled(each) for each in (node.left, *compared)]
        tests = [_COMPARISONS[type(each)] for each in node.ops]

        def compare(fields: _Fields) -> bool:
            found = [value(fields) for value in values]
            pairs = zip(tests, found, found[1:], strict=False)
            return all(test(*_alike(one, other)) for test, one, other in pairs)

        return compare

    def _field(self, name: str) -> _Value:
        if name in _WORDS:
            return lambda _: _WORDS[name]

        def field(fields: _Fields) -> Any:
            try:
                return fields[name]
            except KeyError:
                known = ", ".join(fields)
                raise InvalidOption(
                    "where", self._text, f"there is no field {name}", hint=f"there are: {known}"
                ) from None

        return field


def _holds(part: _Value, fields: _Fields) -> bool:
    """Tell whether one side of `and` or `or` holds, independent of the other side."""
    try:
        return bool(part(fields))
    except (TypeError, ArithmeticError):
        return False


def _alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Return two values to compare: text beside a number is the number that it spells."""
    if isinstance(one, str) and _is_number(other):
        return _number(one), other
    if isinstance(other, str) and _is_number(one):
        return one, _number(other)
    return one, other


def _is_one(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _as_number(value: Any) -> Any:
    """Return the number that a value is or spells.

    :raises TypeError: it is none. Python would also multiply text, and format it with `%`.
    """
    number = _number(value) if isinstance(value, str) else value
    if not _is_number(number):
        raise TypeError(f"{value!r} is no number")
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str) -> float | str:
    if _NUMBER.fullmatch(text) is None:
        return text
    return int(text) if text.lstrip("+-").isdigit() else float(text)
