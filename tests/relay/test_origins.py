"""A copy knows when its first original was appended, through as many copies as there are."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.command import run
from penstock import Message, StreamId, open_reader, open_writer
from penstock.core.batch import (
    BATCH_SCHEMA,
    ORIGIN_SCHEMA,
    batch_from_messages,
    messages_from_batch,
)
from penstock.core.capabilities import OriginTimed
from penstock.core.errors import Malformed
from penstock.core.message import CopiedMessage
from penstock.core.units import format_time
from penstock.relay import copy
from support import wide_oracle

MINUTE = 60_000_000_000
NOON = 1_700_000_000_000_000_000 // MINUTE * MINUTE


@pytest.fixture
def original(tmp_path: Path) -> str:
    """A message each minute, of all kinds: with a stream, with attributes, with both."""
    url = f"log:{tmp_path}/original?segment=16k"
    stream = StreamId.generate(3, 1, "/a", "b")
    with open_writer(url) as writer:
        for number in range(120):
            writer.write(
                b"%03d" % number + bytes(300),
                created_ns=NOON + number * MINUTE,
                stream=stream if number % 3 == 0 else None,
                attributes=b"x" * number if number % 4 == 0 else None,
            )
    return url.partition("?")[0]


def copied(source: str, target: str) -> list[Message]:
    with open_reader(source) as reader, open_writer(target) as writer:
        copy(reader, writer)
    with open_reader(target.partition("?")[0]) as reader:
        return list(reader.available())


@pytest.mark.parametrize(
    "target",
    ["log:{}/copy?segment=16k", "log:{}/copy?compress=zstd", "fmq:{}/copy", "fmq:{}/copy?crc=true",
     "fmq:{}/copy?compress=lz4"],
)  # fmt: skip
def test_a_copy_of_a_copy_keeps_the_first_origin(
    original: str, target: str, tmp_path: Path
) -> None:
    first = copied(original, target.format(tmp_path))
    again = copied(target.format(tmp_path).partition("?")[0], f"log:{tmp_path}/again")
    with open_reader(original) as reader:
        expected = list(reader.available())
    for copies in (first, again):
        for message, wanted in zip(copies, expected, strict=True):
            assert message[3:] == wanted[3:]
            assert message.origin_ns == wanted.created_ns == wanted.origin_ns
            assert message.created_ns > NOON + 10**15  # its own
        times = [message.created_ns for message in copies]
        assert times == sorted(times)
    if target.startswith("fmq:"):
        wide_oracle.list_queue(Path(f"{tmp_path}/copy.fmq"))


def test_only_who_asks_for_it_gets_a_column_of_origins(original: str, tmp_path: Path) -> None:
    copied(original, f"fmq:{tmp_path}/copy")
    with open_reader(f"fmq:{tmp_path}/copy") as reader:
        assert reader.read_batch(10).schema == BATCH_SCHEMA
        batch = reader.read_batch_with_origins(10)
        assert batch.schema == ORIGIN_SCHEMA
        assert batch.column("origin_ns").to_pylist() == [NOON + i * MINUTE for i in range(10, 20)]
        reader.seek("end")
        assert reader.read_batch_with_origins(10).schema == ORIGIN_SCHEMA
        assert reader.read_batch(10).schema == BATCH_SCHEMA
    with open_reader(original) as reader:
        batch = reader.read_batch_with_origins(10)
        assert batch.column("origin_ns") == batch.column("created_ns")
    for option in ("type=0", "group=one"):
        with open_reader(f"fmq:{tmp_path}/copy?{option}") as reader:
            assert reader.read_batch_with_origins(5).column("origin_ns")[0].as_py() == NOON


def test_times_of_the_origin_are_found_without_reading_everything(
    original: str, tmp_path: Path
) -> None:
    copied(original, f"log:{tmp_path}/copy?segment=16k")
    from penstock.queue.log.segments import look, numbers_of

    folder = tmp_path / "copy"
    numbers = numbers_of(folder)
    assert len(numbers) > 2
    for number in numbers[:-1]:
        noted = look(folder, number).origin
        assert noted is not None
        assert noted[0] == NOON + number * MINUTE
    with open_reader(f"log:{folder}") as reader:
        assert isinstance(reader, OriginTimed)
        at = NOON + 70 * MINUTE
        assert reader.next_originated(0, at, at + MINUTE) == 70
        assert reader.next_originated(71, at, at + MINUTE) is None
    # Of a segment whose note is damaged, the messages themselves are looked at.
    path = folder / f"{numbers[1]:020d}.fmq"
    data = bytearray(path.read_bytes())
    data[536] ^= 1
    path.write_bytes(data)
    with open_reader(f"log:{folder}") as reader:
        assert isinstance(reader, OriginTimed)
        at = NOON + numbers[1] * MINUTE
        assert reader.next_originated(0, at, at + 1) == numbers[1]


@pytest.mark.parametrize("kind", ["log", "fmq"])
def test_ten_minutes_of_a_copied_archive_are_asked_for(
    original: str, tmp_path: Path, kind: str
) -> None:
    archive = f"{kind}:{tmp_path}/archive"
    done = run("cp", original, archive)
    assert done.returncode == 0, done.stderr
    noon, later = format_time(NOON + 60 * MINUTE), format_time(NOON + 70 * MINUTE)
    asked = ["--by", "origin", "--from", noon, "--to", later]
    shown = run("cat", archive, *asked, "--format", r"%{seq} %{origin_ns}\n")
    assert shown.stdout.decode().split("\n")[:-1] == [
        f"{number} {NOON + number * MINUTE}" for number in range(60, 70)
    ]
    lines = run("cat", archive, *asked).stdout.decode().splitlines()
    assert noon.replace("T", " ")[:16] in lines[0].replace("T", " ")
    last = run("cat", archive, *asked, "--json", "-n", "1").stdout
    assert f'"origin_ns": {NOON + 60 * MINUTE}'.encode() in last
    done = run("cp", archive, f"fmq:{tmp_path}/part", *asked)
    assert b"11 messages copied" in done.stdout  # of cp the end is included
    with open_reader(f"fmq:{tmp_path}/part") as reader:
        assert [m.origin_ns for m in reader.available()][:2] == [
            NOON + 60 * MINUTE,
            NOON + 61 * MINUTE,
        ]
    # A classic queue has no place for it, and takes the rest.
    done = run("cp", archive, f"fmq:{tmp_path}/classic?layout=classic", *asked)
    assert b"11 messages copied" in done.stdout, done.stderr
    # One that is no copy is appended first where it is.
    done = run("cp", original, f"fmq:{tmp_path}/direct", *asked)
    assert b"11 messages copied" in done.stdout, done.stderr


def test_a_relay_with_a_policy_keeps_it_too(original: str, tmp_path: Path) -> None:
    done = run("cp", original, f"fmq:{tmp_path}/copy", "--policy", "unlimited")
    assert done.returncode == 0, done.stderr
    with open_reader(f"fmq:{tmp_path}/copy") as reader:
        assert reader.read_many(1)[0].origin_ns == NOON


def test_a_message_that_fits_only_without_it_goes_without_it(tmp_path: Path) -> None:
    with open_writer(f"log:{tmp_path}/large") as writer:
        writer.write(bytes(65536))
        writer.write(b"small")
    found = copied(f"log:{tmp_path}/large", f"fmq:{tmp_path}/full?size=64k&slots=4")
    assert found[-1].payload == b"small"
    with open_writer(f"log:{tmp_path}/one") as writer:
        writer.write(bytes(65536), created_ns=NOON)
    (message,) = copied(f"log:{tmp_path}/one", f"fmq:{tmp_path}/full2?size=64k&slots=4")
    assert len(message.payload) == 65536
    assert message.origin_ns == message.created_ns


def test_a_resized_queue_keeps_the_origins_of_its_copies(original: str, tmp_path: Path) -> None:
    copied(original, f"fmq:{tmp_path}/copy")
    done = run("resize", f"fmq:{tmp_path}/copy", "--slots", "65536")
    assert done.returncode == 0, done.stderr
    with open_reader(f"fmq:{tmp_path}/copy") as reader:
        assert [m.origin_ns for m in reader.available()] == [
            NOON + number * MINUTE for number in range(120)
        ]


def test_a_copied_message_stays_one_when_it_is_changed_or_pickled() -> None:
    plain = Message(1, 2, 3, 4, 5, None, None, b"x")
    assert plain.origin_ns == 3
    message = CopiedMessage.of(plain, -7)
    assert message == plain
    assert message._replace(payload=b"y").origin_ns == -7
    loaded = pickle.loads(pickle.dumps(message))
    assert (loaded, loaded.origin_ns, type(loaded)) == (message, -7, CopiedMessage)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_origins_survive_a_batch(origins: list[int]) -> None:
    messages = [
        CopiedMessage.of(Message(i, 0, 0, 0, 0, None, None, b""), each)
        for i, each in enumerate(origins)
    ]
    batch = batch_from_messages(messages, origins=True)
    assert [message.origin_ns for message in messages_from_batch(batch)] == origins
    assert batch_from_messages(messages).schema == BATCH_SCHEMA


def test_a_column_of_origins_of_another_type_is_refused(tmp_path: Path) -> None:
    batch = batch_from_messages([Message(0, 0, 0, 0, 0, None, None, b"")])
    wrong = batch.append_column("origin_ns", pa.array(["now"]))
    with open_writer(f"fmq:{tmp_path}/queue") as writer, pytest.raises(Malformed, match="origin"):
        writer.write_batch(wrong)
