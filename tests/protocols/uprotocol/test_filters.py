"""Filters of listeners, and what matches them (docs/specs/uprotocol.md 4)."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.protocols.uprotocol.codes import UCode, UStatusError
from penstock.protocols.uprotocol.message import UAttributes
from penstock.protocols.uprotocol.uuri import UUri
from penstock.protocols.uprotocol.validation import check_filter, is_filter, matches
from protocols.uprotocol.vectors import cases

TABLE = [
    ((0x8000, 0xFFFE), (None,)),
    ((0xFFFF,), (None,)),
    ((0x8000, 0xFFFE), (0,)),
    ((0,), (1, 0x7FFF)),
    ((1, 0x7FFF), (0,)),
    ((0xFFFF,), (0,)),
    ((0xFFFF,), (0xFFFF,)),
]
EDGES = (0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF)


def uri(resource: int | None) -> UUri | None:
    return None if resource is None else UUri("a", 1, 1, resource)


@pytest.mark.parametrize("case", cases("listener_filters"))
def test_filters_of_the_vectors_are_taken_or_refused(case: Any) -> None:
    source, sink = uri(case["source_resource"]), uri(case["sink_resource"])
    assert source is not None
    rules = {False: case["register_ok_spec_table"], True: case["register_ok_up_rust"]}
    for loose, fine in rules.items():
        assert is_filter(case["source_resource"], case["sink_resource"], loose=loose) is fine
        if fine:
            check_filter(source, sink, loose=loose)
        else:
            with pytest.raises(UStatusError) as caught:
                check_filter(source, sink, loose=loose)
            assert caught.value.code.name == (case["error"] or "INVALID_ARGUMENT")


@pytest.mark.parametrize("source", EDGES)
@pytest.mark.parametrize("sink", [None, *EDGES])
def test_the_table_is_all_that_is_taken(source: int, sink: int | None) -> None:
    expected = any(source in sources and sink in sinks for sources, sinks in TABLE)
    assert is_filter(source, sink) is expected
    if expected:
        assert is_filter(source, sink, loose=True)


def test_the_looser_set_takes_any_source_with_a_method() -> None:
    assert not is_filter(0xFFFF, 1)
    assert is_filter(0xFFFF, 1, loose=True)
    assert not is_filter(0, 0, loose=True)


def test_a_filter_that_is_no_address_is_refused() -> None:
    bad = UUri.unchecked("A", 1, 1, 0xFFFF)
    for source, sink in ((bad, None), (UUri.ANY, bad)):
        with pytest.raises(UStatusError) as caught:
            check_filter(source, sink)
        assert caught.value.code == UCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("source_filter", "sink_filter", "source", "sink", "expected"),
    [
        ("//a/1/1/8000", None, "//a/1/1/8000", None, True),
        ("//a/1/1/8000", None, "//a/1/1/8001", None, False),
        ("//*/FFFFFFFF/FF/FFFF", None, "//a/1/1/8000", None, True),
        # without a sink filter, nothing that has a sink; with one, nothing without
        ("//*/FFFFFFFF/FF/FFFF", None, "//a/1/1/8000", "//b/1/1/0", False),
        ("//*/FFFFFFFF/FF/FFFF", None, "//a/1/1/8000", "//b/FFFFFFFF/FF/FFFF", False),
        ("//*/FFFFFFFF/FF/FFFF", "//*/FFFFFFFF/FF/FFFF", "//a/1/1/8000", None, False),
        ("//*/FFFFFFFF/FF/FFFF", "//*/FFFFFFFF/FF/FFFF", "//a/1/1/8000", "//b/1/1/0", True),
        ("//a/FFFFFFFF/FF/FFFF", "//b/FFFFFFFF/FF/FFFF", "//a/1/1/0", "//b/7/1/3", True),
        ("//a/FFFFFFFF/FF/FFFF", "//b/FFFFFFFF/FF/FFFF", "//a/1/1/0", "//c/7/1/3", False),
        ("//a/FFFFFFFF/FF/FFFF", "//b/FFFFFFFF/FF/FFFF", "//c/1/1/0", "//b/7/1/3", False),
        ("//*/FFFFFFFF/FF/FFFF", None, None, None, False),
    ],
)
def test_a_listener_gets_what_its_filters_cover(
    source_filter: str,
    sink_filter: str | None,
    source: str | None,
    sink: str | None,
    expected: bool,
) -> None:
    def parsed(text: str | None) -> UUri | None:
        return None if text is None else UUri.parse(text)

    attributes = UAttributes(source=parsed(source), sink=parsed(sink))
    assert matches(UUri.parse(source_filter), parsed(sink_filter), attributes) is expected
