from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidOption, Malformed
from penstock.protocols.psi import Truncated
from penstock.protocols.psi.wire import Cursor, check_int32, pack_short_text, pack_text

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(st.none() | TEXT, TEXT)
def test_texts_come_out_as_they_went_in(text: str | None, short: str) -> None:
    cursor = Cursor(pack_text(text) + pack_short_text(short), "test")
    assert cursor.optional_text("text") == text
    assert cursor.short_text("short") == short
    assert cursor.left == 0


@pytest.mark.parametrize("length", [0, 127, 128, 16383, 16384, 2_097_152])
def test_a_short_text_has_as_many_bytes_of_length_as_it_needs(length: int) -> None:
    data = pack_short_text("T" * length)
    groups = 1 if length < 128 else 2 if length < 16384 else 3 if length < 2_097_152 else 4
    assert len(data) == length + groups
    assert Cursor(data, "test").short_text("short") == "T" * length


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x7fabc", b"\x02a"]
)
def test_a_short_text_that_lies_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        Cursor(data, "test").short_text("short")


def test_what_is_not_there_is_truncated_and_not_utf_8_is_malformed() -> None:
    with pytest.raises(Truncated) as caught:
        Cursor(b"abc", "test").int32("number")
    assert (caught.value.needed, caught.value.there) == (4, 3)
    with pytest.raises(Malformed, match="UTF-8"):
        Cursor(b"\x01\xff", "test").short_text("short")
    with pytest.raises(Malformed):
        Cursor(b"\xff\xff\xff\xff", "test").text("text")


def test_what_cannot_be_told_is_not_sent() -> None:
    with pytest.raises(InvalidOption):
        pack_text("\ud800")
    with pytest.raises(InvalidOption):
        pack_short_text("\ud800")
    with pytest.raises(InvalidOption):
        check_int32("port", 2**31)
