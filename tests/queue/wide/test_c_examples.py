"""C producers and consumers, made from the header alone, on queues that Python uses too."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import Message, Position, StreamId, create, describe, open_reader, open_writer
from penstock.core.errors import LockTimeout
from support.processes import Peers, peers
from support.unprivileged import run_without_rights
from support.until import until
from support.wide_files import put_state
from support.wide_oracle import crc32c, list_queue

ROOT = Path(__file__).parents[3]
INCLUDE = ROOT / "include"
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
#: Nothing here takes this long (seconds) on a machine that is very busy.
LONG = 60


class Programs(NamedTuple):
    producer: str
    consumer: str


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        made = Programs(f"{folder}/producer", f"{folder}/consumer")
        for program in made:
            source = ROOT / "examples" / "c" / f"{Path(program).name}.c"
            run("cc", *STRICT, "-O2", "-I", INCLUDE, source, "-o", program)
        yield made


@pytest.fixture
def others() -> Iterator[Peers]:
    with peers() as running:
        yield running


class Outcome(NamedTuple):
    code: int
    #: What it printed: `name=value`, numbers and the checksum.
    says: dict[str, int]
    error: str


def outcome(process: subprocess.Popen[str]) -> Outcome:
    out, error = process.communicate(timeout=LONG)
    pairs = dict(word.split("=") for word in out.split())
    says = {name: int(value, 16 if name == "crc32c" else 10) for name, value in pairs.items()}
    return Outcome(process.returncode, says, error)


def run(*command: object) -> Outcome:
    done = start(*command)
    result = outcome(done)
    if Path(str(command[0])).name in {"cc", "g++"}:
        assert result.code == 0, result.error
    return result


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def end_all(processes: list[subprocess.Popen[str]]) -> None:
    while processes:
        process = processes.pop()
        process.kill()
        process.communicate()


def produced(messages: list[Message]) -> dict[int, list[int]]:
    """Return the numbers that each producer wrote, in the order of the queue."""
    found: dict[int, list[int]] = {}
    for message in messages:
        pid, number, rest = message.payload.split(b" ", 2)
        assert rest.strip(b".") == b""
        found.setdefault(int(pid), []).append(int(number))
    return found


# --- the header -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compiler",
    [
        ["cc", *STRICT, "-D_GNU_SOURCE", "-x", "c"],
        ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-x", "c++"],
    ],
    ids=["C11", "C++17"],
)
def test_the_header_can_be_used_alone(compiler: list[str], tmp_path: Path) -> None:
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no {compiler[0]} here")
    source = tmp_path / "alone"
    source.write_text("#include <penstock/ring.h>\nint main(void) { return 0; }\n")
    run(*compiler, "-I", INCLUDE, source, "-o", tmp_path / "program")
    assert run(tmp_path / "program").code == 0


def test_the_header_says_which_macro_it_needs(tmp_path: Path) -> None:
    source = tmp_path / "alone.c"
    source.write_text("#include <penstock/ring.h>\n")
    refused = outcome(start("cc", "-std=c11", "-I", INCLUDE, "-c", source))
    assert refused.code != 0
    assert "define _GNU_SOURCE before the first include" in refused.error


def test_a_c_writer_says_on_the_disk_that_it_writes_before_its_first_message(
    tmp_path: Path, queue_path: str
) -> None:
    with open_writer(f"fmq:{queue_path}?sync=batch") as writer:
        writer.write(b"all is synced, and says so")
    source = tmp_path / "writer.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <penstock/ring.h>
        #include <stdio.h>
        static penstock_ring ring;
        static int syncs, boots, heads;
        int fdatasync(int fd) {
            (void)fd;
            syncs++;
            boots += ring.header->boot_id[0] != 0 || ring.header->boot_id[1] != 0;
            heads += (int)ring.header->head;
            return 0;
        }
        int main(int count, char **words) {
            int fd;
            penstock_writer writer;
            if (count != 2 || penstock_map(words[1], true, &ring, &fd) != NULL)
                return 1;
            for (int i = 0; i < 2; i++) /* the second finds it said already */
                if (penstock_writer_open(&writer, ring, fd) != 0)
                    return 2;
            if (penstock_write(&writer, "x", 1, 0, 0) != PENSTOCK_OK)
                return 3;
            printf("syncs=%d boots=%d heads=%d", syncs, boots, heads);
            return 0;
        }
        """
    )
    run("cc", *STRICT, "-I", INCLUDE, source, "-o", tmp_path / "writer")
    done = run(tmp_path / "writer", f"{queue_path}.fmq")
    assert (done.code, done.says) == (0, {"syncs": 1, "boots": 1, "heads": 1})


