"""Functions are found by their names, without running the module that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.functions import FunctionNotFound, find_function, load_function

MODULE = """
import os.path as paths
from json import *
raise RuntimeError("it was imported")
"""
PLAIN = """
raise RuntimeError("it was imported")
def one(): ...
class Two:
    def inner(self): ...
try:
    three = four = None
except ImportError:
    from somewhere import five as six
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of which nothing can be imported."""
    name = f"package_{tmp_path.name}".replace("-", "_")
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (folder / "plain.py").write_text(PLAIN)
    (folder / "open.py").write_text(MODULE)
    (folder / "broken.py").write_text("def f(:")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    "name", ["plain:one", "plain:Two.inner", "plain:four", "plain:six", "open:whatever"]
)
def test_what_is_there_is_found_and_nothing_is_imported(package: str, name: str) -> None:
    find_function(f"{package}.{name}")
    with pytest.raises(FunctionNotFound, match="it was imported"):
        load_function(f"{package}.{name}")


@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("plain:on", "has no function on", "did you mean one?"),
        ("plain:inner", "has no function inner", ""),
        ("none:f", "there is no module", "installed"),
        ("plain.none:f", "there is no module", "installed"),
        ("broken:f", "cannot be imported", ""),
    ],
)
def test_what_is_not_there_is_said(package: str, name: str, reason: str, hint: str) -> None:
    with pytest.raises(FunctionNotFound, match=reason) as caught:
        find_function(f"{package}.{name}")
    assert hint in (caught.value.hint or "")


def test_a_module_that_is_loaded_or_part_of_python_is_there() -> None:
    find_function("os:getcwd")
    find_function("itertools:count")
    with pytest.raises(FunctionNotFound):
        find_function("none_such_at_all:f")
