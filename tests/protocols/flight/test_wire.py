"""The records of client and server: they read what they write, and refuse everything else."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.batch import batch_from_messages
from penstock.core.errors import Malformed
from penstock.core.message import Message
from penstock.core.overflow import DropReason
from penstock.core.position import Position
from penstock.protocols.flight import wire
from penstock.protocols.flight.wire import (
    MAX_RECORD,
    Failure,
    Hold,
    Kind,
    Lost,
    Mark,
    Outcome,
    Piece,
    Put,
    Record,
    Spot,
    Take,
    Told,
    WriterOpened,
    decode_name,
    encode_name,
    parse_ticket,
    payload_bytes,
    pieces_of,
)

ID = "0123456789abcdef" * 2
RECORDS: list[type[Record]] = [
    each
    for each in vars(wire).values()
    if isinstance(each, type) and issubclass(each, Record) and each is not Record
]

numbers = st.integers(0, 2**63 - 1)
marks = st.builds(Mark, epoch=st.integers(0, 2**64 - 1), seq=numbers)
labels = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
lost = st.builds(Lost, first=numbers, last=numbers, reason=st.sampled_from(DropReason))
tolds = st.builds(
    Told,
    mark=marks,
    end=numbers,
    filtered=numbers,
    restarts=numbers,
    lost=numbers,
    losses=st.lists(lost, max_size=5).map(tuple),
    more=st.booleans(),
)
takes = st.builds(
    Take,
    stream=labels,
    kind=st.sampled_from([*Kind, None]),
    options=st.dictionaries(labels, labels, max_size=4),
    reader=st.just(ID),
    at=st.none() | marks,
    wait=st.floats(0, 30),
    chunk=st.integers(1024, 1 << 30),
    hold=st.none() | labels,
    done=st.none() | marks,
)
failures = st.builds(
    Failure,
    kind=st.just("NotFound"),
    message=labels,
    hint=st.none() | labels,
    fields=st.dictionaries(labels, st.none() | labels | numbers, max_size=4),
)
outcomes = st.builds(
    Outcome,
    number=st.integers(1, 2**63 - 1),
    written=numbers,
    last_seq=st.none() | numbers,
    waited=st.floats(0, 1e9),
    failure=st.none() | failures,
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)


@given(tolds | takes | failures | outcomes)
def test_a_record_reads_what_it_wrote(record: Record) -> None:
    assert type(record).from_bytes(record.to_bytes()) == record


@given(takes)
def test_a_ticket_is_told_by_what_it_asks_for(take: Take) -> None:
    assert parse_ticket(take.to_bytes()) == take
    hold = Hold(stream="a", reader=ID, name="b", at=Spot(anchor="end"))
    assert parse_ticket(hold.to_bytes()) == hold


@given(st.binary(max_size=300), st.sampled_from(RECORDS))
def test_fuzz_bytes_that_are_no_record_are_malformed_and_nothing_else(
    data: bytes, kind: type[Record]
) -> None:
    for parse in (kind.from_bytes, parse_ticket):
        with pytest.raises(Malformed):
            parse(data)


@given(json_values, st.sampled_from(RECORDS))
def test_fuzz_other_json_is_malformed_and_nothing_else(value: Any, kind: type[Record]) -> None:
    try:
        kind.from_bytes(json.dumps(value).encode())
    except Malformed:
        pass
    else:  # the empty record is one, where every field has a default
        assert isinstance(value, dict)


@given(takes, st.data())
def test_fuzz_a_ticket_with_one_field_changed_is_read_or_malformed(
    take: Take, data: st.DataObject
) -> None:
    fields = json.loads(take.to_bytes())
    field = data.draw(st.sampled_from(sorted(fields)))
    fields[field] = data.draw(json_values)
    with contextlib.suppress(Malformed):
        assert isinstance(parse_ticket(json.dumps(fields).encode()), Take)


def test_release_0_1_is_sent_no_field_that_it_does_not_know_unless_it_matters() -> None:
    usual = WriterOpened(instance=ID, max_message=1)
    assert b"syncs" not in usual.to_bytes()
    unsynced = usual.model_copy(update={"syncs": False})
    assert WriterOpened.from_bytes(unsynced.to_bytes()) == unsynced


def test_a_record_that_is_too_long_is_not_even_parsed() -> None:
    with pytest.raises(Malformed, match=f"at most {MAX_RECORD}"):
        Told.from_bytes(b" " * (MAX_RECORD + 1))


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(Malformed):
        Told.from_bytes(b"[" * 50_000)


def test_another_version_is_refused_with_a_hint() -> None:
    with pytest.raises(Malformed) as caught:
        Put.from_bytes(json.dumps({"v": 2, "writer": ID, "instance": ID, "attempt": 1}).encode())
    assert "another version" in str(caught.value.hint)


@pytest.mark.parametrize(
    "change",
    [
        {"reader": "short"},
        {"reader": ID + "\n"},
        {"reader": ID.upper()},
        {"stream": ""},
        {"stream": "x" * 4000},
        {"wait": -1},
        {"wait": 1e300},
        {"wait": "Infinity"},
        {"chunk": 0},
        {"chunk": 1 << 40},
        {"at": {"epoch": -1, "seq": 0}},
        {"at": {"epoch": 0, "seq": 2**63}},
        {"at": {"epoch": 0, "seq": True}},
        {"options": {f"o{i}": "" for i in range(65)}},
        {"options": {"a": 1}},
        {"kind": "psi"},
        {"extra": 1},
    ],
)
def test_a_value_out_of_its_limits_is_malformed(change: dict[str, Any]) -> None:
    good = {"call": "take", "stream": "a", "reader": ID}
    assert isinstance(parse_ticket(json.dumps(good).encode()), Take)
    with pytest.raises(Malformed):
        parse_ticket(json.dumps(good | change).encode())


def test_a_thousand_losses_fit_into_a_record() -> None:
    big = 2**63 - 1
    many = tuple(Lost(first=big, last=big, reason=DropReason.OVERFLOW_OLDEST) for _ in range(1000))
    told = Told(mark=Mark(epoch=2**64 - 1, seq=big), end=big, lost=1000, losses=many)
    assert Told.from_bytes(told.to_bytes()) == told


@given(st.binary(min_size=1, max_size=50).filter(lambda name: b"\0" not in name))
def test_a_name_of_any_bytes_travels_as_ascii(name: bytes) -> None:
    path = name.decode(errors="surrogateescape")
    assert encode_name(path).isascii()
    assert decode_name(encode_name(path)) == path


def test_a_name_is_decoded_once() -> None:
    assert decode_name("%252e%252e") == "%2e%2e"


@pytest.mark.parametrize(
    "position",
    [Position.START, Position.END, Position.LAST, Position.sequence(7), Position.time(9)],
)
def test_a_position_arrives_as_it_was(position: Position) -> None:
    assert Spot.of(position).position() == position


def test_a_piece_says_what_is_to_be_done() -> None:
    assert Piece.from_bytes(b'{"number": 1}') == Piece(number=1)
    with pytest.raises(Malformed):
        Piece.from_bytes(b'{"number": 0}')


# --- batches --------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.none() | st.integers(0, 500)), max_size=40),
    st.integers(200, 5000),
)
def test_pieces_hold_all_messages_in_order_within_the_limit(
    sizes: list[tuple[int, int | None]], limit: int
) -> None:
    messages = [
        Message(i, i, i, 0, 0, None, None if own is None else bytes(own), bytes(size))
        for i, (size, own) in enumerate(sizes)
    ]
    batch = batch_from_messages(messages)
    pieces = list(pieces_of(batch, limit))
    assert pa.Table.from_batches(pieces).equals(pa.Table.from_batches([batch]))
    assert all(piece.nbytes <= limit or piece.num_rows == 1 for piece in pieces)
    assert sum(map(payload_bytes, pieces)) == sum(size for size, _ in sizes)
