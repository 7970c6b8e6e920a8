"""What does a reader of `penstock bench` receive, with which latency, and what does it lose?

It runs as a process of its own. It prints `ready` when it is open, reads until it has all messages
or its input ends and no more come, and prints the result, or an error, as JSON.
"""

from __future__ import annotations

import json
import os
import select
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.cli.output import drop_output
from penstock.core.capabilities import Grouped
from penstock.core.endpoints import open_reader
from penstock.core.errors import PenstockError

if TYPE_CHECKING:
    from penstock.core.interfaces import Reader
    from penstock.core.message import Message

__all__ = ["HEAD", "main"]

#: The start of a payload: the id of the run, the number of the message, and its send time.
HEAD: Final = struct.Struct("<QQq")

_AT_ONCE: Final = 4096
#: Seconds between two checks for the end, and seconds to wait after the last message.
_PATIENCE: Final = 0.1
_SILENCE: Final = 2.0
#: Points of the latency curve.
_QUANTILES: Final = 1000


class _Books:
    """Counters of received messages: number, times and latencies."""

    def __init__(self, run: int, count: int) -> None:
        self._run = run
        self._has = np.zeros(count, np.bool_)
        self._late: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self.bytes = self.twice = 0
        self.first_ns = self.last_ns = 0

    def add(self, messages: list[Message], now_ns: int) -> None:
        own = [m for m in messages if m.size >= HEAD.size]
        heads = np.frombuffer(b"".join([m.payload[: HEAD.size] for m in own]), "<i8").reshape(-1, 3)
        is_ours = heads[:, 0].view(np.uint64) == self._run
        heads = heads[is_ours]
        if not len(heads):
            return
        numbers = heads[:, 1]
        self.twice += int(self._has[numbers].sum()) + len(numbers) - len(np.unique(numbers))
        self._has[numbers] = True
        self._late.append(now_ns - heads[:, 2])
        self.bytes += sum(m.size for m, ours in zip(own, is_ours, strict=True) if ours)
        self.first_ns = self.first_ns or now_ns
        self.last_ns = now_ns

    @property
    def is_whole(self) -> bool:
        return bool(self._has[-1]) and bool(self._has.all())

    def result(self) -> dict[str, Any]:
        late = np.concatenate(self._late) if self._late else np.zeros(0, np.int64)
        points = np.linspace(0, 100, _QUANTILES + 1)
        return {
            "messages": int(self._has.sum()),
            "lost": int((~self._has).sum()),
            "twice": self.twice,
            "bytes": self.bytes,
            "seconds": (self.last_ns - self.first_ns) / 1e9,
            "latencies_ns": np.percentile(late, points).tolist() if len(late) else [],
            "slowest_999_ns": float(np.percentile(late, 99.9)) if len(late) else None,
        }


def main(url: str, run: int, count: int) -> dict[str, Any]:
    """Read until all messages of a run have come, or no more do; return the result."""
    books = _Books(run, count)
    with open_reader(url, "end") as reader:
        _say("ready")
        _follow(reader, books)
    return books.result()


def _follow(reader: Reader, books: _Books) -> None:
    silent_since = time.monotonic()
    while not books.is_whole:
        messages = reader.read_many(_AT_ONCE, _PATIENCE)
        if messages:
            books.add(messages, time.time_ns())
            if isinstance(reader, Grouped):
                reader.ack(messages)
            silent_since = time.monotonic()
        elif time.monotonic() - silent_since > _SILENCE and _is_over():
            break


def _is_over() -> bool:
    """Tell whether the parent process has sent everything: the standard input has ended."""
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        _say(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    except PenstockError as error:
        _say(json.dumps({"error": str(error), "hint": error.hint}))
        sys.exit(1)
    except BrokenPipeError:  # the command was killed: nobody asks for the result
        drop_output()
        sys.exit(1)
