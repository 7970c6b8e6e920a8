"""How is a web application served in the background, until it is closed?"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from penstock.core.errors import StorageError, Unsupported
from penstock.core.interfaces import Closable
from penstock.core.worker import Worker
from penstock.protocols.server import listen_tcp

if TYPE_CHECKING:
    import logging

__all__ = ["WebServer"]

#: Seconds for a server to start, and for requests to end when it stops.
_STARTING: Final = 10.0
_GRACE: Final = 3.0


class WebServer(Closable):
    """Serves an ASGI application, from construction until `close`."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        name: str,
        log: logging.Logger,
        extra: str,
        max_requests: int = 64,
    ) -> None:
        """Listen; port 0 picks a free one.

        :param extra: the package extra that it needs, as in `penstock[jrtc]`
        :raises StorageError: the address is in use or not available, or the server does not start.
        :raises Unsupported: uvicorn is not installed.
        """
        try:
            import uvicorn  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise Unsupported(
                f"{name} needs uvicorn", hint=f"pip install 'penstock[{extra}]'"
            ) from error
        self._sockets = listen_tcp(host, port)
        self.host = host
        self.port: int = self._sockets[0].getsockname()[1]
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            limit_concurrency=max_requests,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=int(_GRACE),
        )
        self._server = uvicorn.Server(config)
        self._has_ended = threading.Event()
        self._worker = Worker(name, self._run, log=log, rouse=self._rouse)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        where = f"{self.host}:{self.port}"
        try:
            self._worker.start()
        except RuntimeError as error:  # no thread left
            raise StorageError("listening on", where, OSError(str(error))) from error
        deadline = time.monotonic() + _STARTING
        while not self._server.started:
            if self._has_ended.wait(0.005):
                self._worker.join()
                cause = OSError(f"it did not begin: {self._worker.error}")
                raise StorageError("listening on", where, cause)
            if time.monotonic() >= deadline:
                cause = OSError(f"it did not begin within {_STARTING:g} s")
                raise StorageError("listening on", where, cause)

    def _run(self, _: Worker) -> None:
        try:
            self._server.run(sockets=self._sockets)
        except SystemExit as error:
            raise RuntimeError(f"uvicorn exits with status {error.code}") from error
        finally:
            self._has_ended.set()

    def _rouse(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        """Finish the current requests, and stop. Idempotent."""
        self._worker.stop(_STARTING + _GRACE)
        for each in self._sockets:
            each.close()
