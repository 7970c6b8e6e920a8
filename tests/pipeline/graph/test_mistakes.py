"""Every mistake in a file gives one message, which names its line and its field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock import open_writer
from penstock.core.errors import ConfigError, ConfigErrors
from penstock.pipeline import Pipeline, parse_pipelines, plan

if TYPE_CHECKING:
    from pathlib import Path

GOOD = """\
pipeline: storm-watch
sources:
  beams:
    url: fmq:/radar/iq
stages:
  moments:
    from: beams
    use: radar_stages:moments
  strong:
    from: moments
    sql: select * from moments where dbz > 45
sinks:
  out:
    from: moments
    url: fmq:/radar/moments
  archive:
    from: moments
    parquet: ./archive
    partition_by: [sweep]
  alerts:
    from: strong
    url: log:/radar/alerts
settings:
  trigger: 1s
"""


def fault(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_pipelines(text, "p.yaml")
    assert type(caught.value) is ConfigError, str(caught.value)
    assert caught.value.file == "p.yaml"
    return caught.value


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


def test_the_good_file_has_no_fault() -> None:
    (pipeline,) = parse_pipelines(GOOD)
    assert list(pipeline.graph().nodes) == [
        "beams", "moments", "strong", "out", "archive", "alerts",
    ]  # fmt: skip
    assert plan(pipeline).warnings == ()


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "reason", "hint"),
    [
        # --- keys
        ("    url: fmq:/radar/iq", "    ulr: fmq:/radar/iq\n    url: fmq:/a", 4,
         "sources.beams.ulr", "unknown key", "did you mean url?"),
        ("    use: radar", "    maxOffset: 1\n    use: radar", 8, "stages.moments.maxOffset",
         "unknown key", "known keys: decode, errors, from, options, sql, stateful, use, watermark"),
        ("settings:\n", "setings:\n", 23, "setings", "unknown key", "did you mean settings?"),
        ("    url: fmq:/radar/iq\n", "    type: 3\n", 3, "sources.beams.url", "is required",
         "or give format, for another source of Spark's"),
        ("    url: fmq:/radar/iq\n", "    url:\n", 4, "sources.beams.url",
         "should be text, or a list of texts", None),
        ("    url: fmq:/radar/iq\n", "    url: []\n", 4, "sources.beams.url",
         "should have at least one", None),
        ("pipeline: storm-watch\n", "", 1, "pipeline", "is required", None),
        # --- values
        ("fmq:/radar/iq", "fmg:/radar/iq", 4, "sources.beams.url",
         "no endpoint answers to fmg:", "did you mean fmq:?"),
        ("fmq:/radar/iq", "/radar/iq", 4, "sources.beams.url", "it has no scheme",
         "for a queue, write fmq:/radar/iq, for a log log:/radar/iq"),
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    stage: fmq:/staged\n", 5, "sources.beams.stage",
         "should be the URL of a log", "as in log:/path/name"),
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    startingOffsets: first\n", 5,
         "sources.beams.startingOffsets", "should be earliest, latest", None),
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    maxBytesPerTrigger: much\n", 5,
         "sources.beams.maxBytesPerTrigger", "expected a size", None),
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    decode: {layout: d}\n", 5,
         "sources.beams.decode", "needs the key format", "as in {format: json}"),
        ("radar_stages:moments", "radar_stages.moments", 8, "stages.moments.use",
         "should be module:function", "the function takes a DataFrame and returns one"),
        ("trigger: 1s", "trigger: often", 24, "settings.trigger", "such as 1s",
         "or: available now"),
        ("trigger: 1s", "spark: {spark.x: [1]}", 24, "settings.spark",
         "spark.x should be text, a number, true or false", None),
        ("    partition_by: [sweep]\n", "    mode: replace\n", 19, "sinks.archive.mode",
         "should be 'append', 'update' or 'complete'", None),
        ("    use: radar_stages:moments", "    watermark: {a: 1s, b: 1s}", 8,
         "stages.moments.watermark", "should be one column", 'as in {time: "10 seconds"}'),
        ("    use: radar_stages:moments", "    watermark: {a: later}", 8,
         "stages.moments.watermark.a", "should be a time", None),
        # --- options
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    decode: {format: json}\n", 5,
         "sources.beams.decode.schema", "is missing", "as in schema: id BIGINT, name STRING"),
        ("fmq:/radar/iq\n",
         "fmq:/radar/iq\n    decode: {format: struct, layout: <d, on_error: dead_letter}\n", 5,
         "sources.beams.decode.on_error", "no sink takes its dead letters, so they would be lost",
         "add one, {from: beams, dead_letter: URL}, or on_error: skip, to count them"),
        ("    use: radar_stages:moments", "    decode: {format: jso}", 8,
         "stages.moments.decode.format", "there is no such format", "did you mean json?"),
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    options: {startingOfsets: 1}\n", 5,
         "sources.beams.options.startingOfsets", "there is no such option",
         "did you mean startingOffsets?"),
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    options: {endingOffsets: 1}\n", 5,
         "sources.beams.options.endingOffsets", "is for spark.read only", None),
        ("fmq:/radar/iq\n", "fmq:/radar/iq\n    lossUrl: log:/radar/lost\n", 5,
         "sources.beams.lossUrl", "nothing is written to it while a loss ends the query",
         "failOnDataLoss: false"),
        ("log:/radar/alerts\n", "log:/radar/alerts\n    options: {url: 'log:/b'}\n", 23,
         "sinks.alerts.options.url", "there is no such option of a stream",
         "there is staging; what is about the stream stands in its URL"),
        ("log:/radar/alerts", "fmq:/radar/alerts?create=always", 22, "sinks.alerts.url",
         "create=always would empty it with every batch", "leave it out"),
        ("url: log:/radar/alerts\n", "console: true\n    options: {truncate: false}\n", 23,
         "sinks.alerts.options.truncate", "the console has no options", None),
        # --- other formats
        ("    url: fmq:/radar/iq\n", "    format: csv\n    path: /in\n", 3, "sources.beams.schema",
         "is required: files that come later should have the same columns",
         'as in schema: "id BIGINT, name STRING"; or static: true, for a table'),
        ("    url: fmq:/radar/iq\n", "    format: text\n", 3, "sources.beams.path", "is required",
         "the directory that the files are in"),
        ("    url: fmq:/radar/iq\n", "    format: rate\n    type: 3\n", 5, "sources.beams.type",
         "is for url; this source has format rate", "give what the format takes as options"),
        ("    url: fmq:/radar/iq\n", "    url: fmq:/radar/iq\n    format: rate\n", 4,
         "sources.beams.url", "is for url; this source has format rate", "leave one out"),
        ("    url: fmq:/radar/iq\n", "    url: fmq:/radar/iq\n    path: /in\n", 5,
         "sources.beams.path", "is for a source with format", None),
        ("    url: log:/radar/alerts\n", "    url: log:/radar/alerts\n    path: /out\n", 23,
         "sinks.alerts.path", "is for format; this sink has url", None),
        ("    url: log:/radar/alerts\n", "    format: delta\n    path: ./archive\n", 23,
         "sinks.alerts.path", "sinks.archive in line 18 writes to the same place", None),
        # --- rows that raise
        ("radar_stages:moments\n", "radar_stages:moments\n    errors: dead_letter\n", 9,
         "stages.moments.errors", "no sink takes its dead letters, so they would be lost",
         "add one, {from: moments, dead_letter: URL}"),
        ("radar_stages:moments\n", "radar_stages:moments\n    errors: skip\n", 9,
         "stages.moments.errors", "should be 'fail' or 'dead_letter'", None),
        # --- names
        ("storm-watch", "storm watch", 1, "pipeline", "should have letters, digits",
         "it names the directories of its queries"),
        ("  archive:\n", "  my-archive:\n", 16, "sinks.my-archive",
         "should be letters, digits and '_'", "it is a name in SQL: my_archive"),
        ("  archive:\n", "  2nd:\n", 16, "sinks.2nd", "start with no digit",
         "it is a name in SQL: _2nd"),
        ("  out:\n", "  moments:\n", 13, "sinks.moments",
         "the name is taken: stages.moments in line 6", None),
        ("  moments:\n", "  beams: {from: moments, use: 'm:f'}\n  moments:\n",
         6, "stages.beams", "the name is taken: sources.beams in line 3", None),
        ("  archive:\n", "  Beams:\n", 16, "sinks.Beams",
         "taken: sources.beams in line 3, and SQL does not tell upper from lower case", None),
        ("  archive:\n", "  out:\n", 16, "sinks.out", "the key stands in line 13 already", None),
        # --- from
        ("    from: beams", "    from: beems", 7, "stages.moments.from",
         "there is no source or stage beems", "did you mean beams?"),
        ("    from: strong", "    from: zzz", 21, "sinks.alerts.from",
         "there is no source or stage zzz", "there are: beams, moments, strong"),
        ("    from: strong", "    from: archive", 21, "sinks.alerts.from",
         "archive is a sink", "take them from moments, as it does"),
        ("    from: beams", "    from: [beams, beams]", 7, "stages.moments.from[1]",
         "beams stands here twice", None),
        ("    from: beams", "    from: [beams, beem]", 7, "stages.moments.from[1]",
         "there is no source or stage beem", "did you mean beams?"),
        ("    from: beams", "    from: strong", 7, "stages.moments.from",
         "goes round in a circle: moments -> strong -> moments", None),
        ("    from: beams", "    from: moments", 7, "stages.moments.from",
         "it takes its rows from itself", None),
        ("    from: beams", "    from: [beams, moments]", 7, "stages.moments.from",
         "it takes its rows from itself", None),
        # --- stages
        ("    use: radar_stages:moments\n", "", 6, "stages.moments", "does nothing",
         "give it use, sql, decode, watermark, or several inputs to unite"),
        ("    use: radar_stages:moments\n",
         "    use: radar_stages:moments\n    sql: select * from beams\n", 6, "stages.moments",
         "has both use and sql", "make two stages of it"),
        ("from moments where", "from momets where", 11, "stages.strong.sql",
         "does not mention moments",
         "the view is called moments, as its source or stage is"),
        ("dbz > 45\n", "dbz > 45\n    options: {a: 1}\n", 12, "stages.strong.options",
         "only a function (use) takes options", None),
        # --- sinks
        ("    url: log:/radar/alerts\n", "", 20, "sinks.alerts", "does not say where it writes",
         "give one of url, dead_letter, parquet, csv, json, xml, struct, console, format"),
        ("    partition_by: [sweep]\n", "    console: true\n", 16, "sinks.archive",
         "has parquet and console: a sink writes to one place", "make a sink of each"),
        ("log:/radar/alerts\n", "log:/radar/alerts\n    partition_by: sweep\n", 23,
         "sinks.alerts.partition_by", "is for files; this sink has url", None),
        ("    partition_by: [sweep]\n", "    mode: complete\n", 19, "sinks.archive.mode",
         "parquet files can only be appended to", "mode: append"),
        ("log:/radar/alerts", "fmq:/radar/../radar/moments?size=1M", 22, "sinks.alerts.url",
         "sinks.out in line 15 writes to the same place", None),
        ("log:/radar/alerts", "fmq:/radar/iq", 4, "sources.beams.url",
         "goes round in a circle through streams: storm-watch.beams -> storm-watch.moments -> s",
         None),
        ("fmq:/radar/iq", "fmq:/radar/*", 4, "sources.beams.url",
         "goes round in a circle through streams", None),
    ],
)  # fmt: skip
def test_a_mistake_gives_one_message_with_its_line_and_field(
    old: str, new: str, line: int, field: str, reason: str, hint: str | None
) -> None:
    error = fault(changed(old, new))
    assert (error.line, error.field) == (line, field)
    assert reason in error.reason
    assert error.hint == hint
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "line", "field", "reason"),
    [
        ("", None, None, "has no pipeline"),
        ("# nothing\n---\n# yet\n", None, None, "has no pipeline"),
        ("[]", None, None, "has no pipeline"),
        ("- 5\n", 1, "[0]", "should be a mapping"),
        ("hello\n", 1, None, "should be a mapping"),
        ("pipeline: a\nsources: {}\nsinks: {b: {from: c, console: true}}\n", 2, "sources", "one"),
        ("pipeline: a\nsources: {b: {url: 'fmq:/b'}}\nsinks: {}\n", 3, "sinks", "at least one"),
        ("dispatcher: a\nlegs: {}\n", 1, None, "is not a pipeline"),
        ("a: [\n", 2, None, "cannot be read as YAML"),
    ],
)
def test_a_file_without_a_whole_pipeline_says_what_is_missing(
    text: str, line: int | None, field: str | None, reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_pipelines(text, "p.yaml")
    assert (caught.value.line, caught.value.field) == (line, field)
    assert reason in caught.value.reason


def test_several_mistakes_come_together_in_the_order_of_the_file() -> None:
    text = changed("    from: strong", "    from: strnog").replace("from: beams", "from: beems")
    with pytest.raises(ConfigErrors) as caught:
        parse_pipelines(text, "p.yaml")
    assert [error.line for error in caught.value.errors] == [7, 21]
    assert str(caught.value).splitlines()[0] == (
        "p.yaml:7: stages.moments.from: there is no source or stage beems (did you mean beams?)"
    )


def test_what_nothing_uses_is_a_warning_with_its_line() -> None:
    text = changed("    from: strong", "    from: moments").replace(
        "sources:\n", "sources:\n  spare: {url: 'fmq:/spare'}\n"
    )
    assert plan(parse_pipelines(text, "p.yaml")).warnings == (
        "p.yaml:3: sources.spare: nothing uses it, so it is not read",
        "p.yaml:10: stages.strong: nothing uses it, so it does not run",
    )


SECOND = """\
pipeline: count
sources: {alerts_in: {url: "log:/radar/alerts"}}
sinks:
  screen: {from: alerts_in, console: true}
