"""The table of subscriptions, which outlives everything."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import StorageError
from penstock.dispatch.routes import Subscriber
from penstock.dispatch.services import Subscription, SubscriptionTable, subscriptions
from penstock.dispatch.services.subscriptions import Journal
from penstock.protocols.uprotocol import UUri

TOPIC = UUri("here", 0x10, 1, 0x8001)
ALICE = UUri("here", 0x20, 1, 0)
BOB = UUri("here", 0x30, 1, 0)
CAROL = UUri("here", 0x40, 1, 0)


def kept_in(path: Path) -> list[Subscription]:
    """Return what is there after a restart."""
    table = SubscriptionTable(path)
    found = list(table)
    table.close()
    return found


def test_the_receivers_of_a_topic_are_those_who_match_it(tmp_path: Path) -> None:
    table = SubscriptionTable(tmp_path / "table")
    every = UUri("here", 0xFFFF0010, 1, 0x8001)
    before = table.generation
    table.put(Subscription(TOPIC, ALICE), Subscription(every, BOB, sample_period_ms=9))
    assert table.generation > before
    assert set(table.receivers_of(TOPIC)) == {Subscriber(ALICE), Subscriber(BOB, 9)}
    assert table.receivers_of(UUri("here", 0x10010, 1, 0x8001)) == (Subscriber(BOB, 9),)
    assert set(table.topics()) == {TOPIC, every}
    table.remove(Subscription(TOPIC, ALICE))
    assert table.receivers_of(TOPIC) == (Subscriber(BOB, 9),)
    table.close()


def test_what_was_put_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = SubscriptionTable(path)
    one = Subscription(TOPIC, ALICE, expires_ms=5, sample_period_ms=6)
    table.put(one, Subscription(TOPIC, BOB))
    table.remove(Subscription(TOPIC, BOB))
    table.watch(BOB)
    table.note(TOPIC, {"is_wanted": True})
    table.close()
    again = SubscriptionTable(path)
    assert list(again) == [one]
    assert again.watchers == [(BOB, None)]
    assert again.notes == {TOPIC: {"is_wanted": True}}
    assert again.next_expiry_ms() == 5
    again.clear()
    again.close()
    assert kept_in(path) == []


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_line_that_a_crash_cut_off_is_not_there(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "table"
    table = SubscriptionTable(path)
    table.put(Subscription(TOPIC, ALICE))
    table.put(Subscription(TOPIC, BOB))
    table.close()
    path.write_bytes(path.read_bytes()[:-cut])
    again = SubscriptionTable(path)
    assert [one.subscriber for one in again] == [ALICE]
    again.put(Subscription(TOPIC, BOB))
    again.close()
    assert [one.subscriber for one in kept_in(path)] == [ALICE, BOB]


def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = SubscriptionTable(path)
    table.put(Subscription(TOPIC, ALICE))
    table.put(Subscription(TOPIC, BOB))
    table.close()
    data = bytearray(path.read_bytes())
    data[30] ^= 0x01
    path.write_bytes(data)
    assert [one.subscriber for one in kept_in(path)] == [BOB]


def test_the_file_does_not_grow_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path)
    for number in range(3000):
        journal.append([{"number": number}])
        if journal.is_long(1):
            journal.rewrite([{"number": number}])
    journal.close()
    journal = Journal(path)
    lines = journal.replay()
    journal.close()
    assert lines[-1] == {"number": 2999}
    assert len(lines) < 1100


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    table = SubscriptionTable(tmp_path / "table")
    table.put(Subscription(TOPIC, ALICE))
    table._journal._file.close()
    table._journal._file = Path("/dev/full").open("a+b", buffering=0)  # noqa: SIM115 - for long
    with pytest.raises(StorageError):
        table.put(Subscription(TOPIC, BOB))
    assert [one.subscriber for one in table] == [ALICE]
    table.close()


def long_table(path: Path) -> SubscriptionTable:
    """Return a table whose file is rewritten with its next change."""
    table = SubscriptionTable(path)
    table.put(Subscription(TOPIC, ALICE))
    table._journal._lines = 100_000
    return table


def test_a_change_is_made_although_the_file_cannot_be_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "table"
    table = long_table(path)
    (tmp_path / "table.new").mkdir()  # in the way of the new file
    table.put(Subscription(TOPIC, BOB))
    table.remove(Subscription(TOPIC, ALICE))
    assert table.receivers_of(TOPIC) == (Subscriber(BOB),)
    table.close()
    assert [one.subscriber for one in kept_in(path)] == [BOB]


def test_changes_after_a_rewrite_that_failed_half_way_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table"
    table = long_table(path)

    def refuse(_: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(subscriptions, "sync_names", refuse)
        table.put(Subscription(TOPIC, BOB))
        with pytest.raises(StorageError):  # not into the file that was replaced
            table.put(Subscription(TOPIC, CAROL))
        assert table.get(TOPIC, CAROL) is None
    table.put(Subscription(TOPIC, CAROL))
    table.close()
    assert [one.subscriber for one in kept_in(path)] == [ALICE, BOB, CAROL]


_WRITES = """
import sys
from pathlib import Path
from penstock.dispatch.services import Subscription, SubscriptionTable
from penstock.protocols.uprotocol import UUri
table = SubscriptionTable(Path(sys.argv[1]))
for number in range(100_000):
    table.put(Subscription(UUri("here", 16, 1, 0x8001), UUri("here", number + 1, 1, 0)))
    print(number + 1, flush=True)
"""


def test_what_was_acknowledged_is_there_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "table"
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITES, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(50):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    said = [int(line) for line in process.stdout.read().split("\n") if line]
    process.wait(10)
    process.stdout.close()
    kept = {one.subscriber.ue_id for one in kept_in(path)}
    assert kept >= set(range(1, max([50, *said]) + 1))
