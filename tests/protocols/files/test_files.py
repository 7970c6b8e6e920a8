"""Streams become files of other tools, and come back as they were."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import struct
import time
import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import open_reader, open_writer
from penstock.core.batch import BATCH_SCHEMA, batch_from_messages, messages_from_batch
from penstock.core.endpoints import are_same_stream, describe
from penstock.core.errors import (
    AlreadyExists,
    InvalidOption,
    LockTimeout,
    Malformed,
    MessageTooLarge,
    NotFound,
    PenstockError,
    PositionError,
    StorageError,
)
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.core.stream_id import StreamId
from penstock.relay import Relay, relay_options
from support.interruption import Interrupted, interrupted_at_call
from support.small_disks import small_disk_at

KINDS = ["parquet", "arrow", "csv", "jsonl", "mcap"]
ID = StreamId(bytes(range(16)))

messages = st.builds(
    Message,
    seq=st.integers(0, 2**31),
    time_ns=st.integers(0, 2**63 - 1),
    created_ns=st.integers(1, 2**63 - 1),
    type=st.integers(-(2**31), 2**31 - 1),
    subtype=st.integers(-(2**31), 2**31 - 1),
    stream=st.none() | st.binary(min_size=16, max_size=16).map(StreamId),
    attributes=st.none() | st.binary(max_size=20),
    payload=st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode()),
)


def written(url: str, found: list[Message], at_once: int = 1000) -> None:
    with open_writer(url) as writer:
        for at in range(0, len(found), at_once):
            writer.write_batch(batch_from_messages(found[at : at + at_once]))


def read(url: str, **options: Any) -> list[Message]:
    with open_reader(url, **options) as reader:
        return reader.read_many(10_000_000) + list(reader.available())


def some(count: int) -> list[Message]:
    return [Message(i, i, 1000 + i, i % 3, 0, None, None, b"%d" % i) for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(messages, max_size=5))
def test_what_was_written_is_read(tmp_path: Path, kind: str, sent: list[Message]) -> None:
    url = f"{kind}:{tmp_path}/file"
    written(f"{url}?replace=true", sent, at_once=2)
    lost: dict[str, Any] = {"attributes": None} if kind == "mcap" else {}
    expected = [each._replace(seq=i, **lost) for i, each in enumerate(sent)]
    assert read(url) == expected
    assert describe(url).count == len(sent)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_goes_to_any_message(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{kind}:{tmp_path}/file"
    monkeypatch.setattr("penstock.protocols.files.endpoint._ROWS", 40)  # several groups of rows
    written(url, some(100), at_once=10)
    with open_reader(url) as reader:
        for place, number in ((0, 0), (57, 57), ("last", 99), ("start", 0)):
            reader.seek(place)
            found = reader.read(0)
            assert found is not None
            assert found.seq == number
            assert found.payload == b"%d" % number
        reader.seek(100)
        assert reader.read(0) is None
        with pytest.raises(PositionError):
            reader.seek(101)
        bounds = reader.bounds()
        assert (bounds.oldest, bounds.end) == (0, 100)
    with open_reader(url, "1970-01-01T00:00:00.000001050Z") as reader:
        assert [message.seq for message in reader.read_many(2)] == [50, 51]
    with open_reader(url, "end") as reader:
        assert reader.read_many(5) == []


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_of_a_file_are_there_also_if_they_are_from_the_future(
    tmp_path: Path, kind: str
) -> None:
    """They were appended on a machine whose clock is ahead."""
    url, ahead = f"{kind}:{tmp_path}/file", time.time_ns() + 10**12
    written(url, [Message(i, i, ahead + i, 0, 0, None, None, b"%d" % i) for i in range(10)])
    with open_reader(url) as reader:
        assert [message.seq for message in reader.available()] == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_whole_or_not_there(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    with pytest.raises(Malformed), open_writer(f"{kind}:{path}") as writer:
        writer.write_batch(batch_from_messages(some(10)).append_column("x", pa.nulls(10)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), open_writer(f"{kind}:{path}") as writer:
        assert (writer.write_many([b"a"] * 10) or 0) // 0
    assert list(tmp_path.iterdir()) == []
    assert "nothing is left of it" in caplog.text
    writer = open_writer(f"{kind}:{path}")
    writer.write(b"a")
    assert not path.exists()
    with pytest.raises(LockTimeout, match="another writer"):
        open_writer(f"{kind}:{path}")
    writer.close()
    with pytest.raises(AlreadyExists, match="there is a file") as raised:
        open_writer(f"{kind}:{path}")
    assert "replace=true" in str(raised.value.hint)
    assert [message.payload for message in read(f"{kind}:{path}")] == [b"a"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_write_that_failed_there_is_no_file_with_a_gap(tmp_path: Path, kind: str) -> None:
    some_rows = [Message(i, i, 1000 + i, 0, 0, None, None, os.urandom(300_000)) for i in range(120)]
    with small_disk_at(tmp_path / "disk", "2m") as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(1_500_000))
        writer = open_writer(f"{kind}:{disk}/file")
        batches = [batch_from_messages([message]) for message in some_rows]
        with pytest.raises(StorageError, match="No space left"):
            deque(map(writer.write_batch, batches), maxlen=0)
        ballast.unlink()
        taken = writer.statistics().messages
        assert (writer.statistics().refused, taken < len(some_rows)) == (1, True)
        with pytest.raises(PenstockError, match="rows would be missing"):
            writer.write(b"more")
        assert (writer.statistics().messages, writer.statistics().refused) == (taken, 2)
        with pytest.raises(PenstockError, match="rows would be missing"):
            writer.close()
        assert list(disk.iterdir()) == []


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "file.new").write_bytes(b"x" * 1000)
    written(f"jsonl:{tmp_path}/file", some(2))
    assert len(read(f"jsonl:{tmp_path}/file")) == 2
    (tmp_path / "other.new").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic link"):
        open_writer(f"jsonl:{tmp_path}/other")


def test_nobody_is_told_that_messages_of_an_unfinished_file_are_kept(tmp_path: Path) -> None:
    log, url = f"log:{tmp_path}/log", f"csv:{tmp_path}/file"
    written(log, some(3))
    options = relay_options(source=log, target=url, state=tmp_path / "state", follow=False)
    for source, asked in ((log, "state"), (f"{log}?group=g", "group"), (f"{log}?hold=h", "hold")):
        with open_reader(source) as reader, open_writer(url) as writer:
            with pytest.raises(InvalidOption, match="keeps nothing until it is finished") as raised:
                Relay(reader, writer, options)
            assert raised.value.option == asked
        (tmp_path / "file").unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_payloads_become_columns(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{kind}:{tmp_path}/file"
    rows = [b'{"sensor": "a", "value": 1.5, "tags": [1, 2]}', b'{"sensor": "b"}', b"nonsense"]
    caplog.set_level(logging.WARNING)
    with open_writer(url, decode="json:sensor STRING, value DOUBLE, tags ARRAY<INT>") as writer:
        assert writer.cannot_carry == {"stream": "left out", "attributes": "left out"}
        for i, row in enumerate(rows):
            writer.write(row, 7, 0, i, 100)
    assert "1 payloads did not decode" in caplog.text
    found = [json.loads(message.payload) for message in read(url)]
    assert [row.get("sensor") for row in found] == ["a", "b", None]
    assert found[0]["value"] == 1.5
    assert found[0]["tags"] in ([1, 2], "[1, 2]")
    assert "JSON object" in found[2]["decode_error"]
    if kind == "parquet":
        table = pq.read_table(tmp_path / "file")
        assert table.column("sensor").to_pylist() == ["a", "b", None]
        assert table.column("type").to_pylist() == [7, 7, 7]


def test_other_tools_read_what_is_written(tmp_path: Path) -> None:
    for kind in ("parquet", "csv", "arrow"):
        written(f"{kind}:{tmp_path}/{kind}", some(3))
    assert pq.read_table(tmp_path / "parquet").schema.equals(BATCH_SCHEMA)
    assert pacsv.read_csv(tmp_path / "csv").column("payload").to_pylist() == [0, 1, 2]
    with pa.ipc.open_file(tmp_path / "arrow") as file:
        assert list(messages_from_batch(file.get_batch(0))) == some(3)


def test_mcap_files_are_those_of_the_library(tmp_path: Path) -> None:
    from mcap.reader import make_reader

    url = f"mcap:{tmp_path}/file"
    written(f"{url}?topic=/radar", [Message(5, 6, 7, 3, 1, ID, None, b"x"), *some(1)])
    with (tmp_path / "file").open("rb") as file:
        found = [(c.topic, m.publish_time, m.log_time, m.data)
                 for _, c, m in make_reader(file).iter_messages(log_time_order=False)]  # fmt: skip
    assert found == [(f"/radar/{ID.hex()}/3/1", 6, 7, b"x"), ("/radar", 0, 1000, b"0")]
    assert [each.payload for each in read(f"{url}?topic=/radar")] == [b"0"]


def test_mcap_takes_any_columns_of_payloads(tmp_path: Path) -> None:
    """Also the payload itself, and columns that have a name or a type of a message's own."""
    payloads = [b'{"time_ns": 5, "type": "a"}', b"nothing", b'{"time_ns": null, "type": "b"}']
    sent = [Message(i, i, 1000 + i, 0, 0, ID, None, each) for i, each in enumerate(payloads)]
    decode = "{format: json, schema: 'time_ns BIGINT, type STRING', keep: [seq, stream, payload]}"
    with open_writer(f"mcap:{tmp_path}/file", decode=decode) as writer:
        writer.write_batch(batch_from_messages(sent))
    found = read(f"mcap:{tmp_path}/file")
    assert [(each.time_ns, each.type, each.stream) for each in found] == [
        (5, 0, ID),
        (0, 0, ID),
        (0, 0, ID),
    ]
    rows = [json.loads(each.payload) for each in found]
    assert [bytes.fromhex(row["payload"]) for row in rows] == payloads
    assert [row.get("type") for row in rows] == ["a", None, "b"]


