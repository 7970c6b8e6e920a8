"""What are the schemas of .NET's own types, as psi sends them?

An importer needs them for structured types, and an exporter that announces streams of such types
sends them before (docs/specs/psi.md 3 and 6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.protocols.psi.codecs.fixed import PRIMITIVES
from penstock.protocols.psi.codecs.type_names import TypeName, parse_type_name, schema_id
from penstock.protocols.psi.metadata import RuntimeInfo, SchemaFlags, SchemaMember, TypeSchema

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["KNOWN_GENERICS", "comparer_of", "known_schemas", "make_schema", "members_of"]

_SERIALIZATION: Final = "Microsoft.Psi.Serialization"
_COLLECTIONS: Final = "System.Collections.Generic"
_MOST_ITEMS: Final = 7


class _Generics(NamedTuple):
    nullable: str = "System.Nullable`1"
    list: str = "System.Collections.Generic.List`1"
    dictionary: str = "System.Collections.Generic.Dictionary`2"
    pair: str = "System.Collections.Generic.KeyValuePair`2"
    comparer: str = "System.Collections.Generic.IEqualityComparer`1"


KNOWN_GENERICS: Final = _Generics()

_INT32: Final = TypeName("System.Int32")
_PLAIN: Final = {
    "System.Decimal": (("flags", "Int32"), ("hi", "Int32"), ("lo", "Int32"), ("mid", "Int32")),
    "System.DateTime": (("_dateData", "UInt64"),),
    "System.TimeSpan": (("_ticks", "Int64"),),
    "System.Guid": (
        ("_a", "Int32"),
        ("_b", "Int16"),
        ("_c", "Int16"),
        *((f"_{letter}", "Byte") for letter in "defghijk"),
    ),
}
#: What a value may be where the type says only `object`: a message names it by its number.
_BOXED: Final = (*PRIMITIVES, *_PLAIN, "System.String", "System.Byte[]")
_DICTIONARY_VERSION: Final = 3
_VERSION: Final = 2


def members_of(type: TypeName) -> list[tuple[str, TypeName]] | None:
    """Return the members of one of .NET's generic types, or None of any other."""
    arguments, count = type.arguments, len(type.arguments)
    if not count or type.arrays or not type.name.endswith(f"`{count}"):
        return None
    match type.name:
        case KNOWN_GENERICS.nullable:
            return [("hasValue", TypeName("System.Boolean")), ("value", arguments[0])]
        case KNOWN_GENERICS.list:
            return [("_items", arguments[0].array()), ("_size", _INT32), ("_version", _INT32)]
        case KNOWN_GENERICS.pair:
            return [("key", arguments[0]), ("value", arguments[1])]
        case KNOWN_GENERICS.dictionary:
            comparer = TypeName(KNOWN_GENERICS.comparer, arguments[:1])
            pairs = TypeName(KNOWN_GENERICS.pair, arguments).array()
            return [("Comparer", comparer), ("KeyValuePairs", pairs)]
    if type.name == f"System.ValueTuple`{count}" and count <= _MOST_ITEMS:
        return [(f"Item{number}", kind) for number, kind in enumerate(arguments, 1)]
    if type.name == f"System.Tuple`{count}" and count <= _MOST_ITEMS:
        return [(f"m_Item{number}", kind) for number, kind in enumerate(arguments, 1)]
    return None


def comparer_of(key: TypeName) -> TypeName:
    """Return the type of the comparer that .NET gives a dictionary with such keys."""
    is_nullable = key.name == KNOWN_GENERICS.nullable
    if is_nullable and not key.arrays:
        return TypeName(f"{_COLLECTIONS}.NullableEqualityComparer`1", key.arguments)
    is_equatable = not key.arrays and (
        key.canonical in PRIMITIVES
        or key.canonical in _PLAIN
        or key.canonical == "System.String"
        or key.name.startswith("System.ValueTuple`")
    )
    kind = "GenericEqualityComparer" if is_equatable else "ObjectEqualityComparer"
    return TypeName(f"{_COLLECTIONS}.{kind}`1", (key,))


def make_schema(
    type_name: str,
    members: Iterable[tuple[str, str]],
    flags: SchemaFlags,
    serializer: str,
    *,
    version: int = _VERSION,
) -> TypeSchema:
    """Return the schema of a type; its id is a hash of the name.

    `serializer` is one of psi's: SimpleSerializer for structs of primitives, StructSerializer for
    others, ClassSerializer for classes.

    :raises Malformed: a name is not valid.
    """
    name = parse_type_name(type_name).qualified
    return TypeSchema(
        name,
        schema_id(name),
        name,
        tuple(SchemaMember(member, parse_type_name(kind).qualified) for member, kind in members),
        flags,
        f"{_SERIALIZATION}.{serializer}`1[[{name}]], {RuntimeInfo().name}",
        version,
    )


