"""How fast are streams forwarded and collected, beside bare loops that do the least?

python benches/jrtc.py [--quick]

Datagrams go over loopback to a process that takes and counts them; what it does not take, the
kernel counts. A forwarder reads a stream in shared memory that was filled before.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from google.protobuf import descriptor_pb2, message_factory

from harness import Contestant, Requirement, build, machine, race, report, save
from penstock.core.decoding.protobuf import find_message
from penstock.core.stream_id import StreamId
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.jrtc.destinations import UdpDestination
from penstock.protocols.jrtc.forwarder import Forwarder
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import Schemas
from penstock.protocols.jrtc.struct_codec import StructCodec
from penstock.queue.streams import OutputStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

HOST = "127.0.0.1"
SIZE = 200
STREAM = StreamId.generate(2, 1, "bench://jbpf_agent/set/codelet", "telemetry")
#: Messages of a stream, and of one batch of structs or of payloads.
MOST = 200_000
BATCH = 4096
LIMITS = Nanopb({"Report.rates": {"max_count": 16}, "Report.cell": {"max_size": 16}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less time, less certain")
    parser.add_argument("--output", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    rounds, seconds = (3, 0.3) if arguments.quick else (7, 1.0)
    where = machine()
    with ExitStack() as stack:
        sink = stack.enter_context(Sink.started())
        results = race(contestants(sink), rounds, seconds)
        sent, received, dropped = sink.books()
    ratios = {result.name: result.ratio for result in results}
    requirements = [
        requirement(
            "serialised payloads: at least 0.5x of sendmmsg in C", 0.5, ratios["forwarder"]
        ),
        requirement(
            "payloads of many sizes: at least 0.5x of it", 0.5, ratios["forwarder, many sizes"]
        ),
        requirement(
            "structs to protobuf: at least 5x of a loop", 5, ratios["structs, many at once"]
        ),
        requirement("structs forwarded: at least 5x of a loop", 5, ratios["forwarder, structs"]),
        requirement("protobuf to Arrow: at least 5x of a loop", 5, ratios["columns, many at once"]),
        Requirement(
            "every datagram was received, or counted as dropped by the kernel",
            sent == received + dropped,
            f"{sent:,} sent, {received:,} received, {dropped:,} dropped",
        ),
    ]
    report("Forwarded streams", where, results, requirements, "its yardstick")
    print(save(arguments.output, "jrtc", where, results, requirements))
    if not all(each.reached for each in requirements):
        sys.exit(1)


def requirement(text: str, least: float, ratio: float | None) -> Requirement:
    assert ratio is not None
    return Requirement(text, ratio >= least, f"{ratio:.2f}x")


def contestants(sink: Sink) -> Sequence[Contestant]:
    fixed = [bytes(SIZE)] * 1000
    mixed = [bytes(SIZE - 50 + i % 100) for i in range(1000)]
    schemas, structs, one_struct, one_payload = telemetry()
    schema = schemas.find(STREAM)
    assert schema is not None
    assert schema.codec is not None
    plain = Contestant("sendmmsg in C", "udp", SIZE, lambda count: bare(sink, count))
    size = len(structs[0])
    struct_loop = Contestant(
        "setattr, SerializeToString", "memory", size, lambda count: one_struct(structs, count, None)
    )
    struct_send = Contestant(
        "setattr, SerializeToString, send", "udp", size,
        lambda count: one_struct(structs, count, sink),
    )  # fmt: skip
    payloads = schema.codec.serialise(pa.array(structs, pa.binary())).payloads
    parse_loop = Contestant(
        "ParseFromString, getattr", "memory", len(payloads[0].as_py()),
        lambda count: one_payload(payloads.to_pylist(), count),
    )  # fmt: skip
    codec, decoder = schema.codec, schema.decoder
    column = pa.array(structs, pa.binary())
    batch = pa.RecordBatch.from_arrays([payloads], ["payload"])
    return [
        plain,
        Contestant("forwarder", "udp", SIZE, lambda n: forward(sink, fixed, Schemas(), n), plain),
        Contestant(
            "forwarder, many sizes", "udp", SIZE, lambda n: forward(sink, mixed, Schemas(), n),
            plain,
        ),
        struct_loop,
        Contestant(
            "structs, many at once", "memory", size,
            lambda n: repeated(lambda: codec.serialise(column), len(column), n), struct_loop,
        ),
        struct_send,
        Contestant(
            "forwarder, structs", "udp", size, lambda n: forward(sink, structs, schemas, n),
            struct_send,
        ),
        parse_loop,
        Contestant(
            "columns, many at once", "memory", parse_loop.size,
            lambda n: repeated(lambda: decoder.decode(batch), len(batch), n), parse_loop,
        ),
    ]  # fmt: skip


# --- datagrams ---------------------------------------------------------------------------------


class Sink:
    """Takes datagrams in a process of its own, and counts them."""

    def __init__(self, told: Connection) -> None:
        self._told = told
        self.port: int = told.recv()
        self.sent = 0
        self.program = build("bare_sendmmsg.c")

    @classmethod
    @contextmanager
    def started(cls) -> Iterator[Sink]:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=take, args=(theirs,))
        process.start()
        yield cls(ours)
        ours.close()
        process.terminate()
        process.join()

    def books(self) -> tuple[int, int, int]:
        """Return what was sent, received, and dropped by the kernel."""
        # The kernel says what it dropped with the next one that it does not drop.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            time.sleep(0.5)
            sock.sendto(b"last", (HOST, self.port))
        self._told.send(None)
        received, dropped = self._told.recv()
        return self.sent + 1, received, dropped


def take(told: Connection) -> None:
    with DatagramSocket.bind(HOST, 0, batch=1024) as sock:
        told.send(sock.port)
        while not told.poll():
            sock.receive(timeout=0.2)
        while sock.receive(timeout=0.5):
            pass
        books = sock.statistics()
        told.send((books.received, books.dropped))


def bare(sink: Sink, count: int) -> float:
    command = [sink.program, HOST, sink.port, count, STREAM_AND_PAYLOAD, 1024]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    sink.sent += count
    return float(done.stdout)


STREAM_AND_PAYLOAD = 16 + SIZE


def forward(sink: Sink, payloads: Sequence[bytes], schemas: Schemas, count: int) -> float:
    """Fill a stream, and return the seconds until a forwarder has sent all of it; in parts."""
    took, left = 0.0, count
    while left > 0:
        part = min(left, MOST)
        with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir="/dev/shm") as folder:
            destination = UdpDestination(HOST, sink.port)
            with (
                Forwarder({2: destination}, schemas, directory=folder) as forwarder,
                OutputStream.create(
                    STREAM, owner="bench", directory=folder, slots=1 << 18, size="128M"
                ) as stream,
            ):
                for at in range(0, part, len(payloads)):
                    stream.write_many(payloads[: min(len(payloads), part - at)])
                began = time.perf_counter()
                forwarder.start()
                while forwarder.statistics().forwarded < part:
                    time.sleep(0.0005)
                took += time.perf_counter() - began
        assert forwarder.statistics().lost == 0
        sink.sent += part
        left -= part
    return took


# --- structs and columns -----------------------------------------------------------------------


def telemetry() -> tuple[Schemas, list[bytes], Callable[..., float], Callable[..., float]]:
    """Return a report of a cell as C, and the loops that a program would have for it."""
    file = descriptor_pb2.FileDescriptorProto(name="report.proto", syntax="proto3")
    message = file.message_type.add(name="Report")
    kinds = descriptor_pb2.FieldDescriptorProto
    for number, (name, kind) in enumerate(
        {
            "time": kinds.TYPE_UINT64,
            "cell": kinds.TYPE_STRING,
            "slot": kinds.TYPE_UINT32,
            "users": kinds.TYPE_UINT32,
            "load": kinds.TYPE_FLOAT,
            "bytes_up": kinds.TYPE_UINT64,
            "bytes_down": kinds.TYPE_UINT64,
            "retransmissions": kinds.TYPE_INT32,
            "rates": kinds.TYPE_FLOAT,
        }.items(),
        1,
    ):
        label = kinds.LABEL_REPEATED if name == "rates" else kinds.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, label=label)
    descriptors = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    schemas = Schemas()
    schemas.upsert(descriptors)
    schemas.associate(STREAM, "report", "Report", LIMITS)
    descriptor = find_message(descriptors, "Report")
    struct: Any = LIMITS.struct(descriptor)
    rows = np.zeros(BATCH, StructCodec(descriptor, struct).dtype)
    rows["time"] = np.arange(BATCH) * 1_000_000 + 1_700_000_000_000_000_000
    rows["cell"] = b"cell-17"
    rows["slot"] = np.arange(BATCH)
    rows["users"] = 30
    rows["load"] = 0.75
    rows["bytes_up"] = rows["bytes_down"] = 123_456
    rows["rates_count"] = 16
    rows["rates"] = np.linspace(1, 2, 16)
    kind = message_factory.GetMessageClass(descriptor)
    names = [field.name for field in descriptor.fields if field.name not in {"cell", "rates"}]

    def serialise(structs: Sequence[bytes], count: int, sink: Sink | None) -> float:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            if sink is not None:
                sock.connect((HOST, sink.port))
                sink.sent += count
            began = time.perf_counter()
            for i in range(count):
                row = struct.from_buffer_copy(structs[i % BATCH])
                report = kind()
                for name in names:
                    setattr(report, name, getattr(row, name))
                report.cell = row.cell.decode()
                report.rates.extend(row.rates[: row.rates_count])
                payload = report.SerializeToString()
                if sink is not None:
                    sock.send(STREAM + payload)
            return time.perf_counter() - began

    def parse(payloads: Sequence[bytes], count: int) -> float:
        every = [field.name for field in descriptor.fields]
        began = time.perf_counter()
        columns: dict[str, list[Any]] = {name: [] for name in every}
        for i in range(count):
            report = kind()
            report.ParseFromString(payloads[i % BATCH])
            for name in every:
                columns[name].append(getattr(report, name))
        return time.perf_counter() - began

    assert ctypes.sizeof(struct) == rows.dtype.itemsize
    return schemas, [row.tobytes() for row in rows], serialise, parse


def repeated(work: Callable[[], object], at_once: int, count: int) -> float:
    """Return the seconds that so many messages take, so many in a call."""
    began = time.perf_counter()
    calls = -(-count // at_once)
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) * count / (calls * at_once)


if __name__ == "__main__":
    main()
