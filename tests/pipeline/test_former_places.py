"""Names that moved are found at their former places for one release."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("former", "name", "now"),
    [
        ("session", "spark_session", "run"),
        ("running", "run", "run"),
        ("decoding", "decode", "source"),
    ],
)
def test_a_name_that_moved_is_found_with_a_warning(former: str, name: str, now: str) -> None:
    sys.modules.pop(f"penstock.pipeline.{former}", None)
    with pytest.warns(DeprecationWarning, match=f"import from penstock.pipeline.{now}"):
        module = importlib.import_module(f"penstock.pipeline.{former}")
    there = importlib.import_module(f"penstock.pipeline.{now}")
    assert getattr(module, name) is getattr(there, name)
