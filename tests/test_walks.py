"""How many files does somebody open who follows one message?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WALK = Path(__file__).parents[1] / "tools" / "walk"


def test_a_put_into_a_ring_runs_functions_of_twelve_files_at_most() -> None:
    done = subprocess.run(
        [sys.executable, WALK, "put"], capture_output=True, text=True, check=True, timeout=120
    )
    first, *files = done.stdout.splitlines()
    assert first == f"put: {len(files)} files"
    assert any("penstock/queue/wide/writer.py" in line for line in files)
    assert len(files) <= 12, done.stdout
