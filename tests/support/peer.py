"""The other processes of the queue tests: `python peer.py COMMAND '{"json": "arguments"}'`.

Each answers with lines of JSON. `ready` comes first, when everything is open.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import random
import resource
import select
import signal
import struct
import sys
import time
from typing import Any

from penstock import open_reader, open_writer
from penstock.core.statistics import Loss
from support import self_describing

#: A message of this type ends a reader.
LAST_TYPE = 99

_REPORT = struct.Struct("<QQ")


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def hear() -> str:
    return sys.stdin.readline().strip()


def write(
    url: str,
    *,
    writer: int = 0,
    count: int,
    batch: int = 1,
    smallest: int = 0,
    largest: int = 2000,
    pause: float = 0.0,
) -> None:
    """Write `count` messages at full speed, when told to go."""
    maker = self_describing.Maker(writer, smallest, largest)
    with open_writer(url) as queue:
        say(ready=True)
        hear()
        seqs: list[int | None] = []
        for first in range(0, count, batch):
            numbers = range(first, min(first + batch, count))
            if batch == 1:
                seqs.append(queue.write(maker.make(first)))
            else:
                seqs.append(queue.write_many([maker.make(number) for number in numbers]))
            if pause:
                time.sleep(pause)
        books = queue.statistics()
    say(messages=books.messages, refused=books.refused, last_seq=books.last_seq, seqs=seqs[-5:])


class _Ranges:
    """Runs of numbers that follow each other."""

    def __init__(self) -> None:
        self.ranges: list[list[int]] = []

    def add(self, first: int, last: int) -> None:
        if self.ranges and self.ranges[-1][1] + 1 == first:
            self.ranges[-1][1] = last
        else:
            self.ranges.append([first, last])


def read(
    url: str,
    *,
    until: int | None = None,
    pause: float = 0.0,
    at_once: int = 1,
    as_batch: bool = False,
    numbered: bool = True,
) -> None:
    """Read and check every payload until number `until - 1`, or a message of LAST_TYPE."""
    delivered, lost = _Ranges(), _Ranges()
    per_writer: dict[int, int] = {}
    ended = False
    with open_reader(url) as queue:
        say(ready=True)
        known: Loss | None = None
        while not ended:
            if as_batch:
                batch = queue.read_batch(at_once, timeout=30)
                rows = list(
                    zip(
                        *(batch.column(name).to_pylist() for name in ("seq", "type", "payload")),
                        strict=True,
                    )
                )
            else:
                rows = [(m.seq, m.type, m.payload) for m in queue.read_many(at_once, timeout=30)]
            assert rows, "no message came for 30 s"
            for seq, type, payload in rows:
                delivered.add(seq, seq)
                if type == LAST_TYPE:
                    ended = True
                    break
                content = self_describing.check(payload)
                assert not numbered or content.number == seq, (content, seq)
                previous = per_writer.get(content.writer, -1)
                assert content.number > previous, (content, previous)
                per_writer[content.writer] = content.number
            latest = queue.statistics().losses[-1:]
            if latest and latest[0] != known:
                # The ledger lengthens its latest range when the next loss follows on it.
                [loss] = latest
                goes_on = known is not None and known.first == loss.first
                lost.add(known.last + 1 if known and goes_on else loss.first, loss.last)
                known = loss
            ended = ended or (until is not None and rows[-1][0] >= until - 1)
            if pause:
                time.sleep(pause)
        books = queue.statistics()
    say(
        delivered=delivered.ranges,
        lost=lost.ranges,
        messages=books.messages,
        lost_count=books.lost,
        restarts=books.restarts,
        next_seq=books.next_seq,
    )


def hold_lock(path: str) -> None:
    """Hold LROSE's kind of lock on a file from `ready` until told to let go, again and again."""
    fd = os.open(path, os.O_RDWR)
    while True:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        say(ready=True)
        if not hear():
            return
        at = time.monotonic()
        fcntl.lockf(fd, fcntl.LOCK_UN)
        say(released=at)
        if not hear():
            return


def try_lock(path: str) -> None:
    """Try LROSE's kind of lock (F_SETLK) on a file whenever asked."""
    fd = os.open(path, os.O_RDWR)
    say(ready=True)
    while hear():
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(locked=False)
        else:
            fcntl.lockf(fd, fcntl.LOCK_UN)
            say(locked=True)


