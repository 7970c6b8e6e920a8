"""The original's own programs, where `PENSTOCK_JRTC` says that they are, and ours.

There, `router` is its router with its forwarder and its serialisers (`serde/*.so`, with the
descriptor sets `serde/*.pb`), a command a line; `control` is its control program.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import message_factory

from penstock.core.decoding.protobuf import find_message
from penstock.protocols.jrtc.collector_outputs import JsonOutput
from penstock.protocols.jrtc.destinations import UdpDestination
from penstock.protocols.jrtc.forwarder import Forwarder
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import Schemas
from penstock.protocols.jrtc.struct_codec import StructCodec
from penstock.queue.streams import OutputStream
from protocols.jrtc.forwarded import HOST, LIMITS, STATUS, UP, collecting, listening, port_of
from protocols.jrtc.test_struct_codec import value_of
from support.until import until

FOLDER = Path(os.environ.get("PENSTOCK_JRTC", "."))
pytestmark = pytest.mark.skipif(
    "PENSTOCK_JRTC" not in os.environ, reason="PENSTOCK_JRTC names no folder"
)

ROOM = Nanopb(
    {
        **LIMITS,
        "item.name": {"max_size": 30},
        "obj.bytesval": {"max_size": 20},
        "obj.sval": {"max_size": 20},
        "obj.*arr": {"max_count": 10},
    }
)
MESSAGES = [
    ("example", "status"),
    ("example", "req_resp"),
    ("example2", "item"),
    ("example3", "obj"),
]
KINDS = {
    1: "double",
    2: "float",
    3: "int64",
    4: "uint64",
    5: "int32",
    6: "fixed64",
    7: "fixed32",
    8: "bool",
    13: "uint32",
    15: "sfixed32",
    16: "sfixed64",
    17: "sint32",
    18: "sint64",
}


def router(*commands: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(FOLDER / "router")],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def control(server: str, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [str(FOLDER / "control"), server, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def filled(message: Any, rng: random.Random) -> Any:
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is not None and message.WhichOneof(oneof.name) and rng.random() < 0.5:
            continue
        if not field.is_required and rng.random() < 0.4:
            continue

        def value(kind: int = field.type) -> Any:
            if kind == 9:
                return "é" * rng.randrange(8) + "x"
            if kind == 12:
                return rng.randbytes(rng.randrange(20))
            return rng.randrange(2) if kind == 14 else value_of(KINDS[kind], rng)

        if field.is_repeated:
            getattr(message, field.name).extend(value() for _ in range(rng.randrange(11)))
        elif field.type == 11:
            getattr(message, field.name).SetInParent()
            filled(getattr(message, field.name), rng)
        else:
            setattr(message, field.name, value())
    return message


@pytest.mark.parametrize(("package", "name"), MESSAGES)
def test_structs_and_datagrams_are_the_originals_byte_for_byte(package: str, name: str) -> None:
    descriptor = find_message((FOLDER / f"serde/{package}.pb").read_bytes(), name)
    codec = StructCodec(descriptor, ROOM)
    kind, rng = message_factory.GetMessageClass(descriptor), random.Random(name)
    payloads = [filled(kind(), rng).SerializeToString() for _ in range(100)]
    library = FOLDER / f"serde/{package}.{name}.so"
    commands = ["app 1023", "app 1023", f"out 0 {STATUS.hex()} 300 0 {library}"]
    commands.append(f"sub 1 {STATUS.hex()}")
    for payload in payloads:
        commands += [f"pb 0 {payload.hex()}", "recv 1 1 1000"]
    answers = router(*commands)
    assert answers[2]["size"] == codec.dtype.itemsize
    received = [answer["messages"][0] for answer in answers if answer.get("received")]
    structs = [bytes.fromhex(each["data"]) for each in received]
    ours, failures = codec.deserialise(pa.array(payloads, pa.binary()))
    assert not failures
    assert [row.tobytes() for row in ours] == structs
    serialised, failures = codec.serialise(pa.array(structs, pa.binary()))
    assert not failures
    # What becomes no byte, the original does not send.
    assert [each.hex() for each in serialised.to_pylist()] == [
        each["datagram"][32:] for each in received
    ]


def test_its_forwarder_sends_to_our_collector(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    schemas = Schemas()
    schemas.load(FOLDER / "serde/example.pb", {STATUS: "status"})
    with collecting(schemas, JsonOutput(f"json:{file}")) as collector:
        router(
            f"forward {HOST} {collector.port}",
            "app 1023",
            f"out 0 {STATUS.hex()} 10 0 {FOLDER / 'serde/example.status.so'}",
            *[f"pb 0 {UP.hex()}", "sleep 30"] * 5,
            "sleep 200",
        )
        until(lambda: collector.statistics().collected == 5)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["id"], line["_stream_id"]) for line in lines] == [(7, str(STATUS))] * 5


def test_our_forwarder_sends_what_its_own_sends(tmp_path: Path) -> None:
    library = FOLDER / "serde/example.status.so"
    with listening() as sock:
        answers = router(
            f"forward {HOST} {port_of(sock)}",
            "app 1023",
            "app 1023",
            f"out 0 {STATUS.hex()} 10 0 {library}",
            f"sub 1 {STATUS.hex()}",
            f"pb 0 {UP.hex()}",
            "recv 1 1 1000",
            "sleep 200",
        )
        its = sock.recv(1000)
        (struct,) = [bytes.fromhex(a["messages"][0]["data"]) for a in answers if a.get("received")]
        schemas = Schemas()
        schemas.load(FOLDER / "serde/example.pb", {STATUS: "status"}, ROOM)
        with (
            Forwarder(
                {2: UdpDestination(HOST, port_of(sock))}, schemas, directory=tmp_path
            ).start(),
            OutputStream.create(STATUS, owner="codelet", directory=tmp_path) as stream,
        ):
            stream.write(struct)
            assert sock.recv(1000) == its == STATUS + UP


@pytest.mark.parametrize("kind", ["gRPC", "HTTP"])
def test_its_control_program_loads_schemas_into_our_collector(kind: str) -> None:
    file = str(FOLDER / "serde/example.pb")
    with collecting(None, grpc_port=0, http_port=0) as collector:
        server = f"{HOST}:{collector.grpc_port}"
        if kind == "HTTP":
            server = f"http://{HOST}:{collector.http_port}"
        code, answers = control(server, "load", file, f"status={STATUS.hex()}")
        assert (code, [each["status"] for each in answers]) == (0, ["STATUS_OK"] * 2)
        assert collector.schemas.find(STATUS) is not None
        code, answers = control(server, "load", file, f"status={STATUS.hex()}")
        assert "checksum matches" in answers[0]["message"]
        code, answers = control(server, "add", STATUS.hex(), "example", "request")
        assert (code, answers[0]["error"]) == (1, 409 if kind == "HTTP" else "ALREADY_EXISTS")
        code, answers = control(server, "delete", STATUS.hex())
        assert (code, answers[0]["status"]) == (0, "STATUS_OK")
        assert collector.schemas.find(STATUS) is None
