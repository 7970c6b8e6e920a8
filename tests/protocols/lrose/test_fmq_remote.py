"""A remote queue is read and written as a local one, behind a server of ours or of LROSE's."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import wait_any
from penstock.core.batch import messages_from_batch
from penstock.core.endpoints import create, describe, open_reader, open_writer
from penstock.core.errors import (
    AlreadyExists,
    Closed,
    ConnectionLost,
    InvalidOption,
    Malformed,
    MessageTooLarge,
    NotFound,
    PositionError,
)
from penstock.core.interfaces import Bounds, Reader
from penstock.core.message import Message
from penstock.core.overflow import DropReason
from penstock.protocols.lrose.ds_client import RequestRefused
from penstock.protocols.lrose.fmq_reader import FmqReader
from penstock.protocols.lrose.fmq_server import FmqServer
from penstock.protocols.lrose.fmq_writer import UNKNOWN, FmqWriter
from penstock.queue.classic.layout import Status
from protocols.lrose.serving import LroseFmq, served
from support.interruption import Interrupted, interrupted_at_call, interrupted_at_line, take


def numbers(messages: object) -> list[int]:
    return [message.seq for message in messages]  # type: ignore[attr-defined]


def test_what_is_written_is_read_with_its_type_and_time(either: str, queue_name: str) -> None:
    url = f"{either}/{queue_name}"
    before = time.time_ns() // 10**9
    with open_writer(url) as writer:
        last = writer.write(b"one", 5, -7)
        assert writer.write(b"", 1) == (1 if last == 0 else UNKNOWN)
        writer.write(memoryview(b"three"))
        writer.write_many([b"x" * n for n in range(30)], 2, 3)
        assert writer.statistics().messages == 33
        assert writer.statistics().bytes == 8 + sum(range(30))
    with open_reader(url) as reader:
        found = list(reader.available())
        assert numbers(found) == list(range(33))
        assert (found[0].type, found[0].subtype, found[0].payload) == (5, -7, b"one")
        assert [m.payload for m in found[1:4]] == [b"", b"three", b""]
        assert before <= found[0].created_ns // 10**9 <= time.time_ns() // 10**9 + 1
        assert reader.statistics().messages == 33
        assert reader.statistics().lost == 0


@pytest.mark.parametrize("compress", ["gzip", "bzip2", "none"])
def test_compressed_messages_pass_through_as_they_are(
    either: str, fmq_root: Path, queue_name: str, compress: str
) -> None:
    url = f"{either}/{queue_name}"
    payloads = [b"", b"a", b"ab" * 5000, bytes(range(256)) * 40]
    with open_writer(url, compress=compress) as writer:
        writer.write(payloads[0])
        writer.write_many(payloads[1:])
    info = describe(f"fmq:{fmq_root}/{queue_name}")
    assert info.details["compressed"] == 4
    for where in (url, f"fmq:{fmq_root}/{queue_name}"):
        with open_reader(where) as reader:
            assert [m.payload for m in reader.available()] == payloads


def test_a_batch_keeps_types_and_with_our_server_its_seconds(
    either: str, fmq_server: FmqServer, queue_name: str
) -> None:
    source, target = f"{either}/{queue_name}", f"{either}/{queue_name}-2"
    with open_writer(source) as writer:
        for n in range(700):
            writer.write(b"%d" % n, n, n + 1, time_ns=(1_000_000_000 + n) * 10**9)
    with open_reader(source) as reader, open_writer(target) as writer:
        while batch := reader.read_batch(300):
            if not len(batch):
                break
            writer.write_batch(batch)
    with open_reader(target) as reader:
        found = list(messages_from_batch(reader.read_batch(10_000)))
        while more := reader.read_many(1000):
            found += more
    assert [(m.type, m.subtype, m.payload) for m in found] == [
        (n, n + 1, b"%d" % n) for n in range(700)
    ]
    if either == fmq_server.url:
        assert [m.time_ns for m in found] == [(1_000_000_000 + n) * 10**9 for n in range(700)]


def test_a_reader_goes_where_it_is_told(either: str, queue_name: str) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url) as writer:
        writer.write_many([b"%d" % n for n in range(250)])
        for start, first in (("start", 0), ("last", 249), ("end", None), (100, 100), (250, None)):
            with open_reader(url, start) as reader:
                message = reader.read(0)
                assert (message.seq if message else None) == first, start
        with open_reader(url, "end") as reader:
            writer.write(b"new")
            assert [m.payload for m in reader.available()] == [b"new"]
            reader.seek(249)
            assert numbers(reader.read_many(10)) == [249, 250]
            reader.seek("start")
            assert numbers(reader.read_many(2)) == [0, 1]
            with pytest.raises(PositionError):
                reader.seek(252)
            assert reader.statistics().lost == 0


def test_a_reader_finds_a_time_to_the_second(fmq_root: Path, either: str, queue_name: str) -> None:
    second = 1_700_000_000
    with open_writer(f"fmq:{fmq_root}/{queue_name}?layout=classic") as writer:
        for n in range(300):
            writer.write(b"", time_ns=(second + n // 10) * 10**9)
    url = f"{either}/{queue_name}"
    for moment, first in ((0, 0), (5, 50), (29, 290), (30, None)):
        with open_reader(url, f"2023-11-14T22:13:{20 + moment:02}Z") as reader:
            message = reader.read(0)
            assert (message.seq if message else None) == first
            assert reader.statistics().lost == 0


def test_bounds_say_what_can_be_read_again(either: str, queue_name: str) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url, slots=10) as writer, open_reader(url) as reader:
        assert reader.bounds() == Bounds(0, 0, 0)
        assert reader.newest_seq() is None
        writer.write_many([b"x"] * 25)
        assert reader.bounds() == Bounds(0, 15, 25)
        assert reader.newest_seq() == 24
    info = describe(url)
    assert (info.oldest_seq, info.youngest_seq, info.count) == (15, 24, 10)


def test_what_is_overwritten_is_counted_exactly_and_the_rest_is_read(
    either: str, queue_name: str
) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url, slots=10) as writer, open_reader(url) as reader:
        writer.write_many([b"x"] * 4)
        assert numbers(reader.read_many(4)) == [0, 1, 2, 3]
        writer.write_many([b"x"] * 20)
        found = []
        while message := reader.read(0):
            found.append(message.seq)
        # LROSE's server jumps to 23; those that are still there are looked for.
        assert found == list(range(14, 24))
        books = reader.statistics()
        assert books.lost == 10
        assert [(loss.first, loss.last, loss.reason) for loss in books.losses] == [
            (4, 13, DropReason.OVERRUN)
        ]
        assert books.messages + books.lost == 24


def read_on(reader: Reader, seen: list[int]) -> None:
    while messages := reader.read_many(100):
        seen += numbers(messages)


@pytest.mark.parametrize("overrun", [False, True])
@pytest.mark.parametrize("function", ["decode_messages", "make_messages"])
def test_what_an_interrupted_read_received_comes_with_the_next_one(
    either: str, queue_name: str, monkeypatch: pytest.MonkeyPatch, function: str, overrun: bool
) -> None:
    url = f"{either}/{queue_name}"

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with open_writer(url, slots=2000, size="2M") as writer, open_reader(url) as reader:
        writer.write_many([b"%d" % n for n in range(1500)])
        seen = numbers(reader.read_many(50))
        if overrun:
            read_on(reader, seen)
            writer.write_many([b"%d" % n for n in range(3000)])
        monkeypatch.setattr(f"penstock.protocols.lrose.fmq_client.{function}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_on(reader, seen)
        read_on(reader, seen)
        books = reader.statistics()
    if overrun:
        oldest = seen[1500]
        assert seen == [*range(1500), *range(oldest, 4500)]
        assert [(loss.first, loss.last) for loss in books.losses] == [(1500, oldest - 1)]
        assert books.lost == oldest - 1500
    else:
        assert seen == list(range(1500))
        assert books.lost == 0
    assert books.messages == len(seen)


# A connection that is just being made is left to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("by", ["many", "batch", "available"])
def test_a_read_that_is_interrupted_at_any_line_takes_nothing(
    fmq_server: FmqServer, queue_name: str, by: str
) -> None:
    url = f"{fmq_server.url}/{queue_name}"
    with open_writer(url) as writer:
        writer.write_many([b"%d" % i for i in range(30)])
    with open_reader(url) as reader:
        for line in itertools.count(1, 3):
            reader.seek("start")
            before = reader.statistics()
            found: list[int] = []
            where = ""
            try:
                with interrupted_at_line(line, "penstock/protocols/lrose"):
                    take(reader, by, found)
            except Interrupted as place:
                where = f"at {place}"
                take(reader, "many", found)
            after = reader.statistics()
            assert found == list(range(30)), where
            assert (after.messages - before.messages, after.lost) == (30, 0), where
            if not where:
                return


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), Malformed("reply", "it", "one", "none")])
def test_a_read_that_is_interrupted_is_no_outage_and_no_reconnect(
    fmq_server: FmqServer, queue_name: str, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def failing(*_: object) -> None:
        monkeypatch.undo()
        raise fault

    url = f"{fmq_server.url}/{queue_name}-{type(fault).__name__}"
    with open_writer(url) as writer, open_reader(url) as reader:
        assert isinstance(reader, FmqReader)
        writer.write(b"0")
        monkeypatch.setattr("penstock.protocols.lrose.fmq_client.decode_messages", failing)
        with pytest.raises(type(fault)):
            reader.read(5)
        assert numbers(reader.read_many(5, 5)) == [0]
        assert reader.reconnects == 0


# As above.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_seek_that_is_interrupted_at_any_call_loses_nothing(
    fmq_server: FmqServer, queue_name: str
) -> None:
    url = f"{fmq_server.url}/{queue_name}"
    with open_writer(url) as writer:
        writer.write_many([b"%d" % i for i in range(30)])
    with open_reader(url) as reader:
        for call in itertools.count(1):
            reader.seek("start")
            assert len(reader.read_many(5)) == 5
            where = ""
            try:
                with interrupted_at_call(call, "penstock/protocols/lrose"):
                    reader.seek(20)
            except Interrupted as place:
                where = f"at {place}"
            message = reader.read(5)
            assert message is not None, where
            assert message.seq == (5 if where else 20), where
            assert reader.statistics().lost == 0, where
            if not where:
                return


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_reader_whose_seek_failed_stays_where_it_was(tmp_path: Path, is_gone: bool) -> None:
    create(f"fmq:{tmp_path}/q?layout=classic")
    with open_writer(f"fmq:{tmp_path}/q") as writer:
        writer.write_many([b"%d" % n for n in range(600)])
    with served(tmp_path) as server:
        port = server.port
        reader = open_reader(f"{server.url}/q", retry="100ms")
        assert numbers(reader.read_many(10)) == list(range(10))
        if not is_gone:
            with pytest.raises(PositionError, match="5000"):
                reader.seek(5000)
    if is_gone:
        with pytest.raises(ConnectionLost):
            reader.seek(300)
    assert reader.statistics().next_seq == 10
    with served(tmp_path, port=port), reader:
        assert numbers(reader.available()) == list(range(10, 600))
        books = reader.statistics()
    assert (books.messages, books.lost, books.restarts) == (600, 0, 0)


@pytest.mark.parametrize("by", ["read", "wait_any"])
@pytest.mark.parametrize("wait", ["4s", "true"])
def test_a_wait_for_the_queue_is_no_longer_than_that_of_the_call(
    tmp_path: Path, wait: str, by: str
) -> None:
    create(f"fmq:{tmp_path}/q?layout=classic")
    with served(tmp_path) as server:
        port = server.port
        reader = open_reader(f"{server.url}/q", wait=wait, retry="100ms")
    with reader:
        for _ in range(2):
            began = time.monotonic()
            if by == "read":
                assert reader.read(0.3) is None
            else:
                assert wait_any([reader], timeout=0.3) == []
            assert time.monotonic() - began < 2
        (tmp_path / "q.stat").rename(tmp_path / "away.stat")
        with served(tmp_path, port=port):
            assert reader.read(0.3) is None  # the queue is away, its server is not
            (tmp_path / "away.stat").rename(tmp_path / "q.stat")
            with open_writer(f"fmq:{tmp_path}/q") as writer:
                writer.write(b"here again")
            message = reader.read(20)
    assert message is not None
    assert message.payload == b"here again"


def test_a_seek_that_is_refused_is_no_outage_and_no_reconnect(tmp_path: Path) -> None:
    create(f"fmq:{tmp_path}/q?layout=classic")
    with open_writer(f"fmq:{tmp_path}/q") as writer:
        writer.write_many([b"%d" % n for n in range(3)])
    with served(tmp_path) as server:
        port = server.port
        reader = open_reader(f"{server.url}/q", retry="500ms")
        assert isinstance(reader, FmqReader)
        assert numbers(reader.read_many(1)) == [0]
        with pytest.raises(PositionError, match="5000"):
            reader.seek(5000)
        assert numbers(reader.read_many(10)) == [1, 2]
        assert numbers(reader.read_many(10)) == []
        assert reader.reconnects == 0
        with pytest.raises(PositionError, match="5000"):
            reader.seek(5000)
        time.sleep(0.6)
    with reader:
        assert reader.read_many(1, 0.1) == []  # the outage begins here
        with served(tmp_path, port=port):
            writer = open_writer(f"fmq:{tmp_path}/q")
            writer.write(b"3")
            writer.close()
            assert numbers(reader.read_many(1, 10)) == [3]
            assert reader.reconnects == 1


def test_a_reader_of_lroses_server_whose_seek_failed_stays_where_it_was(
    lrose_server: str, queue_name: str
) -> None:
    url = f"{lrose_server}/{queue_name}"
    with open_writer(url) as writer, open_reader(url) as reader:
        writer.write_many([b"%d" % n for n in range(600)])
        assert numbers(reader.read_many(10)) == list(range(10))
        with pytest.raises(PositionError, match="5000"):
            reader.seek(5000)
        assert numbers(reader.available()) == list(range(10, 600))
        books = reader.statistics()
    assert (books.messages, books.lost, books.restarts) == (600, 0, 0)


def test_a_filter_here_keeps_the_books_right(either: str, queue_name: str) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url) as writer:
        for n in range(300):
            writer.write(b"%d" % n, n % 3)
    with open_reader(url, type=1) as reader:
        assert numbers(reader.available()) == list(range(1, 300, 3))
        assert reader.read(0) is None
        assert reader.statistics().filtered == 200
        assert reader.statistics().lost == 0
    with open_reader(url, type=1, filter="server") as reader:
        assert numbers(reader.available()) == list(range(1, 300, 3))
        assert reader.statistics().lost == 0
    with open_reader(url, type=9) as reader:
        assert reader.read(0) is None


def test_a_waiting_reader_gets_what_comes(either: str, queue_name: str) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url) as writer, open_reader(url) as reader:
        began = time.monotonic()
        assert reader.read(0.2) is None
        assert 0.15 < time.monotonic() - began < 5
        timer = threading.Timer(0.2, writer.write, (b"at last",))
        timer.start()
        message = reader.read(20)
        timer.join()
        assert message is not None
        assert message.payload == b"at last"


def test_a_queue_that_is_created_anew_is_noticed(either: str, queue_name: str) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url, slots=10) as writer:
        writer.write_many([b"old"] * 5)
    with open_reader(url) as reader:
        assert len(reader.read_many(5)) == 5
        with open_writer(url, slots=10, create="always") as writer:
            writer.write_many([b"new"] * 3)
        found: list[Message] = []
        deadline = time.monotonic() + 40
        while len(found) < 3 and time.monotonic() < deadline:
            found += reader.read_many(10, timeout=0.5)
        assert [(m.seq, m.payload) for m in found] == [(n, b"new") for n in range(3)]
        assert reader.statistics().restarts == 1
        assert reader.statistics().lost == 0


def test_ids_that_wrap_are_unwrapped(fmq_root: Path, either: str, queue_name: str) -> None:
    local = f"fmq:{fmq_root}/{queue_name}"
    with open_writer(f"{local}?layout=classic&slots=50") as writer:
        writer.write(b"first")
    _shift_ids(fmq_root / queue_name, 999_999_990)
    url = f"{either}/{queue_name}"
    with open_writer(url) as writer, open_reader(url) as reader:
        for n in range(20):
            writer.write(b"%d" % n)
        found = list(reader.available())
        assert numbers(found) == list(range(999_999_990, 1_000_000_011))
        reader.seek(999_999_995)
        assert numbers(reader.read_many(1)) == [999_999_995]
        reader.seek(1_000_000_005)
        assert numbers(reader.read_many(1)) == [1_000_000_005]
        assert reader.statistics().lost == 0


def _shift_ids(path: Path, id: int) -> None:
    """Give the only message of a queue another id."""
    stat, buf = path.with_suffix(".stat"), path.with_suffix(".buf")
    data = bytearray(stat.read_bytes())
    status = Status.decode(bytes(data[:56]))._replace(youngest_id=id)
    data[:56] = status._replace(checksum=status.computed_checksum()).encode()
    slot = [int.from_bytes(data[56 + 4 * n : 60 + 4 * n], signed=True) for n in range(9)]
    slot[1] = id
    signs = (1, -1, 1, -1, 1, 1, -1, 1, -1)
    total = sum(v if s > 0 else ~v for v, s in zip(slot, signs, strict=True)) & 0xFFFFFFFF
    data[60:64] = id.to_bytes(4)
    data[92:96] = total.to_bytes(4)
    stat.write_bytes(data)
    content = bytearray(buf.read_bytes())
    content[16:20] = id.to_bytes(4)  # behind the head, 5 bytes and their padding
    buf.write_bytes(content)


def test_a_wide_queue_is_served_too(fmq_root: Path, either: str, queue_name: str) -> None:
    if "lrose" in queue_name:
        pytest.skip("LROSE has none")
    local = f"fmq:{fmq_root}/{queue_name}"
    create(f"{local}?layout=wide&writers=many&slots=1024")
    url = f"{either}/{queue_name}"
    with open_writer(url) as one, open_writer(url, compress="gzip") as two:
        one.write(b"one", 1)
        two.write(b"two" * 100, 2)
        one.write_many([b"%d" % n for n in range(200)], 3)
    with open_reader(url) as reader, open_reader(local) as there:
        found = list(reader.available())
        assert numbers(found) == list(range(202))
        assert [m.payload for m in found] == [m.payload for m in there.available()]
        reader.seek(100)
        assert numbers(reader.read_many(1)) == [100]
        assert reader.bounds()[1:3] == (0, 202)
        create(f"{local}?layout=wide", replace=True)
        with open_writer(local) as writer:
            writer.write(b"anew")
        message = reader.read(10)
        while message is not None and message.payload != b"anew":
            message = reader.read(10)
        assert message is not None
        assert reader.statistics().restarts == 1


def test_a_wide_queue_that_is_created_anew_is_noticed_also_if_its_ids_do_not_show_it(
    fmq_server: FmqServer, fmq_root: Path, queue_name: str
) -> None:
    local = f"fmq:{fmq_root}/{queue_name}?layout=wide&slots=256"
    with open_writer(local) as writer:
        writer.write_many([b"old"] * 200)
    with open_reader(f"{fmq_server.url}/{queue_name}") as reader:
        assert len(reader.read_many(200, 10)) == 200
        with open_writer(local, create="always") as writer:
            writer.write_many([b"new"] * 700)
        found: list[Message] = []
        deadline = time.monotonic() + 40
        while len(found) < 256 and time.monotonic() < deadline:
            found += reader.read_many(1000, timeout=0.5)
        assert numbers(found) == list(range(444, 700))
        assert reader.statistics().restarts == 1
        assert reader.statistics().lost == 444


def test_a_queue_is_made_as_asked_and_not_twice(
    fmq_server: FmqServer, fmq_root: Path, queue_name: str
) -> None:
    url = f"{fmq_server.url}/{queue_name}"
    with pytest.raises(NotFound):
        open_reader(url)
    with pytest.raises(NotFound):
        open_writer(url, create="never")
    create(url, slots=7, size=4096)
    info = describe(f"fmq:{fmq_root}/{queue_name}")
    assert (info.slots, info.buffer_size) == (7, 4096)
    with pytest.raises(AlreadyExists):
        create(url)
    create(url, replace=True, slots=9, size=4096)
    assert describe(f"fmq:{fmq_root}/{queue_name}").slots == 9
    with pytest.raises(RequestRefused, match="at most"):
        create(f"{url}-large", size="100M")
    with pytest.raises(RequestRefused, match="served"):
        create(f"{fmq_server.url}/../../etc/passwd")
    with pytest.raises(RequestRefused, match="served"):
        open_reader(f"{fmq_server.url}//etc/passwd")


def test_options_for_the_other_side_are_refused(fmq_server: FmqServer, queue_name: str) -> None:
    url = f"{fmq_server.url}/{queue_name}"
    with pytest.raises(InvalidOption):
        open_writer(f"{url}?type=5")
    with pytest.raises(InvalidOption):
        open_reader(f"{url}?slots=5")
    with pytest.raises(InvalidOption):
        open_reader(f"{url}?nonsense=5")


def test_a_message_that_cannot_fit_is_refused_and_those_before_it_are_there(
    either: str, fmq_server: FmqServer, queue_name: str
) -> None:
    url = f"{either}/{queue_name}"
    kind = MessageTooLarge if either == fmq_server.url else RequestRefused
    with open_writer(url, size=4096) as writer:
        with pytest.raises(kind):
            writer.write(bytes(5000))
        with pytest.raises(kind):
            writer.write_many([b"a", b"b", bytes(5000), b"c"])
        books = writer.statistics()
        writer.write(b"goes on")
        with pytest.raises(InvalidOption):
            writer.write(b"", type=2**31)
    with open_reader(url) as reader:
        behind = [] if either == fmq_server.url else [b"c"]  # as by LROSE's own server
        assert [m.payload for m in reader.available()] == [b"a", b"b", *behind, b"goes on"]
    if either == fmq_server.url:
        assert (books.messages, books.refused) == (2, 3)


def damage_second_message(fmq_root: Path, queue_name: str) -> None:
    buf = fmq_root / f"{queue_name}.buf"
    content = bytearray(buf.read_bytes())
    second = content.index(b"\xf7" * 4, content.index(b"\xf7" * 4) + 4)
    content[second + 36] ^= 0xFF
    buf.write_bytes(content)


def test_what_is_damaged_is_an_error_or_a_counted_loss(
    fmq_root: Path, either: str, queue_name: str
) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url, compress="gzip") as writer:
        writer.write_many([b"x" * 100] * 3)
    damage_second_message(fmq_root, queue_name)
    with open_reader(url) as reader:
        assert numbers(reader.read_many(10)) == [0]
        for _ in range(2):
            with pytest.raises(Malformed):
                reader.read_many(10)
    with open_reader(url, damaged="skip") as reader:
        assert numbers(reader.available()) == [0, 2]
        assert [loss.reason for loss in reader.statistics().losses] == [DropReason.DAMAGED]


def test_a_damaged_message_ends_no_reading_as_if_it_were_the_last(
    fmq_root: Path, either: str, queue_name: str
) -> None:
    url = f"{either}/{queue_name}"
    with open_writer(url, compress="gzip") as writer:
        writer.write_many([b"x" * 100] * 3)
    damage_second_message(fmq_root, queue_name)
    with open_reader(url, 1) as reader:
        for _ in range(2):
            with pytest.raises(Malformed):
                list(reader.available())


def test_nothing_behind_a_damaged_message_is_read_when_lroses_server_jumps_in_the_same_reply(
    fmq_root: Path, lrose_server: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = f"fmq:{fmq_root}/{queue_name}?layout=classic"
    create(local)
    read = LroseFmq._message

    def overrun(self: LroseFmq, number: int) -> Any:
        if self._slot(number).id != 3:
            return read(self, number)
        monkeypatch.undo()
        self._last_id = -1
        return None  # it jumps to the newest: the reply has 0, 1, 2 and 11

    with open_reader(f"{lrose_server}/{queue_name}", type=0) as reader:
        with open_writer(local, compress="gzip") as writer:
            for number in range(12):
                writer.write(b"x" * 100, number % 2)
        damage_second_message(fmq_root, queue_name)
        monkeypatch.setattr(LroseFmq, "_message", overrun)
        assert numbers(reader.read_many(100)) == [0]
        for _ in range(2):
            with pytest.raises(Malformed):
                reader.read_many(100)
        assert reader.statistics().filtered == 0
        reader.seek(2)
        assert numbers(reader.available()) == [2, 4, 6, 8, 10]
        assert (reader.statistics().filtered, reader.statistics().lost) == (5, 0)


@pytest.mark.parametrize("damaged", ["fail", "skip"])
def test_an_interrupted_read_counts_what_is_damaged_when_it_is_read_again(
    fmq_root: Path, either: str, queue_name: str, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    url = f"{either}/{queue_name}"

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with (
        open_writer(url, compress="gzip") as writer,
        open_reader(url, damaged=damaged) as reader,
    ):
        writer.write_many([b"x" * 100] * 3)
        damage_second_message(fmq_root, queue_name)
        monkeypatch.setattr("penstock.protocols.lrose.fmq_client.make_messages", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.read_many(10)
        seen = numbers(reader.read_many(10))
        if damaged == "fail":
            with pytest.raises(Malformed):
                reader.read_many(10)
        books = reader.statistics()
    assert seen == ([0] if damaged == "fail" else [0, 2])
    assert (books.messages, books.lost) == (len(seen), len(seen) - 1)


@pytest.mark.parametrize("damaged", ["fail", "skip"])
def test_what_is_interrupted_at_any_line_while_it_is_kept_comes_and_counts_once(
    fmq_root: Path, fmq_server: FmqServer, queue_name: str, damaged: str
) -> None:
    keep = FmqReader._keep
    for line in itertools.count(1):
        name = f"{queue_name}-{line}"
        url = f"{fmq_server.url}/{name}"
        where = ""

        def interrupted(*arguments: Any, at: int = line) -> None:
            with interrupted_at_line(at, "penstock/protocols/lrose"):
                keep(*arguments)

        with (
            open_writer(url, compress="gzip") as writer,
            open_reader(url, damaged=damaged) as reader,
            pytest.MonkeyPatch.context() as patch,
        ):
            writer.write_many([b"x" * 100] * 3)
            damage_second_message(fmq_root, name)
            patch.setattr(FmqReader, "_keep", interrupted)
            seen = []
            try:
                seen += numbers(reader.read_many(10))
            except Interrupted as place:
                where = f"at {place}"
            patch.undo()
            seen += numbers(reader.read_many(10) if where else [])
            if damaged == "fail":
                with pytest.raises(Malformed):
                    reader.read_many(10)
            books = reader.statistics()
        assert seen == ([0] if damaged == "fail" else [0, 2]), where
        assert (books.messages, books.lost) == (len(seen), len(seen) - 1), where
        if not where:
            return


def test_headers_that_have_no_place_are_counted(fmq_server: FmqServer, queue_name: str) -> None:
    with open_writer(f"{fmq_server.url}/{queue_name}") as writer:
        writer.write(b"", attributes=b"header")
        assert writer.statistics().headers_dropped == 1


def test_what_is_closed_says_so_and_nobody_listening_is_an_error(
    fmq_server: FmqServer, queue_name: str
) -> None:
    url = f"{fmq_server.url}/{queue_name}"
    writer = open_writer(url)
    reader = open_reader(url)
    for each in (writer, reader):
        each.close()
        each.close()
    with pytest.raises(Closed):
        writer.write(b"")
    with pytest.raises(Closed):
        reader.read(0)
    with pytest.raises(ConnectionLost, match="refused"):
        open_reader("fmqp://127.0.0.1:9/x")


def test_a_reader_can_wait_for_the_queue_to_appear(fmq_server: FmqServer, queue_name: str) -> None:
    url = f"{fmq_server.url}/{queue_name}"
    timer = threading.Timer(0.3, create, (url,))
    timer.start()
    open_reader(url, wait="20s").close()
    timer.join()


def test_lroses_spelling_opens_the_same_queue(fmq_server: FmqServer, queue_name: str) -> None:
    with open_writer(f"{fmq_server.url}/{queue_name}") as writer:
        writer.write(b"hello")
    with open_reader(f"fmqp:://127.0.0.1:{fmq_server.port}:{queue_name}") as reader:
        message = reader.read(0)
        assert message is not None
        assert message.payload == b"hello"


def test_many_writers_and_readers_at_once_lose_nothing(tmp_path: Path) -> None:
    writers, each = 4, 300
    with served(tmp_path) as server:
        url = f"{server.url}/q"
        create(url, slots=writers * each + 10, size="4M")
        found: list[list[bytes]] = [[] for _ in range(4)]

        def write(name: int) -> None:
            with open_writer(url) as writer:
                for n in range(0, each, 10):
                    writer.write(b"%d:%d" % (name, n))
                    writer.write_many([b"%d:%d" % (name, m) for m in range(n + 1, n + 10)])

        def read(place: int) -> None:
            with open_reader(url) as reader:
                while len(found[place]) < writers * each:
                    messages = reader.read_many(100, timeout=20)
                    assert messages
                    found[place] += [m.payload for m in messages]
                assert reader.statistics().lost == 0

        threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
        threads += [threading.Thread(target=read, args=(n,)) for n in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        books = server.statistics()
    assert all(own == found[0] for own in found)
    for name in range(writers):
        own = [p for p in found[0] if p.startswith(b"%d:" % name)]
        assert own == [b"%d:%d" % (name, n) for n in range(each)]
    assert books.requests == books.replies + books.unanswered
    assert books.errors == 1  # there was no queue yet when it was created


def test_books_of_the_reader_are_those_of_an_endpoint(
    fmq_server: FmqServer, queue_name: str
) -> None:
    url = f"{fmq_server.url}/{queue_name}"
    with open_writer(url) as writer:
        writer.write_many([b"ab"] * 5)
    with open_reader(url) as reader:
        assert isinstance(reader, FmqReader)
        assert reader.server_is_ours
        reader.read_many(2)
        assert reader.statistics()[:7] == (2, 4, 0, 0, 0, 2, 3)


def test_a_connection_goes_on_when_the_numbers_of_its_frames_are_used_up(
    fmq_server: FmqServer, either: str, queue_name: str
) -> None:
    url, last = f"{either}/{queue_name}", 2**31 - 1
    sent = [b"%d" % number for number in range(12)]
    with open_writer(url) as writer, open_reader(url) as reader:
        assert isinstance(writer, FmqWriter)
        assert isinstance(reader, FmqReader)
        for link in (writer._link, reader._link):
            assert link is not None
            link._connection.seq = last - 2
        for session in fmq_server._sessions:
            session._seq = last - 2
        for payload in sent[:6]:
            writer.write(payload)
        writer.write_many(sent[6:])
        got: list[bytes] = []
        while len(got) < len(sent):
            message = reader.read(timeout=10)
            assert message is not None
            got.append(message.payload)
        assert got == sent
        assert reader.reconnects == 0