def test_rows_of_others_are_json_payloads(tmp_path: Path) -> None:
    table = pa.table(
        {"station": ["Oslo", "Bergen"], "type": ["x", "y"], "time_ns": [5, 6], "value": [None, 2]}
    )
    pq.write_table(table, tmp_path / "p")
    pacsv.write_csv(table, tmp_path / "c")
    (tmp_path / "j").write_text('{"station": "Oslo", "time_ns": 5}\n\n{"payload": "x", "y": 1}\n')
    expected = [{"station": "Oslo", "type": "x"}, {"station": "Bergen", "type": "y", "value": 2}]
    for url in (f"parquet:{tmp_path}/p", f"csv:{tmp_path}/c"):
        found = read(url)
        assert [json.loads(message.payload) for message in found] == expected
        assert [message.time_ns for message in found] == [5, 6]
        assert found[0].created_ns == Path(url.partition(":")[2]).stat().st_mtime_ns
    lines = read(f"jsonl:{tmp_path}/j")
    assert [each.payload for each in lines] == [
        b'{"station": "Oslo", "time_ns": 5}',
        b'{"payload": "x", "y": 1}',
    ]
    assert lines[0].time_ns == 5


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_of_others_keep_their_nanoseconds(
    tmp_path: Path, kind: str, zone: str | None
) -> None:
    moments = [1_750_000_000_123_456_789, 1_750_000_000_123_456_000, 1_750_000_000_000_000_000]
    moments += [-1, 0]
    days = [abs(ns) % 86_400_000_000_000 for ns in moments]
    table = pa.table(
        {
            "at": pa.array([*moments, None], pa.timestamp("ns", zone)),
            "day": pa.array([*days, 1], pa.time64("ns")),
        }
    )
    path = tmp_path / "file"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    found = [json.loads(message.payload) for message in read(f"{kind}:{path}")]
    end = "" if zone is None else "+00:00"
    assert [row.get("at") for row in found] == [
        f"2025-06-15T15:06:40.123456789{end}",
        f"2025-06-15T15:06:40.123456{end}",
        f"2025-06-15T15:06:40{end}",
        f"1969-12-31T23:59:59.999999999{end}",
        f"1970-01-01T00:00:00{end}",
        None,
    ]
    assert [row["day"] for row in found] == [
        *("15:06:40.123456789", "15:06:40.123456", "15:06:40"),
        *("00:00:00.000000001", "00:00:00", "00:00:00.000000001"),
    ]


