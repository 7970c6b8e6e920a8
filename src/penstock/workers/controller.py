"""How are the apps of a controller started, watched, restarted and unloaded?"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.errors import AlreadyExists, Closed, InvalidOption, NotFound
from penstock.core.interfaces import Closable
from penstock.core.retry import Backoff
from penstock.core.supervision import Program, ProgramStatistics, Supervisor
from penstock.queue.stream_directory import StreamPlace, make_streams_directory, streams_directory
from penstock.queue.wide.file import file_of
from penstock.workers.app_process import AppTask
from penstock.workers.deployment import variable_of
from penstock.workers.router import check_app_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from penstock.workers.deployment import AppSpec, Channel, Deployment

__all__ = ["AppRequest", "Controller", "LoadedApp", "queue_params"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppRequest:
    """A request to load an app."""

    name: str
    path: Path
    #: `python`: a file with a subclass of `App`. `c`: a program.
    type: str
    queue_size: int | None
    params: Mapping[str, str]
    devices: Mapping[int, str]
    modules: tuple[Path, ...] = ()
    deployment: str = ""

    @staticmethod
    def of(app: AppSpec, deployment: Deployment, directory: str) -> AppRequest:
        """Return the request for an app of a deployment."""
        params = {key: str(value) for key, value in app.params.items()}
        if app.type == "c":
            params |= queue_params(deployment.channels, directory)
        return AppRequest(
            name=app.name,
            path=app.path,
            type=app.type,
            queue_size=app.ioq_size,
            params=params,
            devices=deployment.device_addresses,
            modules=app.modules,
            deployment=deployment.name,
        )


def queue_params(channels: Iterable[Channel], directory: str) -> dict[str, str]:
    """Return the paths of channels' queue files, as parameters of a program."""
    return {
        channel.param: file_of(StreamPlace(channel.stream, channel.kind, directory).path)
        for channel in channels
    }


class LoadedApp(NamedTuple):
    """An app that a controller runs."""

    id: int
    request: AppRequest
    #: When it was loaded, nanoseconds since 1970.
    loaded_ns: int
    #: What became of its process so far.
    process: ProgramStatistics


class _Entry(NamedTuple):
    request: AppRequest
    loaded_ns: int


class Controller(Closable):
    """Runs apps, each in its own process, so that a crash harms no other.

    A failed app is restarted with back-off. One that does not end within `grace` seconds is killed.
    Thread-safe.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        grace: float = 5.0,
        on_output: Callable[[str, str], None] | None = None,
    ) -> None:
        self.directory = os.fspath(directory or streams_directory())
        make_streams_directory(self.directory)
        self._grace = grace
        self._apps: dict[int, _Entry] = {}
        self._ids = 0
        #: It starts nothing any more; and all apps have ended.
        self._is_closed = self._is_over = False
        self._lock = threading.Lock()
        self._supervisor = Supervisor(on_output=on_output)

    def load(self, request: AppRequest) -> LoadedApp:
        """Start an app.

        :raises AlreadyExists: an app of this name is loaded.
        :raises InvalidOption: its name, type or parameters are invalid, or its file is unsuitable.
        :raises Closed: the controller was closed.
        """
        check_app_name(request.name)
        command, environment = self._program(request)
        if any("\0" in each for each in environment.values()):
            raise InvalidOption("params", request.name, "a parameter has a zero byte")
        with self._lock:
            self._check_open()
            if any(entry.request.name == request.name for entry in self._apps.values()):
                raise AlreadyExists(f"app {request.name} is loaded", hint="unload it first")
            self._ids += 1
            self._apps[self._ids] = _Entry(request, time.time_ns())
            self._supervisor.add(
                Program(
                    name=request.name,
                    command=command,
                    environment={"PENSTOCK_STREAMS": self.directory, **environment},
                    backoff=Backoff(initial=0.2, maximum=30.0),
                    grace=self._grace,
                )
            )
            return self._loaded(self._ids)

    def unload(self, app: int) -> bool:
        """Stop an app within its grace period; False if no app has this id."""
        with self._lock:
            entry = self._apps.get(app)
            if entry is None:
                return False
            if not self._is_closed:  # otherwise all are told to end
                self._supervisor.end(entry.request.name)
        # It stays loaded until it has ended: its name and its streams are not free before.
        self._supervisor.wait([entry.request.name])
        with self._lock:
            return self._apps.pop(app, None) is not None

    def restart(self, app: int) -> None:
        """Restart an app.

        :raises NotFound: no app has this id.
        :raises Closed: the controller was closed.
        """
        with self._lock:
            self._check_open()
            self._supervisor.restart(self._entry(app).request.name)

    def find(self, name: str) -> LoadedApp | None:
        """Return the app with this name, or None."""
        return next((app for app in self.apps() if app.request.name == name), None)

    def apps(self) -> list[LoadedApp]:
        """Return the apps that are loaded, in the order of their loading."""
        with self._lock:
            return [self._loaded(app) for app in self._apps]

    def app(self, app: int) -> LoadedApp:
        """Return the app with this id.

        :raises NotFound: no app has this id.
        """
        with self._lock:
            self._entry(app)
            return self._loaded(app)

    def close(self) -> None:
        """Stop all apps, each within its grace period. Idempotent."""
        with self._lock:
            self._is_closed = True
        if not self._is_over:
            self._supervisor.close()
            self._is_over = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the controller was closed")

    def _entry(self, app: int) -> _Entry:
        try:
            return self._apps[app]
        except KeyError:
            raise NotFound(f"there is no app with the id {app}") from None

    def _loaded(self, app: int) -> LoadedApp:
        entry = self._apps[app]
        process = self._supervisor.statistics()[entry.request.name]
        return LoadedApp(app, entry.request, entry.loaded_ns, process)

    def _program(self, request: AppRequest) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the command of an app, and what is added to its environment."""
        path = request.path.absolute()  # a program's plain name would be looked for in $PATH
        if not path.is_file():
            raise InvalidOption("path", str(path), f"is not a file, for app {request.name}")
        if request.type == "python":
            task = AppTask(
                name=request.name,
                path=str(path),
                modules=tuple(map(str, request.modules)),
                directory=self.directory,
                deployment=request.deployment,
                params=request.params,
                devices=request.devices,
                queue_size=request.queue_size,
            )
            return task.command(), task.environment()
        if request.type != "c":
            raise InvalidOption("type", request.type, "should be python or c")
        if not os.access(path, os.X_OK):
            raise InvalidOption(
                "path",
                str(path),
                "is not a program",
                hint="an app of type c is a program that uses ring.h, not a shared library",
            )
        return (str(path),), _environment(request)


def _environment(request: AppRequest) -> dict[str, str]:
    """Return a program's environment variables: letters, digits and '_' only, upper case.

    :raises InvalidOption: two parameters have the same variable.
    """
    told = {
        "PENSTOCK_APP": request.name,
        "PENSTOCK_DEPLOYMENT": request.deployment,
        "PENSTOCK_DEVICES": json.dumps({str(key): each for key, each in request.devices.items()}),
    }
    for key, value in request.params.items():
        variable = variable_of(key)
        if variable in told:
            raise InvalidOption("params", key, f"another parameter is {variable} already")
        told[variable] = value
    return told
