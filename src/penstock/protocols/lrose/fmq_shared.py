"""What do all clients of a server of queues share?"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.protocols.lrose.fmq_paths import QueueRoot
from penstock.protocols.lrose.fmq_registering import Registrations
from penstock.protocols.lrose.fmq_wide import WideWriters

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.protocols.lrose.fmq_server import FmqServerOptions

__all__ = ["Shared"]

T = TypeVar("T")

#: Threads for what takes time: opening, creating, damaged queues, large buffers.
_THREADS: Final = 8


class Shared:
    """What all clients of a server share."""

    def __init__(self, options: FmqServerOptions) -> None:
        self.options = options
        self.root = QueueRoot(options.root, shared_memory=options.shared_memory)
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="fmqp")
        self.wide_writers = WideWriters()
        self.registrations = Registrations()
        #: Held while a wide queue is opened.
        self.opening = asyncio.Lock()
        #: Those who wait for messages, by the path of their queue.
        self.waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def wake(self, path: str) -> None:
        for event in self.waiting.get(path, ()):
            event.set()

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Do what may take time. It is never left alone: who gives up waits for its end."""
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self.threads, call, *arguments)
        try:
            return await asyncio.shield(future)
        finally:
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])

    def close(self) -> None:
        self.registrations.close()
        self.threads.shutdown(wait=True)
