"""A stream that was put back from an older copy is told from the one that was read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock import open_writer
from penstock.pipeline.source.checkpoint import offsets_from_json
from penstock.pipeline.source.loss_reports import DataLoss
from support.planner import Planner

LOSS = r"an unknown number of messages lost \(seq 150 on\): the stream was put back"


def write(url: str, numbers: range) -> None:
    with open_writer(url) as writer:
        writer.write_many([str(number).encode() for number in numbers])


@pytest.fixture
def planner(tmp_path: Path) -> Planner:
    """A query that has read 150 messages of a log, of which somebody then put 50 back."""
    url = f"log:{tmp_path}/log"
    write(url, range(50))
    shutil.copytree(tmp_path / "log", tmp_path / "backup")
    write(url, range(50, 150))
    planner = Planner(url)
    planner.begin()
    assert planner.run() == list(range(150))
    planner.reader.stop()
    shutil.rmtree(tmp_path / "log")
    shutil.move(tmp_path / "backup", tmp_path / "log")
    write(url, range(1000, 1150))  # they have the numbers 50 to 199
    return planner


def begin_again(planner: Planner, **options: str) -> Planner:
    """Go on from the checkpoint in another process, as far as the source can tell."""
    again = Planner(next(iter(planner.at)), **options)
    again.at = json.loads(json.dumps(planner.at))
    return again


def test_a_query_does_not_go_on_in_the_middle_of_other_messages(planner: Planner) -> None:
    with pytest.raises(DataLoss, match=LOSS) as caught:
        begin_again(planner).plan()
    assert "from its beginning" in (caught.value.hint or "")


def test_without_failing_all_that_is_there_is_read_and_the_loss_is_counted(
    planner: Planner,
) -> None:
    again = begin_again(planner, failOnDataLoss="false")
    assert again.run() == [*range(50), *range(1000, 1150)]
    (offset,) = offsets_from_json(again.at).values()
    assert (offset.lost, offset.lost_unknown) == (0, 1)
    assert not again.plan()  # once


def test_a_batch_that_is_done_again_is_not_made_of_other_messages(planner: Planner) -> None:
    again = begin_again(planner)
    with pytest.raises(DataLoss, match=r"seq 0 on\): the stream was put back"):
        again.reader.partitions({}, again.at)


def test_offsets_of_an_earlier_release_have_no_checksum_and_go_on(
    planner: Planner, tmp_path: Path
) -> None:
    again = begin_again(planner)
    for fields in again.at.values():
        assert len(fields.pop("check")) == 8
    assert again.run() == list(range(1100, 1150))  # nobody can tell
    write(f"log:{tmp_path}/log", range(7, 8))
    assert again.run() == [7]  # which has a checksum, and fits


def test_a_stream_that_stays_the_same_is_not_taken_for_another(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/ring?slots=16"
    write(url, range(3))
    planner = Planner(f"fmq:{tmp_path}/ring", failOnDataLoss="false")
    planner.begin()
    assert planner.run() == [0, 1, 2]
    for start in range(3, 60, 3):
        write(url, range(start, start + 3))
        assert begin_again(planner).run() == [start, start + 1, start + 2]
        assert planner.run() == [start, start + 1, start + 2]
