"""A queue whose file is cut off while it is mapped is an error, and not the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.core.errors import DamagedQueue
from support.wide_opening import wide_reader, wide_writer

PROGRAM = """
    import sys, threading, time
    import penstock
    from penstock.queue import wait_any

    url, what = sys.argv[1], sys.argv[2]
    if what.startswith("write"):
        end = penstock.open_writer(url)
        end.write(b"x" * 100)
    else:
        end = penstock.open_reader(url, start="start")
    ways = {
        "write": lambda: end.write(b"x" * 100),
        "write_many": lambda: end.write_many([b"x" * 100] * 100),
        "read": lambda: end.read(timeout=20),
        "read_many": lambda: end.read_many(3, timeout=20),
        "read_batch": lambda: end.read_batch(3, timeout=20),
        "skip": lambda: end.read_many(3, timeout=20),
        "view": lambda: end.view(timeout=20).__enter__(),
        "waiting": lambda: (end.seek("end"), end.read(timeout=20)),
        "waiting for any": lambda: (end.seek("end"), wait_any([end], 2), end.read(timeout=5)),
        "bounds": lambda: (end.bounds(), end.read(timeout=5)),
    }
    print("ready", flush=True)
    if not what.startswith("wait"):
        sys.stdin.readline()
    try:
        for _ in range(1000):
            ways[what]()
        print("nothing")
    except penstock.PenstockError as error:
        print(type(error).__name__, error)
    try:
        end.close()
    except penstock.PenstockError as error:
        print("close", type(error).__name__)
    with penstock.open_writer(url.partition("?")[0] + "-other") as other:  # the process goes on
        other.write(b"fine")
    print("end")
"""


@pytest.mark.parametrize(
    ("what", "size"),
    [("write", 0), ("write_many", 8192), ("read", 0), ("read_many", 8192), ("read_batch", 8192),
     ("skip", 8192), ("view", 0), ("waiting", 0), ("waiting for any", 0), ("bounds", 0)],
)  # fmt: skip
def test_a_file_that_is_cut_off_is_an_error(queue_path: str, what: str, size: int) -> None:
    options = "readers=1" + ("&damaged=skip" if what == "skip" else "")
    with wide_writer(f"fmq:{queue_path}?slots=64&size=65536&readers=1") as writer:
        writer.write_many([b"x" * 100] * 64)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), f"fmq:{queue_path}?{options}", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.truncate(f"{queue_path}.fmq", size)
    out, err = process.communicate("go\n", timeout=60)
    assert process.returncode == 0, (process.returncode, out, err[-2000:])
    said = out.splitlines()
    assert said[0].startswith("DamagedQueue"), out + err
    assert f"found {size}" in said[0]
    assert said[-1] == "end"


def test_a_signal_that_is_not_ours_ends_the_process_as_ever(tmp_path: Path) -> None:
    program = """
        import mmap, os, sys
        import penstock
        penstock.open_writer(f"fmq:{sys.argv[1]}/queue").write(b"one")
        with open(f"{sys.argv[1]}/other", "w+b") as file:
            file.truncate(8192)
            memory = mmap.mmap(file.fileno(), 8192)
            file.truncate(0)
            memory[5000]
    """
    # Under a sanitizer it would be the sanitizer's.
    sanitizer = ":".join([os.environ.get("ASAN_OPTIONS", ""), "handle_sigbus=0"])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path],
        check=False,
        timeout=60,
        env={**os.environ, "ASAN_OPTIONS": sanitizer},
    )
    assert done.returncode == -7


def test_a_reader_of_a_file_that_was_cut_off_says_so_again_and_can_be_closed(
    queue_path: str,
) -> None:
    with wide_writer(f"fmq:{queue_path}") as writer:
        writer.write_many([b"one", b"two"])
    with wide_reader(f"fmq:{queue_path}") as reader:
        os.truncate(f"{queue_path}.fmq", 0)
        for _ in range(3):
            with pytest.raises(DamagedQueue, match="the file at byte 0"):
                reader.read(timeout=0)
