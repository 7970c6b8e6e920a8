"""Several processes that write the latest_data_info of one directory, and some that are killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from penstock.protocols.lrose.ldata_format import decode_ascii, decode_xml
from penstock.registry.latest import LatestDataInfo

WRITER = """
import sys
from penstock.registry.latest import LatestDataInfo
directory, name, count = sys.argv[1:]
with LatestDataInfo(directory, register=None) as latest:
    for number in range(int(count)):
        latest.write(f"{name}/{number}.nc", writer=name)
"""


def start_writer(directory: Path, name: str, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(directory), name, str(count)])


def entries_of(names: list[str], writer: str) -> list[int]:
    own = [name.partition("/")[2] for name in names if name.startswith(f"{writer}/")]
    return [int(name.removesuffix(".nc")) for name in own]


def test_no_entry_of_two_writers_is_missed_and_files_are_always_whole(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, name, 150) for name in ("one", "two")]
    names: list[str] = []
    with LatestDataInfo(tmp_path, register=None) as latest:
        assert latest.read() is None
        while len(names) < 300:
            info = latest.wait(timeout=30)
            assert info is not None, len(names)
            names.append(info.rel_data_path)
            decode_xml((tmp_path / "_latest_data_info.xml").read_bytes())
            decode_ascii((tmp_path / "_latest_data_info").read_bytes())
        assert latest.statistics() == (300, 0, 0, 0, 0)
    for writer in writers:
        assert writer.wait(20) == 0
    for name in ("one", "two"):
        assert entries_of(names, name) == list(range(150))
    assert not list(tmp_path.glob("*.tmp.*"))


def test_a_writer_that_is_killed_leaves_everything_usable(tmp_path: Path) -> None:
    chance = random.Random(5)
    with LatestDataInfo(tmp_path, register=None) as latest:
        latest.write("first.nc")
        assert latest.read() is not None
        for life in range(2):
            writer = start_writer(tmp_path, f"w{life}", 100_000)
            assert latest.wait(timeout=30) is not None
            time.sleep(chance.random() * 0.2)
            writer.send_signal(signal.SIGKILL)
            writer.wait(20)
            names = []
            while (info := latest.read()) is not None:
                names.append(info.rel_data_path)
            own = entries_of(names, f"w{life}")
            assert own == list(range(1, len(own) + 1))
            decode_xml((tmp_path / "_latest_data_info.xml").read_bytes())
            latest.write("again.nc")
            info = latest.read()
            assert info is not None
            assert info.rel_data_path == "again.nc"
        assert latest.statistics().lost == 0
