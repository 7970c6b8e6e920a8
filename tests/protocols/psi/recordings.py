"""The sessions and stores that were recorded from psi's own programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.protocols.psi import (
    Catalog,
    Intermission,
    MessageDecoder,
    MetaDecoder,
    PsiMessage,
    ServerHello,
)

VECTORS = Path(__file__).parents[2] / "vectors" / "psi"
SESSIONS = ["basic", "types"]


def recording(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def expected(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


def catalog_of(session: str) -> Catalog:
    catalog = Catalog()
    for event in MetaDecoder(hello=False).feed(recording(f"{session}.s2c.meta.bin")):
        if not isinstance(event, (Intermission, ServerHello)):
            catalog.add(event)
    return catalog


def messages_of(session: str) -> list[PsiMessage]:
    decoder = MessageDecoder()
    messages = decoder.feed(recording(f"{session}.s2c.data.bin"))
    decoder.finish()
    return messages
