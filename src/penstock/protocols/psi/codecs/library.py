"""Which codec does a type have?"""

from __future__ import annotations

import datetime as dt
import decimal
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import numpy as np

from penstock.core.errors import Malformed
from penstock.protocols.psi.codecs.base import Codec, RawCodec, UnknownCodec, refuse
from penstock.protocols.psi.codecs.fixed import (
    PRIMITIVES,
    CharCodec,
    DateTimeCodec,
    DecimalCodec,
    FixedCodec,
    GuidCodec,
    NullableCodec,
    NumberCodec,
    PlainStructCodec,
    PlainTupleCodec,
    TimeSpanCodec,
)
from penstock.protocols.psi.codecs.records import (
    ClassCodec,
    DictionaryCodec,
    ListCodec,
    Member,
    OptionalCodec,
    SharedCodec,
    StructCodec,
    StructTupleCodec,
    TupleCodec,
)
from penstock.protocols.psi.codecs.references import (
    ArrayCodec,
    BytesCodec,
    FixedArrayCodec,
    InterfaceCodec,
    ObjectCodec,
    StringArrayCodec,
    StringCodec,
)
from penstock.protocols.psi.codecs.schemas import KNOWN_GENERICS, comparer_of, members_of
from penstock.protocols.psi.codecs.type_names import TypeName, parse_type_name, schema_id
from penstock.protocols.psi.errors import UnknownType
from penstock.protocols.psi.metadata import SchemaFlags
from penstock.protocols.psi.ticks import DateTime, TimeSpan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.protocols.psi.metadata import TypeSchema

__all__ = ["CodecLibrary"]

_MEMORY_STREAM: Final = "System.IO.MemoryStream"
#: The version of its schema from which on it is a length and bytes.
_STREAM_OF_BYTES: Final = 3
_SPECIAL: Final[dict[str, type[Codec]]] = {
    "System.Char": CharCodec,
    "System.DateTime": DateTimeCodec,
    "System.TimeSpan": TimeSpanCodec,
    "System.Guid": GuidCodec,
    "System.Decimal": DecimalCodec,
    "System.String": StringCodec,
    "System.Byte[]": BytesCodec,
    _MEMORY_STREAM: BytesCodec,
    "System.String[]": StringArrayCodec,
    "System.Object": ObjectCodec,
}
_COMPARERS: Final = frozenset(
    f"System.Collections.Generic.{kind}EqualityComparer`1"
    for kind in ("Generic", "Object", "Nullable")
)
#: psi's own, each with the serializer that its schema names: it writes the member that is told.
_SHARED: Final = ("Microsoft.Psi.Shared`1", "Microsoft.Psi.SharedContainer`1")
_ENUMERABLE: Final = "System.Collections.Generic.IEnumerable`1"
_INTERFACES: Final = ("System.Collections.Generic.IEqualityComparer`1",)
_GENERIC_CODECS: Final[dict[str, Callable[[str, CodecLibrary, Sequence[Member]], Codec]]] = {
    "System.Collections.Generic.List`1": ListCodec,
    "System.Collections.Generic.Dictionary`2": DictionaryCodec,
    "System.Collections.Generic.KeyValuePair`2": StructTupleCodec,
    "System.ValueTuple": StructTupleCodec,
    "System.Tuple": TupleCodec,
}
#: The type of an `object` by Python's type; the first match counts.
_BOXES: Final[tuple[tuple[type | tuple[type, ...], str], ...]] = (
    ((bool, np.bool_), "System.Boolean"),
    (str, "System.String"),
    ((bytes, bytearray, memoryview), "System.Byte[]"),
    (float, "System.Double"),
    (decimal.Decimal, "System.Decimal"),
    (UUID, "System.Guid"),
    ((DateTime, dt.datetime, np.datetime64), "System.DateTime"),
    ((TimeSpan, dt.timedelta, np.timedelta64), "System.TimeSpan"),
)
_INT32: Final = range(-(2**31), 2**31)


