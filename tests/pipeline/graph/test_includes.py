"""Descriptions that include others, templates, and merged mappings; errors name the right file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.pipeline import load_pipelines

MAIN = """\
pipeline: north
include: parts/site.yaml
sources:
  beams: {extends: rig, url: "fmq:/north/beams"}
stages:
  strong: {extends: above, from: beams, options: {least: 50}}
sinks:
  alerts: {from: strong, url: "log:/north/alerts"}
settings: {trigger: 2s}
"""
SITE = """\
include: base.yaml
templates:
  rig: {extends: bare, maxOffsetsPerTrigger: 100}
settings: {trigger: 1s, shuffle_partitions: 2}
sinks:
  archive: {from: beams, parquet: ./archive}
"""
BASE = """\
templates:
  bare:
    url: "fmq:/none"
    decode: {format: struct, layout: "<d"}
  above: {use: "stages:above", options: {least: 40, most: 70}}
settings: {master: "local[2]"}
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    (tmp_path / "north.yaml").write_text(MAIN)
    (tmp_path / "parts" / "site.yaml").write_text(SITE)
    (tmp_path / "parts" / "base.yaml").write_text(BASE)
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def fault(files: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_pipelines(files / "north.yaml")
    assert "\n" not in str(caught.value)
    return caught.value


def test_what_is_included_and_extended_is_put_below_what_stands_there(files: Path) -> None:
    (made,) = load_pipelines(files / "north.yaml")
    beams, strong = made.sources["beams"], made.stages["strong"]
    assert beams.urls == ("fmq:/north/beams",)
    assert beams.max_offsets_per_trigger == 100
    assert beams.decode == {"format": "struct", "layout": "<d"}
    assert strong.options == {"least": 50, "most": 70}
    assert list(made.sinks) == ["archive", "alerts"]
    assert str(made.settings.trigger) == "2 s"
    assert (made.settings.master, made.settings.shuffle_partitions) == ("local[2]", 2)
    assert made.lines is not None
    names = {Path(file).name for file in made.lines.files}
    assert names == {"north.yaml", "site.yaml", "base.yaml"}


@pytest.mark.parametrize(
    ("file", "old", "new", "where", "line", "field", "reason"),
    [
        ("parts/base.yaml", "format: struct", "fromat: struct", "parts/base.yaml", 4,
         "sources.beams.decode", "needs the key format"),
        ("parts/base.yaml", 'layout: "<d"', 'layout: "<?z"', "parts/base.yaml", 4,
         "sources.beams.decode.layout", ""),
        ("parts/site.yaml", "maxOffsetsPerTrigger: 100", "maxOffsets: 1", "parts/site.yaml", 3,
         "sources.beams.maxOffsets", "unknown key"),
        ("parts/site.yaml", "from: beams", "from: beems", "parts/site.yaml", 6,
         "sinks.archive.from", "there is no source or stage beems"),
        ("north.yaml", "from: strong", "from: strng", "north.yaml", 8,
         "sinks.alerts.from", "there is no source or stage strng"),
        ("parts/site.yaml", "[", "[", "", 0, "", ""),
        ("north.yaml", "extends: rig", "extends: rug", "north.yaml", 4,
         "sources.beams.extends", "there is no template rug"),
        ("parts/base.yaml", "bare:\n", "bare:\n    extends: rig\n", "parts/base.yaml", 3,
         "templates.bare.extends", "goes round in a circle: rig -> bare -> rig"),
        ("parts/site.yaml", "include: base.yaml", "include: ../north.yaml", "parts/site.yaml", 1,
         "include", "goes round in a circle"),
        ("parts/site.yaml", "include: base.yaml", "include: bse.yaml", "parts/site.yaml", 1,
         "include", "cannot be read"),
        ("north.yaml", "include: parts/site.yaml", "include: /etc/passwd", "north.yaml", 2,
         "include", "/etc/passwd is not below the folder of north.yaml"),
        ("north.yaml", "include: parts/site.yaml", "include: ../secret.yaml", "north.yaml", 2,
         "include", "../secret.yaml is not below the folder of north.yaml"),
        ("north.yaml", "include: parts/site.yaml", "include: {a: 1}", "north.yaml", 2,
         "include", "should be the path of a file, or a list"),
        ("parts/base.yaml", "settings: {master", "settings: {[master", "parts/base.yaml", 6,
         None, "cannot be read as YAML"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_file_that_it_stands_in(
    files: Path,
    file: str,
    old: str,
    new: str,
    where: str,
    line: int,
    field: str | None,
    reason: str,
) -> None:
    if old == new:
        (files / file).write_text("- a list\n")
        where, line, field, reason = file, 1, None, "what is included should be a mapping"
    else:
        change(files / file, old, new)
    error = fault(files)
    assert (Path(error.file), error.line, error.field) == (files / where, line, field)
    assert reason in error.reason


def test_a_link_does_not_lead_out_and_a_folder_can_be_allowed(
    files: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "base.yaml").write_text(BASE)
    (files / "parts" / "base.yaml").unlink()
    (files / "parts" / "base.yaml").symlink_to(elsewhere / "base.yaml")
    assert "is not below the folder" in fault(files).reason
    monkeypatch.setenv("PENSTOCK_INCLUDE", f"/nowhere:{elsewhere}")
    (made,) = load_pipelines(files / "north.yaml")
    assert made.settings.master == "local[2]"
    change(files / "parts" / "site.yaml", "include: base.yaml", f"include: {elsewhere}/base.yaml")
    assert load_pipelines(files / "north.yaml") == [made]


def test_several_files_are_put_together_the_later_above_the_earlier(files: Path) -> None:
    (files / "other.yaml").write_text("settings: {master: 'local[4]', trigger: 9s}\n")
    change(
        files / "north.yaml", "include: parts/site.yaml", "include: [parts/site.yaml, other.yaml]"
    )
    (made,) = load_pipelines(files / "north.yaml")
    assert (made.settings.master, str(made.settings.trigger)) == ("local[4]", "2 s")


def test_anchors_are_merged_and_a_mistake_in_one_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("""\
pipeline: p
templates:
  rig: &rig {maxOffsetsPerTrigger: 10, failOnDataLoss: false}
sources:
  a: {<<: *rig, url: "fmq:/a"}
  b: {<<: [*rig, {type: 3}], url: "fmq:/b", maxOffsetsPerTrigger: 20}
sinks:
  out: {from: a, console: true}
  more: {from: b, console: true}
""")
    (made,) = load_pipelines(file)
    found = [made.sources[name].spark_options() for name in "ab"]
    assert found == [
        {"url": "fmq:/a", "maxOffsetsPerTrigger": "10", "failOnDataLoss": "false"},
        {
            "url": "fmq:/b",
            "maxOffsetsPerTrigger": "20",
            "failOnDataLoss": "false",
            "type": "3",
        },
    ]
    change(file, "failOnDataLoss: false", "failOnDataLos: false")
    with pytest.raises(ConfigError) as caught:
        load_pipelines(file)
    assert caught.value.line == 3
    assert "sources.a.failOnDataLos: unknown key" in str(caught.value)


def test_included_templates_cannot_grow_without_bound(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("pipeline: p\ninclude: [" + ", ".join(["a.yaml"] * 200) + "]\n")
    (tmp_path / "a.yaml").write_text("settings: {}\n")
    with pytest.raises(ConfigError, match="more than 100 files"):
        load_pipelines(file)
    deep = "x: &x0 {a: 1}\n" + "".join(
        f"x{n}: &x{n} {{a: *x{n - 1}, b: *x{n - 1}}}\n" for n in range(1, 45)
    )
    (tmp_path / "a.yaml").write_text(deep)
    file.write_text("pipeline: p\ninclude: [a.yaml, a.yaml]\n")
    with pytest.raises(ConfigError, match="more than 100,000"):
        load_pipelines(file)
