"""How fast do payloads become columns, beside a Python function for each row?

python benches/decoding.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import track

from harness import Requirement, Result, machine, report, save
from penstock.core.decoding import decoder_for
from penstock.pipeline.run.spark import spark_session
from penstock.pipeline.source.decoded_rows import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

#: What decoding has to be worth.
TARGET = 10

IN_SPARK = "Spark local[2]"

#: Rows of a batch, as Spark makes them.
BATCH = 10_000

#: What share of the messages Spark passes one by one: the others would take minutes.
PART = 10

#: Runs before anything is measured: Java compiles what runs often.
WARM_UP = 10

BEAM = "<dIHH32f"
BEAM_FIELDS: list[dict[str, Any]] = [
    {"name": "azimuth", "type": "f8"},
    {"name": "pulse", "type": "u4"},
    {"name": "gates", "type": "u2"},
    {"name": "sweep", "type": "u2"},
    {"name": "dbz", "type": "f4", "shape": [32]},
]
BEAM_DDL = "azimuth DOUBLE, pulse BIGINT, gates INT, sweep INT, dbz ARRAY<FLOAT>"
EVENT_DDL = "id BIGINT, name STRING, level DOUBLE, at STRUCT<lat: DOUBLE, lon: DOUBLE>"


@dataclass(frozen=True, slots=True)
class Case:
    """Payloads of one format, and the function that decodes one of them."""

    format: str
    payloads: pa.Array
    options: Mapping[str, Any]
    ddl: str
    one: Callable[[bytes], tuple[Any, ...]]
    #: Only reads a payload, without asking for its values; None: there is no such way.
    parse: Callable[[bytes], object] | None = None

    @property
    def size(self) -> int:
        return int(self.payloads.nbytes) // len(self.payloads) - 4  # without the offset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a look, no measurement")
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--count", type=int, help="messages; default: 1,000,000, or 300,000")
    parser.add_argument("--no-spark", action="store_true", help="only without Spark")
    parser.add_argument("--json", type=Path, help="default: a new file in benches/results")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    count = arguments.count or (300_000 if arguments.quick else 1_000_000)
    where = machine()
    cases = [struct_case(count), json_case(count)]
    results = [
        result for case in (*cases, protobuf_case(count)) for result in without_spark(case, rounds)
    ]
    if not arguments.no_spark:
        spark = spark_session("penstock-bench", "local[2]")
        results += [result for case in cases for result in with_spark(spark, case, rounds)]
        spark.stop()
    requirements = [
        Requirement(
            f"{result.name}, {result.storage}, at least {TARGET}x a per-row udf",
            result.ratio >= TARGET,
            f"{result.ratio:.1f}x",
        )
        for result in results
        if result.ratio is not None and result.storage == IN_SPARK
    ]
    report(f"Decoding {count:,} payloads", where, results, requirements, "a row at a time")
    print(save(arguments.json, "decoding", where, results, requirements, messages=count))


# --- payloads -----------------------------------------------------------------------------------


def struct_case(count: int) -> Case:
    dtype = np.dtype([(f["name"], f"<{f['type']}", tuple(f.get("shape", ()))) for f in BEAM_FIELDS])
    beams = np.zeros(count, dtype)
    beams["azimuth"] = np.arange(count) % 360
    beams["pulse"] = np.arange(count)
    beams["gates"] = 32
    beams["dbz"] = np.linspace(-30, 60, 32, dtype="<f4")
    raw = beams.tobytes()
    size = dtype.itemsize
    payloads = pa.array([raw[at : at + size] for at in range(0, len(raw), size)], pa.binary())

    def one(payload: bytes) -> tuple[Any, ...]:
        azimuth, pulse, gates, sweep, *dbz = struct.unpack(BEAM, payload)
        return azimuth, pulse, gates, sweep, dbz

    return Case("struct", payloads, {"layout": BEAM_FIELDS}, BEAM_DDL, one)


def json_case(count: int) -> Case:
    texts = [
        json.dumps(
            {
                "id": i,
                "name": f"cell {i % 50}",
                "level": i / 7,
                "at": {"lat": 47 + i / count, "lon": 8 - i / count},
            }
        ).encode()
        for i in range(count)
    ]

    def one(payload: bytes) -> tuple[Any, ...]:
        value = json.loads(payload)
        at = value["at"]
        return value["id"], value["name"], value["level"], (at["lat"], at["lon"])

    return Case("json", pa.array(texts, pa.binary()), {"schema": EVENT_DDL}, EVENT_DDL, one)


def protobuf_case(count: int) -> Case:
    """Return the same events as those of JSON."""
    from google.protobuf import (  # noqa: PLC0415
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="bench", syntax="proto3")
    kinds = {"double": 1, "int64": 3, "string": 9, ".bench.Place": 11}
    fields = {
        "Place": ["double lat", "double lon"],
        "Event": ["int64 id", "string name", "double level", ".bench.Place at"],
    }
    for message, declared in fields.items():
        added = file.message_type.add(name=message)
        for number, (kind, name) in enumerate((each.split() for each in declared), 1):
            inner = kind if kind.startswith(".") else None
            added.field.add(name=name, number=number, type=kinds[kind], label=1, type_name=inner)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    event = message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Event"))
    payloads = [
        event(
            id=i,
            name=f"cell {i % 50}",
            level=i / 7,
            at={"lat": 47 + i / count, "lon": 8 - i / count},
        ).SerializeToString()
        for i in range(count)
    ]

    def one(payload: bytes) -> tuple[Any, ...]:
        value = event.FromString(payload)
        at = value.at
        return value.id, value.name, value.level, (at.lat, at.lon)

    options = {
        "descriptor_set": descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString(),
        "message": "bench.Event",
    }
    return Case(
        "protobuf", pa.array(payloads, pa.binary()), options, EVENT_DDL, one, event.FromString
    )


# --- without Spark ------------------------------------------------------------------------------


def without_spark(case: Case, rounds: int) -> list[Result]:
    decoder = decoder_for({"format": case.format, **case.options})
    batches = pa.table({"payload": case.payloads}).to_batches(max_chunksize=BATCH)

    def by_row() -> int:
        rows = 0
        for batch in batches[: len(batches) // PART]:
            found = [case.one(payload) for payload in batch.column(0).to_pylist()]
            columns = [
                pa.array(_as_arrow(values, field.type), field.type)
                for values, field in zip(zip(*found, strict=True), decoder.schema, strict=True)
            ]
            rows += len(columns[0])
        return rows

    def by_batch() -> int:
        return sum(decoder.decode(batch).rows.num_rows for batch in batches)

    def parse() -> None:
        assert case.parse is not None
        for batch in batches[: len(batches) // PART]:
            for payload in batch.column(0).to_pylist():
                case.parse(payload)

    more = [] if case.parse is None else [("only parsed", parse, PART)]
    return compare(case, "no Spark", by_row, by_batch, rounds, more)


def _as_arrow(values: Sequence[Any], kind: pa.DataType) -> Sequence[Any]:
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        return [dict(zip(names, value, strict=True)) for value in values]
    return values


# --- with Spark ---------------------------------------------------------------------------------


def with_spark(spark: SparkSession, case: Case, rounds: int) -> list[Result]:
    from pyspark.sql import functions as f  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as directory:
        whole, part = (
            _cached(spark, case.payloads[:count], Path(directory) / str(count))
            for count in (len(case.payloads), len(case.payloads) // PART)
        )
    per_row = f.udf(case.one, case.ddl, useArrow=False)
    plain = part.select("seq", per_row("payload").alias("found"))
    ours = decode(whole, format=case.format, **case.options)
    expected = {row.seq: tuple(row.found) for row in plain.where("seq < 50").collect()}
    decoded = {row.seq: tuple(row)[1:] for row in ours.where("seq < 50").collect()}
    if len(expected) != 50 or expected != decoded:
        raise SystemExit(f"{case.format}: the two do not decode the same")
    found = compare(case, IN_SPARK, lambda: run(plain), lambda: run(ours), rounds)
    whole.unpersist()
    part.unpersist()
    return found


def _cached(spark: SparkSession, payloads: pa.Array, directory: Path) -> DataFrame:
    """Return messages that are in Spark's memory, in as many parts as there are cores."""
    directory.mkdir()
    table = pa.table({"seq": pa.array(range(len(payloads))), "payload": payloads})
    half = len(payloads) // 2
    for name, rows in (("a", table[:half]), ("b", table[half:])):
        pq.write_table(rows, directory / f"{name}.parquet")
    df = spark.read.parquet(str(directory)).repartition(2).cache()
    df.count()
    return df


