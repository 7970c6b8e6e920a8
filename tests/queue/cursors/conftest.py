"""What do the tests of named positions share?"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.queue.cursor_file import CursorFile
from support.cursor_tables import Start
from support.roles import cast


@pytest.fixture
def start() -> Iterator[Start]:
    """Start other processes, none of which outlives the test."""
    with cast() as others:
        yield functools.partial(others.begin, "cursor_roles")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "cursors")


@pytest.fixture
def file(path: str) -> Iterator[CursorFile]:
    with CursorFile(path, count=8) as file:
        yield file