"""


def test_documents_after_a_mark_keep_their_lines() -> None:
    first, second = parse_pipelines(f"---\n{GOOD}--- # the second\n{SECOND}---\n# no third\n")
    assert (first.name, second.name) == ("storm-watch", "count")
    error = fault(f"{GOOD}---\n{SECOND.replace('from: alerts_in', 'from: alert')}")
    assert (error.line, error.field) == (29, "sinks.screen.from")
    error = fault(f"{GOOD}---\n{SECOND.replace('console: true', 'consle: true')}")
    assert (error.line, error.field) == (29, "sinks.screen.consle")
    assert error.hint == "did you mean console?"


def test_a_list_of_pipelines_is_a_file_too() -> None:
    text = "".join(
        f"- {part.strip().replace(chr(10), chr(10) + '  ')}\n" for part in (GOOD, SECOND)
    )
    assert [pipeline.name for pipeline in parse_pipelines(text)] == ["storm-watch", "count"]
    error = fault(text.replace("from: alerts_in", "from: alert"))
    assert (error.line, error.field) == (28, "[1].sinks.screen.from")
    error = fault(text.replace("console: true", "consle: true"))
    assert (error.line, error.field) == (28, "[1].sinks.screen.consle")


@pytest.mark.parametrize(
    ("old", "new", "line", "field", "reason"),
    [
        ("pipeline: count", "pipeline: storm-watch", 26, "pipeline",
         "there is another pipeline storm-watch in this file"),
        ("console: true", "url: 'log:/radar/alerts'", 29, "sinks.screen.url",
         "sinks.alerts of storm-watch in line 22 writes to the same place"),
        ("console: true", "parquet: archive", 29, "sinks.screen.parquet",
         "sinks.archive of storm-watch in line 18 writes to the same place"),
        ('alerts"}', 'alerts", stage: "log:/radar/alerts"}', 27, "sources.alerts_in.stage",
         "sinks.alerts of storm-watch in line 22 writes to the same place"),
    ],
)  # fmt: skip
def test_pipelines_of_one_file_do_not_get_in_each_others_way(
    old: str, new: str, line: int, field: str, reason: str
) -> None:
    text = f"{GOOD}---\n{SECOND.replace(old, new)}"
    with pytest.raises(ConfigError) as caught:
        parse_pipelines(text, "p.yaml")
    errors = caught.value.errors if isinstance(caught.value, ConfigErrors) else [caught.value]
    assert (line, field, reason) in [(e.line, e.field, e.reason) for e in errors]


def test_a_directory_written_in_two_ways_is_one_place(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for other in (f"file:{tmp_path}/out", f"file://{tmp_path}/out", f"{tmp_path}/link"):
        pipeline = (
            Pipeline("p")
            .source("a", url="fmq:/a")
            .sink("x", from_="a", parquet=f"{tmp_path}/out")
            .sink("y", from_="a", parquet=other)
        )
        with pytest.raises(ConfigError, match=r"sinks\.x writes to the same place"):
            plan(pipeline)


def test_pipelines_that_feed_each_other_round_in_a_circle_are_refused() -> None:
    second = SECOND.replace("console: true", "url: 'fmq:/radar/iq'")
    error = fault(f"{GOOD}---\n{second}")
    assert (error.line, error.field) == (4, "sources.beams.url")
    assert error.reason.endswith(
        "storm-watch.alerts -> count.alerts_in -> count.screen -> storm-watch.beams"
    )


def test_one_session_runs_all_pipelines_so_its_settings_agree() -> None:
    first = GOOD + "  master: local[2]\n  spark: {spark.ui.enabled: false}\n"
    good = first + "---\n" + SECOND + "settings: {master: 'local[2]', shuffle_partitions: 2}\n"
    session = plan(parse_pipelines(good)).session
    assert (session.master, session.shuffle_partitions) == ("local[2]", 2)
    assert session.spark == {"spark.ui.enabled": "false"}
    error = fault(good.replace("{master: 'local[2]'", "{master: 'local[4]'"))
    assert (error.line, error.field) == (32, "settings.master")
    assert "storm-watch has local[2]: one Spark session" in error.reason


def test_a_name_holds_a_stream_for_one_source() -> None:
    first = Pipeline("p").source("a", url="fmq:/q", hold="me").sink("x", from_="a", url="log:/x")
    other = Pipeline("r").source("b", url=["fmq:/", "fmq:/q"], hold="me")
    with pytest.raises(ConfigError, match=r"sources\.a of p holds fmq:/q by this name") as caught:
        plan([first, other.sink("y", from_="b", url="log:/y")])
    assert caught.value.hint == "give each a name of its own; a writer may hold for several"
    plan(
        [
            first,
            Pipeline("r").source("b", url="fmq:/q", hold="you").sink("y", from_="b", url="log:/y"),
        ]
    )


def test_a_table_is_joined_and_not_written() -> None:
    pipeline = (
        Pipeline("p")
        .source("sites", format="parquet", path="/sites", static=True)
        .source("beams", url="fmq:/beams")
        .stage("named", from_=["beams", "sites"], sql="select * from beams join sites using (a)")
        .stage("known", from_="sites", sql="select * from sites")
        .sink("x", from_="named", url="log:/x")
    )
    (query,) = plan(pipeline).queries
    assert (query.kind, query.sources) == ("single", ("sites", "beams"))
    with pytest.raises(ConfigError, match="known is a table, and no rows come of it"):
        plan(pipeline.sink("y", from_="known", console=True))
    with pytest.raises(ConfigError, match="maxOffsetsPerTrigger: is for readStream only"):
        plan(pipeline.source("old", url="log:/old", static=True, maxOffsetsPerTrigger=3))


def test_rows_are_tried_only_where_each_is_worked_on_by_itself() -> None:
    pipeline = (
        Pipeline("p")
        .source("beams", url="fmq:/beams")
        .stage(
            "tried", from_="beams", sql="select 1 / seq as a, time from beams", errors="dead_letter"
        )
        .sink("bad", from_="tried", dead_letter="log:/bad")
        .sink("good", from_="tried", url="log:/good")
    )
    (query,) = plan(pipeline).queries
    assert (query.kind, query.trunk) == ("foreach_batch", "beams")
    assert query.reason.startswith("tried is tried batch by batch")
    counted = pipeline.stage("counted", from_="tried", sql="select count(*) from tried group by a")
    with pytest.raises(ConfigError, match="what counts gets is joined, counted or keeps state"):
        plan(counted.sink("counts", from_="counted", url="log:/counts"))
    grouped = pipeline.stage(
        "grouped", from_="beams", sql="select count(*) from beams group by 1", errors="dead_letter"
    )
    with pytest.raises(ConfigError, match="rows are tried batch by batch, and it keeps state"):
        plan(grouped.sink("worse", from_="grouped", dead_letter="log:/worse"))
    late = pipeline.stage(
        "late", from_="beams", use="m:f", watermark={"time": "1s"}, errors="dead_letter"
    )
    with pytest.raises(ConfigError, match="a row is tried by itself, and this stage keeps state"):
        plan(late.sink("worse", from_="late", dead_letter="log:/worse"))


@pytest.mark.parametrize(
    "target",
    [
        "fmq:/dead?layout=classic",
        "fmqp://there:5440/dead",
        "iwrf:/dead",
        "iwrf+fmq:/dead",
        "iwrf+tcp://there:12000",
        "jrtc+udp://there:20788",
        "latest:/dead",
        "lhhttt://there:4711",
        "lhhttt+unix:/dead",
        "mcap:/dead.mcap",
        "psi://there:11411/dead",
    ],
)
def test_dead_letters_into_a_stream_that_keeps_no_reasons_are_a_mistake(target: str) -> None:
    text = changed("    url: log:/radar/alerts\n", f'    dead_letter: "{target}"\n')
    error = fault(text)
    assert (error.line, error.field) == (22, "sinks.alerts.dead_letter")
    assert "it keeps no attributes, which hold the reason of a dead letter" in error.reason
    assert error.hint == "use a log: or a wide fmq: queue"


def test_dead_letters_into_a_classic_queue_are_a_mistake_also_while_somebody_writes_to_it(
    tmp_path: Path,
) -> None:
    text = changed("    url: log:/radar/alerts\n", f"    dead_letter: fmq:{tmp_path}/dead\n")
    plan(parse_pipelines(text))
    with open_writer(f"fmq:{tmp_path}/dead?layout=classic") as writer:
        writer.write(b"theirs")
        assert "it keeps no attributes" in fault(text).reason
