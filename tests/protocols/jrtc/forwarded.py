"""Descriptors, streams, collectors and servers that tests of forwarded streams share."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.collector import Collector, CollectorOptions
from penstock.protocols.jrtc.collector_outputs import Output
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import Schemas

HOST = "127.0.0.1"
VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "jrtc" / "forwarder_datagrams.json").read_text()
)
#: Upstream's own example: status, request, response, req_resp.
EXAMPLE = base64.b64decode(VECTORS["descriptor_set_base64"])
LIMITS = {
    "request.name": {"max_size": 32},
    "response.msg": {"max_size": 100},
    "status.status": {"max_size": 100},
}
STATUS = StreamId.parse("001017f954859297d8911d6ebe00edfc")
#: {id: 7, status: "up", a_struct: {a_num: 300}}
UP = bytes.fromhex("0807120275701a0308ac02")

KINDS = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}


def stream_of(name: str, fwd_dst: int = 2, device: int = 1) -> StreamId:
    return StreamId.generate(fwd_dst, device, "deployment://jbpf_agent/set/codelet", name)


def example_schemas(*, nanopb: bool = False, stream: StreamId = STATUS) -> Schemas:
    schemas = Schemas()
    package, _ = schemas.upsert(EXAMPLE)
    schemas.associate(stream, package, "status", Nanopb(LIMITS) if nanopb else None)
    return schemas


def describe(
    messages: dict[str, list[tuple[str, str] | tuple[str, str, dict[str, Any]]]],
    *,
    syntax: str = "proto3",
    name: str = "made.proto",
    package: str = "",
    imports: tuple[str, ...] = (),
) -> descriptor_pb2.FileDescriptorProto:
    """Describe messages: fields of (name, kind), where a kind that is not protobuf's is a message.

    `*kind` is repeated, `!kind` required, `?kind` has presence.
    """
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, dependency=imports)
    if syntax != "proto2":
        file.syntax = syntax
    for message_name, fields in messages.items():
        message = file.message_type.add(name=message_name)
        for number, (field_name, kind, *options) in enumerate(fields, 1):
            rule, plain = (kind[0], kind[1:]) if kind[0] in "*!?" else ("", kind)
            field = message.field.add(name=field_name, number=number)
            field.label = {"*": 3, "!": 2}.get(rule, 1)
            if plain in KINDS:
                field.type = KINDS[plain]
            else:
                field.type, field.type_name = KINDS["message"], f".{plain}"
            if rule == "?" and syntax == "proto3":
                field.proto3_optional = True
                message.oneof_decl.add(name=f"_{field_name}")
                field.oneof_index = len(message.oneof_decl) - 1
            for each in options:
                for key, value in each.items():
                    setattr(field, key, value)
    return file


def as_set(*files: descriptor_pb2.FileDescriptorProto) -> bytes:
    data: bytes = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    return data


@contextmanager
def collecting(
    schemas: Schemas | None = None, *outputs: Output, **options: Any
) -> Iterator[Collector]:
    given = {"port": 0, "grpc_port": None, **{k: v for k, v in options.items() if k != "dead"}}
    with Collector(CollectorOptions(**given), schemas, outputs, options.get("dead")) as collector:
        yield collector


def send(port: int, *datagrams: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((HOST, port))
        for each in datagrams:
            sender.send(each)


@contextmanager
def listening() -> Iterator[socket.socket]:
    """Yield a bare socket that hears datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        sock.bind((HOST, 0))
        sock.settimeout(10)
        yield sock


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


class _Smo(BaseHTTPRequestHandler):
    """A web server that keeps what it gets, and answers as it is told."""

    bodies: list[Any]
    statuses: list[int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.bodies.append(json.loads(body))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def smo(*statuses: int) -> Iterator[tuple[str, list[Any]]]:
    handler = type("Smo", (_Smo,), {"bodies": [], "statuses": list(statuses)})
    server = ThreadingHTTPServer((HOST, 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/telemetry?x=1", handler.bodies  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
