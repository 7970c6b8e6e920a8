"""A server that the tests of a file share; each test has names of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocols.flight.server import FlightServer
from protocols.flight.serving import TOKEN, served


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[FlightServer]:
    with served(root) as server:
        yield server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A stream that no other test uses."""
    return f"tests/{request.node.name.partition('[')[0]}"


@pytest.fixture
def url(server: FlightServer, request: pytest.FixtureRequest) -> str:
    """The URL of that stream."""
    return f"{server.url}tests/{request.node.name.partition('[')[0]}"


@pytest.fixture
def local(root: Path, request: pytest.FixtureRequest) -> str:
    """Its path on the server's machine."""
    return f"{root}/tests/{request.node.name.partition('[')[0]}"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not here")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost",
            "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        ],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder / "cert.pem", folder / "key.pem"
