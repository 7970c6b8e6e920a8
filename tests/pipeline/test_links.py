from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline import Pipeline
from penstock.pipeline.links import place, streams_between


def test_urls_of_one_stream_have_one_place() -> None:
    assert place("fmq:/a/b?slots=10") == place("fmq:/a//c/../b")
    assert place("log:a") == place(f"log:{Path.cwd()}/a")
    assert place("fmq:/a") != place("log:/a")
    assert place("flight://host:1/a?token=x&b=1") == place("flight://host:1/a?b=1&token=x")
    assert place("flight://host:1/a") != place("flight://host:2/a")


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
