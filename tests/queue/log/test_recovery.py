"""A machine went down: what did not get to the disk is cut off, counted and said."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import describe
from penstock.core.errors import DamagedQueue, Unsupported
from penstock.core.interfaces import Ancestor
from penstock.core.overflow import DropReason
from penstock.core.statistics import Loss
from penstock.queue.log.endpoint import check, segments
from penstock.queue.log.recovery import Recovery
from penstock.queue.log.segments import begin_segment, open_segment, path_of
from penstock.queue.log.settings import SETTINGS
from penstock.queue.wide.file import Header, mark
from penstock.queue.wide.layout import HEADER, PAGE, SLOT, State
from support.log_files import (
    SMALL,
    after_power_failure,
    log_reader,
    log_writer,
    segment_files,
    slot_offset,
    stored,
    url_of,
)
from support.waiting import SOON

SIZE = 200
PAYLOADS = [bytes([i]) * SIZE for i in range(20)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of 20 messages in three segments: 0 to 7, 8 to 15, 16 to 19."""
    log = tmp_path / "log"
    with log_writer(log) as writer:
        writer.write_many(PAYLOADS)
    log_writer(log).close()  # from now on what is sealed is known to be on the disk
    return log


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as segment:
        segment.seek(at)
        segment.write(data)


def buffer_offset(file: Path) -> int:
    with file.open("rb") as segment:
        return Header(segment.read(PAGE))["buffer_offset"]


def field(file: Path, name: str) -> int:
    with file.open("rb") as segment:
        return Header(segment.read(PAGE))[name]


def reopen(path: Path) -> Recovery:
    with log_writer(path, "") as writer:
        return writer.recovery


def zero_bytes_of(file: Path, number: int) -> None:
    """Let the bytes of the n-th message of a segment be zeros, as if they had not been written."""
    overwrite(file, buffer_offset(file) + number * 256, bytes(SIZE))


# --- torn tails ---------------------------------------------------------------------------------


def test_after_a_power_failure_a_whole_log_is_as_it_was(path: Path) -> None:
    after_power_failure(path)
    recovery = reopen(path)
    assert (recovery.cut, recovery.set_aside) == (0, [])
    assert stored(path) == PAYLOADS
    with log_writer(path) as writer:
        assert writer.write(b"more") == 20
    assert [int(file.stem) for file in segment_files(path)] == [0, 8, 16, 20]


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_torn_tail_is_cut_at_the_first_bad_message(
    path: Path, bad: int, caplog: pytest.LogCaptureFixture
) -> None:
    last = segment_files(path)[-1]
    for number in range(bad, 4):
        zero_bytes_of(last, number)
    after_power_failure(path)
    with caplog.at_level(logging.WARNING), log_writer(path, "") as writer:
        assert writer.recovery.cut == 4 - bad
        assert writer.recovery.set_aside == []
        assert f"the last {4 - bad} messages, from {16 + bad} on" in caplog.text
        assert writer.write(b"new") == 20  # no number is given twice
    with log_reader(path) as reader:
        messages = list(reader.available())
        assert [m.seq for m in messages] == [*range(16 + bad), 20]
        books = reader.statistics()
        assert [(loss.first, loss.last, loss.reason) for loss in books.losses] == [
            (16 + bad, 19, DropReason.DAMAGED)
        ]
        assert books.messages + books.lost == 21
    assert stored(path) == [*PAYLOADS[: 16 + bad], b"new"]
    assert reopen(path).cut == 0


@pytest.mark.parametrize("torn", ["slots", "bytes", "both"])
def test_pages_that_were_not_written_are_found(path: Path, torn: str) -> None:
    last = segment_files(path)[-1]
    if torn != "bytes":
        overwrite(last, slot_offset(last, 18), bytes(64 * 2))
    if torn != "slots":
        zero_bytes_of(last, 2)
    after_power_failure(path)
    assert reopen(path).cut == 2
    assert stored(path) == PAYLOADS[:18]


@pytest.mark.parametrize("bad", [(1,), (1, 3), (0, 2, 3)])
def test_what_comes_whole_behind_a_bad_message_is_kept_aside(
    path: Path, bad: tuple[int, ...]
) -> None:
    last = segment_files(path)[-1]
    for number in bad:
        zero_bytes_of(last, number)
    after_power_failure(path)
    recovery = reopen(path)
    assert recovery.cut == 4 - bad[0]
    assert [file.name for file in recovery.set_aside] == [f"{last.name}.torn-1"]
    assert stored(path) == PAYLOADS[: 16 + bad[0]]
    assert describe(url_of(path)).details["set_aside"] == [str(recovery.set_aside[0])]


