"""How is a process killed between any two stores to a wide queue, one after the other?

The native core is built once more, with points at which it can be told to die, and processes that
use that build write and read in every way.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.batch import batch_from_messages
from penstock.core.message import Message
from penstock.core.stream_id import StreamId
from support.lives import Lives, Outcome, serve
from support.wide_opening import wide_reader, wide_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LOCK_WAITERS", "FaultyProcesses", "build", "message_of", "serve_operations"]

_ROOT = Path(__file__).parents[2]
#: As in setup.py.
_FLAGS = ["-std=c11", "-O3", "-Wall", "-Wextra", "-Wno-missing-field-initializers"]
#: Top bit of the header's lock: somebody waits for it.
LOCK_WAITERS = 1 << 31


def build(directory: Path) -> Path:
    """Build the native core with fault points; return the library."""
    library = directory / "_ring_with_faults.so"
    subprocess.run(
        [
            "gcc",
            *_FLAGS,
            "-include",
            str(_ROOT / "tests/native/faults.h"),
            "-shared",
            "-fPIC",
            f"-I{_ROOT / 'include'}",
            f"-I{sysconfig.get_paths()['include']}",
            str(_ROOT / "src/penstock/queue/wide/_ring.c"),
            "-o",
            str(library),
        ],
        check=True,
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
    )
    return library


def message_of(number: int, size: int, *, with_block: bool = False) -> Message:
    """Return the message of this number; its `seq` is the number, its times mean nothing."""
    chance = random.Random(number)
    return Message(
        number,
        0,
        0,
        number,
        0,
        StreamId(chance.randbytes(16)) if with_block else None,
        chance.randbytes(1 + number % 30) if with_block else None,
        chance.randbytes(size),
    )


class FaultyProcesses(Lives):
    """Starts processes that die at the fault point of a given number; 0: at none."""

    def __init__(self, library: Path) -> None:
        super().__init__("support.faulty_core", str(library))

    def run(self, operation: str, at: int, **arguments: object) -> Outcome:
        return self.start(operation, at=at, **arguments).end()


# --- what the processes do ----------------------------------------------------------------------


def _write(url: str, how: str, first: int, sizes: Sequence[int], *, block: bool) -> None:
    """Append messages first, first + 1, … of these sizes, in one way or another."""
    messages = [message_of(first + i, size, with_block=block) for i, size in enumerate(sizes)]
    with wide_writer(url) as writer:
        match how:
            case "write":
                for m in messages:
                    writer.write(m.payload, m.type, stream=m.stream, attributes=m.attributes)
            case "write_many":
                writer.write_many([m.payload for m in messages], messages[0].type)
            case "write_batch":
                writer.write_batch(batch_from_messages(messages))
            case "commit" | "abort":
                for m in messages:
                    place = writer.reserve(
                        len(m.payload) + 100, m.type, stream=m.stream, attributes=m.attributes
                    )
                    place.buffer[: len(m.payload)] = m.payload
                    if how == "commit":
                        place.commit(len(m.payload))
                    else:
                        place.abort()
            case _:
                raise ValueError(how)


def _hand_over(url: str, number: int, size: int) -> None:
    """Have the lock until another process waits for it, then append and give it away."""
    message = message_of(number, size)
    with wide_writer(url) as writer:
        place = writer.reserve(size, message.type)
        place.buffer[:] = message.payload
        deadline = time.monotonic() + 20
        while not writer._file.field("lock") & LOCK_WAITERS:
            assert time.monotonic() < deadline, "nobody waits for the lock"
            time.sleep(0.001)
        place.commit()


def _die_with_lock(url: str, size: int) -> None:
    """Die in the middle of a message, among many writers."""
    writer = wide_writer(url)
    place = writer.reserve(size)
    place.buffer[: size // 2] = b"?" * (size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _read(url: str, name: str, counts: Sequence[int]) -> None:
    """Be a held reader: take so many messages a call, and close."""
    with wide_reader(f"{url}?hold={name}") as reader:
        for count in counts:
            messages = reader.read_many(count, timeout=20)
            assert len(messages) == count, messages


def _wait(url: str, seconds: float) -> None:
    """Wait for a message that does not come."""
    with wide_reader(url, start="end") as reader:
        assert reader.read(timeout=seconds) is None


_OPERATIONS: dict[str, Callable[..., None]] = {
    "write": _write,
    "hand over": _hand_over,
    "die with lock": _die_with_lock,
    "read": _read,
    "wait": _wait,
}


def serve_operations() -> None:
    """Be the server, with the core that was built here (`support.faulty_core`)."""
    batch_from_messages(
        [message_of(0, 0)]
    )  # imports what Arrow wants at its first use, once for all
    serve(_OPERATIONS, ["penstock.queue.endpoint"], _set_fault)


def _set_fault(arguments: dict[str, Any]) -> None:
    os.environ["PENSTOCK_FAULT_AT"] = str(arguments.pop("at"))
