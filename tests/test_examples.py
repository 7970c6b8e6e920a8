"""Every example runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
ARGUMENTS = {"live_queue": ["--seconds", "1"]}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example), *ARGUMENTS.get(example.stem, [])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
