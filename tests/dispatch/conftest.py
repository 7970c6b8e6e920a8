"""What the tests of the dispatcher share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.dispatching import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A dispatcher on a clock that moves when told; its books balance at the end."""
    made = World(tmp_path / "state")
    yield made
    made.balance()
    made.close()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Make a dispatcher with options; the books of all balance at the end."""
    worlds: list[World] = []

    def make(**options: Any) -> World:
        made = World(tmp_path / f"state{len(worlds)}", **options)
        worlds.append(made)
        return made

    yield make
    for made in worlds:
        made.balance()
        made.close()
