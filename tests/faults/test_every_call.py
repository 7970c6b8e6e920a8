"""Whichever call the operating system refuses: a clear error, right books, and no foreign file."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.fault_lives import SCENARIOS
from support.lives import Lives

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The small form tries so many calls of each scenario, spread over it; the full one every call.
_FEW = 6
#: A run that takes longer waits for something that does not come (seconds).
_LONGEST = 60


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    library = tmp_path_factory.mktemp("library") / "failing_calls.so"
    source = Path(__file__).with_name("failing_calls.c")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(source), "-ldl"], check=True)
    processes = Lives("support.fault_lives", str(library))
    yield processes
    processes.end()


def run(
    lives: Lives, scenario: str, at: int, *, on: bool = False, memory: bool = False
) -> dict[str, Any]:
    """Run a scenario with call `at` failing (`on`: and all behind it); return what came of it."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-"))  # what is in memory is not synced
    report = folder / "report"
    place = folder / "place"
    place.mkdir()
    try:
        life = lives.start(
            "run",
            scenario=scenario,
            folder=str(place),
            at=at,
            on=on,
            memory=memory,
            report=str(report),
        )
        outcome = life.ended(_LONGEST)
        if outcome is None:
            life.kill()
        assert outcome is not None, f"call {at} of {scenario!r} refused: it hangs"
        assert report.exists(), f"call {at} of {scenario!r} refused: {outcome}"
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found
    finally:
        shutil.rmtree(folder)


def check(found: dict[str, Any], what: str) -> None:
    assert "fault" not in found, f"{what}: {found['fault']}"
    assert found["foreign"] is None, f"{what}: {found['foreign']}"
    assert found["left_open"] == 0, f"{what}: {found['left_open']} descriptors were left open"


every_or_some = pytest.mark.parametrize(
    "every",
    [
        pytest.param(False, id="some"),
        pytest.param(True, id="every", marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)


@every_or_some
@pytest.mark.parametrize("on", [False, True], ids=["one call", "all from one on"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_refused_call_is_an_error_and_harms_nothing(
    lives: Lives, scenario: str, on: bool, every: bool
) -> None:
    refuse_calls(lives, scenario, on=on, every=every)


@every_or_some
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_memory_that_a_native_module_does_not_get_is_an_error_and_harms_nothing(
    lives: Lives, scenario: str, every: bool
) -> None:
    refuse_calls(lives, scenario, memory=True, every=every)


def refuse_calls(
    lives: Lives, scenario: str, *, on: bool = False, memory: bool = False, every: bool
) -> None:
    whole = run(lives, scenario, 0, on=on, memory=memory)
    check(whole, scenario)
    assert whole["errors"] == []
    step = 1 if every else max(1, whole["calls"] // _FEW)
    at = 1 + zlib.crc32(f"{scenario} {on}".encode()) % step
    # A thread in the background makes a few calls more, or less. So up to where none is refused.
    while (found := run(lives, scenario, at, on=on, memory=memory))["refused"]:
        check(found, f"{scenario}, call {at}{' and all behind it' if on else ''} refused")
        at += step
    check(found, scenario)
    assert at > whole["calls"] // 2


def test_the_canary_notices_a_file_that_is_used_after_it_was_closed(lives: Lives) -> None:
    """As a log's writer once did, when no descriptor was left for its next segment."""
    found = run(lives, "a stale descriptor", 0, on=False)
    assert "fdatasync of descriptor" in found["foreign"]
