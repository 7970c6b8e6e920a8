"""A batch is appended by processes that are killed: at every line, or at any moment.

`python -m support.commit_lives lines|moments URL FOLDER ROWS STEP` prints a JSON line for each life
of a batch: whether it was killed, and whether the stream has exactly the batch after the replay.
With `lines` it dies at every STEP-th line in turn, until it lives to the end; with `moments` it
dies at STEP random moments.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock import open_reader
from penstock.core.batch import batch_from_messages
from penstock.core.endpoints import endpoint_of
from penstock.core.message import Message
from penstock.core.provenance import Commit, Staged
from penstock.core.url import URL
from penstock.queue import append_once, notes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_WATCHED = {module.__file__ for module in (append_once, notes)}
_QUERY = "the-query"


def stage(url: str, folder: Path, rows: int, order: random.Random) -> list[Staged]:
    """Stage a batch as three tasks do; rows come in another order each time, as after a shuffle."""
    numbers = list(range(rows))
    order.shuffle(numbers)
    parts = []
    for partition in range(3):
        mine = numbers[partition::3]
        task = append_once.Staging(folder / _QUERY / "7", partition)
        messages = [Message(0, 0, 0, n % 5, 0, None, None, b"row %d" % n) for n in mine]
        task.add([url], batch_from_messages(messages[: len(mine) // 2]))
        task.add([url], batch_from_messages(messages[len(mine) // 2 :]))
        parts += task.finish()
    return parts


def notes_for(url: str, writer: str = "q") -> notes.WriterNotes:
    """Return what a stream knows of a writer."""
    endpoint = endpoint_of(url)
    assert isinstance(endpoint, append_once.NotedAppends)
    return endpoint._notes_for(URL.parse(url), Commit(writer, 0))


def kill_at_line(number: int) -> None:
    """Die just before so many lines of the modules that are watched have run."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in _WATCHED:
            return None
        if event == "line":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def in_a_life_of_its_own(work: Callable[[], None]) -> int:
    """Run something in a process of its own; return its status."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1]


def what_is_there(url: str) -> list[bytes]:
    with open_reader(url.partition("?")[0]) as reader:
        return [message.payload for message in reader.available()]


def live(url: str, folder: Path, rows: int, seed: int, kill: Callable[[], None]) -> bool:
    """Append a batch in a life that ends early, and in one that does not; tell if it did."""
    first, replay = (stage(url, folder, rows, random.Random(seed + i)) for i in range(2))

    def short_life() -> None:
        kill()
        append_once.append_once(url, first, _QUERY, 7, folder)

    def life() -> None:
        append_once.append_once(url, replay, _QUERY, 7, folder)
        assert append_once.append_once(url, replay, _QUERY, 7, folder) == 0

    status = in_a_life_of_its_own(short_life)
    assert in_a_life_of_its_own(life) == 0, "the replay failed"
    return os.WIFSIGNALED(status)


def main(mode: str, url: str, folder: str, rows: int, step: int) -> None:
    expected = sorted(b"row %d" % n for n in range(rows))
    chance = random.Random(rows)
    for life in itertools.count(1):
        target = f"{url}-{life}?segment=64k&segment_slots=64&sync=none"
        moment = chance.uniform(0.0005, 0.03)

        def kill(life: int = life, moment: float = moment) -> None:
            if mode == "lines":
                kill_at_line(life * step)
            else:
                # Its default action ends the process at once, wherever it is.
                signal.setitimer(signal.ITIMER_REAL, moment)

        was_killed = live(target, Path(folder), rows, life, kill)
        is_exact = sorted(what_is_there(target)) == expected
        sys.stdout.write(json.dumps({"killed": was_killed, "exact": is_exact}) + "\n")
        sys.stdout.flush()
        if (mode == "lines" and not was_killed) or (mode == "moments" and life == step):
            return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
