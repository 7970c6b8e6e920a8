"""Queues recorded from LROSE's own library: read exactly, and written again byte for byte."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock import open_reader
from penstock.core.clock import ManualClock
from penstock.core.position import Position
from penstock.queue.classic.layout import (
    ID_COUNT,
    SLOT_SIZE,
    STATUS_SIZE,
    Slot,
    Status,
    slot_offset,
)
from penstock.queue.classic.options import ClassicOptions, Compression
from penstock.queue.classic.reader import ClassicReader
from penstock.queue.classic.writer import ClassicWriter
from support.recipes import payload

VECTORS = Path(__file__).parents[2] / "vectors" / "lrose"
NAMES = sorted(path.stem for path in VECTORS.glob("*.stat"))


def recipe(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((VECTORS / f"{name}.json").read_text())
    return loaded


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_queue_is_read_exactly(name: str, tmp_path: Path) -> None:
    for part in ("stat", "buf"):
        shutil.copyfile(VECTORS / f"{name}.{part}", tmp_path / f"{name}.{part}")
    expected = recipe(name)["expected_messages"]
    with open_reader(f"fmq:{tmp_path / name}") as reader:
        messages = list(reader.available())
        assert [
            (
                m.seq % ID_COUNT,
                m.type,
                m.subtype,
                m.size,
                m.time_ns,
                hashlib.sha256(m.payload).hexdigest(),
            )
            for m in messages
        ] == [
            (e["id"], e["type"], e["subtype"], e["len"], e["time"] * 10**9, e["sha256"])
            for e in expected
        ]
        assert [m.seq - messages[0].seq for m in messages] == list(range(len(messages)))
        assert reader.statistics().lost == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_queue_is_read_exactly_as_a_batch(name: str) -> None:
    options = ClassicOptions()
    expected = recipe(name)["expected_messages"]
    with ClassicReader(name, str(VECTORS / name), Position.START, options) as reader:
        found: list[str] = []
        while (batch := reader.read_batch(5)).num_rows:
            found += [hashlib.sha256(p).hexdigest() for p in batch.column("payload").to_pylist()]
    assert found == [e["sha256"] for e in expected]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "in batches"])
def test_a_queue_written_from_its_recipe_is_the_same_to_the_byte(
    name: str, at_once: bool, queue_path: str
) -> None:
    wanted = recipe(name)
    clock = ManualClock(wanted["batches"][0]["time"] * 10**9)
    for number, batch in enumerate(wanted["batches"]):
        clock.advance(batch["time"] - clock.now_ns() / 10**9)
        options = ClassicOptions(
            slots=wanted["nslots"], size=wanted["buf_size"], compress=_compression(batch)
        )
        with ClassicWriter(name, queue_path, options, clock) as writer:
            if at_once:
                _write_at_once(writer, batch["messages"], clock)
            else:
                for m in batch["messages"]:
                    writer.write(_payload(m), m["type"], m["subtype"])
        if number == 0 and name.startswith("id_wrap"):
            _renumber(queue_path, last=999_999_996)
    for part in ("stat", "buf"):
        found = Path(f"{queue_path}.{part}").read_bytes()
        assert found == (VECTORS / f"{name}.{part}").read_bytes()
        assert hashlib.sha256(found).hexdigest() == wanted[f"sha256_{part}"]


def _compression(batch: dict[str, Any]) -> Compression:
    if not batch["compress"]:
        return Compression.OFF
    return {0: Compression.NONE, 5: Compression.GZIP}[batch["method"]]


def _payload(m: dict[str, Any]) -> bytes | None:
    return None if m["len"] < 0 else payload(m["kind"], m["seed"], m["len"])


def _write_at_once(
    writer: ClassicWriter, messages: list[dict[str, Any]], clock: ManualClock
) -> None:
    now = clock.now_ns() // 10**9
    entries = [writer._entry(_payload(m), m["type"], m["subtype"], now) for m in messages]
    writer._append(entries, now)


def _renumber(path: str, last: int) -> None:
    """Shift all ids so that the last is `last`, as the recorded queue was made."""
    stat, buf = Path(f"{path}.stat"), Path(f"{path}.buf")
    table, frames = bytearray(stat.read_bytes()), bytearray(buf.read_bytes())
    status = Status.decode(bytes(table[:STATUS_SIZE]))
    shift = last - status.youngest_id
    table[:STATUS_SIZE] = status._replace(youngest_id=last).sealed().encode()
    for index in range(status.youngest_slot + 1):
        at = slice(slot_offset(index), slot_offset(index) + SLOT_SIZE)
        slot = Slot.decode(bytes(table[at]))
        slot = slot._replace(id=slot.id + shift)
        table[at] = slot._replace(checksum=slot.computed_checksum()).encode()
        end = slot.offset + slot.stored_len
        frames[end - 4 : end] = slot.id.to_bytes(4)
    stat.write_bytes(table)
    buf.write_bytes(frames)