@pytest.mark.parametrize("options", ["", "?writers=many"])
def test_a_c_producer_notices_that_its_queue_was_removed(
    programs: Programs, queue_path: str, options: str
) -> None:
    create(f"fmq:{queue_path}{options}")
    producer = start(programs.producer, f"{queue_path}.fmq", 0, 100)
    until(lambda: describe(f"fmq:{queue_path}").count > 0)
    Path(f"{queue_path}.fmq").unlink()
    done = outcome(producer)
    assert (done.code, "the queue was removed" in done.error) == (1, True)


def test_a_c_writer_of_a_removed_queue_is_told_each_time(tmp_path: Path, queue_path: str) -> None:
    create(f"fmq:{queue_path}")
    source = tmp_path / "writer.c"
    source.write_text(
        """
        #define _GNU_SOURCE
        #include <penstock/ring.h>
        int main(int count, char **words) {
            int fd, memory = memfd_create("queue", 0);
            penstock_ring ring;
            penstock_writer writer;
            if (count != 2 || penstock_map(words[1], true, &ring, &fd) != NULL)
                return 1;
            if (penstock_writer_open(&writer, ring, fd) != 0 || penstock_is_removed(memory))
                return 2;
            unlink(words[1]);
            for (int i = 0; i < 2; i++) /* silent for long: not even the first gets there */
                if (penstock_write(&writer, "x", 1, 0, 0) != PENSTOCK_REMOVED)
                    return 3;
            return 0;
        }
        """
    )
    run("cc", *STRICT, "-I", INCLUDE, source, "-o", tmp_path / "writer")
    assert run(tmp_path / "writer", f"{queue_path}.fmq").code == 0


def test_a_c_consumer_ends_when_its_queue_was_removed(programs: Programs, queue_path: str) -> None:
    with open_writer(f"fmq:{queue_path}") as writer:
        writer.write(b"the last")
    consumer = start(programs.consumer, f"{queue_path}.fmq", 0, 10 * LONG)
    until(lambda: list_queue(f"{queue_path}.fmq").header.sleeping == 1)
    Path(f"{queue_path}.fmq").unlink()
    assert outcome(consumer).says["messages"] == 1


# --- Python writes, C reads -----------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "&crc=true", "&writers=many", "&crc=true&sparse=true"])
def test_a_c_consumer_gets_every_byte_that_python_wrote(
    programs: Programs, queue_path: str, options: str
) -> None:
    chance = random.Random(options)
    payloads = [chance.randbytes(chance.choice((0, 1, 63, 64, 65, 5000))) for _ in range(60)]
    with open_writer(f"fmq:{queue_path}?slots=64&size=1M{options}") as writer:
        for number, payload in enumerate(payloads):
            own = StreamId(chance.randbytes(16)) if number % 3 == 0 else None
            writer.write(payload, stream=own, attributes=b"a" * number if number % 2 else None)
    got = run(programs.consumer, f"{queue_path}.fmq", len(payloads), LONG)
    assert got.code == 0
    assert got.says == {
        "first": 0,
        "next": 60,
        "messages": 60,
        "bytes": sum(map(len, payloads)),
        "lost": 0,
        "damaged": 0,
        "crc32c": crc32c(b"".join(payloads)),
    }


def test_a_c_consumer_that_sleeps_is_woken_by_a_python_writer(
    programs: Programs, queue_path: str
) -> None:
    with open_writer(f"fmq:{queue_path}") as writer:
        consumer = start(programs.consumer, f"{queue_path}.fmq", 3, LONG)
        for number in range(3):
            # It leaves a mark in the header before it sleeps.
            until(lambda: list_queue(f"{queue_path}.fmq").header.sleeping == 1)
            writer.write(b"%d" % number)
        got = outcome(consumer)
    assert (got.code, got.says["messages"], got.says["lost"]) == (0, 3, 0)
    assert list_queue(f"{queue_path}.fmq").header.wakes >= 3


