"""How do payloads that are protobuf messages become columns?"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from penstock.core.decoding.decoder import Decoder, Failure, Part
from penstock.core.decoding.schema import filled_list
from penstock.core.errors import InvalidOption, Unsupported
from penstock.core.options import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Get = Callable[[Any], Any]

__all__ = ["ProtobufDecoder"]

_KINDS: Final = {
    **dict.fromkeys(("INT32", "SINT32", "SFIXED32"), pa.int32()),
    **dict.fromkeys(("INT64", "SINT64", "SFIXED64"), pa.int64()),
    **dict.fromkeys(("UINT32", "FIXED32"), pa.int64()),
    **dict.fromkeys(("UINT64", "FIXED64"), pa.decimal128(20, 0)),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BOOL": pa.bool_(),
    "STRING": pa.string(),
    "BYTES": pa.binary(),
    "ENUM": pa.string(),
}


class ProtobufDecoder(Decoder):
    """Parses each payload with the protobuf library, by a descriptor set of `protoc`."""

    format: ClassVar[str] = "protobuf"

    def __init__(
        self,
        descriptors: bytes,
        message: str,
        fields: Sequence[str] | None,
        prefix: str,
        *,
        max_size: int,
    ) -> None:
        """Look up the message.

        :raises Unsupported: the protobuf library is not installed.
        :raises InvalidOption: there is no such message or field, or it cannot become a column.
        """
        self._descriptors = descriptors
        self._message = message
        self._fields = None if fields is None else tuple(fields)
        self._max_size = max_size
        self._build()
        super().__init__(
            pa.schema([(name, _type(f, (message,))) for name, f in self._chosen]), prefix
        )

    def __getstate__(self) -> dict[str, Any]:
        # Classes of messages are made at run time; a task makes its own.
        left_out = {"_class", "_chosen", "_getters"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._build()

    def _build(self) -> None:
        library = _library()
        pool = library.descriptor_pool.DescriptorPool()
        descriptor = _find(pool, library, self._descriptors, self._message)
        self._class = library.message_factory.GetMessageClass(descriptor)
        known = descriptor.fields_by_name
        for name in self._fields or ():
            if name not in known:
                hint = nearest(name, known, "its fields")
                raise InvalidOption("fields", name, f"{self._message} has no such field", hint=hint)
        self._chosen = [(name, known[name]) for name in self._fields or list(known)]
        self._getters: list[_Get] | None = None

    def _decode(self, payloads: pa.LargeBinaryArray) -> Part:
        error_type = _library().message.DecodeError
        if self._getters is None:
            self._getters = [_getter(field) for _, field in self._chosen]
        getters = self._getters
        values: list[list[Any]] = [[] for _ in getters]
        origin: list[int] = []
        failures: list[Failure] = []
        expected = f"a message {self._message}"
        for row, payload in enumerate(payloads.to_pylist()):
            if len(payload) > self._max_size:
                most = f"at most {self._max_size:,} bytes"
                failures.append(Failure(row, most, f"{len(payload):,} bytes"))
                continue
            try:
                message = self._class.FromString(payload)
                if not message.IsInitialized():
                    missing = ", ".join(message.FindInitializationErrors())
                    failures.append(Failure(row, expected, f"none of the required {missing}"))
                    continue
                found = [get(message) for get in getters]
            except (error_type, UnicodeDecodeError) as error:
                failures.append(Failure(row, expected, str(error)))
                continue
            for column, value in zip(values, found, strict=True):
                column.append(value)
            origin.append(row)
        columns = [
            pa.array(column, field.type) for column, field in zip(values, self._plain, strict=True)
        ]
        return Part(columns, np.array(origin, np.int64) if failures else None, failures)


class _Library:
    """The modules of the protobuf library that are used here."""

    def __init__(self) -> None:
        from google.protobuf import (  # noqa: PLC0415 - an extra
            descriptor_pb2,
            descriptor_pool,
            message,
            message_factory,
        )

        self.descriptor_pb2: Any = descriptor_pb2
        self.descriptor_pool: Any = descriptor_pool
        self.message: Any = message
        self.message_factory: Any = message_factory


def _library() -> _Library:
    try:
        return _Library()
    except ImportError as error:
        raise Unsupported(
            "decoding protobuf needs the protobuf library", hint="pip install 'penstock[protobuf]'"
        ) from error


def _find(pool: Any, library: _Library, descriptors: bytes, name: str) -> Any:
    option = "descriptor_set"
    hint = "make it with protoc --include_imports --descriptor_set_out=FILE …"
    try:
        files = library.descriptor_pb2.FileDescriptorSet.FromString(descriptors).file
    except library.message.DecodeError:
        raise InvalidOption(option, "…", "is not a descriptor set", hint=hint) from None
    if not files:
        raise InvalidOption(option, "…", "has no files", hint=hint)
    try:
        for file in files:
            pool.Add(file)
        return pool.FindMessageTypeByName(name)
    except TypeError as error:
        raise InvalidOption(option, "…", f"does not fit together: {error}", hint=hint) from None
    except KeyError:
        known = [each for file in files for each in _names(file.package, file.message_type)]
        if name in known:
            raise InvalidOption(option, "…", "lacks what it imports", hint=hint) from None
        raise InvalidOption(
            "message", name, "there is no such message", hint=nearest(name, known, "messages")
        ) from None


def _names(package: str, messages: Any) -> list[str]:
    found = []
    for message in messages:
        name = f"{package}.{message.name}" if package else message.name
        found += [name, *_names(name, message.nested_type)]
    return found


# --- a field's type, and how its value is taken ---------------------------------------------


def _kind_name(field: Any) -> str:
    return next(
        name.removeprefix("TYPE_")
        for name in dir(type(field))
        if name.startswith("TYPE_") and getattr(type(field), name) == field.type
    )


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _type(field: Any, inside: tuple[str, ...]) -> pa.DataType:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return pa.map_(_one_type(key, inside), _one_type(value, inside))
    kind = _one_type(field, inside)
    return filled_list(kind) if field.is_repeated else kind


def _one_type(field: Any, inside: tuple[str, ...]) -> pa.DataType:
    message = field.message_type
    if message is None:
        return _KINDS[_kind_name(field)]
    hint = "name the fields that are wanted: fields: [a, b]"
    if message.full_name in inside:
        reason = f"{message.full_name} has itself inside, which no column can"
        raise InvalidOption("fields", field.full_name, reason, hint=hint)
    if not message.fields:
        reason = f"{message.full_name} has no fields"
        raise InvalidOption("fields", field.full_name, reason, hint=hint)
    inner = (*inside, message.full_name)
    return pa.struct([(each.name, _type(each, inner)) for each in message.fields])


def _getter(field: Any) -> _Get:
    name = field.name
    convert = _converter(field)
    if _is_map(field):
        key, value = (_converter(field.message_type.fields_by_name[n]) for n in ("key", "value"))
        return lambda message: [
            (key(each), value(found)) for each, found in getattr(message, name).items()
        ]
    if field.is_repeated:
        return lambda message: [convert(each) for each in getattr(message, name)]
    if field.has_presence:
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _converter(field: Any) -> _Get:
    if field.message_type is not None and not _is_map(field):
        inner = [(each.name, _getter(each)) for each in field.message_type.fields]
        return lambda message: {name: get(message) for name, get in inner}
    if field.enum_type is not None:
        # The first of several names for a number, as protobuf's own JSON has it.
        names = {each.number: each.name for each in reversed(field.enum_type.values)}
        return lambda number: names.get(number, str(number))
    if pa.types.is_decimal(_KINDS.get(_kind_name(field), pa.null())):
        return Decimal
    return _text if _kind_name(field) == "STRING" else _same


def _text(value: Any) -> Any:
    # By proto2 the library gives bytes, if it is no UTF-8.
    return value.decode() if isinstance(value, bytes) else value


def _same(value: Any) -> Any:
    return value
