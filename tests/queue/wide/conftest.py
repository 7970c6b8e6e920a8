"""What the tests of the wide queue share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.lives import Lives
from support.wide_opening import wide_writer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    """Processes that write and read until they are killed."""
    processes = Lives("support.wide_lives")
    yield processes
    processes.end()


@pytest.fixture
def url(queue_path: str) -> str:
    """A queue of four messages."""
    url = f"fmq:{queue_path}"
    wide_writer(f"{url}?slots=4&size=16384").close()
    return url
