"""Structs of a C program, read at the same time by all who can; and datagrams as a source."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.pipeline.source.decoded_rows import decode
from penstock.pipeline.source.stream import PenstockSource
from penstock.protocols.jrtc.collector_outputs import ArrowOutput
from penstock.protocols.jrtc.destinations import UdpDestination
from penstock.protocols.jrtc.forwarder import Forwarder
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import Schemas
from penstock.queue.stream_directory import StreamKind, StreamPlace
from penstock.queue.streams import OutputStream
from protocols.jrtc.forwarded import (
    EXAMPLE,
    HOST,
    STATUS,
    UP,
    as_set,
    collecting,
    describe,
    send,
    stream_of,
)
from support.until import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)  # on a busy machine a batch takes seconds

ROOT = Path(__file__).parents[3]
COUNT = 2000
REPORT: Any = {
    "Report": [
        ("id", "uint32"),
        ("load", "double"),
        ("rates", "*float"),
        ("name", "string"),
        ("delta", "sint32"),
    ]
}
PRODUCER = """
#define _GNU_SOURCE
#include <penstock/ring.h>
#include <stdio.h>
#include <stdlib.h>
typedef struct {
    uint32_t id;
    double load;
    uint32_t rates_count;
    float rates[4];
    char name[8];
    int32_t delta;
} Report;
int main(int argc, char **argv) {
    penstock_ring ring;
    penstock_writer writer;
    int fd;
    (void)argc;
    if (penstock_map(argv[1], true, &ring, &fd) != NULL)
        return 1;
    if (penstock_writer_open(&writer, ring, fd) != 0)
        return 1;
    for (uint32_t i = 0; i < (uint32_t)atoi(argv[2]); i++) {
        Report report = {.id = i, .load = i / 7.0, .rates_count = i % 5, .delta = -(int32_t)i};
        for (uint32_t j = 0; j < i % 5; j++)
            report.rates[j] = (float)(i + j) / 3;
        snprintf(report.name, sizeof report.name, "r%u", i);
        if (penstock_write(&writer, &report, sizeof report, 0, 0) != PENSTOCK_OK)
            return 2;
    }
    return 0;
}
"""


def test_a_forwarder_and_a_query_read_the_structs_of_a_c_program(
    spark: SparkSession, tmp_path: Path
) -> None:
    program = tmp_path / "producer"
    program.with_suffix(".c").write_text(PRODUCER)
    include = ["-I", str(ROOT / "include")]
    subprocess.run(["cc", "-std=c11", "-O1", *include, "-o", program, f"{program}.c"], check=True)
    stream, schemas = stream_of("reports"), Schemas()
    schemas.upsert(as_set(describe(REPORT)))
    struct = Nanopb({"*.rates": {"max_count": 4}, "*.name": {"max_size": 8}})
    schemas.associate(stream, "made", "Report", struct)
    schema = schemas.find(stream)
    assert schema is not None
    assert schema.codec is not None
    OutputStream.create(stream, owner="a codelet", directory=tmp_path).close()
    place = StreamPlace.of(stream, StreamKind.OUTPUT, tmp_path)
    spark.dataSource.register(PenstockSource)
    source = spark.readStream.format("penstock").option("url", place.url).load()
    rows = decode(source, format="struct", layout=schema.codec.dtype)
    query = (
        rows.select("seq", "id", "load", "rates_count", "rates", "name", "delta")
        .writeStream.format("memory").queryName("jrtc_reports")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    arrow = ArrowOutput(COUNT)
    with (
        collecting(schemas, arrow) as collector,
        Forwarder({2: UdpDestination(HOST, collector.port)}, schemas, directory=tmp_path).start(),
    ):
        subprocess.run([program, f"{place.path}.fmq", str(COUNT)], check=True)
        until(lambda: collector.statistics().collected == COUNT)
        query.processAllAvailable()
    query.stop()
    collected: list[dict[str, Any]] = []
    while (batch := arrow.read(0)) is not None:
        assert batch.rows is not None
        collected += batch.rows.to_pylist()
    found = spark.sql("SELECT * FROM jrtc_reports ORDER BY seq").collect()
    assert [row.id for row in found] == list(range(COUNT))
    for row, other in zip(found, collected, strict=True):
        assert (row.id, row.load, row.delta) == (other["id"], other["load"], other["delta"])
        assert row.rates[: row.rates_count] == other["rates"]
        name = row.name if isinstance(row.name, str) else bytes(row.name).rstrip(b"\0").decode()
        assert name == other["name"] == f"r{row.id}"


def test_datagrams_are_a_source_with_decoded_columns(spark: SparkSession, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((HOST, 0))
        port = int(probe.getsockname()[1])
    spark.dataSource.register(PenstockSource)
    source = (
        spark.readStream.format("penstock").option("url", f"jrtc+udp://{HOST}:{port}")
        .option("stage", f"log:{tmp_path}/stage").load()
    )  # fmt: skip
    rows = decode(source, format="protobuf", descriptor_set=EXAMPLE, message="status")
    query = (
        rows.selectExpr("hex(stream) AS stream", "id", "status", "a_struct.a_num AS number")
        .writeStream.format("memory").queryName("jrtc_status")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    try:
        until(lambda: _is_taken(port), 60)
        send(port, *(STATUS + UP for _ in range(100)))
        until(lambda: spark.table("jrtc_status").count() == 100, 60)
    finally:
        query.stop()
    (row,) = spark.table("jrtc_status").distinct().collect()
    assert tuple(row) == (STATUS.hex().upper(), 7, "up", 300)


def _is_taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False
