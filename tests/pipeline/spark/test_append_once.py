"""A batch is appended exactly once, whatever dies, fails or comes in between."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import create, describe, open_reader, open_writer
from penstock.core import provenance
from penstock.core.batch import batch_from_messages
from penstock.core.dead_letter import Code, DeadLetter
from penstock.core.endpoints import endpoint_of, identity
from penstock.core.errors import (
    DamagedQueue,
    LockTimeout,
    StorageError,
    Unsupported,
    WriteTimeout,
)
from penstock.core.message import Message
from penstock.core.provenance import AnotherBatch, Commit, Origin, Span, Staged
from penstock.core.stream_id import StreamId
from penstock.core.url import URL
from penstock.pipeline.sink.stream_sink import StreamSink, _Message
from penstock.pipeline.source.checkpoint import Offset, offsets_to_json, origin_of
from penstock.pipeline.source.options import SinkOptions
from penstock.protocols.lrose.fmq_server import FmqServer, FmqServerOptions
from penstock.queue.append_once import (
    NotedAppends,
    Staging,
    Stranger,
    append_once,
    remove_batch,
    remove_files,
)
from penstock.queue.log.endpoint import trim_log
from penstock.queue.log.retention import Limits
from penstock.queue.notes import NoteFile, notes_beside
from support.commit_lives import notes_for, stage
from support.machine import Machine
from support.mosquitto import free_port
from support.small_disks import small_disk_at
from support.spark_streams import fill, payloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.core.batch import Batch
    from penstock.core.interfaces import Writer

TESTS = Path(__file__).parents[2]
STREAM = StreamId(bytes(range(16)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "staging"


def staged(url: str, folder: Path, rows: int = 30, seed: int = 0) -> list[Staged]:
    return stage(url, folder, rows, random.Random(seed))


def rows_of(url: str) -> list[int]:
    return sorted(int(payload.split()[1]) for payload in payloads(url))


def die_while_appending(mode: str, tmp_path: Path, rows: int, step: int) -> list[dict[str, bool]]:
    arguments = [mode, f"log:{tmp_path}/log", f"{tmp_path}/staging", str(rows), str(step)]
    done = subprocess.run(
        [sys.executable, "-m", "support.commit_lives", *arguments],
        capture_output=True,
        check=False,
        cwd=TESTS,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_lives(lives: list[dict[str, bool]]) -> None:
    assert all(life["exact"] for life in lives)
    assert sum(life["killed"] for life in lives) > len(lives) // 2


def test_it_is_appended_once_when_killed_at_many_a_step(tmp_path: Path) -> None:
    check_lives(die_while_appending("lines", tmp_path, 60, 13))


def test_it_is_appended_once_when_killed_at_any_moment(tmp_path: Path) -> None:
    check_lives(die_while_appending("moments", tmp_path, 2000, 6))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_it_is_appended_once_when_killed_at_every_step(tmp_path: Path) -> None:
    check_lives(die_while_appending("lines", tmp_path, 60, 1))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_it_is_appended_once_when_killed_at_any_of_many_moments(tmp_path: Path) -> None:
    check_lives(die_while_appending("moments", tmp_path, 3_000, 60))


@pytest.mark.parametrize("scheme", ["fmq", "log"])
def test_a_batch_that_is_done_is_skipped(tmp_path: Path, folder: Path, scheme: str) -> None:
    url = f"{scheme}:{tmp_path}/out"
    assert append_once(url, staged(url, folder), "q", 3, folder) == 30
    assert append_once(url, staged(url, folder, seed=1), "q", 3, folder) == 0
    with pytest.raises(AnotherBatch):  # an older one, of which nobody knows what it was
        append_once(url, staged(url, folder, seed=1), "q", 2, folder)
    assert append_once(url, staged(url, folder, seed=1), "q", 4, folder) == 30
    assert append_once(url, staged(url, folder), "another", 3, folder) == 30
    assert rows_of(url) == sorted(list(range(30)) * 3)


def begin(url: str, folder: Path) -> None:
    """Leave what an attempt leaves that dies after all is appended, before it is noted."""
    parts = staged(url, folder)
    append_once(url, parts, "q", 6, folder)
    append_once(url, parts, "q", 7, folder)
    unfinished(url, parts)


def unfinished(url: str, parts: list[Staged], **changes: Any) -> None:
    notes = notes_for(url)
    note = notes.get()
    assert note is not None
    files = tuple((part.path, part.partition, part.messages) for part in parts)
    notes.put(note._replace(is_done=False, files=files, **changes))


def begun(url: str, parts: list[Staged], folder: Path) -> None:
    """Leave a stream as a driver does that dies after the note of the first batch."""
    append_once(url, [], "q", 0, folder)
    unfinished(url, parts, batch=0, count=sum(part.messages for part in parts))


def file_of(url: str) -> Path:
    """Return where a stream of this machine has its notes."""
    endpoint = endpoint_of(url)
    assert isinstance(endpoint, NotedAppends)
    notes = endpoint.notes(URL.parse(url))
    assert isinstance(notes, NoteFile)
    return notes.path


def test_a_batch_that_is_there_and_not_noted_as_done_is_found(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    begin(url, folder)
    assert append_once(url, staged(url, folder, seed=1), "q", 7, folder) == 0
    assert rows_of(url) == sorted(list(range(30)) * 2)


@pytest.mark.parametrize("scheme", ["fmq", "log"])
@pytest.mark.parametrize(("on_disk", "new"), [(60, 0), (40, 20), (30, 30)])
def test_a_batch_is_completed_in_a_stream_that_lost_power(
    tmp_path: Path, folder: Path, scheme: str, on_disk: int, new: int
) -> None:
    machine = Machine(scheme, tmp_path / "machine")
    url = machine.url
    parts = staged(url, folder)
    append_once(url, parts, "q", 6, folder)
    append_once(url, parts, "q", 7, folder)
    unfinished(url, parts)
    machine.forget_all_but(on_disk)
    assert append_once(url, staged(url, folder, seed=1), "q", 7, folder) == new
    assert rows_of(url) == sorted(list(range(30)) * 2)


def test_what_others_wrote_behind_it_does_not_matter(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    begin(url, folder)
    with open_writer(url) as writer:
        writer.write(b"row 99")
    assert append_once(url, staged(url, folder, seed=1), "q", 7, folder) == 0
    assert append_once(url, staged(url, folder, seed=1), "q", 8, folder) == 30


def test_what_others_wrote_into_it_is_an_error(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    create(url)
    append_once(url, staged(url, folder, 3), "q", 6, folder)
    parts = staged(url, folder)
    unfinished(url, parts, batch=7, start=3, count=30)
    with open_writer(url) as writer:
        writer.write(b"a stranger's")
    with pytest.raises(Stranger, match="messages from 3 on are not those") as caught:
        append_once(url, parts, "q", 7, folder)
    assert "commits.json" in (caught.value.hint or "")
    assert len(payloads(url)) == 4


@pytest.mark.parametrize("there", [0, 12, 30])
@pytest.mark.parametrize("has_files", [True, False])
def test_another_query_that_writes_after_one_died_does_not_get_in_its_way(
    tmp_path: Path, folder: Path, there: int, has_files: bool
) -> None:
    url = f"log:{tmp_path}/out"
    append_once(url, staged(url, folder, 3), "q", 6, folder)
    parts = staged(url, folder)
    unfinished(url, parts, batch=7, start=3, count=30)
    left = there
    with open_writer(url) as writer:  # what it had appended when it died
        for batch in Commit("", 0, parts).batches():
            writer.write_batch(batch.slice(0, max(0, left)))
            left -= batch.num_rows
    for number in range(3):  # beside it, before it is back
        append_once(url, staged(url, folder / "live", 20, seed=9), "live", number, folder)
    if not has_files:
        remove_batch(folder / "the-query", 7)
    again = staged(url, folder, seed=1)
    assert append_once(url, again, "q", 7, folder) == 30 - there
    assert append_once(url, again, "q", 7, folder) == 0
    expected = [*range(3), *range(30), *list(range(20)) * 3]
    assert rows_of(url) == sorted(expected)
    assert append_once(url, staged(url, folder, seed=2), "q", 8, folder) == 30


@pytest.mark.parametrize("deaths", [(0,), (12,), (12, 6), (0, 6, 0)])
@pytest.mark.parametrize("is_replayed", [True, False])
@pytest.mark.parametrize("is_refilled", [True, False])
def test_a_batch_is_completed_however_often_its_writer_dies_and_another_appends(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    deaths: tuple[int, ...],
    is_replayed: bool,
    is_refilled: bool,
) -> None:
    url = f"log:{tmp_path}/out"
    parts = staged(url, folder)
    for number, count in enumerate(deaths):
        with monkeypatch.context() as patch:
            patch.setattr("penstock.queue.append_once._append", appends_until_it_dies(count))
            with pytest.raises(KeyboardInterrupt):
                append_once(url, parts, "q", 7, folder)
        append_once(url, staged(url, folder / "live", 5), "live", number, folder)
    live = [*range(5)] * len(deaths)
    if is_refilled:  # it dies once more, while it completes the batch
        with monkeypatch.context() as patch:
            patch.setattr("penstock.queue.append_once._append", appends_until_it_dies(3))
            with pytest.raises(KeyboardInterrupt):
                append_once(url, parts, "q", 7 if is_replayed else 8, folder)
    if is_replayed:
        there = sum(deaths) + 3 * is_refilled
        assert append_once(url, staged(url, folder, seed=1), "q", 7, folder) == 30 - there
        assert append_once(url, parts, "q", 7, folder) == 0
        assert rows_of(url) == sorted([*range(30), *live])
    assert append_once(url, staged(url, folder, seed=2), "q", 8, folder) == 30
    assert rows_of(url) == sorted([*range(30), *range(30), *live])


@pytest.mark.parametrize("rows", [10, 40])
@pytest.mark.parametrize("there", [0, 4])
def test_a_batch_that_is_completed_late_is_not_taken_for_that_of_another_that_died(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int, there: int
) -> None:
    url = f"log:{tmp_path}/out"
    parts, others = staged(url, folder), staged(url, folder / "other", rows, seed=1)
    for name, batch, files, count in (("q", 7, parts, 12), ("other", 1, others, there)):
        with monkeypatch.context() as patch:
            patch.setattr("penstock.queue.append_once._append", appends_until_it_dies(count))
            with pytest.raises(KeyboardInterrupt):
                append_once(url, files, name, batch, folder)
    # Its checkpoint has batch 7, so what is missing of that is appended now, behind the other's.
    assert append_once(url, staged(url, folder, 3, seed=2), "q", 8, folder) == 3
    assert append_once(url, others, "other", 1, folder) == rows - there
    assert rows_of(url) == sorted([*range(30), *range(3), *range(rows)])


@pytest.mark.parametrize("has_files", [True, False])
def test_why_a_batch_cannot_be_completed_any_more_is_told(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_files: bool,
) -> None:
    url = f"log:{tmp_path}/out"
    create(f"{url}?segment_slots=8&segment=64k")
    with monkeypatch.context() as patch:
        patch.setattr("penstock.queue.append_once._append", appends_until_it_dies(12))
        with pytest.raises(KeyboardInterrupt):
            append_once(url, staged(url, folder), "q", 7, folder)
    append_once(url, staged(url, folder / "live", 20), "live", 0, folder)
    if has_files:
        trim_log(url, Limits(before_seq=16))
    else:
        remove_batch(folder / "the-query", 7)
    assert append_once(url, staged(url, folder, seed=2), "q", 8, folder) == 30
    (error,) = [one for one in caplog.records if one.levelname == "ERROR"]
    why = "what the stream had of it is gone or changed" if has_files else "its files are gone"
    assert error.getMessage() == f"{url}: batch 7 is not all there, and {why}"


def appends_until_it_dies(count: int) -> Callable[[Writer, Iterable[Batch]], None]:
    def append(writer: Writer, batches: Iterable[Batch]) -> None:
        left = count
        for batch in batches:
            writer.write_batch(batch.slice(0, left))
            left = max(0, left - batch.num_rows)
        raise KeyboardInterrupt

    return append


def test_without_the_files_of_the_first_attempt_its_messages_are_compared(
    tmp_path: Path, folder: Path
) -> None:
    url = f"log:{tmp_path}/out"
    begin(url, folder)
    remove_batch(folder / "the-query", 7)
    assert append_once(url, staged(url, folder), "q", 7, folder) == 0
    begin(f"{url}2", folder)
    remove_batch(folder / "the-query", 7)
    # Those of the batch, in another order; what is not among it is somebody else's.
    assert append_once(f"{url}2", staged(f"{url}2", folder, seed=1), "q", 7, folder) == 0
    begin(f"{url}3", folder)
    remove_batch(folder / "the-query", 7)
    with pytest.raises(Stranger):
        append_once(f"{url}3", staged(f"{url}3", folder, 29), "q", 7, folder)


@pytest.mark.parametrize("has_files", [True, False])
def test_a_batch_is_completed_in_a_queue_that_does_not_store_all_of_its_fields(
    tmp_path: Path, folder: Path, has_files: bool
) -> None:
    url = f"fmq:{tmp_path}/out?layout=classic"
    messages = [Message(0, 0, 0, 0, 0, STREAM, b"why", b"row %d" % n) for n in range(30)]
    task = Staging(folder / "q" / "0", 0)
    task.add([url], batch_from_messages(messages))
    parts = task.finish()
    begun(url, parts, folder)
    with open_writer(url) as writer:  # what it had appended when it died
        writer.write_batch(batch_from_messages(messages[:12]))
    if not has_files:
        again = Staging(folder / "again" / "0", 0)
        again.add([url], batch_from_messages(messages))
        remove_files([part.path for part in parts])
        parts = again.finish()
    assert append_once(url, parts, "q", 0, folder) == 18
    assert rows_of(url) == list(range(30))


def test_dead_letters_are_refused_where_their_reasons_would_be_lost(
    tmp_path: Path, folder: Path
) -> None:
    url = f"fmq:{tmp_path}/queue?layout=classic"
    now = time.time_ns()
    message = Message(0, now, now, 5, 0, None, None, b"bad")
    letter = DeadLetter(message, Code.UNKNOWN, "why", "me", 1, now, now, now)
    task = Staging(folder / "q" / "0", 0)
    task.add([url], batch_from_messages([letter.to_message()]))
    parts = task.finish()
    with pytest.raises(Unsupported, match="takes no dead letters: it keeps no attributes"):
        append_once(url, parts, "q", 0, folder)
    with open_reader(url) as reader:
        assert reader.read(timeout=0) is None
    plain = Staging(folder / "q" / "1", 0)  # other attributes are left out, as ever
    plain.add([url], batch_from_messages([message._replace(attributes=b"{}")]))
    assert append_once(url, plain.finish(), "q", 1, folder) == 1


def test_a_stream_created_anew_gets_the_whole_batch(tmp_path: Path, folder: Path) -> None:
    url = f"fmq:{tmp_path}/out"
    begin(url, folder)
    create(url, replace=True)
    assert append_once(url, staged(url, folder, seed=1), "q", 7, folder) == 30
    assert rows_of(url) == list(range(30))


def test_a_ring_smaller_than_the_batch_is_not_filled_twice(tmp_path: Path, folder: Path) -> None:
    url = f"fmq:{tmp_path}/out?slots=16&size=64k"
    parts = staged(url, folder)
    append_once(url, parts, "q", 7, folder)
    unfinished(url, parts)
    assert append_once(url, parts, "q", 7, folder) == 0
    assert describe(url.partition("?")[0]).youngest_seq == 29


def test_a_batch_is_appended_in_the_order_of_its_partitions(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    parts = staged(url, folder, 9)
    append_once(url, list(reversed(parts)), "q", 0, folder)
    numbers = list(range(9))
    random.Random(0).shuffle(numbers)
    expected = [n for partition in range(3) for n in numbers[partition::3]]
    assert payloads(url) == [b"row %d" % n for n in expected]


def test_another_writer_is_waited_for_and_then_named(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    with open_writer(url), pytest.raises(LockTimeout):
        append_once(f"{url}?lock_timeout=100ms", staged(url, folder), "q", 0, folder)
    assert append_once(f"{url}?lock_timeout=100ms", staged(url, folder), "q", 0, folder) == 30


def test_notes_that_are_damaged_are_named(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    fill(url, [])
    file_of(url).write_text('{"queries": {"q": {"batch": 1}}}')
    with pytest.raises(DamagedQueue, match=r"out\.commits\.json"):
        append_once(url, staged(url, folder), "q", 0, folder)
    assert payloads(url) == []


def test_a_note_that_cannot_be_written_leaves_the_stream_as_it_was(
    tmp_path: Path, folder: Path
) -> None:
    url = f"log:{tmp_path}/out"
    fill(url, [])
    blocked = file_of(url)
    blocked.with_name(f"{blocked.name}.new").mkdir()  # where the note is written first
    with pytest.raises(StorageError, match="commits"):
        append_once(url, staged(url, folder), "q", 0, folder)
    assert payloads(url) == []
    blocked.with_name(f"{blocked.name}.new").rmdir()
    assert append_once(url, staged(url, folder), "q", 0, folder) == 30


def test_what_is_staged_out_of_sight_is_named(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    parts = staged(url, folder)
    remove_batch(folder / "the-query", 7)
    with pytest.raises(FileNotFoundError, match="not to be seen from the driver") as caught:
        append_once(url, parts, "q", 0, folder)
    assert "staging" in str(getattr(caught.value, "hint", ""))


def test_a_stream_written_in_two_ways_gets_the_rows_of_both(tmp_path: Path) -> None:
    urls = [f"log:{tmp_path}/out", f"log:{tmp_path}/x/../out?sync=none"]
    sink = StreamSink(SinkOptions(staging=str(tmp_path / "staging")), ["payload", "url"])
    parts = [part for url in urls for part in staged(url, tmp_path / "staging", 6)]
    sink._append_once([_Message("q", parts)], "q", 0)
    assert rows_of(urls[0]) == sorted(list(range(6)) * 2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fmq:/data/x", "log:/data/x"),
        ("flight://host/radar_1", "flight://host/radar-1"),
        ("flight://host/x?kind=log", "flight://host/x?kind=fmq"),
        ("up+mqtt://broker/?topic=a", "up+mqtt://broker/?topic=b"),
    ],
)
def test_each_stream_has_notes_of_its_own(tmp_path: Path, one: str, other: str) -> None:
    assert identity(one) != identity(other)
    assert notes_beside(one, tmp_path) != notes_beside(other, tmp_path)


def test_a_stream_has_the_same_notes_however_its_url_is_written(tmp_path: Path) -> None:
    for urls in (
        ("fmq:/data/x", "fmq:/data/y/../x.fmq?slots=5"),
        ("log:/data/x", "log:/data/x/?sync=none"),
        ("flight://host/x?kind=log", "flight://host/x?retry=5s&kind=log"),
    ):
        assert len({identity(url) for url in urls}) == 1
        assert len({notes_beside(url, tmp_path) for url in urls}) == 1


def test_a_queue_and_a_log_of_one_name_get_their_own_rows(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/out", f"log:{tmp_path}/out"]
    sink = StreamSink(SinkOptions(staging=str(tmp_path / "staging")), ["payload", "url"])
    parts = [
        part for i, url in enumerate(urls) for part in staged(url, tmp_path / "staging", 6 + 3 * i)
    ]
    sink._append_once([_Message("q", parts)], "q", 0)
    assert [rows_of(url) for url in urls] == [list(range(6)), list(range(9))]


def test_what_was_begun_is_brought_to_its_end_if_the_replay_has_no_rows_for_it(
    tmp_path: Path, folder: Path
) -> None:
    url = f"log:{tmp_path}/out"
    parts = staged(url, folder)
    create(url)
    append_once(url, staged(url, folder, 0), "q", 6, folder)
    unfinished(url, parts, batch=7, count=30)
    sink = StreamSink(SinkOptions(url=(url,), staging=str(folder)), ["payload"])
    sink._append_once([_Message("q", [])], "q", 7)
    assert rows_of(url) == list(range(30))


def test_streams_that_share_what_was_staged_get_it_once_though_one_of_them_fails(
    tmp_path: Path, folder: Path
) -> None:
    urls = [f"log:{tmp_path}/{name}?lock_timeout=100ms" for name in "abc"]
    messages = [Message(0, 0, 0, 0, 0, None, None, b"row %d" % n) for n in range(20)]

    def attempt() -> _Message:
        task = Staging(folder / "query-q" / "0", 0)
        task.add(urls, batch_from_messages(messages[:12]))
        task.add(urls, batch_from_messages(messages[12:]))
        return _Message("q", task.finish())

    sink = StreamSink(
        SinkOptions(outputs={"all": tuple(urls)}, staging=str(folder)), ["payload", "output"]
    )
    first = attempt()
    assert len({part.path for part in first.staged}) == 1
    with open_writer(f"log:{tmp_path}/b"):
        begun(urls[0], [part for part in first.staged if part.url == urls[0]], folder)
        with pytest.raises(LockTimeout):
            sink._append_once([first], "q", 0)
    assert rows_of(f"log:{tmp_path}/a") == rows_of(f"log:{tmp_path}/c") == list(range(20))
    sink._discard([first], "q", 0)
    assert not list(folder.rglob("*.arrow"))  # no stream needs them: a is done, b was not begun
    sink._append_once([attempt()], "q", 0)
    assert [rows_of(f"log:{tmp_path}/{name}") for name in "abc"] == [list(range(20))] * 3
    assert not list(folder.rglob("*.arrow"))


def test_files_stay_after_a_failure_as_long_as_one_of_their_streams_needs_them(
    tmp_path: Path, folder: Path
) -> None:
    urls = [f"log:{tmp_path}/{name}" for name in "ab"]
    task = Staging(folder / "query-q" / "0", 0)
    task.add(urls, batch_from_messages([Message(0, 0, 0, 0, 0, None, None, b"row 0")]))
    parts = task.finish()
    begun(urls[1], [part for part in parts if part.url == urls[1]], folder)
    sink = StreamSink(
        SinkOptions(outputs={"all": tuple(urls)}, staging=str(folder)), ["payload", "output"]
    )
    sink._discard([_Message("q", parts)], "q", 0)
    assert Path(parts[0].path).exists()
    sink._append_once([_Message("q", [])], "q", 0)
    assert rows_of(urls[1]) == [0]


# --- a checkpoint that falls back -----------------------------------------------------------------


def plan_batch(checkpoint: Path, batch: int, *ends: int) -> Origin:
    """Write down what Spark plans: each stream from where the batch before has it to there."""
    folder = checkpoint / "offsets"
    folder.mkdir(parents=True, exist_ok=True)
    (checkpoint / "metadata").write_text('{"id": "q"}')
    (checkpoint / "commits").mkdir(exist_ok=True)
    before = [0] * len(ends)
    if batch:
        stored = json.loads((folder / str(batch - 1)).read_text().splitlines()[2])
        before = [stored[f"log:/{i}"]["end"] for i in range(len(ends))]
    offsets = {
        f"log:/{i}": Offset(7, end, start)
        for i, (start, end) in enumerate(zip(before, ends, strict=True))
    }
    (folder / str(batch)).write_text(f"v1\n{{}}\n{json.dumps(offsets_to_json(offsets))}")
    return origin_of(str(checkpoint), batch, "run")


def rows(url: str, folder: Path, first: int, end: int, batch: int = 0) -> list[Staged]:
    task = Staging(folder / "q" / str(batch), 0)
    messages = [Message(0, 0, 0, 0, 0, None, None, b"row %d" % n) for n in range(first, end)]
    task.add([url], batch_from_messages(messages))
    return task.finish()


@pytest.fixture
def two(tmp_path: Path, folder: Path) -> str:
    """A log with two batches of a query: rows 0 to 9 and 10 to 19."""
    url = f"log:{tmp_path}/out"
    for batch in range(2):
        origin = plan_batch(tmp_path / "c", batch, 10 * batch + 10)
        assert append_once(
            url, rows(url, folder, 10 * batch, 10 * batch + 10), "q", batch, folder, origin
        )
    return url


def test_the_same_batch_is_skipped_and_one_that_begins_the_same_completed(
    two: str, tmp_path: Path, folder: Path
) -> None:
    same = plan_batch(tmp_path / "c", 1, 20)
    assert append_once(two, rows(two, folder, 10, 20), "q", 1, folder, same) == 0
    grown = plan_batch(tmp_path / "c", 1, 35)
    assert append_once(two, rows(two, folder, 10, 35), "q", 1, folder, grown) == 15
    assert append_once(two, rows(two, folder, 10, 35), "q", 1, folder, grown) == 0
    assert append_once(
        two, rows(two, folder, 35, 40), "q", 2, folder, plan_batch(tmp_path / "c", 2, 40)
    )
    assert rows_of(two) == list(range(40))


def test_one_that_has_several_earlier_ones_in_it_is_completed(
    two: str, tmp_path: Path, folder: Path
) -> None:
    whole = plan_batch(tmp_path / "c", 0, 30)
    assert append_once(two, rows(two, folder, 0, 30), "q", 0, folder, whole) == 10
    assert rows_of(two) == list(range(30))


def test_another_one_is_refused_and_both_ranges_are_named(
    two: str, tmp_path: Path, folder: Path
) -> None:
    less = plan_batch(tmp_path / "c", 1, 15)
    with pytest.raises(
        AnotherBatch, match=r"batch 1 is made of log:/0 10 to 14, but delivered was log:/0 10 to 19"
    ) as caught:
        append_once(two, rows(two, folder, 10, 15), "q", 1, folder, less)
    assert "checkpoint" in (caught.value.hint or "")
    # The next number, of messages that were delivered under another.
    plan_batch(tmp_path / "c", 1, 15)
    with pytest.raises(AnotherBatch, match=r"log:/0 15 to 24, but delivered was log:/0 up to 19"):
        append_once(
            two, rows(two, folder, 15, 25), "q", 2, folder, plan_batch(tmp_path / "c", 2, 25)
        )
    assert rows_of(two) == list(range(20))


def test_rows_that_are_others_by_now_are_refused(two: str, tmp_path: Path, folder: Path) -> None:
    grown = plan_batch(tmp_path / "c", 1, 35)
    with pytest.raises(AnotherBatch, match="not all of that is among it"):
        append_once(two, rows(two, folder, 11, 35), "q", 1, folder, grown)
    assert rows_of(two) == list(range(20))


def test_what_a_ring_has_overwritten_cannot_be_compared_and_is_refused(
    tmp_path: Path, folder: Path
) -> None:
    url = f"fmq:{tmp_path}/ring?slots=8&size=64k"
    same = plan_batch(tmp_path / "c", 0, 10)
    append_once(url, rows(url, folder, 0, 10), "q", 0, folder, same)
    assert (
        append_once(url, rows(url, folder, 0, 10), "q", 0, folder, same) == 0
    )  # known all the same
    with pytest.raises(AnotherBatch, match="not in the stream any more"):
        append_once(
            url, rows(url, folder, 0, 20), "q", 0, folder, plan_batch(tmp_path / "c", 0, 20)
        )


def test_one_that_was_begun_and_has_grown_since_is_completed(tmp_path: Path, folder: Path) -> None:
    url = f"log:{tmp_path}/out"
    first = plan_batch(tmp_path / "c", 0, 20)
    parts = rows(url, folder, 0, 20)
    append_once(url, rows(url, folder, 0, 12), "q", 0, folder, first)  # the driver died half-way
    unfinished(url, parts, count=20)
    grown = plan_batch(tmp_path / "c", 0, 30)
    assert append_once(url, rows(url, folder, 0, 30), "q", 0, folder, grown) == 18
    assert rows_of(url) == list(range(30))


def test_a_batch_that_spark_counts_as_done_and_that_is_not_all_there_is_brought_to_its_end(
    tmp_path: Path, folder: Path
) -> None:
    """After a power failure, which the stream's last messages did not survive."""
    url = f"log:{tmp_path}/out"
    first = plan_batch(tmp_path / "c", 0, 20)
    append_once(url, rows(url, folder, 0, 12), "q", 0, folder, first)
    unfinished(url, rows(url, folder, 0, 20), count=20)
    second = plan_batch(tmp_path / "c", 1, 25)
    assert append_once(url, rows(url, folder, 20, 25), "q", 1, folder, second) == 5
    assert rows_of(url) == list(range(25))


