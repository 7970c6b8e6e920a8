from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

from hypothesis import given, settings

from core.drawing.test_layout import overlap
from penstock.core.drawing import draw, to_dot, to_mermaid
from penstock.core.drawing.picture import compose
from penstock.pipeline import Pipeline, Plan, load_pipelines, parse_pipelines, plan
from penstock.pipeline.graph.plan_diagram import diagram_of, to_text
from pipeline.graph.random_pipelines import pipelines

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


def svg_of(made: Plan, folder: Path) -> ET.Element:
    draw(diagram_of(made), folder / "plan.svg", "svg")
    return ET.parse(folder / "plan.svg").getroot()


def test_an_svg_is_well_formed_and_names_everything(tmp_path: Path) -> None:
    made = plan(parse_pipelines(TEXT))
    root = svg_of(made, tmp_path)
    said = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    for pipeline in made.pipelines:
        assert {pipeline.name, *pipeline.graph().nodes} <= said
    assert {query.name for query in made.queries} <= said
    assert "fmq:/b<&>$x$" in said


def test_graphviz_and_mermaid_get_every_node_in_its_frame_and_every_edge() -> None:
    made = diagram_of(plan(parse_pipelines(TEXT)))
    dot, mermaid = to_dot(made), to_mermaid(made)
    assert dot.count(" -> ") == len(made.graph.edges())
    assert dot.count("[style=dashed]") == mermaid.count("-.->") == 3
    assert dot.count("subgraph cluster_") == mermaid.count("subgraph ") == 3
    assert 'n1 [label="b (source)\\nfmq:/b<&>$x$ [1][2]"' in dot
    assert 'n1["b (source)<br>fmq:/b#lt;#amp;#gt;$x$ [1][2]"]:::blue' in mermaid


def test_characters_that_no_picture_has_do_no_harm(tmp_path: Path) -> None:
    pipeline = Pipeline("p").source("a", url="fmq:/雷达").stage("s", from_="a", sql="'\x1b[31m' a")
    made = plan(pipeline.sink("b", from_="s", parquet='/two\n"lines'))
    svg_of(made, tmp_path)
    draw(diagram_of(made), tmp_path / "plan.png", "png")
    assert "'?[31m' a" in to_text(made)
    assert '/two�\\"lines' in to_dot(diagram_of(made))
    assert "/two�#quot;lines" in to_mermaid(diagram_of(made))


def test_the_example_has_a_plan_and_its_pictures(tmp_path: Path) -> None:
    made = plan(load_pipelines(EXAMPLES / "storm-watch.yaml"))
    assert made.warnings == ()
    svg_of(made, tmp_path)
    assert to_text(made)


def test_a_png_is_painted_with_twice_the_pixels_of_the_picture(tmp_path: Path) -> None:
    made = diagram_of(plan(parse_pipelines(TEXT)))
    draw(made, tmp_path / "plan.png", "png")
    data = (tmp_path / "plan.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    picture = compose(made)
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert abs(width - 2 * picture.width) <= 2
    assert abs(height - 2 * picture.height) <= 2


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from penstock.core.drawing import draw\n"
        "from penstock.pipeline import Pipeline, plan\n"
        "from penstock.pipeline.graph.plan_diagram import diagram_of\n"
        "p = Pipeline('p').source('a', url='fmq:/a').sink('b', from_='a', console=True)\n"
        "try: draw(diagram_of(plan(p)), 'x.svg', 'svg')\n"
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
    made = diagram_of(plan([second, pipeline]))
    picture = compose(made)
    assert len(picture.boxes) == len(pipeline.graph().nodes) + 2
    assert set(picture.arrows) == set(made.graph.edges())
    for one, other in itertools.combinations(picture.boxes.values(), 2):
        assert not overlap(one, other)
    corners = [
        corner
        for box in (*picture.boxes.values(), *picture.frames)
        for corner in ((box.x, box.y), (box.right, box.bottom))
    ]
    corners += [point for arrow in picture.arrows.values() for point in arrow.points]
    for x, y in corners:
        assert 0 <= x <= picture.width
        assert 0 <= y <= picture.height