def test_a_file_that_was_cut_short_keeps_what_is_in_it(path: Path) -> None:
    last = segment_files(path)[-1]
    size = last.stat().st_size
    with last.open("r+b") as segment:
        segment.truncate(buffer_offset(last) + 2 * 256 + 10)
    with log_reader(path) as reader, pytest.raises(DamagedQueue):
        list(reader.available())
    with log_reader(path, "damaged=skip") as reader:
        assert len(list(reader.available())) == 16
        reader.seek(18)  # what is in it is not known
        assert reader.read(0.01) is None
    recovery = reopen(path)  # it needs no power failure for that
    assert recovery.cut == 2
    assert last.stat().st_size == size
    assert stored(path) == PAYLOADS[:18]


def test_a_sealed_segment_that_was_not_synced_is_checked_too(path: Path) -> None:
    with log_writer(path) as writer:  # which leaves the newest but one behind
        writer.write_many(PAYLOADS[:10])
    unsynced = segment_files(path)[-2]
    overwrite(unsynced, HEADER.fields["boot_id"].offset, b"an earlier boot.")
    overwrite(unsynced, buffer_offset(unsynced) + 7 * 256, bytes(SIZE))
    after_power_failure(path)
    recovery = reopen(path)
    assert recovery.cut == 1
    with log_reader(path) as reader:
        assert [m.seq for m in reader.available()] == [*range(23), *range(24, 30)]
        assert [(x.first, x.last) for x in reader.statistics().losses] == [(23, 23)]


def test_a_sealed_segment_that_was_synced_is_not_looked_at_again(path: Path) -> None:
    with log_writer(path, "sync=batch") as writer:
        writer.write_many(PAYLOADS)
    synced = segment_files(path)[1]
    assert not any(synced.read_bytes()[400:416])
    zero_bytes_of(synced, 3)  # a disk that forgets
    after_power_failure(path)
    assert reopen(path).cut == 0
    # Whoever reads it is told.
    with log_reader(path) as reader, pytest.raises(DamagedQueue, match="message 11"):
        list(reader.available())
    with log_reader(path, "damaged=skip") as reader:
        assert len(list(reader.available())) == 39
        assert reader.statistics().lost == 1


def test_a_process_that_died_costs_no_check(path: Path) -> None:
    """Only a machine that goes down can tear a tail: it is told by the number of its boot."""
    zero_bytes_of(segment_files(path)[-1], 1)
    assert reopen(path).cut == 0


# --- a new epoch --------------------------------------------------------------------------------


def lose_messages(path: Path, head: int) -> None:
    """Let the disk have got neither the last messages nor a header that counts them."""
    for name in ("head", "head_check"):
        at = HEADER.fields[name].offset
        overwrite(segment_files(path)[-1], at, head.to_bytes(8, "little"))
    after_power_failure(path)


def test_numbers_that_the_disk_did_not_get_are_given_again_in_a_new_epoch(path: Path) -> None:
    with log_reader(path) as reader:
        before = reader.bounds()
        assert len(reader.read_many(100)) == 20  # it has seen more than the disk got
    lose_messages(path, 18)
    with log_writer(path) as writer:
        assert writer.recovery.after_crash
        assert [writer.write(b"new") for _ in range(4)] == [18, 19, 20, 21]
    with log_reader(path) as reader:
        bounds = reader.bounds()
        assert bounds.epoch != before.epoch
        assert bounds.lineage == (Ancestor(before.epoch, 18),)
        assert bounds.successor(before.epoch, before.end) == 18
        assert [m.seq for m in reader.available()] == list(range(22))
        assert (reader.statistics().lost, reader.statistics().restarts) == (0, 0)


def test_a_whole_log_has_a_new_epoch_all_the_same(path: Path) -> None:
    """What a reader saw beyond its end, nobody knows any more."""
    with log_reader(path) as reader:
        before = reader.bounds()
    after_power_failure(path)
    reopen(path)
    with log_reader(path) as reader:
        assert reader.bounds().epoch != before.epoch
        assert reader.bounds().lineage == (Ancestor(before.epoch, 20),)
    reopen(path)
    with log_reader(path) as reader:  # and no other one without another failure
        assert reader.bounds().lineage == (Ancestor(before.epoch, 20),)


