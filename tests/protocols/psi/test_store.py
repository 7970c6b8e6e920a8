from __future__ import annotations

import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import InvalidOption, Malformed, NotFound
from penstock.protocols.psi import (
    Envelope,
    PsiMessage,
    PsiStoreReader,
    RuntimeInfo,
    StreamFlags,
    StreamMetadata,
    Truncated,
    UnknownStream,
    encode_record,
    find_stores,
    known_schemas,
    qualify,
)
from penstock.protocols.psi.store.extents import ExtentFile, FilePosition
from penstock.protocols.psi.ticks import ns_to_raw
from protocols.psi.recordings import SESSIONS, VECTORS, catalog_of, expected, messages_of

SECOND = 10**9
INTS = StreamMetadata("Ints", 2, qualify("int"))
LARGE = StreamMetadata("Large", 6, qualify("byte[]"), StreamFlags.INDEXED)


def block(data: bytes) -> bytes:
    data += bytes(-len(data) % 4)
    return struct.pack("<i", len(data)) + data


def message(number: int, source: int = 2) -> Envelope:
    return Envelope(source, number, number * SECOND, number * SECOND + 500)


def write_store(folder: Path, extents: list[list[bytes]], streams: tuple[Any, ...] = ()) -> None:
    records = [RuntimeInfo(), *known_schemas("int"), *(streams or (INTS, LARGE))]
    catalog = b"".join(block(encode_record(record, in_catalog=True)) for record in records)
    (folder / "S.Catalog_000000.psi").write_bytes(catalog + bytes(100))
    for number, blocks in enumerate(extents):
        is_last = number == len(extents) - 1
        end = bytes(4) if is_last else struct.pack("<i", -(number + 1))
        (folder / f"S.Data_{number:06d}.psi").write_bytes(b"".join(map(block, blocks)) + end)


def ints(numbers: range) -> list[bytes]:
    return [message(number).to_bytes() + struct.pack("<i", number) for number in numbers]


@pytest.mark.parametrize("session", SESSIONS)
def test_a_recorded_store_is_read_fully(session: str) -> None:
    with PsiStoreReader(VECTORS / f"store_{session}") as store:
        assert store.name == "Oracle"
        assert store.is_live is False
        assert store.streams == list(catalog_of(session).streams.values())
        assert store.catalog.schemas == catalog_of(session).schemas
        stored = list(store.messages())
        sent = messages_of(session)
        # What was sent is the same, with the stale bytes of psi's buffer behind it.
        assert [one.message[:4] for one in stored] == [one[:4] for one in sent]
        for one, other in zip(stored, sent, strict=True):
            assert other.payload.startswith(one.message.payload)
            exact = store.trimmed(one).payload
            assert one.message.payload.startswith(exact)
            assert len(one.message.payload) - len(exact) < 4
        assert [entry.place for entry in store.index()] == [FilePosition(0, 0)]


def test_the_values_of_a_recorded_store_are_those_that_were_written() -> None:
    values = expected("basic.expected.json")["streams"]
    with PsiStoreReader(VECTORS / "store_basic") as store:
        for name, stream in values.items():
            found = [store.value(stored) for stored in store.messages([name])]
            for value, wanted in zip(found, stream["values"], strict=True):
                assert value == wanted or (wanted == "NaN" and math.isnan(value))
    with PsiStoreReader(VECTORS / "store_types") as store:
        wanted = expected("types.expected.json")["values"]["floatarray"]
        (stored,) = store.messages(["floatarray"])
        assert [store.value(stored).tolist()] == wanted
        assert isinstance(store.value(stored), np.ndarray)


def test_stores_are_found_below_a_folder() -> None:
    assert find_stores(VECTORS) == [
        ("Oracle", VECTORS / "store_basic"),
        ("Oracle", VECTORS / "store_types"),
    ]
    with pytest.raises(NotFound):
        find_stores(VECTORS / "nothing")


def test_a_folder_with_no_store_or_with_several_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        PsiStoreReader(tmp_path)
    for name in ("A", "B"):
        source = VECTORS / "store_basic" / "Oracle.Catalog_000000.psi"
        shutil.copy(source, tmp_path / f"{name}.Catalog_000000.psi")
    with pytest.raises(InvalidOption, match="A, B"):
        PsiStoreReader(tmp_path)
    with PsiStoreReader(tmp_path, "B") as store:
        with pytest.raises(NotFound, match="Data"):
            list(store.messages())
        assert list(store.index()) == []
    for name in ("C", "../A"):
        with pytest.raises(NotFound):
            PsiStoreReader(tmp_path, name)


def test_extents_follow_each_other_and_reading_goes_on_where_it_ended(tmp_path: Path) -> None:
    write_store(tmp_path, [ints(range(1, 4)), ints(range(4, 6)), []])
    with PsiStoreReader(tmp_path) as store:
        stored = list(store.messages())
        assert [store.value(one) for one in stored] == [1, 2, 3, 4, 5]
        assert stored[-1].next.extent == 1
        # A writer goes on, in the extent behind.
        data = tmp_path / "S.Data_000002.psi"
        data.write_bytes(b"".join(map(block, ints(range(6, 8)))) + bytes(4096))
        later = list(store.messages(start=stored[-1].next))
        assert [store.value(one) for one in later] == [6, 7]
        assert list(store.messages(start=later[-1].next)) == []


def test_streams_that_come_later_are_seen(tmp_path: Path) -> None:
    write_store(tmp_path, [ints(range(1, 2))], (LARGE,))
    with PsiStoreReader(tmp_path) as store:
        with pytest.raises(UnknownStream):
            list(store.messages())
        catalog = tmp_path / "S.Catalog_000000.psi"
        catalog.write_bytes(catalog.read_bytes()[:-100] + block(encode_record(INTS)) + bytes(50))
        assert [store.value(one) for one in store.messages()] == [1]
        assert store.refresh() is False


