"""Rows become messages, or are refused in one line."""

from __future__ import annotations

import time

import pyarrow as pa
import pytest

from penstock import InvalidOption, Malformed
from penstock.core.batch import BATCH_SCHEMA, messages_from_batch
from penstock.core.errors import InvalidURL
from penstock.core.message import Message
from penstock.pipeline.sink.stream_sink import Targets


def rows(**columns: list[object] | pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(columns)


def messages(
    url: str | None = "log:/out", outputs: dict[str, list[str]] | None = None, /, **columns: object
) -> dict[str, list[Message]]:
    batch = rows(**columns)
    targets = Targets([] if url is None else [url], outputs or {}, batch.schema.names)
    found: dict[str, list[Message]] = {}
    for urls, some in targets.messages(batch):
        assert some.schema == BATCH_SCHEMA
        found |= {where: list(messages_from_batch(some)) for where in urls}
    return found


def test_columns_that_are_not_there_have_the_values_of_a_plain_message() -> None:
    before = time.time_ns()
    (message,) = messages(payload=["text"])["log:/out"]
    assert (message.payload, message.type, message.subtype) == (b"text", 0, 0)
    assert message.stream is message.attributes is None
    assert before <= message.time_ns <= time.time_ns()


def test_columns_of_a_source_are_taken_as_they_are() -> None:
    (message,) = messages(
        payload=[b"x"],
        type=pa.array([5], pa.int64()),
        subtype=[6],
        time_ns=[123_456_789],
        time=pa.array([9], pa.timestamp("us", "UTC")),  # cut to microseconds: time_ns is exact
        stream=[bytes(range(16))],
        attributes=[b"head"],
        seq=[77],
        created_ns=[1],
        url=["fmq:/where/it/came/from"],
    )["log:/out"]
    assert message[3:] == (5, 6, bytes(range(16)), b"head", b"x")
    assert message.time_ns == 123_456_789


def test_a_time_is_one_of_microseconds() -> None:
    found = messages(payload=["x", "y"], time=pa.array([-1, 5], pa.timestamp("us")))["log:/out"]
    assert [message.time_ns for message in found] == [-1000, 5000]


def test_rows_go_where_their_column_says() -> None:
    columns = {"payload": ["1", "2", "3"]}
    by_url = messages(None, url=["log:/a", "log:/b", "log:/a"], **columns)
    assert {u: [m.payload for m in some] for u, some in by_url.items()} == {
        "log:/a": [b"1", b"3"],
        "log:/b": [b"2"],
    }
    outputs = {"x": ["log:/a"], "y": ["log:/b"]}
    by_name = messages(None, outputs, output=["y", "x", "x"], **columns)
    assert {u: [m.payload for m in some] for u, some in by_name.items()} == {
        "log:/b": [b"1"],
        "log:/a": [b"2", b"3"],
    }


def test_a_name_may_stand_for_several_streams() -> None:
    outputs = {"x": ["log:/a", "log:/b"], "y": ["log:/b"]}
    found = Targets([], outputs, ["payload", "output"]).messages(
        rows(payload=["1", "2"], output=["x", "y"])
    )
    assert [(urls, some["payload"].to_pylist()) for urls, some in found] == [
        (["log:/a"], [b"1"]),
        (["log:/b"], [b"1"]),
        (["log:/b"], [b"2"]),
    ]
    alone = Targets([], outputs, ["payload", "output"]).messages(
        rows(payload=["1", "2"], output=["x", "x"])
    )
    assert [(urls, some.num_rows) for urls, some in alone] == [(["log:/a"], 2), (["log:/b"], 2)]


def test_streams_that_get_the_same_messages_and_no_others_are_staged_together() -> None:
    outputs = {"x": ["log:/a", "log:/c", "log:/b"], "y": ["log:/b"]}
    found = Targets([], outputs, ["payload", "output"]).messages(rows(payload=["1"], output=["x"]))
    assert [urls for urls, _ in found] == [["log:/a", "log:/c"], ["log:/b"]]


def test_all_rows_may_go_to_several_streams() -> None:
    found = Targets(["log:/a", "log:/b"], {}, ["payload"]).messages(rows(payload=["1", "2"]))
    assert [(urls, some.num_rows) for urls, some in found] == [(["log:/a", "log:/b"], 2)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"payload": [b"x", None]}, "column payload should be a value in every row, found null"),
        ({"payload": [5]}, "column payload should be binary, found int64"),
        ({"payload": ["x"], "type": [3_000_000_000]}, "column type should be int32, found int64"),
        ({"payload": ["x"], "type": [1.5]}, "column type should be int32, found double"),
        ({"payload": ["x"], "type": pa.array([None], pa.int32())}, "column type should be a value"),
        ({"payload": ["x"], "stream": [b"short"]}, "column stream should be fixed_size_binary[16]"),
        ({"payload": ["x"], "time": [1.5]}, "column time should be a timestamp"),
        ({"payload": ["x"], "time": pa.array([None], pa.timestamp("us"))}, "column time should be"),
        ({"payload": ["x"], "time": pa.array([2**62], pa.timestamp("us"))}, "from 1677 to 2262"),
    ],
)
def test_a_row_that_fits_no_message_is_told_by_its_column(
    columns: dict[str, object], message: str
) -> None:
    with pytest.raises(Malformed) as caught:
        messages(**columns)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("url", "outputs", "columns", "message"),
    [
        ("log:/a", {}, ["id"], "a sink needs the column payload"),
        ("log:/a", {}, ["payload", "id", "dbz"], "option columns='dbz, id': have no place"),
        ("log:/a", {}, ["payload", "output"], "the column output names what it says"),
        (None, {}, ["payload"], "option url=None: is missing"),
        (None, {"x": ["log:/a"]}, ["payload"], "no column output to choose by"),
        ("log:/a", {"x": ["log:/a"]}, ["payload", "output"], "outputs is given as well"),
    ],
)
def test_columns_that_say_nothing_are_told_before_anything_is_written(
    url: str | None, outputs: dict[str, list[str]], columns: list[str], message: str
) -> None:
    with pytest.raises(InvalidOption) as caught:
        Targets([] if url is None else [url], outputs, columns)
    assert message in str(caught.value)


def test_a_row_that_goes_nowhere_is_an_error() -> None:
    with pytest.raises(Malformed, match="column output should be one of x, y, found z"):
        messages(None, {"x": ["log:/a"], "y": ["log:/b"]}, payload=["1"], output=["z"])
    with pytest.raises(Malformed, match="column url should be a value in every row, found null"):
        messages(None, payload=["1"], url=pa.array([None], pa.string()))


def test_a_column_does_not_name_what_an_option_must_not() -> None:
    with pytest.raises(InvalidOption, match="create=always would empty it with every batch"):
        messages(None, payload=["1"], url=["fmq:/a?create=always"])
    with pytest.raises(InvalidURL, match="it has no scheme"):
        messages(None, payload=["1"], url=["/a"])
