"""How is a deployment rolled out to queues, collectors, apps and devices, and taken back?

Queues for its channels on this machine, schemas for its collectors, apps for their controller, and
codelet sets for the reverse proxies of the devices.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import os
import urllib.error
import urllib.parse
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import ConnectionLost, NotFound, PenstockError, StorageError, Unsupported
from penstock.core.stream_id import StreamId, codelet_path
from penstock.core.stream_names import StreamNames, default_names_file
from penstock.protocols.jrtc.nanopb import Nanopb
from penstock.protocols.jrtc.schemas import Schemas
from penstock.queue.ownership import AlreadyOwned
from penstock.queue.stream_directory import StreamKind, remove_stream, streams_directory
from penstock.queue.streams import InputStream, OutputStream
from penstock.workers.controller import AppRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.workers.deployment import (
        AppSpec,
        ChannelSpec,
        CodeletSet,
        CodeletSpec,
        DecoderSpec,
        Deployment,
        DeviceSpec,
        PlacedCodeletSet,
        ProtobufSpec,
    )

__all__ = ["Refused", "Rollout", "codelet_set_request", "schemas_of"]

log = logging.getLogger(__name__)

_OK: Final = 200
_CREATED: Final = 201
_NO_CONTENT: Final = 204
#: What the original leaves as it is in the path of a request.
_AS_WRITTEN: Final = "/:@&=+$,;~!*'()"


class Refused(PenstockError):
    """A controller, collector or device refused a request."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what
        self.reason = reason


def schemas_of(deployment: Deployment) -> Schemas:
    """Return the schemas of a deployment's channels, for a forwarder.

    :raises PenstockError: a descriptor set cannot be read, has no such message, or has the name of
        another one.
    """
    schemas = Schemas()
    for channel in deployment.channels:
        if (schema := channel.schema) is not None:
            options = schema.options_path
            struct = None if options is None else Nanopb.from_options(options)
            streams = {channel.stream: schema.msg_name}
            schemas.load(schema.package_path, streams, struct, replace=False)
    return schemas


