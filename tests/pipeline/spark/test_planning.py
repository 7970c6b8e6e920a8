"""The source plans batches: where they begin, how much is in them, what a pattern finds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows
from pyspark.sql.types import StructType

from penstock import (
    InvalidOption,
    Malformed,
    NotFound,
    Unsupported,
    create,
    describe,
    open_reader,
    open_writer,
)
from penstock.core.capabilities import Replayable
from penstock.core.errors import PositionError
from penstock.pipeline.source.inputs import expand
from penstock.pipeline.source.options import SinkOptions, SourceOptions, parse_spark_options
from penstock.pipeline.source.ranges import Range, Slice, slices_to_json, split
from penstock.pipeline.source.stream import Part, PenstockSource, shares
from penstock.pipeline.spark_process import private_folder
from support.planner import Planner, declared
from support.spark_streams import fill


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"fmq:{tmp_path}/q"


def test_the_first_offset_stays_however_often_spark_asks(url: str) -> None:
    fill(url, range(10))
    planner = Planner(url, startingOffsets="latest")
    first = planner.begin()
    fill(url, range(10, 20))
    assert [planner.reader.initialOffset() for _ in range(3)] == [first] * 3
    assert planner.run() == list(range(10, 20))


def test_a_first_batch_that_is_replayed_begins_where_it_began(url: str) -> None:
    fill(url, range(10))
    planner = Planner(url, startingOffsets="latest")
    planner.begin()
    fill(url, range(10, 20))
    assert planner.plan()
    # The query failed, and is restarted: Spark asks anew for the first offset, which has moved.
    again = Planner(url, startingOffsets="latest")
    before, again.at = again.begin(), planner.at
    again.parts = again._parts(before)
    assert again.read() == list(range(10, 20))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(20)),
        ({"startingOffsets": "EARLIEST"}, range(20)),
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": "15"}, range(15, 20)),
        ({"startingOffsets": -2}, range(20)),
        ({"startingOffsets": -1}, []),
        ({"startingSeq": "18"}, range(18, 20)),
        ({"startingSeq": "20"}, []),
        ({"startingTime": "1970-01-01"}, range(20)),
        ({"startingTime": "2200-01-01"}, []),
    ],
)
def test_a_query_begins_where_it_is_told(
    url: str, options: dict[str, object], expected: range
) -> None:
    fill(url, range(20))
    planner = Planner(url, **options)
    planner.begin()
    assert planner.run() == list(expected)


def test_each_url_may_have_a_start_of_its_own(tmp_path: Path) -> None:
    a, b = f"fmq:{tmp_path}/a", f"fmq:{tmp_path}/b"
    fill(a, range(10))
    fill(b, range(100, 110))
    planner = Planner(f"{a},{b}", startingOffsets=f'{{"{a}": 8}}')
    planner.begin()
    assert sorted(planner.run()) == [8, 9, *range(100, 110)]
    with pytest.raises(InvalidOption, match="none of the URLs"):
        Planner(a, startingOffsets=f'{{"{b}": 8}}').begin()


def test_a_start_behind_the_end_is_a_mistake(url: str) -> None:
    fill(url, range(10))
    with pytest.raises(PositionError, match="has no message 11 yet: it has 0 to 9"):
        Planner(url, startingSeq=11).begin()


def test_a_batch_has_no_more_messages_than_allowed(tmp_path: Path) -> None:
    for i in range(3):
        fill(f"fmq:{tmp_path}/{i}", range(1000 * i, 1000 * i + 10 ** (i + 1)))
    planner = Planner(f"fmq:{tmp_path}/*", maxOffsetsPerTrigger=100)
    limit = planner.reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(100)
    planner.begin()
    sizes, seen = [], []
    while batch := planner.run(limit):
        sizes.append(len(batch))
        seen += batch
    assert sizes == [100] * 11 + [10]
    assert sorted(seen) == [*range(10), *range(1000, 1100), *range(2000, 3000)]


def test_a_stream_with_little_is_not_passed_over_while_another_has_much() -> None:
    waiting = {"busy": 1_000_000, "quiet": 1}
    assert any(shares(waiting, 10, turn)["quiet"] for turn in range(2))
    assert all(sum(shares(waiting, 10, turn).values()) == 10 for turn in range(5))
    assert shares(waiting, 10**9, 0) == waiting


def test_a_batch_has_about_as_many_bytes_as_allowed(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?size=8M"
    with open_writer(url) as writer:
        writer.write_many([b"%01000d" % i for i in range(1000)])
    planner = Planner(f"fmq:{tmp_path}/q", maxBytesPerTrigger="100k")
    limit = planner.reader.getDefaultReadLimit()
    assert limit == ReadMaxBytes(100 << 10)
    planner.begin()
    each = describe(f"fmq:{tmp_path}/q").bytes / 1000
    sizes = []
    while batch := planner.run(limit):
        sizes.append(len(batch))
    assert sum(sizes) == 1000
    assert max(sizes) * each <= 100 << 10
    assert len(sizes) == -(-1000 // int((100 << 10) / each))
    both = Planner(f"fmq:{tmp_path}/q", maxBytesPerTrigger="100k", maxOffsetsPerTrigger=500)
    both.begin()
    assert len(both.run(both.reader.getDefaultReadLimit())) == sizes[0]


def test_available_now_ends_with_what_was_there(tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/a", range(10))
    planner = Planner(f"fmq:{tmp_path}/*", maxOffsetsPerTrigger=6)
    planner.reader.prepareForTriggerAvailableNow()
    planner.begin()
    fill(f"fmq:{tmp_path}/a", range(10, 20))
    fill(f"fmq:{tmp_path}/b", range(20, 30))
    seen = []
    for _ in range(10):
        if not planner.plan(ReadMaxRows(6)):
            break
        seen += planner.read()
    else:
        pytest.fail("it never ended")
    assert seen == list(range(10))


def test_available_now_reads_a_stream_that_is_called_otherwise_than_in_the_checkpoint(
    tmp_path: Path,
) -> None:
    fill(f"log:{tmp_path}/a", range(10))
    first = Planner(f"log:{tmp_path}/a")
    first.begin()
    assert first.run() == list(range(10))
    fill(f"log:{tmp_path}/a", range(10, 20))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    again = Planner(f"log:{tmp_path}/b")
    again.reader.prepareForTriggerAvailableNow()  # which Spark calls before it tells the offsets
    again.at = first.at
    assert again.run() == list(range(10, 20))


def test_a_slice_holds_for_a_stream_that_is_called_otherwise_than_in_the_checkpoint(
    tmp_path: Path,
) -> None:
    fill(f"log:{tmp_path}/a", range(10))
    with open_reader(f"log:{tmp_path}/a") as reader:
        assert isinstance(reader, Replayable)
        part = Slice(reader.bounds().epoch, 2, 6)

    def planner(url: str) -> Planner:
        return Planner(url, slices=slices_to_json({url: part}))

    first = planner(f"log:{tmp_path}/a")
    first.begin()
    assert first.run(ReadMaxRows(2)) == [2, 3]
    (tmp_path / "b").symlink_to(tmp_path / "a")
    again = planner(f"log:{tmp_path}/b")
    again.at = first.at
    assert again.run() == [4, 5]


def test_a_pattern_finds_streams_that_come_later(tmp_path: Path) -> None:
    planner = Planner(f"fmq:{tmp_path}/*", startingOffsets="latest")
    assert planner.begin() == {}
    assert not planner.plan()
    create(f"fmq:{tmp_path}/a", slots=4)
    assert planner.plan()  # from now on it is known, and what it loses is noticed
    assert planner.read() == []
    fill(f"fmq:{tmp_path}/a", range(3))
    assert planner.run() == [0, 1, 2]
    assert not planner.plan()


def test_a_pattern_finds_queues_or_logs_and_nothing_else(tmp_path: Path) -> None:
    fill(f"fmq:{tmp_path}/wide", range(1))
    fill(f"fmq:{tmp_path}/classic?layout=classic", range(1))
    fill(f"log:{tmp_path}/log", range(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("no stream")
    assert expand([f"fmq:{tmp_path}/*"]) == [f"fmq:{tmp_path}/classic", f"fmq:{tmp_path}/wide"]
    assert expand([f"log:{tmp_path}/*"]) == [f"log:{tmp_path}/log"]
    assert expand([f"fmq:{tmp_path}/[w]*?damaged=skip", "psi://host/*"]) == [
        f"fmq:{tmp_path}/wide?damaged=skip",
        "psi://host/*",
    ]


def test_a_stream_that_is_named_twice_is_read_once_or_refused() -> None:
    assert expand(["fmq:/d/q", "fmq:/d/x/../q.fmq", "fmq:/d/q"]) == ["fmq:/d/q"]
    with pytest.raises(InvalidOption, match="is the stream fmq:/d/q, read in another way"):
        expand(["fmq:/d/q", "fmq:/d/q?type=6"])  # its messages of that type would be left out


def test_a_missing_stream_is_named(url: str) -> None:
    with pytest.raises(NotFound, match="q"):
        Planner(url).begin()
    source = PenstockSource({"url": f"{url}*"})
    with pytest.raises(NotFound, match="there is no stream at"):
        source.reader(declared(source)).partitions()


@pytest.mark.parametrize("parts", [None, 1, 3, 7, 10**6])
def test_the_parts_of_a_range_are_all_of_it(parts: int | None) -> None:
    whole = Range("fmq:/q", 1, 10, 100_010)
    cut = split(whole, parts, 4)
    assert [part.start for part in cut[1:]] == [part.end for part in cut[:-1]]
    assert (cut[0].start, cut[-1].end) == (10, 100_010)
    assert len(cut) == min(parts or 4, 100_000)


def test_a_backlog_is_read_in_parts(url: str) -> None:
    fill(f"{url}?slots=65536", range(60_000))
    planner = Planner(url, minPartitions=6)
    planner.begin()
    assert planner.run() == list(range(60_000))
    assert len(planner.parts) == 6


def test_the_type_is_filtered_where_it_is_read(url: str) -> None:
    with open_writer(url) as writer:
        for i in range(100):
            writer.write(b"%d" % i, i % 3)
    planner = Planner(url, type=1)
    planner.begin()
    assert planner.run() == list(range(1, 100, 3))


def test_an_arrow_batch_of_large_messages_stays_small(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/q?size=64M"
    with open_writer(url) as writer:
        for i in range(100):
            writer.write(b"%0500000d" % i)
    planner = Planner(f"fmq:{tmp_path}/q", minPartitions=1)
    planner.begin()
    planner.plan()
    sizes = [batch.nbytes for batch in planner.reader.read(planner.parts[0])]
    assert max(sizes) <= 64 * 600_000
    assert len(sizes) > 1


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({}, "option url=None: is missing", "fmq:/path/name"),
        ({"url": "fmq:/q", "startingOfsets": "1"}, "no such option", "startingOffsets?"),
        ({"url": "/q"}, "no scheme", "fmq:/q"),
        ({"url": "fmq:/q?type=5"}, "has no place in a source's URL", 'option("type"'),
        ({"url": '["fmq:/q"'}, "is not JSON", ""),
        ({"url": "fmq:/q", "startingoffsets": "first"}, "expected earliest, latest", ""),
        ({"url": "fmq:/q", "maxBytesPerTrigger": "much"}, "expected a size", ""),
        ({"url": "fmq:/q", "maxOffsetsPerTrigger": "0"}, "greater than or equal to 1", ""),
        ({"url": "fmq:/q", "startingTime": "noon"}, "expected ISO 8601", ""),
        ({"url": "fmq:/q", "stage": "fmq:/q"}, "stage", ""),
        ({"url": "fmq:/q", "path": "fmq:/r"}, "url=fmq:/q is given as well", ""),
        ({"url": "fmq:/q", "startingSeq": "1", "startingOffsets": "1"}, "is given as well", ""),
        ({"url": "fmq:/q", "endingOffsets": "latest"}, "is for spark.read only", ""),
        ({"url": "fmq:/q", "lossUrl": "log:/l"}, "ends the query", "failOnDataLoss"),
        (
            {"url": "fmq:/q", "failOnDataLoss": "false", "lossUrl": "jrtc+udp://there:20788"},
            "cannot be read again",
            "use a log:",
        ),
    ],
)
def test_a_wrong_option_of_a_source_is_told_in_one_line(
    options: dict[str, str], message: str, hint: str
) -> None:
    with pytest.raises(InvalidOption, match=r".*") as caught:
        PenstockSource(options).streamReader(None)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hint in (caught.value.hint or "")
    if hint:
        assert f"hint: {caught.value.hint}" in caught.value.__notes__


def test_commas_part_urls_only_before_a_scheme() -> None:
    given = {"url": "fmq:/a,b, log:/c?x=1,2"}
    assert parse_spark_options(given, SourceOptions).url == ["fmq:/a,b", "log:/c?x=1,2"]


@pytest.mark.parametrize("option", ["hold", "stage", "maxOffsetsPerTrigger"])
def test_what_only_streams_have_is_refused_for_a_table(option: str) -> None:
    value = {"hold": "me", "stage": "log:/l"}.get(option, "5")
    with pytest.raises(InvalidOption, match="is for readStream only"):
        PenstockSource({"url": "fmq:/q", option: value}).reader(None)  # type: ignore[arg-type]


def test_a_sink_does_not_empty_its_stream_with_every_batch() -> None:
    with pytest.raises(InvalidOption, match="with every batch"):
        parse_spark_options({"url": "fmq:/q?create=always"}, SinkOptions)


def test_a_sink_has_one_stream_or_a_list_of_them() -> None:
    one = parse_spark_options({"url": "log:/a,b"}, SinkOptions)
    assert one.url == ("log:/a,b",)
    two = parse_spark_options({"url": '["log:/a", "fmq:/b"]'}, SinkOptions)
    assert two.url == ("log:/a", "fmq:/b")
    for wrong, why in (
        ('["log:/a"', "is not JSON"),
        ("[]", "should have at least one"),
        ('["log:/a", "fmq:/q?create=always"]', "with every batch"),
    ):
        with pytest.raises(InvalidOption, match=why):
            parse_spark_options({"url": wrong}, SinkOptions)


def test_a_table_is_a_part_of_a_stream_by_number_or_time(url: str) -> None:
    fill(url, range(50))
    with open_reader(url) as reader:
        middle = [message.created_ns for message in reader.available()][-1] + 1
    fill(url, range(50, 100))

    def numbers_of(**options: object) -> list[int]:
        given = {key: str(value) for key, value in options.items()}
        source = PenstockSource({"url": url, **given})
        reader = source.reader(declared(source))
        batches = [batch for part in reader.partitions() for batch in reader.read(part)]
        return [int(n) for batch in batches for n in batch.column("payload").to_pylist()]  # type: ignore[union-attr]

    assert numbers_of() == list(range(100))
    assert numbers_of(startingTime=middle) == list(range(50, 100))
    assert numbers_of(endingTime=middle, startingSeq=40) == list(range(40, 50))
    assert numbers_of(startingOffsets=10, endingOffsets=f'{{"{url}": 12}}') == [10, 11]
    assert numbers_of(startingOffsets=98, endingOffsets="latest") == [98, 99]
    with pytest.raises(PositionError, match="has no message 101 yet"):
        numbers_of(endingOffsets=101)


def test_a_schema_says_nothing_without_decode(url: str) -> None:
    with pytest.raises(InvalidOption, match="says nothing without decode"):
        Planner(url, schema="a INT")
    with pytest.raises(InvalidOption, match="no place to count") as caught:
        PenstockSource(
            {"url": url, "decode": '{"format": "struct", "layout": "<i", "on_error": "skip"}'}
        ).schema()
    assert 'on_error="skip"' in (caught.value.hint or "")


def test_decoded_columns_come_behind_those_of_the_message(url: str) -> None:
    with open_writer(url) as writer:
        writer.write(b"\1\0\0\0")
        writer.write(b"?")
    options = {"url": url, "decode": '{"format": "struct", "layout": "int gate;"}'}
    schema = PenstockSource(options).schema()
    assert isinstance(schema, StructType)
    assert [(field.name, field.nullable) for field in schema][-2:] == [
        ("time", False),
        ("gate", True),
    ]
    planner = Planner(url, decode=options["decode"], maxOffsetsPerTrigger=1)
    planner.begin()
    planner.plan(ReadMaxRows(1))
    (rows,) = planner.reader.read(planner.parts[0])
    assert rows.column("gate").to_pylist() == [1]
    assert "payload" not in rows.schema.names
    planner.plan()
    with pytest.raises(Malformed, match="message 1 of fmq"):
        list(planner.reader.read(planner.parts[0]))


@pytest.mark.parametrize("model", [SourceOptions, SinkOptions])
def test_every_option_is_in_the_users_page(model: type[SourceOptions | SinkOptions]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "spark.md").read_text(encoding="utf-8")
    assert [name for name in model.model_fields if name not in page] == []


def test_a_folder_of_somebody_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder("losses")
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unsupported, match="belongs to somebody else"):
        private_folder("losses")


def test_a_checkpoint_of_other_streams_is_not_taken_for_one_of_this_source(tmp_path: Path) -> None:
    a, b = Planner(f"fmq:{tmp_path}/a"), Planner(f"fmq:{tmp_path}/b")
    fill(f"fmq:{tmp_path}/a", range(3))
    fill(f"fmq:{tmp_path}/b", range(3))
    begin = a.begin()
    a.plan()
    b.at = a.at  # Spark gives each source the offsets that stood in its place before
    with pytest.raises(PositionError, match=r"the checkpoint is about fmq:.*/a, and .* fmq:.*/b"):
        b.plan()
    with pytest.raises(PositionError):
        b.reader.partitions(begin, a.at)
    both = Planner(f"fmq:{tmp_path}/b,fmq:{tmp_path}/a")  # one more is no mistake
    both.at = a.at
    assert both.run() == [0, 1, 2]
    pattern = Planner(f"fmq:{tmp_path}/[%61-b].fmq")
    pattern.at = a.at
    assert pattern.run() == [0, 1, 2]


def test_a_batch_waits_for_enough_messages_but_not_for_ever(url: str) -> None:
    fill(url, range(3))
    planner = Planner(url, minOffsetsPerTrigger=5, maxTriggerDelay="1h")
    planner.begin()
    assert not planner.plan()
    fill(url, range(3, 6))
    assert planner.run() == list(range(6))
    fill(url, range(6, 7))
    assert not planner.plan()
    hasty = Planner(url, minOffsetsPerTrigger=5, maxTriggerDelay="0s")
    hasty.at = planner.at
    assert hasty.run() == [6]
    last = Planner(url, minOffsetsPerTrigger=5)
    last.at = planner.at
    last.reader.prepareForTriggerAvailableNow()
    assert last.run() == [6]


def test_a_source_begins_at_a_timestamp_of_kafkas_kind(url: str) -> None:
    fill(url, range(5))
    with open_reader(url) as reader:
        middle = reader.read_many(5)[-1].created_ns // 1_000_000 + 2
    time.sleep(0.005)
    fill(url, range(5, 8))
    planner = Planner(url, startingTimestamp=middle)
    planner.begin()
    assert planner.run() == [5, 6, 7]
    each = Planner(url, startingOffsetsByTimestamp=f'{{"{url}": {middle}}}')
    each.begin()
    assert each.run() == [5, 6, 7]
    with pytest.raises(InvalidOption, match="is none of the URLs"):
        Planner(url, startingOffsetsByTimestamp='{"fmq:/other": 1}').begin()


@pytest.mark.parametrize(
    ("filters", "first", "end"),
    [
        ([GreaterThanOrEqual(("seq",), 40), LessThan(("seq",), 60)], 40, 60),
        ([GreaterThan(("seq",), 40), LessThanOrEqual(("seq",), 60)], 41, 61),
        ([EqualTo(("seq",), 7)], 7, 8),
        ([GreaterThan(("seq",), 500)], None, None),
        ([LessThan(("seq",), -5)], None, None),
        ([GreaterThan(("time_ns",), 40), IsNotNull(("seq",))], 0, 100),
        ([GreaterThanOrEqual(("seq",), 90), GreaterThan(("seq",), 3)], 90, 100),
    ],
)
def test_what_filters_leave_out_is_not_read(
    url: str, filters: list[Filter], first: int | None, end: int | None
) -> None:
    fill(url, range(100))
    reader = batch_reader(url)
    assert reader.pushFilters(filters) == filters  # Spark applies them, too
    ranges = [part.range for part in reader.partitions() if isinstance(part, Part)]
    found = (min(r.start for r in ranges), max(r.end for r in ranges)) if ranges else (None, None)
    assert found == (first, end)


def test_filters_by_time_of_appending_and_by_type_narrow_what_is_read(url: str) -> None:
    fill(url, range(5))
    time.sleep(0.002)
    fill(url, range(5, 9))
    with open_reader(url) as messages:
        times = [message.created_ns for message in messages.read_many(9)]
    reader = batch_reader(url)
    reader.pushFilters(
        [
            GreaterThanOrEqual(("created_ns",), times[5]),
            LessThanOrEqual(("created_ns",), times[-1]),
            EqualTo(("type",), 3),
        ]
    )
    (part,) = (part for part in reader.partitions() if isinstance(part, Part))
    assert (part.range.start, part.range.end, part.range.type) == (5, 9, 3)


def test_a_session_without_pushdown_takes_the_reader_as_well(url: str) -> None:
    fill(url, range(3))
    method = batch_reader(url).pushFilters
    assert getattr(method, "__func__", None) is DataSourceReader.pushFilters


def batch_reader(url: str) -> DataSourceReader:
    source = PenstockSource({"url": url})
    return source.reader(declared(source))
