"""Reading in a task: what is there at once, and what comes, by one thread for all."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

import penstock
from penstock import aio
from penstock.aio.watcher import watcher
from penstock.core.batch import BATCH_SCHEMA
from penstock.core.errors import PositionError
from support.tasks import WATCHER, followed, threads, until, waiting, write


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
        "import penstock, sys\n"
        "with penstock.open_writer(sys.argv[1], blocking=True, timeout=10) as writer:\n"
        "    for number in range(200):\n"
        "        writer.write(b'%d' % number)\n"
    )

    assert followed(queue_url, script, 200) == [b"%d" % number for number in range(200)]


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
