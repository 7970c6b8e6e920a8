"""Does one run of a comparison measure what it says?"""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.contract import FILE, Case, Scratch
from peers.queues import Form, QueueWay
from peers.runs import Failed, Pace, in_own_process, latency_run, throughput_run

PACE = Pace(warm_up=0.01, seconds=0.03, messages=20)
FORMS = [Form.SINGLE, Form.LISTS, Form.ARROW, Form.IN_PLACE]


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    (tmp_path / "file").mkdir()
    (tmp_path / "memory").mkdir()
    return Scratch(tmp_path / "file", tmp_path / "memory")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_wide_ring_loses_nothing(form: Form, scratch: Scratch) -> None:
    outcome = throughput_run(QueueWay("ring", FILE, "wide", form), Case(1024), PACE, scratch)

    assert outcome.problem is None
    assert outcome.rate is not None
    assert outcome.rate > 0


def test_four_readers_get_everything(scratch: Scratch) -> None:
    outcome = throughput_run(QueueWay("ring", FILE), Case(1024, 4), PACE, scratch)

    assert outcome.problem is None


def test_a_run_leaves_no_files(scratch: Scratch, tmp_path: Path) -> None:
    throughput_run(QueueWay("ring", FILE), Case(64), PACE, scratch)

    assert not list((tmp_path / "file").iterdir())


def test_latency_is_noted_for_each_message(scratch: Scratch) -> None:
    way = QueueWay("ring", FILE, "wide", Form.SLEEPING)

    outcome = latency_run(way, Case(64), PACE, scratch)

    assert outcome.problem is None
    assert len(outcome.delays) == PACE.messages


def test_a_way_that_cannot_open_says_why(scratch: Scratch) -> None:
    outcome = throughput_run(QueueWay("ring", FILE, "narrow"), Case(64), PACE, scratch)

    assert outcome.rate is None
    assert "narrow" in str(outcome.problem)


def test_an_error_in_another_process_is_named() -> None:
    with pytest.raises(Failed, match="ZeroDivisionError"):
        in_own_process(divmod, 1, 0)
