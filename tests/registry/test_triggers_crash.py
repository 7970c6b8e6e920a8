"""Triggers killed at any moment: each file is handled at least once, in order, none missed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.registry.latest import LatestDataInfo
from penstock.registry.latest_files import LatestSettings

TESTS = str(Path(__file__).parents[1])


def start_worker(directory: Path, record: Path, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "support.trigger_worker", str(directory), str(record), str(seed)],
        env={**os.environ, "PYTHONPATH": TESTS},
        stdout=subprocess.PIPE,
        text=True,
    )


def write_in_bursts(directory: Path, files: int, slots: int, seed: int, longest: float) -> None:
    rng = random.Random(seed)
    with LatestDataInfo(
        directory, settings=LatestSettings(fmq_slots=slots), register=None
    ) as latest:
        number = 0
        while number < files:
            for _ in range(min(rng.choice((1, 3, 40, 200)), files - number)):
                (directory / f"{number}.nc").touch()
                latest.write(f"{number}.nc", time=1705320000 + number)
                number += 1
            time.sleep(rng.random() * longest)


def handled(record: Path) -> list[int]:
    text = record.read_text() if record.exists() else ""
    return [int(line) for line in text.splitlines()]


def survive(tmp_path: Path, files: int, kills: int, slots: int, longest: float) -> list[int]:
    directory, record = tmp_path / "data", tmp_path / "record"
    directory.mkdir()
    rng = random.Random(files)
    writer = threading.Thread(
        target=write_in_bursts, args=(directory, files, slots, files, longest)
    )
    writer.start()
    worker = start_worker(directory, record, 0)
    try:
        for life in range(kills):
            if rng.random() < 0.8:
                assert worker.stdout is not None
                worker.stdout.readline()  # else it is killed while it starts
            time.sleep(rng.random() * 0.3)
            worker.send_signal(signal.SIGKILL)
            worker.communicate(timeout=20)
            worker = start_worker(directory, record, life + 1)
        writer.join(300)
        deadline = time.monotonic() + 300
        while not handled(record) or handled(record)[-1] < files - 1:
            assert time.monotonic() < deadline, handled(record)[-3:]
            assert worker.poll() is None
            time.sleep(0.1)
    finally:
        worker.kill()
        worker.communicate(timeout=20)
        writer.join()
    return handled(record)


def check(numbers: list[int], files: int) -> None:
    assert sorted(set(numbers)) == list(range(files))
    # The one that was under way comes again; nothing else, and nothing is passed over.
    assert numbers[0] == 0
    assert {b - a for a, b in itertools.pairwise(numbers)} <= {0, 1}


def test_500_files_are_handled_in_order_though_the_worker_is_killed(tmp_path: Path) -> None:
    numbers = survive(tmp_path, files=500, kills=5, slots=2500, longest=0.2)
    check(numbers, 500)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_10_000_files_are_handled_in_order_though_the_worker_is_killed(tmp_path: Path) -> None:
    numbers = survive(tmp_path, files=10_000, kills=40, slots=16_000, longest=0.4)
    check(numbers, 10_000)
