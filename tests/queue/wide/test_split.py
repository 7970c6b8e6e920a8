"""Bytes are split into messages by the writer, as Python would split them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import open_reader, open_writer
from penstock.core.errors import MessageTooLarge
from penstock.core.json_lines import chunks_of
from penstock.queue.wide.writer import WideWriter

_ENDINGS = st.sampled_from([b"\n", b"\0", b"\r\n", b"aa", b"aba"])
_BYTES = st.text("ab\n\r\0", max_size=200).map(str.encode)


@pytest.mark.parametrize("options", ["", "?compress=zstd", "?layout=classic"])
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=_BYTES, ending=_ENDINGS)
def test_pieces_are_those_of_python(
    tmp_path: Path, options: str, data: bytes, ending: bytes
) -> None:
    url = f"fmq:{tmp_path}/queue"
    with open_writer(f"{url}{options}", create="always") as writer:
        last = writer.write_split(data, ending, 3, 4)
        assert writer.statistics().messages == len(data.split(ending))
        with open_reader(url) as reader:
            found = reader.read_many(1000)
    assert [message.payload for message in found] == data.split(ending)
    assert {(message.type, message.subtype) for message in found} == {(3, 4)}
    assert found[-1].seq == last


@pytest.mark.parametrize("options", ["", "?compress=zstd"])
def test_parts_are_those_at_the_places(tmp_path: Path, options: str) -> None:
    url = f"fmq:{tmp_path}/queue{options}"
    with open_writer(url) as writer, open_reader(url) as reader:
        assert isinstance(writer, WideWriter)
        assert writer.write_parts(b"abcdef", np.array([[1, 3], [2, 2], [0, 6]])) == 2
        assert [message.payload for message in reader.read_many(5)] == [b"bc", b"", b"abcdef"]
        assert writer.write_parts(b"abcdef", b"") is None


@pytest.mark.parametrize("place", [(-1, 2), (2, 1), (0, 7)])
def test_a_place_outside_of_the_data_is_refused(tmp_path: Path, place: tuple[int, int]) -> None:
    with open_writer(f"fmq:{tmp_path}/queue") as writer:
        assert isinstance(writer, WideWriter)
        with pytest.raises(ValueError, match="place"):
            writer.write_parts(b"abcdef", np.array([(0, 1), place]))
        assert (writer.statistics().messages, writer.statistics().refused) == (1, 1)


def test_a_piece_that_is_too_large_ends_it_and_the_books_add_up(tmp_path: Path) -> None:
    url = f"fmq:{tmp_path}/queue?size=64k&slots=64"
    with open_writer(url) as writer:
        with pytest.raises(MessageTooLarge):
            writer.write_split(b"a\nb\n" + bytes(70_000) + b"\nc\nd", b"\n")
        books = writer.statistics()
        assert (books.messages, books.bytes, books.refused) == (2, 2, 3)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=_BYTES, ending=_ENDINGS, at_once=st.integers(1, 50))
def test_a_file_is_split_as_a_whole_however_it_is_read(
    tmp_path: Path, data: bytes, ending: bytes, at_once: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.core.json_lines._READ", at_once)
        found = [piece for chunk in chunks_of(str(path), ending) for piece in chunk.split(ending)]
    expected = data.split(ending)
    assert found == (expected if expected[-1] else expected[:-1])
