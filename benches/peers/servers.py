"""How is a server started for one comparison, and gone after it?"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from peers.contract import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["NATS", "REDIS", "missing_server", "nats_server", "redis_server", "server_version"]

REDIS, NATS = "redis-server", "nats-server"

#: A server that does not listen after so long (seconds) will not.
_STARTING = 10.0

# Names of settings are NATS's own. A reader may fall behind by what one run sends: the default
# would cut it off, which is how NATS sheds load.
_NATS_SETTINGS = """
listen: "127.0.0.1:{port}"
max_payload: 8MB
max_pending: 1GB
write_deadline: "30s"
jetstream {{ store_dir: "{directory}" }}
"""


def missing_server(program: str) -> str | None:
    """Say that a server is not there, or None if it is."""
    return None if _find(program) else f"not installed: {program}"


def _find(program: str) -> str | None:
    # Debian puts a server where only root's PATH looks.
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def server_version(program: str) -> str:
    """Name a server and its version."""
    command = [_find(program) or program, "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for word in said.split():
        number = word.removeprefix("v=").removeprefix("v")
        if number[:1].isdigit():
            return f"{program} {number}"
    return program


@contextmanager
def redis_server(directory: Path) -> Iterator[int]:
    """Run Redis with its log of writes, flushed every second, and yield the port."""
    port = free_port()
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": directory,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        # A rewrite of the log would run beside whoever is measured next.
        "auto-aof-rewrite-percentage": 0,
    }
    command = [REDIS]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    with _running(command, port, directory / "redis.log"):
        yield port


@contextmanager
def nats_server(directory: Path) -> Iterator[int]:
    """Run NATS with JetStream on files, and yield the port."""
    port = free_port()
    settings = directory / "nats.conf"
    settings.write_text(_NATS_SETTINGS.format(port=port, directory=directory), encoding="utf-8")
    with _running([NATS, "--config", str(settings)], port, directory / "nats.log"):
        yield port


@contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[None]:
    command[0] = _find(command[0]) or command[0]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_for(port, process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STARTING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _STARTING
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return
    raise SystemExit(f"{process.args!r} does not listen:\n{log.read_text(encoding='utf-8')}")
