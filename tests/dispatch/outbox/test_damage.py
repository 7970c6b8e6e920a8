"""What does an outbox do about files that are not as it left them?"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import PenstockError, Unsupported
from penstock.dispatch.outbox import Outbox, Reason
from support.outbox_messages import message, messages, texts

if TYPE_CHECKING:
    from pathlib import Path

#: The largest file of an outbox that tests damage.
PAGE = 4096


@pytest.fixture
def used(folder: Path) -> Path:
    """An outbox in which 0 to 9 are settled, 10 to 19 wait, and 20 to 29 are settled."""
    with Outbox(folder) as outbox:
        outbox.append(messages(40))
        items = outbox.take(40)
        outbox.settle([*items[:10], *items[20:30]], Reason.ACKED)
    return folder


QUEUED = [str(i) for i in (*range(10, 20), *range(30, 40))]


def test_what_was_settled_out_of_order_does_not_come_again(used: Path) -> None:
    with Outbox(used) as outbox:
        assert texts(outbox.take(100)) == QUEUED
        assert not outbox.findings


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"PNOUTBOX", bytes(3 * PAGE)])
def test_without_a_state_that_can_be_used_everything_comes_again(used: Path, damage: bytes) -> None:
    (used / "state").write_bytes(damage)
    with Outbox(used) as outbox:
        assert set(texts(outbox.take(100))) >= set(QUEUED)
        assert "come again" in outbox.findings[0]
        assert outbox.last_arrival == 40
        books = outbox.books()
        assert books.stored == sum(books[1:])
    assert (used / "state.damaged-1").exists()
    with Outbox(used) as outbox:
        assert not outbox.findings


def test_without_any_state_everything_comes_again(used: Path) -> None:
    (used / "state").unlink()
    (used / "settled").unlink()
    with Outbox(used) as outbox:
        assert texts(outbox.take(100)) == [str(i) for i in range(40)]
        assert "come again" in outbox.findings[0]


@pytest.mark.parametrize("slot", [1, 2])
def test_one_slot_that_is_cut_short_costs_nothing_but_a_repetition(used: Path, slot: int) -> None:
    data = bytearray((used / "state").read_bytes())
    data[slot * PAGE + 20] ^= 0xFF
    (used / "state").write_bytes(data)
    with Outbox(used) as outbox:
        assert not outbox.findings
        assert set(texts(outbox.take(100))) >= set(QUEUED)
        books = outbox.books()
        assert books.stored == sum(books[1:]) == 40


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"PNSETTLD" + bytes(90)])
def test_without_notes_that_can_be_used_some_come_again(used: Path, damage: bytes) -> None:
    (used / "settled").write_bytes(damage)
    with Outbox(used) as outbox:
        assert texts(outbox.take(100)) == [str(i) for i in range(10, 40)]
        assert "come again" in outbox.findings[0]
        books = outbox.books()
        assert (books.stored, books.acked, books.queued) == (40, 10, 30)


@pytest.mark.parametrize("name", ["state", "settled"])
def test_a_file_of_a_newer_version_is_left_alone(used: Path, name: str) -> None:
    path = used / name
    data = bytearray(path.read_bytes())
    data[8] = 9
    path.write_bytes(data)
    with pytest.raises(Unsupported, match="version 9"):
        Outbox(used)
    assert path.read_bytes() == data


def test_a_message_that_is_damaged_on_the_disk_is_counted_and_the_others_come(folder: Path) -> None:
    with Outbox(folder) as outbox:
        outbox.append([message(f"message {i}") for i in range(10)])
    (segment,) = (folder / "log").glob("*.fmq")
    data = segment.read_bytes()
    segment.write_bytes(data.replace(b"message 4", b"massage 4"))
    with Outbox(folder) as outbox:
        assert texts(outbox.take()) == [f"message {i}" for i in range(10) if i != 4]
        books = outbox.books()
        assert (books.stored, books.damaged, books.queued) == (10, 1, 9)
        assert "damaged" in outbox.findings[0]


def test_a_damaged_message_is_not_superseded_as_well(folder: Path) -> None:
    with Outbox(folder) as outbox:
        outbox.append_latest(1, message("message 0", 0))
        outbox.append([message(f"message {i}", 0) for i in range(1, 3)])
    with Outbox(folder, max_messages=2) as outbox:
        (segment,) = (folder / "log").glob("*.fmq")
        segment.write_bytes(segment.read_bytes().replace(b"message 0", b"massage 0"))
        done = outbox.append_latest(1, message("newer", 6))
        assert (done.stored, done.superseded) == (1, 0)
        books = outbox.books()
        assert (books.stored, books.damaged, books.superseded) == (4, 1, 0)
        assert texts(outbox.take())[-1] == "newer"


def test_a_log_that_was_removed_is_told_of_and_made_anew(used: Path) -> None:
    shutil.rmtree(used / "log")
    with Outbox(used) as outbox:
        assert "created anew" in outbox.findings[0]
        assert outbox.books().acked == 10
        outbox.append([message("next")])
        items = outbox.take()
        assert texts(items) == ["next"]
        assert items[0].arrival == 41
        outbox.settle(items, Reason.ACKED)
    with Outbox(used) as outbox:
        assert not outbox.findings
        assert outbox.books().acked == 11


def test_segments_that_are_gone_are_counted_as_damaged(folder: Path) -> None:
    with Outbox(folder, segment=1 << 16) as outbox:
        outbox.append([message("x" * 1000) for _ in range(200)])
    segments = sorted((folder / "log").glob("*.fmq"))
    segments[0].unlink()
    segments[2].unlink()
    with Outbox(folder, segment=1 << 16) as outbox:
        items = outbox.take(1000)
        books = outbox.books()
        assert books.queued == len(items)
        assert books.damaged == 200 - len(items) > 0
        assert books.stored == 200
        assert len(outbox.findings) == 2


def test_a_log_that_lost_its_end_gives_no_number_that_counts_as_settled(used: Path) -> None:
    # As after a power failure: the state is on the disk, the last messages are not.
    with Outbox(used) as outbox:
        outbox.settle(outbox.take(100), Reason.ACKED)
    settings = (used / "log" / "log.json").read_bytes()
    (segment,) = (used / "log").glob("*.fmq")
    data = bytearray(segment.read_bytes())
    data[128:136] = data[440:448] = (5).to_bytes(8, "little")  # the head, and its check
    segment.write_bytes(data)
    assert (used / "log" / "log.json").read_bytes() == settings
    with Outbox(used) as outbox:
        assert "did not get to the disk" in outbox.findings[0]
        outbox.append([message("next")])
        assert texts(outbox.take()) == ["next"]
        books = outbox.books()
        assert (books.stored, books.acked, books.queued) == (41, 40, 1)


@given(
    name=st.sampled_from(["state", "settled"]),
    at=st.integers(0, 3 * PAGE),
    junk=st.binary(max_size=8),
    is_cut=st.booleans(),
)
def test_whatever_is_in_the_files_no_message_is_lost(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, junk: bytes, *, is_cut: bool
) -> None:
    folder = tmp_path_factory.mktemp("outbox") / "outbox"
    with Outbox(folder, sync="none", segment=1 << 16) as outbox:
        outbox.append(messages(20))
        items = outbox.take(20)
        outbox.settle([*items[:5], *items[10:15]], Reason.ACKED)
    path = folder / name
    data = path.read_bytes()
    at %= len(data)
    path.write_bytes(data[:at] + junk + (b"" if is_cut else data[at + len(junk) :]))
    with contextlib.suppress(Unsupported), Outbox(folder, sync="none") as outbox:
        left = texts(outbox.take(100))
        assert left == sorted(left, key=int)
        assert set(left) >= {str(i) for i in (*range(5, 10), *range(15, 20))}
        books = outbox.books()
        assert books.stored == sum(books[1:])
    shutil.rmtree(folder)


def test_an_outbox_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outbox").write_text("mine", encoding="ascii")
    with pytest.raises(PenstockError, match="outbox"):
        Outbox(tmp_path / "outbox")
