"""Which options does decoding have, in YAML and in Python?"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
import pyarrow as pa
import yaml
from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator

from penstock.core.config import ConfigModel
from penstock.core.decoding.arrow_stream import ArrowDecoder
from penstock.core.decoding.csv_text import CsvDecoder, check_csv_schema
from penstock.core.decoding.json_text import JsonDecoder, check_json_schema
from penstock.core.decoding.layout import (
    Layout,
    from_c,
    from_dtype,
    from_format,
    from_items,
    is_format,
)
from penstock.core.decoding.protobuf import ProtobufDecoder
from penstock.core.decoding.schema import Wrong, arrow_schema
from penstock.core.decoding.structs import StructDecoder
from penstock.core.decoding.xml_text import XmlDecoder, check_xml_schema
from penstock.core.errors import InvalidOption, PenstockError
from penstock.core.options import Size, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationInfo

    from penstock.core.decoding.decoder import Decoder

__all__ = [
    "AnyDecodeOptions",
    "ArrowOptions",
    "CsvOptions",
    "DecodeOptions",
    "InvalidDecoding",
    "JsonOptions",
    "ProtobufOptions",
    "StructField",
    "StructOptions",
    "XmlOptions",
    "decoder_for",
    "decoding_from_text",
    "parse_decoding",
]

_LARGEST_DESCRIPTORS: Final = 64 << 20
_LARGEST_PAYLOAD: Final = 64 << 20

#: Hints for a missing option.
_EXAMPLES: Final = {
    "schema": "as in schema: id BIGINT, name STRING",
    "layout": "as in layout: float azimuth; uint16_t gates;",
    "descriptor_set": "a file of protoc --include_imports --descriptor_set_out=…",
}


class InvalidDecoding(InvalidOption):
    """A decoding option is not valid; `path` names it, as in ("layout", 1, "type")."""

    def __init__(
        self, path: tuple[str | int, ...], value: object, reason: str, *, hint: str | None = None
    ) -> None:
        dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
        super().__init__(f"decode{dotted}", value, reason, hint=hint)
        self.path = path


class DecodeOptions(ConfigModel):
    """Options of all formats."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    format: str
    #: Columns of the message to keep; by default all but the payload.
    keep: tuple[str, ...] | None = None
    #: Prefix of the name of every new column.
    prefix: str = ""
    #: How to handle a payload that does not decode.
    on_error: Literal["fail", "skip", "dead_letter"] = "fail"

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return the decoder.

        :raises InvalidOption: the options conflict, or name something that does not exist.
        """


def _layout_kind(value: object) -> str:
    if isinstance(value, np.dtype):
        return "dtype"
    return "list" if isinstance(value, list | tuple) else "text"


class StructField(ConfigModel):
    """One field of a struct."""

    name: Annotated[str, Field(min_length=1)]
    #: A numpy type (`f4`, `>u2`, `c8`, `S16`), or a C type (`uint16_t`).
    type: str
    #: Dimensions, outermost first; those of the last field may start with -1.
    shape: tuple[int, ...] = ()

    @field_validator("type")
    @classmethod
    def _check_type(cls, type: str) -> str:
        from_items([("field", type, ())], "little", packed=True)
        return type


class StructOptions(DecodeOptions):
    """C structs, numpy dtypes and formats of Python's `struct`."""

    format: Literal["struct"]
    byte_order: Literal["little", "big"] = "little"
    #: Without the padding of a C compiler. By default, C has padding, a list of fields has none.
    packed: bool | None = None
    #: Complex numbers as struct<re, im>, or as neighbours in one array.
    complex: Literal["struct", "array"] = "struct"
    #: A payload is any number of structs, each a row, after a header of `skip` bytes.
    records: bool = False
    skip: Annotated[int, Field(ge=0, le=_LARGEST_PAYLOAD)] = 0
    #: Names of the fields of a format such as "<dHH".
    names: tuple[str, ...] | None = None
    layout: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[tuple[StructField, ...], Tag("list")]
        | Annotated[np.dtype, Tag("dtype")],
        Discriminator(_layout_kind),
    ]

    @field_validator("layout")
    @classmethod
    def _check_layout(cls, layout: Any, info: ValidationInfo) -> Any:
        if {"byte_order", "packed", "names"} <= info.data.keys():
            _layout(layout, info.data)
        return layout

    def decoder(self) -> Decoder:
        layout = self.described()
        if self.records and layout.tail is not None:
            raise InvalidOption("records", True, "the last field takes all that follows it")
        return StructDecoder(
            layout, self.complex, self.prefix, records=self.records, skip=self.skip
        )

    def described(self) -> Layout:
        """Return the layout of the fields."""
        return _layout(self.layout, dict(self))


