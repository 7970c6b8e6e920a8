"""What the tests of the wide queue share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.lives import Lives

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    """Processes that write and read until they are killed."""
    processes = Lives("support.wide_lives")
    yield processes
    processes.end()
