"""The other processes of the tests of named positions: `python -m support.cursor_roles`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

from penstock.core.errors import Closed, CursorInUse
from penstock.queue.cursor_file import CursorFile
from support.peer import hear, say


def hold(path: str, *, name: str | None, epoch: int = 0, seq: int = 0) -> None:
    """Own a cursor; `move N` and `release` as told."""
    with CursorFile(path) as file:
        cursor = file.claim(name, epoch=epoch, seq=seq)
        say(ready=True)
        while line := hear():
            if line == "release":
                cursor.release()
            else:
                cursor.move(int(line.removeprefix("move ")))
            say(done=line)


def hold_and_fork(path: str, *, name: str, seq: int) -> None:
    """Own a cursor and have a child that stays; tell what the child was refused."""
    file = CursorFile(path)
    cursor = file.claim(name, seq=seq)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        refused = []
        for use in (
            lambda: cursor.move(99),
            lambda: cursor.seq,
            lambda: cursor.epoch,
            lambda: file.claim("b"),
            lambda: file.forget(name),
            file.entries,
        ):
            try:
                use()
            except Closed as error:
                refused.append(type(error).__name__)
        cursor.release()
        file.close()
        os.write(write_end, json.dumps(refused).encode())
        time.sleep(60)
        os._exit(0)
    say(child=child, refused=json.loads(os.read(read_end, 4096)))
    hear()


def race(path: str, *, rounds: int) -> None:
    """Claim the name that is told; release it when told."""
    with CursorFile(path) as file:
        say(ready=True)
        for _ in range(rounds):
            try:
                cursor = file.claim(hear())
            except CursorInUse as error:
                say(claimed=False, pid=error.pid)
                hear()
            else:
                say(claimed=True)
                hear()
                cursor.release()
            say(done=True)


def claim_many(path: str, *, prefix: str, count: int) -> None:
    """Claim many names as fast as can be."""
    with CursorFile(path) as file:
        say(ready=True)
        hear()
        claimed = [file.claim(f"{prefix}{number}", timeout=60) for number in range(count)]
        say(entries={cursor.name: cursor.index for cursor in claimed})
        hear()


def hold_allocation(path: str) -> None:
    """Stop in the middle of a claim."""
    with CursorFile(path) as file, file.table._allocating(1):
        say(ready=True)
        hear()


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (hold, hold_and_fork, race, claim_many, hold_allocation)
}


if __name__ == "__main__":
    COMMANDS[sys.argv[1]](**json.loads(sys.argv[2]))
