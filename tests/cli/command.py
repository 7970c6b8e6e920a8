"""Running the command as scripts do, and filling a queue for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from penstock import open_writer

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


def run(
    *arguments: str, stdin: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [PENSTOCK, *arguments],
        input=stdin,
        capture_output=True,
        timeout=30,
        check=False,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **environment},
    )


def json_lines(output: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def fill(url: str, count: int) -> None:
    with open_writer(url) as writer:
        writer.write_many([b"message %d" % i for i in range(count)], type=1)
