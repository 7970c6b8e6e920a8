"""Processes are killed at random under load: the queue opens, the books add up, others go on."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from penstock.core.errors import NotFound
from support import self_describing
from support.lives import Life, Lives, Report
from support.waiting import SOON, background, waits
from support.wide_lives import LAST_TYPE
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import list_queue

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Messages that a batch has at most.
BATCH = 9


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in /dev/shm."""
    directory = Path("/dev/shm") / f"penstock-test-{os.getpid()}-{tmp_path.name}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


# --- kill anybody ---------------------------------------------------------------------------------


class Part(NamedTuple):
    """What one process does, and where it reports."""

    role: str
    life: Life
    report: Report
    #: The number that its messages carry.
    writer: int


class Company:
    """Writers, readers and a held reader of one queue, who are killed and replaced."""

    def __init__(self, lives: Lives, url: str, directory: Path, *, many: bool) -> None:
        self._lives = lives
        self._directory = directory
        self.url = url
        self.many = many
        self.parts: list[Part] = []
        #: Everybody who ever lived.
        self.history: list[Part] = []
        for role in ("holder", "reader", "reader", "writer", *(["writer"] if many else [])):
            self.start(role)

    def start(self, role: str) -> Part:
        number = len(self.history)
        report = Report(self._directory / f"{number} {role}")
        if role == "writer":
            life = self._lives.start(
                "produce",
                url=f"{self.url}?hold=held",
                report=report.path,
                writer=number,
                batch=BATCH if number % 2 else 1,
                largest=3000,
            )
        else:
            url = f"{self.url}?hold=held" if role == "holder" else self.url
            life = self._lives.start("consume", url=url, report=report.path, at_once=20)
        part = Part(role, life, report, number)
        self.parts.append(part)
        self.history.append(part)
        report.wait_for(b"r")
        return part

    def kill(self, part: Part) -> None:
        assert part.life.kill().killed, f"a {part.role} ended by itself"
        self.parts.remove(part)

    def of(self, role: str) -> list[Part]:
        return [part for part in self.history if part.role == role]


def check_now(company: Company, *, is_quiet: bool) -> None:
    """Open the queue, and read what is there."""
    with wide_reader(company.url) as reader:
        messages = reader.read_many(1000)
        books = reader.statistics()
    for message in messages:
        self_describing.check(message.payload)
    seqs = [message.seq for message in messages]
    assert seqs == sorted(set(seqs))
    if is_quiet:
        assert books.lost == 0
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
        path = company.url.removeprefix("fmq:") + ".fmq"
        assert [stored.seq for stored in list_queue(path).messages] == seqs


def check_books(company: Company, last: int) -> None:
    """Make sure that everybody tells the same story, and that it has no gap."""
    contents: dict[int, tuple[int, int]] = {}
    for part in company.of("writer"):
        numbers = []
        for writer, number, seq in part.report.records(b"w"):
            assert seq not in contents, "two messages have the same number"
            contents[seq] = writer, number
            numbers.append(number)
        assert numbers == list(range(len(numbers)))
    # What a writer was killed at may be there without its having been told.
    untold: dict[int, set[int]] = defaultdict(set)
    for part in (*company.of("reader"), *company.of("holder")):
        for writer, number, seq in part.report.records(b"m"):
            if seq in contents:
                assert contents[seq] == (writer, number)
            else:
                untold[writer].add(number)
    assert all(len(numbers) <= BATCH for numbers in untold.values())
    for part in company.of("reader"):
        check_story(part, last)
    check_held(company, last)


def story_of(part: Part) -> list[tuple[int, int]]:
    """Return the ranges of messages that a reader got or was told it lost, in order."""
    ranges = [(seq, seq) for *_, seq in part.report.records(b"m")]
    return sorted(ranges + [(first, end) for _, first, end in part.report.records(b"l")])


def check_story(part: Part, last: int) -> None:
    ranges = story_of(part)
    for (_, end), (first, _) in itertools.pairwise(ranges):
        assert first == end + 1, f"{part.role}: {end} is followed by {first}"
    for _, messages, lost in part.report.records(b"e"):  # it lived to see the end
        assert ranges[-1][1] == last - 1
        assert messages - 1 + lost == last - ranges[0][0]


def check_held(company: Company, last: int) -> None:
    """Each life of the held reader begins at or before the end of the one before."""
    end = 0
    for part in company.of("holder"):
        check_story(part, last)
        ranges = story_of(part)
        if ranges:
            assert ranges[0][0] <= end, "between two lives messages went silently"
            end = max(end, ranges[-1][1] + 1)
    assert end == last