class Rollout:
    """Loads and unloads a deployment. What is loaded already stays as it is."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        directory: str | os.PathLike[str] | None = None,
        token: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        """`token` is for the controller; `timeout` is the time of one request (seconds)."""
        self.deployment = deployment
        self.directory = os.fspath(directory or streams_directory())
        self._token = token
        self._timeout = timeout
        #: Codelet sets that it loaded, with their devices.
        self._posted: list[PlacedCodeletSet] = []

    def load(self) -> None:
        """Load everything: queues and schemas first, then apps, then codelets.

        :raises PenstockError: something was refused; what was loaded before stays.
        """
        self.create_queues()
        self.load_schemas()
        self.load_apps()
        self.load_codelets()

    def unload(self) -> None:
        """Unload everything: codelets first, queues last.

        :raises PenstockError: something was refused; the rest is unloaded all the same.
        """
        _do_all(self.unload_codelets, self.unload_apps, self.unload_schemas, self.remove_queues)

    # --- queues ---------------------------------------------------------------------------------

    def create_queues(self) -> None:
        """Create the missing queues of channels, and register the names of their ids.

        :raises StreamIdCollision: another path or name on this machine has the same id.
        """
        name = self.deployment.name
        with StreamNames.updating(default_names_file()) as names:
            for channel in self.deployment.channels:
                names.register(
                    channel.stream.fwd_dst,
                    channel.device,
                    codelet_path(name, channel.codeletset, channel.codelet),
                    channel.spec.name,
                )
        for channel in self.deployment.channels:
            kind = OutputStream if channel.kind is StreamKind.OUTPUT else InputStream
            with contextlib.suppress(AlreadyOwned):  # who uses it has made it
                kind.create(
                    channel.stream,
                    owner=f"deployment {name}",
                    directory=self.directory,
                    slots=channel.spec.slots,
                    size=channel.spec.size,
                ).close()

    def remove_queues(self) -> None:
        """Remove the queues of channels that nobody uses."""
        for channel in self.deployment.channels:
            try:
                remove_stream(channel.stream, channel.kind, self.directory)
            except NotFound:
                continue
            except AlreadyOwned as error:
                log.warning("%s stays: %s", channel.label, error)

    # --- schemas --------------------------------------------------------------------------------

    def load_schemas(self) -> None:
        """Load the schema of each stream into each collector, for all devices and destinations.

        :raises InvalidOption: two descriptor sets have the same name.
        :raises Refused: a collector refuses it.
        """
        if not self.deployment.decoders:
            return
        wanted = dict(self._schema_streams())
        schemas = Schemas()
        files = dict.fromkeys(schema.package_path for schema in wanted.values())
        packages = {file: schemas.load(file, {}, replace=False) for file in files}
        for decoder in self.deployment.decoders:
            with _decoder(decoder, self._timeout) as client:
                for file in files:
                    client.upsert(_read(file))
                for stream, schema in wanted.items():
                    client.add(stream, packages[schema.package_path], schema.msg_name)

    def unload_schemas(self) -> None:
        """Remove the schemas from each collector.

        :raises PenstockError: one refuses or is away; the others are told all the same.
        """
        _do_all(*(partial(self._unload_schemas_of, each) for each in self.deployment.decoders))

    def _unload_schemas_of(self, decoder: DecoderSpec) -> None:
        with _decoder(decoder, self._timeout) as client:
            for stream, _ in self._schema_streams():
                client.delete(stream)

    def _schema_streams(self) -> Iterator[tuple[StreamId, ProtobufSpec]]:
        """Yield every stream that has a schema, also where two share a message type."""
        seen = set()
        for channel in self.deployment.channels:
            path = codelet_path(self.deployment.name, channel.codeletset, channel.codelet)
            stream = StreamId.generate(None, None, path, channel.spec.name)
            if channel.schema is not None and stream not in seen:
                seen.add(stream)
                yield stream, channel.schema

    # --- apps -----------------------------------------------------------------------------------

    def load_apps(self) -> None:
        """Ask each app's controller to start it.

        :raises Refused: the controller refuses.
        """
        for app in self.deployment.apps:
            request = AppRequest.of(app, self.deployment, self.directory)
            body = {
                "app": "",
                "app_name": app.name,
                "runtime_us": round(app.runtime * 1e6),
                "deadline_us": round(app.deadline * 1e6),
                "period_us": round(app.period * 1e6),
                "ioq_size": app.ioq_size or 0,
                "app_path": str(app.path.absolute()),
                "app_type": app.type,
                "app_params": dict(request.params),
                "device_mapping": {str(id): address for id, address in request.devices.items()},
                "app_modules": [str(module.absolute()) for module in app.modules],
            }
            self._ask("POST", f"{_controller(app)}/app", body, (_OK,), f"app {app.name}")

    def unload_apps(self) -> None:
        """Ask each app's controller to stop it.

        :raises PenstockError: one refuses or is away; the others are asked all the same.
        """
        _do_all(*(partial(self._unload_app, app) for app in self.deployment.apps))

    def _unload_app(self, app: AppSpec) -> None:
        what = f"app {app.name}"
        loaded = self._ask("GET", f"{_controller(app)}/app", None, (_OK,), what)
        for each in loaded:
            if each["request"]["app_name"] == app.name:
                url = f"{_controller(app)}/app/{each['id']}"
                self._ask("DELETE", url, None, (_NO_CONTENT,), what)

    def _ask(
        self, method: str, url: str, body: object, expected: tuple[int, ...], what: str
    ) -> Any:
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        return _request(method, url, body, expected, what, self._timeout, headers)

    # --- codelets -------------------------------------------------------------------------------

    def load_codelets(self) -> None:
        """Post each codelet set to the reverse proxy of its device, where it has one.

        :raises Refused: a proxy refuses.
        """
        for placed in self.deployment.codelet_sets:
            device, codelets = placed
            if device.port is not None:
                body = codelet_set_request(codelets, self.deployment, device.id)
                what = f"codelet set {codelets.codeletset_id} on device {device.id}"
                _request("POST", f"{_proxy(device)}/", body, (_CREATED,), what, self._timeout)
                self._posted.append(placed)

    def unload_codelets(self) -> None:
        """Ask the reverse proxies to unload the codelet sets.

        :raises PenstockError: one refuses or is away; the others are asked all the same.
        """
        _do_all(*(partial(self._unload, *each) for each in reversed(self.deployment.codelet_sets)))
        self._posted.clear()

    def take_back_codelets(self) -> None:
        """Unload the codelet sets that `load_codelets` loaded, also when it failed at a later one.

        :raises PenstockError: as for `unload_codelets`.
        """
        posted, self._posted = self._posted, []
        _do_all(*(partial(self._unload, *each) for each in reversed(posted)))

    def _unload(self, device: DeviceSpec, codelets: CodeletSet) -> None:
        if device.port is not None:
            what = f"codelet set {codelets.codeletset_id} on device {device.id}"
            url = f"{_proxy(device)}/{urllib.parse.quote(codelets.codeletset_id, safe=_AS_WRITTEN)}"
            _request("DELETE", url, None, (_NO_CONTENT,), what, self._timeout)


def _do_all(*steps: Callable[[], None]) -> None:
    """Do every step, also when one before it fails; then raise the first failure."""
    faults: list[PenstockError] = []
    for step in steps:
        try:
            step()
        except PenstockError as error:
            faults.append(error)
    for each in faults[1:]:
        log.warning("%s", each)
    if faults:
        raise faults[0]


def _proxy(device: DeviceSpec) -> str:
    return f"http://{_bracketed(device.ip)}:{device.port}"


def _controller(app: AppSpec) -> str:
    return f"http://{_bracketed(app.ip)}:{app.port}"


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _read(path: os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a path of any kind
            return file.read()
    except OSError as error:
        raise StorageError("reading", os.fspath(path), error) from error


# --- the request of a codelet set -----------------------------------------------------------------


def codelet_set_request(
    codelets: CodeletSet, deployment: Deployment, device: int
) -> dict[str, Any]:
    """Return the request to a reverse proxy: the file with the stream ids filled in."""
    streams = {
        (each.codelet, each.spec.name, each.kind): each.stream
        for each in deployment.channels
        if each.device == device and each.codeletset == codelets.codeletset_id
    }

    def channel(codelet: CodeletSpec, spec: ChannelSpec, kind: StreamKind) -> dict[str, Any]:
        stream = streams[codelet.codelet_name, spec.name, kind]
        request: dict[str, Any] = {"name": spec.name, "stream_id": stream.hex()}
        if spec.serde is not None:
            request["serde"] = {"file_path": spec.serde.file_path}
        return request

    return {
        "codelet_descriptor": [
            _without_nothing(
                {
                    "codelet_path": codelet.codelet_path,
                    "hook_name": codelet.hook_name,
                    "in_io_channel": [
                        channel(codelet, spec, StreamKind.INPUT) for spec in codelet.in_io_channel
                    ],
                    "linked_maps": [
                        {
                            "linked_codelet_name": linked.linked_codelet_name,
                            "linked_map_name": linked.linked_map_name,
                            "map_name": linked.map_name,
                        }
                        for linked in codelet.linked_maps
                    ],
                    "codelet_name": codelet.codelet_name,
                    "out_io_channel": [
                        channel(codelet, spec, StreamKind.OUTPUT) for spec in codelet.out_io_channel
                    ],
                    "priority": codelet.priority,
                    "runtime_threshold": codelet.runtime_threshold,
                }
            )
            for codelet in codelets.codelet_descriptor
        ],
        "codeletset_id": codelets.codeletset_id,
    }


def _without_nothing(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None and value != []}


# --- HTTP -----------------------------------------------------------------------------------------

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _request(
    method: str,
    url: str,
    body: object,
    expected: tuple[int, ...],
    what: str,
    timeout: float,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send a JSON request, and return the JSON of the response.

    :raises Refused: the response has an unexpected status.
    :raises ConnectionLost: the server does not answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(  # noqa: S310 - the scheme is ours
        url, data, {"Content-Type": "application/json", **(headers or {})}, method=method
    )
    try:
        with _opener.open(request, timeout=timeout) as answer:
            status, content = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        hint = "is it running, and is that its port?"
        raise ConnectionLost(f"{url}, for {what}", str(reason), hint=hint) from error
    if status not in expected:
        raise Refused(what, f"{url} answered {status}: {content[:500].decode(errors='replace')}")
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise Refused(what, f"{url} answered {status} without JSON") from None


# --- collectors -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _decoder(spec: DecoderSpec, timeout: float) -> Iterator[_GrpcDecoder | _HttpDecoder]:
    if spec.type == "decoderhttp":
        yield _HttpDecoder(spec, timeout)
        return
    with contextlib.closing(_GrpcDecoder(spec, timeout)) as client:
        yield client


class _HttpDecoder:
    """A collector behind the HTTP gateway."""

    def __init__(self, spec: DecoderSpec, timeout: float) -> None:
        path = spec.http_relative_path.strip("/")
        self._url = f"http://{_bracketed(spec.ip)}:{spec.port}" + (f"/{path}" if path else "")
        self._timeout = timeout

    def upsert(self, descriptors: bytes) -> None:
        self._put("PUT", "/v1/schema", {"proto_descriptor": base64.b64encode(descriptors).decode()})

    def add(self, stream: StreamId, package: str, message: str) -> None:
        self._put(
            "PUT",
            "/v1/stream",
            {
                "stream_id": base64.b64encode(stream).decode(),
                "proto_package": package,
                "proto_msg": message,
            },
        )

    def delete(self, stream: StreamId) -> None:
        text = base64.urlsafe_b64encode(stream).decode()
        self._put("DELETE", f"/v1/stream?streamId={text}", None)

    def _put(self, method: str, path: str, body: object) -> None:
        what = "schemas for the collector"
        _request(method, self._url + path, body, (_OK,), what, self._timeout)


class _GrpcDecoder:
    """A collector with the service `dynamicdecoder.DynamicDecoder`."""

    def __init__(self, spec: DecoderSpec, timeout: float) -> None:
        try:
            import grpc  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise Unsupported(
                "schemas go to a collector by gRPC", hint="pip install 'penstock[jrtc]'"
            ) from error
        from penstock.protocols.jrtc.decoder import (  # noqa: PLC0415 - needs the extra
            SERVICE,
            message_classes,
        )

        self._address = f"{_bracketed(spec.ip)}:{spec.port}"
        self._messages = message_classes()
        self._service = SERVICE
        self._timeout = timeout
        self._error = grpc.RpcError
        self._channel = grpc.insecure_channel(
            self._address, options=[("grpc.enable_http_proxy", 0)]
        )

    def upsert(self, descriptors: bytes) -> None:
        self._call("UpsertProtoPackage", "Schema", proto_descriptor=descriptors)

    def add(self, stream: StreamId, package: str, message: str) -> None:
        self._call(
            "AddStreamToSchemaAssociation",
            "AddSchemaAssociation",
            stream_id=bytes(stream),
            proto_package=package,
            proto_msg=message,
        )

    def delete(self, stream: StreamId) -> None:
        self._call(
            "DeleteStreamToSchemaAssociation", "RemoveSchemaAssociation", stream_id=bytes(stream)
        )

    def _call(self, method: str, message: str, **fields: object) -> None:
        what = f"the collector {self._address}"
        call = self._channel.unary_unary(
            f"/{self._service}/{method}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=self._messages["Response"].FromString,
        )
        try:
            answer = call(self._messages[message](**fields), timeout=self._timeout)
        except self._error as error:
            raise Refused(what, f"{error.code().name}: {error.details()}") from error
        if answer.status != 0:
            raise Refused(what, answer.message)

    def close(self) -> None:
        self._channel.close()