@pytest.mark.parametrize("sync", ["1s", "batch"])
def test_a_log_that_was_closed_after_it_was_synced_keeps_its_epoch(
    tmp_path: Path, sync: str
) -> None:
    log = tmp_path / "log"
    with log_writer(log, f"segment=8k&segment_slots=8&sync={sync}") as writer:
        writer.write_many(PAYLOADS)
    with log_reader(log) as reader:
        before = reader.bounds()
    after_power_failure(log)
    with log_writer(log, f"sync={sync}") as writer:
        assert not writer.recovery.after_crash
        assert writer.write(b"more") == 20
        assert any(segment_files(log)[-1].read_bytes()[400:416])  # it is in use again
    with log_reader(log) as reader:
        assert reader.bounds() == before._replace(end=21)


def test_a_newest_segment_that_never_got_to_the_disk_begins_a_new_epoch(path: Path) -> None:
    """With `sync=none` the disk may have all of a sealed segment and nothing of the next."""
    segment_files(path)[-1].unlink()
    after_power_failure(path)
    with log_writer(path) as writer:
        assert writer.recovery.after_crash
        assert writer.write(b"new") == 16


def test_a_segment_in_the_middle_that_never_got_to_the_disk_is_a_gap_that_is_counted(
    path: Path,
) -> None:
    path_of(path, 8).unlink()
    after_power_failure(path)
    reopen(path)
    with log_reader(path) as reader:
        assert [m.seq for m in reader.available()] == [*range(8), *range(16, 20)]
        assert [(x.first, x.last, x.reason) for x in reader.statistics().losses] == [
            (8, 15, DropReason.DAMAGED)
        ]
    faults = [fault for checked in check(url_of(path)) for fault in checked.faults]
    assert faults == ["messages 8 to 15 are missing before it"]


def test_cursors_go_over_to_the_new_epoch_at_most_to_its_beginning(path: Path) -> None:
    with log_reader(path, "cursor=ahead") as reader:
        reader.seek(20)
    with log_reader(path, "cursor=behind") as reader:
        reader.seek(5)
    lose_messages(path, 18)
    with log_writer(path, "hold=ahead,behind") as writer:
        assert writer.write(b"new") == 18
        kept = {entry["name"]: entry for entry in describe(url_of(path)).details["cursors"]}
        assert (kept["ahead"]["next_seq"], kept["behind"]["next_seq"]) == (18, 5)
    with log_reader(path, "cursor=ahead") as reader:
        assert [m.payload for m in reader.available()] == [b"new"]
        assert (reader.statistics().lost, reader.statistics().restarts) == (0, 0)
    with log_reader(path, "cursor=behind") as reader:
        assert [m.seq for m in reader.available()] == list(range(5, 19))


def test_a_consumer_that_comes_before_the_writer_goes_on_where_the_disk_ends(path: Path) -> None:
    with log_reader(path, "cursor=me") as reader:
        reader.seek(20)
    lose_messages(path, 18)
    with log_reader(path, "cursor=me") as reader:
        assert reader.read(0) is None
        with log_writer(path) as writer:
            assert writer.write(b"new") == 18
            assert [m.seq for m in reader.available()] == [18]
    with log_reader(path, "cursor=me") as reader:
        assert reader.read(0) is None
        assert reader.statistics().restarts == 0


def test_a_reader_of_what_was_lost_goes_back_to_the_new_epoch(path: Path) -> None:
    """As one that reads over a network from another machine does."""
    with log_reader(path) as reader:
        assert len(reader.read_many(20)) == 20
        lose_messages(path, 18)
        with log_writer(path) as writer:
            writer.write_many([b"new"] * 12)
            assert [m.seq for m in reader.available()] == list(range(18, 30))
        assert reader.statistics().restarts == 0


