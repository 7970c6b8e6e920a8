"""A store that is opened again reads only what came since its counts were kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.protocols.psi import PsiMessage, Store
from penstock.protocols.psi.store.streams import KEEP_EVERY, load_counts

WRITER = """
import os, sys
from penstock.protocols.psi import Store
store = Store.create(sys.argv[1], "S", sync="none")
a, b = store.add_stream("A", "int").id, store.add_stream("B", "int").id
payloads = [(bytes(4), None)] * 1000
for _ in range(int(sys.argv[2]) // 2000):
    store.append_many(a, payloads)
    store.append_many(b, payloads)
os._exit(9)
"""


def told(store: Store) -> list[tuple[str, int, int]]:
    return [(stream.name, stream.messages, stream.bytes) for stream in store.streams()]


def test_after_a_kill_only_the_end_is_read_and_the_counts_are_right(tmp_path: Path) -> None:
    count = KEEP_EVERY + 4_464
    subprocess.run([sys.executable, "-c", WRITER, tmp_path, str(count)], check=False)
    folder = tmp_path / "S"
    with Store.open(folder) as reading, reading.reader() as reader:
        kept = load_counts(folder, reader.bounds())
    assert kept is not None
    assert kept.next == KEEP_EVERY
    with Store.open(folder, writable=True) as store:
        assert told(store) == [("A", count // 2, count * 2), ("B", count // 2, count * 2)]
        assert store.append(0, bytes(4)).sequence_id == count // 2 + 1
    with Store.open(folder) as reading, reading.reader() as reader:
        kept = load_counts(folder, reader.bounds())
    assert kept is not None
    assert kept.next == count + 1


@pytest.mark.parametrize("content", [None, "", "garbage", "00000000 [1, 2, 3, {}]", "x" * 5000])
def test_counts_that_are_not_there_or_are_none_are_counted_again(
    tmp_path: Path, content: str | None
) -> None:
    with Store.create(tmp_path, "S") as store:
        id = store.add_stream("A", "int").id
        for _ in range(10):
            store.append(id, bytes(4))
    path = tmp_path / "S" / "counts.json"
    assert path.exists()
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with Store.open(tmp_path / "S", writable=True) as store:
        assert told(store) == [("A", 10, 40)]
        assert store.append(id, bytes(4)).sequence_id == 11


def test_counts_of_another_store_are_not_believed(tmp_path: Path) -> None:
    for name, messages in (("S", 3), ("T", 50)):
        with Store.create(tmp_path, name) as store:
            id = store.add_stream("A", "int").id
            for _ in range(messages):
                store.append(id, bytes(4))
    (tmp_path / "S" / "counts.json").write_text((tmp_path / "T" / "counts.json").read_text())
    with Store.open(tmp_path / "S", writable=True) as store:
        assert told(store) == [("A", 3, 12)]


@pytest.mark.parametrize("has_counts", [True, False])
def test_a_stream_that_was_begun_anew_goes_on_behind_its_last_number(
    tmp_path: Path, has_counts: bool
) -> None:
    began_ns = 1_800_000_000_000_000_000
    with Store.create(tmp_path, "S") as store:
        id = store.add_stream("A", "int").id
        for offset, count in ((0, 10), (100, 3)):
            times = range(began_ns + offset, began_ns + offset + count)
            store.append_messages(
                [
                    PsiMessage(id, number, time_ns, time_ns, bytes(4))
                    for number, time_ns in enumerate(times, start=1)
                ]
            )
            if count == 10:  # its exporter ended it, and began it again at 1
                store.end_stream("A")
                store.add_stream("A", "int")
    if not has_counts:
        (tmp_path / "S" / "counts.json").unlink()
    with Store.open(tmp_path / "S", writable=True) as store:
        assert store.last_sequence(id) == 3
        assert told(store) == [("A", 13, 52)]