@pytest.mark.parametrize("many", [False, True], ids=["one writer", "many writers"])
@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize(
    "rounds", [10, pytest.param(200, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_whoever_is_killed_the_books_of_all_others_add_up(
    storage: str, many: bool, rounds: int, lives: Lives, tmp_path: Path, memory_path: Path
) -> None:
    chance = random.Random(f"{storage} {many} {rounds}")
    url = f"fmq:{(tmp_path if storage == 'file' else memory_path) / 'queue'}"
    wide_writer(f"{url}?slots=64&size=65536&writers={'many' if many else 'one'}").close()
    company = Company(lives, url, tmp_path, many=many)
    for _ in range(rounds):
        time.sleep(chance.uniform(0, 0.05))
        part = chance.choice(company.parts)
        company.kill(part)
        check_now(company, is_quiet=part.role == "writer" and not many)
        company.start(part.role)
    for part in [part for part in company.parts if part.role == "writer"]:
        company.kill(part)
    check_now(company, is_quiet=True)
    with wide_writer(f"{url}?hold=held") as writer:
        last = writer.write(b"", LAST_TYPE)
    for part in company.parts:
        assert part.life.end() == (False, 0)
    check_books(company, last)


# --- held readers ---------------------------------------------------------------------------------


def test_with_keep_the_writer_goes_on_waiting_for_a_killed_reader(
    queue_path: str, lives: Lives, tmp_path: Path
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(f"{url}?slots=4&size=8192&hold=archive&keep=true") as writer:
        writer.write_many([b"before"] * 4)
        report = Report(tmp_path / "report")
        reader = lives.start("open_and_wait", url=f"{url}?hold=archive", report=report.path)
        report.wait_for(b"r")
        with background(writer.write, b"one too many") as write:
            assert waits(write)
            reader.kill()
            time.sleep(0.3)
            assert waits(write)
            with wide_reader(f"{url}?hold=archive") as again:
                assert [m.seq for m in again.read_many(9)] == [0, 1, 2, 3]
                again.acknowledge()
                assert write.result(SOON) == 4
                assert again.statistics().lost == 0


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_a_forked_child_does_not_keep_a_killed_writer_alive(
    how: str, queue_path: str, lives: Lives, tmp_path: Path
) -> None:
    url = f"fmq:{queue_path}"
    wide_writer(f"{url}?slots=4&size=8192").close()
    report = Report(tmp_path / "report")
    writer = lives.start("open_and_fork", url=url, report=report.path, role="writer", how=how)
    _, child, _ = report.wait_for(b"p")
    try:
        writer.kill()
        began = time.monotonic()
        with wide_writer(f"{url}?lock_timeout=20") as next_writer:
            assert time.monotonic() - began < 2
            assert next_writer.write(b"on") == 0
        os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["os.fork", "multiprocessing"])
def test_a_forked_child_does_not_keep_a_killed_reader_alive(
    how: str, queue_path: str, lives: Lives, tmp_path: Path
) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(f"{url}?slots=4&size=8192&hold=a") as writer:
        writer.write_many([b"before"] * 4)
        report = Report(tmp_path / "report")
        reader = lives.start(
            "open_and_fork", url=f"{url}?hold=a", report=report.path, role="reader", how=how
        )
        _, child, _ = report.wait_for(b"p")
        try:
            with background(writer.write, b"one too many") as write:
                assert waits(write)
                began = time.monotonic()
                reader.kill()
                assert write.result(SOON) == 4
                assert time.monotonic() - began < 2
            with wide_reader(f"{url}?hold=a") as again:
                assert [m.seq for m in again.read_many(9)] == [1, 2, 3, 4]
                assert again.statistics().lost == 1
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_does_not_acknowledge_for_its_parent(queue_path: str) -> None:
    url = f"fmq:{queue_path}"
    with wide_writer(f"{url}?slots=4&size=8192&hold=a") as writer:
        writer.write_many([b"before"] * 4)
        with wide_reader(f"{url}?hold=a") as reader:
            assert reader.read(0)
            assert reader.read(0)
            pid = os.fork()
            if pid == 0:
                try:
                    reader.close()
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            [row] = list_queue(f"{queue_path}.fmq").readers
            assert (row.name, row.position, row.pid) == ("a", 1, os.getpid())
            assert [m.seq for m in reader.read_many(9)] == [2, 3]


# --- what a dead machine's worth of processes leaves in memory ------------------------------------


@pytest.mark.parametrize("writers", ["one", "many"])
def test_a_stale_queue_in_memory_does_not_keep_anybody_from_starting(
    writers: str, lives: Lives, tmp_path: Path, memory_path: Path
) -> None:
    url = f"fmq:{memory_path / 'queue'}"
    options = f"slots=16&size=65536&writers={writers}"
    wide_writer(f"{url}?{options}").close()
    parts = []
    for number, (operation, query) in enumerate(
        [("open_and_wait", "?hold=a"), ("open_and_wait", ""), ("reserve_and_wait", "")]
    ):
        report = Report(tmp_path / f"{number}")
        parts.append(lives.start(operation, url=url + query, report=report.path))
        report.wait_for(b"r")
    for part in parts:
        part.kill()
    began = time.monotonic()
    with wide_writer(f"{url}?{options}&hold=a") as writer, wide_reader(f"{url}?hold=a") as reader:
        assert writer.write(b"on") == 0
        message = reader.read(SOON)
        assert message is not None
        assert message.payload == b"on"
    with wide_writer(f"{url}?{options}&create=always") as writer:
        assert writer.write(b"anew") == 0
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "kills", [5, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(300)])]
)
def test_a_process_killed_while_it_creates_a_queue_leaves_a_whole_one_or_none(
    kills: int, lives: Lives, tmp_path: Path, memory_path: Path
) -> None:
    chance = random.Random(kills)
    path = memory_path / "queue"
    for number in range(kills):
        report = Report(tmp_path / f"{number}")
        life = lives.start("create_again_and_again", url=f"fmq:{path}", report=report.path)
        report.wait_for(b"r")
        time.sleep(chance.uniform(0, 0.02))
        assert life.kill().killed
        try:
            with wide_reader(f"fmq:{path}") as reader:
                assert reader.read_many(10) == []
        except NotFound:
            pass
        with wide_writer(f"fmq:{path}?slots=16&size=65536") as writer:
            assert writer.write(b"first") == 0
        assert len(list_queue(f"{path}.fmq").messages) == 1
        Path(f"{path}.fmq").unlink()
