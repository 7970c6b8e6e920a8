"""A stream that is removed is gone, and its users hear of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import Closed, NotFound
from penstock.queue.ownership import AlreadyOwned
from penstock.queue.stream_directory import StreamKind, list_streams, remove_stream
from penstock.queue.streams import InputStream, OutputStream
from support.streams import CREATORS, STREAM, payloads
from support.waiting import SOON


@CREATORS
def test_a_removed_stream_is_gone_and_can_be_made_anew(
    creator: type[OutputStream | InputStream], directory: str
) -> None:
    kind = StreamKind.OUTPUT if creator is OutputStream else StreamKind.INPUT
    made = creator.create(STREAM, owner="me")
    with pytest.raises(AlreadyOwned):
        remove_stream(STREAM, kind)
    made.remove()
    made.close()
    assert not any(Path(directory).iterdir())
    with pytest.raises(NotFound):
        remove_stream(STREAM, kind)
    creator.create(STREAM, owner="somebody else").close()
    remove_stream(STREAM, kind)
    assert not any(Path(directory).iterdir())


@CREATORS
def test_who_closed_a_stream_does_not_remove_that_of_its_next_creator(
    creator: type[OutputStream | InputStream], directory: str
) -> None:
    first = creator.create(STREAM, owner="me")
    first.close()
    with creator.create(STREAM, owner="somebody else") as second:
        with pytest.raises(AlreadyOwned, match="somebody else"):
            first.remove()
        assert second.stream in [state.stream for state in list_streams() if state.alive]
    first.remove()
    assert not any(Path(directory).iterdir())
    creator.create(STREAM, owner="somebody else").close()
    first.remove()
    assert list_streams(), "it was removed once, and this is another"


@CREATORS
def test_who_closed_a_stream_does_not_remove_the_one_that_was_made_anew_since(
    creator: type[OutputStream | InputStream],
) -> None:
    kind = StreamKind.OUTPUT if creator is OutputStream else StreamKind.INPUT
    first = creator.create(STREAM, owner="me")
    first.close()
    remove_stream(STREAM, kind)
    creator.create(STREAM, owner="somebody else").close()
    first.remove()
    assert [state.owner for state in list_streams()] == ["somebody else"]


def test_what_is_in_a_removed_stream_can_be_read_to_its_end_by_those_who_have_it() -> None:
    output = OutputStream.create(STREAM, owner="me")
    output.write_many([b"0", b"1"])
    with OutputStream.open(STREAM) as reader:
        output.remove()
        assert payloads(reader) == [b"0", b"1"]
        with OutputStream.create(STREAM, owner="somebody else") as again:
            again.write(b"anew")
            message = reader.read(SOON)
            assert message is not None
            assert message.payload == b"anew"
            assert reader.statistics().restarts == 1


def test_a_producer_hears_that_its_stream_was_removed() -> None:
    stream = InputStream.create(STREAM, owner="me")
    with InputStream.open(STREAM) as producer:
        producer.write(b"x")
        stream.remove()
        with pytest.raises(Closed):
            producer.write(b"y")