def test_a_c_consumer_counts_what_was_overwritten(programs: Programs, queue_path: str) -> None:
    with open_writer(f"fmq:{queue_path}?slots=8") as writer:
        writer.write(b"first")
        consumer = start(programs.consumer, f"{queue_path}.fmq", 0, 2)
        until(lambda: list_queue(f"{queue_path}.fmq").header.sleeping == 1)
        os.kill(consumer.pid, signal.SIGSTOP)
        writer.write_many([b"%d" % number for number in range(100)])
        os.kill(consumer.pid, signal.SIGCONT)
        got = outcome(consumer)
    assert got.says == {
        "first": 0, "next": 101, "messages": 9, "lost": 92, "damaged": 0,
        "bytes": 5 + 16, "crc32c": crc32c(b"first" + b"".join(b"%d" % n for n in range(92, 100))),
    }  # fmt: skip


def test_a_c_consumer_counts_what_is_damaged(programs: Programs, queue_path: str) -> None:
    with open_writer(f"fmq:{queue_path}?crc=true&slots=8") as writer:
        writer.write_many([b"one", b"two", b"three"])
    header = list_queue(f"{queue_path}.fmq").header
    with Path(f"{queue_path}.fmq").open("r+b") as file:
        file.seek(header.buffer_offset + 64)
        file.write(b"T")
    got = run(programs.consumer, f"{queue_path}.fmq", 0, 0)
    assert (got.says["messages"], got.says["damaged"], got.says["next"]) == (2, 1, 3)
    assert got.says["crc32c"] == crc32c(b"onethree")


def test_a_c_consumer_ends_when_it_has_read_all_of_a_sealed_queue(
    programs: Programs, queue_path: str
) -> None:
    with open_writer(f"fmq:{queue_path}") as writer:
        writer.write(b"the last")
    put_state(queue_path, 1)
    got = run(programs.consumer, f"{queue_path}.fmq", 0, LONG)
    assert got.says["messages"] == 1


def test_a_c_consumer_reads_a_queue_that_it_may_not_write_to(programs: Programs) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = f"{folder}/queue"
        with open_writer(f"fmq:{path}") as writer:
            writer.write_many([b"1", b"2"])
            Path(f"{path}.fmq").chmod(0o444)

            def check() -> None:
                got = run(programs.consumer, f"{path}.fmq", 2, LONG)
                assert got.says["messages"] == 2
                refused = run(programs.producer, f"{path}.fmq", 1, 1)
                assert (refused.code, "Permission denied" in refused.error) == (1, True)

            run_without_rights(check)


# --- C writes, Python reads -------------------------------------------------------------------


@pytest.mark.parametrize("options", ["", "&crc=true", "&writers=many&crc=true"])
@pytest.mark.parametrize("size", [32, 1000, 40_000])
def test_python_gets_every_byte_that_a_c_producer_wrote(
    programs: Programs, queue_path: str, options: str, size: int
) -> None:
    create(f"fmq:{queue_path}?slots=64&size=16M{options}")
    before = time.time_ns()
    done = run(programs.producer, f"{queue_path}.fmq", 50, size)
    assert (done.code, done.says) == (0, {"written": 50})
    with open_reader(f"fmq:{queue_path}", start=Position.START) as reader:
        messages = reader.read_many(100)
        assert reader.statistics().lost == 0
    [numbers] = produced(messages).values()
    assert numbers == list(range(50))
    assert {len(m.payload) for m in messages} == {size}
    assert {(m.type, m.subtype, m.stream, m.attributes) for m in messages} == {(1, 0, None, None)}
    assert all(before <= m.created_ns <= time.time_ns() for m in messages)
    listing = list_queue(f"{queue_path}.fmq")
    assert [m.payload for m in listing.messages] == [m.payload for m in messages]


def test_a_python_reader_that_sleeps_is_woken_by_a_c_producer(
    programs: Programs, queue_path: str
) -> None:
    create(f"fmq:{queue_path}")
    with open_reader(f"fmq:{queue_path}") as reader:
        later = threading.Timer(0.3, run, (programs.producer, f"{queue_path}.fmq", 1, 64))
        later.start()
        message = reader.read(timeout=LONG)
        later.join()
    assert message is not None


