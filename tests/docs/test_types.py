"""Every block of Python in the documentation passes mypy --strict and pyright."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from docs.blocks import PAGES, ROOT, python_blocks

#: Names that a page speaks of and does not make: a session, somebody's own function.
GIVEN = {
    "spark": "from pyspark.sql import SparkSession\nspark = SparkSession.builder.getOrCreate()",
    "work": "from penstock import Message\ndef work(message: Message) -> None: ...",
    "commands": "from penstock import StreamId\ncommands = StreamId.parse('00' * 16)",
    "payload": (
        "from penstock import StreamId\nfrom penstock.core.batch import batch_from_messages\n"
        "stream = other = StreamId.parse('00' * 16)\npayload = b''\nbatch = batch_from_messages([])"
    ),
}
NEEDED = {
    "decoding": ["spark"],
    "groups": ["work"],
    "jrtc": ["spark", "commands", "payload"],
    "latest-data": ["spark"],
    "lhhttt": ["work"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write each page as one module: what an earlier block imports, later ones use."""
    folder = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        blocks = python_blocks(page)
        if blocks:
            given = [GIVEN[name] for name in NEEDED.get(page, [])]
            text = "\n".join([*given, *(block.lstrip("\n") for block in blocks)])
            (folder / f"{page.replace('-', '_')}.py").write_text(text)
    return folder


def test_they_pass_mypy(folder: Path) -> None:
    # By our own settings, which are strict: so what `make lint` found of our modules is known.
    command = [sys.executable, "-m", "mypy", "--strict", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_they_pass_pyright(folder: Path) -> None:
    # basedpyright is pyright as a package of Python's; `standard` are pyright's own checks.
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    interpreter = ["--pythonpath", sys.executable]
    command = [sys.executable, "-m", "basedpyright", *interpreter, "--project", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