def test_an_empty_newest_segment_is_made_anew_in_the_new_epoch(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write_many([b"x"] * 12)  # the newest one is full
        begin_segment(path, writer._settings, 32, sync=False).close()
    with log_reader(path) as reader:
        assert len(reader.read_many(40)) == 32
        after_power_failure(path)
        with log_writer(path) as writer:
            assert writer.write(b"new") == 32
            assert [m.seq for m in reader.available()] == [32]
    assert len(stored(path)) == 33


def test_who_dies_in_a_recovery_leaves_what_the_next_one_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever step it came to: the log opens, and no number is given twice in an epoch."""
    calls = ["save_settings", "_settle", "_move_cursors", "seal"]
    with log_reader(path, "cursor=me") as reader:
        reader.seek(20)
    lose_messages(path, 18)
    for name in calls:

        def die(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(f"penstock.queue.log.recovery.{name}", die)
            with contextlib.suppress(KeyboardInterrupt):
                log_writer(path).close()
        with log_reader(path) as reader:
            assert len(list(reader.available())) == 18
            assert reader.bounds().end == 18
    with log_writer(path) as writer:
        assert writer.write(b"new") == 18
    with log_reader(path, "cursor=me") as reader:
        assert [m.payload for m in reader.available()] == [b"new"]


def test_a_log_without_its_file_is_put_together_from_segments_of_several_epochs(
    path: Path,
) -> None:
    after_power_failure(path)
    with log_writer(path) as writer:
        writer.write_many([b"new"] * 3)
    with log_reader(path) as reader:
        bounds = reader.bounds()
    (path / SETTINGS).unlink()
    with log_writer(path, "") as writer:
        assert writer.write(b"more") == 23
    with log_reader(path) as reader:
        assert reader.bounds() == bounds._replace(end=24)
        assert len(list(reader.available())) == 24


def test_a_log_of_several_epochs_is_replaced_as_a_whole(path: Path) -> None:
    after_power_failure(path)
    with log_writer(path) as writer:
        writer.write_many([b"new"] * 3)
    with log_reader(path) as reader:
        assert len(reader.read_many(10)) == 10
        with log_writer(path, f"{SMALL}&create=always") as writer:
            writer.write(b"other")
            assert [m.payload for m in reader.available()] == [b"other"]
        assert [(x.first, x.last, x.reason) for x in reader.statistics().losses] == [
            (10, 22, DropReason.RECREATED)
        ]
    assert stored(path) == [b"other"]


# --- a live segment in the middle ---------------------------------------------------------------


def unseal(log: Path, number: int, head: int | None = None) -> None:
    """Let a segment say that it takes messages, as an old copy of it does."""
    file = open_segment(log, number, to_write=True)
    mark(file, State.LIVE)
    if head is not None:
        file.header["head_check"] = file.header["head"] = head
    file.close()


@pytest.fixture
def unsealed(path: Path) -> Path:
    """A log with a segment in its middle that says that it takes messages."""
    assert field(path_of(path, 8), "state") == State.SEALED
    unseal(path, 8)
    return path


def test_one_changed_bit_of_the_state_ends_no_reader(path: Path) -> None:
    overwrite(path_of(path, 8), HEADER.fields["state"].offset, bytes(4))
    assert stored(path) == PAYLOADS
    reopen(path)
    assert [listed.state for listed in segments(url_of(path))] == ["sealed", "sealed", "live"]


def test_a_segment_that_is_not_sealed_is_read_over(unsealed: Path) -> None:
    assert stored(unsealed) == PAYLOADS
    with log_reader(unsealed) as reader:
        assert reader.newest_seq() == 19
        assert reader.bounds().end == 20
        assert len(reader.read_many(100)) == 20
    with log_reader(unsealed) as reader:
        assert reader.read_batch(100).num_rows == 20
    with log_reader(unsealed, start=9) as reader:
        assert reader.statistics().backlog == 11
        assert [reader.read(0.05).seq for _ in range(11)] == list(range(9, 20))  # type: ignore[union-attr]


def test_verification_says_that_a_segment_is_not_sealed(unsealed: Path) -> None:
    faults = [fault for checked in check(url_of(unsealed)) for fault in checked.faults]
    assert faults == ["it takes messages, and is not the newest: the next writer seals it"]


def test_the_next_writer_seals_it(unsealed: Path) -> None:
    reopen(unsealed)
    assert [listed.state for listed in segments(url_of(unsealed))] == ["sealed", "sealed", "live"]
    assert [fault for checked in check(url_of(unsealed)) for fault in checked.faults] == []
    assert stored(unsealed) == PAYLOADS


def test_an_old_copy_of_a_segment_is_read_over_and_what_it_lacks_is_counted(
    tmp_path: Path,
) -> None:
    log = tmp_path / "log"
    with log_writer(log) as writer:
        writer.write_many(PAYLOADS[:12])
    copy = shutil.copy(path_of(log, 8), tmp_path / "copy")
    with log_writer(log) as writer:
        writer.write_many(PAYLOADS[12:])
    shutil.copy(copy, path_of(log, 8))
    for _ in range(2):
        with log_reader(log) as reader:
            assert [m.seq for m in reader.available()] == [*range(12), *range(16, 20)]
            assert [(x.first, x.last, x.reason) for x in reader.statistics().losses] == [
                (12, 15, DropReason.DAMAGED)
            ]
        with log_reader(log) as reader:
            found = [reader.read(1) for _ in range(16)]
            assert found[-1] is not None
            assert found[-1].seq == 19
            assert reader.statistics().lost == 4
        faults = [fault for checked in check(url_of(log)) for fault in checked.faults]
        assert "messages 12 to 15 are missing before it" in faults
        reopen(log)  # which seals it


def test_a_waiting_reader_leaves_an_old_copy_when_more_comes(path: Path) -> None:
    unseal(path, 8, head=12)
    with log_reader(path, start=12) as reader, log_writer(path) as writer:
        assert reader.read(SOON).seq == 16  # type: ignore[union-attr]
        writer.write(b"more")
        assert len(reader.read_many(9)) == 4


def test_a_segment_of_a_foreign_log_is_an_error_or_a_loss_that_is_counted(path: Path) -> None:
    overwrite(path_of(path, 8), 16, b"\1" * 8)
    with log_reader(path) as reader, pytest.raises(DamagedQueue, match=r"epoch|check"):
        list(reader.available())
    with log_reader(path, "damaged=skip") as reader:
        assert [m.seq for m in reader.available()] == [*range(8), *range(16, 20)]
        assert [(x.first, x.last) for x in reader.statistics().losses] == [(8, 15)]


@pytest.mark.parametrize("more", [0, 10], ids=["at the end", "in the middle"])
def test_damaged_and_foreign_segments_behind_one_another_are_skipped_once(
    path: Path, more: int
) -> None:
    with log_writer(path) as writer:
        for _ in range(more):
            writer.write(b"more")
    overwrite(path_of(path, 8), 0, bytes(8))
    overwrite(path_of(path, 16), 16, b"\1" * 8)
    with log_reader(path, "damaged=skip") as reader:
        messages = list(reader.available())
        assert [m.seq for m in messages] == [*range(8), *range(24, 20 + more)]
        assert reader.statistics().lost == (16 if more else 9)  # the newest counts as one


def test_a_name_that_leads_nowhere_is_damage(path: Path) -> None:
    path_of(path, 8).unlink()
    path_of(path, 8).symlink_to(path / "nothing")
    with log_reader(path) as reader, pytest.raises(DamagedQueue, match="link"):
        list(reader.available())
    with log_reader(path, "damaged=skip") as reader:
        assert len(list(reader.available())) == 12
        assert reader.statistics().lost == 8


# --- files that are no segments -----------------------------------------------------------------


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"rubbish" * 5000),
        lambda file: overwrite(file, 0, bytes(4096)),
        lambda file: overwrite(file, 96, b"\xff" * 4),
        lambda file: overwrite(file, 16, b"\1" * 8),
        lambda file: overwrite(file, 128, b"\xff" * 8),
    ],
    ids=["empty", "rubbish", "no header", "other number", "other log", "impossible head"],
)
def test_a_newest_segment_that_is_none_is_put_aside(
    path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    last = segment_files(path)[-1]
    spoil(last)
    with caplog.at_level(logging.WARNING), log_writer(path, "") as writer:
        assert [file.name for file in writer.recovery.set_aside] == [f"{last.name}.damaged-1"]
        assert "put aside" in caplog.text
        # What was in it is not known; its numbers are not given again.
        assert writer.write(b"new") == 24
    with log_reader(path) as reader:
        assert [m.seq for m in reader.available()] == [*range(16), 24]
        assert [(x.first, x.last, x.reason) for x in reader.statistics().losses] == [
            (16, 23, DropReason.DAMAGED)
        ]


def test_garbage_with_the_name_of_a_segment_far_away_is_put_aside(path: Path) -> None:
    for number in (10**12, 2**63 - 1):
        path_of(path, number).write_bytes(b"garbage")
    path_of(path, 10**20 - 1).write_bytes(b"no number at all")
    recovery = reopen(path)
    assert len(recovery.set_aside) == 2
    with log_writer(path) as writer:
        assert writer.write(b"new") == 20
    assert len(stored(path)) == 21


def test_a_log_whose_segments_are_all_damaged_goes_on_behind_them(path: Path) -> None:
    for file in segment_files(path):
        overwrite(file, 0, bytes(8))
    with pytest.raises(DamagedQueue):
        log_reader(path)
    with pytest.raises(DamagedQueue):
        describe(url_of(path))
    with log_writer(path, "") as writer:
        assert len(writer.recovery.set_aside) == 3
        assert writer.write(b"new") == 24


def test_a_damaged_segment_in_the_middle_is_an_error_or_a_loss_that_is_counted(path: Path) -> None:
    with log_writer(path) as writer:
        writer.write_many(PAYLOADS[:10])
    reopen(path)
    overwrite(path_of(path, 8), 0, bytes(8))
    assert reopen(path).set_aside == []  # what is far from the end is left as it is
    with log_reader(path) as reader:
        assert len(reader.read_many(10)) == 8
        for _ in range(2):
            with pytest.raises(DamagedQueue):
                reader.read(0)
        reader.seek(17)
        assert len(list(reader.available())) == 13
        with pytest.raises(DamagedQueue):
            reader.seek(10)
    with log_reader(path, "damaged=skip") as reader:
        assert [m.seq for m in reader.available()] == [*range(8), *range(16, 30)]
        assert [(x.first, x.last) for x in reader.statistics().losses] == [(8, 15)]
        reader.seek(10)
        assert reader.read_many(1)[0].seq == 16
    shutil.copy(path_of(path, 8), path_of(path, 0))
    with pytest.raises(DamagedQueue):
        log_reader(path)
    with log_reader(path, "damaged=skip") as reader:
        assert [m.seq for m in reader.available()] == list(range(16, 30))


def test_a_segment_of_a_newer_version_is_not_touched(path: Path) -> None:
    last = segment_files(path)[-1]
    overwrite(last, 8, (99).to_bytes(4, "little"))
    before = last.read_bytes()
    with pytest.raises(Unsupported, match="version 99"):
        log_writer(path)
    assert last.read_bytes() == before


# --- the log's own file -------------------------------------------------------------------------


def test_a_log_without_its_file_is_taken_as_its_segments_say(path: Path) -> None:
    (path / SETTINGS).unlink()
    assert len(stored(path)) == 20
    assert describe(url_of(path)).count == 20
    with log_writer(path, "retain=1G") as writer:
        assert writer.write(b"more") == 20
    kept = json.loads((path / SETTINGS).read_text())
    assert (kept["segment"], kept["segment_slots"], kept["retain"]) == (8192, 8, 1 << 30)
    assert len(stored(path)) == 21


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', "\0" * 300, '{"epoch": -1}'])
def test_a_damaged_file_is_put_aside(
    path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (path / SETTINGS).write_text(text)
    assert len(stored(path)) == 20
    assert describe(url_of(path)).count == 20
    with caplog.at_level(logging.WARNING), log_writer(path) as writer:
        assert "put aside" in caplog.text
        assert writer.write(b"more") == 20
    assert (path / f"{SETTINGS}.damaged-1").exists()
    assert len(stored(path)) == 21


def test_a_file_of_a_newer_version_is_not_touched(path: Path) -> None:
    kept = json.loads((path / SETTINGS).read_text())
    (path / SETTINGS).write_text(json.dumps(kept | {"version": 3}))
    with pytest.raises(Unsupported, match="version 3"):
        log_writer(path)


# --- a flipped bit of the tail: a segment has all of its messages or none -------------------------


def flipped(file: Path, name: str, bits: range = range(64)) -> Iterator[int]:
    """Flip bits of a header field in turn; yield its wrong value."""
    at, right = HEADER.fields[name].offset, field(file, name)
    for bit in bits:
        wrong = right ^ 1 << bit
        overwrite(file, at, wrong.to_bytes(8, "little"))
        yield wrong
        overwrite(file, at, right.to_bytes(8, "little"))


def flipped_tails(path: Path, number: int) -> Iterator[int]:
    """Flip each bit of a segment's tail in turn; yield the tail."""
    file = segment_files(path)[number]
    all_removed = field(file, "head")
    yield from (tail for tail in flipped(file, "tail") if tail != all_removed)


@pytest.mark.parametrize(("number", "first", "end"), [(0, 0, 8), (1, 8, 16)])
def test_a_segment_that_says_it_lost_its_first_messages_is_damaged(
    path: Path, number: int, first: int, end: int
) -> None:
    for tail in flipped_tails(path, number):
        with pytest.raises(DamagedQueue, match=f"tail .* found {tail}"):
            stored(path)
        with log_reader(path, "damaged=skip") as reader:
            assert [m.seq for m in reader.available()] == [*range(first), *range(end, 20)]
            assert reader.statistics().losses == (Loss(first, end - 1, DropReason.DAMAGED),)
        assert [fault for checked in check(url_of(path)) for fault in checked.faults]
    assert len(stored(path)) == 20


def test_a_newest_segment_that_is_skipped_counts_as_one_message_until_a_writer_comes(
    path: Path,
) -> None:
    overwrite(segment_files(path)[-1], HEADER.fields["epoch"].offset, b"damage")
    with log_reader(path, "damaged=skip") as reader, log_reader(path, "damaged=skip") as late:
        assert len(list(reader.available())) == 16
        assert reader.statistics().losses == (Loss(16, 16, DropReason.DAMAGED),)
        assert list(reader.available()) == []
        assert reader.statistics().lost == 1
        late.seek(16)
        assert list(late.available()) == []
        assert late.statistics().lost == 1
        with log_writer(path, "") as writer:
            assert writer.write(b"new") == 24
        for each in (reader, late):
            assert [m.payload for m in each.read_many(9, timeout=SOON)] == [b"new"]
            assert each.statistics().losses == (Loss(16, 23, DropReason.DAMAGED),)


@pytest.mark.parametrize("prepare", [after_power_failure, lambda _: None], ids=["cut", "whole"])
def test_a_writer_restores_the_tail_of_the_newest_segment(
    path: Path, prepare: Callable[[Path], object], tmp_path: Path
) -> None:
    for tail in flipped_tails(path, 2):
        with pytest.raises(DamagedQueue, match=f"tail .* found {tail}"):
            stored(path)
        copy = Path(shutil.copytree(path, tmp_path / "copy"))
        prepare(copy)
        with log_writer(copy, "") as writer:
            assert writer.write(b"new") == 20
        assert stored(copy) == [*PAYLOADS, b"new"]
        shutil.rmtree(copy)


# --- a flipped bit of the head: a log does not become shorter -------------------------------------


def test_a_newest_segment_that_says_it_has_fewer_messages_is_damaged(path: Path) -> None:
    """It has messages 16 to 19: the head is 20, in bits 10100."""
    newest = segment_files(path)[-1]
    for head in flipped(newest, "head", range(5)):
        with pytest.raises(DamagedQueue, match=r"head|message"):
            stored(path)
        assert [fault for checked in check(url_of(path)) for fault in checked.faults]
        with log_reader(path, "damaged=skip") as reader:
            assert len(list(reader.available())) <= 20
            assert reader.statistics().lost, head
    assert stored(path) == PAYLOADS


@pytest.mark.parametrize("prepare", [after_power_failure, lambda _: None], ids=["cut", "whole"])
def test_a_writer_restores_the_head_of_the_newest_segment(
    path: Path, prepare: Callable[[Path], object], tmp_path: Path
) -> None:
    for _ in flipped(segment_files(path)[-1], "head", range(2, 3)):  # 16: as if it were empty
        copy = Path(shutil.copytree(path, tmp_path / "copy"))
        prepare(copy)
        with log_writer(copy, "") as writer:
            assert writer.write(b"new") == 20
        assert stored(copy) == [*PAYLOADS, b"new"]


def test_a_flipped_bit_of_what_protects_the_head_changes_nothing(
    path: Path, tmp_path: Path
) -> None:
    for _ in flipped(segment_files(path)[-1], "head_check"):
        assert stored(path) == PAYLOADS
        assert not [fault for checked in check(url_of(path)) for fault in checked.faults]
        copy = Path(shutil.copytree(path, tmp_path / "copy"))
        with log_writer(copy, "") as writer:
            assert writer.write(b"new") == 20
        assert stored(copy) == [*PAYLOADS, b"new"]
        shutil.rmtree(copy)


# --- whatever happened --------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_became_of_the_last_segment_the_log_opens_and_counts(data: st.DataObject) -> None:
    """Flip, zero and cut anything: what is read is what was written, and all is accounted for."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-", dir="/dev/shm") as folder:
        log = Path(folder) / "log"
        with log_writer(log) as writer:
            writer.write_many(PAYLOADS)
        last = segment_files(log)[-1]
        size = last.stat().st_size
        for _ in range(data.draw(st.integers(1, 3))):
            kind = data.draw(st.sampled_from(["flip", "zero", "cut", "rubbish"]))
            at = data.draw(st.integers(0, size - 1))
            if kind == "cut":
                with last.open("r+b") as segment:
                    segment.truncate(at)
                size = max(1, at)
                continue
            length = 1 if kind == "flip" else data.draw(st.integers(1, 4096))
            with last.open("r+b") as segment:
                segment.seek(at)
                old = segment.read(length)
                new = {
                    "flip": bytes(b ^ data.draw(st.integers(1, 255)) for b in old),
                    "zero": bytes(len(old)),
                    "rubbish": data.draw(st.binary(min_size=len(old), max_size=len(old))),
                }[kind]
                segment.seek(at)
                segment.write(new)
        after_power_failure(log)
        try:
            with log_writer(log, "") as writer:
                new_seq = writer.write(b"new")
        except Unsupported:
            return  # it says that it is of a newer version
        with log_reader(log, "damaged=skip") as reader:
            messages = list(reader.available())
            books = reader.statistics()
        assert messages[-1].payload == b"new"
        assert messages[-1].seq == new_seq >= 16
        assert [m.payload for m in messages[:-1]] == PAYLOADS[: len(messages) - 1]
        assert len(messages) - 1 >= 16
        assert books.messages + books.lost == new_seq + 1
        # What is left of the log is whole; only what is missing is named.
        faults = [fault for checked in check(url_of(log)) for fault in checked.faults]
        assert all("missing" in fault for fault in faults)


def test_a_log_that_is_open_is_not_recovered_by_a_reader(path: Path) -> None:
    with log_writer(path, "") as writer:
        file = open_segment(path, 16)
        before = file.field("head")
        with log_reader(path) as reader:
            list(reader.available())
        assert file.field("head") == before
        file.close()
        writer.write(b"x")


def test_the_sizes_of_this_test_are_what_it_says(path: Path) -> None:
    assert SMALL.startswith("segment=8k")
    assert [int(file.stem) for file in segment_files(path)] == [0, 8, 16]
    assert field(segment_files(path)[-1], "head") == 20


@pytest.mark.parametrize("rounds", [40, pytest.param(3000, marks=pytest.mark.full)])
def test_whatever_is_damaged_a_reader_that_skips_it_comes_to_an_end(
    rounds: int, tmp_path: Path
) -> None:
    """Each way to read, over headers, slots and bytes that changed: it ends, or says why not."""
    original, log = tmp_path / "original", tmp_path / "log"
    with log_writer(original) as writer:
        writer.write_many([bytes([i]) * SIZE for i in range(40)])
    for seed in range(rounds):
        chance = random.Random(seed)
        shutil.rmtree(log, ignore_errors=True)
        shutil.copytree(original, log)
        for _ in range(chance.choice((1, 1, 2, 4))):
            spoil(chance.choice(segment_files(log)), chance)
        for take in (
            lambda reader: sum(1 for _ in reader.available()),
            lambda reader: len(reader.read_many(7)),
            lambda reader: reader.read_batch(7).num_rows,
            lambda reader: reader.read(0) is not None,
        ):
            calls = 0
            with (
                contextlib.suppress(DamagedQueue, Unsupported),
                log_reader(log, "damaged=skip") as reader,
            ):
                while take(reader):
                    calls += 1
                    assert calls <= 50, f"seed {seed}"


def spoil(file: Path, chance: random.Random) -> None:
    """Change some bytes, more often where the header and the slots are."""
    size = file.stat().st_size
    area = chance.choice((512, PAGE + 8 * SLOT.size, size))
    at = chance.randrange(area) // 8 * 8
    value = chance.choice((0, 20, 33, 10**6, 2**40, 2**63, 2**64 - 1, chance.getrandbits(64)))
    overwrite(file, at, value.to_bytes(8, "little"))
