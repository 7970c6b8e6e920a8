"""Protobuf messages of a queue become columns, without Spark; one that is broken fails alone.

Two kinds of messages are in one queue, as a collector gets them: the type of a message tells which.
Their descriptors are a set of files, as `protoc --include_imports --descriptor_set_out` writes it.

    python examples/decode_payloads.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import pyarrow.compute as pc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import penstock
from penstock.core.decoding import decoder_for

#: What .proto files would say: place.proto, and radar.proto, which imports it.
FILES = {
    "place.proto": {"Place": ["double lat", "double lon"]},
    "radar.proto": {
        "Beam": ["int64 id", "demo.Place at", "repeated float dbz"],
        "Status": ["string name", "double temperature"],
    },
}
#: The numbers of descriptor.proto.
TYPES = {"double": 1, "float": 2, "int64": 3, "string": 9}
MESSAGE = 11
#: Which message a type of the queue's messages stands for.
NAMES = {1: "demo.Beam", 2: "demo.Status"}


def descriptor_set() -> bytes:
    """Return what protoc would write."""
    files = descriptor_pb2.FileDescriptorSet()
    for path, messages in FILES.items():
        file = files.file.add(name=path, package="demo", syntax="proto3")
        if path != "place.proto":
            file.dependency.append("place.proto")
        for message, fields in messages.items():
            added = file.message_type.add(name=message)
            for number, field in enumerate(fields, 1):
                *repeated, kind, name = field.split()
                added.field.add(
                    name=name,
                    number=number,
                    label=3 if repeated else 1,
                    type=TYPES.get(kind, MESSAGE),
                    type_name=None if kind in TYPES else f".{kind}",
                )
    written: bytes = files.SerializeToString()
    return written


def write(url: str, descriptors: bytes) -> None:
    """Write beams and reports of the status, and one that was cut off on its way."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    beam, status = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in NAMES.values()
    )
    with penstock.open_writer(url) as writer:
        for number in range(5):
            sent: Any = beam(id=number, at={"lat": 47.5, "lon": 8 + number / 10}, dbz=[1.5, 2.5])
            payload = sent.SerializeToString()
            writer.write(payload[:-3] if number == 3 else payload, type=1)
            writer.write(status(name="cell", temperature=20 + number).SerializeToString(), type=2)


def main() -> None:
    """Decode what is in the queue, each message by its kind."""
    descriptors = descriptor_set()
    decoders = {
        type: decoder_for(format="protobuf", descriptor_set=descriptors, message=name)
        for type, name in NAMES.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        url = f"fmq:{folder}/telemetry"
        write(url, descriptors)
        with penstock.open_reader(url, start="start") as reader:
            batch = reader.read_batch(1_000)
    for type, decoder in decoders.items():
        messages = batch.filter(pc.equal(batch.column("type"), type))
        decoded = decoder.decode(messages)
        print(f"{NAMES[type]}: {decoder.schema.names}")
        for row in decoded.rows.to_pylist():
            print("  ", row)
        for failure in decoded.failures:
            seq = messages.column("seq")[failure.row].as_py()
            print(f"   message {seq} does not decode: {failure.reason}")


if __name__ == "__main__":
    main()