def run(df: DataFrame) -> None:
    df.write.format("noop").mode("overwrite").save()


def compare(
    case: Case,
    where: str,
    by_row: Callable[[], object],
    by_batch: Callable[[], object],
    rounds: int,
    more: Sequence[tuple[str, Callable[[], object], int]] = (),
) -> list[Result]:
    """Let all run in turn, after a few times that warm everything up.

    A row at a time has only a part of the messages, so that both take about as long.
    """
    ways = [("a row at a time", by_row, PART), *more, ("decode()", by_batch, 1)]
    for _ in range(WARM_UP):
        for _, function, _ in ways:
            function()
    rates: list[list[float]] = [[] for _ in ways]
    for _ in track(range(rounds), "measuring", console=Console(stderr=True), transient=True):
        for own, (_, function, share) in zip(rates, ways, strict=True):
            began = time.perf_counter()
            function()
            own.append(len(case.payloads) // share / (time.perf_counter() - began))
    first, *others = (f"{case.format}, {name}" for name, _, _ in ways)
    row = Result(first, where, case.size, tuple(rates[0]))
    return [
        row,
        *(
            Result(name, where, case.size, tuple(own), row)
            for name, own in zip(others, rates[1:], strict=True)
        ),
    ]


if __name__ == "__main__":
    main()
