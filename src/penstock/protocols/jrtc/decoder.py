"""How do other programs load schemas, by gRPC?

Through jrt-controller's gRPC service `dynamicdecoder.DynamicDecoder`, so that its control program
works here. `SchemaRequests` executes the requests; the HTTP forms share it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from penstock.core.dead_letter import Code
from penstock.core.errors import (
    AlreadyExists,
    NotFound,
    PenstockError,
    StorageError,
    Unsupported,
)
from penstock.core.interfaces import Closable
from penstock.core.stream_id import StreamId
from penstock.core.url import is_loopback
from penstock.core.worker import Worker
from penstock.protocols.jrtc.schemas import Schemas, TooManySchemas
from penstock.protocols.server import listen_tcp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.protocols.jrtc.struct_codec import StructLike

__all__ = ["SERVICE", "DecoderServer", "SchemaRequests", "code_of", "message_classes"]

log = logging.getLogger(__name__)

SERVICE: Final = "dynamicdecoder.DynamicDecoder"
#: Requests at the same time, and what one has beside the descriptor set.
_MOST_REQUESTS: Final = 64
_OVERHEAD: Final = 4096
#: Seconds that requests have to end when the server stops.
_GRACE: Final = 1.0
_STARTING: Final = 10.0


class SchemaRequests:
    """Executes the requests of a control program.

    Each returns the text of the response, empty if something changed or was deleted.
    """

    def __init__(self, schemas: Schemas, struct: StructLike | None = None) -> None:
        """Load into `schemas`; `struct` says how queues hold the messages, None: as protobuf."""
        self._schemas = schemas
        self._struct = struct

    def upsert(self, descriptors: bytes) -> str:
        """Load a descriptor set.

        :raises PenstockError: as `Schemas.upsert`.
        """
        package, is_new = self._schemas.upsert(descriptors)
        log.info("schema %s %s", package, "is loaded" if is_new else "is the same as before")
        return "" if is_new else "Proto package already exists, checksum matches"

    def add(self, stream: bytes, package: str, message: str) -> str:
        """Associate a stream with a message type.

        :raises PenstockError: as `Schemas.associate`.
        """
        is_new = self._schemas.associate(StreamId(stream), package, message, self._struct)
        log.info("stream %s carries %s of %s", StreamId(stream), message, package)
        return "" if is_new else "stream already has a schema association"

    def delete(self, stream: bytes) -> str:
        """Remove the association of a stream.

        :raises InvalidStreamId: the id does not have exactly 16 bytes.
        """
        self._schemas.dissociate(StreamId(stream))
        log.info("stream %s has no schema", StreamId(stream))
        return ""


def code_of(error: PenstockError) -> Code:
    """Return the gRPC status of a refused request."""
    if isinstance(error, AlreadyExists):
        return Code.ALREADY_EXISTS
    if isinstance(error, NotFound):
        return Code.NOT_FOUND
    if isinstance(error, TooManySchemas):
        return Code.RESOURCE_EXHAUSTED
    return Code.INVALID_ARGUMENT if isinstance(error, ValueError) else Code.INTERNAL


@cache
def message_classes() -> dict[str, Any]:
    """Return the service's message classes, from a private descriptor pool.

    Another library in the process may have registered the same names.
    """
    from google.protobuf import (  # noqa: PLC0415 - an extra
        descriptor_pb2,
        descriptor_pool,
        message_factory,
    )

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="dynamicdecoder.proto", package="dynamicdecoder", syntax="proto3"
    )
    status = file.enum_type.add(name="ResponseStatus")
    status.value.add(name="STATUS_OK", number=0)
    status.value.add(name="STATUS_FAILED", number=1)
    for name, fields in (
        ("Schema", (("proto_descriptor", kinds.TYPE_BYTES),)),
        (
            "AddSchemaAssociation",
            (
                ("stream_id", kinds.TYPE_BYTES),
                ("proto_package", kinds.TYPE_STRING),
                ("proto_msg", kinds.TYPE_STRING),
            ),
        ),
        ("RemoveSchemaAssociation", (("stream_id", kinds.TYPE_BYTES),)),
        ("Response", (("status", kinds.TYPE_ENUM), ("message", kinds.TYPE_STRING))),
    ):
        message = file.message_type.add(name=name)
        for number, (field, kind) in enumerate(fields, 1):
            one = message.field.add(
                name=field, number=number, type=kind, label=kinds.LABEL_OPTIONAL
            )
            if kind == kinds.TYPE_ENUM:
                one.type_name = ".dynamicdecoder.ResponseStatus"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"dynamicdecoder.{message.name}")
        )
        for message in file.message_type
    }


class DecoderServer(Closable):
    """Serves the gRPC service and gRPC health, from construction until `close`."""

    def __init__(
        self, schemas: Schemas, host: str, port: int, *, struct: StructLike | None = None
    ) -> None:
        """Listen; port 0 takes any free port.

        :param struct: how queues hold the messages of associated streams
        :raises StorageError: the address is in use.
        :raises Unsupported: gRPC is not installed.
        """
        try:
            import grpc.aio  # noqa: F401, PLC0415 - an extra
            import grpc_health.v1.health  # noqa: F401, PLC0415
        except ImportError as error:
            raise Unsupported(
                "the decoder's service needs gRPC", hint="pip install 'penstock[jrtc]'"
            ) from error
        # gRPC tells nobody why it cannot listen.
        for each in listen_tcp(host, port):
            each.close()
        self._requests = SchemaRequests(schemas, struct)
        self._largest = schemas.limits.descriptor_bytes + _OVERHEAD
        self._address = f"[{host}]:{port}" if ":" in host.strip("[]") else f"{host}:{port}"
        self._has_begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        #: The port that it listens on.
        self.port = 0
        self._worker = Worker(
            "jrtc-decoder", lambda _: asyncio.run(self._serve()), log=log, rouse=self._rouse
        )
        self._worker.start()
        while not self._has_begun.wait(0.05) and self._worker.is_alive:
            pass
        if not self.port:
            self._worker.join(_STARTING)
            cause = OSError(str(self._worker.error))
            raise StorageError("listening on", self._address, cause)
        if not is_loopback(host):
            log.warning(
                "%s is open to other machines: anybody who can reach it can load schemas, because "
                "the service has no passwords",
                self._address,
            )

    async def _serve(self) -> None:
        import grpc  # noqa: PLC0415 - an extra
        from grpc import aio  # noqa: PLC0415
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # noqa: PLC0415

        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = aio.server(
            maximum_concurrent_rpcs=_MOST_REQUESTS,
            options=[
                ("grpc.max_receive_message_length", self._largest),
                ("grpc.max_metadata_size", 8192),
                ("grpc.max_concurrent_streams", _MOST_REQUESTS),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error
            ],
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, self._handlers())]
        )
        healthy = health.aio.HealthServicer()
        for service in ("", SERVICE):
            await healthy.set(service, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        port = server.add_insecure_port(self._address)
        await server.start()
        self.port = port
        self._has_begun.set()
        await self._end.wait()
        await healthy.enter_graceful_shutdown()
        await server.stop(_GRACE)

    def _handlers(self) -> dict[str, Any]:
        import grpc  # noqa: PLC0415 - an extra

        classes, asked = message_classes(), self._requests
        calls: dict[str, tuple[str, Callable[[Any], str]]] = {
            "UpsertProtoPackage": ("Schema", lambda r: asked.upsert(r.proto_descriptor)),
            "AddStreamToSchemaAssociation": (
                "AddSchemaAssociation",
                lambda r: asked.add(r.stream_id, r.proto_package, r.proto_msg),
            ),
            "DeleteStreamToSchemaAssociation": (
                "RemoveSchemaAssociation",
                lambda r: asked.delete(r.stream_id),
            ),
        }
        return {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(call, classes["Response"]),
                request_deserializer=classes[request].FromString,
                response_serializer=classes["Response"].SerializeToString,
            )
            for name, (request, call) in calls.items()
        }

    def _rouse(self) -> None:
        if self._loop is not None and self._end is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)

    def close(self) -> None:
        """Let running requests finish, and stop. Idempotent."""
        self._worker.stop(_GRACE + _STARTING)


def _answering(call: Callable[[Any], str], response: Any) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        import grpc  # noqa: PLC0415 - an extra

        try:
            return response(message=call(request))
        except PenstockError as error:
            said = str(error) if error.hint is None else f"{error} ({error.hint})"
            log.info("a request is refused: %s", said)
            await context.abort(grpc.StatusCode[code_of(error).name], said)

    return answer
