"""Datagrams become JSON and Arrow, or it is counted why not; schemas come by gRPC and HTTP."""

from __future__ import annotations

import base64
import json
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock import open_reader, open_writer
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.errors import InvalidOption, PenstockError, StorageError
from penstock.core.stream_id import StreamId
from penstock.protocols.datagrams import DatagramSocket
from penstock.protocols.jrtc.collector import CollectorStatistics, Refusal
from penstock.protocols.jrtc.collector_outputs import (
    ArrowOutput,
    Collected,
    JsonOutput,
    Output,
    StreamOutput,
    output_for,
)
from penstock.protocols.jrtc.decoder import SERVICE, DecoderServer, message_classes
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import SchemaLimits, Schemas
from penstock.protocols.jrtc.wire import batch_of_datagrams
from protocols.jrtc.forwarded import (
    EXAMPLE,
    HOST,
    STATUS,
    UP,
    VECTORS,
    as_set,
    collecting,
    describe,
    example_schemas,
    listening,
    port_of,
    send,
    stream_of,
)
from protocols.lhhttt.queues import served
from support.until import until


def assert_balanced(books: CollectorStatistics) -> None:
    came = books.datagrams.received + books.datagrams.cut
    assert came == books.collected + sum(books.refused.values())


EXPECTED = {
    "_schema_proto_msg": "status",
    "_schema_proto_package": "example",
    "_stream_id": str(STATUS),
    "aStruct": {"aNum": 300},
    "id": 7,
    "status": "up",
}


