"""The prototype's own programs, where `PENSTOCK_STREAMPY` says that they are, and ours."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import describe, open_reader, open_writer
from protocols.lhhttt.queues import HOST, Asker, served
from support.until import until

FOLDER = os.environ.get("PENSTOCK_STREAMPY")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="PENSTOCK_STREAMPY names no folder")


@contextlib.contextmanager
def _running(folder: Path, name: str, *arguments: str) -> Iterator[None]:
    assert FOLDER is not None
    command = [str(Path(FOLDER) / name), *arguments]
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder)
    try:
        yield
        assert process.poll() is None, (folder / f"{name}.out").read_text()
    finally:
        process.kill()
        process.wait()


def _ask(port: int, text: str) -> str:
    """Ask by the prototype's client, and return what it prints up to its end.

    An answer that comes while it still connects stops its loop before that runs, which then
    never ends.
    """
    assert FOLDER is not None
    command = [str(Path(FOLDER) / "client"), f"{HOST}:{port}", text]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        timer = threading.Timer(20, process.kill)
        timer.start()
        while "Socket closed." not in said and (line := process.stdout.readline()):
            said += line
        timer.cancel()
        process.kill()
    assert "Socket closed." in said
    return said


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _is_up(port: int) -> bool:
    with Asker(port) as asker:
        try:
            asker.send(b"SIZE")
            return not asker.is_silent(0.2) and asker.answer().isdigit()
        except ConnectionError:
            return False


def test_its_client_speaks_with_our_queue() -> None:
    with served() as server:
        assert "'PUT 5 bytes'" in _ask(server.port, "PUT:z\u00e4h:1")
        assert "'1'" in _ask(server.port, "SIZE")
        assert "'z\u00e4h:1'" in _ask(server.port, "GET")


def test_its_worker_works_between_two_of_our_queues(tmp_path: Path) -> None:
    with served() as inputs, served() as outputs:
        with open_writer(f"lhhttt://{inputs.address}") as writer:
            writer.write_many([b"%d" % number for number in range(1, 101)])
        with (
            _running(
                tmp_path, "worker", "--input-address", inputs.address,
                "--output-address", outputs.address, "--output-type", "queue",
                "--function", "double",
            ),
            open_reader(f"lhhttt://{outputs.address}") as reader,
        ):  # fmt: skip
            got: list[bytes] = []

            def is_done() -> bool:
                got.extend(message.payload for message in reader.read_many(100))
                return len(got) == 100

            until(is_done)
        assert got == [b"%d" % (2 * number) for number in range(1, 101)]


def test_our_client_speaks_with_its_queue(tmp_path: Path) -> None:
    port = _free_port()
    with _running(tmp_path, "mq", str(port)):
        until(lambda: _is_up(port))
        url = f"lhhttt://{HOST}:{port}"
        payloads = ["z\u00e4h:1".encode(), b"2", b"3"]
        with open_writer(url) as writer:
            writer.write_many(payloads)
        assert describe(url).count == 3
        with open_reader(url) as reader:
            assert [message.payload for message in reader.available()] == payloads
