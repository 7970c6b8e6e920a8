"""How does a test get an MQTT broker of its own?"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Mosquitto", "free_port", "mosquitto"]

_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
_SOON = 15.0


def free_port() -> int:
    """Return a port of the loopback that nobody listens at just now.

    It is below those that the system gives to connections, so that none takes it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Mosquitto:
    """A broker that can be ended, killed, frozen and started again at the same port."""

    def __init__(self, directory: Path, lines: Sequence[str] = (), *, is_open: bool = True) -> None:
        command = shutil.which("mosquitto", path=_PATH)
        if command is None:
            pytest.skip("mosquitto is not installed: run tools/system-packages")
        self.port = free_port()
        # As root it becomes another user, who has to find its files.
        directory.chmod(0o755)
        self._config = directory / "mosquitto.conf"
        self._config.write_text(
            "\n".join(
                [
                    "log_dest none",
                    "user root",
                    "set_tcp_nodelay true",
                    "max_queued_messages 0",
                    "max_inflight_messages 1000",
                    *(["allow_anonymous true"] if is_open else []),
                    f"listener {self.port} 127.0.0.1",
                    *lines,
                    "",
                ]
            )
        )
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return when it takes connections."""
        self._process = subprocess.Popen(
            [self._command, "-c", str(self._config)], stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _SOON
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert self._process.poll() is None, "mosquitto ended"
                assert time.monotonic() < deadline, "mosquitto does not listen"
                time.sleep(0.02)
            else:
                return

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End it so that it writes down what it keeps."""
        self._signal(signal.SIGTERM)
        self._wait()

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def _wait(self) -> None:
        if self._process is not None:
            self._process.wait(_SOON)


@contextlib.contextmanager
def mosquitto(
    directory: Path, lines: Sequence[str] = (), *, is_open: bool = True
) -> Iterator[Mosquitto]:
    """Run a broker with these further lines in its configuration."""
    broker = Mosquitto(directory, lines, is_open=is_open)
    try:
        yield broker
    finally:
        broker.kill()
