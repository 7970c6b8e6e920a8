"""Do the bytes of a record say what was stored?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.message import Message
from penstock.dispatch.outbox import Entry, Item
from penstock.dispatch.outbox.log import Columns, decode, encode, items_of, key_of

WORDS = st.integers(0, (1 << 64) - 1)


def _stored(payload: bytes) -> Message:
    return Message(7, 0, 0, 1, 0, None, None, payload)


@given(WORDS, WORDS, WORDS, WORDS, st.integers(0, 255), st.binary(), st.none() | WORDS)
def test_a_record_gives_back_what_it_was_made_of(
    arrival: int, expires: int, stored: int, source: int, kind: int, raw: bytes, key: int | None
) -> None:
    entry = Entry(3, 0, expires, source, kind, raw)
    columns = Columns.of([entry])._replace(arrivals=[arrival])
    (payload,) = encode(columns, stored, key)
    keys: dict[int, int] = {}
    item = decode(_stored(payload), keys)
    assert item == Item(3, 7, arrival, expires, stored, source, kind, raw)
    assert [item] == items_of(columns, 7, stored)
    assert type(item) is Item
    assert keys == ({} if key is None else {7: key})


@given(st.binary(max_size=60))
def test_other_bytes_are_no_record_or_one_without_harm(payload: bytes) -> None:
    item = decode(_stored(payload), {})
    assert item is None or payload.endswith(item.raw)


def test_the_layout_on_the_disk_is_this() -> None:
    (payload,) = encode(Columns.of([Entry(3, 1, 2, 4, 5, b"raw")]), 3, 6)
    words = (1, 2, 3, 4, 5 | 1 << 8 | 3 << 16, 6)
    assert payload == b"".join(word.to_bytes(8, "little") for word in words) + b"raw"


def test_a_key_is_a_number_of_64_bits() -> None:
    assert key_of(5) == 5
    assert key_of(b"speed") == key_of(b"speed") != key_of(b"gear")
    assert 0 <= key_of(-1) < 1 << 64
