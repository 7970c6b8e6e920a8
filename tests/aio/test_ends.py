"""Errors while a task waits, and the end of readers, loops and processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock import aio
from penstock.core.errors import Closed, DamagedQueue, LockTimeout
from penstock.core.message import Message
from support.gated_reader import GatedReader, a_message
from support.tasks import threads, until, wait_in_parent_and_child, waiting, write


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
    deadline = time.monotonic() + 40
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
    wait_in_parent_and_child(urls, waiting)
