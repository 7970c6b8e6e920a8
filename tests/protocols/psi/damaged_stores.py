"""A small store as psi writes it, and ways to damage one."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

from penstock.protocols.psi import (
    Envelope,
    RuntimeInfo,
    StreamFlags,
    StreamMetadata,
    encode_record,
    known_schemas,
    qualify,
)
from penstock.protocols.psi.metadata import Record
from penstock.protocols.psi.ticks import ns_to_raw

__all__ = ["DAMAGES", "MESSAGES", "files", "write_store"]

MESSAGES = 1000
SECOND = 10**9
PAGE = 4096


def block(data: bytes) -> bytes:
    data += bytes(-len(data) % 4)
    return struct.pack("<i", len(data)) + data


def write_store(folder: Path, *, closed: bool = True, padding: int = 4096) -> Path:
    """Write a store of two streams as psi does, with its index."""
    folder.mkdir()
    data, index = bytearray(), bytearray(block(struct.pack("<iiQQ", 0, 0, 0, 0)))
    unindexed = 0
    for number in range(1, MESSAGES + 1):
        for source in (2, 5):
            moment = number * SECOND + source
            envelope = Envelope(source, number, moment, moment + 500)
            message = block(envelope.to_bytes() + struct.pack("<i", number))
            data += message
            unindexed += len(message)
            if unindexed >= PAGE:
                unindexed = 0
                raw = ns_to_raw(moment + 500), ns_to_raw(moment)
                index += block(struct.pack("<iiQQ", 0, len(data), *raw))
    flags = StreamFlags.CLOSED if closed else StreamFlags(0)
    records: list[Record] = [RuntimeInfo(), *known_schemas("int")]
    for name, source in (("A", 2), ("B", 5)):
        stream = StreamMetadata(name, source, qualify("int"))
        if closed:
            last = MESSAGES * SECOND + source
            stream = stream._replace(
                flags=flags,
                message_count=MESSAGES,
                last_creation_ns=last + 500,
                last_originating_ns=last,
            )
        records.append(stream)
    catalog = b"".join(block(encode_record(record, in_catalog=True)) for record in records)
    for kind, content in (("Catalog", catalog), ("Data", data), ("Index", index)):
        (folder / f"S.{kind}_000000.psi").write_bytes(bytes(content) + bytes(padding))
    return folder


def files(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"*.{kind}_000000.psi")
    return found


def overwrite(path: Path, first: float, last: float, fill: Callable[[int], bytes] = bytes) -> None:
    """Overwrite a part of what was written, both ends given as shares of it."""
    data = path.read_bytes()
    size = len(data.rstrip(b"\0"))
    start, end = int(size * first) // 4 * 4, int(size * last) // 4 * 4
    path.write_bytes(data[:start] + fill(end - start) + data[end:])


#: Each takes the folder of a store.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "tail zeroed": lambda folder: overwrite(files(folder, "Data"), 0.45, 1.0),
    "middle zeroed": lambda folder: overwrite(files(folder, "Data"), 0.3, 0.6),
    "middle garbled": lambda folder: overwrite(
        files(folder, "Data"), 0.3, 0.6, random.Random(1).randbytes
    ),
    "data missing": lambda folder: files(folder, "Data").unlink(),
    "data cut": lambda folder: os.truncate(
        files(folder, "Data"), len(files(folder, "Data").read_bytes().rstrip(b"\0")) // 2
    ),
    "data empty": lambda folder: os.truncate(files(folder, "Data"), 0),
    "catalog zeroed": lambda folder: overwrite(files(folder, "Catalog"), 0.0, 1.0),
    "catalog empty": lambda folder: os.truncate(files(folder, "Catalog"), 0),
}