def test_a_time_that_mcap_cannot_tell_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Message(0, -5, 10, 0, 0, None, None, b"x")
    written(f"mcap:{tmp_path}/file", [old, old._replace(time_ns=5)])
    assert "1 times before 1970" in caplog.text


def test_columns_of_csv_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("id,name\n007,x\n")
    assert read(f"csv:{tmp_path}/c")[0].payload == b'{"id":7,"name":"x"}'
    assert read(f"csv:{tmp_path}/c?types=text")[0].payload == b'{"id":"007","name":"x"}'


def test_columns_of_csv_lose_no_digit(tmp_path: Path) -> None:
    (tmp_path / "c").write_text(
        "id,value,size\n12345678901234567891,1.5,9007199254740992\n,-2e300,0.25\n"
        "1,12345678901234567000000,1\n"
    )
    found = [json.loads(message.payload) for message in read(f"csv:{tmp_path}/c")]
    assert found == [
        {"id": "12345678901234567891", "value": "1.5", "size": 9007199254740992.0},
        {"value": "-2e300", "size": 0.25},
        {"id": "1", "value": "12345678901234567000000", "size": 1.0},
    ]
    assert [type(row["size"]) for row in found] == [float] * 3


def test_a_number_with_more_digits_than_those_before_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocols.files.text._BLOCK", 1 << 12)
    lines = "".join(f"{i}.5\n" for i in range(1000))
    (tmp_path / "c").write_text(f"value\n{lines}12345678901234567891\n")
    with pytest.raises(Malformed) as caught:
        read(f"csv:{tmp_path}/c")
    assert caught.value.hint == "add ?types=text"
    assert len(read(f"csv:{tmp_path}/c?types=text")) == 1001