def nursery() -> None:
    """Start writers and kill them with SIGKILL after a while; tell what they had confirmed."""
    say(ready=True)
    while line := hear():
        say(**_one_life(**json.loads(line)))


def _one_life(
    url: str, writer: int, batch: int, smallest: int, largest: int, seconds: float
) -> dict[str, Any]:
    """Fork a writer, kill it `seconds` after its first message, and collect its reports."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _write_until_killed(url, writer, batch, smallest, largest, write_end)
    os.close(write_end)
    data = b""
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        left = 20.0 if deadline is None else deadline - time.monotonic()
        if not select.select([read_end], [], [], max(left, 0))[0]:
            break
        piece = os.read(read_end, 1 << 16)
        if not piece:
            break
        data += piece
        if deadline is None:
            deadline = time.monotonic() + seconds
    os.kill(pid, signal.SIGKILL)
    _, state = os.waitpid(pid, 0)
    while piece := os.read(read_end, 1 << 16):
        data += piece
    os.close(read_end)
    whole = len(data) // _REPORT.size * _REPORT.size
    return {
        "confirmed": list(_REPORT.iter_unpack(data[:whole])),
        "killed": os.WIFSIGNALED(state) and os.WTERMSIG(state) == signal.SIGKILL,
    }


def _write_until_killed(
    url: str, writer: int, batch: int, smallest: int, largest: int, to: int
) -> None:
    try:
        maker = self_describing.Maker(writer, smallest, largest)
        with open_writer(url) as queue:
            number = 0
            while True:
                if batch == 1:
                    seq = queue.write(maker.make(number))
                    os.write(to, _REPORT.pack(seq, number))
                    number += 1
                else:
                    count = random.randint(1, batch)
                    payloads = [maker.make(number + i) for i in range(count)]
                    last = queue.write_many(payloads)
                    assert last is not None
                    for i in range(count):
                        os.write(to, _REPORT.pack(last - count + 1 + i, number + i))
                    number += count
    finally:
        os._exit(3)


def follow_idle(url: str, *, seconds: float) -> None:
    """Wait for a message that does not come; tell what that costs."""
    with open_reader(url) as queue:
        queue.read(timeout=1.5)
        before, began = time.process_time(), time.monotonic()
        message = queue.read(timeout=seconds)
        spent, elapsed = time.process_time() - before, time.monotonic() - began
    say(share=spent / elapsed, elapsed=elapsed, silent=message is None)


def pass_messages(url: str, *, warm_up: int, count: int) -> None:
    """Write and read messages in turn; tell how the memory of the process grew."""
    payload = bytes(100)
    with open_writer(url) as writer, open_reader(url) as reader:

        def go(messages: int) -> None:
            for _ in range(0, messages, 100):
                writer.write_many([payload] * 100)
                assert len(reader.read_many(100)) == 100

        go(warm_up)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        go(count)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        books = reader.statistics()
    say(grew_kib=after - before, messages=books.messages, lost=books.lost)


def lose_messages(url: str, *, warm_up: int, rounds: int) -> None:
    """Lap a reader again and again; tell how the memory of the process grew."""
    logging.disable()
    payloads = [bytes(100)] * 60
    with open_writer(url) as writer, open_reader(url) as reader:

        def go(times: int) -> None:
            for _ in range(times):
                writer.write_many(payloads)
                assert reader.read_many(1)
                reader.seek(writer.statistics().messages - 40)

        go(warm_up)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        go(rounds)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        books = reader.statistics()
    say(grew_kib=after - before, messages=books.messages, lost=books.lost)


def write_blocking(url: str, *, count: int, size: int) -> None:
    """Write `count` numbered messages to a queue that blocks."""
    with open_writer(url) as queue:
        say(ready=True)
        hear()
        for number in range(count):
            queue.write(number.to_bytes(8) + bytes(size))
        books = queue.statistics()
    say(messages=books.messages, refused=books.refused, waited=books.waited)


COMMANDS = {
    command.__name__: command
    for command in (
        write,
        read,
        hold_lock,
        try_lock,
        nursery,
        follow_idle,
        pass_messages,
        lose_messages,
        write_blocking,
    )
}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](**json.loads(sys.argv[2]))
