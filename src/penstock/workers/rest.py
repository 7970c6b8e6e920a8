"""How are apps loaded and unloaded over HTTP?

Through jrt-controller's REST interface (`/app`), so that its control program works here. An app is
a file below the root; a binary in a request is refused.
"""

from __future__ import annotations

import datetime as dt
import hmac
import json
import logging
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, Field

from penstock.core.errors import (
    AlreadyExists,
    InvalidOption,
    NotFound,
    PenstockError,
    Unsupported,
)
from penstock.core.url import is_loopback
from penstock.protocols.web import WebServer
from penstock.workers.controller import AppRequest, Controller, LoadedApp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from pathlib import Path

    _Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    _Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

__all__ = ["JrtcAppLoadRequest", "JrtcAppState", "controller_app", "serve_controller"]

log = logging.getLogger(__name__)

DEFAULT_PORT: Final = 3001

#: A request may have the app's binary in it, to be told that it is not taken.
_LARGEST_BODY: Final = 16 << 20
_NANOSECONDS: Final = 1_000_000_000


def _texts(values: object) -> object:
    """Accept values of any plain type as texts; the original takes texts only."""
    if not isinstance(values, dict):
        return values
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }


_Texts = Annotated[dict[str, str], BeforeValidator(_texts), Field(max_length=255)]
_Number = Annotated[int, Field(ge=0, lt=1 << 31)]


class JrtcAppLoadRequest(BaseModel):
    """A request to load an app."""

    #: The binary, in base64: not taken here.
    app: str = ""
    app_name: str
    runtime_us: _Number = 0
    deadline_us: _Number = 0
    period_us: _Number = 0
    #: Messages that may wait for it; 0: as many as the queues of its streams hold.
    ioq_size: _Number = 0
    app_path: str = ""
    app_type: str = "python"
    app_params: _Texts = Field(default_factory=dict)
    device_mapping: _Texts = Field(default_factory=dict)
    app_modules: Annotated[list[str], Field(max_length=255)] = Field(default_factory=list)


class JrtcAppState(BaseModel):
    """A loaded app."""

    id: int
    request: JrtcAppLoadRequest
    start_time: str


class JrtcAppError(BaseModel):
    """An error."""

    Details: str


