"""How does a test bring tasks as far as to wait, and what do they wait for?"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import penstock
from penstock import aio
from penstock.aio.watcher import watcher
from penstock.core.message import Message

__all__ = [
    "WATCHER",
    "asleep",
    "followed",
    "payload",
    "read_giving_up_at_random",
    "threads",
    "until",
    "wait_in_parent_and_child",
    "waiting",
    "write",
]

#: The name of the thread that waits for all tasks.
WATCHER = "penstock-aio"


def threads() -> list[threading.Thread]:
    """Return those that tasks wait with: that of a log may be left from elsewhere for a minute."""
    names = (WATCHER, "penstock-wait")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - other threads bring it about
            await asyncio.sleep(0.001)


async def waiting(task: asyncio.Task[object]) -> None:
    """Let a task come as far as to wait for the watcher."""
    await until(lambda: task.done() or watcher._waits)
    assert not task.done()


async def asleep(count: int = 1) -> None:
    """Let so many tasks come as far as to be slept for."""
    await until(lambda: len(watcher._asleep) == count)
    await asyncio.sleep(0.02)


def write(url: str, *payloads: bytes) -> None:
    with penstock.open_writer(url) as writer:
        writer.write_many(payloads)


def payload(message: Message | None) -> bytes:
    assert message is not None
    return bytes(message.payload)


def followed(url: str, script: str, count: int, **options: str) -> list[bytes]:
    """Follow what a process that runs the script writes; return so many messages of it."""

    async def main() -> list[bytes]:
        found: list[bytes] = []
        async with aio.open_reader(url, **options) as reader:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, url)
            async for message in reader:
                found.append(message.payload)
                if len(found) == count:
                    break
            assert await process.wait() == 0
            assert reader.statistics().lost == 0
        return found

    return asyncio.run(main())


def read_giving_up_at_random(url: str, count: int) -> list[int]:
    """Return the numbers of so many messages, taken by reads that mostly did not wait for them."""
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
    return found


def wait_in_parent_and_child(
    urls: list[str], waits: Callable[[asyncio.Task[object]], Awaitable[None]]
) -> None:
    """Let a forked child wait for the second queue while its parent waits for the first."""

    def read_in_child() -> None:
        async def child() -> None:
            async with aio.open_reader(urls[1]) as reader:
                threading.Timer(0.05, write, [urls[1], b"x"]).start()
                assert await reader.read(10) is not None

        asyncio.run(child())

    async def main() -> None:
        async with aio.open_reader(urls[0]) as reader:
            task = asyncio.create_task(reader.read())
            await waits(task)
            process = multiprocessing.get_context("fork").Process(target=read_in_child)
            process.start()
            await asyncio.to_thread(process.join, 20)
            assert process.exitcode == 0
            write(urls[0], b"y")
            assert payload(await task) == b"y"

    asyncio.run(main())
