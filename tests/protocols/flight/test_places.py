"""A name leads to a stream below the root, or nowhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock import create
from penstock.core.errors import InvalidOption, InvalidURL, NotFound
from penstock.protocols.flight.places import Root, check_size
from penstock.protocols.flight.wire import Kind, encode_name


@pytest.fixture
def root(tmp_path: Path) -> Root:
    folder = tmp_path / "root"
    folder.mkdir()
    create(f"fmq:{folder}/radar/beams?slots=8&size=4k")
    create(f"log:{folder}/radar/archive?segment=64k&segment_slots=16")
    create(f"fmq:{folder}/old?layout=classic&slots=8&size=4k")
    create(f"fmq:{tmp_path}/secret?slots=8&size=4k")
    return Root(folder)


def test_the_kind_is_what_is_there(root: Root) -> None:
    assert root.place("radar/beams", None).kind == "fmq"
    assert root.place("radar/archive", None).kind == "log"
    assert root.place("old", None).kind == "fmq"
    with pytest.raises(InvalidOption, match="of kind log"):
        root.place("radar/archive", Kind.QUEUE)


def test_what_is_missing_is_a_queue_unless_said_otherwise(root: Root) -> None:
    assert root.place("new", None, may_make=True).kind == "fmq"
    assert root.place("new", Kind.LOG, may_make=True).kind == "log"
    with pytest.raises(NotFound, match="no stream new"):
        root.place("new", None)


@pytest.mark.parametrize(
    "name",
    [
        "../secret", "radar/../../secret", "/etc/passwd", "", "/", "radar//beams", "./old",
        "%2e%2e/secret", "..%2fsecret", "radar%2f..%2f..%2fsecret", "a%00b", "a%0ab", "radar/",
        "radar/.", "x" * 300, "/".join("a" * 40), "y/" * 600 + "y", "%2fetc%2fpasswd",
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(root: Root, name: str) -> None:
    with pytest.raises(InvalidURL):
        root.place(name, None, may_make=True)


def test_a_name_is_decoded_once(root: Root) -> None:
    place = root.place("%252e%252e", None, may_make=True)
    assert place.path == root.folder / "%2e%2e"


@pytest.mark.parametrize("ending", ["", ".fmq", ".stat", ".buf"])
def test_a_link_out_of_the_root_is_refused(root: Root, ending: str) -> None:
    (root.folder / f"link{ending}").symlink_to(root.folder.parent / f"secret{ending}")
    with pytest.raises(InvalidURL, match="leads out"):
        root.place("link", None, may_make=True)


def test_a_directory_that_is_a_link_out_of_the_root_is_refused(root: Root) -> None:
    (root.folder / "up").symlink_to(root.folder.parent)
    with pytest.raises(InvalidURL, match="leads out"):
        root.place("up/secret", None)
    assert "secret" not in [place.name for place in root.streams()]


def test_a_link_within_the_root_is_followed(root: Root) -> None:
    (root.folder / "alias").symlink_to(root.folder / "radar")
    assert root.place("alias/beams", None).kind == "fmq"


def test_a_segment_that_is_a_link_is_refused(root: Root, tmp_path: Path) -> None:
    (root.folder / "radar/archive/00000000000000000900.fmq").symlink_to(tmp_path / "secret.fmq")
    with pytest.raises(InvalidURL, match="link"):
        root.place("radar/archive", None)


@pytest.mark.parametrize("name", ["shmem_10002", "radar/shmem_77"])
def test_shared_memory_is_not_below_the_root(root: Root, name: str) -> None:
    with pytest.raises(InvalidURL, match="shared memory"):
        root.place(name, None, may_make=True)


def test_a_segment_is_no_stream_of_its_own(root: Root) -> None:
    with pytest.raises(InvalidURL, match="inside of a log"):
        root.place(f"radar/archive/{0:020d}", None)


def test_streams_are_listed_by_name(root: Root) -> None:
    assert [place.name for place in root.streams()] == ["old", "radar/beams", "radar/archive"]


def test_a_name_with_bytes_that_are_no_text_works(root: Root) -> None:
    path = os.fsdecode(b"r\xffdar")
    create(f"fmq:{root.folder}/r%ffdar?slots=8&size=4k")
    assert root.place(encode_name(path), None).path == root.folder / path
    assert "r%FFdar" in [place.name for place in root.streams()]


def test_the_root_itself_is_not_told(root: Root) -> None:
    assert root.hide(f"no queue at {root.folder}/radar/x") == "no queue at radar/x"
    assert root.hide(f"looking at {root.folder}: refused") == "looking at the root: refused"


@pytest.mark.parametrize("option", ["size", "segment", "slots", "segment_slots"])
def test_a_stream_that_is_too_large_is_refused(option: str) -> None:
    check_size({option: "100"}, 1 << 20)
    with pytest.raises(InvalidOption, match="at most"):
        check_size({option: "10M"}, 1 << 20)


@pytest.mark.parametrize("prefix", ["", "segment_"])
def test_the_slots_of_a_stream_count_for_its_size(prefix: str) -> None:
    size, slots = prefix.rstrip("_") or "size", f"{prefix}slots"
    check_size({size: "512K", slots: "8000"}, 1 << 20)
    with pytest.raises(InvalidOption, match="slots included"):
        check_size({size: "512K", slots: "8193"}, 1 << 20)  # which are rounded up to 16384
