"""Readers of a group share a stream: what each gets, keeps, gives back and loses."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from penstock import Grouped, aio, create, describe, open_reader, open_writer
from penstock.cli.main import app
from penstock.core.batch import batch_from_messages
from penstock.core.dead_letter import DeadLetter
from penstock.core.endpoints import remove
from penstock.core.errors import (
    Closed,
    DamagedQueue,
    InvalidOption,
    LeaseLost,
    LockTimeout,
    PenstockError,
    Unsupported,
)
from penstock.core.overflow import DropReason
from penstock.queue import wait_any
from penstock.queue.groups import reader as groups_reader
from penstock.queue.groups import state_file
from penstock.queue.groups.leases import Leases
from penstock.queue.groups.reader import GroupReader
from penstock.queue.log.endpoint import trim_log
from penstock.queue.log.retention import GROUPS, Limits
from support.interruption import Interrupted, interrupted_at_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer
    from penstock.core.message import Message
    from penstock.queue.wide.reader import WideReader

LOG, RING = "log:{}?segment=8k&segment_slots=8", "fmq:{}?slots=64&size=64k"


@pytest.fixture(params=[LOG, RING], ids=["log", "ring"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    made: str = request.param.format(tmp_path / "stream")
    create(made)
    return made.partition("?")[0]


@pytest.fixture
def writer(url: str) -> Iterator[Writer]:
    with open_writer(url) as opened:
        yield opened


def member(url: str, **options: Any) -> GroupReader:
    reader = open_reader(url, group=options.pop("group", "us"), **options)
    assert isinstance(reader, GroupReader)
    return reader


def numbers(messages: Iterable[Message]) -> list[int]:
    return [message.seq for message in messages]


def fill(writer: Writer, count: int) -> None:
    writer.write_many(b"message %d" % number for number in range(count))


def command(*arguments: str) -> str:
    return CliRunner().invoke(app, arguments, catch_exceptions=False).stdout


# --- sharing ------------------------------------------------------------------------------------


def test_each_message_goes_to_one_reader(url: str, writer: Writer) -> None:
    fill(writer, 20)
    with member(url) as one, member(url) as two, member(url, group="others") as other:
        shared = [one.read_many(7), two.read_many(7), one.read_many(7)]
        assert [numbers(part) for part in shared] == [
            [*range(7)],
            [*range(7, 14)],
            [*range(14, 20)],
        ]
        assert two.read_many(7) == []
        assert numbers(other.read_many(100)) == [*range(20)]
        one.ack(shared[0])
        one.ack(iter(shared[2]))
        two.ack(shared[1][0])
        assert two.group()[2:9] == (8, 6, 6, 0, 14, 0, 0)
        two.acknowledge()
        assert one.group()[1:9] == (20, 20, 0, 0, 0, 20, 0, 0)
        assert other.group().leased == 20


def test_a_batch_is_acknowledged_as_it_came(url: str, writer: Writer) -> None:
    fill(writer, 5)
    with member(url) as reader:
        batch = reader.read_batch(3)
        reader.ack(batch)
        assert (reader.group().acked, reader.group().lag) == (3, 2)
        reader.nack(reader.read_batch(3))
        assert (reader.group().leased, reader.group().waiting) == (0, 2)


def test_a_group_begins_where_its_first_reader_does(url: str, writer: Writer) -> None:
    fill(writer, 5)
    with open_reader(url, "end", group="us") as reader:
        assert reader.read(0) is None
        writer.write(b"new")
        with open_reader(url, "start", group="us") as other:
            message = other.read(0)
    assert message is not None
    assert message.payload == b"new"


def test_a_group_goes_on_where_it_was(url: str, writer: Writer) -> None:
    fill(writer, 9)
    with member(url) as reader:
        reader.ack(reader.read_many(3))
        reader.read_many(3)
    with member(url) as reader:
        assert numbers(reader.read_many(100)) == [*range(3, 9)]
        assert reader.group().redelivered == 3


def test_a_reader_that_waits_is_woken(url: str, writer: Writer) -> None:
    with member(url) as reader:
        timer = threading.Timer(0.1, lambda: writer.write(b"now"))
        timer.start()
        began = time.monotonic()
        message = reader.read(timeout=10)
        assert message is not None
        assert time.monotonic() - began < 5
        timer.join()
        assert reader.read(timeout=0.05) is None


def test_waiting_for_many_acknowledges_nothing(url: str, writer: Writer) -> None:
    fill(writer, 4)
    with member(url) as reader:
        reader.read_many(2)
        assert wait_any([reader], timeout=5) == [reader]
        assert reader.group().leased == 2


def test_one_place_cannot_be_moved_by_one_reader(url: str) -> None:
    with member(url) as reader, pytest.raises(Unsupported, match="share one place"):
        reader.seek(0)


def test_a_closed_reader_says_so(url: str, writer: Writer) -> None:
    fill(writer, 1)
    reader = member(url)
    message = reader.read(0)
    assert message is not None
    reader.close()
    reader.close()
    for call in (lambda: reader.read(0), lambda: reader.ack(message), reader.group):
        with pytest.raises(Closed):
            call()
    assert reader.statistics().messages == 1


# --- delivered again ----------------------------------------------------------------------------


def test_a_message_comes_again_when_the_lease_runs_out(url: str, writer: Writer) -> None:
    fill(writer, 3)
    with member(url, lease="0.3s") as slow, member(url) as quick:
        messages = slow.read_many(2)
        quick.ack(quick.read_many(1))
        again = quick.read_many(5, timeout=5)
        assert numbers(again) == [0, 1]
        with pytest.raises(LeaseLost, match="2 messages") as caught:
            slow.ack(messages)
        assert (caught.value.ranges, caught.value.count) == (((0, 1),), 2)
        quick.ack(again)
        assert (slow.group().acked, slow.group().redelivered) == (3, 2)


@pytest.mark.parametrize("key", [None, "type"])
def test_a_late_acknowledgement_counts_for_what_another_did_not_get(
    url: str, writer: Writer, key: str | None
) -> None:
    for type in range(10):
        writer.write(b"x", type)
    ordered = {} if key is None else {"key": key}
    with member(url, lease="0.2s", **ordered) as slow, member(url, **ordered) as quick:
        messages = slow.read_many(10)
        assert numbers(quick.read_many(1, timeout=5)) == [0]
        with pytest.raises(LeaseLost) as caught:
            slow.ack(messages)
        assert caught.value.ranges == ((0, 0),)
        assert (slow.group().acked, slow.group().redelivered) == (9, 1)


def test_a_late_acknowledgement_counts_if_nobody_has_it(url: str, writer: Writer) -> None:
    fill(writer, 1)
    with member(url, lease="10ms") as slow:
        message = slow.read(0)
        assert message is not None
        time.sleep(0.05)
        slow.ack(message)
        with pytest.raises(LeaseLost):
            slow.ack(message)
        assert slow.group().acked == 1


def test_a_message_comes_again_after_a_delay(url: str, writer: Writer) -> None:
    fill(writer, 4)
    with member(url) as one, member(url) as two:
        messages = one.read_many(3)
        one.nack(messages[0], delay=0.3)
        one.nack(messages[1:2])
        assert numbers(two.read_many(10)) == [1, 3]
        began = time.monotonic()
        assert numbers(two.read_many(10, timeout=5)) == [0]
        assert 0.1 < time.monotonic() - began < 3


def test_what_a_dead_process_had_comes_again(url: str, writer: Writer) -> None:
    fill(writer, 6)
    script = (
        "import sys, penstock\n"
        "reader = penstock.open_reader(sys.argv[1], group='us')\n"
        "reader.ack(reader.read_many(2)); reader.read_many(2)\n"
        "print('has', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    with process.stdout, process.stdin, member(url) as reader:
        assert process.stdout.readline() == b"has\n"
        assert numbers(reader.read_many(10)) == [4, 5]
        process.kill()
        process.wait()
        assert numbers(reader.read_many(10, timeout=5)) == [2, 3]
        assert reader.group().members == 1


@pytest.mark.parametrize("key", [None, "type"])
@pytest.mark.parametrize("has_leased", [True, False])
def test_what_an_interrupted_read_leased_is_not_acknowledged(
    url: str, writer: Writer, key: str | None, has_leased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(writer, 6)
    take = Leases.take

    def interrupted(*given: Any) -> None:
        if has_leased:
            take(*given)
        raise KeyboardInterrupt

    with member(url, key=key) as reader:
        got = numbers(reader.read_many(2))
        with monkeypatch.context() as patch:
            patch.setattr(Leases, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                reader.read_many(2)
        reader.acknowledge()
        assert reader.group().acked == 2
        assert [*got, *numbers(reader.read_many(9))] == [*range(6)]
        assert reader.group().redelivered == 0


@pytest.mark.parametrize("key", [None, "type"])
@pytest.mark.parametrize("waits", [True, False])
def test_only_a_batch_that_its_reader_got_is_acknowledged(
    url: str, writer: Writer, key: str | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes while messages that are leased are made a batch."""

    def interrupted(messages: Iterable[Message], **given: Any) -> Batch:
        if messages := list(messages):
            raise KeyboardInterrupt
        return batch_from_messages(messages, **given)

    with member(url, key=key) as reader:
        if waits:
            monkeypatch.setattr(reader, "_pause", lambda _: fill(writer, 6))
        else:
            fill(writer, 6)
        got: list[int] = []
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(groups_reader, "batch_from_messages", interrupted)
            got = reader.read_batch(6, timeout=5).column("seq").to_pylist()
        assert reader.statistics().messages == len(got)
        reader.acknowledge()
        assert reader.group().acked == len(got)
        assert [*got, *numbers(reader.read_many(9))] == [*range(6)]


