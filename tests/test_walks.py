"""How many files does somebody open who follows one message?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WALK = Path(__file__).parents[1] / "tools" / "walk"


def walk(name: str) -> list[str]:
    """Return the files that one message passes."""
    done = subprocess.run(
        [sys.executable, WALK, name], capture_output=True, text=True, check=True, timeout=280
    )
    first, *lines = done.stdout.splitlines()
    assert first == f"{name}: {len(lines)} files"
    return [line.split()[1] for line in lines]


def test_a_put_into_a_ring_runs_functions_of_twelve_files_at_most() -> None:
    files = walk("put")
    assert "penstock/queue/wide/writer.py" in files
    assert len(files) <= 12, files


@pytest.mark.timeout(300)  # Spark starts slowly beside other tests
def test_a_spark_batch_runs_functions_of_twenty_files_at_most() -> None:
    files = walk("spark")
    chapters = ["source/stream.py", "source/ranges.py", "sink/stream_sink.py", "append_once.py"]
    found = [name for file in files for name in chapters if file.endswith(f"/{name}")]
    assert sorted(found) == sorted(chapters)
    assert len(files) <= 20, files


def test_a_message_from_mqtt_to_zenoh_runs_functions_of_twenty_files_at_most() -> None:
    pytest.importorskip("zenoh")
    if shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None:
        pytest.skip("mosquitto is not installed: run tools/system-packages")
    files = walk("uprotocol")
    chapters = ["transports/mqtt.py", "intake.py", "plan.py", "outbox.py", "delivery.py"]
    found = [name for file in files for name in chapters if file.endswith(f"/{name}")]
    assert sorted(found) == sorted(chapters)
    assert len(files) <= 20, files
