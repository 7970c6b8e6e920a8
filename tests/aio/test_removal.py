"""A stream is removed while tasks wait for it, and its writer makes it again: all is accounted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock import aio
from support.removal import BEFORE, COUNT, removed_writer


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_tasks_that_follow_get_or_count_every_message(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        with removed_writer(kind, tmp_path / "stream") as writer:
            async with aio.open_reader(writer.url) as reader:
                payloads: list[bytes] = []

                async def follow(count: int) -> None:
                    while len(payloads) + reader.statistics().lost < count:
                        payloads.extend(m.payload for m in await reader.read_many(100, 0.3))

                await asyncio.to_thread(writer.write_half)
                await asyncio.wait_for(follow(BEFORE), 20)
                await asyncio.gather(
                    asyncio.wait_for(follow(COUNT), 20),
                    asyncio.to_thread(writer.remove_and_write_the_rest),
                )
                assert len(set(payloads)) == len(payloads)
                assert len(payloads) + reader.statistics().lost == COUNT

    asyncio.run(main())
