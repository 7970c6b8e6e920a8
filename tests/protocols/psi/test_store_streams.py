"""A store keeps a named set of streams, in order, and finds them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import AlreadyExists, Closed, InvalidOption, NotFound, Unsupported
from penstock.core.position import Position
from penstock.protocols.psi import PsiMessage, UnknownStream
from penstock.protocols.psi.store.catalog import psi_message
from penstock.protocols.psi.store.lookup import find_store, list_places
from penstock.protocols.psi.store.streams import Store

NOW = 1_700_000_000_000_000_000


def messages_in(store: Store, **options: int) -> list[PsiMessage]:
    with store.reader(**options) as reader:  # type: ignore[arg-type]
        return [psi_message(message) for message in reader.available()]


def fill(store: Store) -> None:
    numbers = store.add_stream("Numbers", "int")
    words = store.add_stream("Words", "string")
    for i in range(5):
        store.append(numbers.id, bytes([i, 0, 0, 0]), NOW + i * 1000, NOW + i * 1000)
        store.append(words.id, b"\0\0\0\0", NOW + i * 1000, NOW + i * 1000 + 500)


@pytest.mark.parametrize("volatile", [False, True])
def test_what_is_written_is_read_in_order_by_store_and_by_stream(
    tmp_path: Path, volatile: bool
) -> None:
    with Store.create(tmp_path, "rig", volatile=volatile) as store:
        fill(store)
        found = messages_in(store)
        assert [m.source_id for m in found] == [0, 1] * 5
        assert [m.sequence_id for m in messages_in(store, id=1)] == [1, 2, 3, 4, 5]
        assert store.time_range() == (NOW, NOW + 4500)
        numbers, words = store.streams()
        assert (numbers.name, numbers.messages, numbers.bytes) == ("Numbers", 5, 20)
        assert (words.first_creation_ns, words.last_originating_ns) == (NOW + 500, NOW + 4000)
        assert not words.is_closed


def test_a_store_is_opened_by_name_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    with Store.create(tmp_path, "rig") as store:
        fill(store)
    with Store.create(tmp_path, "other", subdirectory=True):
        pass
    with Store.create(tmp_path, "other", subdirectory=True):
        pass
    assert [place.folder.name for place in list_places(tmp_path)] == [
        "other.0000",
        "other.0001",
        "rig",
    ]
    assert find_store(tmp_path, "other").folder.name == "other.0001"
    with pytest.raises(NotFound, match="no store 'nothing'"):
        find_store(tmp_path, "nothing")
    with Store.open(find_store(tmp_path, "rig").folder, writable=True) as store:
        assert [stream.messages for stream in store.streams()] == [5, 5]
        again = store.add_stream("Words", "string")
        assert store.append(again.id, b"\0\0\0\0").sequence_id == 6
        assert store.place.size_on_disk() > 0
    with Store.open(tmp_path / "rig") as store:
        assert len(messages_in(store)) == 11


def test_a_store_with_more_records_than_are_read_at_once_is_opened_with_all_of_them(
    tmp_path: Path,
) -> None:
    with Store.create(tmp_path, "S") as store:
        ids = [store.add_stream(f"N{number}", "int").id for number in range(4500)]
        store.append(ids[-1], bytes(4))
    with Store.open(tmp_path / "S") as reading:
        assert len(reading.catalog.streams) == 4500
    with Store.open(tmp_path / "S", writable=True) as store:
        assert store.last_sequence(ids[-1]) == 1
        assert store.add_stream("another", "int").id not in ids


def test_another_process_may_read_while_one_writes(tmp_path: Path) -> None:
    with Store.create(tmp_path, "rig") as store, Store.open(tmp_path / "rig") as watcher:
        fill(store)
        assert watcher.records_after(1, 5.0)
        assert [stream.name for stream in watcher.streams()] == ["Numbers", "Words"]
        store.end_stream("Words")
        assert [stream.is_closed for stream in watcher.streams()] == [False, True]
        assert watcher.streams()[1].messages == 5
        with pytest.raises(Unsupported):
            watcher.add_stream("More", "int")


def test_a_stream_that_ended_takes_no_more_until_it_is_added_again() -> None:
    with Store.volatile() as store:
        stream = store.add_stream("Words", "string")
        store.append(stream.id, b"\0\0\0\0")
        store.end_stream("Words")
        with pytest.raises(Closed):
            store.append(stream.id, b"\0\0\0\0")
        store.add_stream("Words", "string")
        assert store.append(stream.id, b"\0\0\0\0").sequence_id == 2


def test_a_ring_forgets_the_oldest_and_the_counts_stay() -> None:
    with Store.volatile(slots=8, size=65536) as store:
        stream = store.add_stream("Numbers", "int")
        for _ in range(20):
            store.append(stream.id, b"\0\0\0\0")
        assert [m.sequence_id for m in messages_in(store)] == list(range(13, 21))
        assert store.streams()[0].messages == 20


def test_originating_times_always_go_forward_and_moving_them_is_counted() -> None:
    with Store.volatile() as store:
        stream = store.add_stream("Numbers", "int")
        made = [store.append(stream.id, b"\0\0\0\0", NOW) for _ in range(3)]
        assert [m.originating_ns for m in made] == [NOW, NOW + 100, NOW + 200]
        assert store.times_moved == 2


def test_a_creation_time_that_goes_back_is_kept_and_found() -> None:
    with Store.volatile() as store:
        store.add_stream("A", "int", id=1)
        store.add_stream("B", "int", id=2)
        given = [
            PsiMessage(1, 1, NOW, NOW + 1000, b"1234"),
            PsiMessage(2, 1, NOW, NOW + 500, b"5678"),
            PsiMessage(1, 2, NOW + 100, NOW + 2000, b"9999"),
        ]
        store.append_messages(given)
        assert messages_in(store) == given
        with store.reader(Position.time(NOW + 500)) as reader:
            assert [psi_message(m) for m in reader.available()] == given


def test_names_and_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with Store.create(tmp_path, "rig") as store:
        store.add_stream("A", "int", id=1)
        with pytest.raises(InvalidOption, match="another type"):
            store.add_stream("A", "float")
        with pytest.raises(InvalidOption, match="another stream"):
            store.add_stream("B", "float", id=1)
        with pytest.raises(UnknownStream):
            store.append(7, b"")
    with pytest.raises(AlreadyExists):
        Store.create(tmp_path, "rig")
    with pytest.raises(InvalidOption):
        Store.create(tmp_path, "../rig")
    with pytest.raises(NotFound):
        Store.open(tmp_path / "nothing")


def test_a_store_in_memory_is_gone_when_it_is_closed() -> None:
    with Store.volatile() as store:
        folder = store.place.folder
        assert folder.exists()
    assert not folder.exists()
