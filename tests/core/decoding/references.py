"""What should payloads become? Said by Python's own parsers, a payload at a time.

A reference returns the rows of a payload, or raises `Fails` if it has none that a column can hold.
"""

from __future__ import annotations

import csv
import datetime as dt
import io
import json
import math
import re
import struct
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Fails", "csv_rows", "is_same", "is_unchanged", "json_row", "message_row", "struct_row"]

_EXACT = Context(prec=2000)
#: The largest FLOAT, and where what is larger would be rounded up to no FLOAT.
_SINGLE, _OVER_SINGLE = float(np.finfo(np.float32).max), Fraction(2**128 - 2**103)
_SPACE = " \t\n\v\f\r"
_TRUE, _FALSE = {"1", "true", "True", "TRUE"}, {"0", "false", "False", "FALSE"}
_NAN = re.compile(r"[+-]?nan(\([0-9a-z_]*\))?", re.IGNORECASE)
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Fails(Exception):
    """A payload should not decode."""


class Single(str):
    """The text of a number that a FLOAT is the nearest to."""

    __slots__ = ()


def is_same(found: Any, expected: Any) -> bool:
    """Compare values; what is not a number is the same as another such."""
    if isinstance(expected, Single):
        return _is_nearest(found, expected)
    if isinstance(expected, float):
        if not isinstance(found, float):
            return False
        if math.isnan(expected) or math.isnan(found):
            return math.isnan(expected) and math.isnan(found)
        return found == expected and math.copysign(1, found) == math.copysign(1, expected)
    if isinstance(expected, Pairs):
        found, expected = sorted(found, key=repr), sorted(expected, key=repr)
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(is_same(found[name], expected[name]) for name in expected)
        )
    if isinstance(expected, list | tuple):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(map(is_same, found, expected))
        )
    return bool(found == expected and type(found) is type(expected))


def _is_nearest(found: Any, text: str) -> bool:
    if not isinstance(found, float):
        return False
    with np.errstate(over="ignore"):
        near = np.float32(float(text))
    if found == near or math.isnan(found) or math.isinf(found):
        return bool(found == near or (math.isnan(found) and np.isnan(near)))
    exact = Fraction(Decimal(text))  # once was rounded to a DOUBLE, then to a FLOAT
    single = np.float32(found)
    with np.errstate(over="ignore"):
        others = [np.nextafter(single, np.float32(side)) for side in (-np.inf, np.inf)]
    miss = abs(exact - Fraction(float(single)))
    return all(miss <= abs(exact - Fraction(float(x))) for x in others if np.isfinite(x))


# --- text -----------------------------------------------------------------------------------


def _decimal(text: str, kind: pa.Decimal128Type) -> Decimal:
    if not _NUMBER.fullmatch(text):
        raise Fails(text)
    value = Decimal(text)
    if value.is_zero():
        return Decimal(0).scaleb(-kind.scale)
    if value.adjusted() >= kind.precision - kind.scale:
        raise Fails(text)
    try:
        scaled = value.quantize(Decimal(1).scaleb(-kind.scale), context=_EXACT)
    except InvalidOperation:
        raise Fails(text) from None
    if scaled != value:
        raise Fails(text)
    return scaled


def _float(text: str, kind: pa.DataType) -> Any:
    if _NAN.fullmatch(text):
        return math.nan
    if _INFINITE.fullmatch(text):
        return float(text)
    if not _NUMBER.fullmatch(text):
        raise Fails(text)
    value = float(text)
    if math.isinf(value):
        raise Fails(text)
    if not pa.types.is_float32(kind):
        return value
    if abs(value) > _SINGLE and abs(Fraction(Decimal(text))) >= _OVER_SINGLE:
        raise Fails(text)
    return Single(text)


def _time(text: str, kind: pa.DataType, *, needs_zone: bool) -> Any:
    try:
        if pa.types.is_date(kind):
            return dt.date.fromisoformat(text)
        value = dt.datetime.fromisoformat(text)
        if kind.tz is None:
            if value.tzinfo is not None:
                raise Fails(text)
            return value
        if value.tzinfo is None:
            if needs_zone:
                raise Fails(text)
            value = value.replace(tzinfo=dt.UTC)
        return value.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        raise Fails(text) from None


def _whole(value: int, kind: pa.DataType) -> int:
    most = 1 << (kind.bit_width - 1)
    if not -most <= value < most:
        raise Fails(value)
    return value


# --- JSON -----------------------------------------------------------------------------------


class _Token(str):
    """A number as it is written."""

    __slots__ = ()


class _Pairs(list[Any]):
    """An object as it is written."""


