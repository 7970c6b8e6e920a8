"""Thirty things that people do in a shell, as they would type them, and what they see.

They are in `daily_use.txt`. A line that begins with `$` is typed; what follows is what it prints,
on either output. `…` stands for anything. Each has a folder of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from cli.command import PENSTOCK

TASKS = (Path(__file__).parent / "daily_use.txt").read_text(encoding="utf-8")


def tasks() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the name of each task, and what is typed and printed."""
    found = []
    for part in re.split(r"^# ", TASKS, flags=re.MULTILINE)[1:]:
        name, _, text = part.partition("\n")
        steps = []
        for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, printed = step.partition("\n")
            steps.append((line, printed))
        found.append((name, steps))
    return found


def test_there_are_thirty() -> None:
    assert len(tasks()) >= 30


@pytest.mark.parametrize(("name", "steps"), tasks(), ids=[name for name, _ in tasks()])
def test_a_task(tmp_path: Path, name: str, steps: list[tuple[str, str]]) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(PENSTOCK).parent}:{os.environ['PATH']}",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }
    for line, printed in steps:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=100,
            check=False,
        )
        said = done.stdout.decode().rstrip("\n")
        expected = ".*".join(re.escape(text) for text in printed.rstrip("\n").split("…"))
        assert re.fullmatch(expected, said, re.DOTALL), f"{name}\n$ {line}\n{said}"
