from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import random
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import aio
from penstock.aio.watching import watcher
from penstock.core.batch import BATCH_SCHEMA, batch_from_messages
from penstock.core.errors import Closed, DamagedQueue, LockTimeout, MessageTooLarge, PositionError
from penstock.core.interfaces import Reader
from penstock.core.message import Message
from penstock.core.statistics import ReaderStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.core.position import PositionLike

WATCHER = "penstock-aio"


def threads(prefix: str = WATCHER) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    """Whatever a test did, its threads end soon after."""
    yield
    gc.collect()
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == []


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - other threads bring it about
            await asyncio.sleep(0.001)


async def waiting(task: asyncio.Task[object]) -> None:
    """Let a task come as far as to wait for the watcher."""
    await until(lambda: task.done() or watcher._waits)
    assert not task.done()


def write(url: str, *payloads: bytes) -> None:
    with penstock.open_writer(url) as writer:
        writer.write_many(payloads)


def a_message(seq: int) -> Message:
    return Message(seq, 0, 0, 0, 0, None, None, b"%d" % seq)


class GatedReader(Reader):
    """A fault on demand: what the watcher has taken stays in its hands until the gate opens."""

    def __init__(self, url: str = "gated:") -> None:
        super().__init__(url)
        self.there: deque[Message] = deque()
        self.error: Exception | None = None
        self.taken = threading.Event()
        self.gate = threading.Event()
        self.delivered = 0
        self.is_closed = False
        self._users = 0

    def _take(self, limit: int) -> list[Message]:
        self._users += 1
        assert self._users == 1, "two threads at once"
        try:
            if self.is_closed:
                raise Closed("gated: was closed")
            messages = [self.there.popleft() for _ in range(min(limit, len(self.there)))]
            self.delivered += len(messages)
            error, self.error = self.error, None
            if (messages or error) and threading.current_thread().name == WATCHER:
                self.taken.set()
                assert self.gate.wait(10)
            if error is not None:
                raise error
            return messages
        finally:
            self._users -= 1

    def seek(self, position: PositionLike) -> None:
        del position
        assert self._users == 0

    def statistics(self) -> ReaderStatistics:
        size = self.delivered  # one byte each
        return ReaderStatistics(self.delivered, size, 0, 0, 0, self.delivered, len(self.there), ())

    def close(self) -> None:
        self.is_closed = True


# --- reading --------------------------------------------------------------------------------


def test_a_read_returns_what_is_there_without_a_thread(queue_url: str) -> None:
    write(queue_url, b"0", b"1", b"2", b"3", b"4")

    async def main() -> None:
        async with aio.open_reader(queue_url) as reader:
            for timeout in (None, 0, 5):
                message = await reader.read(timeout)
                assert message is not None
            assert [m.payload for m in await reader.read_many(10)] == [b"3", b"4"]
            assert await reader.read(0) is None
            assert await reader.read_many(0, None) == []
            assert threads() == []

    asyncio.run(main())


def test_a_reader_starts_where_it_is_told_and_takes_options(queue_url: str) -> None:
    with penstock.open_writer(queue_url) as writer:
        for number in range(10):
            writer.write(b"%d" % number, type=number % 2)

    async def main() -> None:
        async with aio.open_reader(queue_url, start=4, type=1) as reader:
            assert [m.payload for m in await reader.read_many(10)] == [b"5", b"7", b"9"]
            assert reader.url == queue_url
            assert repr(reader) == f"<AsyncReader {queue_url}>"

    asyncio.run(main())


def test_a_read_waits_for_the_time_given_and_then_returns_none(queue_url: str) -> None:
    write(queue_url)

    async def main() -> None:
        async with aio.open_reader(queue_url) as reader:
            began = time.monotonic()
            assert await reader.read(0.1) is None
            assert 0.1 <= time.monotonic() - began < 2
            assert await reader.read_many(5, 0.01) == []
            batch = await reader.read_batch(5, 0.01)
            assert batch.schema.equals(BATCH_SCHEMA)
            assert batch.num_rows == 0

    asyncio.run(main())