def json_row(payload: bytes, schema: pa.Schema) -> dict[str, Any]:
    """Read one object with Python's `json`."""
    try:
        found = json.loads(
            payload.decode(),
            parse_int=_Token,
            parse_float=_Token,
            parse_constant=_Token,
            object_pairs_hook=_Pairs,
        )
    except (ValueError, RecursionError):
        raise Fails(payload) from None
    return _object(found, list(schema))


def _object(found: Any, fields: list[pa.Field]) -> dict[str, Any]:
    if not isinstance(found, _Pairs):
        raise Fails(found)
    row: dict[str, Any] = {field.name: None for field in fields}
    kinds = {field.name: field.type for field in fields}
    seen = set()
    for name, value in found:
        if name in kinds:
            if name in seen:
                raise Fails(name)
            seen.add(name)
            row[name] = _json_value(value, kinds[name])
    return row


def _json_value(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return _object(value, list(kind))
    if pa.types.is_list(kind):
        if not isinstance(value, list) or isinstance(value, _Pairs):
            raise Fails(value)
        return [_json_value(each, kind.value_type) for each in value]
    if pa.types.is_boolean(kind):
        if not isinstance(value, bool):
            raise Fails(value)
        return value
    if not isinstance(value, str):
        raise Fails(value)
    is_number = isinstance(value, _Token)
    if pa.types.is_decimal(kind):
        return _decimal(str(value), kind)
    if pa.types.is_floating(kind) and is_number:
        return _float(str(value), kind)
    if pa.types.is_integer(kind) and is_number:
        if not re.fullmatch(r"-?\d+", value):
            raise Fails(value)
        return _whole(int(value), kind)
    if is_number or pa.types.is_floating(kind) or pa.types.is_integer(kind):
        raise Fails(value)
    if pa.types.is_string(kind):
        _utf8(value)
        return value
    return _time(value, kind, needs_zone=False)


def _utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Fails(text) from None


# --- CSV ------------------------------------------------------------------------------------


def csv_rows(
    payload: bytes, schema: pa.Schema, delimiter: str = ",", *, header: bool = False
) -> list[dict[str, Any]]:
    """Read lines with Python's `csv`, byte by byte."""
    text = payload.removeprefix(b"\xef\xbb\xbf").decode("latin-1").rstrip("\r\n")
    if not text:
        raise Fails(payload)
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error:
        raise Fails(payload) from None
    names = schema.names
    if header:
        try:
            names = [each.encode("latin-1").decode().strip() for each in lines.pop(0)]
        except UnicodeDecodeError:
            raise Fails(payload) from None
        if len(set(names)) != len(names) or set(schema.names) - set(names):
            raise Fails(payload)
    if any(len(line) != len(names) for line in lines):
        raise Fails(payload)
    places = [names.index(name) for name in schema.names]
    return [
        {
            field.name: _csv_value(line[place].encode("latin-1"), field.type)
            for field, place in zip(schema, places, strict=True)
        }
        for line in lines
    ]


def _csv_value(raw: bytes, kind: pa.DataType) -> Any:
    if pa.types.is_binary(kind):
        return raw
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise Fails(raw) from None
    if pa.types.is_string(kind):
        return text
    if not text:
        return None
    if pa.types.is_boolean(kind):
        if text not in _TRUE | _FALSE:
            raise Fails(text)
        return text in _TRUE
    text = text.strip(_SPACE)
    if pa.types.is_decimal(kind):
        return _decimal(text, kind)
    if pa.types.is_floating(kind):
        return _float(text, kind)
    if pa.types.is_integer(kind):
        if not re.fullmatch(r"-?\d+", text, re.ASCII) or len(text) > 1000:
            raise Fails(text)
        return _whole(int(text), kind)
    return _time(text, kind, needs_zone=True)


# --- structs --------------------------------------------------------------------------------


def struct_row(payload: bytes, fixed: str, names: list[str], tail: str = "") -> dict[str, Any]:
    """Read with Python's `struct`; bytes that are named `text…` are C's text."""
    size = struct.calcsize(fixed)
    step = struct.calcsize(fixed[0] + tail) if tail else 0
    over = len(payload) - size
    if over < 0 or (over % step if tail else over):
        raise Fails(payload)
    values: list[Any] = list(struct.unpack_from(fixed, payload))
    if tail:
        values.append([each[0] for each in struct.iter_unpack(fixed[0] + tail, payload[size:])])
    row: dict[str, Any] = dict(zip(names, values, strict=True))
    for name, value in row.items():
        if name.startswith("text"):
            try:
                row[name] = value.split(b"\0")[0].decode()
            except UnicodeDecodeError:
                raise Fails(value) from None
        elif name.startswith("wide"):
            row[name] = Decimal(value)
    return row


# --- protobuf -------------------------------------------------------------------------------


class Pairs(list[Any]):
    """A map, whose entries have no order."""


def message_row(payload: bytes, kind: Any, fields: Sequence[str] | None = None) -> dict[str, Any]:
    """Read with the protobuf library, and go through the fields that are set."""
    try:
        message = kind.FromString(payload)
    except DecodeError:
        raise Fails(payload) from None
    if not message.IsInitialized():
        raise Fails(payload)
    try:
        return _message(message, fields)
    except UnicodeDecodeError:
        raise Fails(payload) from None


def _message(message: Any, fields: Sequence[str] | None = None) -> dict[str, Any]:
    present = {field.name: value for field, value in message.ListFields() if not field.is_extension}
    row: dict[str, Any] = {}
    known = message.DESCRIPTOR.fields_by_name
    for name in known if fields is None else fields:
        field = known[name]
        value = present.get(field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_key, of_value = (field.message_type.fields_by_name[n] for n in ("key", "value"))
            pairs = dict(value or {}).items()
            row[field.name] = Pairs((_single(k, of_key), _single(v, of_value)) for k, v in pairs)
        elif field.is_repeated:
            row[field.name] = [_single(each, field) for each in value or ()]
        elif value is None and field.has_presence:
            row[field.name] = None
        else:
            row[field.name] = _single(field.default_value if value is None else value, field)
    return row


def _single(value: Any, field: Any) -> Any:
    if field.message_type is not None:
        return _message(value)
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return str(value) if named is None else named.name
    if field.type in {field.TYPE_UINT64, field.TYPE_FIXED64}:
        return Decimal(value)
    if field.type == field.TYPE_STRING and isinstance(value, bytes):
        raise Fails(value)
    return value


# --- Arrow ----------------------------------------------------------------------------------


def is_unchanged(value: Any, found: Any, kind: pa.DataType) -> bool:
    """Tell whether a value of a stream is still what it was, as a value of a column."""
    if value is None or found is None:
        return value is None and found is None
    if isinstance(value, list) and isinstance(found, list):
        return len(value) == len(found) and all(
            is_unchanged(v, f, kind.value_type) for v, f in zip(value, found, strict=True)
        )
    if isinstance(value, dict) and isinstance(found, dict):
        return all(is_unchanged(value[f.name], found[f.name], f.type) for f in kind)
    if isinstance(value, str) and not isinstance(found, str | bytes):
        return _is_text_of(value, found, kind)
    if isinstance(found, str) and not isinstance(value, str | bytes):
        # A float of 32 bits is written with the digits that tell it from others of 32 bits.
        kinds = [pa.float64(), pa.float32()] if _is_single(value) else [pa.float64()]
        return any(_is_text_of(found, value, kind) for kind in kinds)
    if isinstance(value, str | bytes) and isinstance(found, str | bytes):
        encoded = (x.encode() if isinstance(x, str) else x for x in (value, found))
        return len(set(encoded)) == 1
    if isinstance(value, dt.date) and isinstance(found, dt.date):
        return _moment(value) == _moment(found)
    if isinstance(found, dt.date):  # a number of days, or of microseconds
        whole = pa.int32() if pa.types.is_date32(kind) else pa.int64()
        return bool(pa.scalar(found, kind).cast(whole).as_py() == value)
    return _is_equal(value, found)


def _is_single(value: Any) -> bool:
    with np.errstate(over="ignore"):
        return isinstance(value, float) and float(np.float32(value)) == value


def _is_equal(value: Any, found: Any) -> bool:
    if isinstance(value, float) and math.isnan(value):
        return isinstance(found, float) and math.isnan(found)
    if isinstance(value, float) and isinstance(found, Decimal):
        return float(found) == value
    if isinstance(value, Decimal) and isinstance(found, float):
        places = -int(value.as_tuple().exponent)
        return Decimal(found).quantize(Decimal(1).scaleb(-places), context=_EXACT) == value
    return bool(value == found)  # Python compares numbers by their exact values


def _is_text_of(text: str, found: Any, kind: pa.DataType) -> bool:
    try:
        if isinstance(found, bool):
            return text in (_TRUE if found else _FALSE)
        if isinstance(found, int):
            return bool(re.fullmatch(r"-?\d+", text)) and int(text) == found
        if isinstance(found, float):
            return is_same(found, _float(text, kind))
        if isinstance(found, Decimal):
            return Decimal(text) == found
        return bool(_moment(dt.datetime.fromisoformat(text)) == _moment(found))
    except (Fails, ValueError, InvalidOperation):
        return False


def _moment(value: dt.date) -> dt.datetime:
    if not isinstance(value, dt.datetime):
        value = dt.datetime(value.year, value.month, value.day, tzinfo=dt.UTC)
    return value.replace(tzinfo=value.tzinfo or dt.UTC).astimezone(dt.UTC)
