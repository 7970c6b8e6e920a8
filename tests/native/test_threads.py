"""The ring in C, with writers and readers at the same time, is clean for ThreadSanitizer.

`make sanitize` runs this for longer, and sets PENSTOCK_SANITIZE_THREADS: then a machine without
ThreadSanitizer is a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "include"
#: What a run that found a race ends with.
RACE = 66
SECONDS = pytest.mark.parametrize("seconds", [0.4, pytest.param(20.0, marks=pytest.mark.full)])

# The address sanitizer, if these tests run under it, and this one exclude each other.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def compile_to(program: Path, *flags: str) -> Path:
    subprocess.run(
        [
            "gcc",
            "-std=c11",
            "-g",
            "-pthread",
            *("-Wall", "-Wextra", "-Werror"),
            *flags,
            f"-I{INCLUDE}",
            str(HERE / "ring_threads.c"),
            "-o",
            str(program),
        ],
        check=True,
        env=ENVIRONMENT,
    )
    return program


def sanitized(program: Path, *flags: str) -> Path:
    # Not inlined, so that a suppression names one function. It does not know fences and says so;
    # what they order is atomic here.
    return compile_to(program, "-O1", "-fno-inline", "-Wno-tsan", "-fsanitize=thread", *flags)


def run(program: Path, mode: str, seconds: float) -> subprocess.CompletedProcess[str]:
    command = [str(program), mode, str(seconds)]
    # Its shadow memory does not fit every random layout of addresses.
    setarch = shutil.which("setarch")
    if setarch and subprocess.run([setarch, "-R", "true"], check=False).returncode == 0:
        command = [setarch, "-R", *command]
    options = "halt_on_error=1"
    if mode == "lap":
        options += f" suppressions={HERE / 'lapping.supp'}"
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        env={**ENVIRONMENT, "TSAN_OPTIONS": options},
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for programs, on a machine that has the thread sanitizer."""
    path = tmp_path_factory.mktemp("native")
    source = path / "empty.c"
    source.write_text("int main(void) { return 0; }\n", encoding="ascii")
    built = subprocess.run(
        ["gcc", "-fsanitize=thread", str(source), "-o", str(path / "empty")],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    if built.returncode != 0:
        reason = f"gcc has no thread sanitizer here (Debian: libtsan2): {built.stderr.strip()}"
        if os.environ.get("PENSTOCK_SANITIZE_THREADS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="module")
def program(directory: Path) -> Path:
    return sanitized(directory / "ring_threads")


@pytest.fixture(scope="module")
def reversed_program(directory: Path) -> Path:
    return sanitized(directory / "ring_threads_reversed", "-DREVERSED")


@pytest.fixture(scope="module")
def quick_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As others compile the header, without a sanitizer."""
    return compile_to(tmp_path_factory.mktemp("native") / "ring_threads", "-O3")


@SECONDS
@pytest.mark.parametrize("mode", ["hold", "many"])
def test_with_readers_that_are_waited_for_nothing_races_at_all(
    program: Path, mode: str, seconds: float
) -> None:
    done = run(program, mode, seconds)
    assert done.returncode == 0, done.stderr
    assert " 0 lost " in done.stdout


@SECONDS
def test_with_readers_that_are_overtaken_nothing_but_the_copy_of_the_payload_races(
    program: Path, seconds: float
) -> None:
    done = run(program, "lap", seconds)
    assert done.returncode == 0, done.stderr
    assert " 0 lost " not in done.stdout, "nobody was overtaken"


@pytest.mark.parametrize("mode", ["hold", "lap"])
def test_publishing_before_the_bytes_are_there_is_found_out(
    reversed_program: Path, mode: str
) -> None:
    done = run(reversed_program, mode, 10)
    assert done.returncode in (1, RACE)
    assert "bad checksum" in done.stderr or "data race" in done.stderr


@SECONDS
@pytest.mark.parametrize("mode", ["hold", "lap", "many"])
def test_at_full_speed_every_message_is_whole_and_accounted_for(
    quick_program: Path, mode: str, seconds: float
) -> None:
    done = run(quick_program, mode, seconds)
    assert done.returncode == 0, done.stderr
