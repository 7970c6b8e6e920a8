"""What the tests of the outbox share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.dispatch.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The directory of an outbox that does not exist yet."""
    return tmp_path / "outbox"


@pytest.fixture
def outbox(folder: Path) -> Iterator[Outbox]:
    with Outbox(folder) as opened:
        yield opened
