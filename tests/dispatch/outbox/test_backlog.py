"""What does it cost when a receiver is down for very many messages?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
#: Bytes of memory that an outbox may need, whatever is in it.
MEMORY = 60 << 20


def test_a_backlog_is_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    _check(tmp_path, 60_000)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_backlog_of_a_million_messages_is_on_the_disk_and_not_in_memory(tmp_path: Path) -> None:
    _check(tmp_path, 1_000_000)


def _check(folder: Path, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "support.outbox_backlog", folder / "outbox", str(count)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        check=True,
        capture_output=True,
        timeout=600,
    )
    found = json.loads(done.stdout)
    assert found["growth"] < MEMORY
    assert found["disk_full"] > count * 1024
    assert found["disk_empty"] < 40 << 20
    # The one that was not in memory expired when it was due, and not before.
    assert found["next_expiry_ms"] == 1000
    assert (found["too_early"], found["expired"]) == (0, 1)
    assert found["expired_arrival"] == count // 2 + 1
    assert (found["stored"], found["acked"], found["queued"]) == (count, count - 1, 0)
    assert found["taken"] == count - 1