def test_batches_come_with_the_one_schema_also_what_was_waited_for(queue_url: str) -> None:
    write(queue_url, b"0", b"1", b"2")

    async def main() -> None:
        async with aio.open_reader(queue_url) as reader:
            batch = await reader.read_batch(2)
            assert batch.schema.equals(BATCH_SCHEMA)
            assert batch["payload"].to_pylist() == [b"0", b"1"]
            assert (await reader.read_batch(2, None))["payload"].to_pylist() == [b"2"]
            task = asyncio.create_task(reader.read_batch(2, None))
            await waiting(task)
            write(queue_url, b"3")
            batch = await task
            assert batch.schema.equals(BATCH_SCHEMA)
            assert batch["payload"].to_pylist() == [b"3"]

    asyncio.run(main())


def test_messages_of_another_process_are_followed(queue_url: str) -> None:
    write(queue_url)
    script = (
        "import penstock, sys, time\n"
        "with penstock.open_writer(sys.argv[1], blocking=True, timeout=10) as writer:\n"
        "    for number in range(200):\n"
        "        writer.write(b'%d' % number)\n"
    )

    async def main() -> list[bytes]:
        found: list[bytes] = []
        async with aio.open_reader(queue_url) as reader:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, queue_url)
            async for message in reader:
                found.append(message.payload)
                if len(found) == 200:
                    break
            assert await process.wait() == 0
            assert reader.statistics().lost == 0
        return found

    assert asyncio.run(main()) == [b"%d" % number for number in range(200)]


