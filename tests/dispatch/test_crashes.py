"""Does everything that was taken in outlive a kill -9?"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.protocols.uprotocol import UCode
from support import dispatch_lives
from support.dispatching import BOB, TOPIC, World, status

_TESTS = str(Path(__file__).parents[1])


def _live_and_die(state: Path, out: Path, first: int, failing: float, seconds: float) -> int:
    """Run a dispatcher, kill it, and return the number of the first message it did not take in."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.dispatch_lives", state, out, str(first), str(failing)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": _TESTS, "PYTHONWARNINGS": "error"},
    )
    assert process.stdout is not None
    try:
        head = process.stdout.readline()  # it runs
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.wait(10)
    finally:
        process.kill()
        process.stdout.close()
    whole = (head + rest).rpartition(b"\n")[0]
    assert process.returncode == -signal.SIGKILL
    return int(whole.rpartition(b"\n")[2])


def _check(lives: int, tmp_path: Path, failing: float) -> None:
    state, out = tmp_path / "state", tmp_path / "out"
    rng = random.Random(lives)
    taken: list[range] = []
    first = 0
    for _ in range(lives):
        end = _live_and_die(state, out, first, failing, rng.uniform(0.05, 0.5))
        taken.append(range(first, end))
        first = end + 1_000_000  # what was not acknowledged may be there, or not
        first -= first % 2
    dispatcher = dispatch_lives.make(state, out, failing=0.0)
    dispatcher.start()
    dispatcher.stop(grace=60)
    books = dispatcher.books()
    assert books.problems() == []
    assert books.copies.queued == 0
    assert books.copies.stored == books.copies.acked
    dispatcher.close()
    seen: dict[str, list[int]] = {"//here/20/1/0": [], "//here/30/1/0": []}
    for line in out.read_text().splitlines():
        address, _, number = line.partition(" ")
        seen[address].append(int(number))
    for address, numbers in seen.items():
        step = 1 if address == "//here/20/1/0" else 2
        wanted = {n for part in taken for n in part if step == 1 or n % 2}
        assert wanted <= set(numbers)  # nothing is lost
        once = list(dict.fromkeys(numbers))
        assert once == sorted(once)  # and all of it is in order


def test_what_was_acknowledged_is_delivered_after_a_kill_when_nothing_was_sent_before(
    tmp_path: Path,
) -> None:
    _check(1, tmp_path, failing=1.0)


def test_what_was_acknowledged_is_delivered_after_kills_amid_failing_deliveries(
    tmp_path: Path,
) -> None:
    _check(3, tmp_path, failing=0.1)


@pytest.mark.full
def test_what_was_acknowledged_is_delivered_after_twenty_kills(tmp_path: Path) -> None:
    _check(20, tmp_path, failing=0.1)


def test_a_crash_between_the_letter_and_the_settling_leaves_one_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is lost with the process is that the message was settled."""
    from penstock.dispatch import failures

    world = World(tmp_path)
    world.local.always = status("NOT_FOUND")
    with monkeypatch.context() as patch:
        patch.setattr(failures, "_settle", _die)
        world.ingest(world.request(method=BOB.with_resource(1)))
        with pytest.raises(SystemExit):
            world.run()
    assert len(world.letters) == 1
    again = world.reopen()
    again.local.judge = lambda who, _: status("NOT_FOUND") if who == BOB else None
    again.run(1)
    assert again.codes == [UCode.UNAVAILABLE]
    assert again.dispatcher.books().counts.letters_known == 1
    assert len(again.responses()) == 1
    again.balance()
    again.close()


def _die(_: object) -> None:
    raise SystemExit


def test_the_source_keeps_its_order_over_a_restart(world: World) -> None:
    world.local.always = status("UNAVAILABLE")
    world.ingest(*(world.notify(b"%d" % i) for i in range(100)))
    for part in range(1, 4):
        again = world.reopen()
        again.local.always = status("UNAVAILABLE")
        again.ingest(*(again.notify(b"%d" % i) for i in range(100 * part, 100 * part + 100)))
        world = again
    world.local.always = None
    world.run(20)
    assert world.local.payloads(BOB) == [b"%d" % i for i in range(400)]
    assert world.local.arrived[BOB][0].attributes.source == TOPIC
    world.balance()
    world.close()