class CodecLibrary:
    """Codecs by type, for .NET's own types and for the schemas that a peer sent.

    `Catalog.codec` keeps one up to date. Payloads of unknown types stay bytes.
    """

    def __init__(
        self, schemas: Iterable[TypeSchema] = (), types: Iterable[tuple[int, str]] = ()
    ) -> None:
        self._schemas: dict[str, TypeSchema] = {}
        self._by_id: dict[int, TypeSchema] = {}
        #: Types by the names of their data contracts, which psi gives a stream as its type.
        self._contracts: dict[str, str] = {}
        self._codecs: dict[str, Codec] = {}
        #: Schemas are from psi, which has one of every type that it writes.
        self._is_described = False
        #: .NET's own types by number, of those that were asked for.
        self._known_ids: dict[int, str] = {}
        for schema in schemas:
            self.add(schema)
        for name in (*PRIMITIVES, *_SPECIAL):
            self._known_ids[schema_id(parse_type_name(name).qualified)] = name
        #: Of old stores, which have names in the metadata of streams and no schemas.
        self._known_ids.update(types)

    def add(self, schema: TypeSchema) -> None:
        """Add a type's schema; existing codecs do not change.

        A schema with an invalid name is skipped: payloads that need it stay bytes.
        """
        self._by_id[schema.id] = schema
        if schema.name != schema.type_name:
            self._contracts[schema.name] = schema.type_name
        self._is_described |= schema.serializer_type_name is not None
        try:
            self._schemas[parse_type_name(schema.type_name).canonical] = schema
        except Malformed:
            return

    def codec(self, type_name: str) -> Codec:
        """Return the codec of a stream's type; a `RawCodec` if the type is unknown.

        The name may be that of a data contract.
        """
        try:
            name = parse_type_name(self._contracts.get(type_name, type_name)).canonical
            found = self.resolve(name)
        except Malformed:
            return RawCodec(type_name, self)
        if isinstance(found, UnknownCodec):
            return RawCodec(name, self)
        if not isinstance(found, ObjectCodec) or name == "System.Object":
            return found
        # psi describes every type that has objects, and so this is an interface: its messages say
        # what they are. A type with a schema has a custom serializer, and stays bytes.
        is_array = bool(parse_type_name(name).arrays)
        is_interface = self._is_described and name not in self._schemas and not is_array
        return (InterfaceCodec if is_interface else RawCodec)(name, self)

    def resolve(self, name: str) -> Codec:
        """Return the codec of a type within another; one that asks the object if nothing is known.

        :raises Malformed: it is not the name of a type.
        """
        found = self._codecs.get(name)
        if found is None:
            type = parse_type_name(name)
            name = type.canonical
            found = self._known(type, name) or self._described(name) or self._open(type, name)
            self._codecs[name] = found
        return found

    def _open(self, type: TypeName, name: str) -> Codec:
        """Return the codec of a type whose members nobody tells.

        An object tells by its prefix what it is, if it is there at all; a struct does not.
        """
        schema = self._schemas.get(name)
        if schema is not None:
            is_object = SchemaFlags.STRUCT not in schema.flags
        else:
            # psi describes every struct that it does not copy as a part of another.
            is_object = self._is_described or type.name in _INTERFACES or bool(type.arrays)
        if is_object:
            return ObjectCodec(name, self)
        return UnknownCodec(name, self, is_final=schema is not None)

    def is_known(self, type: TypeName) -> bool:
        """Tell whether psi, too, can have such a type: .NET's own, or one that a schema tells."""
        if type.arrays:
            return self._is_flat(type) and self.is_known(type._replace(arrays=""))
        if type.canonical in self._schemas:
            return True
        if type.name in PRIMITIVES or type.name in _SPECIAL:
            return not type.arguments
        is_generic = type.name == _ENUMERABLE or members_of(type) is not None
        return is_generic and all(map(self.is_known, type.arguments))

    def named(self, name: str) -> Codec:
        """Return the codec of a type that the user named.

        :raises UnknownType: the type has no schema.
        """
        found = self.resolve(parse_type_name(name).canonical)
        if isinstance(found, UnknownCodec):
            raise UnknownType(name)
        if isinstance(found, ObjectCodec) and found.type_name != "System.Object":
            raise UnknownType(name)
        return found

    def by_id(self, id: int) -> Codec:
        """Return the codec of the type with a number.

        :raises UnknownType: the type has no schema.
        """
        schema = self._by_id.get(id)
        if schema is not None:
            found = self.codec(schema.type_name)
            if not found.is_raw:
                return found
            raise UnknownType(schema.type_name)
        name = self._known_ids.get(id)
        if name is None:
            raise UnknownType(f"schema {id}")
        return self.named(name)

    def id_of(self, codec: Codec) -> int:
        """Return the number of a codec's type: that of its schema, or else of .NET's own name."""
        schema = self._schemas.get(codec.type_name)
        if schema is not None:
            return schema.id
        id = schema_id(parse_type_name(codec.type_name).qualified)
        self._known_ids.setdefault(id, codec.type_name)
        return id

    def boxed(self, value: Any) -> Codec:
        """Return the codec for a value where the type says only `object`.

        :raises InvalidOption: no type of .NET corresponds to the value.
        """
        for kinds, name in _BOXES:
            if isinstance(value, kinds):
                return self.resolve(name)
        if isinstance(value, np.generic):
            for name, code in PRIMITIVES.items():
                if name != "System.Char" and value.dtype == np.dtype(code):
                    return self.resolve(name)
        if isinstance(value, int):
            return self.resolve("System.Int32" if value in _INT32 else "System.Int64")
        return refuse(value, "has no type of .NET: give a dict with $type")

    def _known(self, type: TypeName, name: str) -> Codec | None:
        special = _SPECIAL.get(name)
        if special is not None:
            return None if self._is_older_stream(name) else special(name, self)
        if name in PRIMITIVES:
            return NumberCodec(name, self, PRIMITIVES[name])
        if type.arrays:
            return self._array(name, type.element.canonical) if self._is_flat(type) else None
        if type.name == _ENUMERABLE and len(type.arguments) == 1:
            element = type.arguments[0].canonical
            # Its texts have prefixes, which those of an array have not.
            is_text = element == "System.String"
            return ArrayCodec(name, self, element) if is_text else self._array(name, element)
        if type.name in _COMPARERS:
            return ClassCodec(name, self, ())
        return self._generic(type, name)

    def _is_older_stream(self, name: str) -> bool:
        """Tell whether a type is the MemoryStream of an older psi, which stored its members."""
        schema = self._schemas.get(name) if name == _MEMORY_STREAM else None
        return schema is not None and schema.version < _STREAM_OF_BYTES

    @staticmethod
    def _is_flat(type: TypeName) -> bool:
        return type.arrays == "[]" * (len(type.arrays) // 2)

    def _array(self, name: str, element_name: str) -> Codec:
        if element_name == "System.String":
            return StringArrayCodec(name, self)
        element = self.resolve(element_name)
        if element_name == "System.Byte":
            return BytesCodec(name, self)
        if isinstance(element, FixedCodec):
            return FixedArrayCodec(name, self, element)
        return ArrayCodec(name, self, element_name)

    def _generic(self, type: TypeName, name: str) -> Codec | None:
        shape = members_of(type)
        if shape is None:
            return None
        schema = self._schemas.get(name)
        if schema is not None and len(schema.members) != len(shape):
            return None  # an older layout, which its schema tells
        members = [Member(member, kind.canonical) for member, kind in shape]
        is_nullable = type.name == KNOWN_GENERICS.nullable
        is_tuple = type.name.startswith("System.ValueTuple`")
        if is_nullable or is_tuple or type.name == KNOWN_GENERICS.pair:
            codecs = [(member, self.resolve(kind)) for member, kind in members]
            plain: list[tuple[str, FixedCodec]] = [
                (member, codec)
                for member, codec in codecs
                if isinstance(codec, (NumberCodec, CharCodec))
            ]
            if len(plain) == len(codecs):
                layout = NullableCodec if is_nullable else PlainTupleCodec
                return layout(name, self, plain, by_size=is_tuple)
            if schema is not None and _serializer(schema) == "SimpleSerializer":
                # The rest are enums, of which psi does not tell the size here.
                rest = next(codec for codec in codecs if codec not in plain)
                return UnknownCodec(rest[1].type_name, self, is_final=True)
        if is_nullable:
            return OptionalCodec(name, self, members)
        if type.name == KNOWN_GENERICS.dictionary:
            self.id_of(self.resolve(comparer_of(type.arguments[0]).canonical))
        kind = _GENERIC_CODECS.get(type.name) or _GENERIC_CODECS[type.name.partition("`")[0]]
        return kind(name, self, members)

    def _described(self, name: str) -> Codec | None:
        """Make a codec of a schema, where psi's serializer is one that follows its members."""
        schema = self._schemas.get(name)
        if schema is None:
            return None
        members = [Member(member.name, member.type_name) for member in schema.members]
        match _serializer(schema):
            case "SimpleSerializer":
                # A data contract is copied whole, while it names some members, in another order.
                is_contract = SchemaFlags.DATA_CONTRACT in schema.flags
                return None if is_contract else self._plain(name, members)
            case "StructSerializer":
                return StructCodec(name, self, members)
            case "ClassSerializer":
                return ClassCodec(name, self, members)
            case "ImmutableSerializer":
                is_struct = SchemaFlags.STRUCT in schema.flags
                return (StructCodec if is_struct else ClassCodec)(name, self, members)
            case "":
                return self._by_flags(name, schema, members)
        if parse_type_name(name).name in _SHARED and len(members) == 1:
            return SharedCodec(name, self, members)
        # A custom serializer: its bytes do not follow the members.
        return None

    def _by_flags(self, name: str, schema: TypeSchema, members: list[Member]) -> Codec | None:
        if SchemaFlags.CLASS in schema.flags:
            return ClassCodec(name, self, members)
        if SchemaFlags.STRUCT not in schema.flags:
            return None
        return self._plain(name, members) or StructCodec(name, self, members)

    def _plain(self, name: str, members: list[Member]) -> Codec | None:
        codecs: list[tuple[str, FixedCodec]] = []
        for member in members:
            kind = parse_type_name(member.type_name).canonical
            # Primitives and enums only: a struct that holds itself would never end.
            schema = self._schemas.get(kind)
            is_enum = schema is not None and [m.name for m in schema.members] == ["value__"]
            if kind == name or not (kind in PRIMITIVES or is_enum):
                return None
            codec = self.resolve(kind)
            if not isinstance(codec, FixedCodec):
                return None
            codecs.append((member.name, codec))
        names = [member for member, _ in codecs]
        if names == ["value__"]:
            kind = parse_type_name(members[0].type_name).canonical
            return NumberCodec(name, self, PRIMITIVES[kind]) if kind in PRIMITIVES else None
        if len(set(names)) != len(names) or "" in names:
            return None
        return PlainStructCodec(name, self, codecs)


def _serializer(schema: TypeSchema) -> str:
    """Return the name of a type's serializer, without what surrounds it; empty: it is not told."""
    name = (schema.serializer_type_name or "").partition("`")[0].rpartition(".")[2]
    return name.partition(",")[0]