def known_schemas(type_name: str) -> list[TypeSchema]:
    """Return the schemas of one of .NET's own types, after those of its parts.

    Empty for a custom type: create its schema with `make_schema`.

    :raises Malformed: it is not the name of a type.
    """
    found: dict[str, TypeSchema] = {}
    _collect(parse_type_name(type_name), found)
    return list(found.values())


def _collect(type: TypeName, found: dict[str, TypeSchema]) -> None:
    # psi has no arrays of more than one dimension.
    if type.qualified in found or type.arrays.strip("[]"):
        return
    if type.arrays:
        _collect(type.element, found)
        if type.element.qualified in found:
            found[type.qualified] = _array_schema(type)
        return
    members = members_of(type)
    if members is not None:
        for _, kind in members:
            _collect(kind, found)
        if type.name == KNOWN_GENERICS.dictionary:
            # A message names it by its number, and psi's pipeline ends where that is not known.
            name = comparer_of(type.arguments[0]).qualified
            found[name] = make_schema(name, (), SchemaFlags(0), "ImmutableSerializer")
        found[type.qualified] = _generic_schema(type, members)
        return
    schema = _plain_schema(type)
    if schema is not None:
        if type.canonical == "System.Object":
            for name in _BOXED:
                _collect(parse_type_name(name), found)
        found[type.qualified] = schema


def _plain_schema(type: TypeName) -> TypeSchema | None:
    name = type.canonical
    if name in PRIMITIVES:
        members: Iterable[tuple[str, str]] = [("m_value", name)]
        return make_schema(type.qualified, members, SchemaFlags.STRUCT, "SimpleSerializer")
    if name in _PLAIN:
        members = [(member, f"System.{kind}") for member, kind in _PLAIN[name]]
        return make_schema(type.qualified, members, SchemaFlags.STRUCT, "SimpleSerializer")
    if name == "System.String":
        schema = make_schema(type.qualified, (), SchemaFlags(0), "StringSerializer")
        return _with_plain_serializer(schema, "StringSerializer")
    if name == "System.Object":
        return make_schema(type.qualified, (), SchemaFlags(0), "ImmutableSerializer")
    return None


def _array_schema(type: TypeName) -> TypeSchema:
    element = type.element.canonical
    members = [("Elements", type.element.qualified)]
    schema = make_schema(type.qualified, members, SchemaFlags.COLLECTION, "ArraySerializer")
    if element == "System.Byte":
        return _with_plain_serializer(schema, "ByteArraySerializer")
    if element == "System.String":
        return _with_plain_serializer(schema, "StringArraySerializer")
    is_simple = element in PRIMITIVES or element in _PLAIN
    kind = "SimpleArraySerializer" if is_simple else "ArraySerializer"
    return schema._replace(
        serializer_type_name=(
            f"{_SERIALIZATION}.{kind}`1[[{type.element.qualified}]], {RuntimeInfo().name}"
        )
    )


def _generic_schema(type: TypeName, members: list[tuple[str, TypeName]]) -> TypeSchema:
    named = [(member, kind.qualified) for member, kind in members]
    flags, version, serializer = SchemaFlags.CLASS, _VERSION, "ClassSerializer"
    is_pair = type.name == KNOWN_GENERICS.pair
    if (
        is_pair
        or type.name == KNOWN_GENERICS.nullable
        or type.name.startswith("System.ValueTuple`")
    ):
        flags = SchemaFlags.STRUCT
        serializer = "ImmutableSerializer" if is_pair else "StructSerializer"
        if all(argument.canonical in PRIMITIVES for argument in type.arguments):
            serializer = "SimpleSerializer"
    elif type.name.startswith("System.Tuple`"):
        serializer = "ImmutableSerializer"
    elif type.name == KNOWN_GENERICS.dictionary:
        version = _DICTIONARY_VERSION
    schema = make_schema(type.qualified, named, flags, serializer, version=version)
    if type.name != KNOWN_GENERICS.dictionary:
        return schema
    arguments = ",".join(f"[{argument.qualified}]" for argument in type.arguments)
    return schema._replace(
        serializer_type_name=(
            f"{_SERIALIZATION}.DictionarySerializer`2+DictionarySerializerImpl[{arguments}], "
            f"{RuntimeInfo().name}"
        )
    )


def _with_plain_serializer(schema: TypeSchema, serializer: str) -> TypeSchema:
    return schema._replace(
        serializer_type_name=f"{_SERIALIZATION}.{serializer}, {RuntimeInfo().name}"
    )
