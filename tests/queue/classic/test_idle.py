"""Waiting costs next to nothing, and memory does not grow with what passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock import open_writer
from support.processes import peers, shared_memory_path

if TYPE_CHECKING:
    from pathlib import Path


def share_of_a_core(url: str) -> float:
    """Return what following costs; the least of some tries, as others use this machine too."""
    least = 1.0
    for _ in range(5):
        with peers() as started:
            report = started.start("follow_idle", url=url, seconds=2).hear()
        assert report["silent"]
        assert 1.9 < report["elapsed"] < 10
        least = min(least, report["share"])
        if least < 0.01:
            break
    return least


@pytest.mark.parametrize("written", [0, 30], ids=["empty", "all read"])
def test_following_an_idle_file_queue_costs_under_1_percent_of_a_core(
    queue_url: str, written: int
) -> None:
    with open_writer(queue_url) as writer:
        writer.write_many([b"x"] * written)
    assert share_of_a_core(f"{queue_url}&type=7") < 0.01


def test_following_an_idle_shared_memory_queue_costs_under_1_percent_of_a_core(
    tmp_path: Path,
) -> None:
    with shared_memory_path(tmp_path) as path:
        url = f"fmq:{path}?layout=classic&slots=20&size=8192"
        open_writer(url).close()
        assert share_of_a_core(url) < 0.01


@pytest.mark.parametrize(
    "count",
    [200_000, pytest.param(5_000_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
def test_memory_does_not_grow_with_the_messages_that_pass(queue_path: str, count: int) -> None:
    url = f"fmq:{queue_path}?layout=classic&slots=500&size=100000"
    with peers() as started:
        report = started.start("pass_messages", url=url, warm_up=20_000, count=count).hear()
    assert report["messages"] == count + 20_000
    assert report["lost"] == 0
    assert report["grew_kib"] < 2048


def test_memory_does_not_grow_with_the_losses_of_a_slow_reader(queue_path: str) -> None:
    url = f"fmq:{queue_path}?layout=classic&slots=50&size=100000"
    with peers() as started:
        report = started.start("lose_messages", url=url, warm_up=1500, rounds=3000).hear()
    assert report["lost"] > report["messages"] > 0
    assert report["grew_kib"] < 2048