def _layout(given: Any, options: Mapping[str, Any]) -> Layout:
    order, packed, names = options["byte_order"], options["packed"], options["names"]
    if isinstance(given, str) and is_format(given):
        return from_format(given, names)
    if names is not None:
        raise Wrong("has names already", hint='names: is for a format such as "<dHH"')
    if isinstance(given, np.dtype):
        return from_dtype(given)
    if isinstance(given, str):
        return from_c(given, order, packed=bool(packed))
    items = [(field.name, field.type, field.shape) for field in given]
    return from_items(items, order, packed=packed is not False)


def _schema_kind(value: object) -> str:
    if isinstance(value, pa.Schema):
        return "arrow"
    return "mapping" if isinstance(value, dict) else "text"


class _WithSchema(DecodeOptions):
    """Options of formats with a schema."""

    #: Spark's DDL, a mapping of columns to types, or an Arrow schema.
    columns: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[dict[str, str], Tag("mapping")]
        | Annotated[pa.Schema, Tag("arrow")],
        Discriminator(_schema_kind),
        Field(alias="schema"),
    ]

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, columns: Any) -> pa.Schema:
        schema = arrow_schema(columns)
        cls._check_schema(schema)
        return schema

    @classmethod
    def _check_schema(cls, schema: pa.Schema) -> None:
        """Refuse types that the format does not support."""


class JsonOptions(_WithSchema):
    """One JSON object per payload."""

    format: Literal["json"]

    @classmethod
    def _check_schema(cls, schema: pa.Schema) -> None:
        check_json_schema(schema)

    def decoder(self) -> Decoder:
        return JsonDecoder(self.columns, self.prefix)


class CsvOptions(_WithSchema):
    """Lines of values; every line is a row."""

    format: Literal["csv"]
    delimiter: str = ","
    #: The first line of every payload names its columns.
    header: bool = False
    #: Values that mean null, except in text columns.
    nulls: tuple[str, ...] = ("",)

    @field_validator("delimiter")
    @classmethod
    def _check_delimiter(cls, delimiter: str) -> str:
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0':
            raise Wrong("should be one ASCII character")
        return delimiter

    @classmethod
    def _check_schema(cls, schema: pa.Schema) -> None:
        check_csv_schema(schema)

    def decoder(self) -> Decoder:
        return CsvDecoder(
            self.columns,
            self.prefix,
            delimiter=self.delimiter,
            header=self.header,
            nulls=self.nulls,
        )


class ArrowOptions(_WithSchema):
    """One Arrow stream per payload; every row of it is a row."""

    format: Literal["arrow"]
    #: The most bytes that a payload may become in memory.
    max_size: Size = _LARGEST_PAYLOAD
    max_rows: Annotated[int, Field(ge=1)] = 1_000_000

    def decoder(self) -> Decoder:
        return ArrowDecoder(
            self.columns, self.prefix, max_size=self.max_size, max_rows=self.max_rows
        )


class XmlOptions(_WithSchema):
    """One XML document per payload; every element that `rows` finds is a row."""

    format: Literal["xml"]
    #: An XPath from the root.
    rows: str = "/*"
    #: XPaths of columns, relative to the row; by default the element or attribute of that name.
    paths: dict[str, str] = Field(default_factory=dict)
    #: Namespaces, by the prefixes in the paths.
    namespaces: dict[str, str] = Field(default_factory=dict)
    max_size: Size = _LARGEST_PAYLOAD
    max_rows: Annotated[int, Field(ge=1)] = 1_000_000

    @classmethod
    def _check_schema(cls, schema: pa.Schema) -> None:
        check_xml_schema(schema)

    def decoder(self) -> Decoder:
        return XmlDecoder(
            self.columns,
            self.prefix,
            rows=self.rows,
            paths=self.paths,
            namespaces=self.namespaces,
            max_size=self.max_size,
            max_rows=self.max_rows,
        )


class ProtobufOptions(DecodeOptions):
    """One protobuf message per payload."""

    format: Literal["protobuf"]
    #: A file of `protoc --include_imports --descriptor_set_out`, or its bytes.
    descriptor_set: str | bytes
    #: The message's name, with its package.
    message: str
    #: The fields that become columns; by default all.
    fields: tuple[str, ...] | None = None
    #: The most bytes of a payload.
    max_size: Size = _LARGEST_PAYLOAD

    def decoder(self) -> Decoder:
        given = self.descriptor_set
        name = "bytes" if isinstance(given, bytes) else given
        try:
            descriptors = given if isinstance(given, bytes) else _read(Path(given))
            return ProtobufDecoder(
                descriptors, self.message, self.fields, self.prefix, max_size=self.max_size
            )
        except InvalidOption as error:
            value = name if error.option == "descriptor_set" else error.value
            raise InvalidDecoding((error.option,), value, error.reason, hint=error.hint) from None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            descriptors = file.read(_LARGEST_DESCRIPTORS + 1)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise InvalidOption("descriptor_set", path, reason) from None
    if len(descriptors) > _LARGEST_DESCRIPTORS:
        raise InvalidOption("descriptor_set", path, "is too large")
    return descriptors


