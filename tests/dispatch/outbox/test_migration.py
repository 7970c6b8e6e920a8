"""Is an outbox of an earlier release, with a log for each priority, taken over as a whole?"""

from __future__ import annotations

import errno
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import StorageError
from penstock.dispatch.outbox import Outbox, OutboxBooks, Reason, migration
from penstock.dispatch.outbox import state as state_module
from penstock.dispatch.outbox.log import OutboxLog
from penstock.dispatch.outbox.state import StateFile

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The outbox of a receiver that has messages of several classes, some of them settled."""
    with tarfile.open(FIXTURES / "dispatcher-state" / "state.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (tmp_path / "state" / "outbox").glob("*/cs5/..")
    return folder.resolve()


def contents(folder: Path) -> tuple[OutboxBooks, list[tuple[int, int, bytes]]]:
    with Outbox(folder) as outbox:
        items = outbox.take(10_000)
        return outbox.books(), [(item.priority, item.arrival, item.raw) for item in items]


def test_what_was_queued_is_in_one_log_in_the_order_of_arrival(earlier: Path) -> None:
    classes = {int(path.name[2:]) for path in earlier.glob("cs*")}
    assert len(classes) > 1
    books, found = contents(earlier)
    assert books.acked > 0
    assert books.stored == sum(books[1:])
    assert len(found) == books.queued > 0
    arrivals = [arrival for _, arrival, _ in found]
    assert arrivals == sorted(set(arrivals))
    assert {priority for priority, _, _ in found} <= classes
    assert not list(earlier.glob("cs*"))
    assert contents(earlier) == (books, found)
    with Outbox(earlier) as outbox:
        assert not outbox.findings
        assert outbox.last_arrival >= arrivals[-1]
        outbox.settle(outbox.take(5), Reason.ACKED)
    assert contents(earlier)[1] == found[5:]


def crash(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where",
    [
        (OutboxLog, "sync"),
        (migration, "sync_files"),
        (StateFile, "write"),
        (Path, "rename"),
        (Path, "unlink"),
        (shutil, "rmtree"),
    ],
    ids=lambda where: where[1],
)
def test_a_crash_meanwhile_loses_and_repeats_nothing(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    shutil.copytree(earlier, tmp_path / "other")
    expected = contents(tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(*where, crash)
        with pytest.raises(KeyboardInterrupt):
            Outbox(earlier)
    assert list(earlier.glob("cs*"))
    assert contents(earlier) == expected
    assert not list(earlier.glob("cs*"))
    assert not (earlier / "log.new").exists()


def test_a_disk_that_is_full_meanwhile_leaves_all_as_it_was(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(earlier, tmp_path / "other")
    expected = contents(tmp_path / "other")

    def refuse(*_: Any) -> None:
        raise StorageError("writing", "it", OSError(errno.ENOSPC, "no space"))

    with monkeypatch.context() as patch:
        patch.setattr(OutboxLog, "write", refuse)
        with pytest.raises(StorageError):
            Outbox(earlier)
    assert not (earlier / "log.new").exists()
    assert contents(earlier) == expected


def test_a_new_state_whose_name_cannot_be_synced_keeps_its_log(
    earlier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(earlier, tmp_path / "other")
    expected = contents(tmp_path / "other")

    def refuse(_: Path) -> None:
        raise OSError(errno.EIO, "the device fails")

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "sync_names", refuse)
        with pytest.raises(StorageError):
            Outbox(earlier)
    with Outbox(earlier) as outbox:
        assert not outbox.findings
    assert contents(earlier) == expected


def test_without_its_state_everything_comes_again(earlier: Path, tmp_path: Path) -> None:
    shutil.copytree(earlier, tmp_path / "other")
    _, expected = contents(tmp_path / "other")
    for name in ("state", "settled"):
        (earlier / name).write_bytes(b"x" * 100)
    with Outbox(earlier) as outbox:
        assert "come again" in outbox.findings[0]
        found = [item.raw for item in outbox.take(10_000)]
    assert set(found) >= {raw for _, _, raw in expected}
