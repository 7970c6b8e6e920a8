"""LROSE's own programs, where `PENSTOCK_LROSE_BIN` says that they are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.errors import ConnectionLost
from penstock.protocols.lrose.ds_client import ping
from support.mosquitto import free_port
from support.until import until

__all__ = ["dsfmq_server", "needs_lrose", "program"]

FOLDER = os.environ.get("PENSTOCK_LROSE_BIN")

needs_lrose = pytest.mark.skipif(FOLDER is None, reason="PENSTOCK_LROSE_BIN names no folder")


def program(name: str) -> str:
    assert FOLDER is not None
    return str(Path(FOLDER) / name)


@contextlib.contextmanager
def dsfmq_server(root: Path) -> Iterator[str]:
    """Run LROSE's server of queues; what its URLs begin with."""
    port = free_port()
    environment = {**os.environ, "DATA_DIR": str(root), "RAP_DATA_DIR": str(root)}
    with (root / "DsFmqServer.log").open("w") as log:
        process = subprocess.Popen(
            [program("DsFmqServer"), "-port", str(port)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,  # it forks for each client
        )

    def answers() -> bool:
        try:
            ping("127.0.0.1", port, 1)
        except ConnectionLost:
            return False
        return True

    try:
        until(answers)
        yield f"fmqp://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
