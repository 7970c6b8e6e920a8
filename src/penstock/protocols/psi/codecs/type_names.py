"""How is the name of a .NET type parsed, and which id does psi derive from it?"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from penstock.core.errors import Malformed

__all__ = ["CORE_LIBRARY", "TypeName", "parse_type_name", "plain_name", "qualify", "schema_id"]

#: The assembly of .NET's own types. psi takes names with this, with .NET Framework's, or with none.
CORE_LIBRARY: Final = (
    "System.Private.CoreLib, Version=4.0.0.0, Culture=neutral, PublicKeyToken=7cec85d7bea7798e"
)

_WHAT: Final = "psi type name"
_LONGEST: Final = 16_384
_DEEPEST: Final = 32

#: C#'s keywords for types.
_KEYWORDS: Final = {
    "bool": "System.Boolean",
    "byte": "System.Byte",
    "sbyte": "System.SByte",
    "short": "System.Int16",
    "ushort": "System.UInt16",
    "int": "System.Int32",
    "uint": "System.UInt32",
    "long": "System.Int64",
    "ulong": "System.UInt64",
    "float": "System.Single",
    "double": "System.Double",
    "char": "System.Char",
    "decimal": "System.Decimal",
    "string": "System.String",
    "object": "System.Object",
}


class TypeName(NamedTuple):
    """A parsed name of a type."""

    #: Without arguments, arrays and assembly: System.Collections.Generic.List`1.
    name: str
    arguments: tuple[TypeName, ...] = ()
    #: `[]` for each level of arrays.
    arrays: str = ""
    assembly: str | None = None

    @property
    def canonical(self) -> str:
        """The name without any assembly: the same for every version of .NET."""
        arguments = ",".join(f"[{argument.canonical}]" for argument in self.arguments)
        return self.name + (f"[{arguments}]" if arguments else "") + self.arrays

    @property
    def qualified(self) -> str:
        """The name with assemblies, where none is given that of .NET's own types."""
        arguments = ",".join(f"[{argument.qualified}]" for argument in self.arguments)
        inner = self.name + (f"[{arguments}]" if arguments else "") + self.arrays
        return f"{inner}, {self.assembly or CORE_LIBRARY}"

    @property
    def element(self) -> TypeName:
        """The type of the elements of this array."""
        return self._replace(arrays=self.arrays[:-2])

    def array(self) -> TypeName:
        """Return the name of an array of this."""
        return self._replace(arrays=self.arrays + "[]")


@lru_cache(maxsize=1024)
def parse_type_name(text: str) -> TypeName:
    """Parse a name: with assemblies, without, or a keyword of C# such as `float`.

    :raises Malformed: it is not a name, or far too long.
    """
    if len(text) > _LONGEST:
        raise Malformed(_WHAT, "length", f"at most {_LONGEST}", len(text))
    name, at = _parse(text, 0, 0)
    if at != len(text):
        raise Malformed(_WHAT, f"character {at}", "the end", text[at : at + 20])
    return name


def _parse(text: str, at: int, depth: int) -> tuple[TypeName, int]:
    if depth > _DEEPEST:
        raise Malformed(_WHAT, "depth", f"at most {_DEEPEST}", "more")
    end = _until("[],", text, at)
    name = text[at:end].strip()
    if not name:
        raise Malformed(_WHAT, f"character {at}", "a name", text[at : at + 20])
    arguments, start = _parse_arguments(text, end, depth)
    at = start
    while text.startswith("[", at):
        end = text.find("]", at)
        if end < 0:
            raise Malformed(_WHAT, f"character {at}", "an end of [", "none")
        at = end + 1
    arrays = text[start:at]
    assembly = None
    if text.startswith(",", at):
        end = _until("[]", text, at)
        assembly = text[at + 1 : end].strip() or None
        at = end
    if assembly is None and not arguments:
        name = _KEYWORDS.get(name, name)
    return TypeName(name, arguments, arrays, assembly), at


def _until(stops: str, text: str, at: int) -> int:
    while at < len(text) and text[at] not in stops:
        at += 1
    return at


def _parse_arguments(text: str, at: int, depth: int) -> tuple[tuple[TypeName, ...], int]:
    """Parse `[[A],[B]]`, if present."""
    arguments: list[TypeName] = []
    if not text.startswith("[[", at):
        return (), at
    while True:
        argument, at = _parse(text, at + 2, depth + 1)
        arguments.append(argument)
        if text.startswith("]]", at):
            return tuple(arguments), at + 2
        if not text.startswith("],[", at):
            raise Malformed(_WHAT, f"character {at}", "]] or ],[", text[at : at + 20])
        at += 1


def qualify(text: str) -> str:
    """Return a name as psi has it: `float` becomes System.Single with its assembly.

    :raises Malformed: it is not a name.
    """
    return parse_type_name(text).qualified


def plain_name(text: str) -> str:
    """Return a name without assemblies, as people write it; what is no name stays as it is."""
    try:
        return parse_type_name(text).canonical
    except Malformed:  # a peer's, such as that of a data contract
        return text


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def schema_id(contract: str) -> int:
    """Return psi's id of a type: 30 bits of a hash of its name (docs/specs/psi.md 6.4)."""
    data = contract.encode("utf-16-le", "surrogatepass") + bytes(8)
    first = second = (5381 << 16) + 5381
    left = (len(data) - 8) // 2
    at = 0

    def mixed(hash: int, at: int) -> int:
        word = int.from_bytes(data[at : at + 4], "little", signed=True)
        return _signed((hash << 5) + hash + (hash >> 27)) ^ word

    while left > 2:  # noqa: PLR2004 - two characters make one word
        first = mixed(first, at)
        second = mixed(second, at + 4)
        at += 8
        left -= 4
    if left > 0:
        first = mixed(first, at)
    return _signed(first + second * 1_566_083_941) & 0x3FFF_FFFF