def test_a_datagram_becomes_a_line_of_json(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    with collecting(example_schemas(), JsonOutput(f"json:{file}")) as collector:
        send(collector.port, STATUS + UP)
        until(lambda: collector.statistics().collected == 1)
    text = file.read_text()
    assert text == json.dumps(EXPECTED, separators=(",", ":")) + "\n"


def test_a_full_disk_has_whole_lines_and_none_that_was_reported_as_undelivered(
    tmp_path: Path,
) -> None:
    schema = example_schemas().find(STATUS)
    assert schema is not None
    batch = batch_of_datagrams([STATUS + UP] * 50, 0, 0)
    file = tmp_path / "lines"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonOutput(f"json:{file}") as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            rejected = output.give(Collected(schema, batch, None))
            kept = file.read_text().splitlines()
            with pytest.raises(OSError, match="File too large"):
                output.give(Collected(schema, batch, None))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert output.give(Collected(schema, batch.slice(0, 3), None)) == []
    assert 0 < len(kept) < 50
    assert [each.row for each in rejected] == list(range(len(kept), 50))
    assert {each.code for each in rejected} == {Code.UNAVAILABLE}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == len(kept) + 3


def test_lines_go_to_servers_by_udp_and_tcp() -> None:
    with socket.create_server((HOST, 0)) as server, listening() as udp:
        tcp = f"json+tcp://{HOST}:{server.getsockname()[1]}"
        outputs = output_for(tcp), output_for(f"json+udp://{HOST}:{port_of(udp)}")
        with collecting(example_schemas(), *outputs) as collector:
            send(collector.port, STATUS + UP, STATUS + UP)
            assert json.loads(udp.recv(1000)) == EXPECTED
            server.settimeout(10)
            connection, _ = server.accept()
            with connection, connection.makefile() as lines:
                assert json.loads(lines.readline()) == EXPECTED
                assert json.loads(lines.readline()) == EXPECTED


@pytest.mark.parametrize("fault", [OSError(101, "Network is unreachable"), None])
def test_lines_that_went_by_udp_before_it_failed_are_not_undelivered(
    fault: OSError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = example_schemas().find(STATUS)
    assert schema is not None
    batch = batch_of_datagrams([STATUS + UP] * 5, 0, 0)
    calls = 0

    def send_some(sock: DatagramSocket, datagrams: Any, timeout: float) -> int:
        """Stand for the kernel, which takes two, and fails or has no room then."""
        nonlocal calls
        calls += 1
        if calls == 1:
            return send_all(sock, datagrams[:2], timeout)
        if fault is not None:
            raise fault
        return 0

    send_all = DatagramSocket.send
    with listening() as udp, output_for(f"json+udp://{HOST}:{port_of(udp)}") as output:
        with monkeypatch.context() as patch:
            patch.setattr(DatagramSocket, "send", send_some)
            rejected = output.give(Collected(schema, batch, None))
            assert [(each.row, each.code) for each in rejected] == [
                (row, Code.UNAVAILABLE) for row in (2, 3, 4)
            ]
            reason = "no room" if fault is None else "Network is unreachable"
            assert all(reason in each.reason for each in rejected)
            with pytest.raises(OSError, match=reason):  # none of these went
                output.give(Collected(schema, batch, None))
        assert output.give(Collected(schema, batch.slice(0, 1), None)) == []
        assert [json.loads(udp.recv(1000)) for _ in range(3)] == [EXPECTED] * 3


def test_a_server_of_lines_that_is_away_is_counted_and_comes_back(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    dead = open_writer(f"log:{tmp_path}/dead")
    output = output_for(f"json+tcp://{HOST}:{port}")
    with collecting(example_schemas(), output, dead=dead) as collector:
        send(collector.port, STATUS + UP)
        until(lambda: collector.statistics().undelivered)
        with socket.create_server((HOST, port)) as server:
            output._lines._not_before = 0.0  # type: ignore[attr-defined]
            send(collector.port, STATUS + UP)
            server.settimeout(10)
            connection, _ = server.accept()
            with connection, connection.makefile() as lines:
                assert json.loads(lines.readline()) == EXPECTED
    books = collector.statistics()
    assert list(books.undelivered.values()) == [1]
    assert (books.dead, books.lost) == (1, 0)


def test_a_server_of_lines_that_is_started_again_gets_all_that_comes_later() -> None:
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(10)
        output = output_for(f"json+tcp://{HOST}:{server.getsockname()[1]}")
        with collecting(example_schemas(), output) as collector:
            for _ in range(3):  # of which each ends its connection when it has a line
                output._lines._not_before = 0.0  # type: ignore[attr-defined]
                send(collector.port, STATUS + UP)
                connection, _ = server.accept()
                with connection, connection.makefile() as lines:
                    connection.sendall(b"welcome")
                    assert json.loads(lines.readline()) == EXPECTED
            books = collector.statistics()
    assert (books.collected, books.undelivered) == (3, {})


def test_messages_become_arrow_columns_one_batch_a_schema() -> None:
    schemas = example_schemas()
    schemas.associate(stream_of("requests"), "example", "req_resp")
    arrow = ArrowOutput()
    with collecting(schemas, arrow) as collector:
        for device in (1, 2):
            send(collector.port, stream_of("requests", 2, device))
        send(collector.port, *(STATUS + UP for _ in range(100)))
        rows: dict[str, int] = {"status": 0, "req_resp": 0}
        while sum(rows.values()) < 102:
            collected = arrow.read(10)
            assert collected is not None
            assert collected.rows is not None
            assert collected.rows.num_rows == len(collected.messages)
            rows[collected.schema.message] += collected.rows.num_rows
            if collected.schema.message == "status":
                assert collected.rows.to_pylist()[0] == {
                    "id": 7,
                    "status": "up",
                    "a_struct": {"a_num": 300, "another_num": None},
                }
    assert rows == {"status": 100, "req_resp": 2}
    assert arrow.read(0) is None
    assert list(arrow) == []


def test_bad_datagrams_are_counted_and_kept(tmp_path: Path) -> None:
    dead = open_writer(f"log:{tmp_path}/dead")
    wrong, unknown = STATUS + b"\x08", stream_of("unknown-to-all") + UP
    arrow = ArrowOutput()
    with collecting(example_schemas(), arrow, dead=dead) as collector:
        send(collector.port, STATUS[:-1], b"", wrong, unknown, STATUS + UP, STATUS, STATUS + UP)
        until(lambda: collector.statistics().datagrams.received == 7)
    books = collector.statistics()
    assert_balanced(books)
    assert books.refused == {
        Refusal.MALFORMED: 2,
        Refusal.UNKNOWN: 1,
        Refusal.UNDECODABLE: 2,  # one is cut, one lacks what is required
    }
    assert books.collected == 2
    assert books.bytes == 2 * len(UP)
    assert (books.dead, books.lost) == (3, 2)  # what is shorter than an id is no message
    with open_reader(f"log:{tmp_path}/dead") as reader:
        letters = [DeadLetter.from_message(message) for message in reader.available()]
    assert {(x.original.payload, x.code) for x in letters} == {
        (b"\x08", Code.INVALID_ARGUMENT),
        (b"", Code.INVALID_ARGUMENT),
        (UP, Code.FAILED_PRECONDITION),
    }


def test_a_message_that_no_column_can_have_is_collected_as_json(tmp_path: Path) -> None:
    schemas = Schemas()
    schemas.upsert(as_set(describe({"Node": [("next", "Node"), ("x", "int32")]})))
    schemas.associate(STATUS, "made", "Node")
    file, arrow = tmp_path / "lines", ArrowOutput()
    with collecting(schemas, arrow, JsonOutput(f"json:{file}")) as collector:
        send(collector.port, STATUS + b"\x0a\x02\x10\x05", STATUS + b"\xff")
        until(lambda: sum(collector.statistics().refused.values()) == 1)
        collected = arrow.read(5)
    assert collected is not None
    assert collected.rows is None
    assert json.loads(file.read_text())["next"] == {"x": 5}
    assert_balanced(collector.statistics())


def test_messages_go_to_a_stream_with_their_ids(tmp_path: Path) -> None:
    with collecting(example_schemas(), StreamOutput(f"log:{tmp_path}/kept")) as collector:
        send(collector.port, *(STATUS + UP for _ in range(10)))
        until(lambda: collector.statistics().collected == 10)
    with open_reader(f"log:{tmp_path}/kept") as reader:
        messages = list(reader.available())
    assert [(m.stream, m.payload) for m in messages] == [(STATUS, UP)] * 10


def test_messages_that_a_stream_took_before_it_was_full_are_not_undelivered() -> None:
    schemas = example_schemas()
    schema = schemas.find(STATUS)
    assert schema is not None
    with served(capacity=4) as server:
        output = StreamOutput(f"lhhttt://{server.address}?timeout=300ms")
        batch = batch_of_datagrams([STATUS + UP] * 10, 0, 0)
        refused = output.give(Collected(schema, batch, None))
        assert [(each.row, each.code) for each in refused] == [
            (row, Code.UNAVAILABLE) for row in range(4, 10)
        ]
        assert server.statistics().queue.queued == 4
        with pytest.raises(PenstockError):  # of which it took nothing
            output.give(Collected(schema, batch, None))
        output.close()


@pytest.mark.parametrize("error", [OSError("no space"), ValueError("a mistake")])
def test_an_output_that_fails_harms_no_other(tmp_path: Path, error: Exception) -> None:
    class Broken(Output):
        name = "broken"

        def give(self, collected: Collected) -> Any:  # noqa: ARG002
            raise error

        def close(self) -> None:
            pass

    file = tmp_path / "lines"
    with collecting(example_schemas(), Broken(), JsonOutput(f"json:{file}")) as collector:
        send(collector.port, STATUS + UP)
        until(lambda: collector.statistics().undelivered == {"broken": 1})
    assert len(file.read_text().splitlines()) == 1


def test_a_line_that_fits_no_datagram_is_undelivered_alone() -> None:
    schemas = Schemas()
    schemas.upsert(as_set(describe({"A": [("b", "bytes")]})))
    schemas.associate(STATUS, "made", "A")
    large = b"\x0a\xe0\xd4\x03" + bytes(60_000)
    with listening() as udp:
        target = f"json+udp://{HOST}:{port_of(udp)}"
        with collecting(schemas, output_for(target)) as collector:
            send(collector.port, STATUS + large, STATUS + b"\x0a\x01x")
            assert json.loads(udp.recv(1000))["b"] == "eA=="
            until(lambda: collector.statistics().undelivered == {target: 1})


def test_what_waits_at_the_end_is_given_on_or_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Output):
        name = "slow"
        given = 0

        def give(self, collected: Collected) -> Any:
            time.sleep(0.02)
            self.given += len(collected.messages)
            return ()

        def close(self) -> None:
            pass

    for grace in (10.0, 0.05):
        monkeypatch.setattr("penstock.protocols.jrtc.collector._GRACE", grace)
        slow = Slow()
        with collecting(example_schemas(), slow) as collector:
            for _ in range(50):
                send(collector.port, *(STATUS + UP for _ in range(40)))
        books = collector.statistics()
        assert books.datagrams.received + books.datagrams.dropped == 2000
        assert books.datagrams.received == slow.given + books.unhandled
        assert books.lost == books.datagrams.dropped + books.unhandled
        assert (books.unhandled == 0) is (grace > 1)


def test_targets_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        output_for(f"json:{tmp_path}/no/such/folder")
    with pytest.raises(InvalidOption):
        output_for("json+tcp://127.0.0.1")


# --- schemas by gRPC -----------------------------------------------------------------------------


class Control:
    """Asks as jrt-controller's control program does."""

    def __init__(self, port: int) -> None:
        self.channel = grpc.insecure_channel(f"{HOST}:{port}")

    def ask(self, call: str, request: str, **fields: Any) -> str:
        """Return the answer's message, or the name of the status."""
        classes = message_classes()
        method = self.channel.unary_unary(
            f"/{SERVICE}/{call}",
            request_serializer=classes[request].SerializeToString,
            response_deserializer=classes["Response"].FromString,
        )
        try:
            answer = method(classes[request](**fields), timeout=10)
        except grpc.RpcError as error:
            return str(error.code().name)
        assert answer.status == 0
        return str(answer.message)

    def upsert(self, descriptors: bytes) -> str:
        return self.ask("UpsertProtoPackage", "Schema", proto_descriptor=descriptors)

    def add(self, stream: bytes, package: str, message: str) -> str:
        return self.ask(
            "AddStreamToSchemaAssociation",
            "AddSchemaAssociation",
            stream_id=stream,
            proto_package=package,
            proto_msg=message,
        )

    def delete(self, stream: bytes) -> str:
        return self.ask(
            "DeleteStreamToSchemaAssociation", "RemoveSchemaAssociation", stream_id=stream
        )


@contextmanager
def controlled(schemas: Schemas, **options: Any) -> Iterator[Control]:
    with DecoderServer(schemas, HOST, 0, **options) as server:
        control = Control(server.port)
        try:
            yield control
        finally:
            control.channel.close()


def test_schemas_are_loaded_by_grpc() -> None:
    any_device = StreamId.from_fields(0, 0x7F, 0x7F, STATUS.path, STATUS.name)
    arrow = ArrowOutput()
    with collecting(None, arrow, grpc_port=0) as collector:
        assert collector.grpc_port is not None
        control = Control(collector.grpc_port)
        assert control.upsert(EXAMPLE) == ""
        assert control.upsert(EXAMPLE) == "Proto package already exists, checksum matches"
        assert control.add(any_device, "example", "status") == ""
        send(collector.port, STATUS + UP)
        assert arrow.read(10) is not None
        assert control.add(any_device, "example", "status").startswith("stream already has")
        assert control.delete(STATUS) == ""
        send(collector.port, STATUS + UP)
        until(lambda: collector.statistics().refused[Refusal.UNKNOWN] == 1)
        control.channel.close()


def test_requests_that_do_not_do_are_answered_clearly() -> None:
    schemas = Schemas(SchemaLimits(descriptor_bytes=2000, packages=1))
    with controlled(schemas) as control:
        assert control.add(STATUS, "example", "status") == "NOT_FOUND"
        assert control.upsert(b"") == "INVALID_ARGUMENT"
        assert control.upsert(b"\xff\xff") == "INVALID_ARGUMENT"
        assert control.upsert(bytes(2001)) == "INVALID_ARGUMENT"
        assert control.upsert(bytes(1 << 20)) == "RESOURCE_EXHAUSTED"
        assert control.upsert(EXAMPLE) == ""
        assert control.upsert(as_set(describe({}, name="x.proto"))) == "RESOURCE_EXHAUSTED"
        assert control.add(STATUS, "example", "nothing") == "NOT_FOUND"
        assert control.add(b"short", "example", "status") == "INVALID_ARGUMENT"
        assert control.add(STATUS, "example", "status") == ""
        assert control.add(STATUS, "example", "request") == "ALREADY_EXISTS"
        assert control.delete(b"") == "INVALID_ARGUMENT"
        assert control.delete(stream_of("never-heard-of")) == ""
        assert control.ask("NoSuchCall", "Schema") == "UNIMPLEMENTED"
    assert schemas.find(STATUS) is not None


def test_a_forwarder_is_told_structs_by_grpc() -> None:
    schemas = Schemas()
    with controlled(schemas, struct=Nanopb()) as control:
        assert control.upsert(as_set(describe({"A": [("x", "int32")]}))) == ""
        assert control.add(STATUS, "made", "A") == ""
        assert control.upsert(EXAMPLE) == ""
        assert control.add(stream_of("unbounded"), "example", "status") == "INVALID_ARGUMENT"
    schema = schemas.find(STATUS)
    assert schema is not None
    assert schema.codec is not None
    assert schema.codec.dtype.itemsize == 4


def test_the_service_tells_its_health() -> None:
    with controlled(Schemas()) as control:
        health = health_pb2_grpc.HealthStub(control.channel)
        for service in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_port_that_is_taken_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StorageError, match="in use"):
            DecoderServer(Schemas(), HOST, port)
        assert not caplog.records  # one line tells it
        with pytest.raises(StorageError), collecting(None, http_port=port):
            pass


# --- schemas by HTTP -----------------------------------------------------------------------------


def request(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://{HOST}:{port}{path}", data, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else text


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_schemas_are_loaded_by_the_gateways_http() -> None:
    fine = {"status": "STATUS_OK", "message": ""}
    with collecting(None, http_port=0) as collector:
        port = collector.http_port
        assert port is not None
        schemas = collector.schemas
        assert request(port, "PUT", "/v1/schema", {"proto_descriptor": b64(EXAMPLE)}) == (200, fine)
        association = {
            "stream_id": b64(STATUS),
            "proto_package": "example",
            "proto_msg": "status",
        }
        assert request(port, "PUT", "/v1/stream", association) == (200, fine)
        assert schemas.find(STATUS) is not None
        association["proto_msg"] = "request"
        status, answer = request(port, "PUT", "/v1/stream", association)
        assert (status, answer["code"]) == (409, 6)
        assert request(port, "GET", "/health") == (
            200,
            {"status": "SERVING", "packages": 1, "streams": 1},
        )
        text = base64.urlsafe_b64encode(STATUS).decode()
        assert request(port, "DELETE", f"/v1/stream?streamId={text}") == (200, fine)
        assert schemas.find(STATUS) is None


def test_schemas_are_loaded_by_the_simpler_http() -> None:
    with collecting(None, http_port=0) as collector:
        port = collector.http_port
        assert port is not None
        assert request(port, "POST", "/schema", {"ProtoDescriptor": b64(EXAMPLE)})[0] == 200
        association = {
            "StreamUUID": str(STATUS),
            "ProtoPackage": "example",
            "ProtoMessage": "status",
        }
        assert request(port, "POST", "/stream", association)[0] == 200
        assert collector.schemas.find(STATUS) is not None
        text = base64.urlsafe_b64encode(STATUS).decode().rstrip("=")
        assert request(port, "DELETE", f"/stream?stream_uuid={text}")[0] == 202
        assert collector.schemas.find(STATUS) is None


def test_bad_requests_by_http_are_answered_clearly() -> None:
    with collecting(None, http_port=0) as collector:
        port = collector.http_port
        assert port is not None
        for method, path, body, expected in (
            ("PUT", "/v1/schema", b"{", 400),
            ("PUT", "/v1/schema", {"proto_descriptor": "%%%"}, 400),
            ("PUT", "/v1/schema", {"proto_descriptor": 5}, 400),
            ("PUT", "/v1/schema", {}, 400),
            ("PUT", "/v1/schema", b" " * (2 << 20), 413),
            ("PUT", "/v1/stream", {"stream_id": "AAAA"}, 400),
            ("PUT", "/v1/stream", {"stream_id": b64(STATUS), "proto_package": "no"}, 404),
            ("POST", "/stream", {}, 400),
            ("POST", "/stream", {"StreamUUID": "x", "ProtoPackage": "", "ProtoMessage": ""}, 400),
            ("DELETE", "/v1/stream?streamId=*", None, 400),
            ("DELETE", "/stream", None, 400),
            ("GET", "/v1/schema", None, 405),
            ("GET", "/nowhere", None, 404),
        ):
            assert request(port, method, path, body)[0] == expected, (method, path, body)
        assert request(port, "GET", "/health")[0] == 200


def test_schemas_change_while_datagrams_come() -> None:
    arrow = ArrowOutput(100_000)
    with collecting(example_schemas(), arrow) as collector:
        stop = threading.Event()

        def change() -> None:
            while not stop.is_set():
                collector.schemas.dissociate(STATUS)
                collector.schemas.associate(STATUS, "example", "status")

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for _ in range(20):
                send(collector.port, *(STATUS + UP for _ in range(100)))
                until(lambda: collector.statistics().datagrams.received % 100 == 0)
        finally:
            stop.set()
            thread.join()
    books = collector.statistics()
    assert books.datagrams.received + books.datagrams.dropped == 2000
    assert books.datagrams.received == books.collected + books.refused[Refusal.UNKNOWN]


def test_vectors_are_collected_as_the_original_has_them(tmp_path: Path) -> None:
    schemas = Schemas()
    schemas.upsert(EXAMPLE)
    vectors = [v for v in VECTORS["vectors"] if v.get("datagram")]
    for vector in vectors:
        schemas.associate(StreamId.parse(vector["stream_id"]), "example", vector["message"])
    file = tmp_path / "lines"
    with collecting(schemas, JsonOutput(f"json:{file}")) as collector:
        send(collector.port, *(bytes.fromhex(vector["datagram"]) for vector in vectors))
        until(lambda: collector.statistics().collected == len(vectors))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        for key in ("_schema_proto_msg", "_schema_proto_package", "_stream_id"):
            del line[key]
    wanted = [vector["decoded_json_default"] for vector in vectors]
    assert sorted(map(str, lines)) == sorted(map(str, (dict(sorted(w.items())) for w in wanted)))
