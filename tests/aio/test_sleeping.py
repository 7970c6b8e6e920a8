"""Wide queues and asyncio: a task that waits costs nothing, and goes on with the first message."""

from __future__ import annotations

import asyncio
import random
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import penstock
from penstock import aio
from penstock.aio.watcher import watcher
from penstock.core.errors import Closed
from support.tasks import (
    asleep,
    followed,
    payload,
    read_giving_up_at_random,
    threads,
    until,
    wait_in_parent_and_child,
    write,
)

TINY = "slots=2&size=4096&readers=2"
#: Whoever is not woken goes on after a second all the same. It took less than that (seconds).
NOT_WOKEN = 0.9


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"fmq:{tmp_path}/queue"
    penstock.create(f"{url}?slots=64&size=64k")
    return url


# --- what it costs ----------------------------------------------------------------------------


def test_a_task_goes_on_as_soon_as_a_message_is_there(url: str) -> None:
    async def main() -> list[int]:
        latencies = []
        async with aio.open_reader(url) as reader:
            with penstock.open_writer(url) as writer:
                for _ in range(30):
                    task = asyncio.create_task(reader.read())
                    await asleep()
                    writer.write(b"x")
                    message = await task
                    assert message is not None
                    latencies.append(time.time_ns() - message.created_ns)
        return latencies

    # Polling would take 10 ms; a busy machine may take its time once in a while.
    assert statistics.median(asyncio.run(main())) < 5_000_000


def test_a_task_that_waits_costs_no_cpu(url: str) -> None:
    async def main() -> None:
        async with aio.open_reader(url) as reader:
            task = asyncio.create_task(anext(reader))
            await asleep()
            before = time.process_time()
            await asyncio.sleep(1.5)
            assert time.process_time() - before < 0.015
            assert [thread.name for thread in threads()] == ["penstock-aio"]
            write(url, b"x")
            assert payload(await task) == b"x"

    asyncio.run(main())