#: For a model with a decoding field: the format selects the options.
AnyDecodeOptions = Annotated[
    StructOptions | JsonOptions | CsvOptions | ArrowOptions | ProtobufOptions | XmlOptions,
    Field(discriminator="format"),
]

_FORMATS: Final[dict[str, type[DecodeOptions]]] = {
    "struct": StructOptions,
    "json": JsonOptions,
    "csv": CsvOptions,
    "arrow": ArrowOptions,
    "protobuf": ProtobufOptions,
    "xml": XmlOptions,
}


def parse_decoding(given: Mapping[str, Any]) -> DecodeOptions:
    """Check options such as `{format: struct, layout: "<d"}`.

    :raises InvalidDecoding: one is unknown or missing, or its value does not fit.
    """
    format = given.get("format")
    if format is None:
        hint = f"one of {', '.join(_FORMATS)}"
        raise InvalidDecoding(("format",), None, "is missing", hint=hint)
    model = _FORMATS.get(str(format))
    if model is None:
        hint = nearest(str(format), _FORMATS, "formats")
        raise InvalidDecoding(("format",), format, "there is no such format", hint=hint)
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        raise _explain(error, model, given) from None


#: The main option of each format, for the short form `format:value`.
_SHORT: Final = {"struct": "layout", "json": "schema", "csv": "schema", "arrow": "schema"}


def decoding_from_text(text: str) -> dict[str, Any]:
    """Parse options from a short form, `struct:<dHH`, or from YAML or JSON.

    :raises InvalidOption: the text is neither.
    """
    format, colon, rest = text.partition(":")
    if format == "protobuf" and colon:
        file, _, message = rest.rpartition(":")
        if not file:
            raise InvalidOption(
                "decode", text, "names no message", hint="as in 'protobuf:FILE:package.Message'"
            )
        return {"format": format, "descriptor_set": file, "message": message}
    if format in _SHORT and colon:
        return {"format": format, _SHORT[format]: rest}
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError:
        given = None
    if not isinstance(given, dict):
        raise InvalidOption(
            "decode",
            text,
            "takes a format",
            hint="as in 'struct:<dHH', 'json:id BIGINT, name STRING', "
            "'protobuf:FILE:package.Message', or '{format: csv, schema: \"id BIGINT\", "
            'delimiter: ";"}\'',
        )
    return given


def decoder_for(
    options: DecodeOptions | Mapping[str, Any] | None = None, /, **more: Any
) -> Decoder:
    """Return a decoder of payloads, as in `decoder_for(format="struct", layout="<d")`.

    :raises InvalidOption: an option is unknown or missing, or its value does not fit.
    :raises Unsupported: a library that the format needs is not installed.
    """
    if not isinstance(options, DecodeOptions):
        chosen = parse_decoding({**(options or {}), **more})
    elif more:
        raise InvalidOption("decode", sorted(more), "options were given twice")
    else:
        chosen = options
    try:
        return chosen.decoder()
    except InvalidOption as error:
        if isinstance(error, InvalidDecoding):
            raise
        path = (error.option,)
        raise InvalidDecoding(path, error.value, error.reason, hint=error.hint) from None


def _explain(
    error: ValidationError, model: type[ConfigModel], given: Mapping[str, Any]
) -> InvalidDecoding:
    first = error.errors(include_url=False)[0]
    loc = first["loc"]
    # Pydantic puts the names of a union's members between the keys.
    path: tuple[str | int, ...] = ()
    data: Any = given
    for part in loc[:-1] if first["type"] in {"missing", "extra_forbidden"} else loc:
        try:
            data = data[part]
        except (TypeError, KeyError, IndexError):
            continue
        path = (*path, part)
        if part == "layout":
            model = StructField
    if first["type"] == "missing":
        hint = _EXAMPLES.get(str(loc[-1]))
        return InvalidDecoding((*path, loc[-1]), None, "is missing", hint=hint)
    if first["type"] == "extra_forbidden":
        known = sorted(field.alias or name for name, field in model.model_fields.items())
        hint = nearest(str(loc[-1]), known, "known options")
        return InvalidDecoding(
            (*path, loc[-1]), first["input"], "there is no such option", hint=hint
        )
    cause = first.get("ctx", {}).get("error")
    said = cause.hint if isinstance(cause, PenstockError) else None
    if isinstance(cause, InvalidOption):  # by a unit's parser, without the option's name
        return InvalidDecoding(path, data, cause.reason, hint=said)
    reason = str(first["msg"]).removeprefix("Value error, ").replace("Input should", "should", 1)
    return InvalidDecoding(path, data, reason, hint=said)
