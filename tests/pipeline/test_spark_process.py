"""Processes that Spark starts for Python end without a word when Java hangs up."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}".encode()
SECRET = "a-word-between-us"


def text(said: bytes) -> bytes:
    return struct.pack(">i", len(said)) + said


def number(said: int) -> bytes:
    return struct.pack(">i", said)


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


@pytest.mark.parametrize(
    ("module", "at_once"),
    [
        ("pyspark.daemon", False),  # when it has loaded us
        ("pyspark_penstock.daemon", False),
        ("pyspark_penstock.daemon", True),
    ],
)
def test_one_that_only_looked_for_data_sources_says_nothing_when_java_has_left(
    module: str, at_once: bool
) -> None:
    """As Java does: it takes what it needs, and closes the connection, soon or sooner."""
    daemon = subprocess.Popen(
        [sys.executable, "-m", module, "pyspark.sql.worker.lookup_data_sources"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHON_WORKER_FACTORY_SECRET": SECRET,
            "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "true",
        },
    )
    assert daemon.stdout is not None
    port = struct.unpack(">i", daemon.stdout.read(4))[0]
    with socket.create_connection(("127.0.0.1", port)) as java:
        java.recv(4)  # its process
        java.sendall(text(SECRET.encode()) + text(VERSION))
        java.recv(6)
        # No folder, no files, no broadcasts, no settings.
        java.sendall(text(b"/nowhere") + number(0) + b"\0" + number(0) + number(0))
        if at_once:  # what was sent may not be read any more
            java.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until = time.monotonic() + 60
    while children(daemon.pid):
        assert time.monotonic() < until
        time.sleep(0.01)
    _, errors = daemon.communicate(timeout=20)  # it ends when nobody has anything to say to it
    assert b"Traceback" not in errors
    assert b"Error" not in errors
