"""The process that works with an outbox until it is killed.

`python -m support.outbox_lives FOLDER REPORT SEED` appends, takes and settles at random. To
REPORT it adds what it is about to do and what is done, each with one write, which outlives a kill:

    a FIRST LAST    begins to append the messages FIRST to LAST
    A FIRST LAST    they are stored
    s NUMBER ...    begins to settle these
    S NUMBER ...    they are settled
    w               works
"""

from __future__ import annotations

import os
import random
import struct
import sys

from penstock.dispatch.outbox import Entry, Outbox, Reason

__all__ = ["NUMBER", "OPTIONS", "read_report"]

#: The first bytes of each message.
NUMBER = struct.Struct("<Q")
OPTIONS: dict[str, int] = {"window": 64, "segment": 1 << 18, "max_messages": 1_000_000}


def work(folder: str, report: str, seed: int) -> None:
    """Work until killed."""
    chance = random.Random(seed)
    file = os.open(report, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def say(what: str, *numbers: int) -> None:
        os.write(file, (" ".join([what, *map(str, numbers)]) + "\n").encode())

    outbox = Outbox(folder, sync=0.05, **OPTIONS)  # type: ignore[arg-type]
    following = max((last for _, last in read_report(report).begun), default=-1) + 1
    say("w")
    while True:
        count = chance.choice((1, 3, 40))
        say("a", following, following + count - 1)
        outbox.append(
            Entry(
                chance.choice((0, 1, 1, 4)),
                0,
                0,
                chance.randrange(4),
                chance.randrange(1, 5),
                NUMBER.pack(number) + bytes(chance.randrange(300)),
            )
            for number in range(following, following + count)
        )
        say("A", following, following + count - 1)
        following += count
        blocked = {chance.randrange(4)} if chance.random() < 0.3 else set()
        order = chance.choice(("arrival", "priority"))
        items = outbox.take(chance.choice((1, 10, 60)), None, order, blocked)  # type: ignore[arg-type]
        chance.shuffle(items)
        keep = chance.randrange(len(items) + 1) if chance.random() < 0.5 else 0
        outbox.give_back(items[:keep])
        numbers = [NUMBER.unpack_from(item.raw)[0] for item in items[keep:]]
        say("s", *numbers)
        outbox.settle(items[keep:], chance.choice((Reason.ACKED, Reason.PERMANENT)))
        say("S", *numbers)


class Report:
    """What all processes reported."""

    def __init__(self) -> None:
        #: First and last number of what was begun to be stored, and was stored.
        self.begun: list[tuple[int, int]] = []
        self.stored: list[tuple[int, int]] = []
        self.maybe_settled: set[int] = set()
        self.settled: set[int] = set()
        self.lives = 0


def read_report(path: str) -> Report:
    report = Report()
    with open(path, "a+", encoding="ascii") as file:  # noqa: PTH123
        file.seek(0)
        for line in file:
            what, *words = line.split()
            numbers = [int(word) for word in words]
            match what:
                case "a":
                    report.begun.append((numbers[0], numbers[1]))
                case "A":
                    report.stored.append((numbers[0], numbers[1]))
                case "s":
                    report.maybe_settled.update(numbers)
                case "S":
                    report.settled.update(numbers)
                case _:
                    report.lives += 1
    return report


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
