"""Whatever bytes come: a payload becomes what Python's parsers make of it, or it fails alone."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from core.decoding import references
from core.decoding.batches import batch_of, checked
from core.decoding.references import Fails
from core.decoding.test_arrow import stream
from core.decoding.test_protobuf import descriptors, message_class
from penstock.core.decoding import decoder_for
from penstock.core.decoding.layout import from_c, is_format
from penstock.core.decoding.schema import Wrong, arrow_schema, parse_ddl

LAYOUTS = 5_000
SIZES = [20_000, pytest.param(1_000_000, marks=pytest.mark.full)]
BATCHES = (1, 1, 10, 10, 100, 100, 2_000)

TYPES = ["BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "STRING", "DATE",
         "TIMESTAMP", "TIMESTAMP_NTZ", "DECIMAL(10,2)", "DECIMAL(38,18)", "DECIMAL(38,0)",
         "DECIMAL(20,20)", "DECIMAL(5,1)"]  # fmt: skip
WORDS = ["", "a", "größe", 'q"q', '"', "a,b", "a\nb", "a\r\nb", "\r", "0x1F", "x", "NaN", "inf",
         "\0", "\u2028", "null", "true", "1", " ", "\ufeff"]  # fmt: skip
NUMBERS = ["0", "1", "-1", "-0", "127", "128", "-128", "-129", "32768", "2147483647", "2147483648",
           "9223372036854775807", "9223372036854775808", "-9223372036854775809", "0.5", "0.125",
           "1.10", "1e5", "1E-3", "1e38", "1e39", "3.4028235677973366e38", "1e308", "1e309",
           "1e400", "1e-400", "100000000", "99999999.99", "99999999.995", "400000000000000000000",
           "1e-20", "99999999999999999999.999999999999999999", "100000000000000000000", "9999.9",
           "9999.95",
           "0.00000000000000000001", "1" + "0" * 38, "1" + "0" * 76, "9" * 76, "9" * 80, "1e76",
           "1e57", "1." + "0" * 90, "0.1", "16777217", "007", "+5", ".5", "5.", "0x1F", "-0x1F",
           "1_0", "nan", "inf", "-Infinity", "1e", "--1", "1 2", "1e99999"]  # fmt: skip
TIMES = ["2026-02-03", "2026-02-30", "2026-02-03T04:05:06", "2026-02-03 04:05:06.5",
         "2026-02-03T04:05:06Z", "2026-02-03T04:05:06.123456+01:30", "2026-02-03T04:05:06.1234567Z",
         "2026-02-03T04:05:06-0130", "2026-02-03T04:05", "0000-01-01", "0001-01-01", "9999-12-31",
         "0001-01-01T00:00:00+12:00", "9999-12-31T23:59:59-12:00", "2026-02-03T23:59:60Z",
         "2026-02-03T24:00:00", "10000-01-01"]  # fmt: skip


class Case(ABC):
    """Payloads of one format, and what they should become."""

    def __init__(self, signs: bytes, **options: Any) -> None:
        self.signs = signs
        self.decoder = decoder_for(options)

    @abstractmethod
    def make(self, source: random.Random) -> bytes:
        """Return a payload, which may hold anything that its writer can say."""

    @abstractmethod
    def check(self, payload: bytes, rows: list[dict[str, Any]]) -> None:
        """Compare what a payload became with the reference.

        :raises Fails: it should have become nothing.
        """

    @abstractmethod
    def plain(self, source: random.Random) -> bytes:
        """Return a payload that must decode."""


def _is_good(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert references.is_same(rows, expected), (rows, expected)


class JsonCase(Case):
    def __init__(self) -> None:
        inner = ", ".join(f"n{i} {kind}" for i, kind in enumerate(TYPES) if kind != "DATE")
        ddl = ", ".join(f"c{i} {kind}" for i, kind in enumerate(TYPES))
        ddl += f", s STRUCT<{inner}>, a ARRAY<FLOAT>, d ARRAY<STRUCT<m: DECIMAL(10,2)>>"
        self.schema = arrow_schema(ddl)
        super().__init__(b'{}[]",:\\\n\r\t 0-.eu\xff\0', format="json", schema=ddl)

    def make(self, source: random.Random) -> bytes:
        pairs = source.sample([*self.schema, pa.field("more", pa.string())], source.randint(0, 5))
        text = ",".join(f"{json.dumps(f.name)}:{self._value(source, f.type)}" for f in pairs)
        return f"{{{text}}}".encode()

    def plain(self, source: random.Random) -> bytes:
        return json.dumps({"c4": source.randrange(99), "c7": source.choice(WORDS)}).encode()

    def check(self, payload: bytes, rows: list[dict[str, Any]]) -> None:
        _is_good(rows, [references.json_row(payload, self.schema)])

    def _value(self, source: random.Random, kind: pa.DataType) -> str:
        if source.random() < 0.05:
            return source.choice(["null", "true", "{}", "[]", '""', "1", "NaN", "Infinity"])
        if pa.types.is_struct(kind):
            fields = source.sample(list(kind), min(2, kind.num_fields))
            inner = ",".join(f'"{f.name}":{self._value(source, f.type)}' for f in fields)
            return f"{{{inner}}}"
        if pa.types.is_list(kind):
            inner = ",".join(self._value(source, kind.value_type) for _ in range(2))
            return f"[{inner}]"
        if pa.types.is_string(kind):
            return json.dumps(source.choice(WORDS), ensure_ascii=source.random() < 0.5)
        if pa.types.is_boolean(kind):
            return source.choice(["true", "false", "1"])
        if pa.types.is_temporal(kind):
            return json.dumps(source.choice(TIMES))
        number = _number(source)
        quoted = pa.types.is_decimal(kind) and source.random() < 0.5
        return json.dumps(number) if quoted else number


class CsvCase(Case):
    def __init__(self, delimiter: str = ",", *, header: bool = False) -> None:
        ddl = ", ".join(f"c{i} {kind}" for i, kind in enumerate([*TYPES, "BINARY"]))
        self.schema = arrow_schema(ddl)
        self.mark = delimiter
        self.header = header
        signs = b'"",;\n\r 0-.ex\xff\0' + delimiter.encode()
        super().__init__(signs, format="csv", schema=ddl, delimiter=delimiter, header=header)

    def make(self, source: random.Random) -> bytes:
        likely = source.choice([0.5, 0.02, 0.02])
        lines = [
            [
                self._value(source, field.type) if source.random() < likely else b""
                for field in self.schema
            ]
            for _ in range(source.choice([1, 1, 1, 2, 3]))
        ]
        return self._written(source, lines)

    def plain(self, source: random.Random) -> bytes:
        line = [b"1" if pa.types.is_integer(f.type) else b"" for f in self.schema]
        line[7] = b'"' + source.choice(WORDS).replace('"', '""').encode() + b'"'
        return self._written(source, [line])

    def check(self, payload: bytes, rows: list[dict[str, Any]]) -> None:
        _is_good(rows, references.csv_rows(payload, self.schema, self.mark, header=self.header))

    def _written(self, source: random.Random, lines: list[list[bytes]]) -> bytes:
        end = source.choice([b"\n", b"\r\n", b"\r"])
        if self.header:
            order = list(range(len(self.schema)))[:: source.choice([1, -1])]
            names = [field.name.encode() for field in self.schema]
            lines = [[line[i] for i in order] for line in [names, *lines]]
        text = end.join(self.mark.encode().join(line) for line in lines)
        return text + source.choice([b"", end])

    def _value(self, source: random.Random, kind: pa.DataType) -> bytes:
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            value = source.choice(WORDS).encode()
        elif pa.types.is_temporal(kind):
            value = source.choice(TIMES).encode()
        elif pa.types.is_boolean(kind):
            value = source.choice([b"true", b"0", b"2", b"False"])
        else:
            value = _number(source).encode()
        needs = any(sign in value for sign in (b'"', b"\n", b"\r", self.mark.encode()))
        if source.random() < (0.9 if needs else 0.1):
            value = b'"' + value.replace(b'"', b'""') + b'"'
        return value


class StructCase(Case):
    def __init__(self, layout: Any, fixed: str, names: list[str], tail: str = "") -> None:
        self.fixed, self.names, self.tail = fixed, names, tail
        super().__init__(b"\0\xff\x80a\xc3\xb6\x7f", format="struct", layout=layout)

    def make(self, source: random.Random) -> bytes:
        size = struct.calcsize(self.fixed)
        if self.tail:
            size += struct.calcsize(self.fixed[0] + self.tail) * source.randrange(4)
        payload = bytearray(source.randbytes(size))
        if source.random() < 0.8:
            payload[:8] = source.choice([b"abc\0defg", "grö\0ße..".encode()[:8], bytes(8)])
        return bytes(payload)

    def plain(self, source: random.Random) -> bytes:
        return bytes(8) + source.randbytes(struct.calcsize(self.fixed) - 8)

    def check(self, payload: bytes, rows: list[dict[str, Any]]) -> None:
        expected = references.struct_row(payload, self.fixed, self.names, self.tail)
        _is_good(rows, [expected])


STRUCTS: dict[str, tuple[Any, str, list[str], str]] = {
    "packed": ([{"name": "text", "type": "S8"}, *({"name": f"{kind}", "type": kind} for kind in
                ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8", "?")),
                {"name": "wide", "type": "u8"}, {"name": "raw", "type": "V3"}],
               "<8sbBhHiIqefd?Q3s",
               ["text", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "f2", "f4", "f8", "?", "wide",
                "raw"], ""),
    "big": ([{"name": "text", "type": "S8"}, {"name": "a", "type": ">i2"},
             {"name": "b", "type": ">f8"}, {"name": "wide", "type": ">u8"},
             {"name": "rest", "type": ">u2", "shape": [-1]}],
            ">8shdQ", ["text", "a", "b", "wide", "rest"], "H"),
    "c": ("char text[8]; int8_t a; double b; uint16_t c; float rest[];",
          "@8sbdH0f", ["text", "a", "b", "c", "rest"], "f"),
}  # fmt: skip


class ProtobufCase(Case):
    def __init__(self, message: str, folder: Path) -> None:
        path = folder / "beam.desc"
        path.write_bytes(descriptors().SerializeToString())
        self.kind = message_class(message)
        super().__init__(b"\0\x01\x08\x0a\x12\x22\x2a\x7f\x80\xff", format="protobuf",
                         descriptor_set=str(path), message=message)  # fmt: skip

    def make(self, source: random.Random) -> bytes:
        text = source.choice(WORDS)
        if self.kind.DESCRIPTOR.name == "Old":
            message = self.kind(
                needed=source.getrandbits(32), name=text, names=[text, "y"], mode=3,
                counts={text: source.getrandbits(64)}, word=source.getrandbits(64), step=-5,
                deep={"text": text},
            )  # fmt: skip
        else:
            message = self.kind(
                id=source.getrandbits(63), name=text, dbz=[1, source.random()], at={"lat": 1},
                track=[{"lon": 2}] * source.randrange(3), tags={text: 1},
                ticks=source.getrandbits(64), kind=source.randrange(5),
            )  # fmt: skip
            if source.random() < 0.5:
                message.maybe = 0
        found: bytes = message.SerializeToString()
        return found

    def plain(self, source: random.Random) -> bytes:
        return self.make(source)

    def check(self, payload: bytes, rows: list[dict[str, Any]]) -> None:
        _is_good(rows, [references.message_row(payload, self.kind)])


class ArrowCase(Case):
    #: What a stream may have: a type, and values.
    COLUMNS: tuple[tuple[pa.DataType, list[Any]], ...] = (
        (pa.float64(), [0.0, -0.0, 1.0, 2.0, 0.5, 0.1, 0.125, 1e39, 2.0**53, float("nan"),
                        float("inf"), -1e10, 12.34]),
        (pa.float32(), [0.0, 1.0, 0.5, 3.0e38, float("-inf")]),
        (pa.int64(), [0, 1, 2, -1, 2**24 + 1, 2**53 + 1, 2**63 - 1, 128, 100_000_000]),
        (pa.uint64(), [0, 1, 2**64 - 1]),
        (pa.int8(), [0, 1, -128]),
        (pa.bool_(), [True, False]),
        (pa.string(), [*WORDS, *NUMBERS, *TIMES]),
        (pa.binary(), [b"", b"a", b"\xff"]),
        (pa.decimal128(38, 0), [Decimal(0), Decimal(4 * 10**20), Decimal(10**37), Decimal(5)]),
        (pa.decimal128(10, 2), [Decimal("1.25"), Decimal("5.00"), Decimal("99999999.99")]),
        (pa.decimal256(60, 2), [Decimal("1.25"), Decimal("5.00"), Decimal(10**50)]),
        (pa.timestamp("us", "UTC"), [dt.datetime(2026, 2, 3, tzinfo=dt.UTC),
                                     dt.datetime(2026, 2, 3, 4, 5, 6, 7, tzinfo=dt.UTC)]),
        (pa.timestamp("us"), [dt.datetime(2026, 2, 3), dt.datetime(1, 1, 1, 5)]),  # noqa: DTZ001
        (pa.date32(), [dt.date(2026, 2, 3), dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
        (pa.null(), [None]),
    )  # fmt: skip

    def __init__(self) -> None:
        ddl = ", ".join(f"c{i} {kind}" for i, kind in enumerate([*TYPES, "BINARY"]))
        ddl += ", a ARRAY<FLOAT>, s STRUCT<m: DECIMAL(10,2)>"
        # One column a decoder: a payload must have all of its columns.
        self.whole = arrow_schema(ddl)
        self.decoders = {
            field.name: decoder_for(
                {"format": "arrow", "schema": pa.schema([field]), "max_size": "1M"}
            )
            for field in self.whole
        }
        self.field = self.whole.field(0)
        super().__init__(b"\0\x01\x7f\x80\xff", format="arrow", schema=ddl)

    def make(self, source: random.Random) -> bytes:
        kind, values = source.choice(self.COLUMNS)
        rows = [source.choice([*values, None]) for _ in range(source.choice([0, 1, 1, 2, 5]))]
        if pa.types.is_list(self.field.type):
            column = pa.array([rows, None], pa.list_(kind))
        elif pa.types.is_struct(self.field.type):
            column = pa.array([{"m": row, "o": 1} for row in rows],
                              pa.struct([("m", kind), ("o", pa.int32())]))  # fmt: skip
        else:
            column = pa.array(rows, kind)
        compression = source.choice([None, None, None, "lz4", "zstd"])
        return stream(pa.table({self.field.name: column}), compression=compression)

    def plain(self, source: random.Random) -> bytes:
        return stream(pa.table({self.field.name: pa.nulls(source.randrange(3), self.field.type)}))

    def check(self, payload: bytes, rows: list[dict[str, Any]]) -> None:
        name = self.field.name
        with pa.ipc.open_stream(payload) as reader:
            values = reader.read_all().column(name)
        if pa.types.is_timestamp(values.type) and values.type.unit == "ns":
            values = values.cast(pa.timestamp("us", values.type.tz))
        if pa.types.is_temporal(values.type) and pa.types.is_integer(self.field.type):
            values = values.cast(pa.int32() if values.type.bit_width == 32 else pa.int64())
        before = values.to_pylist()
        assert len(before) == len(rows)
        for value, row in zip(before, rows, strict=True):
            assert references.is_unchanged(value, row[name], self.field.type), (
                values.type, value, row, self.field.type)  # fmt: skip


def _number(source: random.Random) -> str:
    match source.randrange(4):
        case 0:
            return str(source.randint(-200, 200))
        case 1:
            digits = "".join(source.choices("0123456789", k=source.randint(1, 45)))
            at = source.randrange(len(digits) + 1)
            text = f"{digits[:at].lstrip('0') or '0'}.{digits[at:]}" if digits[at:] else digits
            return source.choice(["", "-"]) + text.rstrip(".")
        case _:
            return source.choice(NUMBERS)


def _damaged(source: random.Random, original: bytes, signs: bytes) -> bytes:
    data = bytearray(original)
    match source.randrange(6):
        case 0:
            return source.randbytes(source.randrange(64))
        case 1:
            return bytes(source.choice(signs) for _ in range(source.randrange(64)))
        case 2:
            del data[source.randrange(len(data) + 1) :]
        case 3 if data:
            for _ in range(source.randint(1, 4)):
                data[source.randrange(len(data))] = source.choice(signs)
        case 4:
            at = source.randrange(len(data) + 1)
            data[at:at] = bytes(source.choice(signs) for _ in range(source.randint(1, 4)))
        case _:
            at = source.randrange(len(data) + 1)
            del data[at : at + source.randint(1, 8)]
    return bytes(data)


def _compare(case: Case, count: int, source: random.Random) -> None:
    """Decode payloads in batches, and compare each with what the reference makes of it."""
    seen = failed = decoded = 0
    while seen < count:
        size = min(source.choice(BATCHES), count - seen)
        if isinstance(case, ArrowCase):
            case.field = source.choice(list(case.whole))
            case.decoder = case.decoders[case.field.name]
        payloads, must = [], set()
        # Most are as they should be, as in a stream: the others have to be found among them.
        share = source.choice([1, 0.1, 0.02]) if size < BATCHES[-1] else 0.02
        for place in range(size):
            if source.random() > share:
                must.add(place)
                payloads.append(case.plain(source))
                continue
            payload = case.make(source)
            payloads.append(
                payload if source.random() < 0.6 else _damaged(source, payload, case.signs)
            )
        result = checked(case.decoder.decode(batch_of(payloads)), size)
        rows: dict[int, list[dict[str, Any]]] = {place: [] for place in range(size)}
        for place in [each.row for each in result.failures]:
            del rows[place]
        assert must <= rows.keys()
        origin = range(size) if result.origin is None else result.origin.tolist()
        for place, row in zip(origin, result.rows.to_pylist(), strict=True):
            rows[place].append(row)
        for place, found in rows.items():
            try:
                case.check(payloads[place], found)
            except Fails as fails:
                raise AssertionError((payloads[place], found)) from fails
        seen += size
        failed += len(result.failures)
        decoded += len(rows)
    assert failed > count / 1_000
    assert decoded > count / 20


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    "make",
    [JsonCase, CsvCase, lambda: CsvCase(";", header=True), ArrowCase],
    ids=["json", "csv", "header", "arrow"],
)
def test_fuzz_text_and_streams_become_what_they_say_or_fail_alone(
    make: Callable[[], Case], count: int
) -> None:
    case = make()
    share = count // 2 if isinstance(case, CsvCase) else count  # half of them with a header
    _compare(case, share, random.Random(count))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", STRUCTS)
def test_fuzz_structs_become_what_they_say_or_fail_alone(name: str, count: int) -> None:
    _compare(StructCase(*STRUCTS[name]), count, random.Random(count))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("message", ["radar.Beam", "radar.Old"])
def test_fuzz_messages_become_what_they_say_or_fail_alone(
    message: str, count: int, tmp_path: Path
) -> None:
    _compare(ProtobufCase(message, tmp_path), count, random.Random(count))


def test_fuzz_layouts_and_schemas_are_read_or_refused() -> None:
    source = random.Random(1)
    words = ["float", "int", "char", "unsigned", "x", "y", "[", "]", "3", "99999999", ";", ",", " ",
             "<", ">", "array", "struct", "map", "decimal", "(", ")", ":", "`", "{", "}", "//",
             "/*", "*/", "\n", "é", "\0", "-1"]  # fmt: skip
    understood = 0
    for _ in range(LAYOUTS):
        text = "".join(source.choice(words) for _ in range(source.randrange(20)))
        for read in (parse_ddl, lambda each: from_c(each, "little", packed=False)):
            with contextlib.suppress(Wrong):
                read(text)
                understood += 1
        is_format(text)
    assert 0 < understood < 2 * LAYOUTS  # both happened
