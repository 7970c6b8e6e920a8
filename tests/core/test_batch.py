from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.batch import (
    BATCH_SCHEMA,
    batch_from_messages,
    check_batch,
    messages_from_batch,
)
from penstock.core.errors import Malformed
from penstock.core.message import Message
from penstock.core.stream_id import StreamId

INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
MESSAGES = st.builds(
    Message,
    seq=st.integers(0, 2**63 - 1),
    time_ns=INT64,
    created_ns=INT64,
    type=INT32,
    subtype=INT32,
    stream=st.none() | st.binary(min_size=16, max_size=16).map(StreamId),
    attributes=st.none() | st.binary(max_size=40),
    payload=st.binary(max_size=100),
)
MESSAGE = Message(1, 2, 3, 4, 5, StreamId(bytes(range(16))), b"header", b"payload")
NULL_STREAM = MESSAGE._replace(seq=2, stream=None, attributes=None)


def test_the_schema_is_exactly_the_fields_of_a_message() -> None:
    assert tuple(BATCH_SCHEMA.names) == Message._fields
    assert [(field.type, field.nullable) for field in BATCH_SCHEMA] == [
        (pa.int64(), False),
        (pa.int64(), False),
        (pa.int64(), False),
        (pa.int32(), False),
        (pa.int32(), False),
        (pa.binary(16), True),
        (pa.binary(), True),
        (pa.binary(), False),
    ]


@given(st.lists(MESSAGES, max_size=20))
def test_messages_come_back_as_they_were(messages: list[Message]) -> None:
    batch = batch_from_messages(messages)
    batch.validate(full=True)
    assert batch.schema.equals(BATCH_SCHEMA, check_metadata=True)
    assert list(messages_from_batch(batch)) == messages


def test_a_stream_comes_back_as_a_stream_id() -> None:
    first, second = messages_from_batch(batch_from_messages([MESSAGE, NULL_STREAM]))
    assert type(first.stream) is StreamId
    assert second.stream is None
    assert second.attributes is None


def test_no_messages_make_an_empty_batch() -> None:
    batch = batch_from_messages([])
    assert batch.schema.equals(BATCH_SCHEMA)
    assert batch.num_rows == 0
    assert list(messages_from_batch(batch)) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", 2**31),
        ("subtype", -(2**31) - 1),
        ("seq", 2**63),
        ("time_ns", -(2**70)),
        ("stream", b"short"),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_named(field: str, value: Any) -> None:
    misfit = MESSAGE._replace(**{field: value})
    with pytest.raises(Malformed) as caught:
        batch_from_messages([MESSAGE, misfit])
    assert caught.value.where == field
    assert caught.value.expected == BATCH_SCHEMA.field(field).type


def test_a_batch_of_a_tool_that_forgets_what_may_be_null_is_taken() -> None:
    batch = batch_from_messages([MESSAGE, NULL_STREAM])
    loose = pa.schema([pa.field(field.name, field.type) for field in BATCH_SCHEMA])
    check_batch(batch.cast(loose))
    assert list(messages_from_batch(batch.cast(loose))) == [MESSAGE, NULL_STREAM]


@pytest.mark.parametrize("column", BATCH_SCHEMA.names)
def test_a_missing_column_is_named(column: str) -> None:
    batch = batch_from_messages([MESSAGE]).drop_columns([column])
    with pytest.raises(Malformed) as caught:
        check_batch(batch)
    assert column in caught.value.where
    assert caught.value.found == "no column"


@pytest.mark.parametrize("column", BATCH_SCHEMA.names)
def test_a_column_of_another_type_is_named_with_both_types(column: str) -> None:
    batch = batch_from_messages([MESSAGE])
    index = BATCH_SCHEMA.get_field_index(column)
    wrong = batch.set_column(index, column, pa.array([1.5]))
    with pytest.raises(Malformed) as caught:
        check_batch(wrong)
    assert column in caught.value.where
    assert caught.value.expected == BATCH_SCHEMA.field(column).type
    assert caught.value.found == pa.float64()


@pytest.mark.parametrize("column", [field.name for field in BATCH_SCHEMA if not field.nullable])
def test_a_null_where_none_may_be_is_refused(column: str) -> None:
    batch = batch_from_messages([MESSAGE])
    index = BATCH_SCHEMA.get_field_index(column)
    field = pa.field(column, BATCH_SCHEMA.field(column).type)
    wrong = batch.set_column(index, field, pa.array([None], field.type))
    with pytest.raises(Malformed, match=column):
        check_batch(wrong)


def test_columns_in_another_order_are_refused() -> None:
    batch = batch_from_messages([MESSAGE])
    with pytest.raises(Malformed, match="columns"):
        check_batch(batch.select(list(reversed(BATCH_SCHEMA.names))))


def test_an_extra_column_is_refused() -> None:
    batch = batch_from_messages([MESSAGE])
    with pytest.raises(Malformed, match="columns"):
        check_batch(batch.append_column("extra", pa.array([1])))


def test_a_column_twice_is_refused() -> None:
    batch = batch_from_messages([MESSAGE])
    with pytest.raises(Malformed, match="columns"):
        check_batch(batch.append_column("payload", batch.column("payload")))


def test_a_wrong_batch_is_refused_before_its_first_message_is_asked_for() -> None:
    with pytest.raises(Malformed):
        messages_from_batch(batch_from_messages([]).drop_columns(["seq"]))
