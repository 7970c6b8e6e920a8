from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.batch import batch_from_messages
from penstock.core.message import Message
from penstock.protocols.lhhttt import encode_bytes, join_frames
from penstock.protocols.lhhttt._frames import join_columns
from penstock.protocols.lhhttt.runs import Run, RunMap, framed, merged, runs_of_batch


def _batch(numbers: list[int], payloads: list[bytes]) -> pa.RecordBatch:
    rows = zip(numbers, payloads, strict=True)
    return batch_from_messages([Message(n, 0, 0, 0, 0, None, None, data) for n, data in rows])


def _run(first: int, payloads: list[bytes]) -> Run:
    (run,) = runs_of_batch(_batch(list(range(first, first + len(payloads))), payloads))
    return run


@given(st.lists(st.binary(max_size=300), min_size=1), st.data())
def test_a_run_and_its_parts_are_framed_as_their_messages_are(
    payloads: list[bytes], data: st.DataObject
) -> None:
    low = data.draw(st.integers(0, len(payloads) - 1))
    high = data.draw(st.integers(low + 1, len(payloads)))
    part = _run(100, payloads).part(100 + low, 100 + high)
    wanted = payloads[low:high]
    assert (part.range, part.count) == ((100 + low, 100 + high), len(wanted))
    assert (part.size, part.payload()) == (sum(map(len, wanted)), wanted[0])
    assert framed(b"MSGS:", [part]) == encode_bytes(b"MSGS:" + join_frames(wanted))
    assert part.frames() == [encode_bytes(each) for each in wanted]


@given(st.lists(st.binary(max_size=30), min_size=1), st.integers(0, 500), st.integers(0, 20))
def test_a_run_knows_how_many_of_its_messages_fit(
    payloads: list[bytes], room: int, more: int
) -> None:
    run = _run(7, payloads)
    needed = [sum(map(len, payloads[:n])) + n * more for n in range(1, len(payloads) + 1)]
    assert run.count_within(room, more) == sum(each <= room for each in needed)
    for most in (1, len(payloads), len(payloads) + 5):
        sizes = [*map(len, payloads[:most]), 1000]
        wanted = next(n for n, size in enumerate(sizes) if size > room)
        assert run.count_below(room, most) == wanted


def test_a_batch_is_cut_into_runs_where_numbers_are_missing() -> None:
    batch = _batch([9, 3, 4, 5, 8, 9], [b"i", b"c", b"", b"e", b"hh", b"iii"])
    runs = list(runs_of_batch(batch.slice(1)))
    assert [run.range for run in runs] == [(3, 6), (8, 10)]
    assert framed(b"", runs) == encode_bytes(join_frames([b"c", b"", b"e", b"hh", b"iii"]))
    assert framed(b"none", []) == b"14none"
    assert [run.range for run in runs_of_batch(batch)] == [(9, 10), (3, 6), (8, 10)]
    assert list(runs_of_batch(batch.slice(0, 0))) == []


def test_columns_that_do_not_fit_together_are_refused() -> None:
    for places in ([], [0, 4], [2, 1], [-1, 1]):
        offsets = memoryview(pa.array(places, pa.int32()).buffers()[1] or b"")
        with pytest.raises(ValueError, match="fit"):
            join_columns(b"", [(offsets, b"abc")])


@given(st.data())
def test_a_map_of_runs_is_a_map_of_messages(data: st.DataObject) -> None:
    runs, model = RunMap(), dict[int, bytes]()
    for _ in range(data.draw(st.integers(1, 12))):
        first = data.draw(st.integers(0, 40))
        end = first + data.draw(st.integers(1, 12))
        numbers = range(first, end)
        if data.draw(st.booleans()) and not model.keys() & set(numbers):
            payloads = [b"%d" % number for number in numbers]
            runs.add(_run(first, payloads))
            model |= zip(numbers, payloads, strict=True)
        else:
            there = [number for number in numbers if number in model]
            found = list(runs.within(first, end))
            assert [n for run in found for n in range(*run.range)] == there
            taken = runs.take(first, end)
            assert [run.range for run in taken] == [run.range for run in found]
            wanted = [encode_bytes(model.pop(number)) for number in there]
            assert [frame for run in taken for frame in run.frames()] == wanted
        assert (runs.count, runs.size) == (len(model), sum(map(len, model.values())))
        lowest = runs.next()
        assert (lowest.first if lowest else None) == min(model, default=None)


def test_ranges_that_follow_each_other_are_one() -> None:
    assert merged([(5, 7), (1, 2), (7, 9), (2, 4)]) == [(1, 4), (5, 9)]
