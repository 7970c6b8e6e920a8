"""Reads that give up: nothing that was being taken for them is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from penstock import aio
from penstock.core.errors import DamagedQueue
from support.gated_reader import GatedReader, a_message
from support.tasks import read_giving_up_at_random, until, waiting, write


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
    assert read_giving_up_at_random(url, 2000) == list(range(2000))


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
