"""Pipelines of any shape, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.pipeline import Pipeline

_TARGETS = ("url", "dead_letter", "parquet", "console")


@st.composite
def pipelines(draw: st.DrawFn, name: str = "p", read_back: bool = True) -> Pipeline:
    """A sound pipeline: sources, stages of earlier ones, sinks of any; streams of its own too."""
    pipeline = Pipeline(name)
    names: list[str] = []
    for i in range(draw(st.integers(1, 4))):
        pipeline = pipeline.source(f"source{i}", url=f"fmq:/in/{name}{i}")
        names.append(f"source{i}")
    for i in range(draw(st.integers(0, 6))):
        above = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        pipeline = pipeline.stage(f"stage{i}", from_=above, use="some.module:function")
        names.append(f"stage{i}")
    for i in range(draw(st.integers(1, 6))):
        # A later source may read what an earlier sink writes: that never makes a circle.
        target = draw(st.sampled_from(_TARGETS))
        where: str | bool = f"/out/{name}{i}"
        if target in {"url", "dead_letter"}:
            where = f"log:/out/{name}{i}"
        elif target == "console":
            where = True
        mode = draw(st.sampled_from(("append", "append", "update")))
        pipeline = pipeline.sink(
            f"sink{i}",
            from_=draw(st.sampled_from(names)),
            mode="append" if target == "parquet" else mode,
            **{target: where},
        )
        if read_back and target == "url" and draw(st.booleans()):
            pipeline = pipeline.source(f"back{i}", url=f"log:/out/{name}{i}")
            above = draw(st.lists(st.sampled_from(names), max_size=1))
            pipeline = pipeline.stage(f"mixed{i}", from_=[f"back{i}", *above], use="m:f")
            names = [*names, f"mixed{i}"]
    return pipeline
