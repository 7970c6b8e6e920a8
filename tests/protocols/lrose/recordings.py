"""The sessions that were recorded from LROSE's own programs."""

from __future__ import annotations

from pathlib import Path

from penstock.protocols.lrose.ds_message import DsMessage
from penstock.protocols.lrose.sku import Decoder, Frame

WIRE = Path(__file__).parents[2] / "vectors" / "lrose" / "wire"

#: Every recorded stream of bytes, both directions.
RECORDINGS = sorted(path.name for path in WIRE.glob("*.[cs]2[cs]"))


def recording(name: str) -> bytes:
    return (WIRE / name).read_bytes()


def frames_of(data: bytes) -> list[Frame]:
    return Decoder(1 << 24).feed(data)


def messages_of(data: bytes) -> list[DsMessage]:
    return [DsMessage.from_bytes(frame.payload) for frame in frames_of(data)]
