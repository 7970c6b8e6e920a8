"""Are the figures of a comparison judged and written down right?"""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.lineup import ICEORYX, ICEORYX_EVENT, ICEORYX_IN_PLACE, RING
from peers.queues import Form
from peers.report import BEGIN, END, grids, markdown, write_docs
from peers.results import LATENCY, Results
from peers.targets import Target, targets
from peers.wording import rate, times

MEMORY = "/dev/shm"
WHERE = dict.fromkeys(
    ["processor", "cores", "kernel", "python", "date", "file system", "rounds", "versions"], "?"
)


@pytest.fixture
def results() -> Results:
    found = Results()
    found.figure("64 B", RING[Form.SINGLE], MEMORY).values += [2.0e6, 9.0e6, 2.4e6]
    found.figure("64 B", ICEORYX, MEMORY).values += [0.3e6, 0.1e6, 0.2e6]
    found.figure("64 B", "pyzmq", "ipc").values += [0.9e6]
    return found


def the(what: str, against: str, found: Results) -> Target:
    (target,) = [
        each
        for each in targets(found)
        if each.what.startswith(what) and each.against.startswith(against)
    ]
    return target


def test_medians_are_compared(results: Results) -> None:
    target = the(f"{RING[Form.SINGLE]}, 64 B", ICEORYX, results)

    assert target.ratio == pytest.approx(12)
    assert target.verdict == "reached"
    assert target.figures == "2.40 M / 200 k"


def test_a_target_that_is_missed_says_so(results: Results) -> None:
    assert the(f"{RING[Form.SINGLE]}, 64 B", "pyzmq", results).verdict == "not reached"


def test_a_target_without_figures_is_not_measured(results: Results) -> None:
    assert the(f"{RING[Form.SINGLE]}, 1 KiB", ICEORYX, results).verdict == "not measured"


def test_in_place_is_held_against_the_better_row_of_the_peer(results: Results) -> None:
    results.figure("1 MiB", RING[Form.IN_PLACE], MEMORY).values += [30e3]
    results.figure("1 MiB", ICEORYX, MEMORY).values += [40e3]
    results.figure("1 MiB", ICEORYX_IN_PLACE, MEMORY).values += [10e3]

    assert the(RING[Form.IN_PLACE] + ", 1 MiB", ICEORYX, results).verdict == "not reached"


def test_for_latency_less_is_better(results: Results) -> None:
    results.figure(LATENCY, RING[Form.SLEEPING], MEMORY).values += [20.0]
    results.figure(LATENCY, ICEORYX_EVENT, MEMORY).values += [50.0]

    target = the(RING[Form.SLEEPING], ICEORYX_EVENT, results)

    assert target.ratio == pytest.approx(0.4)
    assert target.verdict == "reached"


def test_a_lossy_round_does_not_count_and_is_named(results: Results) -> None:
    results.figure("64 B", "zenoh", "tcp").problems.append("lossy: 3 of 9 lost")

    assert results.value("64 B", "zenoh", "tcp") is None
    assert ["zenoh", "tcp", "lossy", ""] in grids(results)[0].rows
    assert results.remarks() == ["zenoh (tcp): lossy: 3 of 9 lost [64 B]"]


def test_what_is_not_installed_is_named(results: Results) -> None:
    results.figure("64 B", "NATS core", "tcp").missing = "not installed: nats-server"

    assert ["NATS core", "tcp", "not installed", ""] in grids(results)[0].rows
    assert "- NATS core (tcp): not installed: nats-server" in markdown(results, [], WHERE)


def test_the_page_keeps_what_stands_around_the_section(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\nWords.\n")

    write_docs(page, "one\n")
    page.write_text(page.read_text() + "\n## Waiting\n")
    write_docs(page, "two\n")
    write_docs(page, "three\n")

    block = f"{BEGIN}\n\nthree\n\n{END}\n"
    assert page.read_text() == f"# Performance\n\nWords.\n\n{block}\n## Waiting\n"


@pytest.mark.parametrize(
    ("value", "text"), [(196, "196"), (4_530, "4.53 k"), (83_900, "83.9 k"), (4.63e6, "4.63 M")]
)
def test_rates_have_three_digits(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(("ratio", "text"), [(0.456, "0.46x"), (1.52, "1.5x"), (16.4, "16x")])
def test_ratios_are_short(ratio: float, text: str) -> None:
    assert times(ratio) == text
