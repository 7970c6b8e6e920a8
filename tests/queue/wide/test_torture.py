"""One process writes all it can, another checks every byte: nothing torn, every loss counted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.lives import Lives, Report
from support.wide_opening import wide_writer
from support.wide_torture import MODES

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def torturers() -> Iterator[Lives]:
    processes = Lives("support.wide_torture")
    yield processes
    processes.end()


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in /dev/shm."""
    directory = Path("/dev/shm") / f"penstock-test-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("storage", "options", "seconds"),
    [
        ("file", "", 1.5),
        ("memory", "&crc=true", 1.5),
        pytest.param("file", "", 60, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
        pytest.param("memory", "", 60, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
        pytest.param("memory", "&crc=true", 30, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
    ],
)
def test_payloads_of_all_sizes_come_whole_or_are_counted_as_lost(
    storage: str,
    options: str,
    seconds: float,
    torturers: Lives,
    tmp_path: Path,
    memory_path: Path,
) -> None:
    url = f"fmq:{(tmp_path if storage == 'file' else memory_path) / 'queue'}"
    slots = 64 if seconds < 10 else 1024
    wide_writer(f"{url}?slots={slots}&size=32M{options}").close()
    written, seen = Report(tmp_path / "writer"), Report(tmp_path / "reader")
    behind = slots + 2  # so that the reader is overtaken, also where a second has few messages
    reader = torturers.start("read", url=url, report=seen.path, seed=1, behind=behind)
    seen.wait_for(b"r")
    writer = torturers.start(
        "write", url=url, report=written.path, seed=2, seconds=seconds, least=2 * behind
    )
    assert writer.end(seconds + 60) == (False, 0)
    assert reader.end() == (False, 0)
    [(_, count, messages)] = written.records(b"e")
    [(_, delivered, lost)] = seen.records(b"e")
    assert count == messages
    assert delivered + lost == count
    assert lost > 0, "the writer never overtook the reader"
    by_mode = {MODES[mode]: number for mode, number, _ in seen.records(b"m")}
    assert all(by_mode[mode] > 0 for mode in MODES), by_mode