def test_numbers_that_json_does_not_have_are_text(tmp_path: Path) -> None:
    table = pa.table({"a": [1.5, math.nan, math.inf], "b": [[0.5], [-math.inf], []]})
    pq.write_table(table, tmp_path / "p")
    expected = [
        {"a": 1.5, "b": [0.5]},
        {"a": "NaN", "b": ["-Infinity"]},
        {"a": "Infinity", "b": []},
    ]
    assert [strict(message.payload) for message in read(f"parquet:{tmp_path}/p")] == expected
    with open_writer(f"jsonl:{tmp_path}/j", decode="struct:<d") as writer:
        writer.write_many([struct.pack("<d", value) for value in (1.5, math.nan)])
    rows = [strict(line) for line in (tmp_path / "j").read_text().splitlines()]
    assert [row["f0"] for row in rows] == [1.5, "NaN"]
    written(f"jsonl:{tmp_path}/k", [Message(0, 1, 1, 0, 0, None, None, b) for b in NO_JSON])
    rows = [strict(line) for line in (tmp_path / "k").read_text().splitlines()]
    assert [row["payload"] for row in rows] == [text.decode() for text in NO_JSON]
    assert [each.payload for each in read(f"jsonl:{tmp_path}/k")] == NO_JSON


NO_JSON = [b'{"a": NaN}', b"[1e400]"]


def strict(text: str | bytes) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_that_names_the_file(tmp_path: Path, kind: str, data: Any) -> None:
    path = tmp_path / "file"
    written(f"{kind}:{path}?replace=true", some(30))
    whole = bytearray(path.read_bytes())
    cut = data.draw(st.integers(0, len(whole)))
    if data.draw(st.booleans()):
        del whole[cut:]
    for place in data.draw(st.lists(st.integers(0, max(0, len(whole) - 1)), max_size=3)):
        if place < len(whole):
            whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    try:
        found = read(f"{kind}:{path}")
    except Malformed as error:
        if str(path) not in str(error):
            raise
    else:
        assert len(found) <= 1000


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_such_file_is_said(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_bytes(b"\x00\x01nothing of the kind\n" * 3)
    if kind != "csv":  # of which that is some
        with pytest.raises(Malformed, match="file"):
            read(f"{kind}:{tmp_path}/file")
    with pytest.raises(NotFound):
        open_reader(f"{kind}:{tmp_path}/none")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_reader_does_not_take_an_error_for_the_end_of_the_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    written(f"{kind}:{path}", some(5000))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4990], b'"', *lines[4990:]]))
    with open_reader(f"{kind}:{path}") as reader:
        found: list[Message] = []
        with pytest.raises(Malformed):
            deque(map(found.append, reader.available()), maxlen=0)
        for _ in range(2):
            with pytest.raises(Malformed):
                reader.read_many(1000)
        path.write_bytes(whole)
        found += reader.available()
        assert [message.seq for message in found] == list(range(5000))