def test_an_interrupted_turn_blocks_no_other_member(
    url: str, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_PATIENCE", 0.0)
    with member(url) as one, member(url) as other:
        for call in itertools.count(1):
            writer.write(b"a")
            messages = one.read_many(1)
            try:
                with interrupted_at_call(call, "penstock/queue"):
                    one.ack(messages)
            except Interrupted as place:
                where = str(place)
            else:
                break
            try:
                other.group()
            except LockTimeout:
                pytest.fail(f"after an interrupt at {where}")
        assert call > 20, "it makes more than that"


def test_what_an_interrupted_read_passed_is_read_again_and_not_lost(
    url: str, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(writer, 6)
    read = groups_reader._messages

    def interrupted(stream: WideReader, limit: int) -> list[Message]:
        read(stream, limit)
        raise KeyboardInterrupt

    with member(url) as reader:
        reader.ack(reader.read_many(2))
        with monkeypatch.context() as patch:
            patch.setattr(groups_reader, "_messages", interrupted)
            with pytest.raises(KeyboardInterrupt):
                reader.read_many(2)
        assert numbers(reader.read_many(9)) == [*range(2, 6)]
        assert reader.group().lost == 0


# --- waiting for a group ------------------------------------------------------------------------


def test_messages_that_are_not_due_end_no_wait(url: str, writer: Writer) -> None:
    fill(writer, 2)
    with member(url) as reader:
        reader.nack(reader.read_many(2), delay=0.3)
        assert wait_any([reader], timeout=0) == []
        assert wait_any([reader], timeout=20) == [reader]
        assert numbers(reader.read_many(9)) == [0, 1]


def test_messages_whose_key_another_member_has_end_no_wait(url: str, writer: Writer) -> None:
    fill(writer, 3)
    with member(url, key="type") as one, member(url, key="type") as other:
        messages = one.read_many(1)
        assert wait_any([other], timeout=20) == [other]
        assert other.read_many(9) == [], "they wait for the first of their key"
        assert wait_any([other], timeout=0) == []
        one.ack(messages)
        assert wait_any([other], timeout=20) == [other]
        assert numbers(other.read_many(9)) == [1, 2]


def test_a_lease_that_is_over_ends_a_wait(url: str, writer: Writer) -> None:
    fill(writer, 2)
    with member(url, lease="200ms") as one, member(url) as other:
        one.read_many(2)
        assert wait_any([other], timeout=0) == []
        assert wait_any([other], timeout=20) == [other]
        assert numbers(other.read_many(9)) == [0, 1]


def test_a_stream_that_was_created_anew_ends_a_wait_of_its_group(url: str) -> None:
    with open_writer(url) as writer:
        fill(writer, 5)
    with member(url) as reader:
        reader.ack(reader.read_many(5))
        create(url, replace=True)
        with open_writer(url) as writer:
            fill(writer, 2)
            assert wait_any([reader], timeout=20) == [reader]
            assert numbers(reader.read_many(9)) == [0, 1]
            assert wait_any([reader], timeout=0) == []


def test_a_stream_removed_unread_and_created_anew_ends_a_wait_of_its_group(url: str) -> None:
    with open_writer(url) as writer:
        fill(writer, 5)
    with member(url) as reader:
        reader.ack(reader.read_many(2))
        remove(url, force=True)  # with the files of its groups
        assert wait_any([reader], timeout=0.2) == [], "there is nothing to read"
        with open_writer(url) as writer:
            fill(writer, 2)
            assert wait_any([reader], timeout=20) == [reader]
            assert numbers(reader.read_many(9)) == [0, 1]
            assert wait_any([reader], timeout=0) == []
            assert reader.statistics().lost == 3


# --- order --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["type", "subtype", "attributes"])
def test_messages_of_a_key_stay_in_order(url: str, writer: Writer, key: str) -> None:
    for number in range(12):
        writer.write(b"", number % 3, number % 3, attributes=b"key %d" % (number % 3))
    with member(url, key=key) as one, member(url, key=key) as two, member(url, key=key) as three:
        first = one.read_many(2)
        assert numbers(first) == [0, 1]
        assert numbers(two.read_many(3)) == [2, 5, 8], "only of a key that nobody has"
        assert three.read_many(9) == []
        assert numbers(one.read_many(3)) == [3, 4, 6], "its own keys come to the one that has them"
        one.nack(first[0], delay=0.2)
        assert numbers(one.read_many(9)) == [7, 10], "later ones wait for the one that waits"
        assert numbers(one.read_many(1, timeout=5)) == [0]
        one.acknowledge()
        assert numbers(three.read_many(9)) == [9]
        assert three.group().waiting == 1


def test_members_agree_on_the_key(url: str) -> None:
    with member(url, key="type"), pytest.raises(InvalidOption, match="has key=type"):
        member(url, key="subtype")


# --- dead letters -------------------------------------------------------------------------------


def test_a_message_that_is_delivered_too_often_is_put_aside(
    url: str, writer: Writer, tmp_path: Path
) -> None:
    fill(writer, 3)
    dead = f"log:{tmp_path}/dead"
    with member(url, deliveries=2, dead=dead) as reader:
        for _ in range(2):
            messages = reader.read_many(3)
            assert numbers(messages) == [0, 1, 2] if messages[0].seq == 0 else [0, 2]
            reader.nack(messages)
        writer.write(b"good")
        assert numbers(reader.read_many(3)) == [3]
        assert (reader.group().dead, reader.group().redelivered) == (3, 3)
    with open_reader(dead) as letters:
        found = [DeadLetter.from_message(message) for message in letters.available()]
    assert [letter.original.payload for letter in found] == [b"message %d" % n for n in range(3)]
    assert {(letter.attempts, letter.receiver) for letter in found} == {(2, f"{url}?group=us")}


def test_messages_are_not_put_aside_where_the_reasons_would_be_lost(
    url: str, writer: Writer, tmp_path: Path
) -> None:
    fill(writer, 1)
    dead = f"fmq:{tmp_path}/dead?layout=classic"
    with pytest.raises(InvalidOption, match="it keeps no attributes") as caught:
        member(url, deliveries=1, dead=dead)
    assert caught.value.option == "dead"


def test_nothing_is_put_aside_before_the_letter_is_stored(
    url: str, writer: Writer, tmp_path: Path
) -> None:
    fill(writer, 2)
    (tmp_path / "dead").write_bytes(b"not a log")
    with member(url, deliveries=1, dead=f"log:{tmp_path}/dead") as reader:
        reader.nack(reader.read_many(1))
        assert numbers(reader.read_many(9)) == [1], "the others go on"
        assert (reader.group().dead, reader.group().waiting) == (0, 1)


# --- losses -------------------------------------------------------------------------------------


def test_what_retention_removes_is_counted_once(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/stream"
    with open_writer(f"{url}?segment=8k&segment_slots=8&sync=none") as writer:
        fill(writer, 40)
        with member(url) as one, member(url) as two:
            kept = one.read_many(4)
            two.nack(two.read_many(2))
            trim_log(url, Limits(before_seq=24))
            assert numbers(two.read_many(100)) == [*range(24, 40)]
            one.ack(kept)
            assert one.read_many(9) == two.read_many(9) == []
            lost = [(loss.first, loss.last, loss.reason) for loss in two.group().losses]
            assert lost == [(4, 23, DropReason.RETENTION)]
            assert (one.statistics().lost, two.statistics().lost) == (0, 20)
            two.acknowledge()
            books = one.group()
    assert (books.acked, books.lost, books.lag) == (20, 20, 0)


@pytest.mark.parametrize("by", ["one", "many", "batch"])
def test_a_member_reads_on_after_retention_has_removed_the_segment_it_had_open(
    tmp_path: Path, by: str
) -> None:
    url = f"log:{tmp_path}/stream"
    with open_writer(f"{url}?segment=8k&segment_slots=8&sync=none") as writer:
        fill(writer, 8)
        with member(url) as reader:
            reader.ack(reader.read_many(100))
            fill(writer, 16)
            trim_log(url, Limits(before_seq=16))
            reads: dict[str, Callable[[], Sequence[object]]] = {
                "one": lambda: [reader.read(0)],
                "many": lambda: reader.read_many(100),
                "batch": lambda: reader.read_batch(100).column("seq"),
            }
            found = reads[by]()
            assert len(found) == (1 if by == "one" else 8)
            assert found[0] is not None
            assert reader.statistics().lost == 8


def test_a_held_group_loses_nothing(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/stream"
    options = "segment=8k&segment_slots=8&sync=none&hold=group:us"
    with open_writer(f"{url}?{options}") as writer:
        fill(writer, 40)
        assert trim_log(url, Limits(before_seq=24)).held_by == "group:us"
        with member(url, sync="batch") as reader:
            first = reader.read_many(9)
            reader.ack(first[:8])
            time.sleep(0.25)
            reader.ack(first[8])
            assert trim_log(url, Limits(before_seq=24)).segments == 1
            reader.ack(reader.read_many(100))
        assert trim_log(url, Limits(before_seq=24)).segments == 2
        assert describe(url).details["groups"][0]["lost"] == 0


def test_what_a_ring_overwrites_is_counted_once(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/stream"
    with open_writer(f"{url}?slots=16&size=16k") as writer, member(url) as one, member(url) as two:
        fill(writer, 4)
        assert numbers(one.read_many(2)) == [0, 1]
        fill(writer, 96)
        assert numbers(two.read_many(100)) == [*range(84, 100)]
        assert two.statistics().losses[0].reason is DropReason.OVERRUN
        two.acknowledge()
        one.acknowledge()
        books = one.group()
        assert (books.acked, books.lost, books.lag) == (18, 82, 0)
        assert (one.statistics().lost, two.statistics().lost) == (0, 82)


def test_what_waits_and_is_overwritten_is_lost(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/stream"
    with open_writer(f"{url}?slots=16&size=16k") as writer, member(url) as one:
        fill(writer, 8)
        one.nack(one.read_many(8))
        fill(writer, 12)
        assert numbers(one.read_many(100)) == [*range(4, 20)]
        assert [(x.first, x.last) for x in one.statistics().losses] == [(0, 3)]


def test_what_is_overwritten_is_lost_to_an_ordered_group(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/stream"
    with open_writer(f"{url}?slots=16&size=16k") as writer, member(url, key="type") as one:
        fill(writer, 40)
        assert numbers(one.read_many(100)) == [*range(24, 40)]
        assert [(x.first, x.last) for x in one.statistics().losses] == [(0, 23)]
        one.acknowledge()
        assert (one.group().acked, one.group().lag) == (16, 0)


def test_a_damaged_message_is_an_error_or_a_loss(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/stream"
    with open_writer(f"{url}?segment=8k&segment_slots=8&sync=none") as writer:
        fill(writer, 8)
    (segment,) = (tmp_path / "stream").glob("*.fmq")
    data = bytearray(segment.read_bytes())
    at = data.index(b"message 5")
    data[at] ^= 0xFF
    segment.write_bytes(data)
    with member(url) as strict:
        assert numbers(strict.read_many(100)) == [*range(5)]
        for _ in range(2):
            with pytest.raises(DamagedQueue):
                strict.read_many(100)
        assert (strict.group().leased, strict.group().waiting) == (5, 3)
        with member(url, damaged="skip") as other:
            assert numbers(other.read_many(100)) == [6, 7]
            assert other.group().lost == 1
            assert other.statistics().losses[0].reason is DropReason.DAMAGED


def test_a_damaged_message_is_lost_to_an_ordered_group(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/stream"
    with open_writer(f"{url}?segment=8k&segment_slots=8&sync=none") as writer:
        fill(writer, 8)
    (segment,) = (tmp_path / "stream").glob("*.fmq")
    data = segment.read_bytes()
    for number in (3, 7):
        data = data.replace(b"message %d" % number, b"MESSAGE %d" % number)
    segment.write_bytes(data)
    with member(url, damaged="skip", key="type") as reader:
        assert numbers(reader.read_many(2)) == [0, 1]
        assert numbers(reader.read_many(100)) == [2]
        assert numbers(reader.read_many(100)) == [4, 5, 6]
        assert reader.read_many(100) == []
        assert [(x.first, x.last) for x in reader.statistics().losses] == [(3, 3), (7, 7)]
        reader.acknowledge()
        assert reader.group().lag == 0


@pytest.mark.parametrize("options", [{}, {"key": "type"}], ids=["", "ordered"])
def test_a_stream_created_anew_is_read_from_its_start(url: str, options: dict[str, str]) -> None:
    with open_writer(url) as writer:
        fill(writer, 10)
    with member(url, **options) as one, member(url, **options) as two:
        two.ack(two.read_many(2))
        old = one.read_many(4)
        with open_writer(url, create="always") as writer:
            writer.write(b"new")
            again = [message.payload for message in two.read_many(9, timeout=10)]
            if again[-1] != b"new":  # a ring that was removed is read to its end
                again += [message.payload for message in two.read_many(9, timeout=10)]
            assert again[-1] == b"new"
            with pytest.raises(LeaseLost):
                one.ack(old[1:])
            assert one.group().acked == 2
            assert one.group().lost >= 4


@pytest.mark.parametrize("is_removed", [False, True], ids=["replaced", "removed"])
@pytest.mark.parametrize("options", [{}, {"key": "type"}], ids=["", "ordered"])
def test_what_a_stream_made_anew_has_removed_already_is_lost_for_its_group(
    url: str, options: dict[str, str], is_removed: bool
) -> None:
    is_log = url.startswith("log:")
    small = "segment_slots=8&segment=64k&sync=none" if is_log else "slots=8&size=64k"
    with open_writer(f"{url}?{small}&create=always") as writer:
        fill(writer, 4)
    with member(url, **options) as reader:
        reader.ack(reader.read_many(4))
        if is_removed:
            remove(url, force=True)
        with open_writer(f"{url}?{small}&create=always") as writer:
            fill(writer, 20)
            if is_log:
                trim_log(url, Limits(before_seq=16))
            oldest = 20 - describe(url).count
            came: list[int] = []
            while not came or came[-1] < 19:
                messages = reader.read_many(20, timeout=10)
                assert messages
                came += numbers(messages)
            reader.acknowledge()
            assert came == list(range(oldest, 20))
            assert oldest > 10
            assert (reader.statistics().lost, reader.group().lost) == (oldest, oldest)
            assert reader.statistics().restarts == 1
            group = reader.group()
            assert group.acked == 20 - oldest + (0 if is_removed else 4)
            assert group.lag == 0


def test_a_stream_that_is_removed_with_its_groups_is_waited_for_and_read_when_it_is_back(
    url: str,
) -> None:
    with open_writer(url) as writer:
        fill(writer, 3)
    with member(url, wait="60s") as one, member(url, start="end") as two:
        one.ack(one.read_many(1))
        remove(url, force=True)
        began = time.monotonic()
        for reader in (one, two, one, two):
            assert reader.read_many(5, timeout=0.1) == []
            assert reader.statistics().messages == (1 if reader is one else 0)
        assert time.monotonic() - began < 10, "it waits for the stream, in its turn"
        with open_writer(url) as writer:
            writer.write_many([b"a", b"b"])
        came = [*one.read_many(1, timeout=10), *two.read_many(1, timeout=10)]
        assert [message.payload for message in came] == [b"a", b"b"]
        books = one.statistics(), two.statistics()
        assert sum(book.lost for book in books) == 2
        assert sum(book.restarts for book in books) == 1


def test_nothing_counts_as_lost_when_all_was_read_before_the_stream_was_created_anew(
    url: str,
) -> None:
    with open_writer(url) as writer:
        fill(writer, 3)
    with member(url) as reader:
        reader.ack(reader.read_many(3))
        with open_writer(url, create="always") as writer:
            fill(writer, 20)
        came: list[int] = []
        while len(came) < 20:
            messages = reader.read_many(20, timeout=10)
            assert messages
            came += numbers(messages)
        assert came == list(range(20))
        assert (reader.statistics().lost, reader.group().lost) == (0, 0)


def test_who_leaves_a_group_that_was_removed_just_leaves(url: str, writer: Writer) -> None:
    fill(writer, 3)
    with member(url) as reader:
        assert len(reader.read_many(2)) == 2
        writer.close()
        remove(url, force=True)


def test_a_group_that_was_removed_begins_anew(url: str, writer: Writer, tmp_path: Path) -> None:
    fill(writer, 3)
    with member(url) as reader:
        reader.ack(reader.read_many(3))
        for path in tmp_path.rglob("us.*"):
            path.unlink()
        assert numbers(reader.read_many(9)) == [0, 1, 2]


def test_a_member_that_has_no_place_for_its_group_closes_its_log(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/log"
    create(url)
    (tmp_path / "log" / GROUPS).write_bytes(b"not a folder")
    open_files = Path("/proc/self/fd")
    before = sum(1 for _ in open_files.iterdir())
    with pytest.raises(PenstockError) as caught:
        member(url)
    assert sum(1 for _ in open_files.iterdir()) == before
    assert GROUPS in str(caught.value)


def test_a_damaged_state_is_named(url: str, writer: Writer, tmp_path: Path) -> None:
    fill(writer, 1)
    member(url).close()
    (path,) = tmp_path.rglob("us.state")
    path.write_bytes(b"nonsense")
    with pytest.raises(DamagedQueue, match="magic") as caught:
        member(url)
    assert "begins anew" in str(caught.value.hint)
    (group,) = describe(url).details["groups"]
    assert "magic" in group["damage"]


def test_a_record_of_no_known_kind_is_named_with_its_place(
    url: str, writer: Writer, tmp_path: Path
) -> None:
    fill(writer, 1)
    member(url).close()
    (path,) = tmp_path.rglob("us.state")
    data = path.read_bytes()
    body = b"\xff of no kind"
    # The checksum of a record goes on from that of the checkpoint and the bodies before it.
    at = 52 + int.from_bytes(data[16:20], "little")
    checksum = zlib.crc32(data[:at])
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        checksum = zlib.crc32(data[at + 8 : at + 8 + length], checksum)
        at += 8 + length
    path.write_bytes(data + struct.pack("<II", len(body), zlib.crc32(body, checksum)) + body)
    with pytest.raises(DamagedQueue, match="a record") as caught:
        member(url)
    assert caught.value.offset == len(data)
    (group,) = describe(url).details["groups"]
    assert "a record" in group["damage"]


# --- what people see ----------------------------------------------------------------------------


def test_info_shows_groups(url: str, writer: Writer) -> None:
    fill(writer, 10)
    with member(url) as reader:
        reader.ack(reader.read_many(3))
        reader.read_many(4)
        said = command("info", url)
        (group,) = json.loads(command("info", url, "--json"))["details"]["groups"]
    assert "redelivered" in said
    wanted = {"name": "us", "lag": 7, "leased": 4, "waiting": 0, "acked": 3, "redelivered": 0}
    assert {name: group[name] for name in wanted} == wanted
    (one,) = group["members"]
    assert (one["pid"], one["alive"], one["leased"]) == (os.getpid(), True, 4)


def test_cat_takes_its_share(url: str, writer: Writer) -> None:
    fill(writer, 10)
    for share in (range(4), range(4, 8)):
        said = command("cat", f"{url}?group=us", "--raw", "-n4")
        assert said == "".join(f"message {number}" for number in share)


def test_cp_takes_its_share(url: str, writer: Writer, tmp_path: Path) -> None:
    fill(writer, 10)
    copy = f"log:{tmp_path}/copy"
    with member(url) as other:
        assert len(other.read_many(4)) == 4
        for _ in range(2):
            command("cp", f"{url}?group=us", copy)
        assert (other.group().acked, other.group().lag) == (6, 4)
    with open_reader(copy) as reader:
        found = [message.payload for message in reader.available()]
    assert found == [b"message %d" % number for number in range(4, 10)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lease": "5s"}, "is for a group"),
        ({"group": "a/b"}, "group"),
        ({"group": "us", "type": 5}, "share all messages"),
        ({"group": "us", "deliveries": 3}, "belong together"),
        ({"group": "us", "dead": "log:/x"}, "belong together"),
        ({"group": "us", "key": "payload"}, "key"),
        ({"group": "us", "lease": "0s"}, "lease"),
    ],
)
def test_options_that_do_not_fit_are_refused(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        open_reader(url, **options)


def test_tasks_acknowledge(url: str, writer: Writer) -> None:
    fill(writer, 6)

    async def work() -> None:
        async with aio.open_reader(url, group="us") as reader:
            messages = await reader.read_many(4)
            await reader.ack(messages[:3])
            await reader.nack(messages[3])
            assert numbers(await reader.read_many(9)) == [3, 4, 5]

    asyncio.run(work())
    with member(url) as reader:
        assert isinstance(reader, Grouped)
        assert (reader.group().acked, reader.group().waiting) == (3, 3)
