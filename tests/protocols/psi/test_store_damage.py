"""What is said of a psi store of which a part is gone, and what of it can still be had."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest

from penstock.core.errors import PenstockError
from penstock.protocols.psi import (
    REPLAY_ALL,
    PsiStoreReader,
    RemoteExporter,
    RemoteImporter,
)
from penstock.protocols.psi.errors import DamagedStore
from penstock.protocols.psi.store.lookup import open_store
from protocols.psi.damaged_stores import DAMAGES, MESSAGES, write_store


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "never closed"])
def test_a_whole_store_is_found_whole(tmp_path: Path, closed: bool) -> None:
    with PsiStoreReader(write_store(tmp_path / "s", closed=closed)) as store:
        for whole in (True, False):
            check = store.check(whole=whole)
            assert check.is_whole, check.lines()
        assert store.check().found == {"A": MESSAGES, "B": MESSAGES}


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "never closed"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_is_said_and_the_rest_is_salvaged(
    tmp_path: Path, damage: str, closed: bool
) -> None:
    folder = write_store(tmp_path / "s", closed=closed)
    DAMAGES[damage](folder)
    if damage.startswith("catalog"):
        with pytest.raises(DamagedStore):
            PsiStoreReader(folder)
    else:
        with PsiStoreReader(folder) as store, pytest.raises(PenstockError):
            list(store.messages())
    with PsiStoreReader(folder, salvage=True) as store:
        check = store.check()
        assert not check.is_whole
        assert check.lines()
        if closed and not damage.startswith("catalog"):
            # What is found and what is missing is all that there was.
            for name in ("A", "B"):
                assert check.found[name] + check.missing[name] == MESSAGES
        if damage.startswith("middle"):
            # What lies behind the damage is had, too, and the hole is known by its numbers.
            assert check.found["A"] > MESSAGES * 0.6
            assert 0 < check.missing["A"] < MESSAGES * 0.4
        read = sum(1 for _ in store.messages(on_damage=lambda _: None))
        assert read == sum(check.found.values())


@pytest.mark.parametrize("damage", [name for name in DAMAGES if "middle" not in name])
def test_a_store_with_a_damaged_end_or_no_file_is_not_served_unless_asked_for(
    tmp_path: Path, damage: str
) -> None:
    folder = write_store(tmp_path / "s")
    DAMAGES[damage](folder)
    with pytest.raises(DamagedStore) as caught:
        open_store(folder)
    assert caught.value.damage
    assert "salvage" in (caught.value.hint or "")
    open_store(folder, salvage=True).close()


@pytest.mark.parametrize("damage", ["tail zeroed", "middle zeroed"])
def test_a_salvaged_store_is_served_to_its_end_and_the_rest_is_counted_as_lost(
    tmp_path: Path, damage: str
) -> None:
    folder = write_store(tmp_path / "s")
    DAMAGES[damage](folder)
    with PsiStoreReader(folder) as store:
        check = store.check()
    with (
        contextlib.closing(open_store(folder, salvage=True)) as opened,
        RemoteExporter(opened, 0) as exporter,
        RemoteImporter("127.0.0.1", exporter.port, REPLAY_ALL, store=tmp_path / "got") as importer,
    ):
        for name in ("A", "B"):
            got = [received.sequence_id for received in importer.open_stream(name)]
            assert len(got) == check.found[name]
        assert exporter.statistics().lost == check.lost > 0


def test_damage_in_the_middle_that_is_found_while_serving_is_counted(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    DAMAGES["middle zeroed"](folder)
    with (
        contextlib.closing(open_store(folder)) as opened,
        RemoteExporter(opened, 0) as exporter,
        RemoteImporter("127.0.0.1", exporter.port, REPLAY_ALL, store=tmp_path / "got") as importer,
    ):
        stream = importer.open_stream("A")
        got = list(stream)
        assert got[-1].sequence_id == MESSAGES
        assert stream.lost == MESSAGES - len(got) > 0
        assert exporter.statistics().lost > 0


def test_messages_of_a_stream_that_the_catalog_lost_are_counted(tmp_path: Path) -> None:
    folder = write_store(tmp_path / "s")
    path = folder / "S.Catalog_000000.psi"
    data = path.read_bytes()
    at = data.rindex(b"B" + struct.pack("<i", 5)) - 8  # the length of its record
    path.write_bytes(data[:at] + bytes(len(data) - at))
    with PsiStoreReader(folder) as store:
        check = store.check()
    assert check.found == {"A": MESSAGES}
    assert check.missing == {"(unknown source 5)": MESSAGES}
    assert len(check.damages) == 1
