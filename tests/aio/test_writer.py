"""Writing in a task: in order, without holding up the loop, and counted."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

import penstock
from penstock import aio
from penstock.core.batch import batch_from_messages
from penstock.core.errors import Closed, MessageTooLarge
from support.gated_reader import a_message
from support.tasks import threads, until, write


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


def test_a_file_is_not_finished_when_its_block_ends_by_an_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with aio.open_writer(f"jsonl:{tmp_path}/file") as writer:
            await writer.write(b"half of it")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert list(tmp_path.iterdir()) == []
    assert "nothing is left of it" in caplog.text
