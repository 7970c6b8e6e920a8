"""What is in `penstock` itself: a chosen few, and for one release what was there before."""

from __future__ import annotations

import warnings

import pytest

import penstock


def test_about_thirty_names_are_the_contract() -> None:
    assert len(penstock.__all__) <= 32
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in penstock._MOVED.items() for name in names.split()],
)
def test_a_name_that_left_works_for_one_release_and_says_where_it_is(
    module: str, name: str
) -> None:
    with pytest.warns(DeprecationWarning, match=f"use {module}.{name}$"):
        found = getattr(penstock, name)
    assert found is not None
    assert name not in penstock.__all__


def test_nothing_of_the_contract_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in penstock.__all__:
            getattr(penstock, name)


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sockets'"):
        _ = penstock.sockets
