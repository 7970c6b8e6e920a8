"""The source of a query loses power, and with it messages that the query had seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.source.ranges import CUT_OFF
from support.machine import Machine
from support.planner import Planner


@pytest.fixture(params=["log", "fmq"])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Machine:
    """A stream of 150 messages, of which 100 are on the disk."""
    machine = Machine(request.param, tmp_path)
    machine.write(*range(100))
    machine.sync()
    machine.write(*range(100, 150))
    return machine


def test_the_next_batch_has_what_came_afterwards(machine: Machine) -> None:
    planner = Planner(machine.url)
    planner.begin()
    assert planner.run() == list(range(150))
    machine.lose_power()
    machine.write(*range(1000, 1080))
    again = Planner(machine.url)
    again.at = planner.at
    assert again.run() == list(range(1000, 1080))


def test_a_batch_that_was_planned_before_counts_what_it_lost(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    planner = Planner(machine.url, failOnDataLoss="false")
    planner.begin()
    planner.plan()
    machine.lose_power()
    machine.write(*range(1000, 1080))
    assert planner.read() == list(range(100))
    assert CUT_OFF in caplog.text
    again = Planner(machine.url, failOnDataLoss="false")
    again.at = planner.at
    assert again.run() == list(range(1000, 1080))
