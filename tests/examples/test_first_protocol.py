"""The endpoint of "Your first protocol": the page shows the file, and the file works."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import reduce
from operator import xor
from pathlib import Path

import pytest

from cli.command import PENSTOCK, count
from penstock import open_reader
from penstock.core import endpoints
from penstock.core.errors import ConnectionLost
from support.until import until
from support.waiting import background

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "first_protocol"
SENTENCES = [b"GPGLL,4003.%02d,N,10514.00,W,120000,A" % i for i in range(50)]


def sentence(text: bytes) -> bytes:
    return b"$%s*%02X" % (text, reduce(xor, text))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Have it installed as pip would: the module on the path, and its entry point."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"site/penstock_nmea-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock-nmea\nVersion: 1.0\n")
    names = project["entry-points"]["penstock.endpoints"]
    lines = "".join(f"{scheme} = {where}\n" for scheme, where in names.items())
    (info / "entry_points.txt").write_text(f"[penstock.endpoints]\n{lines}")
    for folder in (info.parent, PACKAGE):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{info.parent}{os.pathsep}{PACKAGE}")
    endpoints._load.cache_clear()
    yield
    endpoints._load.cache_clear()
    sys.modules.pop("penstock_nmea", None)


@contextlib.contextmanager
def receiver(sent: bytes) -> Iterator[str]:
    """Be a GPS receiver that sends something to one client, and leaves."""

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            for i in range(0, len(sent), 100):
                client.sendall(sent[i : i + 100])

    with socket.create_server(("127.0.0.1", 0)) as listener, background(serve):
        yield f"nmea://127.0.0.1:{listener.getsockname()[1]}"


def test_the_page_shows_the_file() -> None:
    page = (ROOT / "docs" / "first-protocol.md").read_text()
    code = (PACKAGE / "penstock_nmea.py").read_text()
    assert f"```python\n{code}```" in page
    assert len([line for line in code.splitlines() if line.strip()]) <= 80


def test_every_sentence_comes_and_damaged_ones_count_as_lost() -> None:
    good = [sentence(text) for text in SENTENCES]
    bad = good[7].replace(b"N", b"S")
    sent = b"\r\n".join([*good[:20], bad, *good[20:], good[0][:30]])
    with receiver(sent) as url, open_reader(url) as reader:
        got = []
        with contextlib.suppress(ConnectionLost):
            while message := reader.read(5.0):
                got.append(message.payload)
        assert got == good
        books = reader.statistics()
        assert (books.messages, books.lost) == (50, 2)
        assert [(loss.first, loss.last) for loss in books.losses] == [(20, 20), (51, 51)]


def test_cp_records_it(tmp_path: Path) -> None:
    sent = b"".join(sentence(text) + b"\r\n" for text in SENTENCES)
    target = f"log:{tmp_path}/gps"
    with (
        receiver(sent) as url,
        subprocess.Popen([PENSTOCK, "cp", url, target, "--follow"], stdout=subprocess.PIPE) as copy,
    ):
        until(lambda: count(target) == 50)
        copy.send_signal(signal.SIGTERM)
        said, _ = copy.communicate(timeout=20)
    assert said.startswith(b"50 messages copied")
