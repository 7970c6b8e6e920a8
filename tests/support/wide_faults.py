"""How is a process killed between any two stores to a wide queue, one after the other?

The native core is built once more, with points at which it can be told to die. Run as a program
this is the server of processes that use that build: `python -m support.wide_faults LIBRARY`.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import open_reader, open_writer
from penstock.core.batch import batch_from_messages
from penstock.core.message import Message
from penstock.core.stream_id import StreamId
from support.lives import Lives, Outcome, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["LOCK_WAITERS", "FaultyProcesses", "build", "message_of"]

_ROOT = Path(__file__).parents[2]
_CORE = "penstock.queue.wide._ring"
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
        super().__init__("support.wide_faults", str(library))

    def run(self, operation: str, at: int, **arguments: object) -> Outcome:
        return self.start(operation, at=at, **arguments).end()


# --- the server -------------------------------------------------------------------------------


def _import_core(arguments: dict[str, Any]) -> None:
    """Put the library in the place of the installed one, before anybody imports that."""
    assert _CORE not in sys.modules
    os.environ["PENSTOCK_FAULT_AT"] = str(arguments.pop("at"))
    loader = importlib.machinery.ExtensionFileLoader(_CORE, sys.argv[1])
    spec = importlib.util.spec_from_loader(_CORE, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_CORE] = module
    importlib.import_module("penstock.queue.wide")._ring = module  # type: ignore[attr-defined]


# --- what the processes do ----------------------------------------------------------------------


def _write(url: str, how: str, first: int, sizes: Sequence[int], *, block: bool) -> None:
    """Append messages first, first + 1, … of these sizes, in one way or another."""
    messages = [message_of(first + i, size, with_block=block) for i, size in enumerate(sizes)]
    with open_writer(url) as writer:
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
                    place = writer.reserve(  # type: ignore[attr-defined]
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
    with open_writer(url) as writer:
        place = writer.reserve(size, message.type)  # type: ignore[attr-defined]
        place.buffer[:] = message.payload
        deadline = time.monotonic() + 20
        while not writer._file.field("lock") & LOCK_WAITERS:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline, "nobody waits for the lock"
            time.sleep(0.001)
        place.commit()


def _die_with_lock(url: str, size: int) -> None:
    """Die in the middle of a message, among many writers."""
    writer = open_writer(url)
    writer.reserve(size).buffer[: size // 2] = b"?" * (size // 2)  # type: ignore[attr-defined]
    os.kill(os.getpid(), signal.SIGKILL)


def _read(url: str, name: str, counts: Sequence[int]) -> None:
    """Be a held reader: take so many messages a call, and close."""
    with open_reader(f"{url}?hold={name}") as reader:
        for count in counts:
            messages = reader.read_many(count, timeout=20)
            assert len(messages) == count, messages


def _wait(url: str, seconds: float) -> None:
    """Wait for a message that does not come."""
    with open_reader(url, start="end") as reader:
        assert reader.read(timeout=seconds) is None


_OPERATIONS: dict[str, Callable[..., None]] = {
    "write": _write,
    "hand over": _hand_over,
    "die with lock": _die_with_lock,
    "read": _read,
    "wait": _wait,
}

if __name__ == "__main__":
    # What takes time to import, and does not need the core.
    serve(
        _OPERATIONS, ["penstock.queue.classic.writer", "penstock.queue.wide.options"], _import_core
    )
