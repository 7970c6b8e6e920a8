"""Readers, writers and endpoints say what they can do; asked, they are typed as what they can."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

import pytest

from penstock import (
    Batch,
    InPlaceReader,
    InPlaceWriter,
    InvalidOption,
    Message,
    Position,
    Reader,
    Replayable,
    Unsupported,
    Writer,
    find_streams,
    open_reader,
    open_writer,
)
from penstock.core.capabilities import AppendOnce, Held, Listable
from penstock.core.endpoints import endpoint_of
from penstock.core.errors import CursorInUse
from penstock.core.interfaces import Bounds
from penstock.core.provenance import Commit
from penstock.core.url import URL
from penstock.protocols.flight import FlightServer, ServerOptions

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

OF_READERS = (Replayable, Held, InPlaceReader)


@pytest.mark.parametrize(
    ("url", "can"),
    [
        ("fmq:{}/q", {Replayable, Held, InPlaceReader, InPlaceWriter}),
        ("fmq:{}/q?compress=zstd", {Replayable, Held}),
        ("fmq:{}/q?layout=classic", {Replayable}),
        ("log:{}/l", {Replayable, Held, InPlaceReader, InPlaceWriter}),
        ("log:{}/l?compress=lz4", {Replayable, Held}),
    ],
)
def test_a_reader_and_a_writer_say_what_they_can_do(
    tmp_path: Path, url: str, can: set[type[object]]
) -> None:
    url = url.format(tmp_path)
    with open_writer(url) as writer, open_reader(url.partition("?")[0]) as reader:
        assert {kind for kind in OF_READERS if isinstance(reader, kind)} == can - {InPlaceWriter}
        assert isinstance(writer, InPlaceWriter) == (InPlaceWriter in can)
        assert isinstance(reader, Reader)
        assert isinstance(writer, Writer)


@pytest.mark.parametrize(
    ("url", "can"),
    [
        ("fmq:/x", {AppendOnce, Listable}),
        ("log:/x", {AppendOnce, Listable}),
        ("flight://host/x", {AppendOnce, Listable}),
        ("latest:/x", {Listable}),
        ("fmqp://host/x", set()),
        ("psi://host/x", set()),
        ("up+mqtt://host/?topic=x", set()),
    ],
)
def test_an_endpoint_says_what_it_can_do(url: str, can: set[type[object]]) -> None:
    assert {kind for kind in (AppendOnce, Listable) if isinstance(endpoint_of(url), kind)} == can


def test_what_was_asked_for_is_typed(tmp_path: Path) -> None:
    """Checked by mypy as much as by running it."""
    with open_writer(f"fmq:{tmp_path}/q") as writer:
        assert not TYPE_CHECKING or writer.reserve  # type: ignore[attr-defined]
        assert isinstance(writer, InPlaceWriter)
        with writer.reserve(4, type=7) as place:
            assert_type(place.buffer, memoryview)
            place.buffer[:] = b"made"
        assert_type(writer.reserve(4).commit(2), int)
    with open_reader(f"fmq:{tmp_path}/q", hold="me") as reader:
        assert isinstance(reader, InPlaceReader)
        lent: AbstractContextManager[Message | None] = reader.view(timeout=0)
        with lent as message:
            assert message is not None
            assert bytes(message.payload) == b"made"
        with reader.view_batch(10) as batch:
            assert_type(batch, Batch)
            assert len(batch) == 1
        assert isinstance(reader, Held)
        assert_type(reader.hold, "str | None")
        assert isinstance(reader, Replayable)
        assert_type(reader.bounds(), Bounds)


def test_what_is_compressed_cannot_be_used_in_place(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/l"
    with open_writer(f"{url}?compress=lz4") as writer, pytest.raises(Unsupported, match="in place"):
        writer.reserve(4)  # type: ignore[attr-defined]


def test_a_log_is_held_by_the_same_word_as_a_queue(tmp_path: Path) -> None:
    url = f"log:{tmp_path}/l"
    with open_writer(f"{url}?hold=archive") as writer:
        writer.write_many([b"1", b"2", b"3"])
    with open_reader(url, hold="archive") as reader:
        assert isinstance(reader, Held)
        assert reader.hold == "archive"
        assert reader.read(0) is not None
        with pytest.raises(CursorInUse):
            open_reader(url, cursor="archive")
    with open_reader(url, cursor="archive") as reader:  # the word of before names the same place
        assert isinstance(reader, Held)
        assert [message.seq for message in reader.available()] == [1, 2]
    for both in ({"hold": "a,b"}, {"hold": "a", "cursor": "b"}):
        with pytest.raises(InvalidOption, match="a reader has one name"):
            open_reader(url, **both)
    assert open_reader(url).hold is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["fmq", "log"])
def test_streams_are_found_by_a_pattern(tmp_path: Path, kind: str) -> None:
    for name in ("a1", "a2%", "b"):
        open_writer(f"{kind}:{tmp_path}/d/{name.replace('%', '%25')}").close()
    found = [f"{kind}:{tmp_path}/d/a1?trace=false", f"{kind}:{tmp_path}/d/a2%25?trace=false"]
    assert find_streams(f"{kind}:{tmp_path}/d/a*?trace=false") == found
    for url in found:
        open_reader(url).close()
    with FlightServer(ServerOptions(root=tmp_path, port=0)) as server:
        found = find_streams(f"{server.url}d/a*?retry=1")
        assert found == [f"{server.url}d/{name}?retry=1" for name in ("a1", "a2%25")]
        for url in found:
            open_reader(url).close()
        assert find_streams(f"{server.url}*") == []
        assert find_streams(f"{server.url}d/b") == [f"{server.url}d/b"]


@pytest.mark.parametrize("layout", ["layout=wide", "layout=classic", None])
def test_what_a_writer_wrote_is_looked_at_by_its_own_url(
    tmp_path: Path, layout: str | None
) -> None:
    url = f"log:{tmp_path}/x?sync=batch&hold=me" if layout is None else f"fmq:{tmp_path}/x?{layout}"
    endpoint = endpoint_of(url)
    assert isinstance(endpoint, AppendOnce)
    assert not endpoint.has_batches(URL.parse(url))
    assert endpoint.noted(URL.parse(url), Commit("q", 0)) is None
    with open_writer(url) as writer:
        writer.write(b"1")
        with endpoint.reread(URL.parse(url)) as reader:
            assert isinstance(reader, Replayable)
            assert [message.payload for message in reader.available()] == [b"1"]
            assert reader.bounds().end == 1
            reader.seek(Position.END)
