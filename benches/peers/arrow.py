"""What does the way from a queue into Arrow cost beside a copy of the same bytes?"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import penstock
from peers.tally import payloads_of

__all__ = ["ArrowCopy", "arrow_copy", "fill"]

#: More than a processor's cache holds, so that both read from memory.
_BUFFER = 256 << 20

#: Payload bytes of one batch, and of one copy.
_BATCH = 4 << 20


@dataclass(frozen=True, slots=True)
class ArrowCopy:
    """Bytes a second of one round."""

    read_batch: float
    memcpy: float

    @property
    def ratio(self) -> float:
        return self.read_batch / self.memcpy


def fill(path: str, size: int) -> None:
    """Make a queue that is full of messages of a size."""
    slots = 2 * _BUFFER // (size + 64)
    with penstock.open_writer(f"fmq:{path}", layout="wide", slots=slots, size=_BUFFER) as writer:
        payloads = payloads_of(size)
        for _ in range(2 * _BUFFER // (size * len(payloads))):
            writer.write_many(payloads)


def arrow_copy(path: str, size: int, seconds: float) -> ArrowCopy:
    """Read the whole queue as Arrow batches, and copy its memory, in turn."""
    # Whatever the queue's files are called: the largest holds the messages.
    file = max(Path(path).parent.iterdir(), key=lambda each: each.stat().st_size)
    memory = np.memmap(file, np.uint8, "r")
    batch_bytes = copied_bytes = 0
    batch_seconds = copy_seconds = 0.0
    with penstock.open_reader(f"fmq:{path}") as reader:
        _read_all(reader, size)  # everything has been touched once
        while batch_seconds + copy_seconds < seconds:
            began = time.perf_counter()
            batch_bytes += _read_all(reader, size)
            between = time.perf_counter()
            copied_bytes += _copy_all(memory)
            batch_seconds += between - began
            copy_seconds += time.perf_counter() - between
    return ArrowCopy(batch_bytes / batch_seconds, copied_bytes / copy_seconds)


def _read_all(reader: penstock.Reader, size: int) -> int:
    reader.seek("start")
    rows = 0
    while count := reader.read_batch(_BATCH // size).num_rows:
        rows += count
    return rows * size


def _copy_all(memory: np.memmap[tuple[int, ...], np.dtype[np.uint8]]) -> int:
    target = np.empty(_BATCH, np.uint8)
    target.fill(0)  # its pages are there: a copy need not wait for them
    pieces = range(len(memory) // _BATCH)
    for piece in pieces:
        np.copyto(target, memory[piece * _BATCH : (piece + 1) * _BATCH])
    return len(pieces) * _BATCH
