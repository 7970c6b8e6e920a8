from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings

from penstock.pipeline import Pipeline, load_pipelines, parse_pipelines, plan
from penstock.pipeline.drawing import to_svg, to_text, write_png
from penstock.pipeline.drawing.picture import Line, Rectangle, Words, compose, text_width
from pipeline.drawing.test_layout import overlap
from pipeline.random_pipelines import pipelines

EXAMPLES = Path(__file__).parents[3] / "examples" / "radar"
EXAMPLE = """
pipeline: storm-watch
sources: {beams: {url: "fmq:/tmp/radar/iq"}}
stages:
  moments: {from: beams, use: "radar_stages:moments"}
  strong: {from: moments, sql: "select * from moments where dbz > 45"}
sinks:
  moments_out: {from: moments, url: "fmq:/tmp/radar/moments"}
  archive: {from: moments, parquet: ./archive, partition_by: [sweep]}
  alerts: {from: strong, url: "log:/tmp/radar/alerts"}
settings: {trigger: 1s}
"""
STORM_WATCH = """\
storm-watch  trigger: 1 s
└── beams  source  fmq:/tmp/radar/iq [1]
    └── moments  stage  radar_stages:moments [1]
        ├── strong  stage  select * from moments where dbz > 45 [1]
        │   └── alerts  sink  log:/tmp/radar/alerts [1]
        ├── moments_out  sink  fmq:/tmp/radar/moments [1]
        └── archive  sink  parquet ./archive [1]

1 query
[1] storm-watch-moments_out  foreach batch
    beams -> moments, strong -> moments_out, archive, alerts
    moments_out, archive and alerts share moments, and archive is no stream but parquet: each batch
    is kept, and written to each of them
"""

TEXT = """
pipeline: first
sources: {a: {url: "fmq:/a"}, b: {url: "fmq:/b<&>$x$"}}
stages: {both: {from: [a, b]}}
sinks:
  c: {from: both, url: "log:/c"}
  d: {from: both, console: true, mode: complete}
---
pipeline: second
sources: {c_in: {url: "log:/c"}}
sinks: {e: {from: c_in, url: "log:/e"}}
---
pipeline: third
sources: {e_in: {url: "log:/e"}, c_too: {url: "log:/c"}}
sinks: {f: {from: e_in, csv: /f}, g: {from: c_too, json: /g}}
"""


def test_the_text_of_a_plan_reads_like_this() -> None:
    assert to_text(plan(parse_pipelines(EXAMPLE))) == STORM_WATCH


def test_the_text_shows_a_fan_in_once_and_the_streams_between_pipelines() -> None:
    text = to_text(plan(parse_pipelines(TEXT)))
    assert text.count("both  stage  union of 2 [1] [2]") == 1
    assert "both  (above)" in text
    assert "c  sink  log:/c [1]  -> second.c_in  -> third.c_too" in text
    assert "c_in  source  log:/c [3]  <- first.c" in text
    assert "[2] first-d  single" in text


def test_an_svg_is_well_formed_and_names_everything() -> None:
    made = plan(parse_pipelines(TEXT))
    root = ET.fromstring(to_svg(made))
    said = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    for pipeline in made.pipelines:
        assert {pipeline.name, *pipeline.graph().nodes} <= said
    assert {query.name for query in made.queries} <= said
    assert "fmq:/b<&>$x$" in said


def test_characters_that_no_picture_has_do_no_harm(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pipeline = Pipeline("p").source("a", url="fmq:/雷达").stage("s", from_="a", sql="'\x1b[31m' a")
    made = plan(pipeline.sink("b", from_="s", parquet="/two\nlines"))
    ET.fromstring(to_svg(made))
    write_png(made, tmp_path / "plan.png")
    assert "'?[31m' a" in to_text(made)


@pytest.mark.parametrize("example", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_has_a_plan_and_its_pictures(example: Path) -> None:
    made = plan(load_pipelines(example))
    assert made.warnings == ()
    ET.fromstring(to_svg(made))
    assert to_text(made)


def test_a_png_is_painted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    made = plan(parse_pipelines(TEXT))
    write_png(made, file)
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG")
    picture = compose(made)
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert abs(width - 2 * picture.width) <= 2
    assert abs(height - 2 * picture.height) <= 2


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from penstock.pipeline import Pipeline, plan\n"
        "from penstock.pipeline.drawing import write_png\n"
        "p = Pipeline('p').source('a', url='fmq:/a').sink('b', from_='a', console=True)\n"
        "try: write_png(plan(p), 'x.png')\n"
        "except Exception as error: print(type(error).__name__, error.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.startswith("Unsupported pip install 'penstock[pictures]'")


@settings(max_examples=60)
@given(pipelines())
def test_no_boxes_overlap_and_all_is_inside_the_picture(pipeline: Pipeline) -> None:
    second = (
        Pipeline("q").source("in0", url="log:/out/p*").sink("end", from_="in0", url="fmq:/q/end")
    )
    picture = compose(plan([second, pipeline]))
    assert len(picture.boxes) == len(pipeline.graph().nodes) + 2
    for one, other in itertools.combinations(picture.boxes.values(), 2):
        assert not overlap(one, other)
    for shape in picture.shapes:
        if isinstance(shape, Rectangle):
            corners = [(shape.box.x, shape.box.y), (shape.box.right, shape.box.bottom)]
        elif isinstance(shape, Words):
            end = text_width(shape.text, shape.size) * 0.8
            x = shape.at[0] - {"start": 0, "middle": end / 2, "end": end}[shape.anchor]
            corners = [(x, shape.at[1]), (x + end, shape.at[1])]
        elif isinstance(shape, Line):
            corners = list(shape.points)
        else:
            corners = [shape.tip]
        for x, y in corners:
            assert 0 <= x <= picture.width
            assert 0 <= y <= picture.height
