"""Queues that an earlier release wrote open, lose nothing, and get what they lack."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from penstock import Position, open_reader
from penstock.queue.endpoint import check
from support.wide_files import stored
from support.wide_opening import wide_writer
from support.wide_oracle import list_queue

FILES = sorted((Path(__file__).parents[2] / "vectors" / "releases").glob("ring-*.fmq.gz"))
#: What is in each of them: eight of ten messages, and a reader that has read two.
PAYLOADS = [b"gone 2", *(b"message %d" % number for number in range(3, 10))]


@pytest.fixture(params=FILES, ids=lambda file: file.name.removesuffix(".fmq.gz"))
def old(request: pytest.FixtureRequest, queue_path: str) -> str:
    """A queue of an earlier release."""
    image = gzip.decompress(request.param.read_bytes())
    Path(f"{queue_path}.fmq").write_bytes(image)
    header = list_queue(f"{queue_path}.fmq").header
    assert (header.check, header.state_check) == (0, 0)
    return queue_path


def test_there_are_some() -> None:
    assert len(FILES) == 3


def test_a_queue_of_an_earlier_release_is_read_as_it_is(old: str) -> None:
    assert check(f"fmq:{old}") == 8
    assert stored(old) == PAYLOADS
    with open_reader(f"fmq:{old}?hold=archive") as reader:
        assert [m.payload for m in reader.read_many(100)] == PAYLOADS
        assert reader.statistics().lost == 0
    assert list_queue(f"{old}.fmq").header.check == 0  # a reader changes its row only


def test_a_writer_gives_it_its_checksums(old: str) -> None:
    before = list_queue(f"{old}.fmq").header
    with wide_writer(f"fmq:{old}") as writer:  # its machine is another by now
        assert writer.write(b"next") == 10
    after = list_queue(f"{old}.fmq").header
    assert after.check
    assert after.state_check
    assert after.epoch != before.epoch
    assert stored(old) == [*PAYLOADS[1:], b"next"]
    with open_reader(f"fmq:{old}?hold=archive", start=Position.END) as reader:
        assert [m.seq for m in reader.read_many(100)] == list(range(3, 11))
        assert reader.statistics().lost == 1


def test_that_its_machine_went_down_costs_it_nothing_that_is_whole(old: str) -> None:
    wide_writer(f"fmq:{old}").close()
    assert stored(old) == PAYLOADS
