"""`docs/queue-format.md` says what the library and the C header do, byte for byte."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import Position, StreamId, Unsupported, open_reader
from penstock.core.errors import DamagedQueue
from penstock.queue.endpoint import check
from penstock.queue.wide import layout
from support.wide_files import stored
from support.wide_opening import wide_reader, wide_writer
from support.wide_oracle import Inconsistent, crc32c, list_queue

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "queue-format.md").read_text()
#: The moment in the example.
MOMENT = 1_700_000_000_000_000_000


def section(title: str) -> str:
    """Return the text of a section of the document."""
    return DOCUMENT.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


class Field(NamedTuple):
    offset: int
    size: int
    meaning: str


def fields(title: str) -> dict[str, Field]:
    """Return the fields in the tables of a section."""
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \| (.*?) \|", section(title), re.MULTILINE)
    return {name: Field(int(offset), int(size), text) for offset, size, name, text in rows}


HEADER, SLOT, READER = fields("Header"), fields("Slot"), fields("Reader table")


# --- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("documented", "record"),
    [(HEADER, layout.HEADER), (SLOT, layout.SLOT), (READER, layout.READER)],
    ids=["header", "slot", "reader"],
)
def test_the_fields_of_the_document_are_those_of_the_library(
    documented: dict[str, Field], record: layout.Record
) -> None:
    in_library = {name: (entry.offset, entry.size) for name, entry in record.fields.items()}
    if record is layout.READER:  # the others are the business of cursors
        documented = {name: documented[name] for name in in_library}
    assert {name: field[:2] for name, field in documented.items()} == in_library


@pytest.mark.parametrize(
    ("documented", "structure"),
    [(HEADER, "penstock_header"), (SLOT, "penstock_slot"), (READER, "penstock_reader_entry")],
    ids=["header", "slot", "reader"],
)
def test_the_fields_of_the_document_are_those_of_the_c_header(
    documented: dict[str, Field], structure: str, tmp_path: Path
) -> None:
    checks = "\n".join(
        f'_Static_assert(offsetof({structure}, {name}) == {field.offset}, "{name}");\n'
        f'_Static_assert(sizeof((({structure} *)0)->{name}) == {field.size}, "{name}");'
        for name, field in documented.items()
    )
    source = tmp_path / "fields.c"
    source.write_text(f"#define _GNU_SOURCE\n#include <penstock/ring.h>\n{checks}\n")
    done = subprocess.run(
        ["cc", "-std=c11", "-I", ROOT / "include", "-fsyntax-only", source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_numbers_in_the_document_are_those_of_the_library() -> None:
    flags = dict(zip(layout.HeaderFlag, ("checksum", "many", "sparse", "nothing"), strict=True))
    for flag, word in flags.items():
        assert f"{flag.value} {word}" in HEADER["flags"].meaning.replace("every message has a ", "")
    parts = ("stream id", "attributes", "checksum", "origin")
    for slot_flag, word in zip(layout.SlotFlag, parts, strict=True):
        assert re.search(rf"{slot_flag.value} has (an? )?{word}", SLOT["flags"].meaning)
    for state in layout.State:
        assert f"{state.value} {state.name.lower()}" in HEADER["state"].meaning
        assert f"- {state.value} *{state.name.lower()}*" in section("States")
    assert layout.MAX_SLOTS == 2**40
    assert layout.MAX_BUFFER == 2**56
    assert layout.MAX_READERS == 65536
    assert "| slots | 2^40 |" in section("Limits")
    assert "| buffer | 2^56 bytes |" in section("Limits")
    assert f"| readers in the table | {layout.MAX_READERS};" in section("Limits")
    assert layout.LIVE_READER == 2**62
    assert layout.LIVE_WRITER == 2**62 + 2**24
    assert "| 2^62 + i | the reader in row i |" in section("Who is alive")
    assert "| 2^62 + 2^24 | the only writer;" in section("Who is alive")
    assert f"the checksum of `123456789` is `{crc32c(b'123456789'):x}`" in DOCUMENT.replace(
        "\n", " "
    )


# --- the example ----------------------------------------------------------------------------------


def example() -> bytes:
    """Return the file that the document shows."""
    lines = re.findall(
        r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  .*)?$",
        section("A queue, annotated"),
        re.MULTILINE,
    )
    assert len(lines) > 50
    data = bytearray(16384)
    last = 0
    for at, text in lines:
        part = bytes.fromhex(text)
        start = int(at, 16)
        assert start >= last, f"line {at} is not in order"
        last = start + len(part)
        data[start:last] = part
    return bytes(data)


def field_bytes(table: dict[str, Field], name: str, base: int = 0) -> slice:
    return slice(base + table[name].offset, base + table[name].offset + table[name].size)


def test_the_example_is_what_the_library_writes(queue_path: str) -> None:
    own = "00112233-4455-6677-8899-aabbccddeeff"
    url = f"fmq:{queue_path}?slots=2&size=4096&readers=1&crc=true&stream={own}"
    other = StreamId(bytes.fromhex("ffeeddccbbaa99887766554433221100"))
    with wide_writer(url) as writer:
        writer.write(b"gone", time_ns=MOMENT, created_ns=MOMENT)
        with wide_reader(f"fmq:{queue_path}?hold=archive") as reader:
            assert reader.read(timeout=0) is not None
        writer.write(b"Hello, radar!", 5, -1, MOMENT + 1, MOMENT + 2)
        writer.write(b"scan 7", 6, 0, MOMENT + 3, MOMENT + 4, other, b"beam=3")
    written, shown = bytearray(Path(f"{queue_path}.fmq").read_bytes()), example()
    # What is another in every run.
    for name in ("epoch", "created_ns", "check", "writer_pid", "boot_id"):
        place = field_bytes(HEADER, name)
        written[place] = shown[place]
    for name in ("epoch", "updated_ns", "check"):
        place = field_bytes(READER, name, 4096)
        written[place] = shown[place]
    assert len(written) == len(shown)
    differing = [at for at in range(len(shown)) if written[at] != shown[at]]
    assert not differing, f"first at {differing[0]:#x}"


def test_the_example_can_be_read(queue_path: str) -> None:
    Path(f"{queue_path}.fmq").write_bytes(example())
    listing = list_queue(f"{queue_path}.fmq")
    assert (listing.header.tail, listing.header.head, listing.header.writer_pid) == (1, 3, 1234)
    assert [(r.name, r.pid, r.position) for r in listing.readers] == [("archive", 0, 1)]
    with open_reader(f"fmq:{queue_path}?hold=archive") as reader:
        messages = reader.read_many(10)
    assert [m.payload for m in messages] == [b"Hello, radar!", b"scan 7"]
    assert [m.attributes for m in messages] == [None, b"beam=3"]
    assert [(m.type, m.subtype) for m in messages] == [(5, -1), (6, 0)]
    assert [m.created_ns - MOMENT for m in messages] == [2, 4]


def test_no_byte_that_matters_can_be_another(queue_path: str) -> None:
    shown = example()
    matter = [*range(108), *range(*field_bytes(HEADER, "head").indices(4096))]
    matter += [*range(*field_bytes(HEADER, "state_check").indices(4096)), *range(448, 512)]
    matter += range(8192, 8192 + 128)  # the slots
    matter += [*range(12352, 12352 + 13), *range(12416, 12416 + 30)]  # messages 1 and 2
    for at in matter:
        changed = bytearray(shown)
        changed[at] ^= 0x10
        Path(f"{queue_path}.fmq").write_bytes(changed)
        with pytest.raises(Inconsistent):
            list_queue(f"{queue_path}.fmq")
        with pytest.raises((DamagedQueue, Unsupported)):
            check(f"fmq:{queue_path}")


# --- a writer that knows the document only ----------------------------------------------------


class PlainWriter:
    """Appends to a file as the sections "Bytes of a message" and "Writing" say."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.data = bytearray(self.path.read_bytes())

    def get(self, name: str) -> int:
        return int.from_bytes(self.data[field_bytes(HEADER, name)], "little")

    def put(self, name: str, value: int) -> None:
        place = field_bytes(HEADER, name)
        self.data[place] = value.to_bytes(place.stop - place.start, "little")

    def slot_at(self, seq: int) -> int:
        return self.get("slots_offset") + seq % self.get("slots") * 64

    def position_of(self, seq: int) -> int:
        return int.from_bytes(self.data[field_bytes(SLOT, "position", self.slot_at(seq))], "little")

    def write(self, payload: bytes, stream: bytes = b"", attributes: bytes | None = None) -> None:
        head, tail, size = self.get("head"), self.get("tail"), self.get("buffer_size")
        block = stream + (attributes or b"")
        block += bytes(-len(block) % 8)
        at = 0
        if head != self.get("first_seq"):
            last = struct.unpack_from("<QqqQQiiIIII", self.data, self.slot_at(head - 1))
            at = -(-(last[3] + last[4] + last[8]) // 64) * 64
        room = -(-(len(block) + len(payload)) // 64) * 64
        if at % size + room > size:
            at = -(-at // size) * size
        while tail < head and (
            head - tail == self.get("slots") or at - self.position_of(tail) > size - room
        ):
            tail += 1
        self.put("tail", tail)
        start = self.get("buffer_offset") + at % size
        self.data[start : start + len(block) + len(payload)] = block + payload
        has_crc = self.get("flags") & 1
        flags = bool(stream) | 2 * (attributes is not None) | 4 * has_crc
        numbers = (head, MOMENT, MOMENT, at, len(payload), 1, 2, flags, len(block))
        slot = struct.pack("<QqqQQiiIII", *numbers, len(attributes or b""))
        crc = crc32c(slot + block + payload) if has_crc else 0
        where = self.slot_at(head)
        self.data[where : where + 64] = slot + struct.pack("<I", crc)
        self.put("head", head + 1)
        self.path.write_bytes(self.data)


@pytest.mark.parametrize("options", ["", "&crc=true"])
def test_a_writer_made_from_the_document_and_the_library_go_on_from_each_other(
    queue_path: str, options: str
) -> None:
    url = f"fmq:{queue_path}?slots=4&size=4096{options}"
    payloads = [b"", b"one", b"x" * 2000, b"y" * 2100, b"z" * 4096, b"a", b"b", b"c", b"d", b"e"]
    with wide_writer(url) as writer:
        writer.write(b"of the library", created_ns=MOMENT - 1)
    for number, payload in enumerate(payloads):
        plain = PlainWriter(f"{queue_path}.fmq")
        fits = len(payload) < 4000
        attributes = b"a" * number if number % 2 and fits else None
        plain.write(payload, bytes(range(16)) if number % 3 == 0 and fits else b"", attributes)
        with open_reader(f"fmq:{queue_path}", start=Position.LAST) as reader:
            message = reader.read(timeout=0)
        assert message is not None
        assert (message.payload, message.attributes) == (payload, attributes)
        assert stored(queue_path)[-1] == payload
    with wide_writer(url) as writer:
        assert writer.write(b"of the library again") == len(payloads) + 1
    assert stored(queue_path) == [b"c", b"d", b"e", b"of the library again"]