def test_a_c_producer_says_why_it_does_not_write(programs: Programs, queue_path: str) -> None:
    for options, reason in {
        "compress=lz4": "compressed or sparse",
        "sparse=true": "compressed or sparse",
        "size=4096": "larger than the queue's buffer",
    }.items():
        create(f"fmq:{queue_path}?{options}", replace=True)
        refused = run(programs.producer, f"{queue_path}.fmq", 1, 5000)
        assert refused.code == 1
        assert reason in refused.error
        assert list_queue(f"{queue_path}.fmq").messages == []
    with open_writer(f"fmq:{queue_path}") as writer:
        writer.write(b"before the machine went down")
    data = bytearray(Path(f"{queue_path}.fmq").read_bytes())
    data[400:416] = bytes(range(16))
    Path(f"{queue_path}.fmq").write_bytes(data)
    refused = run(programs.producer, f"{queue_path}.fmq", 1, 10)
    assert "let penstock open it first" in refused.error
    assert Path(f"{queue_path}.fmq").read_bytes() == data
    open_writer(f"fmq:{queue_path}").close()
    assert run(programs.producer, f"{queue_path}.fmq", 1, 10).says == {"written": 1}
    Path(f"{queue_path}.fmq").write_bytes(bytes(5000))
    assert "magic" in run(programs.producer, f"{queue_path}.fmq", 1, 1).error
    assert "No such file" in run(programs.producer, f"{queue_path}.none", 1, 1).error


def test_a_queue_of_one_writer_is_not_shared_by_c_and_python(
    programs: Programs, queue_path: str
) -> None:
    with open_writer(f"fmq:{queue_path}") as writer:
        refused = run(programs.producer, f"{queue_path}.fmq", 1, 1)
        assert "another process writes to it" in refused.error
        assert writer.write(b"still the writer") == 0
    producer = start(programs.producer, f"{queue_path}.fmq", 0, 100)
    try:
        until(lambda: describe(f"fmq:{queue_path}").details["writer_pid"] == producer.pid)
        with pytest.raises(LockTimeout, match=str(producer.pid)):
            open_writer(f"fmq:{queue_path}?lock_timeout=0.1")
    finally:
        producer.kill()
        producer.communicate()
    with open_writer(f"fmq:{queue_path}?lock_timeout={LONG}") as writer:  # as soon as it is dead
        last = writer.write(b"after it")
    listing = list_queue(f"{queue_path}.fmq")
    assert (listing.messages[-1].seq, listing.messages[-1].payload) == (last, b"after it")


# --- both -------------------------------------------------------------------------------------


def test_a_c_producer_and_a_c_consumer_at_full_speed_account_for_every_message(
    programs: Programs, queue_path: str
) -> None:
    create(f"fmq:{queue_path}?slots=256&size=64k&crc=true")
    consumers = [start(programs.consumer, f"{queue_path}.fmq", 0, 2) for _ in range(2)]
    until(lambda: list_queue(f"{queue_path}.fmq").header.sleeping == 1)
    assert run(programs.producer, f"{queue_path}.fmq", 200_000, 100).says == {"written": 200_000}
    for consumer in consumers:
        says = outcome(consumer).says
        assert says["damaged"] == 0
        assert says["messages"] + says["lost"] == says["next"] - says["first"]
        assert says["next"] == 200_000


def test_many_c_and_python_writers_share_a_queue_and_nothing_is_lost_or_torn(
    programs: Programs, queue_path: str, others: Peers
) -> None:
    url = f"fmq:{queue_path}?writers=many&slots=16384&size=8M&crc=true"
    create(url)
    with open_reader(f"fmq:{queue_path}") as reader:
        pythons = [
            others.start("write", url=url, writer=number, count=1000, smallest=10, largest=90)
            for number in (1, 2)
        ]
        for peer in pythons:
            peer.hear()
        producers = [start(programs.producer, f"{queue_path}.fmq", 2000, 80) for _ in range(3)]
        for peer in pythons:
            peer.say()
        assert [outcome(p).says for p in producers] == [{"written": 2000}] * 3
        assert [peer.hear()["messages"] for peer in pythons] == [1000] * 2
        messages = reader.read_many(20_000)
        assert reader.statistics().lost == 0
    from_c = produced([m for m in messages if m.type == 1])
    assert from_c == {p.pid: list(range(2000)) for p in producers}
    assert Counter(m.type for m in messages) == {1: 6000, 0: 2000}
    assert [m.seq for m in messages] == list(range(8000))
    assert len(list_queue(f"{queue_path}.fmq").messages) == 8000