def test_fifty_queues_are_waited_for_by_one_thread_at_little_cost(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/q{i}?layout=classic&slots=5&size=1k" for i in range(50)]
    for url in urls:
        write(url)

    async def main() -> None:
        readers = [aio.open_reader(url) for url in urls]
        tasks = [asyncio.create_task(reader.read()) for reader in readers]
        await until(lambda: len(watcher._waits) == 50)
        before = time.process_time()
        await asyncio.sleep(0.5)
        cost = time.process_time() - before
        assert len(threads()) == 1
        assert cost < 0.25
        for number, url in enumerate(urls):
            write(url, b"%d" % number)
        found = await asyncio.gather(*tasks)
        assert [m.payload for m in found if m] == [b"%d" % number for number in range(50)]
        for reader in readers:
            await reader.aclose()

    asyncio.run(main())


def test_asking_once_for_each_message_does_not_start_a_thread_each(queue_url: str) -> None:
    write(queue_url)
    seen: set[threading.Thread] = set()

    async def main() -> None:
        async with (
            aio.open_reader(queue_url) as reader,
            aio.open_writer(queue_url) as writer,
        ):
            for _ in range(30):
                task = asyncio.create_task(reader.read())
                await waiting(task)
                seen.update(thread for thread in threads() if thread.name == WATCHER)
                await writer.write(b"x")
                assert await task is not None

    asyncio.run(main())
    assert len(seen) < 30


def test_a_reader_with_much_to_read_lets_other_tasks_run(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/busy?layout=classic&slots=10&size=1k"
    write(url, b"x")

    async def main() -> None:
        async with aio.open_reader(url) as reader:

            async def read_for_ever() -> None:
                while True:
                    assert await reader.read() is not None
                    await reader.seek("start")

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read_for_ever(), 0.05)

    asyncio.run(main())


def test_two_tasks_share_what_comes_each_message_to_one(queue_url: str) -> None:
    write(queue_url)

    async def main() -> None:
        async with (
            aio.open_reader(queue_url) as reader,
            aio.open_writer(queue_url, blocking=True, timeout=10) as writer,
        ):
            shares: list[list[int]] = [[], []]

            async def follow(share: list[int]) -> None:
                while True:
                    share.append((await anext(reader)).seq)

            tasks = [asyncio.create_task(follow(share)) for share in shares]
            for number in range(100):
                await writer.write(b"%d" % number)
            await until(lambda: sum(map(len, shares)) >= 100)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert sorted(shares[0] + shares[1]) == list(range(100))
            for share in shares:
                assert share == sorted(share)
                assert share

    asyncio.run(main())


def test_a_timeout_holds_also_while_another_task_waits_for_ever(queue_url: str) -> None:
    write(queue_url)

    async def main() -> None:
        async with aio.open_reader(queue_url) as reader:
            patient = asyncio.create_task(reader.read())
            await waiting(patient)
            assert await reader.read(0.05) is None
            assert await reader.read(0) is None
            write(queue_url, b"x")
            assert await patient is not None

    asyncio.run(main())


def test_seeking_takes_effect_at_once_for_a_task_that_waits(queue_url: str) -> None:
    write(queue_url, b"0", b"1")

    async def main() -> None:
        async with aio.open_reader(queue_url, start="end") as reader:
            task = asyncio.create_task(reader.read())
            await waiting(task)
            with pytest.raises(PositionError):
                await reader.seek(1000)
            await reader.seek("last")
            message = await task
            assert message is not None
            assert message.payload == b"1"

    asyncio.run(main())


def test_many_event_loops_in_many_threads_wait_at_once(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/q{i}?layout=classic&slots=50&size=8k" for i in range(8)]
    for url in urls:
        write(url)
    found: dict[str, list[bytes]] = {url: [] for url in urls}

    async def follow(url: str) -> None:
        async with aio.open_reader(url) as reader:
            while len(found[url]) < 20:
                found[url] += [m.payload for m in await reader.read_many(5, None)]

    followers = [threading.Thread(target=asyncio.run, args=[follow(url)]) for url in urls]
    for follower in followers:
        follower.start()
    for number in range(20):
        for url in urls:
            write(url, b"%d" % number)
    for follower in followers:
        follower.join(20)
    assert all(found[url] == [b"%d" % number for number in range(20)] for url in urls)


# --- nothing is lost ------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancel", "timeout", "wait_for"])
def test_what_was_being_taken_for_a_read_that_went_away_comes_with_the_next(way: str) -> None:
    async def main() -> None:
        gated = GatedReader()
        async with aio.AsyncReader(gated) as reader:

            async def give_up() -> None:
                if way == "timeout":
                    async with asyncio.timeout(0.05):
                        await reader.read()
                elif way == "wait_for":
                    await asyncio.wait_for(reader.read(), 0.05)
                else:
                    await reader.read()

            task = asyncio.create_task(give_up())
            await waiting(task)
            gated.there.extend(map(a_message, range(3)))
            await until(gated.taken.is_set)
            if way == "cancel":
                task.cancel()
            with pytest.raises((asyncio.CancelledError, TimeoutError)):
                await task
            gated.gate.set()
            assert [m.seq for m in await reader.read_many(1)] == [0]
            assert [m.seq for m in await reader.read_many(5)] == [1, 2]

    asyncio.run(main())


def test_a_read_whose_time_ends_while_a_message_is_taken_returns_it() -> None:
    async def main() -> None:
        gated = GatedReader()
        async with aio.AsyncReader(gated) as reader:
            task = asyncio.create_task(reader.read(0.3))
            await waiting(task)
            gated.there.append(a_message(0))
            await until(gated.taken.is_set)
            opener = threading.Timer(0.5, gated.gate.set)
            opener.start()
            assert await task == a_message(0)
            opener.join()

    asyncio.run(main())


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_read_cancelled_at_any_step_of_its_waking_up_loses_nothing(steps: int) -> None:
    async def main() -> None:
        gated = GatedReader()
        async with aio.AsyncReader(gated) as reader:
            task = asyncio.create_task(reader.read())
            await waiting(task)
            gated.there.append(a_message(0))
            await until(gated.taken.is_set)
            gated.gate.set()
            time.sleep(0.05)  # noqa: ASYNC251 - the watcher delivers while the loop stands still
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                assert await task == a_message(0)
                return
            assert await reader.read(0) == a_message(0)

    asyncio.run(main())


def test_reads_that_give_up_at_random_moments_lose_no_message(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=5000&size=1M"
    write(url)
    count = 2000
    chance = random.Random(4)

    def write_slowly() -> None:
        with penstock.open_writer(url) as writer:
            for number in range(count):
                writer.write(b"%d" % number)
                if number % 5 == 0:
                    time.sleep(0.0005)

    async def main() -> list[int]:
        found: list[int] = []
        async with aio.open_reader(url) as reader:
            while len(found) < count:
                task = asyncio.create_task(reader.read_many(7, None))
                await asyncio.wait([task], timeout=chance.random() * 0.001)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    found += [m.seq for m in await task]
            books = reader.statistics()
            assert (books.messages, books.backlog, books.lost) == (count, 0, 0)
        return found

    writer = threading.Thread(target=write_slowly)
    writer.start()
    found = asyncio.run(main())
    writer.join()
    assert found == list(range(count))


def test_the_books_count_what_was_taken_and_not_delivered_as_backlog() -> None:
    async def main() -> None:
        gated = GatedReader()
        async with aio.AsyncReader(gated) as reader:
            task = asyncio.create_task(reader.read_many(10, None))
            await waiting(task)
            gated.there.extend(map(a_message, range(4)))
            await until(gated.taken.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gated.gate.set()
            books = reader.statistics()
            assert (books.messages, books.bytes, books.backlog, books.next_seq) == (0, 0, 4, 0)
            assert await reader.read(0) == a_message(0)
            books = reader.statistics()
            assert (books.messages, books.bytes, books.backlog, books.next_seq) == (1, 1, 3, 1)
            await reader.seek("end")
            assert await reader.read(0) is None
            books = reader.statistics()
            assert (books.messages, books.bytes, books.backlog) == (1, 1, 0)

    asyncio.run(main())


def test_an_error_that_nobody_waited_for_any_more_is_raised_by_the_next_read() -> None:
    async def main() -> None:
        gated = GatedReader()
        async with aio.AsyncReader(gated) as reader:
            task = asyncio.create_task(reader.read())
            await waiting(task)
            gated.error = DamagedQueue("gated", "magic", 0, 1, 2)
            await until(gated.taken.is_set)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gated.gate.set()
            with pytest.raises(DamagedQueue):
                await reader.read(0)
            assert await reader.read(0) is None

    asyncio.run(main())


# --- errors and ends ------------------------------------------------------------------------


def test_damage_is_raised_to_the_one_who_waits(queue_url: str, queue_path: str) -> None:
    write(queue_url, b"x")

    async def main() -> None:
        async with aio.open_reader(queue_url, start="end") as reader:
            task = asyncio.create_task(reader.read())
            await waiting(task)
            status = Path(queue_path + ".stat")
            with status.open("r+b") as file:  # noqa: ASYNC230
                file.write(bytes(range(64)))
            with pytest.raises(DamagedQueue):
                await task

    asyncio.run(main())


def test_a_timeout_error_of_the_reader_is_not_taken_for_the_end_of_the_wait() -> None:
    async def main() -> None:
        gated = GatedReader()
        gated.gate.set()
        async with aio.AsyncReader(gated) as reader:
            task = asyncio.create_task(reader.read(30))
            await waiting(task)
            gated.error = LockTimeout("another holds it")
            with pytest.raises(LockTimeout):
                await task

    asyncio.run(main())


def test_closing_ends_the_waits_of_all_tasks_and_later_reads(queue_url: str) -> None:
    write(queue_url)

    async def main() -> None:
        reader = aio.open_reader(queue_url)
        tasks = [asyncio.create_task(reader.read()) for _ in range(3)]
        await waiting(tasks[0])
        await reader.aclose()
        await reader.aclose()
        for task in tasks:
            with pytest.raises(Closed):
                await task
        with pytest.raises(Closed):
            await reader.read(0)
        with pytest.raises(Closed):
            await reader.seek("start")
        with pytest.raises(Closed):
            await anext(reader)

    asyncio.run(main())


def test_leaving_the_context_closes_the_reader_also_when_cancelled(queue_url: str) -> None:
    write(queue_url)

    async def main() -> None:
        reader = aio.open_reader(queue_url)

        async def follow() -> None:
            async with reader:
                async for _ in reader:
                    pass

        task = asyncio.create_task(follow())
        await waiting(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Closed):
            await reader.read(0)

    asyncio.run(main())


def test_a_loop_closed_while_a_task_waits_takes_no_message_with_it(
    queue_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(queue_url)
    reader = aio.open_reader(queue_url)
    loop = asyncio.new_event_loop()
    task = loop.create_task(reader.read())
    loop.run_until_complete(waiting(task))
    loop.close()
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == []
    with caplog.at_level(logging.CRITICAL, "asyncio"):  # it complains of the task, with reason
        del task
        gc.collect()

    async def again() -> None:
        async with reader:
            write(queue_url, b"later")
            message = await reader.read(5)
            assert message is not None
            assert message.payload == b"later"

    asyncio.run(again())


def test_a_loop_closed_while_a_message_is_taken_leaves_it_for_the_next_read() -> None:
    gated = GatedReader()
    reader = aio.AsyncReader(gated)
    loop = asyncio.new_event_loop()

    async def come_so_far() -> asyncio.Task[Message | None]:
        task = asyncio.create_task(reader.read())
        await waiting(task)
        gated.there.append(a_message(0))
        await until(gated.taken.is_set)
        return task

    task = loop.run_until_complete(come_so_far())
    loop.close()
    gated.gate.set()
    task.get_coro().close()
    assert asyncio.run(reader.read(0)) == a_message(0)


def test_a_process_ends_cleanly_while_a_loop_still_waits(queue_url: str) -> None:
    write(queue_url)
    script = (
        "import asyncio, sys\n"
        "from penstock import aio\n"
        "reader = aio.open_reader(sys.argv[1])\n"
        "loop = asyncio.new_event_loop()\n"
        "task = loop.create_task(reader.read())\n"
        "loop.run_until_complete(asyncio.sleep(0.05))\n"
        "task._log_destroy_pending = False\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, queue_url], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")


def test_a_forked_process_can_wait_while_its_parent_waits(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/{name}?layout=classic&slots=5&size=1k" for name in "ab"]
    for url in urls:
        write(url)

    def read_in_child() -> None:
        async def child() -> None:
            async with aio.open_reader(urls[1]) as reader:
                threading.Timer(0.05, write, [urls[1], b"x"]).start()
                assert await reader.read(10) is not None

        asyncio.run(child())

    async def main() -> None:
        async with aio.open_reader(urls[0]) as reader:
            task = asyncio.create_task(reader.read())
            await waiting(task)
            process = multiprocessing.get_context("fork").Process(target=read_in_child)
            process.start()
            await asyncio.to_thread(process.join, 20)
            assert process.exitcode == 0
            write(urls[0], b"y")
            assert await task is not None

    asyncio.run(main())


# --- writing --------------------------------------------------------------------------------


def test_what_is_written_is_numbered_in_order_and_counted(queue_url: str) -> None:
    async def main() -> None:
        async with aio.open_writer(queue_url) as writer:
            assert repr(writer) == f"<AsyncWriter {queue_url}>"
            assert writer.statistics().messages == 0
            assert await writer.write(b"0", type=5, subtype=6) == 0
            assert await writer.write_many((b"%d" % i for i in (1, 2)), type=7) == 2
            assert await writer.write_many([]) is None
            assert await writer.write_batch(batch_from_messages([a_message(3)])) == 3
            await writer.flush()
            books = writer.statistics()
            assert (books.messages, books.bytes, books.last_seq) == (4, 4, 3)
            with pytest.raises(MessageTooLarge):
                await writer.write(bytes(10_000))
            assert writer.statistics().refused == 1

    asyncio.run(main())
    with penstock.open_reader(queue_url) as reader:
        found = [(m.payload, m.type, m.subtype) for m in reader.available()]
    assert found == [(b"0", 5, 6), (b"1", 7, 0), (b"2", 7, 0), (b"3", 0, 0)]


def test_writes_of_many_tasks_keep_the_order_of_the_calls_in_one_thread(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=500&size=64k"

    async def main() -> None:
        async with aio.open_writer(url) as writer:
            tasks = [asyncio.create_task(writer.write(b"%d" % i)) for i in range(300)]
            assert await asyncio.gather(*tasks) == list(range(300))
            assert len(threads()) == 1
        await until(lambda: not threads())

    asyncio.run(main())
    with penstock.open_reader(url) as reader:
        assert [m.payload for m in reader.available()] == [b"%d" % i for i in range(300)]


def test_a_cancelled_write_is_written_counted_and_keeps_its_place(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=4&size=1k"
    write(url)

    async def main() -> None:
        async with (
            aio.open_writer(url, blocking=True, timeout=20) as writer,
            aio.open_reader(url) as reader,
        ):
            before = 0
            blocked: asyncio.Task[int]
            while True:  # until it is full
                blocked = asyncio.create_task(writer.write(b"%d" % before))
                done, _ = await asyncio.wait([blocked], timeout=0.1)
                if not done:
                    break
                before += 1
            behind = asyncio.create_task(writer.write(b"%d" % (before + 1)))
            await asyncio.sleep(0)
            for task in (blocked, behind):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert writer.statistics().messages == before
            last = asyncio.create_task(writer.write(b"%d" % (before + 2)))
            found = [await anext(reader) for _ in range(before + 3)]
            assert [m.payload for m in found] == [b"%d" % i for i in range(before + 3)]
            assert await last == before + 2
            assert writer.statistics().messages == before + 3

    asyncio.run(main())


def test_the_event_loop_runs_while_a_write_waits_and_the_timeout_is_raised(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=2&size=1k"

    async def main() -> None:
        async with aio.open_writer(url, blocking=True, timeout=0.2) as writer:
            task = asyncio.create_task(writer.write_many([b"x"] * 10))
            ticks = 0
            while not task.done():
                await asyncio.sleep(0.01)
                ticks += 1
            with pytest.raises(penstock.WriteTimeout):
                await task
            assert ticks > 5
            assert writer.statistics().refused > 0

    asyncio.run(main())


def test_a_write_that_fails_after_its_task_was_cancelled_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=2&size=1k"

    async def main() -> None:
        async with aio.open_writer(url, blocking=True, timeout=0.1) as writer:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.03):
                    await writer.write_many([b"x"] * 10)
        books = writer.statistics()
        assert books.messages + books.refused == 10
        assert books.refused > 0

    with caplog.at_level(logging.WARNING, "penstock.aio"):
        asyncio.run(main())
    assert "failed after its task was cancelled" in caplog.text


def test_closing_waits_for_the_writes_begun_and_refuses_later_ones(queue_url: str) -> None:
    async def main() -> None:
        writer = aio.open_writer(queue_url)
        task = asyncio.create_task(writer.write_many([b"x"] * 10))
        await asyncio.sleep(0)
        await asyncio.gather(writer.aclose(), writer.aclose())
        assert task.done()
        assert await task == 9
        assert writer.statistics().messages == 10
        await writer.aclose()
        with pytest.raises(Closed):
            await writer.write(b"y")

    asyncio.run(main())


def test_a_loop_closed_while_a_write_waits_makes_no_noise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"fmq:{tmp_path}/q?layout=classic&slots=2&size=1k"
    writer = aio.open_writer(url, blocking=True, timeout=0.2)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                await writer.write_many([b"x"] * 10)

    asyncio.run(give_up())
    asyncio.run(writer.aclose())
    assert [record for record in caplog.records if record.name.startswith("concurrent")] == []


def test_a_writer_never_closed_leaves_no_thread(queue_url: str) -> None:
    async def main() -> None:
        await aio.open_writer(queue_url).write(b"x")

    asyncio.run(main())
