"""The golden vectors of uProtocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.protocols.uprotocol.uuri import UUri

VECTORS = Path(__file__).parents[2] / "vectors" / "uprotocol"


def cases(name: str) -> list[Any]:
    found = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    assert found
    return [pytest.param(case, id=case["id"]) for case in found]


def uuri(fields: dict[str, Any]) -> UUri:
    return UUri(**fields)
