"""What all tests share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from pathlib import Path

# Tables are as wide as this, whichever test happens to be the first that loads the command.
os.environ["COLUMNS"] = "200"

# A busy two-core machine is not a slow test.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let two processes share the work: a file stays together, and so does all that has Spark."""
    for item in items:
        has_spark = "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("spark" if has_spark else str(item.path)))


@pytest.fixture
def queue_path(tmp_path: Path) -> str:
    """A path for a queue that does not exist yet."""
    return str(tmp_path / "queue")


@pytest.fixture
def queue_url(queue_path: str) -> str:
    """The URL of a small classic queue that does not exist yet."""
    return f"fmq:{queue_path}?layout=classic&slots=20&size=8192"
