"""The scripts in `tools` name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tests_that_run_under_sanitizers_exist() -> None:
    named = re.findall(r"tests/[\w/]+(?:\.py)?", (ROOT / "tools" / "sanitize").read_text())
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