def test_a_query_whose_checkpoint_has_lost_its_name_is_known_by_its_place(
    two: str, tmp_path: Path, folder: Path
) -> None:
    time.sleep(0.01)
    (tmp_path / "c" / "metadata").write_text('{"id": "new"}')
    origin = origin_of(str(tmp_path / "c"), 1, "run")
    assert append_once(two, rows(two, folder, 10, 20), "new", 1, folder, origin) == 0
    third = origin_of(str(tmp_path / "c"), 1, "run")
    assert append_once(two, rows(two, folder, 10, 20), "q", 1, folder, third) == 0


def test_many_batches_leave_a_note_of_bounded_size(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_MOST_KEPT", 2000)
    url = f"log:{tmp_path}/out"
    for batch in range(60):
        origin = Origin({"0 log:/a": Span(7, batch, batch + 1)}, None, "run")
        append_once(url, rows(url, folder, batch, batch + 1), "q", batch, folder, origin)
    assert file_of(url).stat().st_size < 3000
    for first in (0, 30):  # what is forgotten is refused, and nothing is appended again
        origin = Origin({"0 log:/a": Span(7, first, 70)}, None, "run")
        with pytest.raises(AnotherBatch):
            append_once(url, rows(url, folder, first, 70), "q", first, folder, origin)
    origin = Origin({"0 log:/a": Span(7, 55, 62)}, None, "run")
    assert append_once(url, rows(url, folder, 55, 62), "q", 55, folder, origin) == 2
    assert rows_of(url) == list(range(62))


def test_the_checkpoint_is_on_the_disk_before_a_note_tells_of_the_batch(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def record(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fsync", record)
    url = f"log:{tmp_path}/out"
    origin = plan_batch(tmp_path / "c", 0, 10)
    append_once(url, rows(url, folder, 0, 10), "q", 0, folder, origin)
    note = next(i for i, name in enumerate(synced) if "commits.json" in name)
    assert {"0", "offsets", "metadata", "c"} <= set(synced[:note])


def test_a_batch_is_not_done_before_its_file_is_there(tmp_path: Path, folder: Path) -> None:
    with small_disk_at(tmp_path / "disk", "1m") as disk:
        url = f"jsonl:{disk}/file"
        ballast = disk / "ballast"
        ballast.write_bytes(bytes((1 << 20) - 8192))
        with pytest.raises(StorageError, match="No space left"):
            append_once(url, staged(url, folder, 300), "q", 0, folder)
        ballast.unlink()
        assert append_once(url, staged(url, folder, 300), "q", 0, folder) == 300
        assert rows_of(url) == list(range(300))


# --- into streams that cannot be read again -------------------------------------------------------


def one_message(url: str, folder: Path, payload: bytes = b"1") -> list[Staged]:
    task = Staging(folder / "q" / "0", 0)
    now = time.time_ns()
    task.add([url], batch_from_messages([Message(0, now, now, 0, 0, STREAM, None, payload)]))
    return task.finish()


def test_a_receiver_of_datagrams_on_this_machine_gets_them(folder: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(5)
        url = f"jrtc+udp://127.0.0.1:{receiver.getsockname()[1]}"
        assert append_once(url, one_message(url, folder), "q", 0, folder) == 1
        assert receiver.recv(100) == STREAM.to_bytes() + b"1"


def test_what_nobody_has_taken_from_a_server_of_one_batch_is_an_error_and_not_done(
    folder: Path,
) -> None:
    url = f"psi://127.0.0.1:{free_port()}/A?linger=0.1"
    for _ in range(2):
        with pytest.raises(WriteTimeout, match="nobody took 1 messages") as caught:
            append_once(url, one_message(url, folder), "q", 0, folder)
    assert "penstock cp" in str(caught.value.hint)


def test_options_that_only_writers_take_are_no_hindrance(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    url = f"jsonl:{path}?decode=struct:<h&replace=false"
    assert append_once(url, one_message(url, folder, b"\1\0"), "q", 0, folder) == 1
    assert json.loads(path.read_text())["f0"] == 1
    with FmqServer(FmqServerOptions(root=tmp_path, port=0)) as server:
        url = f"fmqp://127.0.0.1:{server.port}/q"
        parts = one_message(f"{url}?slots=100&compress=gzip", folder)
        assert append_once(parts[0].url, parts, "q", 0, folder) == 1
        assert payloads(url) == [b"1"]