def test_a_batch_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = pa.table({"text": pa.array(["x" * 10_000] * 2_000)})
    pq.write_table(large, tmp_path / "p")  # a few bytes: its values are in a dictionary
    with pa.ipc.new_file(
        tmp_path / "a", large.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as file:
        file.write_table(large)
    written(f"mcap:{tmp_path}/m", [Message(0, 0, 1, 0, 0, None, None, bytes(500_000))] * 10)
    for name in ("tables", "mcap_files"):
        monkeypatch.setattr(f"penstock.protocols.files.{name}.LARGEST", 1_000_000)
    for url in (f"parquet:{tmp_path}/p", f"arrow:{tmp_path}/a", f"mcap:{tmp_path}/m"):
        with pytest.raises(Malformed, match="at most"):
            read(url)


def test_csv_refuses_a_line_that_it_could_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocols.files.text.CsvFormat.largest", 100)
    with (
        open_writer(f"csv:{tmp_path}/file") as writer,
        pytest.raises(MessageTooLarge),
    ):
        writer.write(bytes(101))


def test_what_is_before_a_message_that_csv_refuses_is_written_and_only_that_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.protocols.files.text.CsvFormat.largest", 100)
    log, url = f"log:{tmp_path}/log", f"csv:{tmp_path}/file"
    payloads = [b"0", b"1", bytes(101), b"3", bytes(102), b"5"]
    with open_writer(log) as writer:
        writer.write_many(payloads)
    options = relay_options(source=log, target=url, follow=False, refused="drop")
    with open_reader(log) as reader, open_writer(url) as writer:
        books = Relay(reader, writer, options).run()
    assert (books.read, books.copied, sum(books.dropped.values())) == (6, 4, 2)
    assert [message.payload for message in read(url)] == [b"0", b"1", b"3", b"5"]
    with open_writer(f"csv:{tmp_path}/other") as writer:
        with open_reader(log) as reader, pytest.raises(MessageTooLarge) as raised:
            writer.write_batch(reader.read_batch(10))
        assert raised.value.size == 101
        books_of_it = writer.statistics()
        assert (books_of_it.messages, books_of_it.bytes, books_of_it.refused) == (2, 2, 4)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_chunk_that_does_not_tell_its_size_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(mcap_file(compression, size=20_000_000))
    assert [len(message.payload) for message in read(f"mcap:{path}")] == [20_000_000]
    monkeypatch.setattr("penstock.protocols.files.mcap_files.LARGEST", 100_000)
    path.write_bytes(mcap_file(compression, size=20_000_000, said=1000))
    tracemalloc.start()
    with pytest.raises(Malformed):
        read(f"mcap:{path}")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 5_000_000


def mcap_file(compression: str, *, size: int, said: int | None = None) -> bytes:
    """Return a file with one message in a chunk, which says to be of another size."""
    import lz4.frame
    import zstandard
    from mcap.data_stream import RecordBuilder
    from mcap.records import Channel, Chunk, DataEnd, Footer, Header
    from mcap.records import Message as Record

    inside = RecordBuilder()
    Channel(1, "/x", "", {}, 0).write(inside)
    Record(channel_id=1, log_time=1, data=bytes(size), publish_time=1, sequence=0).write(inside)
    plain: bytes = inside.end()  # type: ignore[no-untyped-call]
    if compression == "lz4":
        packed = lz4.frame.compress(plain, store_size=False)
    else:
        packed = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    file = RecordBuilder()
    Header("", "").write(file)
    Chunk(compression, packed, 1, 1, 0, len(plain) if said is None else said).write(file)
    DataEnd(0).write(file)
    Footer(0, 0, 0).write(file)
    magic = b"\x89MCAP0\r\n"
    records: bytes = file.end()  # type: ignore[no-untyped-call]
    return magic + records + magic


def test_one_file_has_one_identity(tmp_path: Path) -> None:
    written(f"jsonl:{tmp_path}/file", some(1))
    assert are_same_stream(f"jsonl:{tmp_path}/file", f"csv:{tmp_path}/./file")


def test_messages_of_nobody_are_numbered(tmp_path: Path) -> None:
    url = f"arrow:{tmp_path}/file"
    new = [each._replace(seq=0, created_ns=0) for each in some(3)]
    written(url, [*some(2), *new])
    with pa.ipc.open_file(tmp_path / "file") as file:
        rows = file.read_all()
    assert rows.column("seq").to_pylist() == [0, 1, 2, 3, 4]
    assert rows.column("created_ns").to_pylist()[:2] == [1000, 1001]
    assert all(moment > 1 << 60 for moment in rows.column("created_ns").to_pylist()[2:])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("by", ["many", "batch"])
def test_a_read_that_is_interrupted_at_any_call_reads_no_row_and_skips_none(
    tmp_path: Path, kind: str, by: str
) -> None:
    def read(reader: Reader) -> list[bytes]:
        if by == "many":
            return [message.payload for message in reader.read_many(10)]
        return cast("list[bytes]", reader.read_batch(10).column("payload").to_pylist())

    url = f"{kind}:{tmp_path}/rows"
    rows = [b"%d" % number for number in range(25)]
    with open_writer(url) as writer:
        writer.write_many(rows)
    with open_reader(url) as reader:
        read(reader)  # what is imported late would be interrupted
    for call in itertools.count(1, 2):
        got: list[bytes] = []
        where = ""
        with open_reader(url) as reader:
            try:
                with interrupted_at_call(call, "penstock"):
                    got += read(reader)
            except Interrupted as place:
                where = f"at {place}"
            while found := read(reader):
                got += found
            books = reader.statistics()
        assert got == rows, where
        assert (books.messages, books.bytes, books.next_seq) == (25, 40, 25), where
        if not where:
            return