class _Refusal(Exception):
    def __init__(self, status: int, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


def controller_app(controller: Controller, root: Path, *, token: str | None = None) -> Any:
    """Return the web application.

    :param root: apps are files below it
    :param token: required in requests as `Authorization: Bearer TOKEN`
    :raises Unsupported: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI, Response  # noqa: PLC0415 - an extra
        from fastapi.exceptions import RequestValidationError  # noqa: PLC0415
        from fastapi.responses import JSONResponse  # noqa: PLC0415
    except ImportError as error:
        raise Unsupported(
            "the controller's REST interface needs FastAPI", hint="pip install 'penstock[jrtc]'"
        ) from error
    web = FastAPI(
        title="jrt-controller REST API",
        description="Load and unload apps of a controller.",
        openapi_url="/api-docs/openapi.json",
    )
    calls = _Calls(controller, root)
    for path, method, call, options in (
        ("/app", "GET", calls.get_apps, {}),
        ("/app", "POST", calls.load_app, {"responses": _refusals(400, 500)}),
        ("/app/{id}", "GET", calls.get_app, {"responses": _refusals(404)}),
        ("/app/{id}", "DELETE", calls.unload_app, {"status_code": 204, "response_class": Response}),
    ):
        web.add_api_route(
            path, call, methods=[method], operation_id=call.__name__, tags=["app"], **options
        )

    def refuse(_: object, error: Exception) -> JSONResponse:
        hint = getattr(error, "hint", None)
        details = f"{error} ({hint})" if hint else str(error)
        return JSONResponse({"Details": details}, _status(error))

    def refuse_form(_: object, error: Any) -> JSONResponse:
        faults = (f"{'.'.join(map(str, f['loc'][1:]))}: {f['msg']}" for f in error.errors())
        return JSONResponse({"Details": "; ".join(faults)}, 400)

    web.add_exception_handler(PenstockError, refuse)
    web.add_exception_handler(_Refusal, refuse)
    web.add_exception_handler(RequestValidationError, refuse_form)
    return _Guard(web, token)


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": JrtcAppError} for status in statuses}


def _status(error: Exception) -> int:
    if isinstance(error, _Refusal):
        return error.status
    if isinstance(error, NotFound):
        return 404
    return 400 if isinstance(error, (InvalidOption, AlreadyExists)) else 500


class _Calls:
    """The handlers of the interface."""

    def __init__(self, controller: Controller, root: Path) -> None:
        self._controller = controller
        self._root = root
        #: Those that came by here, as they came.
        self._requests: dict[int, JrtcAppLoadRequest] = {}

    def get_apps(self) -> list[JrtcAppState]:
        """List the loaded apps."""
        return [self._state(loaded) for loaded in self._controller.apps()]

    def load_app(self, request: JrtcAppLoadRequest) -> JrtcAppState:
        """Load an app: a file below the root. Binaries are refused."""
        loaded = self._controller.load(_checked(request, self._root))
        self._requests[loaded.id] = request
        return self._state(loaded)

    def get_app(self, id: int) -> JrtcAppState:
        """Show a loaded app."""
        return self._state(self._controller.app(id))

    def unload_app(self, id: int) -> None:
        """Unload an app, if it is loaded."""
        self._controller.unload(id)
        self._requests.pop(id, None)

    def _state(self, loaded: LoadedApp) -> JrtcAppState:
        began = dt.datetime.fromtimestamp(loaded.loaded_ns / _NANOSECONDS, dt.UTC)
        request = self._requests.get(loaded.id) or _request_of(loaded.request)
        return JrtcAppState(id=loaded.id, request=request, start_time=began.isoformat())


def _checked(request: JrtcAppLoadRequest, root: Path) -> AppRequest:
    """Check a request, and return the app that it asks for."""
    if request.app:
        raise _Refusal(
            400,
            "a binary is not taken, because no code from the network is run here: put the app "
            "below the controller's root, name it by app_path, and leave app empty",
        )
    path = request.app_path
    if request.app_type == "python":
        # The original's control program names its own loader there, and the app in a parameter.
        path = request.app_params.get("python", path)
    try:
        devices = {int(key): value for key, value in request.device_mapping.items()}
    except ValueError:
        raise _Refusal(400, "device_mapping: its keys should be numbers of devices") from None
    return AppRequest(
        name=request.app_name,
        path=_below(root, path, "app_path"),
        type=request.app_type,
        queue_size=request.ioq_size or None,
        params=request.app_params,
        devices=devices,
        modules=tuple(_below(root, each, "app_modules") for each in request.app_modules),
    )


def _below(root: Path, path: str, field: str) -> Path:
    root = root.resolve()
    try:
        found = (root / path).resolve()
        is_there = found.is_file()
    except (OSError, ValueError):
        is_there = False
    if not path or not is_there or not found.is_relative_to(root):
        # What there is elsewhere is not for those who ask to find out.
        raise _Refusal(400, f"{field}: there is no file {path!r} below the root of the apps")
    return found


def _request_of(request: AppRequest) -> JrtcAppLoadRequest:
    """Return the request that would load an app which was loaded another way."""
    return JrtcAppLoadRequest(
        app_name=request.name,
        ioq_size=request.queue_size or 0,
        app_path=str(request.path),
        app_type=request.type,
        app_params=dict(request.params),
        device_mapping={str(key): value for key, value in request.devices.items()},
        app_modules=[str(module) for module in request.modules],
    )


class _Guard:
    """Refuses requests without the token and requests that are too large."""

    def __init__(self, app: Any, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send
    ) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        said = headers.get(b"authorization", b"")
        if self._expected is not None and not hmac.compare_digest(said, self._expected):
            await _refuse(send, 401, "the token is missing or wrong: Authorization: Bearer TOKEN")
            return
        body = bytearray()
        while True:
            part = await receive()
            if part["type"] != "http.request":
                return  # whoever asked has left
            body += part.get("body", b"")
            if len(body) > _LARGEST_BODY:
                await _refuse(send, 413, f"the request has more than {_LARGEST_BODY:,} bytes")
                return
            if not part.get("more_body"):
                break
        whole: MutableMapping[str, Any] = {"type": "http.request", "body": bytes(body)}

        async def received() -> MutableMapping[str, Any]:
            nonlocal whole
            said, whole = whole, {"type": "http.disconnect"}
            return said

        await self._app(scope, received, send)


async def _refuse(send: _Send, status: int, details: str) -> None:
    body = json.dumps({"Details": details}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve_controller(
    controller: Controller,
    root: Path,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    token: str | None = None,
) -> WebServer:
    """Serve the interface until the returned server is closed.

    :raises InvalidOption: other machines can reach the address, and there is no token.
    :raises StorageError: the address is in use.
    """
    if not is_loopback(host) and not token:
        raise InvalidOption(
            "host", host, "other machines reach it: a token is needed", hint="--token-file FILE"
        )
    return WebServer(
        controller_app(controller, root, token=token),
        host,
        port,
        name="penstock-controller",
        log=log,
        extra="jrtc",
    )