def test_c_producers_that_are_killed_harm_nobody(programs: Programs, queue_path: str) -> None:
    create(f"fmq:{queue_path}?writers=many&slots=1024&size=1M&crc=true")
    chance = random.Random(3)
    file = f"{queue_path}.fmq"
    running: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(open_writer(f"fmq:{queue_path}?lock_timeout={LONG}"))
        reader = stack.enter_context(open_reader(f"fmq:{queue_path}"))
        stack.callback(end_all, running)
        for _ in range(12):
            while len(running) < 2:
                running.append(start(programs.producer, file, 0, chance.choice((20, 3000))))
            time.sleep(chance.uniform(0.005, 0.03))
            victim = running.pop(0)
            victim.kill()
            victim.communicate()
            seq = writer.write(b"of python", 7)  # also when the dead one had the lock
            reader.seek(seq)
            message = reader.read(timeout=0)
            assert message is not None
            assert message.seq > seq or message.payload == b"of python"
        end_all(running)
        reader.seek(Position.START)
        for numbers in produced([m for m in reader.read_many(5000) if m.type == 1]).values():
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
    listing = list_queue(file)
    assert listing.messages
    # The next writer takes the lock that a dead one may have left.
    done = run(programs.producer, file, 5, 50)
    assert done.says == {"written": 5}
    assert list_queue(file).header.head == listing.header.head + 5


def test_a_c_producer_overwrites_what_was_synced_when_the_disk_knows(
    programs: Programs, queue_path: str
) -> None:
    with open_writer(f"fmq:{queue_path}?slots=8&sync=batch") as writer:
        writer.write_many([b"synced"] * 8)
    guard = list_queue(f"{queue_path}.fmq").header.guard
    assert 0 < guard <= 8
    done = run(programs.producer, f"{queue_path}.fmq", 20, 32)
    assert (done.code, done.says) == (0, {"written": 20})
    header = list_queue(f"{queue_path}.fmq").header
    # It went on when the disk knew up to where all was there: the queue was full by then.
    assert (header.guard, header.guard_next) == (2**64 - 1, guard + 8)
    assert any(header.boot_id)
    with open_writer(f"fmq:{queue_path}?sync=batch") as writer:
        assert writer.write(b"again") == 28
        assert 20 <= list_queue(f"{queue_path}.fmq").header.guard <= 29


READ = """
#define _GNU_SOURCE
#include <penstock/ring.h>
#include <stdio.h>
int main(int argc, char **argv) {
    penstock_ring ring;
    int fd;
    const char *fault = penstock_map(argv[1], argc > 2, &ring, &fd);
    if (fault != NULL)
        return printf("%s\\n", fault), 1;
    for (uint64_t seq = 0; seq < penstock_head(&ring); seq++) {
        penstock_slot slot;
        char payload[100];
        printf("%d ", penstock_read(&ring, seq, &slot, payload, sizeof payload));
    }
    return 0;
}
"""


def test_what_a_c_program_reads_has_its_checksum(queue_path: str, tmp_path: Path) -> None:
    (tmp_path / "read.c").write_text(READ)
    subprocess.run(
        ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-I", ROOT / "include", "-o",
         tmp_path / "read", tmp_path / "read.c"],
        check=True,
    )  # fmt: skip
    with open_writer(f"fmq:{queue_path}?crc=true&slots=8") as writer:
        writer.write_many([b"one", b"two", b"three", b"x" * 200, b"y" * 200, b"six"])
    header = list_queue(f"{queue_path}.fmq").header
    with Path(f"{queue_path}.fmq").open("r+b") as file:
        for at in (
            header.slots_offset + 40,  # the type of message 0
            header.buffer_offset + 64,  # a byte of message 1
            header.slots_offset + 4 * 64 + 32,  # the length of message 4
        ):
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
    done = subprocess.run(
        [tmp_path / "read", f"{queue_path}.fmq"], check=True, capture_output=True, text=True
    )
    ok, damaged, too_large = 0, 3, 4
    assert [int(code) for code in done.stdout.split()] == [
        damaged, damaged, ok, too_large, damaged, ok,
    ]  # fmt: skip
    with Path(f"{queue_path}.fmq").open("r+b") as file:
        file.seek(90)  # created_ns
        file.write(b"?")
    done = subprocess.run(
        [tmp_path / "read", f"{queue_path}.fmq"], check=False, capture_output=True, text=True
    )
    assert done.stdout == "check\n"