def test_a_thousand_idle_readers_cost_no_cpu_and_each_is_woken(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/q{number}" for number in range(1000)]
    for url in urls:
        penstock.create(f"{url}?{TINY}")
    chance = random.Random(2)

    async def main() -> None:
        readers = [aio.open_reader(url) for url in urls]
        tasks = [asyncio.create_task(reader.read()) for reader in readers]
        await asleep(1000)
        await asyncio.sleep(0.5)
        before, began = time.process_time(), time.monotonic()
        await asyncio.sleep(3)
        assert (time.process_time() - before) / (time.monotonic() - began) < 0.01
        late = 0
        for which in chance.sample(range(1000), 200):
            write(urls[which], b"%d" % which)
            sent = time.monotonic()
            assert payload(await tasks[which]) == b"%d" % which
            late += time.monotonic() - sent > NOT_WOKEN
        assert late < 10  # a busy machine may keep it waiting once in a while
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for reader in readers:
            await reader.aclose()

    asyncio.run(main())


def test_tasks_are_woken_also_if_a_thread_for_them_could_not_be_started_at_first(
    tmp_path: Path,
) -> None:
    urls = [f"fmq:{tmp_path}/q{number}" for number in range(150)]
    for url in urls:
        penstock.create(f"{url}?{TINY}")

    async def main() -> None:
        readers = [aio.open_reader(url) for url in urls]
        tasks = [asyncio.create_task(readers[0].read())]
        await asleep()
        ordinary = threading.stack_size(1 << 46)  # more than there is room for
        tasks += [asyncio.create_task(reader.read()) for reader in readers[1:]]
        await until(lambda: watcher._worker is not None and watcher._worker.error is not None)
        threading.stack_size(ordinary)
        for which, url in enumerate(urls):
            write(url, b"%d" % which)
        async with asyncio.timeout(30):
            for which, task in enumerate(tasks):
                assert payload(await task) == b"%d" % which
        for reader in readers:
            await reader.aclose()

    asyncio.run(main())


def test_a_task_is_woken_that_began_to_wait_while_the_watcher_slept(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/{name}" for name in "ab"]
    for url in urls:
        penstock.create(f"{url}?{TINY}")

    async def main() -> None:
        async with aio.open_reader(urls[0]) as one, aio.open_reader(urls[1]) as other:
            silent = asyncio.create_task(one.read())
            await asleep()
            for _ in range(5):
                task = asyncio.create_task(other.read())
                await until(lambda: len(watcher._waits) == 2)
                began = time.monotonic()
                write(urls[1], b"x")
                assert payload(await task) == b"x"
                assert time.monotonic() - began < NOT_WOKEN
            silent.cancel()
            await asyncio.wait([silent])

    asyncio.run(main())


def test_classic_and_wide_queues_are_waited_for_together(url: str, tmp_path: Path) -> None:
    classic_url = f"fmq:{tmp_path}/classic?layout=classic&slots=20&size=8k"
    penstock.create(classic_url)

    async def main() -> None:
        async with aio.open_reader(url) as wide, aio.open_reader(classic_url) as classic:
            for reader, its_url in ((wide, url), (classic, classic_url)) * 2:
                tasks = {each: asyncio.create_task(each.read()) for each in (wide, classic)}
                await until(lambda: len(watcher._waits) == 2)
                await asyncio.sleep(0.05)
                write(its_url, b"x")
                assert payload(await tasks.pop(reader)) == b"x"
                [other] = tasks.values()
                assert not other.done()
                other.cancel()
                await asyncio.wait([other])

    asyncio.run(main())


# --- nothing is lost, and nothing hangs -------------------------------------------------------


def test_messages_of_another_process_are_followed(url: str) -> None:
    script = (
        "import penstock, sys\n"
        "with penstock.open_writer(sys.argv[1], hold='me', timeout=20) as writer:\n"
        "    for number in range(3000):\n"
        "        writer.write(b'%d' % number)\n"
    )

    found = followed(url, script, 3000, hold="me")
    assert found == [b"%d" % number for number in range(3000)]


def test_reads_that_give_up_at_random_moments_lose_no_message(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q"
    penstock.create(f"{url}?slots=4096&size=1M")
    assert read_giving_up_at_random(url, 2000) == list(range(2000))


def test_closing_ends_the_waits_at_once(url: str) -> None:
    async def main() -> None:
        reader = aio.open_reader(url)
        tasks = [asyncio.create_task(reader.read()) for _ in range(3)]
        await asleep()
        began = time.monotonic()
        await reader.aclose()
        await reader.aclose()
        for task in tasks:
            with pytest.raises(Closed):
                await task
        assert time.monotonic() - began < NOT_WOKEN
        with pytest.raises(Closed):
            await reader.read(0)

    asyncio.run(main())


def test_seeking_takes_effect_at_once_for_a_task_that_waits(url: str) -> None:
    write(url, b"0", b"1")

    async def main() -> None:
        async with aio.open_reader(url, start="end") as reader:
            task = asyncio.create_task(reader.read())
            await asleep()
            began = time.monotonic()
            await reader.seek("last")
            assert payload(await task) == b"1"
            assert time.monotonic() - began < NOT_WOKEN

    asyncio.run(main())


def test_a_filter_that_leaves_everything_out_does_not_keep_the_watcher_busy(url: str) -> None:
    async def main() -> None:
        async with aio.open_reader(url, type=5) as reader:
            task = asyncio.create_task(reader.read())
            await asleep()
            write(url, b"unwanted")
            await asyncio.sleep(0.2)
            before = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - before < 0.1
            with penstock.open_writer(url) as writer:
                writer.write(b"wanted", type=5)
            assert payload(await task) == b"wanted"

    asyncio.run(main())


def test_a_queue_that_is_created_anew_is_followed(url: str) -> None:
    write(url, b"old")

    async def main() -> None:
        async with aio.open_reader(url, start="end") as reader:
            task = asyncio.create_task(reader.read(10))
            await asleep()
            penstock.create(f"{url}?slots=4&size=4096", replace=True)
            write(url, b"new")
            assert payload(await task) == b"new"
            assert reader.statistics().restarts == 1

    asyncio.run(main())


def test_a_loop_closed_while_a_task_waits_takes_no_message_with_it(url: str) -> None:
    reader = aio.open_reader(url)
    loop = asyncio.new_event_loop()
    task = loop.create_task(reader.read())
    loop.run_until_complete(asleep())
    loop.close()
    task.get_coro().close()

    async def again() -> None:
        async with reader:
            task = asyncio.create_task(reader.read(10))
            await until(lambda: watcher._waits)
            write(url, b"later")
            assert payload(await task) == b"later"

    asyncio.run(again())


def test_a_forked_process_can_wait_while_its_parent_sleeps(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/{name}" for name in "ab"]
    for url in urls:
        penstock.create(f"{url}?{TINY}")

    wait_in_parent_and_child(urls, lambda _: asleep())


def test_a_process_ends_cleanly_while_its_tasks_sleep(tmp_path: Path) -> None:
    urls = [f"fmq:{tmp_path}/q{number}" for number in range(200)]
    for url in urls:
        penstock.create(f"{url}?{TINY}")
    script = (
        "import asyncio, sys\n"
        "from penstock import aio\n"
        "readers = [aio.open_reader(url) for url in sys.argv[1:]]\n"
        "loop = asyncio.new_event_loop()\n"
        "tasks = [loop.create_task(reader.read()) for reader in readers]\n"
        "loop.run_until_complete(asyncio.sleep(0.3))\n"
        "for task in tasks:\n"
        "    task._log_destroy_pending = False\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *urls], capture_output=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")


# --- readers that keep their position ---------------------------------------------------------


def test_what_was_being_worked_on_when_the_task_failed_comes_again(url: str) -> None:
    write(url, b"0", b"1", b"2")

    async def fail() -> None:
        async with aio.open_reader(url, hold="me") as reader:
            assert payload(await reader.read()) == b"0"
            assert payload(await reader.read()) == b"1"
            raise OSError("the disk is full")

    async def work() -> None:
        async with aio.open_reader(url, hold="me") as reader:
            assert payload(await reader.read()) == b"1"
        async with aio.open_reader(url, hold="me") as reader:
            assert payload(await reader.read()) == b"2"

    with pytest.raises(OSError, match="full"):
        asyncio.run(fail())
    asyncio.run(work())


def test_what_was_taken_for_a_task_and_not_delivered_comes_again(url: str) -> None:
    async def give_up() -> None:
        async with aio.open_reader(url, hold="me") as reader:
            task = asyncio.create_task(reader.read_many(10, None))
            await asleep()
            write(url, b"0", b"1", b"2")
            time.sleep(0.1)  # noqa: ASYNC251 - the watcher takes them while the loop stands still
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert payload(await reader.read(0)) == b"0"

    async def work() -> None:
        async with aio.open_reader(url, hold="me") as reader:
            assert [payload(m) for m in await reader.read_many(10)] == [b"1", b"2"]

    asyncio.run(give_up())
    asyncio.run(work())
