"""How do other programs load schemas, by HTTP?

In the form of jrt-controller's gateway (`/v1/schema`, `/v1/stream`) and in the simpler one of
jbpf-protobuf's decoder (`/schema`, `/stream`).
"""

from __future__ import annotations

import base64
import binascii
import logging
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError

from penstock.core.dead_letter import Code
from penstock.core.errors import PenstockError, Unsupported
from penstock.core.stream_id import StreamId
from penstock.protocols.jrtc.decoder import SchemaRequests, code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.protocols.jrtc.schemas import Schemas

    _Call = Callable[[bytes, Mapping[str, str]], str]

__all__ = ["decoder_app"]

log = logging.getLogger(__name__)

_STATUS: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.RESOURCE_EXHAUSTED: 429,
}
#: What a request has beside the descriptor set, which base64 makes a third larger.
_OVERHEAD: Final = 4096


def _unbase64(value: object) -> bytes:
    """Decode base64 of either alphabet, with or without padding."""
    if not isinstance(value, str):
        raise ValueError("should be base64")  # noqa: TRY004 - as pydantic wants it
    text = value.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"should be base64: {error}") from None


_Base64 = Annotated[bytes, BeforeValidator(_unbase64)]


class _Schema(BaseModel):
    proto_descriptor: Annotated[
        _Base64,
        Field(
            validation_alias=AliasChoices("proto_descriptor", "protoDescriptor", "ProtoDescriptor")
        ),
    ] = b""


class _Association(BaseModel):
    stream_id: Annotated[_Base64, Field(validation_alias=AliasChoices("stream_id", "streamId"))] = (
        b""
    )
    proto_package: Annotated[
        str, Field(validation_alias=AliasChoices("proto_package", "protoPackage"))
    ] = ""
    proto_msg: Annotated[str, Field(validation_alias=AliasChoices("proto_msg", "protoMsg"))] = ""


class _NamedAssociation(BaseModel):
    """The form of jbpf-protobuf's decoder."""

    stream: Annotated[str, Field(alias="StreamUUID")]
    package: Annotated[str, Field(alias="ProtoPackage")]
    message: Annotated[str, Field(alias="ProtoMessage")]


def decoder_app(schemas: Schemas) -> Any:
    """Return the web application that loads schemas.

    :raises Unsupported: Starlette is not installed.
    """
    try:
        from starlette.applications import Starlette  # noqa: PLC0415 - an extra
        from starlette.routing import Route  # noqa: PLC0415
    except ImportError as error:
        raise Unsupported(
            "loading schemas by HTTP needs Starlette", hint="pip install 'penstock[jrtc]'"
        ) from error
    asked = SchemaRequests(schemas)
    largest = schemas.limits.descriptor_bytes * 4 // 3 + _OVERHEAD

    def upsert(data: bytes, _: Mapping[str, str]) -> str:
        return asked.upsert(_Schema.model_validate_json(data).proto_descriptor)

    def add(data: bytes, _: Mapping[str, str]) -> str:
        wanted = _Association.model_validate_json(data)
        return asked.add(wanted.stream_id, wanted.proto_package, wanted.proto_msg)

    def add_named(data: bytes, _: Mapping[str, str]) -> str:
        wanted = _NamedAssociation.model_validate_json(data)
        return asked.add(StreamId.parse(wanted.stream), wanted.package, wanted.message)

    def delete(_: bytes, query: Mapping[str, str]) -> str:
        said = query.get("streamId") or query.get("stream_id") or query.get("stream_uuid", "")
        return asked.delete(_unbase64(said))

    async def health(_: Any) -> Any:
        content = {
            "status": "SERVING",
            "packages": len(schemas.packages()),
            "streams": len(schemas.associations()),
        }
        return _json(content)

    def route(path: str, method: str, call: _Call, status: int = 200) -> Any:
        async def endpoint(request: Any) -> Any:
            data = await _body(request, largest)
            if data is None:
                return _refusal(413, Code.RESOURCE_EXHAUSTED, f"more than {largest:,} bytes")
            return _answer(call, data, request.query_params, status)

        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            route("/v1/schema", "PUT", upsert),
            route("/v1/stream", "PUT", add),
            route("/v1/stream", "DELETE", delete),
            route("/schema", "POST", upsert),
            route("/stream", "POST", add_named),
            route("/stream", "DELETE", delete, 202),
        ]
    )


async def _body(request: Any, largest: int) -> bytes | None:
    """Return the request body, or None if it is too large."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > largest:
            return None
    return bytes(data)


def _answer(call: _Call, data: bytes, query: Mapping[str, str], status: int) -> Any:
    """Answer a request as jrt-controller's gateway does."""
    try:
        return _json({"status": "STATUS_OK", "message": call(data, query)}, status)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        code, said = Code.INVALID_ARGUMENT, f"{where}: {first['msg']}"
    except PenstockError as error:
        code, said = code_of(error), str(error)
    except ValueError as error:
        code, said = Code.INVALID_ARGUMENT, str(error)
    return _refusal(_STATUS.get(code, 500), code, said)


def _refusal(status: int, code: Code, said: str) -> Any:
    log.info("a request is refused: %s", said)
    return _json({"code": int(code), "message": said, "details": []}, status)


def _json(content: Mapping[str, Any], status: int = 200) -> Any:
    from starlette.responses import JSONResponse  # noqa: PLC0415 - an extra

    return JSONResponse(content, status)
