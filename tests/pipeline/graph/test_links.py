from __future__ import annotations

import pytest

from penstock.pipeline import Pipeline
from penstock.pipeline.graph.model import streams_between


@pytest.mark.parametrize(
    ("url", "reads"),
    [
        ("fmq:/d/out", True),
        ("fmq:/d/o*", True),
        ("fmq:/d/out?hold=me", True),
        ("fmq:/d/[mno]ut", True),
        ("fmq:/*", False),
        ("fmq:/d/out2", False),
        ("log:/d/out", False),
    ],
)
def test_a_source_is_joined_to_the_sink_whose_stream_it_reads(url: str, reads: bool) -> None:
    first = Pipeline("a").source("x", url="fmq:/x").sink("out", from_="x", url="fmq:/d/out")
    second = Pipeline("b").source("y", url=["fmq:/y", url]).sink("z", from_="y", console=True)
    expected = [(("a", "out"), ("b", "y"))] if reads else []
    assert streams_between([first, second]) == expected