def test_an_interval_is_of_creation_times_and_the_index_finds_it(tmp_path: Path) -> None:
    blocks = ints(range(1, 1001))
    write_store(tmp_path, [blocks])
    size = len(block(blocks[0]))
    entries = [(0, 0, 0, 0)] + [
        (0, n * size, ns_to_raw(n * SECOND + 500), ns_to_raw(n * SECOND))
        for n in range(100, 1000, 100)
    ]
    index = b"".join(block(struct.pack("<iiQQ", *entry)) for entry in entries)
    (tmp_path / "S.Index_000000.psi").write_bytes(index)
    with PsiStoreReader(tmp_path) as store:
        for first, last in ((1, 3), (100, 101), (101, 101), (555, 1000), (1001, 2000)):
            start, end = first * SECOND + 500, last * SECOND + 500
            found = [store.value(one) for one in store.messages(start_ns=start, end_ns=end)]
            assert found == list(range(first, min(last, 1000) + 1))
        assert store.find(555 * SECOND) == FilePosition(0, 500 * size)
        assert store.find(100 * SECOND + 500) == FilePosition(0, 0)


def large_store(folder: Path, position: int = 0, extent: int = -(2**31)) -> None:
    envelope = message(1, 6)
    payload = struct.pack("<I", 0x80000000) + struct.pack("<i", 5000) + bytes(range(250)) * 20
    entry = struct.pack("<iiQQ", extent, position, 0, 0)
    write_store(folder, [[envelope.to_bytes() + entry]])
    (folder / "S.LargeData_000000.psi").write_bytes(block(envelope.to_bytes() + payload))


def test_large_messages_are_fetched_from_their_own_file(tmp_path: Path) -> None:
    large_store(tmp_path)
    with PsiStoreReader(tmp_path) as store:
        (stored,) = store.messages()
        assert stored.message[:4] == message(1, 6)
        assert isinstance(stored.message, PsiMessage)
        assert store.value(stored) == bytes(range(250)) * 20


@pytest.mark.parametrize(
    ("position", "extent"), [(2, -(2**31)), (1 << 20, -(2**31)), (0, 5), (-4, -(2**31))]
)
def test_a_large_message_that_is_nowhere_is_refused(
    tmp_path: Path, position: int, extent: int
) -> None:
    large_store(tmp_path, position, extent)
    with PsiStoreReader(tmp_path) as store, pytest.raises(Malformed):
        list(store.messages())


@pytest.mark.parametrize(
    "tail",
    [
        struct.pack("<i", 2**31 - 4),
        struct.pack("<i", 3) + bytes(8),
        struct.pack("<i", 100) + bytes(50),
        struct.pack("<i", 8) + bytes(8),
    ],
)
def test_a_block_that_is_none_is_refused_after_those_before_it(tmp_path: Path, tail: bytes) -> None:
    write_store(tmp_path, [ints(range(1, 3))])
    data = tmp_path / "S.Data_000000.psi"
    data.write_bytes(data.read_bytes()[:-4] + tail)
    with PsiStoreReader(tmp_path) as store:
        messages = store.messages()
        assert [store.value(next(messages)) for _ in range(2)] == [1, 2]
        with pytest.raises(Malformed):
            next(messages)


@pytest.mark.parametrize("to", [0, 1])
def test_a_chain_that_leads_back_is_refused(tmp_path: Path, to: int) -> None:
    write_store(tmp_path, [ints(range(1, 2)), []])
    (tmp_path / "S.Data_000001.psi").write_bytes(struct.pack("<i", -max(to, 1)))
    with PsiStoreReader(tmp_path) as store, pytest.raises(Malformed, match="next extent"):
        list(store.messages())


def test_an_extent_that_is_not_there_is_told(tmp_path: Path) -> None:
    write_store(tmp_path, [ints(range(1, 2)), []])
    (tmp_path / "S.Data_000001.psi").unlink()
    with PsiStoreReader(tmp_path) as store, pytest.raises(NotFound, match="000001"):
        list(store.messages())


def test_a_store_whose_writer_died_has_room_behind_its_last_block(tmp_path: Path) -> None:
    write_store(tmp_path, [ints(range(1, 3))])
    with (tmp_path / "S.Data_000000.psi").open("r+b") as data:
        data.truncate(1 << 28)
    (tmp_path / "S.Live").touch()
    with PsiStoreReader(tmp_path) as store:
        assert store.is_live is True
        assert [store.value(one) for one in store.messages()] == [1, 2]


def test_a_damaged_catalog_is_told(tmp_path: Path) -> None:
    (tmp_path / "S.Catalog_000000.psi").write_bytes(block(b"\xff\xff\xff\x7f"))
    with pytest.raises(Malformed):
        PsiStoreReader(tmp_path)


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    write_store(tmp_path, [ints(range(1, 3))])
    with ExtentFile(tmp_path, "S", "Data") as file:
        for position in (-4, 2, 1 << 20):
            with pytest.raises(Malformed):
                file.block(FilePosition(0, position))
    with ExtentFile(tmp_path, "S", "Data", max_bytes=20) as file, pytest.raises(Malformed):
        file.block(FilePosition())


def test_an_index_that_is_cut_off_is_told(tmp_path: Path) -> None:
    write_store(tmp_path, [ints(range(1, 3))])
    (tmp_path / "S.Index_000000.psi").write_bytes(block(bytes(20)))
    with PsiStoreReader(tmp_path) as store, pytest.raises(Truncated):
        list(store.index())
